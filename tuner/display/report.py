"""The report: one self-contained HTML page, for a manager at the top and an engineer to the bottom.

The page is made of the files in `templates/`: the style, the script that draws the figures, and
plotly.js itself are written into it, and it loads nothing from anywhere (its content security
policy forbids it). Its values are made in `html`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

from tuner.answer.answer import Answer
from tuner.answer.parts import Explanation
from tuner.display import plots
from tuner.display.advice import advice_lines, evidence_sentence
from tuner.display.figures import dark_palette, shown_timelines
from tuner.display.html import detail_values, environment, front_values, top_values
from tuner.display.view import NOTEBOOK, View, energy_columns
from tuner.formatting import common_mark, label, value_text
from tuner.search_spaces.safe_files import write_text
from tuner.workload.records.probe import ProbeRecord


def write_report(result: Answer, path: Path, *, records: Sequence[ProbeRecord] = ()) -> Path:
    """Write the report of `result` to `path` (its folder is made) and return the path.

    Args:
        records: the study's probes in the order of finishing, where they are at hand; they add to
            what each probe cost, and the power over time of some of them.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, render_report(result, records=records))
    return path


def packed_plotly() -> str:
    """Return plotly.js as the page unpacks it: the basic bundle, gzip, base64.

    The whole library is four times as large, and the report shows nothing else.
    """
    packed = resources.files("tuner") / "templates" / "plotly-basic.min.js.gz"
    return base64.b64encode(packed.read_bytes()).decode("ascii")


def _bought(explanation: Explanation | None) -> Explanation | None:
    # The effects of the knobs' values against today's alone, where any is known.
    if explanation is None:
        return None
    effects = tuple(effect for effect in explanation.knobs if effect.of_baseline)
    return replace(explanation, knobs=effects or explanation.knobs)


def render_report(result: Answer, *, records: Sequence[ProbeRecord] = ()) -> str:
    """Return the whole page as text."""
    view = View(result)
    explanation = plots.explained(result)
    timelines, left_out = shown_timelines(result, records)
    figures = plots.figures(result, records, explanation=_bought(explanation), timelines=timelines)
    return (
        environment()
        .get_template("report.html")
        .render(
            view=view,
            result=result,
            figures=figures,
            left_out=left_out,
            palette=dark_palette(),
            plotly=packed_plotly(),
            **top_values(view, figures),
            **front_values(view),
            **detail_values(view, explanation, timelines),
        )
    )


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
    return (
        environment()
        .get_template("notebook.html")
        .render(
            result=result,
            headline=headline,
            sentences=[sentence for sentence in sentences if sentence],
            heads=[*view.names, *heads],
            rows=list(zip(points, rows, strict=True)),
            view=view,
            more=len(result.front_points) - len(points),
        )
    )
