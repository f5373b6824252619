"""Head of the report: what is tuned, what it brings, kind and run; cards grey when unclear."""

from __future__ import annotations

from dataclasses import replace

from tuner.display.html.answer_parts import top_part
from tuner.display.text import units_of
from tuner.results.parts import Interval
from tuner.testing.results import large_result


def test_the_headline_says_what_the_recommendation_brings() -> None:
    result = large_result()
    page = top_part(result, units_of(result))
    headline = page.partition("<h1>")[2].partition("</h1>")[0]
    energy = result.recommendation.energy.relative
    assert f"{abs(100 * energy):.0f} %" in headline or f"{abs(100 * energy):.1f} %" in headline
    assert headline.endswith("than today")
    assert f"run {result.name}" in page


def test_a_card_is_grey_where_the_intervals_overlap() -> None:
    result = large_result()
    clear = top_part(result, units_of(result))
    wide = Interval(1.0, 1e9)
    unclear = replace(result, best=replace(result.best, energy_interval_kJ=wide))
    unclear.__dict__["recommendation"] = replace(result.recommendation, point=unclear.best)
    page = top_part(unclear, units_of(result))
    grey = "the baseline; the intervals overlap"
    assert page.count(grey) == clear.count(grey) + 1
