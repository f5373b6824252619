"""A long benchmark that was stopped, or run in parts, goes on with what it lacks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import faults, fuzz, pieces
from benchmarks.figures import ROOT
from benchmarks.pieces import Pieces, part
from benchmarks.search.problems import Problem
from tests.faults.harness import Fault, Outcome
from tests.fuzz.fuzzer import Seen
from tests.fuzz.kinds import Kind


def test_what_is_kept_is_not_searched_again(tmp_path: Path) -> None:
    searched = []

    def search(problem: Problem, seed: int) -> float:
        searched.append((problem.group, seed))
        return seed / 2

    def work(folder: str) -> list[tuple[Problem, int]]:
        return [(Problem(tmp_path / folder / "table", "a"), seed) for seed in (0, 1, 2)]

    file = tmp_path / "pieces"
    assert Pieces(file).results(search, work("one")[:2]) == [0.0, 0.5]
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:10])  # stopped while it wrote
    # A table that is made stands in another folder the next time.
    assert Pieces(file).results(search, work("another")) == [0.0, 0.5, 1.0]
    assert Pieces(file).results(search, work("one")) == [0.0, 0.5, 1.0]
    assert searched == [("a", 0), ("a", 1), ("a", 2)]


def test_results_of_other_code_are_not_counted(tmp_path: Path, monkeypatch) -> None:
    file, made = tmp_path / "pieces", []

    def call(number: int) -> int:
        made.append(number)
        return number

    monkeypatch.setattr("benchmarks.pieces.ROOT", tmp_path)
    (tmp_path / "code").mkdir()
    for text in ("x = 1\n", "x = 1\n", "x = 2\n"):
        (tmp_path / "code" / "a.py").write_text(text)
        pieces._digest.cache_clear()
        Pieces(file, folders=("code",)).results(call, [(0,)])
    pieces._digest.cache_clear()
    assert made == [0, 0]


WORK = """import os, time
from pathlib import Path

def work(number):
    Path(f"pid-{os.getpid()}").touch()
    time.sleep(30)
"""


def test_what_a_benchmark_started_ends_with_it_when_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "of_a_test.py").write_text(WORK)
    code = "from benchmarks.pieces import Pieces; from of_a_test import work; "
    words = [sys.executable, "-c", f"{code}Pieces(jobs=2).results(work, [(0,), (1,)])"]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = subprocess.Popen(words, cwd=tmp_path, env=environ, stderr=subprocess.DEVNULL)
    until_s = time.monotonic() + 25
    while len(workers := [*tmp_path.glob("pid-*")]) < 2:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    command.terminate()
    command.wait(10)
    while any(Path("/proc", each.name.partition("-")[2]).exists() for each in workers):
        assert time.monotonic() < until_s
        time.sleep(0.05)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/2/3", "a/b", "-1/2", "1/0"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="K/N"):
        part(text)


def _figures(capsys) -> dict[str, int]:
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return {words[1]: int(words[2]) for words in lines if words[:1] == ["figure"]}


def test_faults_in_parts_add_up_and_the_failed_are_caused_again(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    caused = []

    def fault(name: str, *outcomes: Outcome) -> Fault:
        def cause(folder: Path) -> Outcome:
            caused.append(name)
            return outcomes[min(caused.count(name), len(outcomes)) - 1]

        return Fault(name, cause)

    busy = fault("busy", Outcome(said="x", lost=2, wrong=("it waited too long",)), Outcome("x"))
    sound, silent = fault("sound", Outcome("x")), fault("silent", Outcome())
    every = [sound, busy, silent, fault("no disk", Outcome(skipped="no permission"))]
    monkeypatch.setattr("benchmarks.faults.all_faults", lambda: every)
    kept = ["--pieces", str(tmp_path / "pieces")]
    faults.main([*kept, "--part", "1/2"])
    assert caused == ["sound", "silent"]
    faults.main([*kept, "--part", "2/2"])
    capsys.readouterr()
    faults.main(kept)
    assert caused == ["sound", "silent", "busy", "no disk"]
    first = _figures(capsys)
    assert (first["faults"], first["survived"], first["skipped"], first["lost"]) == (3, 1, 1, 2)
    assert first["caused_again"] == 0
    faults.main([*kept, "--again"])
    assert caused[4:] == ["busy", "silent"]
    again = _figures(capsys)
    assert (again["survived"], again["lost"], again["caused_again"]) == (2, 0, 2)


@pytest.mark.parametrize("parts", [("1/1",), ("2/2", "1/2")])
def test_inputs_in_parts_add_up(parts, tmp_path: Path, monkeypatch, capsys) -> None:
    chunks = []

    def chunk(name: str, first: int, beyond: int, seed: int) -> tuple[str, Seen]:
        chunks.append((name, first))
        bad = Counter({f"{name}: ValueError (input {first} from {first})": 1})
        return name, Seen(tried=beyond - first, bad=bad)

    kinds = [Kind("one", lambda folder: lambda draw: None, 2.0)]
    kinds.append(Kind("other", lambda folder: lambda draw: None))
    monkeypatch.setattr("benchmarks.fuzz.KINDS", kinds)
    monkeypatch.setattr("benchmarks.fuzz.fuzz_chunk", chunk)
    kept = ["--workers", "1", "--inputs", "450", "--pieces", str(tmp_path / "pieces")]
    for each in parts:
        fuzz.main([*kept, "--part", each])
    capsys.readouterr()
    fuzz.main(kept)
    assert sorted(chunks) == [("one", 0), ("one", 100), ("one", 200), ("other", 0), ("other", 100)]
    assert _figures(capsys) == {"inputs": 450, "tracebacks": 5, "hangs": 0, "files_outside": 0}
