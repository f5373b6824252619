"""Values of the report's upper parts: the choice, the front, and the choice under other limits."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.answer.choice import as_shown, carbon_g, cost_of
from tuner.answer.choice_grid import choice_grid
from tuner.answer.parts import Point
from tuner.display.advice import details, evidence_sentence, headline
from tuner.display.html.environment import macro
from tuner.display.view import ENERGY, MEMORY, PAGE, TIME, View, energy_columns
from tuner.formatting import change, counted, duration, label, number, percent, probability, short
from tuner.problem.run_folder import RunFolder

if TYPE_CHECKING:
    import plotly.graph_objects as go

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
    result, advice = view.result, view.advice
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
    if not view.has_energy:
        return tiles
    lines = [changes["power"]] if "power" in changes else []
    return [*tiles, Tile("Average power", f"{number(point.power_W)} W", lines, mark)]


def _name_of(view: View, point: Point) -> str:
    return "Today" if view.is_today(point) else view.role(point).capitalize()


def _shown_points(view: View) -> list[dict[str, Any]]:
    # The figures of each point that a click in the front may ask for.
    result = view.result
    first = [*result.front_points, *result.compared]
    every = {p.configuration: p for p in (*first, *result.points)}  # of many, others are left out
    return [
        {
            "place": view.units.place(point),
            "name": _name_of(view, point),
            "knobs": macro("chips", point.configuration, None, view.today),
            "tiles": {
                tile.name: [tile.value, macro("lines", tile)] for tile in _figures_of(view, point)
            },
        }
        for point in list(every.values())[:_MOST_POINTS]
    ]


def _changes(view: View, point: Point) -> dict[str, Line]:
    # A point's figures against today's; in grey where there may be no difference.
    judge, ratios = view.result.judged, view.ratios(point)
    if ratios is None or (found := judge.differences(point)) is None:
        return {}
    (energy, time), today = found, judge.today
    mine, theirs = point.power_interval_W, today.power_interval_W
    overlap = mine and theirs and mine[0] <= theirs[1] and theirs[0] <= mine[1]
    return {
        "energy": _change(ratios[0], clear=energy.shown),
        "time": _change(ratios[1], clear=time.shown),
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
    if not view.has_energy:
        return Tile(title, duration(spent.time_s), [Line(counted(spent.probes, "probe"), "muted")])
    failed = f", {spent.failed} failed" if spent.failed else ""
    lines = [Line(counted(spent.probes, "probe") + failed, "muted")]
    kept = view.advice is not None and view.advice.action == "keep"
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
    grid = choice_grid(result, units) if view.has_energy else None
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
    name = short(point.configuration, baseline=view.today)
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
