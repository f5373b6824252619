"""Upper parts of the report: the choice, the front, and the cost of each point."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from tuner.display.advice import details, evidence_sentence
from tuner.display.columns import ENERGY, MEMORY, PAGE, TIME, Column
from tuner.display.html.limits_part import limits_part
from tuner.display.html.pieces import (
    chips,
    estimated_mark,
    interval,
    json_in_html,
    plot_div,
    prose,
    section,
    tile,
)
from tuner.display.view import View
from tuner.formatting import change, number, percent
from tuner.problem.run_folder import RunFolder
from tuner.results.choice import carbon_g, cost_of
from tuner.results.parts import Point

if TYPE_CHECKING:
    import plotly.graph_objects as go

#: More points than this stand in the table folded away below the front.
_MOST_POINTS = 500


def top_part(view: View, figures: Mapping[str, go.Figure]) -> str:
    """Return the first screen: what to do, the front, and the recommendation's main figures."""
    result, advice = view.result, view.advice
    lead = result.headline if advice is not None else result.choice.sentence
    warning = "" if advice is not None and result.choice.met else ' class="warning"'
    head = f'<h1{warning}>{prose(lead)}</h1>\n<p class="note">{escape(_facts(view))}</p>'
    if facts := result.today:
        head += '<p class="note">' + "<br>".join(map(escape, facts.lines)) + "</p>"
    if advice is None:
        return f'{head}\n<p class="warning">No configuration was chosen.</p>'
    plot = ""
    if "front" in figures:
        plot = '<div class="front">'
        plot += plot_div("front", figures["front"], "Energy to solution against time to solution")
        plot += _more_toggle(figures["front"])
        plot += _shown_points(view) + "</div>"
    sentences = [*details(result), view.notices]
    if result.choice.rule != "better-in-both":
        sentences.append(f"Chosen: {result.choice.sentence}")
    sentences.append(evidence_sentence(result))
    return "\n".join(
        [
            head,
            f'<div class="first">{plot}{_tiles(view, advice.point)}</div>',
            *(f"<p>{prose(sentence)}</p>" for sentence in sentences if sentence),
            "<noscript><p>The plots need JavaScript; the tables hold the same figures.</p>"
            "</noscript>",
        ]
    )


def _tiles(view: View, best: Point) -> str:
    """Return the figures of the recommended configuration; a click in the front fills them."""
    mark = best.meter.mark
    tiles = [
        *(
            tile(name, value, more, "" if name.startswith("Time") else mark)
            for name, (value, *more) in _figures_of(view, best).items()
        ),
        *_price_tiles(view, best),
        _spent_tile(view),
    ]
    return (
        f'<div class="side"><p class="note"><b id="tiles-of">{escape(_name_of(view, best))}</b> '
        f'<span id="tiles-knobs">{chips(best.configuration, against=view.today)}</span></p>'
        f'<div class="figures">{"".join(tiles)}</div></div>'
    )


def _figures_of(view: View, point: Point) -> dict[str, list[str]]:
    """Return a point's figures by name: value, change against today, interval."""
    units, changes = view.units, _changes(view, point)
    of = "" if view.result.length_known else " of a step"
    figures = {
        f"{column.heading}{of}": [
            column.text(point, units),
            changes.get(column.name, ""),
            interval(column.below(point, units), column.unit(units)),
        ]
        for column in (TIME, ENERGY)
    }
    return figures | {"Average power": [f"{number(point.power_W)} W", changes.get("power", "")]}


def _name_of(view: View, point: Point) -> str:
    """Return "Today", "Recommended", "Promising" or "" for a point."""
    return "Today" if view.is_today(point) else view.role(point).capitalize()


def _more_toggle(figure: go.Figure) -> str:
    """Return the box that shows what the front's picture leaves out at first."""
    names = [t.name for t in figure.data if t.visible == "legendonly" and t.showlegend is not False]
    if not names:
        return ""
    shown = escape(", ".join(names))
    return f'<label class="note"><input type="checkbox" id="front-more"> also {shown}</label>'


def _shown_points(view: View) -> str:
    """Return the figures of each point that a click in the front may ask for."""
    result = view.result
    first = [*result.front_points, *([result.baseline] if result.baseline is not None else [])]
    every = {p.configuration: p for p in (*first, *result.points)}  # of many, others are left out
    shown = [
        {
            "place": view.units.place(point),
            "name": _name_of(view, point),
            "knobs": chips(point.configuration, against=view.today),
            "tiles": _figures_of(view, point),
        }
        for point in list(every.values())[:_MOST_POINTS]
    ]
    text = json_in_html(json.dumps(shown))
    return f'<script type="application/json" id="front-points">{text}</script>'


def _changes(view: View, point: Point) -> dict[str, str]:
    """Return a point's figures against today's; in grey where there may be no difference."""
    today, found = view.result.baseline, view.result.judged.differences(point)
    if today is None or found is None:
        return {}
    energy, time = found
    mine, theirs = point.power_interval_W, today.power_interval_W
    overlap = mine and theirs and mine[0] <= theirs[1] and theirs[0] <= mine[1]
    return {
        "energy": _change(1 + energy.relative, clear=energy.shown),
        "time": _change(1 + time.relative, clear=time.shown),
        "power": _change((1 + energy.relative) / (1 + time.relative), clear=not overlap),
    }


def _change(ratio: float, *, clear: bool) -> str:
    if abs(ratio - 1) < 0.0005:
        return '<span class="muted">as today</span>'
    text = change(ratio, 1, "less", "more")
    if clear:
        return f'<span class="{"less" if ratio < 1 else "rise"}">{text}</span> than today'
    return f'<span class="muted">{text} than today; no difference shown</span>'


def _facts(view: View) -> str:
    """Return what was tuned, the kind of its figures, the run and the date."""
    result = view.result
    subject = result.job.name if result.job is not None else result.name
    if result.cluster is not None:
        subject += f" on {result.cluster.devices} x {result.cluster.device.name}"
    kind = "predicted, nothing was measured" if view.is_predicted else "measured"
    if result.job is None:
        kind = "from a recording"
    facts = [subject, kind, f"run {result.name}"]
    study = RunFolder(result.run_dir).read_study() if result.run_dir is not None else None
    if study is not None and study.get("created"):
        facts.append(str(study["created"]).replace("T", " "))
    return " · ".join(facts)


def _price_tiles(view: View, best: Point) -> list[str]:
    """Return what the choice and today cost and emit, where prices or the grid were given."""
    rates, base = view.result.constraints, view.result.baseline
    tiles = []

    def add(name: str, now: float, before: float | None, text: Callable[[float], str]) -> None:
        today = f'<span class="muted">today {text(before)}</span>' if before is not None else ""
        tiles.append(tile(name, text(now), [today], best.meter.mark))

    if "price_per_kWh" in rates or "price_per_gpu_hour" in rates:
        before = cost_of(base, rates) if base is not None else None
        add("Cost at your prices", cost_of(best, rates), before, number)
    if "grid_gCO2_per_kWh" in rates:
        before = carbon_g(base, rates) if base is not None else None
        add("Emissions of its energy", carbon_g(best, rates), before, _mass_text)
    return tiles


def _mass_text(grams: float) -> str:
    """Return a mass of CO2 equivalent in g, kg or t."""
    size, unit = (1e6, "t") if grams >= 1e6 else (1e3, "kg") if grams >= 1e3 else (1.0, "g")
    return f"{number(grams / size)} {unit} CO2e"


def _spent_tile(view: View) -> str:
    result, spent = view.result, view.result.spent
    if (plan := result.plan) is not None:
        fitting = f'<span class="muted">{plan.fitting:,} fit in memory</span>'
        return tile("Configurations predicted", f"{plan.configurations:,}", [fitting])
    if result.points and spent.energy_kJ == 0:
        said = f'<span class="muted">{len(result.points)} settings of past runs</span>'
        return tile("Search spent", "nothing", [said])
    title = "A real search would take" if view.is_predicted else "Search spent"
    failed = f", {spent.failed} failed" if spent.failed else ""
    more = [f'<span class="muted">{spent.probes} probes{failed}</span>']
    kept = view.advice is not None and view.advice.action == "keep"
    if not kept and spent.payback_share is not None and math.isfinite(spent.payback_share):
        share = spent.payback_share
        runs = f"{number(share)} runs" if share > 1 else percent(share)
        more.append(f"repaid after {runs} of the job")
    return tile(title, view.spent, more, view.mark)


@dataclass(frozen=True)
class _Table:
    """Columns that the rows of the points' tables share."""

    view: View
    names: Sequence[str]
    meters: int
    columns: Sequence[Column]

    def html(self, points: Sequence[Point]) -> str:
        """Return a table of these points; on a phone each row becomes a card."""
        titles = [column.title(self.view.units) for column in self.columns]
        heads = ["Configuration", *titles, "How obtained"]
        body = "\n".join(self._row(point, heads) for point in points)
        head = "".join(f"<th>{label}</th>" for label in heads) if points else ""
        return (
            f'<table class="cards"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>'
        )

    def _row(self, point: Point, heads: Sequence[str]) -> str:
        figures = [self._figure(point, column) for column in self.columns]
        cells = [self._configuration(point), *figures, self._how(point)]
        kinds = ["", *("n" for _ in figures), ""]
        tds = "".join(
            f'<td data-label="{head}" class="{kind}">{cell}</td>'
            for head, kind, cell in zip(heads, kinds, cells, strict=True)
        )
        chosen = " class=chosen" if self.view.role(point) == "recommended" else ""
        return f"<tr{chosen}>{tds}</tr>"

    def _configuration(self, point: Point) -> str:
        marks = ""
        if word := self.view.role(point):
            marks += f'<span class="mark best">{word}</span>'
        if self.view.is_today(point):
            marks += '<span class="mark base">today</span>'
        return f"<div>{marks}{chips(point.configuration, self.names, self.view.today)}</div>"

    def _figure(self, point: Point, column: Column) -> str:
        text = column.figure(point, self.view.units)
        text += estimated_mark(point.meter.mark) if column.metered else ""
        if below := column.below(point, self.view.units):
            text += f'<br><span class="interval">{below}</span>'
        return f"<div>{text}</div>"

    def _how(self, point: Point) -> str:
        how: str = point.source
        if how == "measured" and point.windows:
            how += f", {point.windows} window{'s' * (point.windows != 1)}"
        how = point.how_measured if self.meters > 1 else how
        notes = [flag for flag in point.flags if not flag.startswith(f"{point.source}, ")]
        flags = "".join(f"<div>{escape(flag)}</div>" for flag in notes)
        if len(notes) > 1:
            flags = f"<details><summary>{len(notes)} notes</summary>{flags}</details>"
        return f'<div class="muted">{escape(how)}{flags}</div>'


def front_part(view: View) -> str:
    """Return the section on the front: other limits, and its tables."""
    result, every = view.result, view.points
    if not every:
        return section("The front", "<p>Nothing was measured, so there is no front.</p>")
    fixed = sorted({n for p in every for n in (*p.configuration.launch, *p.configuration.live)})
    names = view.names or tuple(fixed)
    fixed = [name for name in fixed if name not in names]
    front = sorted(result.front_points, key=lambda p: p.time_to_solution_s)
    shown = list(front)
    if result.baseline and view.today not in view.front:
        shown.append(result.baseline)
    text = limits_part(view)
    meters = {p.meter for p in every}
    known = any(p.peak_memory_bytes for p in every)
    table = _Table(view, names, len(meters), [c for c in PAGE if known or c is not MEMORY])
    text += table.html(shown)
    if len(meters) == 1:
        (meter,) = meters
        text += (
            f'<p class="note">Energy of every point: {meter.scope} scope, {meter.label} '
            f"({escape(meter.source)}).</p>"
        )
    if fixed:
        same = chips(every[0].configuration, fixed)
        text += f'<p class="note">The same for every point: {same}</p>'
    others = sorted(result.points, key=lambda p: p.energy_to_solution_kJ)
    if len(others) > len(shown):
        text += (
            f"<details><summary>All {len(others)} points {others[0].source}, least energy first"
            "</summary>" + table.html(others[:_MOST_POINTS]) + "</details>"
        )
    count = f"{len(front)} configuration{'s' if len(front) != 1 else ''}"
    predicted = ""
    if result.predicted:
        text += (
            "<details><summary>Predicted to be on the front, not measured: "
            f"{len(result.predicted)}</summary>" + table.html(result.predicted) + "</details>"
        )
        predicted = " Open circles are predicted, never measured at their own setting."
    called = f" Today is {escape(result.baseline_name)}." if result.baseline_name else ""
    note = (
        f"{count} of the {len(result.points)} {result.points[0].source} "
        f"{'is' if len(front) == 1 else 'are'} not beaten in both energy and time by any other; "
        "intervals are 90 %."
        f"{' Framed knobs differ from today.' if result.baseline else ''}"
        f"{predicted}{called}"
    )
    return section("The front of energy against time", text, note)
