"""Display of a result in a notebook: the choice in a sentence and the front as a table."""

from __future__ import annotations

from html import escape

from tuner.display.advice import advice_lines, evidence_sentence
from tuner.display.columns import NOTEBOOK
from tuner.display.html.pieces import table
from tuner.display.view import View
from tuner.formatting import common_mark, label, value_text
from tuner.results.result import Result

#: More points of a front than this are said and not shown; `result.front` holds all.
_MOST_ROWS = 25


def result_html(result: Result) -> str:
    """Return the result as HTML in the notebook's own look; every text is escaped."""
    view = View(result)
    points = result.front_points[:_MOST_ROWS]
    estimated = label(common_mark(p.meter for p in points))
    heads = [column.title(view.units) + estimated * column.metered for column in NOTEBOOK]
    rows = [
        [
            *(escape(value_text(p.configuration.get(name))) for name in view.names),
            *(column.figure(view, p) for column in NOTEBOOK),
            " ".join(
                [
                    *([f"<b>{word}</b>"] if (word := view.role(p)) else []),
                    *(["today"] if view.is_today(p) else []),
                ]
            ),
        ]
        for p in points
    ]
    heads = [escape(text) for text in (*view.names, *heads, "")]
    more = len(result.front_points) - len(points)
    headline, *details = advice_lines(result) or [result.choice.sentence]
    sentences = [*details, view.prediction, evidence_sentence(result), view.payback]
    lines = [
        f"<p><b>{escape(result.name)}:</b> {escape(headline)}</p>",
        *(f"<p>{escape(sentence)}</p>" for sentence in sentences if sentence),
        table(heads, rows),
        f"<p>and {more} more points of the front</p>" if more else "",
    ]
    if result.report_path is not None:
        lines.append(f"<p>Report: <code>{escape(str(result.report_path))}</code></p>")
    return "<div>" + "\n".join(line for line in lines if line) + "</div>"
