"""Very many candidates: the sample of them, and a search that still closes in on the front."""

from __future__ import annotations

import itertools

import pytest

from tests.support.studies import probe_with
from tuner.search import joint_draws
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.joint_draws import launch_codes, neighbours
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import ProbeRecord

KNOBS = {"a": range(12), "b": range(10), "c": ("x", "y", "z")}
CANDIDATES = Candidates.from_configurations(
    Configuration(Settings(dict(zip(KNOBS, values, strict=True))), Settings(speed=speed))
    for values in itertools.product(*KNOBS.values())
    for speed in (1, 2, 3)
)


def test_neighbours_differ_in_one_knob() -> None:
    near = neighbours(launch_codes(CANDIDATES.launches), [0])
    first = CANDIDATES.launches[0]
    apart = [sum(CANDIDATES.launches[i][k] != first[k] for k in KNOBS) for i in near]
    assert sorted(set(apart)) == [0, 1]
    assert len(near) == 1 + 11 + 9 + 2


def figures(configuration: Configuration) -> tuple[float, float]:
    a, b = float(configuration.get("a")), float(configuration.get("b"))  # type: ignore[arg-type]
    speed = float(configuration.get("speed"))  # type: ignore[arg-type]
    slow = {"x": 1.0, "y": 1.3, "z": 1.6}[str(configuration.get("c"))]
    return slow * (1 + 0.05 * (a - 7) ** 2 + 0.05 * (b - 3) ** 2) / speed**0.7, 50 + 30 * speed**2


def probed_by_a_sample(seed: int) -> list[Configuration]:
    """What 40 launches visit where most launches are not looked at."""
    planner, records = CandidatePlanner(CANDIDATES, seed=seed), list[ProbeRecord]()
    probed: list[Configuration] = []
    tracked = set()
    for _ in range(40):
        visited = probe_with(planner, records, figures)
        assert visited
        assert not set(visited) & set(probed)
        probed += visited
        if planner._pool.tracked is not None:
            tracked.add(len(planner._pool.tracked))
    # 40 drawn of 360 launches, and those of the front, at most one per speed, with 23 neighbours.
    assert max(tracked) <= 3 * (40 + 3 * 24)
    return probed


@pytest.mark.parametrize(
    "seeds", [pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.long)]
)
def test_beyond_the_most_a_sample_and_the_fronts_neighbours_find_the_best_launch(
    monkeypatch: pytest.MonkeyPatch, seeds: int
) -> None:
    monkeypatch.setattr(joint_draws, "ALL_CANDIDATES", 120)
    fastest = min(figures(c)[0] for c in CANDIDATES)
    found = [
        min(figures(c)[0] for c in probed_by_a_sample(seed)) == pytest.approx(fastest)
        for seed in range(seeds)
    ]
    assert sum(found) >= seeds - seeds // 4  # one seed in ten does not draw it in 40 launches


def test_the_last_open_candidate_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Candidates.from_configurations(list(CANDIDATES)[:45])
    monkeypatch.setattr(joint_draws, "ALL_CANDIDATES", 9)
    planner, records = CandidatePlanner(few, seed=0), list[ProbeRecord]()
    count = 0
    while visited := probe_with(planner, records, figures):
        count += len(visited)
    assert count == 45
