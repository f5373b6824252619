"""A search on a simulated cluster: no figure of it is called measured or verified."""

from __future__ import annotations

import csv
import json
import re

import pytest

import tuner
from tests.support.studies import run_optimize
from tuner.cli.main import main
from tuner.display.report import render_report
from tuner.display.text import answer_lines, summary_lines
from tuner.problem.settings import SearchSettings
from tuner.workload.records.trace import read_trace


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return run_optimize(
        "opt-350m",
        cluster="a100-8",
        executor="simulated",
        search=SearchSettings(max_probes=8, seed=1),
        runs_dir=tmp_path_factory.mktemp("plan") / "runs",
        name="plan",
        report=False,
    )


def test_every_point_is_predicted_and_nothing_is_verified(plan):
    for result in (plan, tuner.load_result(plan.run_dir)):
        points = [*result.points, result.best, result.baseline]
        assert {point.source for point in points} == {"predicted"}
        assert result.verification.ended.kind == "prediction"
        assert result.verification.probes == 0
        assert result.spent.probes <= 8
        text = json.dumps(result.to_json())
        assert '"source": "measured"' not in text
        assert '"how_measured": "measured' not in text
    records = read_trace(plan.run_dir / "trace" / "probes.jsonl").records
    purposes = {record.request.purpose for record in records}
    assert "baseline" in purposes
    assert "verify" not in purposes


@pytest.mark.parametrize("lines", [summary_lines, answer_lines])
def test_the_answer_says_what_a_real_search_would_take(plan, lines):
    text = "\n".join(lines(plan))
    assert "A real search like this would take about " in text
    assert re.search(r"and [\d.]+ kWh of the cluster, in ", text)
    assert "Spent:" not in text
    for word in ("verified by", "fresh launches", "p < "):
        assert word not in text.lower()
    assert "Every figure is predicted" in text


def test_the_report_and_the_exported_table_say_so_too(plan, tmp_path):
    page = render_report(plan)
    assert "What a real search would take" in page
    assert "Search spent" not in page
    words = ["export", str(plan.run_dir), "--to", "csv", "--out", str(tmp_path / "points.csv")]
    assert main(words) == 0
    with (tmp_path / "points.csv").open() as file:
        assert {row["source"] for row in csv.DictReader(file)} == {"predicted"}


def test_a_plan_and_a_search_on_predictions_have_one_today(plan, tmp_path):
    """One job on one cluster had 10.2 kWh in a plan, 9.84 in the demo and 9.55 in Python."""
    predicted = tuner.plan("opt-350m", cluster="a100-8", runs_dir=tmp_path, report=False)
    for figure in ("energy_to_solution_kJ", "time_to_solution_s", "power_W"):
        one, other = (getattr(each.baseline, figure) for each in (predicted, plan))
        assert other == pytest.approx(one, rel=1e-3)
