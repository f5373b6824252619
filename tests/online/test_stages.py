"""Clocks of pipeline stages: which stages have slack, what they run at, how slow it may become."""

from __future__ import annotations

import math
import random

import pytest

from tuner.online.settings import log_slowest, mean_value, stage_settings, stage_shares
from tuner.search_spaces.configuration import Settings

CLOCKS = (500, 700, 900, 1100, 1300, 1400)
COMMON = [Settings(), Settings(clock_MHz=1100), Settings(clock_MHz=700)]


def test_the_slowest_stage_keeps_its_clock_and_others_have_at_least_their_share() -> None:
    shares = stage_shares({0: [5.0, 1.0, 1.0], 1: [0.6, 0.6, 9.0]})
    assert shares == (1.0, 0.6)
    assert stage_settings(COMMON, shares, CLOCKS) == [
        Settings(),
        Settings(clock_MHz=(1400, 900)),
        Settings(clock_MHz=(1100, 700)),
        Settings(clock_MHz=(700, 500)),
    ]


@pytest.mark.parametrize(
    "busy_s", [{}, {0: [1.0]}, {0: [1.0], 1: [0.96], 2: [1.01]}, {0: [1.0], 1: [1.0]}]
)
def test_stages_alike_and_programs_without_stages_keep_one_clock(
    busy_s: dict[int, list[float]],
) -> None:
    assert stage_shares(busy_s) == ()


def test_a_rank_that_computes_nothing_gets_the_lowest_clock() -> None:
    shares = stage_shares({0: [1.0], 1: [0.0]})
    assert stage_settings(COMMON[:1], shares, CLOCKS)[1] == Settings(clock_MHz=(1400, 500))


def test_one_clock_is_bounded_by_its_proportion_and_has_itself_for_a_mean() -> None:
    assert log_slowest(700, 1400) == pytest.approx(math.log(2))
    assert log_slowest((700, 700), 1400) == pytest.approx(math.log(2))
    assert log_slowest(1400, 1400) == 0
    assert (mean_value(700), mean_value((1400, 700))) == (700, 1050)


def makespan(work: list[list[tuple[int, float]]], speed: list[float]) -> float:
    """Time of a schedule: each stage runs its micro-batches in order, after the stage before."""
    ends: list[list[float]] = []
    for rank, line in enumerate(work):
        ends.append([])
        for number, (_, seconds) in enumerate(line):
            before = ends[rank - 1][number] if rank else 0.0
            free = ends[rank][number - 1] if number else 0.0
            ends[rank].append(max(before, free) + seconds / speed[rank])
    return ends[-1][-1]


def test_no_pipeline_is_slowed_beyond_the_bound() -> None:
    draw = random.Random(1)
    for _ in range(300):
        ranks, micro_batches = draw.randint(2, 6), draw.randint(1, 6)
        # Uneven micro-batches, too: the worst for a clock that is set by their sum.
        work = [
            [(0, draw.choice([0.01, draw.random(), 5.0])) for _ in range(micro_batches)]
            for _ in range(ranks)
        ]
        shares = stage_shares({r: [sum(s for _, s in line)] for r, line in enumerate(work)})
        if not shares:
            continue
        setting = stage_settings(COMMON[:1], shares, range(1, 1401))[1]["clock_MHz"]
        assert isinstance(setting, tuple)
        slow = makespan(work, [clock / 1400 for clock in setting]) / makespan(work, [1.0] * ranks)
        assert math.log(slow) <= log_slowest(setting, 1400) + 1e-9
