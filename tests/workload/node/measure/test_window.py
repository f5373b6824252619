"""The window against ranks that follow a script, and what is made of it."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.support.fake_clock import FakeClock
from tests.support.scripted_ranks import ScriptedClock, ScriptedMeter, ScriptedRanks
from tuner.search_spaces.configuration import Settings
from tuner.workload.node.measure.measurement import measurement
from tuner.workload.node.measure.statistics import (
    FIRST_LOOK_S,
    Z90,
    Window,
    beaten_by,
    block_edges,
    block_powers,
    compilation_s,
    integrate,
    seconds_a_step,
    standard_error,
    within,
)
from tuner.workload.node.measure.window import (
    WARM_BLOCKS_MAX,
    Conductor,
    DeviceWatch,
    IdlePower,
    ProbeFailed,
    WarmUp,
    _with_mean_losses,
    most_steps,
    settled,
)
from tuner.workload.node.meters.base import LAG_S, MeterError, Reading
from tuner.workload.node.rank_messages import Event
from tuner.workload.records.probe import (
    Failure,
    Measurement,
    PowerSample,
    ProbeRequest,
    WindowPolicy,
)

POLICY = WindowPolicy(min_s=5.0, min_steps=3, max_s=15.0, target_se=0.01)


def noise(scale: float, seed: int = 0) -> Callable[[object], float]:
    """A fixed random factor around 1 for each argument."""

    def factor(key: object) -> float:
        return 1.0 + scale * random.Random(f"{seed} {key}").gauss(0.0, 1.0)

    return factor


class Scene:
    """A conductor with scripted ranks and a scripted meter on one clock, its first step done."""

    def __init__(
        self,
        step_s: Callable[[int], float] = lambda n: 0.25,
        power_W: Callable[[float], float] = lambda now_s: 300.0,
        *,
        marks: tuple[str, ...] = (),
        compiles: dict[int, float] | None = None,
        lag_s: float = 0.0,
        counter: float = 1.0,
        extra: Callable[[float], dict[str, float]] = lambda now_s: {},
        deadline_s: float = 1e6,
        steps: float = math.inf,
        most_steps: Callable[[float], int] | None = None,
    ) -> None:
        self.clock = ScriptedClock()
        self.ranks = ScriptedRanks(
            self.clock, step_s, marks=marks, lag_s=lag_s, compiles=compiles, steps=steps
        )
        self.conductor = Conductor(
            self.ranks,
            deadline_s=self.clock() + deadline_s,
            explain_exit=lambda rank, code: Failure("crash", f"{rank} {code}"),
            most_steps=most_steps,
            clock=self.clock,
        )
        self.meter = ScriptedMeter(self.clock, power_W, counter=counter, extra=extra)
        self.conductor.first_step()

    def measure(self, policy: WindowPolicy = POLICY, step_time_s: float = 0.25) -> Window:
        return self.conductor.measure(self.meter, policy, step_time_s, samples=self.meter.samples)


class TestAProgramThatEndsTooEarly:
    def probe(self, steps: float, step_s: Callable[[int], float], policy: WindowPolicy) -> str:
        """Probe two settings of a program that trains so many steps; return the failure."""
        scene = Scene(step_s, steps=steps, most_steps=partial(most_steps, policy, 2))
        try:
            step_time_s = scene.conductor.warm_up().step_time_s
            for _ in range(3):  # and the first once more, for drift
                scene.conductor.settle(policy.settle_s, step_time_s)
                scene.measure(policy, step_time_s)
        except ProbeFailed as failed:
            return failed.failure.message
        return ""

    @pytest.mark.parametrize(
        "step_s",
        [
            lambda n: 0.001,
            lambda n: 0.3,
            lambda n: 7.0,
            lambda n: 60.0,
            lambda n: 30.0 if n < 4 else 0.5,  # it compiles first
            lambda n: 0.2 * noise(0.3)(n),
        ],
    )
    @pytest.mark.parametrize(
        "policy", [POLICY, WindowPolicy(settle_s=0.0, min_s=0.5, max_s=1.0, min_steps=9)]
    )
    def test_the_number_that_it_is_told_is_enough(
        self, step_s: Callable[[int], float], policy: WindowPolicy
    ) -> None:
        told: set[int] = set()
        for steps in (2, 3, 5, 9):
            message = self.probe(steps, step_s, policy)
            assert message.startswith(f"the program ended by itself after {steps} optimizer steps")
            if number := re.search(r"give it at least ([\d,]+) steps", message):
                told.add(int(number[1].replace(",", "")))
                assert max(told) > steps
        assert self.probe(max(told), step_s, policy) == ""

    @pytest.mark.parametrize(
        ("settle_s", "settings", "step_time_s", "steps"),
        [
            # The first, the warm-up, and a visit each: settling, its window, and the step after.
            (2.0, 2, 0.5, 1 + 20 + 3 * (4 + 30 + 1)),
            (0.0, 2, 0.5, 1 + 20 + 3 * (30 + 1)),
            (2.0, 1, 0.5, 1 + 20 + (4 + 30 + 1)),  # one setting has no drift to check
            (2.0, 2, 0.01, 1 + 20 * 20 + 3 * (200 + 1500 + 1)),
            (2.0, 2, 60.0, 1 + 2 + 3 * (1 + 3 + 1)),  # by the steps that a window has at least
        ],
    )
    def test_the_number_counts_every_part_of_a_probe(
        self, settle_s: float, settings: int, step_time_s: float, steps: int
    ) -> None:
        policy = WindowPolicy(settle_s=settle_s, min_s=5.0, min_steps=3, max_s=15.0)
        assert most_steps(policy, settings, step_time_s) == steps

    @pytest.mark.parametrize(
        ("steps", "step_s", "took"),
        [
            (4000, lambda n: 0.0007, "in 2.8 s"),
            (20, lambda n: 0.5, "in 9.5 s"),
            (300, lambda n: 2.0 if n < 2 else 0.001, "in 0.3 s"),  # after a long first step
            (119, lambda n: 0.5, "in 59 s"),
        ],
    )
    def test_a_training_of_seconds_is_not_worth_tuning(
        self, steps: int, step_s: Callable[[int], float], took: str
    ) -> None:
        message = self.probe(steps, step_s, WindowPolicy(settle_s=0.0, min_s=80.0, max_s=80.0))
        assert message.startswith(
            f"the program ended by itself after {steps:,} optimizer steps {took}, before the "
            "measurement was complete: a training as short as this is not worth tuning; if it "
            "stands for a longer one, give it at least "
        )

    @pytest.mark.parametrize(("steps", "step_s"), [(121, 0.5), (3, 40.0)])
    def test_a_longer_one_is(self, steps: int, step_s: float) -> None:
        policy = WindowPolicy(settle_s=0.0, min_s=200.0, max_s=200.0)
        message = self.probe(steps, lambda n: step_s, policy)
        assert message.startswith(f"the program ended by itself after {steps} optimizer steps, be")
        assert "worth" not in message

    @pytest.mark.parametrize(("steps", "step_s"), [(120, 0.5), (60, 1.0), (6000, 0.01)])
    def test_a_minute_is_enough_for_a_window_of_20_s(self, steps: int, step_s: float) -> None:
        scene = Scene(lambda n: step_s, steps=steps)
        step_time_s = scene.conductor.warm_up().step_time_s
        window = scene.measure(WindowPolicy(min_s=20.0, max_s=20.0), step_time_s)
        assert sum(window.step_times_s) >= 19.5

    def test_one_step_tells_of_no_number(self) -> None:
        assert self.probe(1, lambda n: 1.0, POLICY) == (
            "the program ended by itself after 1 optimizer step, before the measurement was "
            "complete; give it more steps"
        )

    def test_it_may_end_before_its_first_step(self) -> None:
        with pytest.raises(
            ProbeFailed, match=r"^the program ended by itself without an optimizer step$"
        ):
            Scene(steps=0)

    def test_its_number_is_by_the_fastest_steps(self) -> None:
        scene = Scene(
            lambda n: 2.0 if n < 6 else 0.5 if n < 10 else 1.0,
            steps=20,
            most_steps=lambda step_time_s: round(1000 * step_time_s),
        )
        for _ in range(3):
            scene.conductor.run(4)
        with pytest.raises(ProbeFailed, match="give it at least 500 steps"):
            scene.conductor.run(40)

    def test_when_all_ranks_have_ended_nothing_more_is_waited_for(self) -> None:
        scene = Scene(steps=9)
        began_s = scene.clock()
        with pytest.raises(ProbeFailed, match="after 9 optimizer steps"):
            scene.conductor.run(20)
        assert scene.clock() - began_s == pytest.approx(8 * 0.25)


class TestWarmUp:
    def warm(self, step_s: Callable[[int], float]) -> WarmUp:
        return Scene(step_s).conductor.warm_up()

    def test_steady_steps_need_two_blocks(self) -> None:
        warm = self.warm(lambda n: 1.0)
        assert warm == WarmUp((1.0, 1.0), pytest.approx(1.0), True)

    def test_it_lasts_until_the_step_time_has_stopped_falling(self) -> None:
        warm = self.warm(lambda n: 1.0 + 4.0 * 0.5**n)  # 2.0, 1.5, 1.25, ...
        assert warm.stable
        assert warm.step_time_s == pytest.approx(1.0, rel=0.04)
        assert len(warm.step_times_s) == 7  # 1.03125 and 1.015625 agree to 3 %

    def test_noise_without_a_trend_is_stable(self) -> None:
        factor = noise(0.15)
        warm = self.warm(lambda n: 0.5 * factor(n))
        assert warm.stable
        assert len(warm.step_times_s) < 12

    def test_short_steps_are_judged_together(self) -> None:
        factor = noise(0.05)
        warm = self.warm(lambda n: 0.02 * factor(n))
        assert warm.stable
        assert len(warm.step_times_s) >= 20  # two blocks of 0.2 s
        assert sum(warm.step_times_s) < 2.0

    def test_what_never_settles_is_said(self) -> None:
        warm = self.warm(lambda n: 0.3 * 1.05**n)
        assert not warm.stable
        assert len(warm.step_times_s) == WARM_BLOCKS_MAX

    @pytest.mark.parametrize(("step_s", "blocks"), [(59.5, 2), (60.5, 1)])
    def test_it_ends_after_a_minute_between_two_steps(self, step_s: float, blocks: int) -> None:
        warm = self.warm(lambda n: step_s * 1.05 ** (n - 2))
        assert (len(warm.step_times_s), warm.stable) == (blocks, False)

    @pytest.mark.parametrize(
        ("blocks", "stable"),
        [
            ([1.0], False),
            ([1.0, 1.029], True),
            ([1.029, 1.0], True),
            ([1.0, 1.031], False),
            ([1.0, 2.0, 1.0, 2.0], True),  # up and down: noise
            ([9.0, 1.0, 2.0, 1.0, 2.0], True),
            ([1.0, 2.0, 1.0], False),  # too few to tell
            ([1.0, 2.0, 3.0, 2.0], False),
            ([2.0, 1.0, 1.5, 2.0], False),
        ],
    )
    def test_blocks_are_settled_if_two_agree_or_four_alternate(
        self, blocks: list[float], stable: bool
    ) -> None:
        assert settled(blocks) is stable


def test_a_live_setting_is_set_once_every_rank_has_answered() -> None:
    scene = Scene()
    began_s = scene.clock()
    assert scene.conductor.set_live({"accumulation": 2}) == [{"read": {}}] * 2
    assert scene.clock() == began_s


@pytest.mark.parametrize(("come_after_s", "waited_s"), [(0.0, 0.0), (2.0, 2.0), (900.0, 5.0)])
def test_processes_that_are_to_come_are_waited_for_up_to_a_limit(
    come_after_s: float, waited_s: float
) -> None:
    scene = Scene()
    began_s = scene.clock()
    scene.ranks.expects_more = lambda: scene.clock() < began_s + come_after_s  # type: ignore[method-assign]
    scene.conductor.wait_for_others(5.0)
    assert scene.clock() - began_s == pytest.approx(waited_s, abs=0.11)


@pytest.mark.parametrize(
    ("effect", "waited_s"),
    [(False, 1.0), (True, 7.0)],  # another rank may still tell the cause of what follows from it
)
def test_after_a_failure_other_ranks_are_heard_for_a_while(effect: bool, waited_s: float) -> None:
    scene = Scene()
    detail = {"evidence": "error", "message": "no more disk", "effect": effect}
    scene.ranks._events.append((scene.clock(), Event("fail", 0, detail=detail)))
    scene.ranks.patience_s, scene.ranks.send = 7.0, lambda line: None  # type: ignore[method-assign]
    began_s = scene.clock()
    with pytest.raises(ProbeFailed, match="no more disk"):
        scene.conductor.run(1)
    assert scene.clock() - began_s == pytest.approx(waited_s)


def test_a_program_that_runs_to_its_end_tells_each_step_and_leaves_time_between_long_ones() -> None:
    scene = Scene(lambda n: 2.0, steps=4, lag_s=0.5, marks=("forward",))
    scene.conductor.run(1)
    began_s = scene.clock()
    done: list[tuple[int, float]] = []
    waits_s: list[float] = []
    scene.conductor.run_to_end(
        lambda step, time_s: done.append((step, time_s)), lambda: waits_s.append(scene.clock())
    )
    # The last rank's steps end half a second after the first's.
    assert done == [(3, began_s + 2.5), (4, began_s + 4.5)]
    assert max(np.diff(waits_s)) <= 0.5


def test_what_follows_from_another_ranks_failure_is_not_its_cause() -> None:
    scene = Scene()
    for rank, message, effect in ((0, "connection closed by peer", True), (1, "no disk", False)):
        detail = {"evidence": "error", "message": message, "effect": effect}
        scene.ranks._events.append((scene.clock(), Event("fail", rank, detail=detail)))
    scene.ranks.send = lambda line: None  # type: ignore[method-assign]
    with pytest.raises(ProbeFailed, match="no disk"):
        scene.conductor.run(1)


@pytest.mark.parametrize(("kind", "step"), [("step", 9), ("at", 9), ("at", 2)])
def test_what_a_program_writes_of_steps_that_nobody_asked_for_is_passed_over(
    kind: str, step: int
) -> None:
    scene = Scene()
    scene.ranks._events.append((scene.clock(), Event(kind, 1, step, scene.clock())))
    times_s = scene.conductor.run(4)
    assert times_s == pytest.approx([0.25] * 4)
    assert scene.conductor.done == 5


@pytest.mark.parametrize(("deadline_s", "waited_s"), [(1e6, 5.0), (3.0, 3.0)])
def test_ranks_that_do_not_stop_are_left_after_a_while(deadline_s: float, waited_s: float) -> None:
    scene = Scene(deadline_s=deadline_s)
    left_s = scene.conductor._deadline_s - scene.clock()
    began_s = scene.clock()
    scene.conductor.finish()
    assert scene.clock() - began_s == pytest.approx(min(waited_s, left_s))


def test_devices_that_do_not_answer_are_the_nodes_fault_before_a_probe() -> None:
    """What is in the window of one, its meter reports."""

    class Silent:
        def faults(self) -> dict[str, dict[str, int]]:
            return {}

        def busy(self, own: object = ()) -> tuple[str, ...]:
            raise MeterError("the driver does not answer")

    watch = DeviceWatch(Silent())
    with pytest.raises(ProbeFailed, match=r"^the driver does not answer$") as failed:
        watch.require_free()
    assert failed.value.failure.kind == "node"
    assert watch.others({1}) == ""


class TestWindow:
    def test_is_whole_steps_between_two_boundaries(self) -> None:
        scene = Scene(lag_s=0.003)
        window = scene.measure()
        assert scene.meter.edges == [True, False]  # no reading inside
        assert window.length_s >= 5.0
        assert window.length_s == pytest.approx(sum(window.step_times_s))
        assert window.energy_J == pytest.approx(300.0 * window.length_s)
        assert window.ends_s[-1] == pytest.approx(window.closed.time_s)
        assert len(window.ends_s) == len(window.step_times_s) == scene.ranks.done - 1

    def test_samples_at_its_edges_belong_to_it(self) -> None:
        window = Scene(lambda n: 0.5).measure()
        assert window.samples[0].time_s == window.opened.time_s
        assert window.samples[-1].time_s == window.closed.time_s

    def test_long_steps_make_three(self) -> None:
        scene = Scene(lambda n: 40.0)
        window = scene.measure(step_time_s=40.0)
        assert len(window.step_times_s) == 3

    def test_noisy_steps_prolong_it_until_the_error_is_small_enough(self) -> None:
        factor = noise(0.06)
        window = Scene(lambda n: 0.25 * factor(n)).measure()
        assert 5.0 <= window.length_s < 15.0
        mean = float(np.mean(window.step_times_s))
        assert window.step_time_se_s <= 0.01 * mean
        assert standard_error(window.step_times_s[:20]) > 0.01 * mean  # 5 s were not enough

    def test_noisy_power_prolongs_it_though_the_steps_are_steady(self) -> None:
        factor = noise(0.05)
        scene = Scene(power_W=lambda now_s: 300.0 * factor(round(now_s / 0.5)))
        window = scene.measure(replace(POLICY, max_s=60.0))
        assert window.step_time_se_s == pytest.approx(0.0, abs=1e-9)
        assert window.length_s > 6.0
        # The timeline's last sample may come after the last look: the error is that of the end.
        assert window.power_se_W <= 0.0105 * window.power_W

    def test_its_limit_ends_it_and_is_flagged(self) -> None:
        factor = noise(0.5)
        window = Scene(lambda n: 0.25 * abs(factor(n))).measure()
        assert 15.0 <= window.length_s < 17.0
        told = measurement(Settings(), window, POLICY)
        assert isinstance(told, Measurement)
        assert any(
            re.fullmatch(r"step time \+-[\d.]+ % \(target 1 %; window limit reached\)", flag)
            for flag in told.flags
        )

    def test_phases_within_a_step_are_no_noise(self) -> None:
        """Power goes up and down with the phases of 1 s steps; the blocks are whole steps."""

        def power_W(now_s: float) -> float:
            return 500.0 if (now_s - 51.0) % 1.0 < 0.5 else 100.0

        window = Scene(lambda n: 1.0, power_W).measure(step_time_s=1.0)
        assert window.length_s < 7.0
        assert window.power_se_W < 0.01 * window.power_W

    def test_without_samples_it_ends_by_the_step_time(self) -> None:
        scene = Scene()
        window = scene.conductor.measure(scene.meter, POLICY, 0.25)
        assert window.length_s < 6.0
        assert math.isnan(window.power_se_W)
        assert window.power_blocks_W == ()

    def test_a_window_tells_the_time_of_its_phases(self) -> None:
        scene = Scene(marks=("forward",))
        window = scene.measure(step_time_s=0.25)
        assert window.phases_s == {"forward": pytest.approx(window.length_s / len(window.ends_s))}

    def test_a_window_in_which_torch_compiled_is_measured_again(self) -> None:
        scene = Scene(lambda n: 0.25, compiles={1: 30.0, 5: 9.0})
        window = scene.measure()
        assert window.step_time_s == pytest.approx(0.25)
        assert window.phases_s == {}
        # Both compilations are told, and neither is in the window.
        phases, opened = scene.conductor.phases, window.opened.time_s
        assert compilation_s(phases, 0.0, opened) == pytest.approx(39.0)

    def test_a_program_that_never_stops_compiling_is_measured_and_flagged(self) -> None:
        scene = Scene(lambda n: 0.25, compiles=dict.fromkeys(range(1, 1000), 0.5))
        window = scene.measure()
        assert window.step_time_s == pytest.approx(0.75)
        assert scene.meter.edges == [True, False] * 3  # two windows are discarded
        made = measurement(Settings(), window, POLICY)
        assert any("torch.compile compiled for" in flag for flag in made.flags)

    def test_out_of_time_is_a_failure(self) -> None:
        scene = Scene(lambda n: 1.0, deadline_s=4.0)
        with pytest.raises(ProbeFailed, match="out of time"):
            scene.measure(step_time_s=1.0)


class TestSpread:
    def test_standard_error_of_an_autoregression_is_its_true_spread(self) -> None:
        """Means of AR(1) series scatter as the corrected error says, the plain one says half."""
        rng = np.random.default_rng(3)
        phi, n = 0.6, 400
        means, said, plain = [], [], []
        for _ in range(300):
            shocks = rng.standard_normal(n)
            series = np.empty(n)
            series[0] = shocks[0] / math.sqrt(1 - phi**2)
            for i in range(1, n):
                series[i] = phi * series[i - 1] + shocks[i]
            means.append(series.mean())
            said.append(standard_error(series))
            plain.append(series.std(ddof=1) / math.sqrt(n))
        assert np.mean(said) == pytest.approx(np.std(means), rel=0.12)
        assert np.mean(plain) < 0.6 * np.std(means)

    def test_of_few_or_equal_values(self) -> None:
        assert math.isnan(standard_error([1.0]))
        assert standard_error([0.1 + 0.2, 0.3, 0.3]) == 0.0

    def test_blocks_are_whole_steps_and_the_rest_goes_to_the_last(self) -> None:
        assert block_edges(0.0, [0.3, 0.6, 0.9, 1.2, 1.5]) == (0.0, 0.6, 1.5)
        assert block_edges(0.0, [0.2]) == (0.0, 0.2)
        assert block_edges(0.0, []) == (0.0,)

    def test_integration_is_exact_for_linear_power(self) -> None:
        samples = [PowerSample(0.1 * k, 100.0 + 10.0 * k) for k in range(101)]
        assert integrate(samples, 1.05, 7.33) == pytest.approx(
            100 * 6.28 + 100 / 2 * (7.33**2 - 1.05**2)
        )
        powers = block_powers(samples, [0.0, 2.0, 6.0])
        assert powers == pytest.approx([200.0, 500.0])

    def test_too_few_samples_say_nothing(self) -> None:
        samples = [PowerSample(1.0, 100.0), PowerSample(2.0, 100.0)]
        assert math.isnan(integrate(samples, 0.0, 3.0))
        assert block_powers(samples, [0.0, 3.0]).size == 0


# Two steps of 1 s, opened in the wait at a boundary and closed in the next.
MARKS = [
    (9.0, "optimizer"),
    (9.5, "boundary"),
    (10.2, "forward"),
    (10.5, "backward"),
    (11.0, "optimizer"),
    (11.2, "forward"),
    (11.5, "backward"),
    (12.0, "optimizer"),
    (12.2, "boundary"),
    (13.0, "forward"),
]


def test_seconds_a_step_leave_out_the_waits() -> None:
    found = seconds_a_step(MARKS, 10.0, 12.4, 2)
    assert found == {
        "backward": pytest.approx(0.5),
        "forward": pytest.approx(0.3),
        "optimizer": pytest.approx(0.2),
    }
    assert list(found) == ["backward", "forward", "optimizer"]
    assert seconds_a_step([], 0.0, 1.0, 3) == {}


def test_marks_of_a_window_begin_with_what_stood_as_it_opened() -> None:
    assert within(MARKS, 10.0, 10.5) == ((10.0, "boundary"), (10.2, "forward"), (10.5, "backward"))
    assert within(MARKS, 10.3, 10.4) == ((10.3, "forward"),)
    assert within(MARKS, 1.0, 2.0) == ()
    assert within(list(reversed(MARKS)), 10.0, 10.5) == within(MARKS, 10.0, 10.5)


class CoolingMeter:
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
    idle, meter = IdlePower(clock), CoolingMeter(clock)
    assert idle.measure(meter, 0.0, meter.wait) is None
    assert idle.measure(meter, 0.3, meter.wait) == pytest.approx(120.0)
    idle.was_busy()
    meter.power_W = 180.0
    clock.now_s += 3.0
    assert idle.measure(meter, 0.3, meter.wait) == pytest.approx(120.0)
    assert meter.edges == [True, False]
    meter.power_W = 115.0
    clock.now_s += 8.0
    assert idle.measure(meter, 0.3, meter.wait) == pytest.approx(115.0)


def test_a_meter_whose_clock_stands_still_tells_no_idle_power() -> None:
    clock = FakeClock(0.0)
    idle, meter = IdlePower(clock), CoolingMeter(clock)
    assert idle.measure(meter, 0.3, lambda seconds: None) is None


def edged(powers_W: Sequence[float], *, lag_s: float = LAG_S, filter_s: float = 0.1) -> Window:
    """A window of steps of 0.1 s after an idle edge, with a power each 0.5 s.

    The counter is exact; power is sampled through a filter, as sensors see it.
    """
    length_s = 0.5 * len(powers_W)
    seen_W, samples = 60.0, []
    for k in range(round(length_s / 0.001)):
        now_s = 0.001 * k
        seen_W += (powers_W[int(now_s / 0.5)] - seen_W) * 0.001 / filter_s
        if k % 100 == 0:
            samples.append(PowerSample(now_s, seen_W))
    ends = tuple(0.1 * k for k in range(1, round(length_s / 0.1) + 1))
    opened = Reading(0.0, 0.0, 0.0, lag_s)
    closed = Reading(length_s, 0.5 * sum(powers_W))
    return Window(opened, closed, (0.1,) * len(ends), ends, tuple(samples))


class TestOpeningEdge:
    """Sampled power shows the idle wait before a window; the counter does not."""

    def test_the_lag_of_the_sensor_is_no_scatter(self) -> None:
        window = edged([680.0] * 6)
        assert window.power_W == 680.0
        assert window.power_se_W < 0.003 * 680.0
        assert np.mean(window.power_blocks_W) == pytest.approx(680.0)

    def test_a_sensor_that_averages_a_second_lags_longer(self) -> None:
        slow = edged([680.0] * 10, lag_s=1.2, filter_s=0.3)
        assert slow.power_se_W < 0.003 * 680.0
        assert edged([680.0] * 10, lag_s=0.0, filter_s=0.3).power_se_W > 0.02 * 680.0

    @pytest.mark.parametrize("blocks", [2, 3])
    def test_a_window_of_few_blocks_keeps_them_all_but_for_the_steps_within_the_lag(
        self, blocks: int
    ) -> None:
        """Three blocks stated 3 % of a power that was exact, and its point counted 1.4 % off."""
        window = edged([680.0] * blocks, filter_s=0.02)
        assert len(window.power_blocks_W) == blocks
        assert window.power_se_W < 0.003 * 680.0

    def test_steps_as_long_as_blocks_and_few_are_all_kept(self) -> None:
        window = edged([680.0] * 4)
        longer = replace(window, step_times_s=(1.0, 1.0), ends_s=(1.0, 2.0))
        assert len(longer.power_blocks_W) == 2

    @pytest.mark.parametrize("blocks", [4, 10])
    def test_the_lag_is_no_difference_of_two_sources(self, blocks: int) -> None:
        """An exact counter was 5.8 % above its samples, and its point counted 3.4 % off."""
        window = edged([680.0] * blocks, filter_s=0.05)
        assert window.sampled_energy_J == pytest.approx(window.energy_J, rel=0.003)
        told = measurement(Settings(), window, POLICY, independent=True)
        assert isinstance(told, Measurement)
        assert not any("differ" in flag for flag in told.flags)
        assert told.power_rse < 0.003

    def test_a_burst_within_the_lag_is_told_as_a_difference(self) -> None:
        """What was drawn in the first steps alone is the counter's: the samples do not see it."""
        window = edged([680.0] * 4)
        burst = replace(window, closed=replace(window.closed, energy_J=1.2 * window.energy_J))
        told = measurement(Settings(), burst, POLICY, independent=True)
        assert isinstance(told, Measurement)
        assert any("differ by -1" in flag for flag in told.flags)
        assert told.power_rse > 0.1

    @pytest.mark.parametrize("lag_s", [1.2, 60.0])
    def test_a_lag_of_most_of_the_window_leaves_out_nothing(self, lag_s: float) -> None:
        window = edged([680.0] * 4, lag_s=lag_s)
        assert window.settled_s == window.opened.time_s
        assert window.sampled_energy_J < 0.99 * window.energy_J

    def test_what_drifts_after_the_edge_is_still_stated(self) -> None:
        drifting = edged([700.0 - 20 * k for k in range(8)])
        assert drifting.power_se_W > 0.02 * drifting.power_W

    @pytest.mark.parametrize(("blocks", "least"), [(3, 0.6), (6, 0.65), (10, 0.72), (20, 0.8)])
    def test_intervals_of_power_that_scatters_keep_their_coverage(
        self, blocks: int, least: float
    ) -> None:
        """Few blocks state too little, with or without the first: no less is covered than then."""
        rng = np.random.default_rng(blocks)
        inside = without = 0
        for _ in range(200):
            powers = 680.0 + 20.0 * rng.standard_normal(blocks)
            window = edged(list(powers), filter_s=0.02)
            off = abs(window.power_W - 680.0)
            inside += off <= Z90 * window.power_se_W
            plain = standard_error(powers)  # by every block as it truly was
            without += off <= Z90 * plain
        assert inside / 200 >= least
        assert inside >= without - 0.06 * 200


def test_the_loss_of_a_step_is_the_mean_over_the_ranks() -> None:
    ranks = [
        [{"passes": 2, "loss": 1.0}, {"passes": 2, "loss": None}],
        [{"passes": 2, "loss": 3.0}, {"passes": 2, "loss": 4.0}],
        [{"passes": 2, "loss": 2.0}],
    ]
    assert _with_mean_losses(ranks[0], ranks) == [
        {"passes": 2, "loss": 2.0},
        {"passes": 2, "loss": 4.0},
    ]
    assert _with_mean_losses([{"passes": 1}], [[{"passes": 1}]]) == [{"passes": 1, "loss": None}]


#: A step takes 0.25 s and 75 J in every scene below.
FAST, FRUGAL, WORSE = (0.1, 40.0), (0.3, 30.0), (0.5, 200.0)


def run(
    competitors: Sequence[tuple[float, float]], scatter: float = 0.03, policy: WindowPolicy = POLICY
) -> Window:
    step, power = noise(scatter), noise(scatter, seed=1)
    scene = Scene(
        lambda n: 0.25 * abs(step(n)), lambda now_s: 300.0 * abs(power(round(now_s / 0.1)))
    )
    return scene.conductor.measure(
        scene.meter, policy, 0.25, samples=scene.meter.samples, competitors=competitors
    )


def test_a_window_that_is_beaten_on_both_axes_ends_at_its_first_look() -> None:
    window = run([FAST])
    assert FIRST_LOOK_S <= window.length_s < 3.0
    assert window.beaten_by == FAST


@pytest.mark.parametrize("competitors", [[FRUGAL], [WORSE], [(0.249, 74.8)], []])
def test_what_may_be_on_the_front_is_measured_to_its_target(
    competitors: list[tuple[float, float]],
) -> None:
    window = run(competitors)
    assert window.length_s >= POLICY.min_s
    assert window.beaten_by is None
    assert window.step_time_se_s <= 1.1 * POLICY.target_se * 0.25


def test_a_window_that_is_complete_at_its_first_look_did_not_end_early() -> None:
    """It is as exact as was asked for, whatever beats it."""
    policy = replace(POLICY, min_s=FIRST_LOOK_S, target_se=0.1)
    assert run([FAST], policy=policy).beaten_by is None


def test_scatter_that_hides_the_difference_prolongs_the_window() -> None:
    near = (0.21, 60.0)
    assert run([near], scatter=0.01).length_s < 3.0
    assert run([near], scatter=0.5).length_s > 4.0


def test_its_flag_says_why_it_ended_and_its_error_is_that_of_the_short_window() -> None:
    window = run([FAST], scatter=0.2)
    found = measurement(Settings(), window, POLICY)
    assert isinstance(found, Measurement)
    (flag,) = found.flags
    assert flag.startswith(f"ended after {window.length_s:.1f} s: another configuration needs")
    assert found.step_time_se_s >= window.step_time_se_s > 0.01 * found.step_time_s


def test_a_window_without_power_samples_does_not_end_early() -> None:
    scene = Scene()
    window = scene.conductor.measure(scene.meter, POLICY, 0.25, competitors=[FAST])
    assert window.length_s >= POLICY.min_s


def test_equal_configurations_are_rarely_called_beaten() -> None:
    """A window of correlated steps and power, looked at once, against its own true figures."""
    rng, called = np.random.default_rng(0), 0
    for _ in range(400):
        steps = 0.25 * np.exp(0.15 * rng.standard_normal(16))
        ends = 50.0 + np.cumsum(steps)
        samples = [
            PowerSample(50.05 + 0.1 * k, 300.0 * math.exp(0.08 * rng.standard_normal()))
            for k in range(int((ends[-1] - 50.0) * 10))
        ]
        window = Window(
            Reading(50.0, 0.0), Reading(ends[-1], 0.0), tuple(steps), tuple(ends), tuple(samples)
        )
        called += beaten_by(window, [(0.25, 75.0)]) is not None
    assert called <= 20


def test_a_request_keeps_the_front_in_json_and_older_ones_have_none() -> None:
    request = ProbeRequest("p0001", Settings(data_parallel=1), front=((0.5, 20.0), (0.4, 25.0)))
    assert ProbeRequest.from_json(request.to_json()) == request
    plain = ProbeRequest("p0001", Settings(data_parallel=1)).to_json()
    assert "front" not in plain
    assert ProbeRequest.from_json(plain).front == ()
