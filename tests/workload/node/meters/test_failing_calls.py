"""Calls of a vendor's library that fail once, and samples that fail otherwise than expected."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import pynvml
import pytest

from tests.twin import TwinGpu, TwinNode
from tuner.search_spaces.configuration import Settings
from tuner.workload.node.measure.measurement import measurement
from tuner.workload.node.measure.statistics import Window
from tuner.workload.node.meters.base import MeterError, Reading, Timeline
from tuner.workload.node.meters.nvml import NvmlMeter
from tuner.workload.records.probe import Measurement, PowerSample, WindowPolicy

Make = Callable[..., TwinNode]
COUNTER = "nvmlDeviceGetTotalEnergyConsumption"
A100 = TwinGpu(filter_s=0.05, sensor_period_s=0.1, counter_delay_s=0.02)


def window_error(node: TwinNode, code: int, first: int, times: int = 1) -> float:
    """Return the error of a window at whose closing edge calls of the counter fail."""
    with closing(NvmlMeter(environ={}, clock=node.clock, sleep=node.sleep)) as meter:
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


@pytest.mark.needs("cc")
@pytest.mark.parametrize("code", [999, 10, 19])
@pytest.mark.parametrize("first", [1, 2, 700])
def test_one_call_of_thousands_that_fails_costs_nothing(
    twin_node: Make, code: int, first: int
) -> None:
    assert abs(window_error(twin_node(A100, A100, A100, A100), code, first)) < 0.005


@pytest.mark.needs("cc")
@pytest.mark.parametrize(
    ("code", "times"), [(999, 10**6), (pynvml.NVML_ERROR_GPU_IS_LOST, 1), (16, 1), (4, 1)]
)
def test_a_gpu_that_fails_on_or_is_lost_is_told(twin_node: Make, code: int, times: int) -> None:
    """A second failure in a row, a lost GPU, one that needs a reset and a right that has gone."""
    with pytest.raises(MeterError, match="does not tell the GPUs' energy"):
        window_error(twin_node(A100), code, 5, times)


class Failing:
    """Meter one of whose samples raises what no meter should."""

    def __init__(self, error: Exception) -> None:
        self._error, self._samples = error, 0

    def sample(self) -> PowerSample:
        self._samples += 1
        if self._samples == 5:
            raise self._error
        return PowerSample(time.monotonic(), 100.0)


@pytest.mark.parametrize(
    "error",
    [
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "a bad name"),
        AttributeError("nvmlDeviceGetX"),
        OSError(5, "Input/output error"),
        KeyError("gfx_0_clk"),
        MeterError("GPU 0 is lost"),
    ],
)
def test_a_sample_that_fails_ends_no_timeline(error: Exception) -> None:
    timeline = Timeline(Failing(error), period_s=0.005)  # type: ignore[arg-type]
    while len(timeline.samples) < 10:
        time.sleep(0.005)
    timeline.stop()
    assert timeline.lost >= 1
    (sentence,) = timeline.errors
    assert sentence


def measured(sampled_s: list[float], *, independent: bool = True) -> Measurement:
    steps = tuple(0.1 for _ in range(30))
    ends = tuple(0.1 * (i + 1) for i in range(30))
    window = Window(Reading(0.0, 0.0), Reading(3.0, 300.0), steps, ends)
    window = replace(window, samples=tuple(PowerSample(at_s, 100.0) for at_s in sampled_s))
    made = measurement(Settings(), window, WindowPolicy(min_s=1.0), independent=independent)
    assert isinstance(made, Measurement)
    return made


@pytest.mark.parametrize(
    ("sampled_s", "flagged"),
    [
        ([0.1 * i for i in range(30)], False),
        ([0.1 * i for i in range(5)], True),  # the thread had ended
        ([0.1 * i for i in range(30) if not 10 < i < 16], False),  # some came late
        ([1.5], True),
        ([], True),
    ],
)
def test_a_window_with_half_of_its_samples_says_so(sampled_s: list[float], flagged: bool) -> None:
    flags = [flag for flag in measured(sampled_s).flags if "not sampled" in flag]
    assert bool(flags) == flagged


def test_a_meter_without_samples_is_not_blamed_for_them() -> None:
    assert not any("not sampled" in flag for flag in measured([], independent=False).flags)
