"""Rules of recommendation on made-up searches, and answers in every place that names one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import answers
from benchmarks.made_up_searches import Row
from benchmarks.verdicts import figures_of, measured
from tests.golden import prepared

KINDS = [Row("73", "1", 5), Row("flat", "3", 8), Row("10", "1", 12, ended="failed")]


def test_a_large_saving_is_recommended_after_five_probes() -> None:
    found = dict(zip(KINDS, measured(KINDS, 3, 7), strict=True))
    assert [outcome.saved is not None for outcome in found[KINDS[0]]] == [True] * 3
    assert all(outcome.launches <= 1 for outcome in found[KINDS[0]])


def test_figures_are_the_worst_of_their_rows() -> None:
    kinds = [Row(truth, "1") for truth in ("flat", "5", "10", "30")]
    kinds += [Row("73", spread) for spread in "135"]
    found = dict(zip(kinds, measured(kinds, 1, 7), strict=True))
    assert {f.name: f.value for f in figures_of(found)}["recommended_73_percent"] == 1.0


@pytest.mark.slow
def test_recorded_runs_name_one_choice(tmp_path: Path) -> None:
    prepared(tmp_path)
    for run in ("refuted", "script"):
        advised, best = answers.named(run, tmp_path / "runs")
        assert (len(advised), len(best)) == (1, 1)


def test_an_answer_survives_an_interrupt() -> None:
    assert answers.lost(answers.Case("interrupted", {"max_probes": 12}, 6), 1) is False
