"""The score of a look: what counts as right, wrong and unknown."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scripts.__main__ import Listed
from benchmarks.today import Look, Seen, figures_of, measured, pinned
from benchmarks.today_scripts import OWN, UNKNOWN, Truth
from tuner.workload.node.machine import detect_cluster


@pytest.mark.parametrize(
    ("truth", "found", "verdict"),
    [
        ((8, 4, 32), (8, 4, 32), "right"),
        ((8, 4, 32), (8, None, None), "unknown"),
        ((8, 4, 32), (8, 1, None), "wrong"),
        (UNKNOWN, UNKNOWN, "unknown"),
        (UNKNOWN, (7, 1, 7), "wrong"),  # a number where none is right
        ((8, 1, None), (8, 1, 16), "wrong"),
    ],
)
def test_the_worst_value_counts(truth: Truth, found: Truth, verdict: str) -> None:
    assert Seen("x", truth, Look(found)).verdict == verdict


def test_a_knob_that_changes_the_training_is_wrong() -> None:
    look = Look((8, 4, 32), turned=("micro_batch",))
    assert Seen("x", (8, 4, 32), look, turns=()).verdict == "wrong"
    assert Seen("x", (8, 4, 32), look, turns=("micro_batch",)).verdict == "right"
    assert (
        Seen("x", (8, 4, 32), replace(look, turned=()), turns=("micro_batch",)).verdict == "right"
    )


def test_a_pinned_script_is_looked_at_by_its_own_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/bin/sh\n[ "$4" = "train.py --data '
        f'{tmp_path}/inputs/x" ] || {{ echo cannot >&2; exit 2; }}\n'
        'echo noise; echo \'{"found": [8, 4, 32], "turned": ["micro_batch"]}\'\n'
    )
    python.chmod(0o755)
    every = [
        Listed("one", "train.py --data $INPUTS/x", today=(8, 4, 32)),
        Listed("two", "other.py", today=(8, 4, 32)),
        Listed("three", "third.py"),
    ]
    monkeypatch.setattr("benchmarks.today.listed", lambda: ([], [], every))
    seen = pinned(tmp_path, None)
    assert [each.verdict for each in seen] == ["right", "unknown"]
    assert seen[1].look.why == "cannot"
    assert "left out three" in capsys.readouterr().out


def test_every_script_of_its_own_is_python_with_a_truth() -> None:
    assert len(OWN) >= 8
    for case in OWN:
        ast.parse(case.source)
        micro, times, whole = case.truth
        assert None in case.truth or whole == micro * times * case.ranks  # type: ignore[operator]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.skipif(detect_cluster().devices_per_node < 2, reason="needs two cores")
def test_no_script_is_taken_for_what_it_is_not(tmp_path: Path) -> None:
    seen = measured([], replace(detect_cluster(), devices_per_node=2))
    assert [s.name for s in seen if s.verdict == "wrong"] == []
    figures = {figure.name: figure.value for figure in figures_of(seen)}
    assert figures["today_right"] >= 80
    assert figures["knobs_found_without_a_word"] >= 3
    assert figures["knobs_missed"] == 0
