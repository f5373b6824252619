"""Delivered clocks of a job that uses some of its lease's GPUs, metered on a twin node."""

from __future__ import annotations

from collections.abc import Callable

import pynvml
import pytest

from tests.twin import TwinGpu, TwinNode
from tuner.search_spaces.configuration import Settings
from tuner.workload.node.measure.measurement import measurement, of_used_devices
from tuner.workload.node.measure.statistics import Window
from tuner.workload.node.meters.base import Reading, device_number
from tuner.workload.node.meters.nvml import NvmlMeter
from tuner.workload.records.probe import Measurement, PowerSample, UnappliedSetting, WindowPolicy

Make = Callable[..., TwinNode]
POLICY = WindowPolicy(min_s=1.0, max_s=20.0)


def window_on(node: TwinNode, clock_MHz: int, busy: int) -> Window:
    """Return a window of one second with the first `busy` GPUs at work, all locked."""
    pynvml.nvmlInit()
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        pynvml.nvmlDeviceSetGpuLockedClocks(handle, clock_MHz, clock_MHz)
        node.set(index, load=1.0 if index < busy else 0.0)
    meter = NvmlMeter(environ={}, clock=node.clock, sleep=node.sleep)
    opened = meter.boundary(opens=True)
    samples = []
    for _ in range(10):
        node.sleep(0.1)
        samples.append(meter.sample())
    closed = meter.read()
    meter.close()
    ends = tuple(opened.time_s + 0.1 * k for k in range(1, 11))
    return Window(opened, closed, (0.1,) * 10, ends, tuple(samples))


@pytest.mark.needs("cc")
def test_models_learn_the_clock_of_the_gpus_that_worked(twin_node: Make) -> None:
    hot = TwinGpu(limit_W=250.0)  # it holds the busy ones below the lock
    node = twin_node(*[hot] * 4)
    window = window_on(node, 1410, busy=2)
    told = measurement(Settings(clock_MHz=1410), window, POLICY, devices=range(2))
    assert isinstance(told, Measurement)
    truth_MHz = node.clock_MHz_s(0), node.clock_MHz_s(3)
    node.sleep(1.0)
    ran_MHz = node.clock_MHz_s(0) - truth_MHz[0]
    assert ran_MHz < 1200 < node.clock_MHz_s(3) - truth_MHz[1]  # the idle ones stand at the lock
    assert told.as_delivered["clock_MHz"] == pytest.approx(ran_MHz, rel=0.005)


@pytest.mark.needs("cc")
def test_idle_gpus_that_ignore_a_lock_do_not_cost_the_window(twin_node: Make) -> None:
    node = twin_node(*[TwinGpu(idle_follows=False)] * 4)
    window = window_on(node, 1200, busy=2)
    told = measurement(Settings(clock_MHz=1200), window, POLICY, devices=range(2))
    assert isinstance(told, Measurement)
    assert told.as_delivered == Settings(clock_MHz=1200)
    # Judged by all of the lease, the same window would be lost.
    assert isinstance(measurement(Settings(clock_MHz=1200), window, POLICY), UnappliedSetting)


def test_heat_and_throttling_of_idle_devices_are_none_of_the_jobs() -> None:
    extra = {
        "clock_MHz": 1050.0,
        "temperature_C": 90.0,
        "throttle_thermal": 1.0,
        "averaged_W": 500.0,
        **{"gpu0_power_W": 300.0, "gpu0_clock_MHz": 900.0, "gpu0_temperature_C": 60.0},
        **{"gpu0_throttle_thermal": 0.0, "gpu1_power_W": 70.0, "gpu1_clock_MHz": 1200.0},
        **{"gpu1_temperature_C": 90.0, "gpu1_throttle_thermal": 1.0},
    }
    (sample,) = of_used_devices([PowerSample(0.0, 370.0, extra)], [0])
    assert sample.power_W == 370.0  # the lease's
    assert sample.extra["clock_MHz"] == 900.0
    assert (sample.extra["temperature_C"], sample.extra["throttle_thermal"]) == (60.0, 0.0)
    assert sample.extra["averaged_W"] == 500.0
    assert not [name for name in sample.extra if device_number(name) == 1]


def test_a_power_limit_is_judged_by_all_devices_of_the_lease() -> None:
    one = {"gpu0_power_W": 240.0, "gpu1_power_W": 60.0, "gpu0_clock_MHz": 900.0}
    samples = tuple(PowerSample(0.1 * k, 300.0, one) for k in range(101))
    ends = tuple(float(k) for k in range(1, 11))
    window = Window(Reading(0.0, 0.0), Reading(10.0, 3000.0), (1.0,) * 10, ends, samples)
    live = Settings(power_limit_W=250)
    assert isinstance(measurement(live, window, POLICY, devices=[0]), Measurement)
