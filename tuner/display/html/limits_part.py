"""Sliders for the deadline and the energy budget, which choose among the points of the front.

The page's script applies the rule of `tuner.results.choice.decide` for these two limits, as `tuner
choose` does. Under them only a point of the front can be chosen, so the page holds no others.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from tuner.display.columns import ENERGY, TIME
from tuner.display.html.pieces import json_in_html
from tuner.display.view import View
from tuner.formatting import label, probability, short
from tuner.problem.constraints import limit_on
from tuner.results.choice import front_of
from tuner.results.parts import Point
from tuner.results.result import Result

#: Positions of a slider; the last one is no limit.
_LAST = 101
#: The sliders reach this share beyond the least and the greatest value.
_BEYOND = 0.05


def limits_part(view: View) -> str:
    """Return the sliders with the points that they choose from; "" if there is only one."""
    result, units = view.result, view.units
    failed = result.judged.failed
    front = front_of([point for point in result.points if point.configuration not in failed])
    if len(front) < 2:
        return ""
    shown = [*front, *([result.baseline] if result.baseline else [])]
    unlimited = result.choose().point
    if unlimited.configuration not in [point.configuration for point in front]:
        front = (*front, unlimited)  # it is dominated, so no limit chooses it
    data = {
        "run": shlex.quote(result.name),
        "found": view.found,
        "unlimited": [p.configuration for p in front].index(unlimited.configuration),
        "points": [_point(view, point) for point in front],
        "deadline": {
            "unit": units.time,
            "option": "d" if units.time == "days" else units.time,
            **_range([p.time_to_solution_s / units.s for p in shown]),
            "limit": _limit(result, "time_s", units.s),
        },
        "budget": {
            "unit": units.energy,
            "option": units.energy,
            **_range([p.energy_to_solution_kJ / units.kJ for p in shown]),
            "limit": _limit(result, "energy_kJ", units.kJ),
        },
    }
    sliders = "".join(
        f'<div><label for="limit-{name}">{text}<output id="limit-{name}-value" '
        f'for="limit-{name}"></output></label>'
        f'<input type="range" id="limit-{name}" min="0" max="{_LAST}" step="1"></div>'
        for name, text in (("deadline", "Deadline"), ("budget", "Energy budget"))
    )
    return (
        '<div class="limits" id="limits" hidden><h3>Choose under other limits</h3>'
        f'<div class="sliders">{sliders}</div><p id="limits-choice" role="status"></p>'
        '<p class="note">On the command line: <code id="limits-command"></code></p></div>\n'
        '<script type="application/json" id="limit-points">'
        f"{json_in_html(json.dumps(data))}</script>\n"
    )


def _point(view: View, point: Point) -> dict[str, Any]:
    result, units, today = view.result, view.units, view.today
    name = short(point.configuration, baseline=today)
    estimated = label(point.meter.mark)
    text = f"{name} takes {TIME.text(point, units)} and {ENERGY.text(point, units)}{estimated}"
    energy, time = view.changes(point)
    if energy:
        text += f", {energy} and {time} than today"
        if point.source == "measured":
            text += f" ({probability(result.judged.p_better(point))} sure)"
    elif today is not None:
        text += ", as today"
    return {
        "name": name,
        "time": point.time_to_solution_s / units.s,
        "energy": point.energy_to_solution_kJ / units.kJ,
        "text": f"{text}.",
    }


def _range(values: list[float]) -> dict[str, float]:
    return {"low": min(values) * (1 - _BEYOND), "high": max(values) * (1 + _BEYOND)}


def _limit(result: Result, figure: str, per: float) -> float | None:
    """Return the run's own limit in the unit of the points; None without one."""
    value = limit_on(figure, result.constraints)
    return value / per if value is not None else None
