"""Samplers in other environments: what is said over the pipe, and what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.search import external
from benchmarks.search.ask_tell import PEERS, Peer
from benchmarks.search.external import ExternalSweep
from benchmarks.search.problems import Problem
from benchmarks.search.runner import run
from benchmarks.search.truth import truth_of
from tuner.problem.probe_cost import ProbeCost
from tuner.search_spaces.candidates import Candidates
from tuner.testing.studies import write_table

#: Asks for the last open configuration, and ends with an error if it was not told of the others.
SCRIPT = """
import json, sys
problem = json.loads(sys.stdin.readline())
assert problem["knobs"]["shape"] == [1, 2, 3, 4, 6, 8], problem
assert problem["configurations"][0] == {"shape": 1, "speed": 1}
left = len(problem["configurations"])
for line in sys.stdin:
    message = json.loads(line)
    assert all(energy_J > time_s > 0 for _, energy_J, time_s in message["tell"])
    left -= len(message["tell"])
    assert left == len(message["open"])
    print(json.dumps({"ask": message["open"][-1] if ANSWER is None else ANSWER}), flush=True)
"""


@pytest.fixture
def problem(tmp_path: Path) -> Problem:
    return Problem(write_table(tmp_path / "table"), "made-up")


def command(tmp_path: Path, answer: int | None = None) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(f"ANSWER = {answer}\n{SCRIPT}")
    return [sys.executable, str(script)]


def test_a_script_in_another_python_chooses_the_launches(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(candidates: Candidates, cost: ProbeCost, seed: int) -> ExternalSweep:
        return ExternalSweep(candidates, cost, seed, command(tmp_path))

    monkeypatch.setitem(PEERS, "last", Peer(make, True, str))
    made = run(problem, "last", seed=0)
    # From the widest shape down to 4, which holds the front.
    assert made.found
    assert made.launches == 3
    assert 10 < made.measurements <= 15


def test_an_answer_that_is_not_open_is_an_error(problem: Problem, tmp_path: Path) -> None:
    candidates = Candidates.from_configurations(truth_of(problem).logs)
    sampler = ExternalSweep(candidates, ProbeCost(), 0, command(tmp_path, answer=99))
    with pytest.raises(RuntimeError, match="asks for 99, which is not open"):
        sampler.ask(candidates.configurations)


def test_a_script_that_ends_is_an_error(problem: Problem) -> None:
    candidates = Candidates.from_configurations(truth_of(problem).logs)
    ended = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.stdin.readline()"]
    sampler = ExternalSweep(candidates, ProbeCost(), 0, ended)
    with pytest.raises(RuntimeError, match="ended without an answer"):
        sampler.ask(candidates.configurations)


def test_what_is_missing_is_said_with_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(external.PEERS_VARIABLE, raising=False)
    assert "pip install smac" in PEERS["smac-sweep"].missing()
    monkeypatch.setenv(external.PEERS_VARIABLE, str(tmp_path))
    assert "pip install smac" in PEERS["smac-sweep"].missing()
    python = tmp_path / "smac" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert PEERS["smac-sweep"].missing() == ""
