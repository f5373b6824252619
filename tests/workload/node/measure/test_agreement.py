"""Windows whose counter and sampled power differ, on twin GPUs in virtual time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.twin.smoothing import GPU
from tests.twin import TwinNode
from tuner.search_spaces.configuration import Settings
from tuner.workload.node.measure.measurement import (
    AgreedWindow,
    Agreement,
    Levels,
    difference,
    measurement,
)
from tuner.workload.node.measure.statistics import Window
from tuner.workload.node.measure.window import IdlePower, ProbeFailed
from tuner.workload.node.meters.base import Reading
from tuner.workload.node.meters.nvml import NvmlMeter
from tuner.workload.node.probe_run import SettingWindow
from tuner.workload.records.probe import (
    SEARCH_MIN_S,
    Failure,
    Measurement,
    PowerSample,
    WindowPolicy,
)

PLAIN = replace(GPU, smoothing=-1)
POLICY = WindowPolicy(min_s=SEARCH_MIN_S)
STEP_S = 0.1
MOST_W = 400.0


@dataclass
class Bench:
    """A twin GPU and its meter; `load` is the utilisation in each step."""

    node: TwinNode
    meter: NvmlMeter
    load: Callable[[int], float] = lambda step: 1.0
    windows: int = 0
    #: Energy that the GPU drew in the last window.
    true_J: float = math.nan

    def levels(self) -> Levels:
        samples: list[PowerSample] = []

        def wait(seconds: float) -> None:
            for _ in range(round(seconds / STEP_S)):
                self.node.sleep(STEP_S)
                samples.append(self.meter.sample())

        idle = IdlePower(self.node.clock)
        counted_W = idle.measure(self.meter, 0.5, wait, samples=lambda: samples)
        return Levels(counted_W, idle.sampled_W, MOST_W)

    def window(self, policy: WindowPolicy) -> Window:
        """Measure a window as long as the policy's shortest."""
        self.windows += 1
        opened, before_J = self.meter.boundary(opens=True), self.node.energy_J()
        ends, samples = list[float](), list[PowerSample]()
        for step in range(round(policy.min_s / STEP_S)):
            self.node.set(load=self.load(step))
            self.node.sleep(STEP_S)
            ends.append(self.node.clock())
            samples.append(self.meter.sample())
        self.true_J = self.node.energy_J() - before_J
        self.node.set(load=0.0)
        closed = self.meter.boundary(opens=False)
        return Window(opened, closed, (STEP_S,) * len(ends), tuple(ends), tuple(samples))

    def settle(self, agreement: Agreement) -> AgreedWindow:
        first = self.window(POLICY)
        return agreement.settle(first, POLICY, self.window)

    def error(self, agreed: AgreedWindow) -> float:
        return agreed.window.energy_J / self.true_J - 1


@pytest.fixture
def bench_of(metered: Callable[..., tuple[TwinNode, NvmlMeter]]) -> Callable[..., Bench]:
    return lambda gpu, **more: Bench(*metered(gpu, sample_period_s=3600.0), **more)


@pytest.mark.needs("cc")
class TestWrongSources:
    def test_a_counter_above_the_limit_is_not_used(self, bench_of: Callable[..., Bench]) -> None:
        bench = bench_of(replace(PLAIN, counter_share=1.3))
        agreed = bench.settle(Agreement(bench.levels()))
        assert bench.windows == 2
        assert abs(bench.error(agreed)) < 0.02
        assert "integrated power is used" in agreed.notes[0]
        assert "above the limit of 400 W" in agreed.notes[0]

    def test_a_sensor_that_stands_still_is_not_used(self, bench_of: Callable[..., Bench]) -> None:
        bench = bench_of(replace(PLAIN, sensor_stuck_W=60.0))
        agreed = bench.settle(Agreement(bench.levels()))
        assert abs(bench.error(agreed)) < 0.001
        assert not agreed.compared
        made = measurement(Settings(), agreed.window, POLICY, independent=agreed.compared)
        assert isinstance(made, Measurement)
        assert made.power_rse < 0.01  # the counter's error is not widened by a broken sensor

    def test_edges_that_count_idle_as_work_are_not_used(
        self, bench_of: Callable[..., Bench]
    ) -> None:
        """A fall of the power of which the device says nothing: fixed joules in each window."""
        bench = bench_of(replace(PLAIN, ramp_W_per_s=200))
        first = bench.window(POLICY)
        assert first.energy_J / bench.true_J - 1 > 0.1
        agreed = bench.settle(Agreement(bench.levels()))
        assert abs(bench.error(agreed)) < 0.02
        assert "that was drawn at work" in agreed.notes[0]

    @pytest.mark.parametrize("share", [0.93, 1.05])
    def test_of_two_scales_neither_is_chosen(
        self, bench_of: Callable[..., Bench], share: float
    ) -> None:
        """Both lie between idle and limit: the counter is used, its error says how far they are."""
        bench = bench_of(replace(PLAIN, counter_share=share))
        agreement = Agreement(bench.levels())
        agreed = bench.settle(agreement)
        assert agreed.notes == ()
        assert bench.error(agreed) == pytest.approx(share - 1, abs=0.01)
        assert bench.windows == 2
        for _ in range(5):  # what is known costs no further window
            bench.settle(agreement)
        assert bench.windows == 7


@pytest.mark.needs("cc")
class TestGoodWindows:
    @pytest.mark.parametrize(
        "load",
        [
            lambda step: 1.0,
            lambda step: 0.1,
            lambda step: 0.0,
            lambda step: float(step % 2),
            lambda step: 0.4 + 0.6 * (step // 5 % 2),
            lambda step: random.Random(step).random(),
            lambda step: min(1.0, 0.2 + step / 30),
        ],
        ids=["work", "little", "none", "each step", "waves", "random", "rising"],
    )
    @pytest.mark.parametrize(
        "change",
        [
            {},
            {"sensor_window_s": 0.1},
            {"filter_s": 0.2},
            {"sensor_period_s": 0.5},
            {"gpu_scope": 0},
        ],
        ids=str,
    )
    def test_loads_that_vary_are_measured_twice_at_most(
        self, bench_of: Callable[..., Bench], load: Callable[[int], float], change: dict[str, float]
    ) -> None:
        """The sampled power may be too coarse for the load; the counter stays the truth."""
        bench = bench_of(replace(PLAIN, **change), load=load)
        agreement = Agreement(bench.levels())
        for _ in range(3):
            agreed = bench.settle(agreement)
            assert not any("integrated power is used" in note for note in agreed.notes)
            assert abs(bench.error(agreed)) < 0.02
        assert bench.windows <= 6

    def test_a_window_that_agrees_is_used_as_it_is(self, bench_of: Callable[..., Bench]) -> None:
        bench = bench_of(PLAIN)
        agreement = Agreement(bench.levels())
        first = bench.window(POLICY)
        assert agreement.settle(first, POLICY, bench.window) == AgreedWindow(first)
        assert bench.windows == 1


def _window(energy_J: float, powers_W: list[float], length_s: float = 3.0) -> Window:
    samples = tuple(
        PowerSample((i + 0.5) * length_s / len(powers_W), power_W)
        for i, power_W in enumerate(powers_W)
    )
    ends = tuple(0.1 * (i + 1) for i in range(round(10 * length_s)))
    return Window(Reading(0.0, 0.0), Reading(length_s, energy_J), (0.1,) * len(ends), ends, samples)


def _never(policy: WindowPolicy) -> Window:
    raise AssertionError("it was measured again")


class TestTheRule:
    def test_samples_too_few_or_too_rough_say_nothing(self) -> None:
        assert difference(_window(900.0, [100.0, 400.0])) == 0.0
        assert difference(_window(900.0, [100.0, 400.0, 100.0, 400.0])) == 0.0
        assert difference(_window(900.0, [])) == 0.0
        assert difference(_window(0.0, [300.0] * 30)) == 0.0
        assert difference(_window(900.0, [309.0] * 30)) == pytest.approx(0.03)
        assert difference(_window(900.0, [303.0] * 30)) == 0.0

    def test_without_time_nothing_is_measured_again(self) -> None:
        broken = _window(900.0, [500.0] * 30)
        assert Agreement(Levels(most_W=400.0)).settle(broken, POLICY, None).window is broken
        agreed = Agreement(Levels(most_W=250.0)).settle(_window(900.0, [200.0] * 30), POLICY, None)
        assert agreed.window.energy_J == pytest.approx(600.0)

    def test_a_window_that_is_beaten_early_stays_short(self) -> None:
        beaten = replace(_window(900.0, [200.0] * 30), beaten_by=(0.05, 10.0))
        assert Agreement(Levels()).settle(beaten, POLICY, _never).window is beaten

    def test_both_contradicted_is_as_neither(self) -> None:
        window = _window(1500.0, [450.0] * 30)
        agreed = Agreement(Levels(most_W=400.0)).settle(window, POLICY, lambda policy: window)
        assert agreed == AgreedWindow(window)


class Conductor:
    """Gives these windows one after the other; one that is an error ends the probe."""

    def __init__(self, *windows: Window | ProbeFailed) -> None:
        self.left, self.policies = list(windows), list[WindowPolicy]()

    def measure(self, meter: Any, policy: WindowPolicy, *_: Any, **__: Any) -> Window:
        self.policies.append(policy)
        found = self.left.pop(0)
        if isinstance(found, ProbeFailed):
            raise found
        return found


def agreed(conductor: Conductor, *, independent: bool = True, left_s: float = 100.0) -> Any:
    kept: list[AgreedWindow] = []
    meter = SimpleNamespace(info=SimpleNamespace(independent=independent))
    setting = SettingWindow(conductor, meter, SimpleNamespace(samples=()))
    try:
        found = setting.agreed(
            Agreement(Levels(most_W=400.0)), POLICY, 0.1, left_s=left_s, keep=kept.append
        )
    except ProbeFailed as failed:
        return kept, failed
    return kept, found


DIFFERS = _window(990.0, [300.0] * 30)  # 10 % above its samples
AGREES = _window(1800.0, [300.0] * 60, 6.0)


def test_it_is_measured_again_over_twice_the_time() -> None:
    conductor = Conductor(DIFFERS, AGREES)
    assert agreed(conductor) == ([], AgreedWindow(AGREES))
    assert [policy.min_s for policy in conductor.policies] == [3.0, 6.0]


@pytest.mark.parametrize(
    ("window", "more"),
    [
        (_window(905.0, [300.0] * 30), {}),  # which agree
        (DIFFERS, {"independent": False}),  # one source only
        (DIFFERS, {"left_s": 11.0}),  # the probe's time is nearly up
    ],
)
def test_it_is_not_measured_again_without_reason_or_time(
    window: Window, more: dict[str, Any]
) -> None:
    conductor = Conductor(window)
    assert agreed(conductor, **more) == ([], AgreedWindow(window))


def test_a_program_that_ends_meanwhile_loses_no_window() -> None:
    ended = ProbeFailed(Failure("ended", "the program ended by itself"))
    kept, failed = agreed(Conductor(DIFFERS, ended))
    assert kept == [AgreedWindow(DIFFERS)]
    assert failed is ended
