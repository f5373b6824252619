"""Upper parts of the report: the choice, the front, and the cost of each point."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from tuner.display.advice import details, evidence_sentence
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
from tuner.display.program_note import program_note
from tuner.display.text import energy_mark, prediction, role, spent_text
from tuner.formatting import Units, change, number, percent, varying_knobs
from tuner.problem.run_folder import RunFolder
from tuner.results.choice import carbon_g, cost_of
from tuner.results.parts import Point
from tuner.results.result import Result

if TYPE_CHECKING:
    import plotly.graph_objects as go

#: More points than this stand in the table folded away below the front.
_MOST_POINTS = 500


def top_part(result: Result, units: Units, figures: Mapping[str, go.Figure]) -> str:
    """Return the first screen: what to do, the front, and the recommendation's main figures."""
    advice = result.recommendation
    lead = result.headline if advice is not None else result.choice.sentence
    warning = "" if advice is not None and result.choice.met else ' class="warning"'
    head = f'<h1{warning}>{prose(lead)}</h1>\n<p class="note">{escape(_facts(result))}</p>'
    if facts := result.today:
        head += '<p class="note">' + "<br>".join(map(escape, facts.lines)) + "</p>"
    if advice is None:
        return f'{head}\n<p class="warning">No configuration was chosen.</p>'
    plot = ""
    if "front" in figures:
        plot = '<div class="front">'
        plot += plot_div("front", figures["front"], "Energy to solution against time to solution")
        plot += _more_toggle(figures["front"])
        plot += _shown_points(result, units) + "</div>"
    sentences = [*details(result), program_note(result)]
    if result.choice.rule != "better-in-both":
        sentences.append(f"Chosen: {result.choice.sentence}")
    sentences.append(evidence_sentence(result))
    return "\n".join(
        [
            head,
            f'<div class="first">{plot}{_tiles(result, units)}</div>',
            *(f"<p>{prose(sentence)}</p>" for sentence in sentences if sentence),
            "<noscript><p>The plots need JavaScript; the tables hold the same figures.</p>"
            "</noscript>",
        ]
    )


def _tiles(result: Result, units: Units) -> str:
    """Return the figures of the recommended configuration; a click in the front fills them."""
    advice, base = result.recommendation, result.baseline
    assert advice is not None
    best = advice.point
    mark = best.meter.mark
    whose = _name_of(result, best)
    against = base.configuration if base else None
    tiles = [
        *(
            tile(name, value, more, "" if name.startswith("Time") else mark)
            for name, (value, *more) in _figures_of(result, best, units).items()
        ),
        *_price_tiles(result, best),
        _spent_tile(result, units),
    ]
    knobs = chips(best.configuration, against=against)
    return (
        f'<div class="side"><p class="note"><b id="tiles-of">{escape(whose)}</b> '
        f'<span id="tiles-knobs">{knobs}</span></p>'
        f'<div class="figures">{"".join(tiles)}</div></div>'
    )


def _figures_of(result: Result, point: Point, units: Units) -> dict[str, list[str]]:
    """Return a point's figures by name: value, change against today, interval."""
    energy, time = point.energy_interval_kJ, point.time_interval_s
    changes = _changes(result, point)
    of = "" if result.length_known else " of a step"
    return {
        f"Time{of}": [
            units.time_text(point.time_to_solution_s),
            changes.get("time", ""),
            interval(units.interval_text(time, units.s), units.time),
        ],
        f"Energy{of}": [
            units.energy_text(point.energy_to_solution_kJ),
            changes.get("energy", ""),
            interval(units.interval_text(energy, units.kJ), units.energy),
        ],
        "Average power": [f"{number(point.power_W)} W", changes.get("power", "")],
    }


def _name_of(result: Result, point: Point) -> str:
    """Return "Today", "Recommended", "Promising" or "" for a point."""
    base = result.baseline
    if base is not None and point.configuration == base.configuration:
        return "Today"
    return role(result, point).capitalize()


def _more_toggle(figure: go.Figure) -> str:
    """Return the box that shows what the front's picture leaves out at first."""
    names = [t.name for t in figure.data if t.visible == "legendonly" and t.showlegend is not False]
    if not names:
        return ""
    shown = escape(", ".join(names))
    return f'<label class="note"><input type="checkbox" id="front-more"> also {shown}</label>'


def _shown_points(result: Result, units: Units) -> str:
    """Return the figures of each point that a click in the front may ask for."""
    base = result.baseline
    first = [*result.front_points, *([base] if base is not None else [])]
    every = {p.configuration: p for p in (*first, *result.points)}  # of many, others are left out
    against = base.configuration if base is not None else None
    shown = [
        {
            "place": units.place(point),
            "name": _name_of(result, point),
            "knobs": chips(point.configuration, against=against),
            "tiles": _figures_of(result, point, units),
        }
        for point in list(every.values())[:_MOST_POINTS]
    ]
    text = json_in_html(json.dumps(shown))
    return f'<script type="application/json" id="front-points">{text}</script>'


def _changes(result: Result, point: Point) -> dict[str, str]:
    """Return a point's figures against today's; in grey where there may be no difference."""
    found = result.judged.differences(point)
    if result.baseline is None or found is None:
        return {}
    energy, time = found
    mine, theirs = point.power_interval_W, result.baseline.power_interval_W
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


def _facts(result: Result) -> str:
    """Return what was tuned, the kind of its figures, the run and the date."""
    subject = result.job.name if result.job is not None else result.name
    if result.cluster is not None:
        subject += f" on {result.cluster.devices} x {result.cluster.device.name}"
    kind = "predicted, nothing was measured" if prediction(result) else "measured"
    if result.job is None:
        kind = "from a recording"
    facts = [subject, kind, f"run {result.name}"]
    study = RunFolder(result.run_dir).read_study() if result.run_dir is not None else None
    if study is not None and study.get("created"):
        facts.append(str(study["created"]).replace("T", " "))
    return " · ".join(facts)


def _price_tiles(result: Result, best: Point) -> list[str]:
    """Return what the choice and today cost and emit, where prices or the grid were given."""
    rates, base = result.constraints, result.baseline
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


def _spent_tile(result: Result, units: Units) -> str:
    spent = result.spent
    if (plan := result.plan) is not None:
        fitting = f'<span class="muted">{plan.fitting:,} fit in memory</span>'
        return tile("Configurations predicted", f"{plan.configurations:,}", [fitting])
    if result.points and spent.energy_kJ == 0:
        said = f'<span class="muted">{len(result.points)} settings of past runs</span>'
        return tile("Search spent", "nothing", [said])
    title = "A real search would take" if prediction(result) else "Search spent"
    failed = f", {spent.failed} failed" if spent.failed else ""
    more = [f'<span class="muted">{spent.probes} probes{failed}</span>']
    kept = result.recommendation is not None and result.recommendation.action == "keep"
    if not kept and spent.payback_share is not None and math.isfinite(spent.payback_share):
        share = spent.payback_share
        runs = f"{number(share)} runs" if share > 1 else percent(share)
        more.append(f"repaid after {runs} of the job")
    return tile(title, spent_text(result), more, energy_mark(result))


@dataclass(frozen=True)
class _Table:
    """Columns and units that the rows of the points' tables share.

    Attributes:
        meters: number of meters; a single one is named once below the table.
    """

    result: Result
    units: Units
    names: Sequence[str]
    meters: int
    memory: bool

    def html(self, points: Sequence[Point]) -> str:
        """Return a table of these points; on a phone each row becomes a card."""
        rows = [self._cells(point) for point in points]
        heads = "".join(f"<th>{label}</th>" for label, _, _ in rows[0]) if rows else ""
        body = "\n".join(self._row(p, cells) for p, cells in zip(points, rows, strict=True))
        return (
            f'<table class="cards"><thead><tr>{heads}</tr></thead><tbody>\n{body}\n</tbody></table>'
        )

    def _row(self, point: Point, cells: Sequence[tuple[str, str, str]]) -> str:
        tds = "".join(
            f'<td data-label="{label}" class="{kind}">{text}</td>' for label, text, kind in cells
        )
        return (
            f"<tr{' class=chosen' if role(self.result, point) == 'recommended' else ''}>{tds}</tr>"
        )

    def _cells(self, point: Point) -> list[tuple[str, str, str]]:
        """(heading, HTML, class) of each cell."""
        result, base, units = self.result, self.result.baseline, self.units
        marks = ""
        if word := role(result, point):
            marks += f'<span class="mark best">{word}</span>'
        if base is not None and point.configuration == base.configuration:
            marks += '<span class="mark base">today</span>'
        against = base.configuration if base else None
        estimated = estimated_mark(point.meter.mark)
        energy = interval(units.interval_text(point.energy_interval_kJ, units.kJ), "")
        time = interval(units.interval_text(point.time_interval_s, units.s), "")
        energy = f"{number(point.energy_to_solution_kJ / units.kJ)}{estimated}<br>{energy}"
        time = f"{number(point.time_to_solution_s / units.s)}<br>{time}"
        power = f"{number(point.power_W)}{estimated}"
        if point.peak_power_W is not None:
            power += f'<br><span class="interval">peak {number(point.peak_power_W)}</span>'
        peak = point.peak_memory_bytes
        memory = f"{number(peak / 2**30)} GiB" if peak else "unknown"
        how: str = point.source
        if how == "measured" and point.windows:
            how += f", {point.windows} window{'s' * (point.windows != 1)}"
        how = point.how_measured if self.meters > 1 else how
        notes = [flag for flag in point.flags if not flag.startswith(f"{point.source}, ")]
        flags = "".join(f"<div>{escape(flag)}</div>" for flag in notes)
        if len(notes) > 1:
            flags = f"<details><summary>{len(notes)} notes</summary>{flags}</details>"
        cells = [
            (
                "Configuration",
                f"<div>{marks}{chips(point.configuration, self.names, against)}</div>",
                "",
            ),
            (f"Energy ({units.energy})", f"<div>{energy}</div>", "n"),
            (f"Time ({units.time})", f"<div>{time}</div>", "n"),
            ("Power (W)", f"<div>{power}</div>", "n"),
            ("P(non-dominated)", percent(point.p_nondominated), "n"),
            ("Peak memory", memory, "n"),
            ("How obtained", f'<div class="muted">{escape(how)}{flags}</div>', ""),
        ]
        return [cell for cell in cells if cell[0] != "Peak memory" or self.memory]


def front_part(result: Result, units: Units) -> str:
    """Return the section on the front: other limits, and its tables."""
    chosen = [p for p in (result.best, result.baseline) if p]
    every = [*result.points, *result.front_points, *chosen]
    if not every:
        return section("The front", "<p>Nothing was measured, so there is no front.</p>")
    fixed = sorted({n for p in every for n in (*p.configuration.launch, *p.configuration.live)})
    names = varying_knobs(point.configuration for point in every) or tuple(fixed)
    fixed = [name for name in fixed if name not in names]
    front = sorted(result.front_points, key=lambda p: p.time_to_solution_s)
    shown = list(front)
    if result.baseline and all(p.configuration != result.baseline.configuration for p in front):
        shown.append(result.baseline)
    text = limits_part(result, units)
    meters = {p.meter for p in every}
    table = _Table(result, units, names, len(meters), any(p.peak_memory_bytes for p in every))
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
