"""The answer as plain text: the front as a table and as a small plot, the choice, what it cost.

Aligned columns and characters that every terminal and log file shows; no colour. What nobody
metered is followed by "(estimated)", as everywhere (`tuner.wording`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tuner.result import Point, Result
from tuner.wording import (
    Units,
    comparison,
    is_estimated,
    knobs,
    label,
    number,
    ordered_knobs,
    payback,
    percent,
    prediction,
    units_of,
    varying_knobs,
)
from workload.probe import ProbeRecord

__all__ = [
    "front_lines",
    "plot_lines",
    "record_lines",
    "summary_lines",
    "verification_lines",
]

_WIDTH, _HEIGHT = 60, 12


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned to the right, the last one to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join(
            [*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]
        ).rstrip()
        for row in rows
    ]


def front_lines(
    points: Sequence[Point], names: Sequence[str] | None = None, *, intervals: bool = False
) -> list[str]:
    """Points as aligned columns: time, energy (labelled where estimated), power, knobs.

    Args:
        points: in the order in which they are shown.
        names: the knobs to show; those that vary over the points when not given.
        intervals: also show 90 % intervals, windows and the probability of being non-dominated.
    """
    if not points:
        return ["nothing measured"]
    if names is None:
        names = varying_knobs(point.configuration for point in points)
    units = Units.for_values(
        (p.energy_to_solution_kJ for p in points), (p.time_to_solution_s for p in points)
    )
    estimated = label(any(point.meter.estimated for point in points))
    more = ["90 %", "90 %", "windows", "on front"] if intervals else []
    heads = ["time to solution", f"energy to solution{estimated}", f"power{estimated}"]
    if intervals:
        heads = [heads[0], more[0], heads[1], more[1], heads[2], *more[2:]]
    rows = [[*heads, ""]]
    for p in points:
        row = [
            units.time_text(p.time_to_solution_s),
            units.energy_text(p.energy_to_solution_kJ),
            f"{number(p.power_W)} W",
        ]
        if intervals:
            row.insert(1, units.interval_text(p.time_interval_s, units.s))
            row.insert(3, units.interval_text(p.energy_interval_kJ, units.kJ))
            row += [str(p.windows), percent(p.p_nondominated)]
        rows.append([*row, " ".join(knobs(p.configuration, names)) or p.configuration.key])
    return _table(rows)


def plot_lines(result: Result) -> list[str]:
    """Energy against time on logarithmic axes: o front, . dominated, B baseline, X the choice.

    The axes span front, baseline and choice; dominated points beyond them are not drawn.
    """
    shown = [*result.front_points, *(p for p in (result.baseline, result.best) if p is not None)]
    if len({point.configuration for point in shown}) < 2:
        return []
    x = [math.log(point.time_to_solution_s) for point in shown]
    y = [math.log(point.energy_to_solution_kJ) for point in shown]
    span_x, span_y = max(x) - min(x) or 1.0, max(y) - min(y) or 1.0
    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    front = {point.configuration for point in result.front_points}
    marks = [(point, "o" if point.configuration in front else ".") for point in result.points]
    marks.sort(key=lambda mark: mark[1] == "o")  # what matters more is drawn later
    marks += [(p, mark) for p, mark in ((result.baseline, "B"), (result.best, "X")) if p]
    for point, mark in marks:
        column = (math.log(point.time_to_solution_s) - min(x)) / span_x * (_WIDTH - 1)
        row = (max(y) - math.log(point.energy_to_solution_kJ)) / span_y * (_HEIGHT - 1)
        if -0.5 <= column < _WIDTH - 0.5 and -0.5 <= row < _HEIGHT - 0.5:
            grid[round(row)][round(column)] = mark
    units = units_of(result)
    top = units.energy_text(math.exp(max(y)))
    bottom = units.energy_text(math.exp(min(y)))
    width = max(len(top), len(bottom))
    sides = [top, *[""] * (_HEIGHT - 2), bottom]
    lines = [f"{sides[i]:>{width}} |{''.join(row).rstrip()}" for i, row in enumerate(grid)]
    left, right = units.time_text(math.exp(min(x))), units.time_text(math.exp(max(x)))
    lines.append(f"{'':>{width}} +{'-' * _WIDTH}")
    lines.append(f"{'':>{width}}  {left}{right:>{_WIDTH - len(left)}}")
    estimated = label(is_estimated(result))
    lines.append(
        f"{'':>{width}}  energy{estimated} over time to solution, log axes: "
        "o front  . dominated  B baseline  X choice"
    )
    return lines


def verification_lines(result: Result) -> list[str]:
    """Whether the choice was held against the baseline again: shown wherever the choice is."""
    said = result.verification
    if said is None:
        return []
    return [said.sentence, *(f"  {attempt.sentence}" for attempt in said.attempts)]


def summary_lines(result: Result) -> list[str]:
    """What `tuner optimize` ends with."""
    units = units_of(result)
    estimated = label(is_estimated(result))
    names = varying_knobs(point.configuration for point in result.points)
    lines = [result.stopped, ""]
    if said := prediction(result):
        lines += [said, ""]
    lines.append(
        f"Front of {result.name}: {len(result.front_points)} of {len(result.points)} measured "
        f"configurations, {result.steps:,} x {result.about.get('unit_of_work', 'step')}"
    )
    lines += front_lines(result.front_points, names, intervals=True)
    if result.predicted:
        lines += ["", "Never measured, and likely on the front (predicted):"]
        lines += front_lines(result.predicted, names, intervals=True)
    if same := _same_in_all(result, names):
        lines.append(f"The same in all that was measured: {same}")
    if plot := plot_lines(result):
        lines += ["", *plot]
    if result.baseline is not None:
        lines += [
            "",
            "Baseline: "
            f"{units.energy_text(result.baseline.energy_to_solution_kJ)}{estimated} and "
            f"{units.time_text(result.baseline.time_to_solution_s)} with "
            + (" ".join(knobs(result.baseline.configuration, names or None)) or "default")
            + (f" ({result.baseline_name})" if result.baseline_name else ""),
        ]
    lines += ["", f"Choice: {result.choice.sentence}", *verification_lines(result)]
    itself = result.verification is not None and result.verification.status == "baseline"
    if comparison(result, units) and not itself:
        lines.append(comparison(result, units))
    lines.append(_spent_line(result, estimated))
    if result.leave_one_out is not None:
        loo = result.leave_one_out
        lines.append(
            f"Surrogates, leave-one-out: median error {percent(loo.time_error)} of step time and "
            f"{percent(loo.power_error)} of power."
        )
    for record in result.failures:
        assert record.failure is not None
        if _interrupted(record):  # by the user: nothing that could be mended
            continue
        lines.append(
            f"Failed: {record.request.probe_id} {record.request.launch.key}: "
            f"{record.failure.kind.replace('_', ' ')}: {record.failure.message}"
        )
    lines += _target_lines(result)
    if result.report_path is not None:
        lines.append(f"Report: {result.report_path}")
    return lines


def _same_in_all(result: Result, varying: Sequence[str]) -> str:
    """The knobs of the front that no measured point differs in; "" where the table shows all."""
    if not varying:
        return ""
    names = ordered_knobs(point.configuration for point in result.points)
    same = [name for name in names if name not in varying]
    if not same or not result.points:
        return ""
    return " ".join(knobs(result.points[0].configuration, same))


def _interrupted(record: ProbeRecord) -> bool:
    return record.failure is not None and record.failure.kind == "cancelled"


def _spent_line(result: Result, estimated: str) -> str:
    """What the search used and whether that is repaid; of past runs, that nothing was used."""
    spent = result.spent
    if result.points and not spent.energy_kJ and not spent.time_s:
        return payback(result)
    stopped = sum(_interrupted(record) for record in result.failures)
    failed = f", {spent.failed - stopped} failed" if spent.failed > stopped else ""
    failed += f", {stopped} interrupted" if stopped else ""
    return (
        f"Spent: {number(spent.energy_kJ)} kJ{estimated} and {number(spent.time_s)} s in "
        f"{spent.probes} probes{failed}, {spent.measurements} measurements. {payback(result)}"
    )


def _target_lines(result: Result) -> list[str]:
    """The front predicted for more GPUs, where one was asked for."""
    target = result.target
    if target is None:
        return []
    shown = [*target.front_points, *([target.baseline] if target.baseline else [])]
    names = varying_knobs(point.configuration for point in shown)
    lines = ["", target.sentence, *front_lines(target.front_points, names, intervals=True)]
    if target.baseline is not None:
        lines += ["The default configuration there:", *front_lines([target.baseline], names)]
    return [*lines, f"Choice there: {target.choice.sentence}"]


def record_lines(record: ProbeRecord) -> list[str]:
    """One probe's record for people: what was asked, measured, and what it cost."""
    estimated = label(record.meter.estimated)
    lines = [f"probe {record.request.launch.key}"]
    for m in record.measurements:
        error = m.step_time_rse
        lines += [
            f"  live            {m.live.key if m.live else 'left to the device'}",
            f"  step time       {number(m.step_time_s)} s"
            + (f" +- {percent(error)}" if math.isfinite(error) else ""),
            f"  power           {number(m.power_W)} W{estimated}",
            f"  energy a step   {number(m.energy_per_step_J)} J{estimated}",
            f"  window          {m.steps} steps in {number(m.window_s)} s",
        ]
        if m.delivered:
            pairs = ", ".join(f"{name} {number(value)}" for name, value in m.delivered.items())
            lines.append(f"  delivered       {pairs}")
        if m.peak_memory_bytes is not None:
            lines.append(f"  peak memory     {number(m.peak_memory_bytes / 1e9)} GB, fullest rank")
        lines += [f"  note            {flag}" for flag in m.flags]
    lines += [
        f"meter {record.meter.name}: {record.meter.scope} scope, {record.meter.source}{estimated}",
        f"cost {number(record.energy_J)} J{estimated} and {number(record.wall_s)} s, of which the "
        f"launch {number(record.launch_s)} s",
    ]
    if record.failure is not None:
        kind = record.failure.kind.replace("_", " ")
        lines.append(f"failed: {kind}: {record.failure.message}")
        lines += [f"  | {line}" for line in record.failure.log_tail.splitlines()]
    return lines
