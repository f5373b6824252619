"""The report: one self-contained HTML page, for a manager at the top and an engineer to the bottom.

It is plain string building around the files in `templates/`: the style, the script that draws the
figures, and plotly.js itself are written into the page, which loads nothing from anywhere (its
content security policy forbids it). What decides is in `html.answer_parts`, what explains and what
engineers check in `html.detail_parts`.
"""

from __future__ import annotations

import base64
import json
import string
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from importlib import resources
from pathlib import Path

from tuner.display import plots
from tuner.display.figures.power import shown_timelines
from tuner.display.figures.style import DARK
from tuner.display.html.answer_parts import front_part, top_part
from tuner.display.html.detail_parts import (
    about_part,
    explanation_part,
    failures_part,
    live_part,
    plan_part,
    power_part,
    spent_part,
    stragglers_part,
    where_part,
)
from tuner.display.html.pieces import json_in_html, section, template
from tuner.display.view import View
from tuner.results.parts import Explanation
from tuner.results.result import Result
from tuner.search_spaces.safe_files import write_text
from tuner.workload.probe import ProbeRecord


def write_report(result: Result, path: Path, *, records: Sequence[ProbeRecord] = ()) -> Path:
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


def render_report(result: Result, *, records: Sequence[ProbeRecord] = ()) -> str:
    """Return the whole page as text."""
    view = View(result)
    explanation = plots.explained(result)
    timelines, left_out = shown_timelines(result, records)
    figures = plots.figures(result, records, explanation=_bought(explanation), timelines=timelines)
    parts = [
        top_part(view, figures),
        front_part(view),
        plan_part(result),
        live_part(figures),
        where_part(view, explanation),
        explanation_part(explanation, figures),
        power_part(timelines, left_out, figures),
        spent_part(view, figures),
        stragglers_part(result),
        failures_part(result),
        about_part(view),
        section("What each number means", template("meanings.html")),
        "<footer>Written by joulefront. The figures are in this file; nothing is loaded from "
        "elsewhere.</footer>",
    ]
    return string.Template(template("report.html")).substitute(
        title=escape(f"{result.name} · joulefront"),
        css=template("report.css"),
        body="\n".join(part for part in parts if part),
        palette=json_in_html(json.dumps(dict(DARK))),
        plotly=packed_plotly(),
        limits=template("limits.js"),
        js=template("report.js"),
    )
