"""A plan on a simulated cluster: no figure of it is called measured or verified."""

from __future__ import annotations

import csv
import json
import re

import pytest

from tuner.cli.main import main
from tuner.display.report import render_report
from tuner.display.text import answer_lines, summary_lines
from tuner.problem.settings import SearchSettings
from tuner.testing.studies import run_optimize


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    runs = tmp_path_factory.mktemp("plan") / "runs"
    result = run_optimize(
        "opt-350m",
        cluster="a100-8",
        executor="simulated",
        search=SearchSettings(max_probes=8, seed=1),
        runs_dir=runs,
        name="plan",
        report=False,
    )
    return result, runs


def test_every_point_is_predicted_and_nothing_is_verified(plan):
    result, _ = plan
    points = [*result.points, result.best, result.baseline]
    assert {point.source for point in points} == {"predicted"}
    assert result.verification.ended.kind == "prediction"
    assert result.verification.probes == 0
    assert result.spent.probes <= 8
    text = json.dumps(result.to_json())
    assert '"source": "measured"' not in text
    assert '"how_measured": "measured' not in text


def test_the_purpose_of_no_probe_is_to_verify(plan):
    _, runs = plan
    trace = (runs / "plan" / "trace" / "probes.jsonl").read_text()
    assert '"purpose": "baseline"' in trace or '"purpose":"baseline"' in trace
    assert not re.search('"purpose": ?"verify"', trace)


def test_the_answer_says_what_a_real_search_would_take(plan):
    result, _ = plan
    for lines in (summary_lines(result), answer_lines(result)):
        said(lines)


def said(lines):
    text = "\n".join(lines)
    assert "A real search like this would take about " in text
    assert re.search(r"and [\d.]+ kWh of the cluster, in ", text)
    assert "Spent:" not in text
    for word in ("verified by", "fresh launches", "p < "):
        assert word not in text.lower()
    assert "Every figure is predicted" in text


def test_the_report_and_the_exported_table_say_so_too(plan, tmp_path, capsys):
    result, runs = plan
    page = render_report(result)
    assert "What a real search would take" in page
    assert "Search spent" not in page
    words = ["export", "plan", "--to", "csv", "--out", str(tmp_path / "points.csv")]
    assert main([*words, "--runs-dir", str(runs)]) == 0
    with (tmp_path / "points.csv").open() as file:
        assert {row["source"] for row in csv.DictReader(file)} == {"predicted"}


def test_the_run_read_again_is_a_plan_as_well(plan, capsys):
    _, runs = plan
    assert main(["show", "plan", "--json", "--runs-dir", str(runs)]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {point["source"] for point in again["points"]} == {"predicted"}
    assert again["verification"]["ended"] == {"kind": "prediction"}
