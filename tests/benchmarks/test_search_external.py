"""Samplers in other environments: what is said over the pipe, and their installation."""

from __future__ import annotations

import importlib.util
import os
import sys
import venv
from pathlib import Path

import pytest

from benchmarks.search import external
from benchmarks.search.__main__ import main, peers_installed
from benchmarks.search.ask_tell import PEERS, Peer
from benchmarks.search.environments import (
    ENVIRONMENTS,
    PEERS_VARIABLE,
    Environment,
    install,
    python_of,
)
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


def test_a_script_that_serves_a_sampler(problem: Problem, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(external.SCRIPTS)!r})\n"
        "from line_protocol import serve\n"
        "class Highest:\n"
        "    def __init__(self, problem): self.problem, self.told = problem, 0\n"
        "    def tell(self, number, energy_J, time_s): self.told += 1\n"
        "    def ask(self, still_open):\n"
        "        print('no answer')  # what a package prints\n"
        "        assert self.told + len(still_open) == len(self.problem.configurations)\n"
        "        wanted = {name: levels[-1] for name, levels in self.problem.knobs.items()}\n"
        "        return self.problem.nearest(wanted, still_open)\n"
        "serve(Highest)\n"
    )
    candidates = Candidates.from_configurations(truth_of(problem).logs)
    sampler = ExternalSweep(candidates, ProbeCost(), 0, [sys.executable, str(script)])
    still_open = list(candidates.configurations)
    for shape in (8, 6):  # of the launches that are left, that with the most
        asked = sampler.ask(still_open)
        assert asked.get("shape") == shape
        for one in [one for one in still_open if one.launch == asked.launch]:
            sampler.tell(one, 1.0, 100.0)
            still_open.remove(one)


def test_the_nearest_configuration_changes_the_fewest_knobs_and_levels() -> None:
    spec = importlib.util.spec_from_file_location(
        "line_protocol", external.SCRIPTS / "line_protocol.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["line_protocol"] = module
    spec.loader.exec_module(module)
    del sys.modules["line_protocol"]
    rows = [{"a": a, "b": b} for a in (1, 2, 4) for b in ("x", "y")]
    problem = module.Problem({"a": [1, 2, 4], "b": ["x", "y"]}, rows, 0)
    assert problem.nearest({"a": 1, "b": "x"}, [2, 3, 4]) == 2  # one level of one knob
    assert problem.nearest({"a": 1, "b": "x"}, [3, 4]) == 4  # two levels of one knob, not two knobs
    assert (problem.ordered("a"), problem.ordered("b")) == (True, False)


def test_what_is_missing_is_said_with_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for set_to in (None, str(tmp_path)):
        monkeypatch.delenv(PEERS_VARIABLE, raising=False)
        if set_to is not None:
            monkeypatch.setenv(PEERS_VARIABLE, set_to)
        assert "--peers smac3" in PEERS["smac3-sweep"].missing()
    python = tmp_path / "smac3" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert PEERS["smac3-sweep"].missing() == ""


def test_an_environment_that_cannot_be_made_is_removed_and_its_peer_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PEERS_VARIABLE, str(tmp_path / "peers"))
    create = venv.create
    monkeypatch.setattr(venv, "create", lambda folder, with_pip: create(folder, with_pip=False))
    with peers_installed(["smac3"]):
        assert "--peers smac3" in PEERS["smac3-sweep"].missing()
    printed = capsys.readouterr().out
    assert "smac3: its installation failed" in printed
    assert "No module named pip" in printed
    assert not (tmp_path / "peers" / "smac3").exists()


def test_environments_are_made_in_a_temporary_folder_if_none_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(PEERS_VARIABLE, raising=False)
    folders = []
    monkeypatch.setattr(
        "benchmarks.search.__main__.install", lambda name: folders.append(python_of(name)) or ""
    )
    with peers_installed(["hebo", "smac3"]):
        kept = Path(os.environ[PEERS_VARIABLE])
        assert kept.is_dir()
    assert folders == [kept / name / "bin" / "python" for name in ("hebo", "smac3")]
    assert not kept.exists()
    assert PEERS_VARIABLE not in os.environ


def test_a_given_environment_is_used_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PEERS_VARIABLE, str(tmp_path))
    python = tmp_path / "given" / "bin" / "python"
    venv.create(tmp_path / "given", with_pip=False)
    monkeypatch.setitem(ENVIRONMENTS, "given", Environment(("no-such",), "json"))
    assert install("given") == ""
    monkeypatch.setitem(ENVIRONMENTS, "given", Environment(("no-such",), "no_such_module"))
    assert "No module named 'no_such_module'" in install("given")
    assert python.exists()


def test_a_peer_that_is_not_known_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--peers", "smac3,spearmint"])
    assert "'spearmint' is none of smac3, hebo, kernel_tuner" in capsys.readouterr().err
