"""Values of the report's page: its choice under other limits, its templates, and its upper parts
(the choice, the front) and lower ones.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tuner.answer.answer import Answer, choose_again
from tuner.answer.choice import as_shown, best_of, carbon_g, cost_of, figures_of, front_of
from tuner.answer.parts import Explanation, Point
from tuner.display.advice import details, evidence_sentence, headline
from tuner.display.figures import Timeline, phase_means
from tuner.display.view import ENERGY, MEMORY, PAGE, TIME, View, energy_columns, figure_texts
from tuner.formatting import (
    Units,
    change,
    counted,
    duration,
    energy_text,
    knob_text,
    label,
    number,
    ordered_knobs,
    percent,
    probability,
    short,
    signed_percent,
)
from tuner.problem.constraints import LIMITS, Constraints
from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.knobs import KNOBS
from tuner.workload.node.measure.measurement import PARTS, named_parts, part_rows
from tuner.workload.node.measure.stragglers import words
from tuner.workload.records.probe import Basis, ProbeRecord

if TYPE_CHECKING:
    import plotly.graph_objects as go


# Choices under a grid of deadlines and energy budgets, for a page that only looks them up.


#: Values of each limit, beside no limit and the run's own one.
VALUES = 24
#: The values reach this share beyond the least and the greatest figure of the front.
BEYOND = 0.05


@dataclass(frozen=True)
class ChoiceGrid:
    """Choice of `Result.choose` under each pair of a deadline and an energy budget.

    Attributes:
        deadlines_s: ascending; the last one is None, no deadline. `budgets_kJ` likewise.
        points: the points that are chosen in any cell.
        cells: for each deadline and each budget the number of a point, and True if it meets both.
    """

    deadlines_s: tuple[float | None, ...]
    budgets_kJ: tuple[float | None, ...]
    points: tuple[Point, ...]
    cells: tuple[tuple[tuple[int, bool], ...], ...]


def choice_grid(result: Answer, units: Units) -> ChoiceGrid | None:
    """Return the choices on a grid whose values have three digits in these units.

    None if there is only one point to choose, or the length of the training is unknown.
    """
    judge = result.judged
    front = front_of(judge.candidates)
    if len(front) < 2 or result.length is None:
        return None
    shown = [*front, *result.compared]
    own = result.limits
    deadlines_s = _values([p.inferred.time_to_solution_s for p in shown], units.s, own.deadline_s)
    budgets_kJ = _values([p.inferred.energy_to_solution_kJ for p in shown], units.kJ, own.budget_kJ)
    points: list[Point] = []
    figures = figures_of(judge.candidates)

    def cell(deadline_s: float | None, budget_kJ: float | None) -> tuple[int, bool]:
        if deadline_s is None and budget_kJ is None:
            point, met = choose_again(result, Constraints()).point, True
        else:
            limits = Constraints(deadline_s=deadline_s, budget_kJ=budget_kJ)
            best = best_of(judge.candidates, limits, result.baseline, judge.chance, figures)
            point, met = best.point, best.met
        if point not in points:
            points.append(point)
        return points.index(point), met

    cells = tuple(tuple(cell(time, energy) for energy in budgets_kJ) for time in deadlines_s)
    return ChoiceGrid(deadlines_s, budgets_kJ, tuple(points), cells)


def _values(figures: Sequence[float], unit: float, own: float | None) -> tuple[float | None, ...]:
    # Even steps of the logarithm.
    low, high = (1 - BEYOND) * min(figures) / unit, (1 + BEYOND) * max(figures) / unit
    steps = [i / (VALUES - 1) for i in range(VALUES)]
    values = {unit * float(f"{low * math.pow(high / low, step):.3g}") for step in steps}
    return (*sorted(values | ({own} if own is not None else set())), None)


# The package's HTML templates: jinja2 escapes every text that a user or a script wrote.


def in_script(text: str) -> Markup:
    """Return JSON that cannot end its script element, whatever strings are in it: <, > and & occur
    only inside JSON strings, where they may be written as escapes."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def whole_figures(text: str) -> str:
    """Return a text whose numbers stay on one line with the unit or word after them."""
    return re.sub(r"(?<=\d) (?=\S)", "\u00a0", text)


def _text_of(name: str) -> Markup:
    return Markup((resources.files("tuner") / "templates" / name).read_text(encoding="utf-8"))


@cache
def environment() -> Environment:
    """Return the templates with the functions that format figures and knobs."""
    made = Environment(
        loader=PackageLoader("tuner"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["in_script"] = in_script
    made.filters["whole_figures"] = whole_figures
    made.filters["json"] = lambda value: in_script(json.dumps(value))
    made.tests["not_flat"] = lambda values: any(
        isinstance(each, Mapping | list | tuple) for each in values
    )
    made.globals.update(
        KNOBS=KNOBS,
        configuration_of=Configuration,
        knob_text=knob_text,
        label=label,
        number=number,
        ordered_knobs=ordered_knobs,
        text_of=_text_of,
    )
    return made


#: More points than this are not in the table folded away below the front.
_MOST_POINTS = 500


@dataclass(frozen=True)
class Line:
    """Line of a tile: a text, the class of its element ("" for none), and the text after it."""

    text: str
    kind: str = ""
    after: str = ""


@dataclass(frozen=True)
class Tile:
    """Figure with its unit, and lines below it."""

    name: str
    value: str
    lines: Sequence[Line] = ()
    mark: str = ""


def top_values(view: View, figures: Mapping[str, go.Figure]) -> dict[str, Any]:
    """Return the values of the first screen: recommendation, front, and main figures."""
    result, advice = view.result, view.result.recommendation
    values: dict[str, Any] = {
        "facts": _facts(view),
        "name_of": _name_of,
        "headline": headline(result) if advice else result.choice.sentence,
    }
    if advice is None:
        return values
    sentences = [*details(result), view.notices]
    if result.choice.rule != "better-in-both":
        sentences.append(f"Chosen: {result.choice.sentence}")
    sentences.append(evidence_sentence(result))
    point = advice.point
    return values | {
        "sentences": [sentence for sentence in sentences if sentence],
        "tiles": [*_figures_of(view, point), *_price_tiles(view, point), _spent_tile(view)],
        "shown_points": _shown_points(view),
        # The box shows what the front's picture leaves out at first.
        "hidden_traces": [
            trace.name
            for trace in (figures["front"].data if "front" in figures else ())
            if trace.visible == "legendonly" and trace.showlegend is not False
        ],
    }


def _figures_of(view: View, point: Point) -> list[Tile]:
    # A click in the front fills these tiles with another point's.
    units, changes, mark = view.units, _changes(view, point), point.meter.mark
    of = "" if view.result.length else " of a step"
    tiles = []
    for column in energy_columns((TIME, ENERGY), view):
        lines = [changes[column.name]] if column.name in changes else []
        if below := column.below(view, point):
            lines.append(Line(f"{below} {column.unit(units)}", "interval"))
        own = mark if column.metered else ""
        tiles.append(Tile(f"{column.heading}{of}", column.text(view, point), lines, own))
    if not view.result.has_energy:
        return tiles
    lines = [changes["power"]] if "power" in changes else []
    return [*tiles, Tile("Average power", f"{number(point.power_W)} W", lines, mark)]


def _name_of(view: View, point: Point) -> str:
    return "Today" if view.is_today(point) else view.role(point).capitalize()


def _shown_points(view: View) -> list[dict[str, Any]]:
    # The figures of each point that a click in the front may ask for.
    result = view.result
    macros: Any = environment().get_template("macros.html").module
    first = [*result.front_points, *result.compared]
    every = {p.configuration: p for p in (*first, *result.points)}  # of many, others are left out
    return [
        {
            "place": view.units.place(point),
            "name": _name_of(view, point),
            "knobs": str(macros.chips(point.configuration, None, result.today_configuration)),
            "tiles": {
                tile.name: [tile.value, str(macros.lines(tile))]
                for tile in _figures_of(view, point)
            },
        }
        for point in list(every.values())[:_MOST_POINTS]
    ]


def _changes(view: View, point: Point) -> dict[str, Line]:
    # A point's figures against today's; in grey where there may be no difference. What is
    # recommended is clear as far as the headline names it.
    judge, ratios = view.result.judged, view.ratios(point)
    if ratios is None or (found := judge.differences(point)) is None:
        return {}
    (energy, time), today = found, judge.today_point
    mine, theirs = point.power_interval_W, today.power_interval_W
    overlap = mine and theirs and mine[0] <= theirs[1] and theirs[0] <= mine[1]
    recommended = view.role(point) == "recommended"
    return {
        "energy": _change(ratios[0], clear=energy.named if recommended else energy.shown),
        "time": _change(ratios[1], clear=time.named if recommended else time.shown),
        "power": _change(point.power_W / today.power_W, clear=not overlap),
    }


def _change(ratio: float, *, clear: bool) -> Line:
    if abs(ratio - 1) < 0.0005:
        return Line("as today", "muted")
    text = change(ratio, 1, "less", "more")
    if clear:
        return Line(text, "less" if ratio < 1 else "rise", " than today")
    return Line(f"{text} than today; no difference shown", "muted")


def _facts(view: View) -> str:
    result = view.result
    subject = result.job.name if result.job is not None else result.name
    if result.cluster is not None:
        subject += f" on {result.cluster.devices} x {result.cluster.device.name}"
    facts = [subject, view.words.subject, f"run {result.name}"]
    study = RunFolder(result.run_dir).read_study() if result.run_dir is not None else None
    if study is not None and study.get("created"):
        facts.append(str(study["created"]).replace("T", " "))
    return " · ".join(facts)


def _price_tiles(view: View, best: Point) -> list[Tile]:
    # What the choice and today cost and emit, where prices or the grid were given.
    constraints, base = view.result.request.constraints, view.result.baseline
    tiles = []

    def add(name: str, now: float, before: float | None, text: Callable[[float], str]) -> None:
        today = [Line(f"today {text(before)}", "muted")] if before is not None else []
        tiles.append(Tile(name, text(now), today, best.meter.mark))

    if any(constraints.prices):
        before = cost_of(as_shown(base), constraints) if base is not None else None
        add("Cost at your prices", cost_of(as_shown(best), constraints), before, number)
    if constraints.grid_gCO2_per_kWh is not None:
        before = carbon_g(as_shown(base), constraints) if base is not None else None
        add("Emissions of its energy", carbon_g(as_shown(best), constraints), before, _mass_text)
    return tiles


def _mass_text(grams: float) -> str:
    size, unit = (1e6, "t") if grams >= 1e6 else (1e3, "kg") if grams >= 1e3 else (1.0, "g")
    return f"{number(grams / size)} {unit} CO2e"


def _spent_tile(view: View) -> Tile:
    result, spent = view.result, view.result.spent
    if (plan := result.plan) is not None:
        fitting = Line(f"{plan.fitting:,} fit in memory", "muted")
        return Tile("Configurations predicted", f"{plan.configurations:,}", [fitting])
    if result.points and spent.energy_kJ == 0:
        past = Line(f"{len(result.points)} settings of past runs", "muted")
        return Tile("Search spent", "nothing", [past])
    title = view.words.spent
    if not view.result.has_energy:
        return Tile(title, duration(spent.time_s), [Line(counted(spent.probes, "probe"), "muted")])
    failed = f", {spent.failed} failed" if spent.failed else ""
    lines = [Line(counted(spent.probes, "probe") + failed, "muted")]
    kept = view.result.recommendation is not None and view.result.recommendation.action == "keep"
    if not kept and spent.payback_share is not None and math.isfinite(spent.payback_share):
        share = spent.payback_share
        runs = f"{number(share)} runs" if share > 1 else percent(share)
        lines.append(Line(f"repaid after {runs} of the job"))
    return Tile(title, view.spent, lines, view.mark)


def front_values(view: View) -> dict[str, Any]:
    """Return the values of the section on the front: its tables and the choice under limits."""
    result, every = view.result, view.points
    present = sorted({n for p in every for n in (*p.configuration.launch, *p.configuration.live)})
    names = view.names or tuple(present)
    shown = sorted(result.front_points, key=lambda p: p.time_to_solution_s)
    shown += [point for point in result.compared if point.configuration not in view.front]
    has_memory = any(p.peak_memory_bytes for p in every)
    others = sorted(result.points, key=lambda p: p.energy_to_solution_kJ)
    return {
        "names": names,
        "fixed": [name for name in present if name not in names],
        "shown": shown,
        "others": others[:_MOST_POINTS],
        "columns": [c for c in energy_columns(PAGE, view) if has_memory or c is not MEMORY],
        "meters": list({p.meter for p in every}),
        "flags_of": _flags_of,
        "source_text": _source_text,
        **limit_values(view),
    }


def _flags_of(point: Point) -> list[str]:
    return [flag for flag in point.flags if not flag.startswith(f"{point.source}, ")]


def _source_text(point: Point) -> str:
    if point.source != "measured" or not point.windows:
        return point.source
    return f"measured, {point.windows} window{'s' * (point.windows != 1)}"


def limit_values(view: View) -> dict[str, Any]:
    """Return the sliders for deadline and energy budget, with the choices that the page's script
    looks up; no sliders if there is nothing to choose."""
    result, units = view.result, view.units
    grid = choice_grid(result, units) if view.result.has_energy else None
    if grid is None:
        return {"sliders": []}
    limits = result.limits
    sliders = []
    choices: dict[str, Any] = {"run": shlex.quote(result.name), "found": view.words.found}
    for name, text, values, own, unit, per in (
        ("deadline", "Deadline", grid.deadlines_s, limits.deadline_s, units.time, units.s),
        ("budget", "Energy budget", grid.budgets_kJ, limits.budget_kJ, units.energy, units.kJ),
    ):
        start, last = values.index(own), len(values) - 1
        sliders.append({"name": name, "label": text, "start": start, "last": last})
        choices[name] = [_position(name, value, unit, per) for value in values]
    points = [_choice_text(view, point) for point in grid.points]
    return {"sliders": sliders, "choices": {**choices, "points": points, "cells": grid.cells}}


def _position(option: str, value: float | None, unit: str, per: float) -> dict[str, Any]:
    if value is None:
        return {"value": None, "text": "no limit", "option": ""}
    return {
        "value": value / per,
        "text": f"{number(value / per)} {unit}",
        "option": f" --{option} {value / per:.6g}{'d' if unit == 'days' else unit}",
    }


def _choice_text(view: View, point: Point) -> dict[str, Any]:
    result = view.result
    name = short(point.configuration, baseline=view.result.today_configuration)
    estimated = label(point.meter.mark)
    text = f"{name} takes {TIME.text(view, point)} and {ENERGY.text(view, point)}{estimated}"
    energy, time = view.changes(point)
    if energy:
        text += f", {energy} and {time} than today"
        if point.source == "measured":
            text += f" ({probability(result.judged.p_better(point))} sure)"
    elif view.is_today(point):
        text += ", as today"
    time_taken, energy_taken = view.units.place(point)
    return {"name": name, "time": time_taken, "energy": energy_taken, "text": f"{text}."}


# Values of the report's lower parts: time and energy by part, a probe's power, the cost of the
# search, and the request.


_LIMIT_LABELS = {
    **{limit.name: limit.label for limit in LIMITS},
    "probe_budget_kJ": "energy budget of the search (kJ)",
    "max_probes": "most probes",
    "search_s": "longest search (s)",
    "search_share": "energy of the search as a share of today's training",
    "price_per_kWh": "price of a kWh",
    "price_per_gpu_hour": "price of a GPU hour",
    "grid_gCO2_per_kWh": "carbon intensity of the grid (g CO2e/kWh)",
}
#: Parts of `about` that are shown elsewhere on the page.
_SHOWN_ELSEWHERE = ("unit_of_work",)


@dataclass(frozen=True)
class ShownTimeline:
    """Power of a probe over time: the point that it measured, and a row for each phase."""

    key: str
    word: str
    record: ProbeRecord
    phases: list[tuple[str, str, str, str]]

    @classmethod
    def of(cls, name: str, timeline: Timeline) -> ShownTimeline:
        """Return a timeline of `shown_timelines` as the page shows it."""
        means = phase_means(timeline)
        total = math.fsum(seconds for _, seconds, _ in means)
        phases = [
            (
                phase,
                f"{number(1000 * seconds)} ms",
                percent(seconds / total) if total else "unknown",
                f"{number(power)} W" if math.isfinite(power) else "no sample",
            )
            for phase, seconds, power in means
        ]
        word = "recommended" if name == "best" else "today"
        return cls(f"timeline-{name}", word, timeline.record, phases)


def detail_values(
    view: View, explanation: Explanation | None, timelines: Mapping[str, Timeline]
) -> dict[str, Any]:
    """Return the values of the lower parts."""
    plan = view.result.plan
    return {
        "explanation": explanation,
        "parts": _parts(explanation) if explanation is not None else [],
        "parts_note": _parts_note(view, explanation) if explanation is not None else "",
        **_power_by_part(explanation.parts_W if explanation is not None else {}),
        "timelines": [ShownTimeline.of(name, each) for name, each in timelines.items()],
        "spent_rows": _spent_rows(view),
        "straggler_rows": [(probe, *words(each)) for probe, each in view.result.stragglers],
        "size_units": Units.of([size.best for size in plan.sizes]) if plan else view.units,
        "figure_texts": figure_texts,
        "own_energy_text": energy_text,
        "asked": _given_limits(view),
    }


def _power_by_part(parts_W: Mapping[str, float]) -> dict[str, Any]:
    heads = ["Phase", *(PARTS[part] for part in named_parts(parts_W))]
    return {"power_heads": heads, "power_rows": part_rows(parts_W)}


def _parts(explanation: Explanation) -> list[list[str]]:
    if not explanation.time_s:
        return []
    units = [(explanation.time_s, "s")]
    units += [(explanation.energy_J, "J")] if explanation.energy_J else []
    rows = []
    for name in dict.fromkeys((*explanation.time_s, *explanation.energy_J)):
        cells = [name]
        for parts, unit in units:
            value, whole = parts.get(name, 0.0), math.fsum(parts.values())
            cells += [f"{number(value)} {unit}", percent(value / whole)] if value else ["", ""]
        rows.append(cells)
    return rows


def _parts_note(view: View, explanation: Explanation) -> str:
    if view.basis is Basis.PREDICTED:
        return "Predicted shares of the choice's step, along the busiest pipeline stage."
    errors = explanation.model_error.items()
    off = ", ".join(f"{name} {signed_percent(share)}" for name, share in errors)
    quantity = "time and energy" if explanation.energy_J else "time"
    return (
        f"Measured {quantity} of the choice's step, by the analytic models' shares along the "
        f"busiest pipeline stage; the models alone would have been off by {off}."
    )


def _spent_rows(view: View) -> list[tuple[str, str]]:
    result, spent, words = view.result, view.result.spent, view.words
    time = Units.for_values([], [spent.time_s])
    rows = [
        (words.spent_time, time.time_text(spent.time_s)),
        ("Probes", f"{spent.probes}, of which {spent.failed} failed"),
        (words.windows, str(spent.measurements)),
        ("Payback", view.payback),
        ("Ended because", result.stopped or "it is not recorded"),
    ]
    if (loo := result.leave_one_out) is not None:
        inside = f"{percent(loo.coverage)} of the left-out values lay inside their 90 % interval."
        rows.append(("Models", f"{view.surrogates} {inside}"))
    return rows


def _given_limits(view: View) -> dict[str, Any]:
    # Limits, space, job and cluster.
    result = view.result
    given = {**result.limits.to_json(), **result.request.to_json()}
    limits = {
        _LIMIT_LABELS[name]: f"{value:,.10g}"
        for name, value in given.items()
        if name in _LIMIT_LABELS
    }
    scopes = sorted(
        {
            (view.shown(f"{p.meter.name}: {p.meter.scope} scope, ") or "time alone: ")
            + p.meter.source
            + label(p.meter.mark)
            + (f"; charged: {p.meter.host}" if p.meter.host else "")
            for p in result.points
        }
    )
    rest = {name: value for name, value in result.about.items() if name not in _SHOWN_ELSEWHERE}
    return {
        **(limits or {"constraints": "none"}),
        "chosen by": result.choice.rule,
        f"{view.unit_of_work}s to the solution": f"{result.length:,}"
        if result.length
        else "unknown",
        (view.shown("energy from") or "metered"): scopes or ["nothing was measured"],
        **{name: _unpacked(value) for name, value in rest.items()},
    }


def _unpacked(value: Any) -> Any:
    # study.toml holds a model as JSON.
    if isinstance(value, str) and value.startswith("{"):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    if isinstance(value, Mapping):
        return {name: _unpacked(part) for name, part in value.items()}
    return value
