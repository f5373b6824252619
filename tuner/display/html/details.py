"""Values of the report's lower parts: time and energy by part, a probe's power, the cost of the
search, and the request.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.answer.parts import Explanation
from tuner.display.figures import Timeline, phase_means
from tuner.display.view import View, figure_texts
from tuner.formatting import Units, energy_text, label, number, percent, signed_percent
from tuner.problem.constraints import LIMITS
from tuner.workload.node.measure.measurement import PARTS, named_parts, part_rows
from tuner.workload.node.measure.stragglers import words
from tuner.workload.records.probe import Basis, ProbeRecord

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
