"""The NVML meter through the unmodified pynvml, on a twin node with imperfect sensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pynvml
import pytest

from benchmarks.twin.energy import random_gpu, window_error
from benchmarks.twin.smoothing import GPU, RAMPS, window_of
from tests.twin import TwinGpu, TwinNode
from tuner.workload.node.measure.statistics import DOUBT_SHARE
from tuner.workload.node.meters.base import MeterError
from tuner.workload.node.meters.nvml import Integral, NvmlMeter, Settling
from tuner.workload.node.platforms import detect_cluster

pytestmark = pytest.mark.needs("cc")
Metered = Callable[..., tuple[TwinNode, NvmlMeter]]

#: An H100 as published measurements found it (arXiv 2312.02741): filtered, sampled, late.
LATE = TwinGpu(
    idle_W=75.0,
    peak_W=690.0,
    limit_W=700.0,
    max_limit_W=700.0,
    filter_s=0.08,
    counter_delay_s=0.04,
    sensor_period_s=0.1,
    sensor_window_s=0.025,
)


@pytest.mark.parametrize("length_s", [0.5, 5.0])
def test_a_window_right_after_work_and_right_before_idling(
    metered: Metered, length_s: float
) -> None:
    node, meter = metered(LATE, LATE)
    node.set(load=1.0)
    node.sleep(2.0)
    node.set(load=0.0)  # the ranks wait at the boundary
    opened = meter.boundary(opens=True)
    assert opened.time_s == node.clock()  # the wait is before the window
    before_J, began_s = node.energy_J(), node.clock()
    node.set(load=0.9)
    node.sleep(length_s)
    node.set(load=0.0)
    truth_J, ended_s = node.energy_J() - before_J, node.clock()
    closed = meter.boundary(opens=False)
    assert (opened.time_s, closed.time_s) == (began_s, ended_s)  # and after it
    assert closed.energy_J - opened.energy_J == pytest.approx(truth_J, abs=2.0)
    assert node.clock() - ended_s < 1.0


def test_random_windows_under_filtered_power_and_a_lagging_counter() -> None:
    errors = [window for window in map(window_error, range(40)) if window.plain is not None]
    assert len(errors) > 25
    assert max(abs(window.error) for window in errors) < 0.005
    # The bare counter is far off, so these windows do ask something of the meter.
    assert max(abs(window.plain or 0.0) for window in errors) > 0.02


def test_a_card_with_one_second_averages_only_is_waited_for(metered: Metered) -> None:
    node, meter = metered(TwinGpu(has_counter=False, gpu_scope=0), sample_period_s=3600.0)

    def work(seconds: float) -> None:
        for _ in range(round(seconds / 0.05)):
            node.sleep(0.05)
            meter.read()

    node.set(load=1.0)
    work(2.0)
    node.set(load=0.0)
    opened = meter.boundary(opens=True)
    assert opened.lag_s > 1.0  # what a sample after the edge may still average
    before_J = node.energy_J()
    node.set(load=1.0)
    work(5.0)
    node.set(load=0.0)
    truth_J = node.energy_J() - before_J
    closed = meter.boundary(opens=False)
    assert closed.energy_J - opened.energy_J == pytest.approx(truth_J, rel=0.01)


def test_an_idle_counter_costs_a_boundary_less_than_half_a_second(metered: Metered) -> None:
    node, meter = metered(TwinGpu(counter_period_s=0.1))
    node.sleep(1.0)
    called_s = node.clock()
    meter.boundary(opens=False)
    assert node.clock() - called_s < 0.45


def test_a_counter_that_is_slower_than_usual_is_not_called_fast(metered: Metered) -> None:
    _, meter = metered(TwinGpu(counter_period_s=0.8))
    assert meter.resolution_s >= 0.5


def test_power_between_samples_is_their_mean_and_no_span_counts_twice() -> None:
    """Two threads read: the one that took its time first may be the second to sample."""
    powers_W = iter([100.0, 300.0, 300.0, 300.0])
    source = Integral(lambda: next(powers_W), 0.0)
    assert [source.energy_J(now_s) for now_s in (1.0, 0.9, 1.5)] == [200.0, 200.0, 350.0]


class TestSettling:
    def test_needs_two_spans_of_the_same_slope(self) -> None:
        settling = Settling()
        for time_s, energy_J in ((0.0, 0.0), (0.1, 30.0), (0.2, 37.0)):
            settling.add(time_s, energy_J)
        assert not settling.settled  # 300 W, then 70 W
        settling.add(0.3, 44.0)
        assert settling.settled
        assert settling.energy_J(-0.05) == pytest.approx(44.0 - 0.35 * 70.0)

    def test_tells_nothing_of_a_source_that_did_not_move(self) -> None:
        settling = Settling()
        assert (settling.settled, settling.energy_J(1.0)) == (False, None)
        settling.add(0.0, 5.0)
        assert (settling.settled, settling.energy_J(1.0)) == (False, None)


MODULE_ONLY = {"gpu_scope": 0, "module_W": 120.0, "counter_is_module": True}


@pytest.mark.parametrize(
    ("name", "told", "refused"),
    [
        ("NVIDIA GB200", {**MODULE_ONLY, "usage_is_module": True}, True),
        ("NVIDIA GB300", {**MODULE_ONLY, "usage_is_module": True}, True),
        ("NVIDIA GB200", {}, False),  # whose driver tells the GPUs' own power
        ("NVIDIA GH200 480GB", {**MODULE_ONLY, "usage_is_module": True}, False),  # one GPU each
        ("NVIDIA GB2000", {**MODULE_ONLY, "usage_is_module": True}, False),
    ],
)
def test_a_module_of_two_gpus_is_not_counted_twice(
    twin_node: Callable[..., TwinNode], name: str, told: dict[str, Any], refused: bool
) -> None:
    """The sum over two GPUs of one module would hold its power twice."""
    node = twin_node(*(TwinGpu(name=name, **told) for _ in range(2)))
    if refused:
        with pytest.raises(MeterError, match="two GPUs share a module"):
            NvmlMeter(environ={}, clock=node.clock, sleep=node.sleep)
    else:
        NvmlMeter(environ={}, clock=node.clock, sleep=node.sleep).close()


COUNTER = "nvmlDeviceGetTotalEnergyConsumption"
A100 = TwinGpu(filter_s=0.05, sensor_period_s=0.1, counter_delay_s=0.02)


def error_of_failing(
    node: TwinNode, meter: NvmlMeter, code: int, first: int, times: int = 1
) -> float:
    """Return the error of a window at whose closing edge calls of the counter fail."""
    node.sleep(1)
    opened, true_J = meter.boundary(opens=True), -node.energy_J()
    node.set(load=1.0)
    node.sleep(3.0)
    node.set(load=0.0)
    true_J += node.energy_J()
    node.fail(COUNTER, code, first=first, times=times)
    closed = meter.boundary(opens=False)
    meter.read()
    return (closed.energy_J - opened.energy_J) / true_J - 1


@pytest.mark.parametrize("code", [999, 10, 19])
@pytest.mark.parametrize("first", [1, 2, 700])
def test_one_call_of_thousands_that_fails_costs_nothing(
    metered: Metered, code: int, first: int
) -> None:
    assert abs(error_of_failing(*metered(*[A100] * 4), code, first)) < 0.005


@pytest.mark.parametrize(
    ("code", "times"), [(999, 10**6), (pynvml.NVML_ERROR_GPU_IS_LOST, 1), (16, 1), (4, 1)]
)
def test_a_gpu_that_fails_on_or_is_lost_is_told(metered: Metered, code: int, times: int) -> None:
    """A second failure in a row, a lost GPU, one that needs a reset and a right that has gone."""
    with pytest.raises(MeterError, match="does not tell the GPUs' energy"):
        error_of_failing(*metered(A100), code, 5, times)


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
    gpu = replace(GPU, ramp_W_per_s=rate, **limits, **change)
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


@pytest.mark.parametrize(("smoothing", "suffix"), [(1, " (power smoothing)"), (0, ""), (-1, "")])
def test_a_gpu_that_smooths_is_a_kind_of_its_own(
    twin_node: Callable[..., TwinNode], smoothing: int, suffix: str
) -> None:
    twin_node(TwinGpu(smoothing=smoothing))
    assert detect_cluster(environ={}).device.name == f"A100-SXM-80GB{suffix}"
