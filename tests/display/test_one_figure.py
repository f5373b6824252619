"""One figure for one quantity: the verified saving, wherever a saving is shown."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

import pytest

from tuner.display.answer import answer_lines
from tuner.display.notebook import result_html
from tuner.display.report import render_report
from tuner.display.text import spent_text, summary_lines, units_of
from tuner.problem.constraints import Constraints
from tuner.results.parts import Attempt, Verification
from tuner.results.result import Result
from tuner.results.significance import Difference
from tuner.testing.results import large_result

ENERGY = Difference("energy_per_step", -0.217, -0.23, -0.20, 1e-5, "t on 3 and 3 launches")
TIME = Difference("step_time", 0.081, 0.07, 0.09, 1e-5, "t on 3 and 3 launches")


def verified() -> Result:
    """A result whose fresh launches saved less than the search's measurements promise."""
    result = large_result()
    assert result.best is not None
    attempt = Attempt(result.best.configuration, 3, TIME, ENERGY, True, "less energy shown", "")
    sentence = "Verified by 3 fresh launches each: 22 % less energy and 8.1 % more time."
    return replace(result, verification=Verification("confirmed", sentence, (attempt,), 6, 12.0))


@pytest.mark.parametrize(
    "show",
    [
        lambda result: "\n".join(summary_lines(result)),
        lambda result: "\n".join(answer_lines(result)),
        lambda result: "\n".join(result.choose(Constraints(budget_kJ=budget(result))).lines()),
        lambda result: unescape(re.sub(r"<[^>]*>", " ", result_html(result))),
        lambda result: text_of_page(result),
    ],
    ids=["front", "answer", "choose", "notebook", "report"],
)
def test_the_verified_saving_is_the_only_one_shown_for_the_choice(show) -> None:  # type: ignore[no-untyped-def]
    result = verified()
    best, today = result.best, result.baseline
    assert best is not None
    assert today is not None
    measured = abs(best.energy_to_solution_kJ / today.energy_to_solution_kJ - 1)
    assert f"{100 * measured:.0f}" not in ("22", "8"), "the two figures must differ"
    text = show(result)
    assert "22 % less" in text
    assert "8.1 % more" in text
    assert f"{100 * measured:.0f} % less" not in text


def budget(result: Result) -> float:
    """The least budget that the choice meets."""
    assert result.best is not None
    return result.best.energy_to_solution_kJ * 1.0001


def text_of_page(result: Result) -> str:
    """The upper part of the report, without the tables and plots below it."""
    page = render_report(result).partition("<section>")[0]
    return unescape(re.sub(r"<[^>]*>", " ", page))


def test_json_holds_the_verified_saving_of_a_choice() -> None:
    result = verified()
    found = result.choose(Constraints(budget_kJ=budget(result))).to_json()
    assert found["energy"]["relative"] == ENERGY.relative
    assert found["time"]["relative"] == TIME.relative
    advice = result.to_json()["recommendation"]
    assert advice["energy"]["relative"] == ENERGY.relative
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
    assert units_of(result).energy == "kWh"
    assert result.spent.energy_kJ < 3600
    for lines in (answer_lines(result), summary_lines(result)):
        text = "\n".join(lines)
        assert f"Spent: {units_of(result).energy_text(result.spent.energy_kJ)} and" in text
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
        assert spent_text(replace(result, spent=spent)) == text
