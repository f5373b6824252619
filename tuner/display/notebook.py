"""Display of a result in a notebook: the choice in a sentence and the front as a table."""

from __future__ import annotations

from html import escape

from tuner.display.advice import evidence_sentence
from tuner.display.text import (
    payback,
    prediction,
    recommendation_lines,
    role,
    units_of,
)
from tuner.formatting import common_mark, knob_text, label, number, percent, varying_knobs
from tuner.results.result import Result

#: More points of a front than this are said and not shown; `result.front` holds all.
_MOST_ROWS = 25


def result_html(result: Result) -> str:
    """Return the result as HTML in the notebook's own look; every text is escaped."""
    units = units_of(result)
    points = result.front_points[:_MOST_ROWS]
    names = varying_knobs(p.configuration for p in (*result.points, *result.front_points))
    energy = f"energy ({units.energy}){label(common_mark(p.meter for p in points))}"
    heads = [*names, energy, f"time ({units.time})", "power (W)", "P(non-dominated)"]
    rows = []
    for p in points:
        marks = []
        if word := role(result, p):
            marks.append(f"<b>{word}</b>")
        if result.baseline is not None and p.configuration == result.baseline.configuration:
            marks.append("today")
        cells = [
            *(escape(knob_text(n, p.configuration.get(n)).partition("=")[2]) for n in names),
            number(p.energy_to_solution_kJ / units.kJ),
            number(p.time_to_solution_s / units.s),
            number(p.power_W),
            percent(p.p_nondominated),
            " ".join(marks),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{escape(text)}</th>" for text in (*heads, ""))
    more = len(result.front_points) - len(points)
    verified = evidence_sentence(result)
    headline, *details = recommendation_lines(result) or [result.choice.sentence]
    sentences = [*details, prediction(result), verified, payback(result)]
    lines = [
        f"<p><b>{escape(result.name)}:</b> {escape(headline)}</p>",
        *(f"<p>{escape(sentence)}</p>" for sentence in sentences if sentence),
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>",
        f"<p>and {more} more points of the front</p>" if more else "",
    ]
    if result.report_path is not None:
        lines.append(f"<p>Report: <code>{escape(str(result.report_path))}</code></p>")
    return "<div>" + "\n".join(line for line in lines if line) + "</div>"
