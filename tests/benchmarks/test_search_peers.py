"""Samplers of the benchmark that ask and tell: what a launch costs them, and that they sweep."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.figures import ROOT
from benchmarks.search import ask_tell
from benchmarks.search.ask_tell import PEERS, peer
from benchmarks.search.peers import HillClimb, OptunaSweep
from benchmarks.search.problems import Problem
from benchmarks.search.runner import run
from benchmarks.search.samplers import SWEEPING, planner_named
from benchmarks.search.start import start_of
from benchmarks.search.truth import truth_of
from tests.support.studies import table_point, write_table
from tuner.problem.problem import ProbeCost
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.space import Candidates

# A tool of developers, which mypy reads on every push.
pytestmark = pytest.mark.long

GROUP = "made-up"
COST = ProbeCost()


@pytest.fixture
def problem(tmp_path: Path) -> Problem:
    return Problem(write_table(tmp_path / "table"), GROUP)


def candidates_of(problem: Problem) -> Candidates:
    return Candidates.from_configurations(truth_of(problem).logs)


@pytest.mark.parametrize("name", SWEEPING)
def test_a_sweeping_peer_pays_one_launch_for_the_settings_of_it(
    problem: Problem, name: str
) -> None:
    if PEERS[name].missing():
        pytest.skip(PEERS[name].missing())
    truth = truth_of(problem)
    made = run(problem, name, seed=1)
    assert made.found
    # Shape 4 holds the whole front; every other launch was swept whole before it, or not at all.
    assert 5 * (made.launches - 1) < made.measurements <= 5 * made.launches
    assert made.launches <= 6
    launch_kJ = [10.0 * 0.5 * table_point(s, 1)[1] / 1000 for s in (1, 2, 3, 4, 6, 8)]
    start = made.problem, made.seed
    started_W = truth.logs[start_of(*start)]  # the first launch begins at the highest speed
    launch_kJ.append(10.0 * 0.5 * np.exp(started_W[0] - started_W[1]) / 1000)
    visits_kJ = [5.0 * table_point(s, v)[1] / 1000 for s in (1, 2, 3, 4, 6, 8) for v in range(1, 6)]
    assert made.kJ <= 1.0001 * (sum(launch_kJ) + sum(visits_kJ))
    assert made.kJ < truth.whole_kJ


def sweep(sampler: ask_tell.AskTell, open_: Sequence[Configuration]) -> list[Configuration]:
    """Answer the sampler from the table until it enters a second launch."""
    left, asked = list(open_), []
    while left:
        chosen = sampler.ask(left)
        if asked and chosen.launch != asked[0].launch:
            break
        asked.append(chosen)
        left.remove(chosen)
        sampler.tell(chosen, *table_point(chosen.get("shape"), chosen.get("speed")))
    return asked


def test_the_hill_climb_sweeps_where_it_is_started_and_moves_to_a_neighbour(
    problem: Problem,
) -> None:
    candidates = candidates_of(problem)
    climb = HillClimb(candidates, COST, 0)
    start = next(c for c in candidates.configurations if (c.get("shape"), c.get("speed")) == (6, 5))
    climb.tell(start, *table_point(6, 5))
    left = [c for c in candidates.configurations if c != start]
    first = sweep(climb, left)
    assert [(c.get("shape"), c.get("speed")) for c in first] == [(6, s) for s in (1, 2, 3, 4)]
    left = [c for c in left if c not in first]
    assert not climb.ended(left)
    assert climb.ask(left).get("shape") in {4, 8}


@pytest.mark.parametrize("name", ["tpe-sweep", "nsgaii-sweep"])
def test_an_optuna_sampler_is_told_every_setting_of_a_sweep(problem: Problem, name: str) -> None:
    candidates = candidates_of(problem)
    sampler = PEERS[name].make(candidates, COST, 0)
    assert isinstance(sampler, OptunaSweep)
    first = sweep(sampler, candidates.configurations)
    complete = [t for t in sampler._study.get_trials() if t.state.name == "COMPLETE"]
    assert {(t.params["shape"], t.params["speed"]) for t in complete} == {
        (c.get("shape"), c.get("speed")) for c in first
    }
    shape, speed = complete[0].params["shape"], complete[0].params["speed"]
    time_s, power_W = table_point(shape, speed)
    assert complete[0].values == pytest.approx([time_s * power_W, time_s])


def test_a_sampler_is_added_by_name_and_found_out_when_it_asks_for_what_is_closed(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask_tell, "PEERS", dict(PEERS))

    class Stubborn:
        def __init__(self, candidates: Candidates, cost: ProbeCost, seed: int) -> None:
            self.first = candidates.configurations[0]

        def tell(self, configuration: Configuration, time_s: float, power_W: float) -> None:
            assert configuration.get("speed") in {1, 5}  # its own, or where every search starts

        def ask(self, still_open: Sequence[Configuration]) -> Configuration:
            return self.first

    monkeypatch.setitem(PEERS, "stubborn", ask_tell.Peer(Stubborn, True, str))
    planner = planner_named("stubborn", candidates_of(problem), COST, 0)
    assert isinstance(planner, ask_tell.AskTellPlanner)
    with pytest.raises(ValueError, match=r"Stubborn asks for .* which is not open"):
        run(problem, "stubborn", seed=0)


def test_the_decorator_enters_a_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: dict[str, ask_tell.Peer] = {}
    monkeypatch.setattr(ask_tell, "PEERS", entered)

    @peer("mine", sweeps=False)
    class Mine(HillClimb):
        pass

    assert entered["mine"].make is Mine
    assert not entered["mine"].sweeps
    assert not entered["mine"].missing()


def test_values_of_unlike_knobs_have_an_order() -> None:
    from benchmarks.search.ask_tell import level_order

    levels = [Settings({"a": value}) for value in (2, 10, 1.5, "b", "a")]
    assert [one["a"] for one in sorted(levels, key=level_order)] == [1.5, 2, 10, "a", "b"]


def test_the_readme_has_a_sampler_of_twenty_lines_that_runs(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "benchmarks" / "search" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    body = code[code.index("@peer") :]
    assert len(body.strip().splitlines()) <= 20
    monkeypatch.setitem(PEERS, "my-sampler", None)  # removed again after the test
    exec(compile(code, "README", "exec"), {})
    made = run(problem, "my-sampler", seed=0)
    assert made.found
    assert made.launches < made.measurements
