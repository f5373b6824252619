"""Windows of GPUs whose power falls slowly after work, and of those on which it only seems so."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.twin.energy import random_gpu
from benchmarks.twin.smoothing import GPU, RAMPS, window_of
from tests.twin import TwinGpu, TwinNode
from tuner.search_spaces.configuration import Settings
from tuner.workload.node.measure.measurement import measurement
from tuner.workload.node.measure.statistics import DOUBT_SHARE, Window
from tuner.workload.node.meters.base import Reading
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.records.probe import Measurement, WindowPolicy

pytestmark = pytest.mark.needs("cc")
PLAIN = replace(GPU, smoothing=-1)


@pytest.mark.parametrize(("rate", "hold_s"), RAMPS)
def test_power_that_falls_slowly_is_not_the_works(rate: float, hold_s: float) -> None:
    found = window_of(replace(GPU, ramp_W_per_s=rate, hold_s=hold_s))
    assert abs(found.error) < (0.01 if rate else 0.001)


@pytest.mark.parametrize(
    "change",
    [{"has_counter": False}, {"counter_period_s": 0.02}, {"peak_W": 1000.0, "idle_W": 150.0}],
    ids=str,
)
@pytest.mark.parametrize("rate", [0, 500])
def test_with_other_sensors_and_powers(change: dict[str, float], rate: float) -> None:
    limits = {"limit_W": 1200.0, "default_limit_W": 1200.0, "max_limit_W": 1200.0}
    gpu = replace(GPU, ramp_W_per_s=rate, **limits, **change)  # type: ignore[arg-type]
    assert abs(window_of(gpu).error) < 0.01


def test_without_smoothing_windows_are_as_short_as_before() -> None:
    found = window_of(PLAIN)
    assert found.length_s == pytest.approx(3.0, abs=0.11)
    assert found.doubt == 0.0
    assert abs(found.error) < 0.001


def test_a_source_that_lags_by_half_a_second_is_not_taken_for_a_ramp() -> None:
    """A slow filter looks like a ramp: the line stays that of the idle power, which cancels it.

    Only a device that says that it smooths its power is drawn from the early slope; here the
    window is longer, which is right for both.
    """
    found = window_of(replace(PLAIN, filter_s=0.5))
    assert found.length_s > 10
    assert abs(found.error) < 0.01


def test_a_ramp_of_which_the_device_says_nothing_is_flagged() -> None:
    found = window_of(replace(PLAIN, ramp_W_per_s=500))
    assert found.length_s == pytest.approx(15.0, abs=0.2)
    assert found.doubt > abs(found.error) > 0.01


def test_ordinary_sensors_leave_no_doubt() -> None:
    """Filters, lags and phases of random GPUs lengthen no window.

    The closing edge of the shortest window may be in doubt by a hundredth and a little more.
    """
    windows = [window_of(random_gpu(random.Random(seed), counted=True)) for seed in range(40)]
    doubts = sorted(found.doubt for found in windows)
    assert doubts[-2] < DOUBT_SHARE
    assert doubts[-1] < 1.02 * DOUBT_SHARE


@pytest.mark.parametrize(("doubt_J", "flags"), [(0.0, 0), (2.9, 0), (3.1, 1)])
def test_a_window_says_how_well_its_energy_is_known(doubt_J: float, flags: int) -> None:
    ends = tuple(0.1 * (i + 1) for i in range(30))
    window = Window(Reading(0.0, 0.0, doubt_J), Reading(3.0, 300.0), (0.1,) * 30, ends)
    made = measurement(Settings(), window, WindowPolicy(min_s=1.0))
    assert isinstance(made, Measurement)
    assert sum("power fell slowly" in flag for flag in made.flags) == flags


@pytest.mark.parametrize(("smoothing", "suffix"), [(1, " (power smoothing)"), (0, ""), (-1, "")])
def test_a_gpu_that_smooths_is_a_kind_of_its_own(
    twin_node: Callable[..., TwinNode], smoothing: int, suffix: str
) -> None:
    twin_node(TwinGpu(smoothing=smoothing))
    assert detect_cluster(environ={}).device.name == f"A100-SXM-80GB{suffix}"
