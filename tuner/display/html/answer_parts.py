"""Upper parts of the report: the choice, the front, and the choice under other limits."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from tuner.display.advice import details, evidence_sentence
from tuner.display.columns import ENERGY, MEMORY, PAGE, TIME, Column
from tuner.display.html.pieces import (
    chips,
    estimated_mark,
    folded,
    json_in_html,
    muted,
    notes,
    plot_div,
    prose,
    section,
    table,
    tile,
)
from tuner.display.view import View
from tuner.formatting import change, label, number, percent, probability, short
from tuner.problem.run_folder import RunFolder
from tuner.results.choice import carbon_g, cost_of
from tuner.results.choice_grid import choice_grid
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
    head = f"<h1{warning}>{prose(lead)}</h1>\n{notes(escape(_facts(view)))}"
    if facts := result.today:
        head += notes("<br>".join(map(escape, facts.lines)))
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
    # Figures of the recommended configuration; a click in the front fills them with another's.
    mark = best.meter.mark
    tiles = [
        tile(name, value, more, "" if name.startswith("Time") else mark)
        for name, (value, *more) in _figures_of(view, best).items()
    ]
    tiles += [*_price_tiles(view, best), _spent_tile(view)]
    return (
        f'<div class="side"><p class="note"><b id="tiles-of">{escape(_name_of(view, best))}</b> '
        f'<span id="tiles-knobs">{chips(best.configuration, against=view.today)}</span></p>'
        f'<div class="figures">{"".join(tiles)}</div></div>'
    )


def _figures_of(view: View, point: Point) -> dict[str, list[str]]:
    # By name: value, change against today, interval.
    units, changes = view.units, _changes(view, point)
    of = "" if view.result.length else " of a step"
    figures = {
        f"{column.heading}{of}": [
            column.text(view, point),
            changes.get(column.name, ""),
            f'<span class="interval">{below} {column.unit(units)}</span>'
            if (below := column.below(view, point))
            else "",
        ]
        for column in (TIME, ENERGY)
    }
    return figures | {"Average power": [f"{number(point.power_W)} W", changes.get("power", "")]}


def _name_of(view: View, point: Point) -> str:
    return "Today" if view.is_today(point) else view.role(point).capitalize()


def _more_toggle(figure: go.Figure) -> str:
    # The box shows what the front's picture leaves out at first.
    names = [t.name for t in figure.data if t.visible == "legendonly" and t.showlegend is not False]
    if not names:
        return ""
    shown = escape(", ".join(names))
    return f'<label class="note"><input type="checkbox" id="front-more"> also {shown}</label>'


def _shown_points(view: View) -> str:
    # The figures of each point that a click in the front may ask for.
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
    return _data("front-points", shown)


def _data(name: str, data: Any) -> str:
    text = json_in_html(json.dumps(data))
    return f'<script type="application/json" id="{name}">{text}</script>'


def _changes(view: View, point: Point) -> dict[str, str]:
    # A point's figures against today's; in grey where there may be no difference.
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
        return muted("as today")
    text = change(ratio, 1, "less", "more")
    if clear:
        return f'<span class="{"less" if ratio < 1 else "rise"}">{text}</span> than today'
    return muted(f"{text} than today; no difference shown")


def _facts(view: View) -> str:
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
    # What the choice and today cost and emit, where prices or the grid were given.
    asked, base = view.result.request.constraints, view.result.baseline
    tiles = []

    def add(name: str, now: float, before: float | None, text: Callable[[float], str]) -> None:
        today = muted(f"today {text(before)}") if before is not None else ""
        tiles.append(tile(name, text(now), [today], best.meter.mark))

    if any(asked.prices):
        before = cost_of(base, asked) if base is not None else None
        add("Cost at your prices", cost_of(best, asked), before, number)
    if asked.grid_gCO2_per_kWh is not None:
        before = carbon_g(base, asked) if base is not None else None
        add("Emissions of its energy", carbon_g(best, asked), before, _mass_text)
    return tiles


def _mass_text(grams: float) -> str:
    size, unit = (1e6, "t") if grams >= 1e6 else (1e3, "kg") if grams >= 1e3 else (1.0, "g")
    return f"{number(grams / size)} {unit} CO2e"


def _spent_tile(view: View) -> str:
    result, spent = view.result, view.result.spent
    if (plan := result.plan) is not None:
        fitting = muted(f"{plan.fitting:,} fit in memory")
        return tile("Configurations predicted", f"{plan.configurations:,}", [fitting])
    if result.points and spent.energy_kJ == 0:
        return tile(
            "Search spent", "nothing", [muted(f"{len(result.points)} settings of past runs")]
        )
    title = "A real search would take" if view.is_predicted else "Search spent"
    failed = f", {spent.failed} failed" if spent.failed else ""
    more = [muted(f"{spent.probes} probes{failed}")]
    kept = view.advice is not None and view.advice.action == "keep"
    if not kept and spent.payback_share is not None and math.isfinite(spent.payback_share):
        share = spent.payback_share
        runs = f"{number(share)} runs" if share > 1 else percent(share)
        more.append(f"repaid after {runs} of the job")
    return tile(title, view.spent, more, view.mark)


def _points(
    view: View,
    points: Sequence[Point],
    names: Sequence[str],
    columns: Sequence[Column],
    *,
    of_meters: bool,
) -> str:
    def configuration(point: Point) -> str:
        word = view.role(point)
        marks = f'<span class="mark best">{word}</span>' if word else ""
        marks += '<span class="mark base">today</span>' if view.is_today(point) else ""
        return f"<div>{marks}{chips(point.configuration, names, view.today)}</div>"

    def figure(point: Point, column: Column) -> str:
        text = column.figure(view, point)
        text += estimated_mark(point.meter.mark) if column.metered else ""
        if below := column.below(view, point):
            text += f'<br><span class="interval">{below}</span>'
        return f"<div>{text}</div>"

    def how(point: Point) -> str:
        said: str = point.source
        if said == "measured" and point.windows:
            said += f", {point.windows} window{'s' * (point.windows != 1)}"
        flags = [flag for flag in point.flags if not flag.startswith(f"{point.source}, ")]
        text = "".join(f"<div>{escape(flag)}</div>" for flag in flags)
        text = folded(f"{len(flags)} notes", text) if len(flags) > 1 else text
        return f'<div class="muted">{escape(point.how_measured if of_meters else said)}{text}</div>'

    return table(
        ("Configuration", *(column.title(view.units) for column in columns), "How obtained"),
        ([configuration(p), *(figure(p, each) for each in columns), how(p)] for p in points),
        cards=True,
        figures=range(1, len(columns) + 1),
        chosen=lambda row: view.role(points[row]) == "recommended",
    )


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
    meters = {p.meter for p in every}
    known = any(p.peak_memory_bytes for p in every)
    columns = [column for column in PAGE if known or column is not MEMORY]

    def points(some: Sequence[Point]) -> str:
        return _points(view, some, names, columns, of_meters=len(meters) > 1)

    text = limits_part(view) + points(shown)
    if len(meters) == 1:
        (meter,) = meters
        source = f"{meter.label} ({escape(meter.source)})"
        text += notes(f"Energy of every point: {meter.scope} scope, {source}.")
    if fixed:
        text += notes(f"The same for every point: {chips(every[0].configuration, fixed)}")
    others = sorted(result.points, key=lambda p: p.energy_to_solution_kJ)
    if len(others) > len(shown):
        said = f"All {len(others)} points {others[0].source}, least energy first"
        text += folded(said, points(others[:_MOST_POINTS]))
    count = f"{len(front)} configuration{'s' if len(front) != 1 else ''}"
    predicted = ""
    if result.predicted:
        said = f"Predicted to be on the front, not measured: {len(result.predicted)}"
        text += folded(said, points(result.predicted))
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


def limits_part(view: View) -> str:
    """Return the sliders for deadline and energy budget; "" if there is nothing to choose.

    The page's script looks up the choices of `choice_grid`.
    """
    result, units = view.result, view.units
    grid = choice_grid(result, units)
    if grid is None:
        return ""
    limits = result.limits
    data = {
        "run": shlex.quote(result.name),
        "found": view.found,
        "points": [_point(view, point) for point in grid.points],
        "deadline": _positions("deadline", grid.deadlines_s, units.time, units.s),
        "budget": _positions("budget", grid.budgets_kJ, units.energy, units.kJ),
        "cells": grid.cells,
    }
    starts = grid.deadlines_s.index(limits.deadline_s), grid.budgets_kJ.index(limits.budget_kJ)
    rows = (
        ("deadline", "Deadline", starts[0], len(grid.deadlines_s) - 1),
        ("budget", "Energy budget", starts[1], len(grid.budgets_kJ) - 1),
    )
    sliders = "".join(
        f'<div><label for="limit-{name}">{text}<output id="limit-{name}-value" '
        f'for="limit-{name}"></output></label><input type="range" id="limit-{name}" min="0" '
        f'max="{last}" step="1" value="{start}" autocomplete="off"></div>'
        for name, text, start, last in rows
    )
    return (
        '<div class="limits" id="limits" hidden><h3>Choose under other limits</h3>'
        f'<div class="sliders">{sliders}</div><p id="limits-choice" role="status"></p>'
        '<p class="note">On the command line: <code id="limits-command"></code></p></div>\n'
        f"{_data('limit-choices', data)}\n"
    )


def _positions(
    option: str, values: Sequence[float | None], unit: str, per: float
) -> list[dict[str, Any]]:
    short_unit = "d" if unit == "days" else unit
    return [
        {"value": None, "text": "no limit", "option": ""}
        if value is None
        else {
            "value": value / per,
            "text": f"{number(value / per)} {unit}",
            "option": f" --{option} {value / per:.6g}{short_unit}",
        }
        for value in values
    ]


def _point(view: View, point: Point) -> dict[str, Any]:
    result, units, today = view.result, view.units, view.today
    name = short(point.configuration, baseline=today)
    estimated = label(point.meter.mark)
    text = f"{name} takes {TIME.text(view, point)} and {ENERGY.text(view, point)}{estimated}"
    energy, time = view.changes(point)
    if energy:
        text += f", {energy} and {time} than today"
        if point.source == "measured":
            text += f" ({probability(result.judged.p_better(point))} sure)"
    elif today is not None:
        text += ", as today"
    time_taken, energy_taken = units.place(point)
    return {"name": name, "time": time_taken, "energy": energy_taken, "text": f"{text}."}
