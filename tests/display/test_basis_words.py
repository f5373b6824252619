"""Basis of a result: measured, recorded or predicted, and the words of each."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.support.results import ESTIMATED, NVML, TWIN, failed, small_result
from tuner.display.report import render_report
from tuner.display.text import summary_lines
from tuner.display.view import WORDS, View
from tuner.search_spaces.job import load_job
from tuner.workload.records.probe import Basis, MeterInfo

PREDICTING = MeterInfo("simulated", "node", "the analytic models", estimated=True)


def test_every_basis_has_words_of_its_own() -> None:
    assert WORDS.keys() == set(Basis)
    for name in (item.name for item in fields(WORDS[Basis.MEASURED])):
        measured, predicted = (getattr(WORDS[b], name) for b in (Basis.MEASURED, Basis.PREDICTED))
        assert measured != predicted, name
    assert WORDS[Basis.RECORDED].found == "measured"


@pytest.mark.parametrize("meter", [NVML, ESTIMATED, TWIN], ids=["metered", "estimated", "twin"])
def test_the_mark_of_a_meter_does_not_change_the_basis(meter: MeterInfo) -> None:
    assert meter.basis is Basis.MEASURED
    assert meter.marks.get("twin", False) is meter.twin
    result = replace(small_result(meter=meter), job=load_job("tiny-gpt"))
    assert View(result).basis is Basis.MEASURED


def test_without_a_job_the_figures_are_of_a_recording() -> None:
    view = View(replace(small_result(), job=None))
    assert view.basis is Basis.RECORDED
    assert "from a recording" in render_report(view.result)


def test_a_study_of_failed_predictions_alone_is_a_prediction() -> None:
    record = failed("p0001", "out_of_memory", "out of memory", "")
    empty = replace(
        small_result(),
        points=(),
        front_points=(),
        best=None,
        baseline=None,
        failures=(replace(record, meter=PREDICTING),),
    )
    assert View(empty).basis is Basis.PREDICTED
    assert View(replace(empty, failures=(record,))).basis is not Basis.PREDICTED


def test_predictions_are_called_that_wherever_the_basis_is_said() -> None:
    result = small_result(meter=PREDICTING)
    view = View(replace(result, job=load_job("tiny-gpt")))
    assert view.basis is Basis.PREDICTED
    assert view.words.notice in summary_lines(view.result)
    page = render_report(view.result)
    assert "predicted, nothing was measured" in page
    assert "Search spent" not in page
