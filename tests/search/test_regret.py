"""Regret: what the measured configurations lose, how sure that is, and what a launch is worth."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.search.test_score import CONFIGURATIONS, MEASURED, truth, view_of
from tuner.models.surrogate.features import FeatureMap
from tuner.models.surrogate.surrogates import Surrogates
from tuner.pareto import front_regret, nondominated
from tuner.search.joint_draws import (
    ENOUGH,
    KNEE,
    CandidateView,
    JointDraws,
    RegretEstimate,
    knee_sd,
    swept,
)
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.space import Candidates


def drawn_after(measured: list[int], *, fits: float = 1.0) -> JointDraws:
    front, view, surrogates = view_of(measured)
    return JointDraws(surrogates, front, replace(view, chances=np.full(len(view.members), fits)))


def true_regret(measured: list[int]) -> float:
    t, p = np.array([truth(c) for c in CONFIGURATIONS]).T
    points = np.log(np.column_stack([t * p, t]))
    return front_regret(points[measured], points)


def test_it_is_the_front_regret_of_each_draw() -> None:
    drawn = drawn_after(MEASURED)
    energy, time = drawn._logs
    for draw in range(0, len(energy), 16):
        points = np.column_stack([energy[draw], time[draw]])
        lost = front_regret(points[: drawn.count], points)
        assert np.expm1(drawn.regret[draw]) == pytest.approx(lost)


def test_it_holds_what_is_really_lost_and_falls_as_the_front_is_measured() -> None:
    best_launch = [i for i, c in enumerate(CONFIGURATIONS) if c.micro_batch == 16]
    lost = np.log1p(true_regret(MEASURED))
    before, after = drawn_after(MEASURED), drawn_after([*MEASURED, *best_launch])
    assert before.regret.min() <= lost <= before.regret.max()
    assert true_regret([*MEASURED, *best_launch]) < 0.01
    assert np.median(after.regret) < 0.2 * np.median(before.regret)


def test_what_does_not_fit_in_memory_is_not_missed() -> None:
    assert (drawn_after(MEASURED, fits=0.0).regret == 0).all()
    some = drawn_after(MEASURED, fits=0.5).regret
    assert 0 < some.mean() < drawn_after(MEASURED).regret.mean()


def test_a_regret_is_a_share_of_energy_and_time() -> None:
    estimate = RegretEstimate(np.log([1.0, 1.02, 1.05, 2.0]))
    assert estimate.probability_above(0.03) == 0.5
    assert estimate.probability_above(0.0) == 0.75
    # What is twice as dear is saved by half.
    assert estimate.saving == pytest.approx((0.02 / 1.02 + 0.05 / 1.05 + 0.5) / 4)


# -- settings of one launch -------------------------------------------------------------------


def sweep_of(level: float, most: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses before, settings visited and losses after, of five settings along a trade-off, at
    about `level` in log time and energy from a front."""
    rng = np.random.default_rng(0)
    own = rng.normal(0, 0.1, (128, 1)) + level
    slope = np.linspace(-0.3, 0.3, 5) + rng.normal(0, 0.005, (128, 5))
    front = np.tile([-0.3, 0.0, 0.3], (128, 1))
    logs = np.hstack([front, own + slope]), np.hstack([-front, own - slope])
    worse = np.maximum(*(log[:, None, :] - log[:, 3:, None] for log in logs))
    losses = np.maximum(worse[:, :, :3].min(axis=2), 0.0)
    drawn = SimpleNamespace(worse=worse, losses=losses, count=3)
    return losses, *swept(drawn, np.arange(5), most)  # type: ignore[arg-type]


def test_a_launch_that_is_surely_good_is_visited_whole_and_a_poor_one_hardly() -> None:
    # Both ends of a trade-off are visited, though neither alone lowers the regret.
    _, visited, left = sweep_of(-0.8)
    assert visited.all()
    assert left == pytest.approx(np.zeros((128, 5)), abs=1e-9)
    _, visited, _ = sweep_of(0.3)
    assert visited.sum(axis=1).mean() < 0.3


def test_a_launch_that_may_turn_out_poor_is_left_in_the_draws_in_which_it_does() -> None:
    losses, visited, left = sweep_of(0.1)
    poor = losses.max(axis=1) <= ENOUGH
    assert 0 < poor.mean() < 1
    assert not visited[poor].any()
    assert visited[~poor].any(axis=1).all()
    assert (left <= ENOUGH + 1e-5).all()


def test_no_more_settings_are_visited_than_a_probe_may() -> None:
    _, two, left = sweep_of(-0.8, most=2)
    assert (two.sum(axis=1) == 2).all()
    assert left.max(axis=1).min() > ENOUGH


def test_what_another_launch_mends_better_is_not_in_the_way() -> None:
    # Of two launches that each hold an end of the front, each is worth its own end, although the
    # loss is the larger at the other.
    energy, time = np.array([[0.5, 0.0, 1.0]]), np.array([[0.5, 1.0, -0.2]])
    worse = np.maximum(*(log[:, None, :] - log[:, 1:, None] for log in (energy, time)))
    drawn = SimpleNamespace(worse=worse, losses=worse[:, :, 0], count=1)
    for row in (0, 1):
        visited, left = swept(drawn, np.array([row]), 8)  # type: ignore[arg-type]
        assert visited.all()
        assert left[0, row] == 0 < left[0, 1 - row]


# -- a knee next to the front -----------------------------------------------------------------


def test_an_open_setting_next_to_the_front_may_lie_off_the_curve() -> None:
    front, view, surrogates = view_of(MEASURED)
    sd = knee_sd(surrogates.features, front, view)
    on_front = {CONFIGURATIONS[i].launch for i in front.members[nondominated(*front.points.T)]}
    for i, each in zip(view.members, sd, strict=True):
        clock, launch = CONFIGURATIONS[i].get("clock_MHz"), CONFIGURATIONS[i].launch
        own = [CONFIGURATIONS[j] for j in MEASURED if CONFIGURATIONS[j].launch == launch]
        if launch not in on_front:
            assert each == 0
        elif len(own) == 1:  # as far as the one that is measured, over the range of the clocks
            apart = abs(clock - own[0].get("clock_MHz")) / 800  # type: ignore[operator]
            assert each == pytest.approx(KNEE * apart)
    assert (sd > 0).any()


def test_a_curve_of_plans_for_each_stage_is_no_rougher_than_one_of_a_clock() -> None:
    def sd_beside(*clocks: tuple[int, ...] | int) -> float:
        every = Candidates.from_configurations(
            Configuration.of(pipeline_parallel=4, clock_MHz=each) for each in clocks
        )
        surrogates = Surrogates(FeatureMap(every))

        def view(member: int) -> CandidateView:
            one = np.array([member])
            figures = surrogates.predict(one)
            return CandidateView(one, np.zeros(1), figures, np.ones(1), np.ones(1))

        return float(knee_sd(surrogates.features, view(0), view(1))[0])

    plans = [4 * (clock,) for clock in (600, 700, 1400)]
    alone = sd_beside(600, 700, 1400)
    assert sd_beside(*plans) == pytest.approx(alone)
    assert alone > 0
