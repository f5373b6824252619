"""One figure for one quantity: the posterior's saving, wherever a saving is shown."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from tests.answer.test_judge import judge_of
from tests.answer.test_posterior import launch
from tests.answer.test_recommendation import result_of
from tests.support.results import large_result
from tuner.display.notebook import result_html
from tuner.display.report import render_report
from tuner.display.text import answer_lines, choice_lines, summary_lines
from tuner.display.view import View
from tuner.formatting import change
from tuner.problem.constraints import Constraints
from tuner.result import Result


def searched_study() -> Result:
    """A result of windows in 4 launches, whose posterior shrinks the saving that they show."""
    rng = np.random.default_rng(0)
    records = [launch(rng, 0, 0, 0.0), launch(rng, 1, 1, 0.0, time=-0.6)]
    records += [launch(rng, 2, 0, 0.0), launch(rng, 3, 2, 0.0, time=-0.1)]
    return result_of(judge_of(records))


@pytest.mark.parametrize(
    "show",
    [
        lambda result: "\n".join(summary_lines(result)),
        lambda result: "\n".join(answer_lines(result)),
        lambda result: "\n".join(
            choice_lines(result.choose(Constraints(budget_kJ=budget(result))))
        ),
        lambda result: unescape(re.sub(r"<[^>]*>", " ", result_html(result))),
        lambda result: text_of_page(result),
    ],
    ids=["front", "answer", "choose", "notebook", "report"],
)
def test_the_saving_of_the_posterior_is_the_only_one_shown_for_the_choice(show) -> None:  # type: ignore[no-untyped-def]
    result = searched_study()
    advice = result.recommendation
    assert advice is not None
    assert advice.point is result.best
    assert advice.energy is not None
    assert advice.time is not None
    text = show(result)
    for found, saved, lost in (
        (advice.energy, "less energy", "more energy"),
        (advice.time, "less time", "more time"),
    ):
        stated = change(1 + found.relative, 1.0, saved, lost).removesuffix(" " + saved.split()[1])
        assert stated in text


def budget(result: Result) -> float:
    """The least budget that the choice meets."""
    assert result.best is not None
    return result.best.energy_to_solution_kJ * 1.0001


def text_of_page(result: Result) -> str:
    """The upper part of the report, without the tables and plots below it."""
    page = render_report(result).partition("<section>")[0]
    return unescape(re.sub(r"<[^>]*>", " ", page))


def test_json_holds_the_saving_of_the_posterior_for_a_choice() -> None:
    result = searched_study()
    found = result.choose(Constraints(budget_kJ=budget(result))).to_json()
    advice = result.to_json()["recommendation"]
    for name in ("energy", "time"):
        assert found[name]["relative"] == advice[name]["relative"]
    same = result.choose(Constraints(deadline_s=1e9)).to_json()
    assert set(same) == set(found)


def test_one_unit_for_the_whole_answer() -> None:
    result = large_result()
    larger = [
        replace(
            point,
            energy_to_solution_kJ=100 * point.energy_to_solution_kJ,
            time_to_solution_s=100 * point.time_to_solution_s,
        )
        for point in result.points
    ]
    by_name = {point.configuration: point for point in larger}
    assert result.best is not None
    assert result.baseline is not None
    result = replace(
        result,
        points=tuple(larger),
        front_points=tuple(by_name[p.configuration] for p in result.front_points),
        best=by_name[result.best.configuration],
        baseline=by_name[result.baseline.configuration],
    )
    assert View(result).units.energy == "kWh"
    assert result.spent.energy_kJ < 3600
    for lines in (answer_lines(result), summary_lines(result)):
        text = "\n".join(lines)
        assert f"Spent: {View(result).units.energy_text(result.spent.energy_kJ)} and" in text
        assert not re.search(r"\d [kM]?J\b", text)


def test_a_search_that_took_far_more_than_its_points_has_a_unit_of_its_own() -> None:
    result = large_result()
    small = replace(result.spent, energy_kJ=0.05), "50.0 J"
    large = replace(result.spent, energy_kJ=19.6), "19.6 kJ"
    points = tuple(replace(p, energy_to_solution_kJ=0.05) for p in result.points)
    result = replace(
        result, points=points, front_points=points[:1], best=points[0], baseline=points[1]
    )
    for spent, text in (small, large):
        assert View(replace(result, spent=spent)).spent == text
