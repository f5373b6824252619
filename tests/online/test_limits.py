"""A training under a deadline or an energy budget: worlds whose truth is known, and the agent."""

from __future__ import annotations

import math

import pytest

from tests.online.test_agent import Devices, live_tuning
from tests.online.test_bandit import CLOCKS, World, X, gpu, train
from tuner.online.command import tuning_lines
from tuner.online.follow import LATE, LONG, POOR, LengthUnknown, LimitTuner, run_limits
from tuner.online.live import WARM_STEPS, LiveTuning
from tuner.online.request import TuningOutcome, TuningRequest
from tuner.online.windows import Mark
from tuner.problem.constraints import Constraints
from tuner.workload.node.meters import Reading

STEPS = 4000
TOP_S = STEPS * gpu(0)[0]
TOP_KJ = TOP_S * gpu(0)[1] / 1000


def run(
    *, world: World = gpu, seed: int = 0, stated: int = STEPS, **given: float
) -> tuple[str, list[int], float, float]:
    """Train; return the limit that is missed, the settings, seconds and kilojoules."""
    limits = run_limits(Constraints(**given))  # type: ignore[arg-type]
    assert limits is not None
    tuner = LimitTuner(X, limits=limits, window_s=8, settle_s=2)
    tuner.begin(Mark(0, 0, 0.0), Reading(0.0, 0.0), Reading(0.0, 0.0), stated)
    done = train(tuner, world, steps=STEPS, seed=seed)
    return tuner.missed, done.visits, tuner.balance.seconds, tuner.balance.energy_J / 1000


def fixed(setting: int) -> tuple[float, float]:
    seconds = STEPS * gpu(setting)[0]
    return seconds, seconds * gpu(setting)[1] / 1000


@pytest.mark.parametrize(
    "slower",
    [
        pytest.param(1.08, marks=pytest.mark.slow),
        *(pytest.param(slower, marks=pytest.mark.long) for slower in (1.03, 1.3)),
    ],
)
def test_a_deadline_is_met_and_its_time_is_used(slower: float) -> None:
    for seed in range(5):
        missed, _, seconds, energy_kJ = run(deadline_s=slower * TOP_S, seed=seed)
        assert seconds <= slower * TOP_S
        assert missed == ""
        fit = [fixed(i)[1] for i in range(len(X)) if fixed(i)[0] <= (slower - 0.02) * TOP_S]
        assert energy_kJ <= 1.04 * min(fit)


@pytest.mark.parametrize(
    "share", [0.85, *(pytest.param(share, marks=pytest.mark.long) for share in (0.95, 0.75))]
)
def test_a_budget_is_kept_and_no_slower_than_needed(share: float) -> None:
    for seed in range(3):
        _, _, seconds, energy_kJ = run(budget_kJ=share * TOP_KJ, seed=seed)
        assert energy_kJ <= share * TOP_KJ
        fit = [fixed(i)[0] for i in range(len(X)) if fixed(i)[1] <= (share - 0.03) * TOP_KJ]
        assert seconds <= 1.04 * min(fit)


@pytest.mark.parametrize(
    ("given", "told"),
    [({"budget_kJ": 1.2 * TOP_KJ}, ""), ({"deadline_s": 0.9 * TOP_S}, LATE)],
)
def test_what_is_no_limit_or_out_of_reach_leaves_the_highest_setting(
    given: dict[str, float], told: str
) -> None:
    missed, visits, _, _ = run(**given)
    assert missed == told
    assert set(visits) == {0}


def test_a_budget_out_of_reach_is_told_and_comes_as_near_as_can_be() -> None:
    missed, _, _, energy_kJ = run(budget_kJ=0.3 * TOP_KJ)
    assert missed == POOR
    assert energy_kJ <= 1.06 * min(fixed(i)[1] for i in range(len(X)))


def test_of_a_deadline_and_a_budget_that_exclude_each_other_the_deadline_counts() -> None:
    missed, _, seconds, _ = run(deadline_s=1.05 * TOP_S, budget_kJ=0.4 * TOP_KJ)
    assert seconds <= 1.05 * TOP_S
    assert missed == POOR


def test_a_job_that_grows_longer_in_the_middle_still_meets_what_can_be_met() -> None:
    """The spare time is not spent in advance: the reserve of a slower half would be gone."""

    def world(setting: int, step: int) -> tuple[float, float]:
        time_s, power_W = gpu(setting)
        return time_s * (1.1 if step >= STEPS // 2 else 1.0), power_W

    for seed in range(3):
        _, _, seconds, _ = run(deadline_s=1.12 * TOP_S, world=world, seed=seed)
        assert seconds <= 1.12 * TOP_S


def test_a_training_longer_than_stated_is_told() -> None:
    missed, *_ = run(deadline_s=1.2 * TOP_S, stated=STEPS // 2)
    assert missed in (LONG, LATE)


def test_settings_are_ordered_as_the_worlds_are() -> None:
    assert [round(math.log(CLOCKS[0] / clock), 6) for clock in CLOCKS] == [round(x, 6) for x in X]


# ---- the agent


def live(limits: Constraints, said: list[str], steps: int | None) -> tuple[LiveTuning, Devices]:
    devices = Devices()
    return live_tuning(devices, said, TuningRequest(limits, steps), started=devices.read()), devices


def test_limits_count_from_the_start_of_the_command_and_are_told_once() -> None:
    said: list[str] = []
    tuning, devices = live(Constraints(deadline_s=1000.0), said, 2000)
    devices.time_s += 60.0  # the launch, of 1,000 s that 2,000 steps of 0.5 s take
    for number in range(1000):
        tuning.take(Mark(0, number, devices.step()))
    assert said == ["the deadline cannot be met, even at the highest setting, where it goes on"]
    assert set(devices.log) <= {1400}


def test_a_limit_without_a_length_is_one_sentence() -> None:
    tuning, devices = live(Constraints(budget_kJ=10.0), [], None)
    for number in range(WARM_STEPS + 1):
        tuning.take(Mark(0, number, devices.step()))
    with pytest.raises(LengthUnknown, match="state it by --steps"):
        tuning.take(Mark(0, WARM_STEPS + 1, devices.step()))


def test_whether_a_limit_was_kept_is_worded() -> None:
    kept, missed = ("deadline_s", 7200.0, 7100.0), ("budget_kJ", 100.0, 101.0)
    lines = tuning_lines(TuningOutcome(0, None, limits=(kept, missed)))
    assert "its deadline of 2.0 h was kept" in lines[-2]
    assert "its energy budget of 100 kJ was missed" in lines[-1]
