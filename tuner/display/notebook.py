"""Display of a result in a notebook: the choice in a sentence and the front as a table."""

from __future__ import annotations

from tuner.answer.answer import Answer
from tuner.display.advice import advice_lines, evidence_sentence
from tuner.display.columns import NOTEBOOK, energy_columns
from tuner.display.html.environment import render
from tuner.display.view import View
from tuner.formatting import common_mark, label, value_text

#: More points of a front than this are said and not shown; `result.front` holds all.
_MOST_ROWS = 25


def result_html(result: Answer) -> str:
    """Return the result as HTML in the notebook's own look."""
    view = View(result)
    points = result.front_points[:_MOST_ROWS]
    estimated = label(common_mark(p.meter for p in points))
    columns = energy_columns(NOTEBOOK, view)
    heads = [column.title(view.units) + estimated * column.metered for column in columns]
    rows = [
        [
            *(value_text(p.configuration.get(name)) for name in view.names),
            *(column.figure(view, p) for column in columns),
        ]
        for p in points
    ]
    headline, *details = advice_lines(result) or [result.choice.sentence]
    sentences = [*details, view.words.notice, evidence_sentence(result), view.payback]
    return render(
        "notebook.html",
        result=result,
        headline=headline,
        sentences=[sentence for sentence in sentences if sentence],
        heads=[*view.names, *heads],
        rows=list(zip(points, rows, strict=True)),
        view=view,
        more=len(result.front_points) - len(points),
    )
