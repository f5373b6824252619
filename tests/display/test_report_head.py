"""Head of the report: what is tuned, what it brings, kind and run; cards grey when unclear."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import tuner
from tests.support.results import large_result
from tuner.answer.choice import decide
from tuner.answer.parts import Interval, ResolvedRequest
from tuner.display.report import render_report
from tuner.formatting import number
from tuner.problem.constraints import Constraints


def test_the_headline_says_what_the_recommendation_brings() -> None:
    result = large_result()
    page = render_report(result)
    headline = page.partition("<h1>")[2].partition("</h1>")[0]
    energy = result.recommendation.energy.relative
    # The number and its unit are never on two lines.
    assert re.search(rf"{abs(100 * energy):.0f}(\.\d)?\u00a0% less", headline)
    assert "than today" in headline
    assert f"run {result.name}" in page


def test_a_card_is_grey_where_no_difference_is_shown() -> None:
    result = large_result()
    clear = render_report(result)
    wide = Interval(1.0, 1e9)
    unclear = replace(result, baseline=replace(result.baseline, energy_interval_kJ=wide))
    unclear.__dict__["recommendation"] = result.recommendation
    page = render_report(unclear)
    grey = "than today; no difference shown"
    tiles, before = (
        each.partition('class="side"')[2].partition("<p>")[0] for each in (page, clear)
    )
    assert tiles.count(grey) == before.count(grey) + 1


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"objective": "cost", "price_per_kWh": 0.3, "price_per_gpu_hour": 2.0}, "Cost"),
        ({"objective": "carbon", "grid_gCO2_per_kWh": 360.0}, "Emissions"),
    ],
)
def test_cost_and_emissions_of_the_choice_and_of_today(asked: dict, name: str) -> None:
    result = large_result()
    assert "Cost at" not in render_report(result)
    constraints = Constraints(**asked)
    best, choice = decide(result.points, constraints)
    _, today = decide([result.baseline], constraints)
    result = replace(result, best=best, choice=choice, request=ResolvedRequest(constraints))
    page = render_report(result)
    card = next(part for part in page.split('<div class="figure">') if f">{name}" in part)
    size = 1000 if name == "Emissions" and choice.objective_value >= 1000 else 1
    assert f">{number(choice.objective_value / size)} <" in card
    assert f"today {number(today.objective_value / size)}" in card


def test_a_prediction_is_never_called_measured(tmp_path) -> None:
    result = tuner.optimize(
        "opt-350m",
        cluster="a100-8",
        executor="simulated",
        search=tuner.SearchSettings(max_probes=4),
        runs_dir=tmp_path,
    )
    page = result.report_path.read_text()
    assert len(result.points) > len(result.front_points)
    assert f"All {len(result.points)} points predicted, least energy first" in page
    assert "<div>predicted, not measured</div>" not in page
