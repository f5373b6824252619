"""The benchmark of other projects' scripts: its list, their sources, and what it reads back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from benchmarks.pieces import Pieces
from benchmarks.scripts import __main__ as scripts
from benchmarks.scripts.alone import Alone, start_alone
from benchmarks.scripts.attempt import (
    PARTS,
    Attempt,
    Options,
    judge,
    misread,
    outside_windows,
)
from benchmarks.scripts.environment import Unavailable, checkout
from benchmarks.scripts.inputs import _texts, sentences
from benchmarks.scripts.programs import Program, listed, prepare
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.records.probe import Measurement

# A tool of developers, which mypy reads on every push.
pytestmark = pytest.mark.long


def _repository(where: Path) -> str:
    """Make a repository OWNER/NAME with two folders; return its commit."""
    for name in ("one/train.py", "one/large.bin", "two/large.bin"):
        file = where / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=where, check=True)
    said = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=where, check=True, capture_output=True, text=True
    )
    return said.stdout.strip()


def test_a_source_is_checked_out_at_its_commit_and_its_folder_alone(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    commit = _repository(sources / "owner" / "name")
    (sources / "owner/name/one/train.py").write_text("changed since")
    tree = checkout("owner/name", commit, "one", tmp_path / "cache", sources)
    assert (tree / "one/train.py").read_text() == "one/train.py"
    assert not (tree / "two").exists()
    whole = checkout("owner/name", commit, ".", tmp_path / "cache", sources)
    assert (whole / "two/large.bin").is_file()
    again = checkout("owner/name", commit, ".", tmp_path / "other", sources)
    assert (again / "two/large.bin").is_file()


def test_a_source_that_is_not_there_is_told(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    _repository(sources / "owner" / "name")
    with pytest.raises(Unavailable, match="git archive name"):
        checkout("owner/name", "0" * 40, ".", tmp_path / "cache", sources)
    with pytest.raises(Unavailable, match="does not exist"):
        checkout("owner/other", "0" * 40, ".", tmp_path / "cache", sources)


def test_every_program_has_a_pinned_source_and_something_to_be_right_about() -> None:
    packages, without, programs = listed()
    pinned = {requirement.partition("==")[0] for requirement in [*packages, *without]}
    assert len({program.slug for program in programs}) == len(programs) >= 30
    for program in programs:
        assert bool(program.today) != bool(program.error), program.name
        if program.repository:
            assert len(program.commit) == 40
        else:
            assert program.source.split()[0] in pinned | {"accelerate", "ray"}
    assert {*scripts.QUICK} <= {program.name for program in programs}


def test_a_program_starts_in_a_fresh_folder_with_its_inputs(tmp_path: Path) -> None:
    commit = _repository(tmp_path / "sources" / "owner" / "name")
    (tmp_path / "cache" / "inputs" / "text").mkdir(parents=True)
    program = Program(
        "A B", "train.py", repository="owner/name", commit=commit, folder="one",
        links={"data/text": "text"}, without=["large.bin"],
    )  # fmt: skip
    for _ in range(2):
        folder = prepare(program, tmp_path / "cache", tmp_path / "sources")
        assert not (folder / "left.txt").exists()
        (folder / "left.txt").write_text("from the run before")
        assert (folder / "data/text").is_dir()
        assert (folder / "train.py").is_file()
        assert not (folder / "large.bin").exists()
    assert folder.parts[-2:] == ("a-b", "one")


def _options(folder: Path, **changed: Any) -> Options:
    given = {"probes": 4, "search_s": 60.0, "limit_s": 120.0, "hand_s": 0.0, **changed}
    return Options(cache=folder, sources=None, **given)


def test_an_outcome_is_kept_for_the_same_attempt_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def attempt(program: Program, options: Options, announce: object) -> Attempt:
        tried.append(program.name)
        if program.name == "B":
            raise Unavailable("no such commit")
        return Attempt(program.name, program.origin, "answered", time=[-0.2, -0.3, -0.1])

    monkeypatch.setattr(scripts, "attempt", attempt)
    first, second = (Program(name, "python a.py", today=[1], source="a 1") for name in "AB")
    options = _options(tmp_path)
    for work in (
        [(first, options), (second, options)],
        [(first, _options(tmp_path, hand_s=20.0)), (replace(first, today=[2]), options)],
    ):
        for _ in range(2):
            found = Pieces(tmp_path / "pieces").results(scripts.attempted, work)
            assert found[0].verdict == "answered"
    assert tried == ["A", "B", "A", "A"]
    (gone,) = Pieces(tmp_path / "pieces").results(scripts.attempted, [(second, options)])
    assert (gone.verdict, gone.says) == ("unavailable", "no such commit")


def test_figures_compare_with_the_programs_themselves() -> None:
    good = Attempt("a", "a 1", "answered", own_first_step_s=2.0, today_s=3.0, first_point_s=6.0)
    good.time, good.by_hand = [-0.2, -0.3, -0.1], -0.15
    good.knobs, good.outside, good.first_window_s = ["num_workers", "threads"], 2, 4.0
    wrong = Attempt("b", "b 1", "misread", wrong=["ranks"], time=[-0.2, -0.3, -0.1], by_hand=0.1)
    wrong.knobs = ["threads"]
    dead = Attempt("c", "c 1", "error told", own_death_s=2.0, ended_s=3.0)
    absent = Attempt("d", "d 1", "unavailable", wrong=["ranks"])
    found = {figure.name: figure.value for figure in scripts.figures([good, wrong, dead, absent])}
    assert found == pytest.approx(
        {
            "programs_tried": 3,
            "answered_at_first_attempt": 2 / 3,
            "today_wrong": 1,
            "misread_silently": 1,
            "something_to_turn": 1 / 2,
            "table_outside_windows": 2,
            "today_s_over_own": 1.5,
            "first_point_s_over_own": 3.0,
            "first_point_without_window_over_own": 1.0,
            "error_told_s_over_own": 1.5,
            "recommendation_holds": 0.5,
        }
    )


def test_what_is_only_promising_is_no_recommendation_and_is_judged_by_its_direction() -> None:
    doubts = [
        Attempt(str(time), "a 1", "answered", recommended="threads=1", promises=True, by_hand=time)
        for time in (-0.5, -0.1, 0.02, None)
    ]
    assert [each.keeps_promise for each in doubts] == [True, True, False, None]
    assert [each.holds for each in doubts] == [None] * 4
    found = {figure.name: figure.value for figure in scripts.figures(doubts)}
    assert found["promise_kept"] == pytest.approx(2 / 3)
    assert "recommendation_holds" not in found


def test_todays_training_is_judged_as_far_as_it_was_read_by_hand() -> None:
    read = dict(zip(PARTS, (1, 64, None, 64), strict=True))
    assert misread(read, (1,)) == misread(read, (1, 64, 1, 64)) == misread(read, ()) == []
    assert misread(read, (2, 32)) == ["ranks", "micro_batch"]
    assert misread(read, (1, 64, 1, 0)) == ["global_batch"]


def test_a_figure_that_no_window_showed_is_counted() -> None:
    launch, other = Settings({"threads": 1}), Settings({"threads": 2})
    windows = [Measurement(Settings({}), 10, 1.0, time_s, 1.0, 1.0) for time_s in (0.10, 0.12)]
    record = SimpleNamespace(request=SimpleNamespace(launch=launch), measurements=windows)
    for time_s, expected in ((0.1, 0), (0.1204, 0), (0.13, 1), (0.09, 1)):
        point = SimpleNamespace(configuration=Configuration(launch), time_to_solution_s=5 * time_s)
        predicted = SimpleNamespace(configuration=Configuration(other), time_to_solution_s=1.0)
        result: Any = SimpleNamespace(points=[point, predicted], steps=5)
        assert outside_windows(result, [record]) == expected  # type: ignore[list-item]


def _judged(program: Program, alone: Alone, code: int | None, log: str) -> str:
    found = Attempt(program.name, program.origin)
    judge(found, program, alone, code, log)
    return found.verdict


def test_a_verdict_follows_the_program_and_not_the_answer() -> None:
    trains = Program("A", "python a.py", today=[1, 8, 1, 8])
    dies = Program("B", "python b.py", error="no module named x")
    steps = Alone(1.0, None, None, 1, None, "")
    dead = Alone(None, 1.0, 1, 0, None, "no module named x")
    assert _judged(trains, steps, 2, "tuner: what is this?") == "refused"
    assert _judged(trains, steps, 1, "Traceback") == "no answer"
    assert _judged(trains, steps, None, "") == "out of time"
    assert _judged(trains, dead, 2, "it fails") == "unavailable"
    assert _judged(dies, dead, 2, "tuner: crash: no module named x") == "error told"
    assert _judged(dies, dead, 1, "Traceback: no module named x") == "error not told"
    assert _judged(dies, dead, 2, "tuner: it fails") == "error not told"
    searched = "train on this-machine (2 x cpu-core): 6 configurations of micro_batch, threads; no"
    found = Attempt("A", "a")
    judge(found, trains, steps, 1, searched)
    assert found.knobs == ["micro_batch", "threads"]
    nothing = "tuner: nothing to try: nothing can be turned here"
    assert _judged(trains, steps, 2, nothing) == "nothing to turn"
    assert _judged(replace(trains, turns=True), steps, 2, nothing) == "refused"
    assert _judged(replace(trains, turns=True), steps, 1, nothing) == "no answer"


_STEPS = """
import torch, time
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
while True:
    optimizer.step()
    other.step()
    time.sleep(0.05)
"""


def test_a_program_alone_is_timed_to_its_first_step_and_by_its_first_optimizer(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(_STEPS)
    words = [sys.executable, "train.py"]
    seen = start_alone(words, tmp_path, dict(os.environ), steps=12, limit_s=60)
    assert (seen.ranks, seen.died_s, seen.code) == (1, None, None)
    assert seen.first_step_s is not None
    assert seen.first_step_s > 0.1
    assert seen.step_s is not None
    assert 0.05 <= seen.step_s < 5.0


def test_a_program_alone_that_dies_leaves_its_last_words(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import sys; sys.exit('no data here')"]
    seen = start_alone(words, tmp_path, dict(os.environ), limit_s=60)
    assert (seen.first_step_s, seen.code, seen.last_words) == (None, 1, "no data here")


def test_texts_are_the_same_in_every_run() -> None:
    first = list(sentences(3))
    assert first == list(sentences(3))
    assert all(len(text.split()) == 40 for text in first)


def test_wikitext_has_the_configuration_that_scripts_name(tmp_path: Path) -> None:
    _texts(tmp_path)
    _, card, _ = (tmp_path / "wikitext" / "README.md").read_text().split("---\n")
    (named,) = yaml.safe_load(card)["configs"]
    assert named["config_name"] == "wikitext-2-v1"
    assert [part["split"] for part in named["data_files"]] == ["train", "validation"]
    for part in named["data_files"]:
        lines = (tmp_path / "wikitext" / part["path"]).read_text().splitlines()
        assert json.loads(lines[0])["text"]
