"""The NVML meter through the unmodified pynvml, on a twin node with imperfect sensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.twin.energy import window_error
from tests.twin import TwinGpu, TwinNode
from tuner.workload.node.meters import MeterError
from tuner.workload.node.meters.nvml import NvmlMeter, Settling

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
