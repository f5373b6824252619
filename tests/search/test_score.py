"""Score: improvement per joule, launches and live settings chosen together."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.support.studies import measured, record
from tuner.models.surrogate.features import FeatureMap
from tuner.models.surrogate.surrogates import Surrogates
from tuner.problem.problem import ProbeCost
from tuner.search.candidate_planner import farthest
from tuner.search.joint_draws import (
    LIVE_DRAWN,
    OPEN_DRAWN,
    CandidateView,
    JointDraws,
    ScoredProbe,
    best_probe,
    swept,
)
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import Failure

CANDIDATES = Candidates.from_configurations(
    Configuration.of(micro_batch=b, clock_MHz=c)
    for b in (1, 2, 4, 8, 16)
    for c in range(600, 1401, 100)
)
CONFIGURATIONS = CANDIDATES.configurations


def truth(configuration: Configuration) -> tuple[float, float]:
    f = float(configuration.get("clock_MHz") or 0) / 1400  # type: ignore[arg-type]
    return (0.3 + 0.7 / f) * (1 + 1 / configuration.micro_batch), 80 + 250 * f**2.5


def fitted(measured: list[int]) -> Surrogates:
    surrogates = Surrogates(FeatureMap(CANDIDATES))
    t, p = np.array([truth(CONFIGURATIONS[i]) for i in measured]).T
    surrogates.fit([CONFIGURATIONS[i] for i in measured], t, p)
    return surrogates


def view_of(measured: list[int]) -> tuple[CandidateView, CandidateView, Surrogates]:
    """What is known after these measurements, and what may still be proposed."""
    surrogates = fitted(measured)

    def view(members: np.ndarray) -> CandidateView:
        launches = [CANDIDATES.launches.index(CONFIGURATIONS[i].launch) for i in members]
        return CandidateView(
            members=members,
            launch_of=np.array(launches),
            posterior=surrogates.predict(members),
            chances=np.ones(len(members)),
            gpus=np.ones(len(members)),
        )

    free = np.setdiff1d(np.arange(len(CONFIGURATIONS)), measured)
    return view(np.array(measured)), view(free), surrogates


def choose(
    measured: list[int], cost: ProbeCost, *, max_live: int = 4, running_launch: int | None = None
) -> ScoredProbe:
    front, view, surrogates = view_of(measured)
    drawn = JointDraws(surrogates, front, view, running_launch=running_launch)
    return best_probe(drawn, cost, max_live, running_launch)


MEASURED = [4, 13, 22, 26, 18, 8]  # launches of micro-batch 1, 2 and 4


def test_a_probe_is_of_an_open_setting_and_costs_more_than_its_first_window() -> None:
    best = choose(MEASURED, ProbeCost())
    assert best.member not in MEASURED
    assert best.score > 0
    assert best.cost_J > best.first_J > 0
    assert best.expected_gain > 0


def test_joules_are_the_launch_once_and_each_visit() -> None:
    cost = ProbeCost(launch_s=30, settle_s=2, window_s=5, launch_power=0.5, min_steps=3)
    assert cost.launch_J(np.array([200.0])) == pytest.approx([3000])
    assert cost.visit_J(np.array([200.0, 200.0]), np.array([1.0, 10.0])) == pytest.approx(
        [1400, 6400]
    )


def test_a_launch_that_is_a_hundred_times_dearer_makes_no_probe_dearer_than_it_says() -> None:
    cheap, dear = (choose(MEASURED, ProbeCost(launch_s=s), max_live=1) for s in (1.0, 100.0))
    assert dear.cost_J > cheap.cost_J


def test_a_launch_begins_at_what_most_draws_would_visit_for_its_joules() -> None:
    """Not at the lowest clock, which costs the least: it tells little of the others."""
    front, view, surrogates = view_of(MEASURED)
    drawn = JointDraws(surrogates, front, view)
    cost = ProbeCost(launch_s=300.0)
    best = best_probe(drawn, cost, 4)
    tried = drawn.still_open
    launch = tried.launch_of[tried.members == best.member]
    rows = np.flatnonzero(tried.launch_of == launch)
    visits = dict(zip(tried.members[rows], swept(drawn, rows, 4)[0].mean(axis=0), strict=True))
    lowest = min(visits, key=lambda i: CONFIGURATIONS[i].live["clock_MHz"])
    assert best.member != lowest
    assert visits[best.member] > visits[lowest]


def test_a_running_launch_pays_no_launch_and_leaving_it_pays_the_return() -> None:
    cost = ProbeCost(launch_s=30.0)
    fresh = choose(MEASURED, cost)
    launch = CANDIDATES.launches.index(CONFIGURATIONS[fresh.member].launch)
    running = choose(MEASURED, cost, running_launch=launch)
    assert CONFIGURATIONS[running.member].launch == CONFIGURATIONS[fresh.member].launch
    assert running.score > fresh.score
    other = next(i for i in range(5) if i != launch and i != 3)
    left = choose(MEASURED, cost, running_launch=other)
    if CONFIGURATIONS[left.member].launch != CANDIDATES.launches[other]:
        assert left.score <= fresh.score


def test_nothing_to_gain_is_worth_nothing_but_still_names_a_probe() -> None:
    every = [i for i in range(len(CONFIGURATIONS)) if i != 9]  # a slow one, micro-batch 2
    best = choose(every, ProbeCost())
    assert best.member == 9
    assert best.score == best.expected_gain == 0.0
    assert best.cost_J == best.first_J > 0


def test_the_launches_with_the_most_to_gain_are_drawn_and_the_running_one_is() -> None:
    front, view, surrogates = view_of(MEASURED)
    members = np.arange(len(view.members))
    many = view[np.concatenate([members, *8 * [members]])]  # nine times as many
    many = replace(many, launch_of=np.arange(len(many.members)) // 9)
    drawn = JointDraws(surrogates, front, many, running_launch=2)
    kept = drawn.still_open
    assert OPEN_DRAWN - 9 < len(kept.members) <= OPEN_DRAWN + LIVE_DRAWN
    assert 2 in kept.launch_of
    for launch in np.unique(kept.launch_of):  # a launch is drawn whole
        assert (kept.launch_of == launch).sum() == (many.launch_of == launch).sum()


def drawn_of(open_: dict[int, list[list[tuple[float, float]]]]) -> JointDraws:
    """Draws of today's configuration, at 0, and of one open setting of each launch, of which a
    list of draws is given: log energy and log time."""
    _, view, surrogates = view_of(MEASURED)
    draws = max(map(len, open_.values()))
    drawn = object.__new__(JointDraws)
    drawn.surrogates, drawn.question, drawn.count = surrogates, None, 1
    drawn.still_open = replace(view[np.arange(len(open_))], launch_of=np.array(list(open_)))
    logs = np.zeros((draws, 1 + len(open_), 2))
    for column, each in enumerate(open_.values(), 1):
        logs[:, column] = np.resize(np.array(each), (draws, 2))
    drawn._logs = (logs[..., 0], logs[..., 1])
    return drawn


#: A clock of today's launch that is sure to save, and a launch that is a little faster.
SWEEP, FASTER = [(-0.20, 0.05)], [(0.3, -0.05)]


@pytest.mark.parametrize(("probes_left", "first"), [(1, 0), (2, 0), (math.inf, 1)])
def test_with_few_probes_left_the_sure_sweep_comes_before_what_mends_little_cheaply(
    probes_left: float, first: int
) -> None:
    drawn = drawn_of({0: SWEEP, 1: FASTER})
    power_W = np.where(drawn.still_open.launch_of == 0, 0.0, -0.7)  # half the joules
    posterior = replace(drawn.still_open.posterior, log_power=power_W, log_time=np.zeros(2))
    drawn.still_open = replace(drawn.still_open, posterior=posterior)
    best = best_probe(drawn, ProbeCost(), 4, None, probes_left)
    assert best.member == drawn.still_open.members[first]


@pytest.mark.parametrize(("probes_left", "first"), [(1, 1), (2, 0), (math.inf, 0)])
def test_the_last_probe_is_of_what_is_probably_far_better_and_not_of_a_sure_sweep(
    probes_left: float, first: int
) -> None:
    """The adversary of a sweep that always comes first because it is sure."""
    gamble = [*6 * [(-0.4, -0.4)], *4 * [(0.3, 0.3)]]
    drawn = drawn_of({0: SWEEP, 1: gamble})
    best = best_probe(drawn, ProbeCost(), 4, None, probes_left)
    assert best.member == drawn.still_open.members[first]


def test_a_search_with_many_probes_left_scores_as_one_without_a_limit() -> None:
    front, view, surrogates = view_of(MEASURED)
    drawn = JointDraws(surrogates, front, view)
    free = best_probe(drawn, ProbeCost(), 4)
    many, few = (best_probe(drawn, ProbeCost(), 4, None, left) for left in (1e6, 2))
    assert (many.member, many.score) == (free.member, pytest.approx(free.score, rel=1e-4))
    assert few.score < 0.9 * free.score


def test_a_launch_is_never_left_for_probes_that_the_limit_does_not_allow() -> None:
    """However dear its windows, as long as one is worth anything."""
    for left in (0, 1e-9):
        drawn = drawn_of({0: [(0.1, 0.1), (-0.02, -0.02)], 1: [(-0.4, -0.4)]})
        best = best_probe(drawn, ProbeCost(), 4, 0, left)
        assert best.member == drawn.still_open.members[0]


def test_farthest_fills_space() -> None:
    points = np.array([[0.0], [0.1], [0.5], [0.9], [1.0]])
    rng = np.random.default_rng(0)
    every = np.arange(5)
    assert farthest(points, np.empty((0, 1)), allowed=every, rng=rng) == 2
    assert farthest(points, points[[0]], allowed=every, rng=rng) == 4
    assert farthest(points, points[[0, 4]], allowed=every, rng=rng) == 2
    assert farthest(points, points[[0]], allowed=np.array([1, 2]), rng=rng) == 2


def test_a_cost_is_a_plain_frozen_value() -> None:
    assert replace(ProbeCost(), window_s=9.0) == ProbeCost(window_s=9.0)


def test_what_a_launch_costs_is_learned_from_probes() -> None:
    assumed = ProbeCost(launch_s=5.0, launch_power=0.7, settle_s=1.0)
    live = (Settings(clock_MHz=900), Settings(clock_MHz=1200))
    windows = tuple(measured(one, time_s=0.5, power_W=100.0) for one in live)  # 5 s, 500 J each
    spent_J = 40 * 0.5 * 100 + 2 * (1.0 * 100 + 500)
    whole = record(measurements=windows, wall_s=40 + 2 * (1 + 5), energy_J=spent_J)
    failed = record(failure=Failure("crash", "it did"), wall_s=900.0)
    learned = assumed.learned([failed, whole, whole])
    assert learned == replace(assumed, launch_s=pytest.approx(40), launch_power=pytest.approx(0.5))
    assert assumed.learned([failed]) == assumed
    # An unchanged setting needs no settling; a probe without a length has no information.
    plain = record(measurements=(measured(time_s=0.5, power_W=100.0),), wall_s=9, energy_J=700)
    assert assumed.learned([plain]).launch_s == pytest.approx(4)
    assert assumed.learned([replace(plain, wall_s=0.0)]) == assumed
    # Another launch need not compile: the time of a compilation is no part of its cost.
    compiled = replace(plain, wall_s=plain.wall_s + 30.0, environment={"compilation_s": 30.0})
    assert assumed.learned([compiled]).launch_s == pytest.approx(4)
