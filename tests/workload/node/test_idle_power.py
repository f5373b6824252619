"""Idle power is measured on cool devices, and memory of ended ranks is waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.fake_clock import FakeClock
from tests.twin import TwinGpu, TwinNode
from tuner.workload.node.measure.window import IdlePower
from tuner.workload.node.meters.base import Reading
from tuner.workload.node.platforms.nvidia import Nvidia
from tuner.workload.node.probe_run import peak_bytes

GIB = 2**30


class Meter:
    """Draws 120 W when cool; what is read soon after work is 180 W."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock, self.energy_J, self.power_W = clock, 0.0, 120.0
        self.edges: list[bool] = []

    def boundary(self, *, opens: bool) -> Reading:
        self.edges.append(opens)
        return Reading(self.clock.now_s, self.energy_J)

    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.energy_J += seconds * self.power_W


def test_idle_power_is_measured_on_cool_devices() -> None:
    """Right after the ranks of a probe, devices are hot and at their highest clock."""
    clock = FakeClock(0.0)
    idle, meter = IdlePower(clock), Meter(clock)
    assert idle.measure(meter, 0.0, meter.wait) is None  # type: ignore[arg-type]
    assert idle.measure(meter, 0.3, meter.wait) == pytest.approx(120.0)  # type: ignore[arg-type]
    idle.was_busy()
    meter.power_W = 180.0
    clock.now_s += 3.0
    assert idle.measure(meter, 0.3, meter.wait) == pytest.approx(120.0)  # type: ignore[arg-type]
    assert meter.edges == [True, False]
    meter.power_W = 115.0
    clock.now_s += 8.0
    assert idle.measure(meter, 0.3, meter.wait) == pytest.approx(115.0)  # type: ignore[arg-type]


def test_a_meter_whose_clock_stands_still_tells_no_idle_power() -> None:
    clock = FakeClock(0.0)
    idle, meter = IdlePower(clock), Meter(clock)
    assert idle.measure(meter, 0.3, lambda seconds: None) is None  # type: ignore[arg-type]


@pytest.mark.needs("cc")
class TestMemory:
    def test_what_ranks_hold_outside_torchs_allocator_counts(
        self, twin_node: Callable[..., TwinNode]
    ) -> None:
        """The CUDA context, NCCL's and cuBLAS's buffers are part of the peak."""
        node = twin_node(TwinGpu(), TwinGpu())
        node.processes(0, compute=[(41, 30 * GIB), (900, GIB)])
        node.processes(1, compute=[(42, 31 * GIB)])
        assert Nvidia({}).memory_held([41, 42]) == 31 * GIB
        assert Nvidia({}).memory_held([7]) is None
        assert peak_bytes([{"device_bytes": 28 * GIB}], 31 * GIB) == 31 * GIB
        assert peak_bytes([{"host_bytes": 28 * GIB}], 31 * GIB) == 28 * GIB
        assert peak_bytes([{"device_bytes": 32 * GIB}], 31 * GIB) == 32 * GIB

    @pytest.mark.parametrize("listed", [True, False])
    def test_the_next_launch_waits_for_the_memory_of_the_last(
        self, twin_node: Callable[..., TwinNode], listed: bool
    ) -> None:
        """Unpinning takes longer than the kill, and the next ranks would not fit.

        In a container, where no process is listed, they would be refused as on a GPU in use.
        """
        node = twin_node(TwinGpu())
        node.processes(0, compute=[(41, 30 * GIB)] if listed else [])
        node.set(used_bytes=30 * GIB)
        clock = FakeClock(0.0)

        def sleep(seconds: float) -> None:
            clock.now_s += seconds
            if clock.now_s > 7.0:
                node.processes(0)

        waited_s = Nvidia({}).wait_for_release(clock=clock, sleep=sleep)
        assert waited_s == pytest.approx(7.1, abs=0.2)
        assert Nvidia({}).busy() == ()
        assert Nvidia({}).wait_for_release(clock=clock, sleep=sleep) == 0.0
        clock.now_s = 0.0
        node.processes(0, compute=[(900, GIB)])
        waited_s = Nvidia({}).wait_for_release(limit_s=5.0, clock=clock, sleep=sleep)
        assert waited_s == pytest.approx(5.1, abs=0.2)
