"""Power limits that seem not to bind are probed last, and as soon as windows contradict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.support.studies import measured, probe_with
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.evidence import DOUBT, Outcome, SlackLimits
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import ProbeRecord

LIMITS_W = (100, 150, 200, 250, 300)


def grid(batches: tuple[int, ...], limits_W: tuple[int, ...]) -> Candidates:
    return Candidates.from_configurations(
        Configuration.of(micro_batch=b, power_limit_W=w) for b in batches for w in limits_W
    )


CONFIGURATIONS = grid((1, 8), LIMITS_W).configurations
SLACK = SlackLimits(CONFIGURATIONS, np.repeat([0, 1], 5))


def observed(candidate: int, power_W: float, rse: float = 0.0, time_s: float = 1.0) -> Outcome:
    window = replace(
        measured(time_s=time_s, power_W=power_W),
        step_time_se_s=rse * time_s,
        power_se_W=rse * power_W,
    )
    return Outcome(candidate, CONFIGURATIONS[candidate], window)


def capped(outcome: Outcome) -> Outcome:
    return replace(outcome, window=replace(outcome.window, flags=("throttle_power_0",)))


def last(*outcomes: Outcome) -> dict[int, float]:
    """Return the candidates that are probed last, with their chances."""
    chances = SLACK.chances(outcomes)
    return {int(i): float(chances[i]) for i in np.flatnonzero(chances < 1)}


def test_a_limit_is_judged_by_power_drawn_without_it() -> None:
    # 150 and 200 W exceed 1.3 x 110 W, which is drawn at 250 W; 300 W was not in force there.
    assert last(observed(3, 110.0)) == {1: DOUBT, 2: DOUBT}
    assert last(observed(3, 120.0)) == {2: DOUBT}
    assert last(observed(3, 190.0)) == {}
    assert last(observed(3, 110.0, rse=0.02)) == {2: DOUBT}
    assert last(capped(observed(3, 110.0))) == {}
    # A limit that binds lowers power and passes a test by its own window: 150 > 1.3 x 110 W.
    assert last(observed(1, 110.0)) == {}


def test_windows_that_agree_speak_for_the_rule_and_a_contradiction_ends_it() -> None:
    assert last(observed(4, 100.0), observed(2, 101.0, rse=0.01))[3] == DOUBT**2
    # An agreement to 20 % shows nothing.
    assert last(observed(4, 80.0), observed(2, 81.0, rse=0.05))[3] == DOUBT
    for slower in (observed(2, 100.0, 0.01, time_s=1.1), observed(2, 90.0, 0.01)):
        assert last(observed(4, 100.0), slower, observed(9, 100.0)) == {}


def visits(
    candidates: Candidates, answer: Callable[[Configuration], tuple[float, float]], most: int
) -> list[Configuration]:
    """Return the first configurations that a search visits."""
    planner, records = CandidatePlanner(candidates, seed=0), list[ProbeRecord]()
    probed: list[Configuration] = []
    while len(probed) < most and (visited := probe_with(planner, records, answer)):
        probed += visited
    return probed


def limit_W(configuration: Configuration) -> float:
    return float(configuration.get("power_limit_W"))  # type: ignore[arg-type]


def test_equal_limits_are_probed_last() -> None:
    def answer(configuration: Configuration) -> tuple[float, float]:
        draws_W = 70.0 if configuration.micro_batch == 1 else 280.0
        power_W = min(draws_W, limit_W(configuration))
        return (draws_W / power_W) ** 0.5 / configuration.micro_batch**0.3, power_W

    probed = visits(grid((1, 8), LIMITS_W), answer, 10)
    assert set(probed) == set(CONFIGURATIONS)
    assert {one.micro_batch for one in probed[-2:]} == {1}


def bursts(configuration: Configuration) -> tuple[float, float]:
    """A share of the work draws 250 W, the rest 70 W: limits far above the mean bind."""
    b, w = configuration.micro_batch, limit_W(configuration)
    octaves = math.log2(b / 8) / 3
    work_s, share = 100 * (1 + 12 / b + 0.1 * (b / 64) ** 2), 0.30 + 0.02 * octaves
    power_W = min(250 + 4 * octaves, w)
    burst_s = work_s * share * math.sqrt((250 + 4 * octaves) / power_W)
    time_s = burst_s + work_s * (1 - share)
    return time_s, (burst_s * power_W + work_s * (1 - share) * 70) / time_s


def chance(configuration: Configuration) -> tuple[float, float]:
    """No limit binds, and rows differ by chance: the front is one lucky row."""
    b = configuration.micro_batch
    normal = np.random.default_rng([b, int(limit_W(configuration))]).standard_normal(2)
    time_s = 10 * (1 + 2000 / b) * math.exp(0.02 * normal[0])
    return time_s, (68 - 0.45 * math.log2(b / 8)) * math.exp(0.01 * normal[1])


def low(configuration: Configuration) -> tuple[float, float]:
    """The lowest limit lies far below the knee, by another amount in each launch."""
    b, w = configuration.micro_batch, limit_W(configuration)
    work_s = 100 * (1 + 0.03 * abs(b - 5.5))
    if w == 100:
        return work_s * (2 + (7 * b % 11) / 11), 88 + 0.5 * b
    return work_s * (250 / w) ** 0.35, min(0.97 * w, 140 + 5 * b + 0.45 * w)


@pytest.mark.parametrize(
    ("answer", "batches", "limits_W", "most"),
    [
        (bursts, (8, 32, 64, 96), (125, 150, 175, 200, 225, 250), 18),
        (chance, (1024, 4096, 16384), LIMITS_W, 15),
        (low, tuple(range(3, 9)), (100, 150, 200, 250), 20),
    ],
)
def test_the_front_is_found(
    answer: Callable[[Configuration], tuple[float, float]],
    batches: tuple[int, ...],
    limits_W: tuple[int, ...],
    most: int,
) -> None:
    candidates = grid(batches, limits_W)
    probed = visits(candidates, answer, most)

    def front(configurations: list[Configuration]) -> set[tuple[float, float]]:
        points = {(t * p, t) for t, p in map(answer, configurations)}
        return {
            x for x in points if not any(y != x and y[0] <= x[0] and y[1] <= x[1] for y in points)
        }

    assert front(probed) == front(list(candidates.configurations))
