"""The report: one self-contained HTML page, for a manager at the top and an engineer to the bottom.

It is plain string building around the files in `templates/`: the style, the script that draws the
figures, and plotly.js itself are written into the page, which loads nothing from anywhere (its
content security policy forbids it). Every text that came from a user or a script is escaped.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import string
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_spaces.configuration import Configuration
from search_spaces.knobs import KNOBS
from tuner import plots
from tuner.plot_style import DARK
from tuner.result import LeaveOneOut, Point, Result
from tuner.wording import (
    Units,
    change,
    comparison,
    is_estimated,
    knob_text,
    number,
    payback,
    percent,
    prediction,
    unit_of_work,
    units_of,
    varying_knobs,
)
from workload.probe import ProbeRecord

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["render_report", "write_report"]

_CONSTRAINTS = {
    "budget_kJ": "energy budget of the job (kJ)",
    "deadline_s": "deadline (s)",
    "power_cap_W": "cap on the average power (W)",
    "probe_budget_kJ": "energy budget of the search (kJ)",
    "max_probes": "most probes",
}
#: More points than this stand in the table folded away below the front.
_MOST_POINTS = 500
#: A longer list in "what was asked" (the clocks of a GPU) is written as its ends.
_MOST_ENTRIES = 24


def write_report(result: Result, path: Path, *, records: Sequence[ProbeRecord] = ()) -> Path:
    """Write the report of `result` to `path` (its folder is made) and return the path.

    Args:
        result: the study's answer.
        path: the HTML file; replaced in one step if it exists.
        records: the study's probes in the order of finishing, where they are at hand; they add to
            what each probe cost.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(render_report(result, records=records), encoding="utf-8")
    draft.replace(path)
    return path


def render_report(result: Result, *, records: Sequence[ProbeRecord] = ()) -> str:
    """The whole page as text."""
    from plotly.offline import get_plotlyjs

    units = units_of(result)
    figures = plots.figures(result, records)
    said = prediction(result)
    parts = [
        f'<p class="note"><strong>{escape(said)}</strong></p>' if said else "",
        _top(result, units),
        _front(result, units, figures),
        _spent(result, figures),
        _live(figures),
        _surrogates(result, figures),
        _failures(result),
        _about(result),
        _section("What each number means", _template("meanings.html")),
        "<footer>Written by joulefront. The figures are in this file; nothing is loaded from "
        "elsewhere.</footer>",
    ]
    return string.Template(_template("report.html")).substitute(
        title=escape(f"{result.name} · joulefront"),
        css=_template("report.css"),
        body="\n".join(part for part in parts if part),
        palette=_json_in_html(json.dumps(dict(DARK))),
        plotly=get_plotlyjs(),
        js=_template("report.js"),
    )


def _template(name: str) -> str:
    return (resources.files("tuner") / "templates" / name).read_text(encoding="utf-8")


def _json_in_html(text: str) -> str:
    """JSON that cannot end its script element, whatever strings are in it: <, > and & occur only
    inside JSON strings, where they may be written as escapes."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _section(title: str, content: str, note: str = "") -> str:
    text = f'<p class="note">{note}</p>' if note else ""
    return f"<section>\n<h2>{title}</h2>\n{text}\n{content}\n</section>"


def _plot(name: str, figure: go.Figure, alt: str, small: bool = False) -> str:
    data = _json_in_html(str(figure.to_json()))
    size = " small" if small else ""
    return (
        f'<div class="plot{size}" id="plot-{name}" data-figure="figure-{name}" role="img" '
        f'aria-label="{escape(alt)}"></div>\n'
        f'<script type="application/json" id="figure-{name}">{data}</script>'
    )


def _estimated(estimated: bool) -> str:
    return ' <span class="estimated">estimated</span>' if estimated else ""


def _configuration(
    configuration: Configuration,
    names: Sequence[str] | None = None,
    against: Configuration | None = None,
) -> str:
    """The knobs as chips; those that differ from `against` stand out."""
    if names is None:
        names = [*configuration.launch, *configuration.live]
    chips = []
    for name in names:
        value = configuration.get(name)
        differs = against is not None and against.get(name) != value
        title = f' title="{escape(KNOBS[name].what)}"' if name in KNOBS else ""
        chips.append(
            f'<code class="knob{" differs" if differs else ""}"{title}>'
            f"{escape(knob_text(name, value))}</code>"
        )
    return "".join(chips) or '<span class="muted">every knob at its default</span>'


def _tile(name: str, text: str, more: Sequence[str], estimated: bool = False) -> str:
    value, _, unit = text.partition(" ")
    lines = "".join(f'<div class="more">{line}</div>' for line in more if line)
    return (
        f'<div class="figure"><div class="name">{name}</div><div class="value">{escape(value)}'
        f' <span class="unit">{escape(unit)}</span></div>'
        f"{f'<div class=more>{_estimated(True)}</div>' if estimated else ''}{lines}</div>"
    )


def _delta(now: float, before: float | None, less: str, more: str) -> str:
    if before is None:
        return ""
    kind = "less" if now < before else "rise" if now > before else "muted"
    return f'<span class="{kind}">{change(now, before, less, more)}</span>'


def _interval(text: str, unit: str) -> str:
    return f'<span class="interval">{text} {unit}</span>' if text else ""


def _top(result: Result, units: Units) -> str:
    best, base = result.best, result.baseline
    head = f"<h1>joulefront · {escape(result.name)}</h1>"
    if best is None:
        return (
            f'{head}\n<p class="lead">{escape(result.choice.sentence)}</p>\n'
            '<p class="warning">No configuration was chosen.</p>'
        )
    warning = (
        ""
        if result.choice.met
        else '<p class="warning">No point of the front meets what was asked; this is the nearest.'
        "</p>"
    )
    estimated = best.meter.estimated
    same = base is not None and base.configuration == best.configuration
    b = None if same else base
    tiles = [
        _tile(
            "Energy to solution",
            units.energy_text(best.energy_to_solution_kJ),
            [
                _interval(units.interval_text(best.energy_interval_kJ, units.kJ), units.energy),
                _delta(
                    best.energy_to_solution_kJ, b.energy_to_solution_kJ, "less than", "more than"
                )
                + " the baseline"
                if b
                else "",
            ],
            estimated,
        ),
        _tile(
            "Time to solution",
            units.time_text(best.time_to_solution_s),
            [
                _interval(units.interval_text(best.time_interval_s, units.s), units.time),
                _delta(best.time_to_solution_s, b.time_to_solution_s, "less than", "more than")
                + " the baseline"
                if b
                else "",
            ],
        ),
        _tile(
            "Average power",
            f"{number(best.power_W)} W",
            [
                _delta(best.power_W, b.power_W, "less than", "more than") + " the baseline"
                if b
                else ""
            ],
            estimated,
        ),
        _spent_tile(result),
    ]
    saves = comparison(result, units)
    today = base.configuration if base else None
    return "\n".join(
        [
            head,
            f'<p class="lead">{escape(result.choice.sentence)}</p>',
            warning,
            f'<p class="saves">{escape(saves)}</p>' if saves else "",
            f"<p>{_configuration(best.configuration, against=today)}</p>",
            f'<div class="figures">{"".join(tiles)}</div>',
        ]
    )


def _spent_tile(result: Result) -> str:
    spent = result.spent
    own = Units.for_values([spent.energy_kJ], [])
    failed = f", {spent.failed} failed" if spent.failed else ""
    more = [f'<span class="muted">{spent.probes} probes{failed}</span>']
    if spent.payback_share is not None and math.isfinite(spent.payback_share):
        more.append(f"repaid after {percent(spent.payback_share)} of the job")
    return _tile("Search spent", own.energy_text(spent.energy_kJ), more, is_estimated(result))


def _row(result: Result, point: Point, units: Units, names: Sequence[str]) -> str:
    marks = ""
    is_best = result.best is not None and point.configuration == result.best.configuration
    base = result.baseline
    if is_best:
        marks += '<span class="mark best">chosen</span>'
    if base is not None and point.configuration == base.configuration:
        marks += '<span class="mark base">baseline</span>'
    estimated = _estimated(point.meter.estimated)
    energy = _interval(units.interval_text(point.energy_interval_kJ, units.kJ), "")
    time = _interval(units.interval_text(point.time_interval_s, units.s), "")
    memory = (
        f"{number(point.peak_memory_bytes / 2**30)} GiB" if point.peak_memory_bytes else "unknown"
    )
    flags = "".join(f"<br>{escape(flag)}" for flag in point.flags)
    chips = _configuration(point.configuration, names, base.configuration if base else None)
    cells = [
        ("Configuration", f"<div>{marks}{chips}</div>", ""),
        (
            f"Energy ({units.energy})",
            f"<div>{number(point.energy_to_solution_kJ / units.kJ)}{estimated}<br>{energy}</div>",
            "n",
        ),
        (
            f"Time ({units.time})",
            f"<div>{number(point.time_to_solution_s / units.s)}<br>{time}</div>",
            "n",
        ),
        ("Power (W)", f"<div>{number(point.power_W)}{estimated}</div>", "n"),
        ("P(non-dominated)", percent(point.p_nondominated), "n"),
        ("Peak memory", memory, "n"),
        ("How measured", f'<div class="muted">{escape(point.how_measured)}{flags}</div>', ""),
    ]
    tds = "".join(
        f'<td data-label="{label}" class="{kind}">{text}</td>' for label, text, kind in cells
    )
    return f"<tr{' class=chosen' if is_best else ''}>{tds}</tr>"


def _table(result: Result, points: Sequence[Point], units: Units, names: Sequence[str]) -> str:
    heads = (
        "Configuration",
        f"Energy ({units.energy})",
        f"Time ({units.time})",
        "Power (W)",
        "P(non-dominated)",
        "Peak memory",
        "How measured",
    )
    head = "".join(f"<th>{text}</th>" for text in heads)
    rows = "\n".join(_row(result, point, units, names) for point in points)
    return f'<table class="cards"><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>'


def _front(result: Result, units: Units, figures: Mapping[str, go.Figure]) -> str:
    every = [*result.points, *result.front_points, *(p for p in (result.best, result.baseline) if p)]
    if not every:
        return _section("The front", "<p>Nothing was measured, so there is no front.</p>")
    fixed = sorted({n for p in every for n in (*p.configuration.launch, *p.configuration.live)})
    names = varying_knobs(point.configuration for point in every) or tuple(fixed)
    fixed = [name for name in fixed if name not in names]
    front = sorted(result.front_points, key=lambda p: p.time_to_solution_s)
    shown = list(front)
    if result.baseline and all(p.configuration != result.baseline.configuration for p in front):
        shown.append(result.baseline)
    text = _plot("front", figures["front"], "Energy to solution against time to solution")
    text += (
        "<noscript><p>The plots need JavaScript; the tables hold the same figures.</p></noscript>"
    )
    text += _table(result, shown, units, names)
    if fixed:
        text += (
            '<p class="note">The same for every point: '
            + _configuration(every[0].configuration, fixed)
            + "</p>"
        )
    others = sorted(result.points, key=lambda p: p.energy_to_solution_kJ)
    if len(others) > len(shown):
        text += (
            f"<details><summary>All {len(others)} points measured, least energy first</summary>"
            + _table(result, others[:_MOST_POINTS], units, names)
            + "</details>"
        )
    count = f"{len(front)} configuration{'s' if len(front) != 1 else ''}"
    note = (
        f"{count} of the {len(result.points)} measured "
        f"{'is' if len(front) == 1 else 'are'} not beaten in both energy and time by any other. "
        "Down is less energy, left is less time; bars are 90 % intervals. Framed knobs differ "
        "from the baseline."
    )
    return _section("The front of energy against time", text, note)


def _spent(result: Result, figures: Mapping[str, go.Figure]) -> str:
    spent = result.spent
    units = Units.for_values([spent.energy_kJ], [spent.time_s])
    rows = [
        ("Energy", units.energy_text(spent.energy_kJ) + _estimated(is_estimated(result))),
        ("Wall-clock time", units.time_text(spent.time_s)),
        ("Probes", f"{spent.probes}, of which {spent.failed} failed"),
        ("Windows measured", str(spent.measurements)),
        ("Payback", escape(payback(result))),
        ("Ended because", escape(result.stopped or "it is not recorded")),
    ]
    text = "<dl>" + "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in rows) + "</dl>"
    panels = ""
    for name, title in (
        ("hypervolume", "The front against the energy spent"),
        ("probes", "What each probe cost"),
    ):
        if name in figures:
            panels += f"<div><h3>{title}</h3>{_plot(name, figures[name], title, small=True)}</div>"
    return _section(
        "What the search spent", text + (f'<div class="pair">{panels}</div>' if panels else "")
    )


def _live(figures: Mapping[str, go.Figure]) -> str:
    if "live" not in figures:
        return ""
    return _section(
        "Energy against the live setting",
        _plot("live", figures["live"], "Energy to solution against the live setting"),
        "One curve a launch setting, those with the least energy; the larger marker is each "
        "curve's least.",
    )


def _coverage(loo: LeaveOneOut) -> str:
    if loo.coverage < 0.8:
        return "fewer than promised: the surrogates' intervals are too narrow"
    return "as promised or better" if loo.coverage >= 0.9 else "close to what is promised"


def _surrogates(result: Result, figures: Mapping[str, go.Figure]) -> str:
    loo = result.leave_one_out
    if loo is None:
        return _section(
            "How well the surrogates predict",
            "<p>There were too few measurements to leave one out.</p>",
        )
    text = (
        f"<p>Each of {loo.measurements} measurements was predicted from the others. The median "
        f"error was {percent(loo.time_error)} in step time and {percent(loo.power_error)} in "
        f"power; {percent(loo.coverage)} of the left-out values lay inside their 90 % interval "
        f"({_coverage(loo)}).</p>"
    )
    panels = ""
    for name, title in (("surrogate-time", "Step time"), ("surrogate-power", "Power")):
        if name in figures:
            panels += (
                f"<div><h3>{title}{_estimated(name.endswith('power') and is_estimated(result))}"
                f"</h3>{_plot(name, figures[name], title, small=True)}</div>"
            )
    note = "Left-out measurements against their prediction; the dashed line is equality."
    return _section(
        "How well the surrogates predict",
        text + (f'<div class="pair">{panels}</div>' if panels else ""),
        note if panels else "",
    )


def _failures(result: Result) -> str:
    if not result.failures:
        return ""
    parts = []
    for record in result.failures:
        failure = record.failure
        kind = failure.kind.replace("_", " ") if failure else "unknown"
        message = failure.message if failure else ""
        tail = failure.log_tail.strip() if failure else ""
        cost = Units.for_values([record.energy_J / 1000], [])
        log = (
            "<details><summary>the last lines of its log</summary>"
            f"<pre>{escape(tail)}</pre></details>"
            if tail
            else '<p class="muted">It left no log.</p>'
        )
        parts.append(
            f"<h3>{escape(record.request.probe_id)}: {escape(kind)}</h3>"
            f"<div>{_configuration(Configuration(record.request.launch))}</div>"
            f"<p>{escape(message)} "
            f'<span class="muted">({cost.energy_text(record.energy_J / 1000)}'
            f"{_estimated(record.meter.estimated)}, {number(record.wall_s)} s)</span></p>{log}"
        )
    return _section(
        f"Probes that failed ({len(result.failures)})",
        "\n".join(parts),
        "A failed probe costs what it cost and is not tried for ever; what it had measured before "
        "it failed is kept.",
    )


def _value(value: Any, depth: int = 0) -> str:
    """Anything JSON-like as HTML: mappings as definition lists, deep ones folded."""
    if isinstance(value, Mapping):
        if not value:
            return '<span class="muted">none</span>'
        rows = "".join(
            f"<dt>{escape(str(k))}</dt><dd>{_value(v, depth + 1)}</dd>" for k, v in value.items()
        )
        text = f"<dl>{rows}</dl>"
        if depth < 2:
            return text
        return f"<details><summary>{len(value)} entries</summary>{text}</details>"
    if isinstance(value, str) and value.startswith("{"):  # a study.toml holds the model as JSON
        with contextlib.suppress(ValueError):
            return _value(json.loads(value), depth)
    if isinstance(value, list | tuple):
        if len(value) > _MOST_ENTRIES:
            text = f"{len(value)} values from {value[0]} to {value[-1]}"
            return escape(text)
        if any(isinstance(v, Mapping | list | tuple) for v in value):
            return "".join(f"<div>{_value(v, depth + 1)}</div>" for v in value)
        return escape(", ".join(map(str, value))) or '<span class="muted">none</span>'
    if isinstance(value, bool):
        return "yes" if value else "no"
    return escape(str(value)) if value is not None else '<span class="muted">not given</span>'


def _about(result: Result) -> str:
    asked = {
        _CONSTRAINTS.get(name, name): number(value) for name, value in result.constraints.items()
    }
    asked = asked or {"constraints": "none: the knee of the front is chosen"}
    first: dict[str, Any] = {
        **asked,
        "chosen by": result.choice.rule,
        f"{unit_of_work(result)}s to the solution": f"{result.steps:,}",
    }
    scopes = sorted(
        {
            f"{p.meter.name}: {p.meter.scope} scope, {p.meter.source}"
            + (" (estimated)" if p.meter.estimated else "")
            + (f"; charged: {p.meter.host}" if p.meter.host else "")
            for p in result.points
        }
    )
    first["energy from"] = scopes or ["nothing was measured"]
    rest = {name: value for name, value in result.about.items() if name != "unit_of_work"}
    return _section("What was asked, and of what", _value({**first, **rest}))
