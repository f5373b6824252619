"""The power curve of a job as a table."""

from __future__ import annotations

from tuner.formatting import Units, duration, energy_text, label, number, percent
from tuner.online.curve import Curve, CurvePoint


def _move(each: CurvePoint) -> str:
    if each.live:
        return "live"
    if each.restart_s is None or each.restart_kJ is None:
        return "restart, cost unknown"
    return f"restart, {duration(each.restart_s)}, {energy_text(each.restart_kJ)}"


def curve_rows(curve: Curve) -> list[tuple[str, ...]]:
    """Return the table, its heading first, by falling power."""
    units = Units.of(each.point for each in curve.points)
    rows: list[tuple[str, ...]] = [
        (
            *("average W", "peak W", f"time ({units.time})", f"energy ({units.energy})"),
            *("slowdown [90 %]", "move", "configuration"),
        )
    ]
    for each in curve.points:
        point = each.point
        peak = "-" if point.peak_power_W is None else number(point.peak_power_W)
        slowdown = percent(each.slowdown)
        if each.slowdown_interval is not None:
            slowdown += f" [{', '.join(percent(end) for end in each.slowdown_interval)}]"
        rows.append(
            (
                number(point.power_W) + ("" if each.for_average else " *"),
                peak,
                number(point.time_to_solution_s / units.s),
                number(point.energy_to_solution_kJ / units.kJ),
                "start" if point is curve.start else slowdown,
                _move(each),
                point.configuration.short,
            )
        )
    return rows


def curve_notes(curve: Curve) -> list[str]:
    """Return what a reader of the table must know."""
    lines = [f"Power of the {curve.start.meter.scope} scope{label(curve.start.meter.mark)}."]
    if any(each.point.source == "predicted" for each in curve.points):
        lines.append("These figures are predicted; nothing was measured.")
    if any(not each.live for each in curve.points):
        lines.append(
            "A restart takes as long as the run's launches, and repeats the steps since the last "
            "checkpoint."
        )
    if any(not each.for_average for each in curve.points):
        lines.append("* A faster point draws less on average.")
    if all(each.point.peak_power_W is None for each in curve.points):
        lines.append("The run kept no power samples, so no peak is known.")
    return lines
