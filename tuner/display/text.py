"""The result as plain text: the front as a table and a small plot, the choice, the cost.

Aligned columns and characters that every terminal and log file shows; no colour. A figure without a
meter is followed by "(estimated)", as on every page.

The pages and figures take their sentences about a result from here too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tuner.display.advice import details, evidence_sentence
from tuner.display.ascii_plot import ascii_plot
from tuner.display.plan_text import plan_lines, probe_lines
from tuner.formatting import (
    Units,
    change,
    common_mark,
    duration,
    energy_text,
    label,
    number,
    ordered_knobs,
    percent,
    short,
    varying_knobs,
)
from tuner.results.parts import Point
from tuner.results.result import Result
from tuner.results.scale_out import Target
from tuner.workload.probe import ProbeRecord

_WIDTH, _HEIGHT = 60, 12


def _every_point(result: Result) -> list[Point]:
    named = (point for point in (result.best, result.baseline) if point is not None)
    return [*result.points, *result.front_points, *named]


def units_of(result: Result) -> Units:
    """Return the units of a result's points."""
    points = _every_point(result)
    return Units.of(points)


def spent_text(result: Result) -> str:
    """Return the energy of the search: in the unit of the points, or in its own.

    19,600 J beside points of a few joules is written as 19.6 kJ, and 0.0005 kWh as 1.9 kJ.
    """
    units, spent_kJ = units_of(result), result.spent.energy_kJ
    alike = 0.01 * units.kJ <= spent_kJ < 1e4 * units.kJ and result.length_known
    return units.energy_text(spent_kJ) if alike else energy_text(spent_kJ)


def energy_mark(result: Result) -> str:
    """Return the mark of the result's energies: "twin", "estimated", or "" if all were metered."""
    points = _every_point(result)
    return common_mark([p.meter for p in points] + [record.meter for record in result.failures])


def prediction(result: Result) -> str:
    """Return the notice for a study that ran on a simulated cluster; "" for any other."""
    points = _every_point(result)
    meters = [p.meter for p in points] + [record.meter for record in result.failures]
    if not any(meter.name == "simulated" for meter in meters):
        return ""
    return (
        "A prediction: every figure is the analytic models', nothing was measured. The commands "
        "tuner fit and python -m benchmarks.published print their known error."
    )


def found_word(result: Result) -> str:
    """Return "measured", or "predicted" for a study on a simulated cluster."""
    return "predicted" if prediction(result) else "measured"


def real_search_cost(result: Result) -> str:
    """Return what the simulated probes would take on the cluster itself, as a sentence."""
    spent = result.spent
    return (
        f"A real search like this would take about {duration(spent.time_s)} and "
        f"{spent_text(result)} of the cluster, in {spent.probes} probes."
    )


def changes(result: Result, point: Point) -> tuple[str, str]:
    """Return a point's energy and time against the baseline's: "24 % less energy", "3 % more time".

    Both are "" without a baseline, and for the baseline itself.
    """
    found = result.judged.differences(point)
    if found is None:
        return "", ""
    energy, time = (1 + each.relative for each in found)
    return change(energy, 1, "less energy", "more energy"), change(
        time, 1, "less time", "more time"
    )


def role(result: Result, point: Point) -> str:
    """Return "recommended" or "promising" for such a point, else ""."""
    advice = result.recommendation
    if advice is None:
        return ""
    if point.configuration == advice.point.configuration:
        return "recommended"
    promising = advice.promising
    return "promising" if promising and point.configuration == promising.configuration else ""


def unit_of_work(result: Result) -> str:
    """Name one of the result's steps: "optimizer step", or a recorded table's "epoch"."""
    return str(result.about.get("unit_of_work", "optimizer step"))


def payback(result: Result) -> str:
    """Return the sentence on when the savings repay the search; "" where nothing is saved."""
    if result.points and result.spent.energy_kJ == 0:
        return "Nothing was spent on a search."
    after = payback_after(result)
    return f"The savings repay the search {after}." if after else ""


def payback_after(result: Result) -> str:
    """Return the amount of training after which the savings repay the search, as "after ..."."""
    steps, share = result.spent.payback_steps, result.spent.payback_share
    kept = result.recommendation is not None and result.recommendation.action == "keep"
    if kept or steps is None or not math.isfinite(steps):
        return ""
    if share is not None and share > 1:
        return f"after {number(share)} runs of the whole job"
    of_job = "" if share is None else f" ({percent(share)} of the job)"
    amount = f"{math.ceil(steps):,}" if steps >= 10 else number(steps)
    return f"after {amount} {unit_of_work(result)}s{of_job}"


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
    points: Sequence[Point],
    names: Sequence[str] | None = None,
    *,
    intervals: bool = False,
    units: Units | None = None,
) -> list[str]:
    """Points as aligned columns: time, energy (labelled where estimated), power, knobs.

    Args:
        names: the knobs to show; those that vary over the points when not given.
        intervals: also show 90 % intervals, windows and the probability of being non-dominated.
        units: of the figures; those of the points when not given.
    """
    if not points:
        return ["nothing measured"]
    if names is None:
        names = varying_knobs(point.configuration for point in points)
    units = units or Units.of(points)
    estimated = label(common_mark(point.meter for point in points))
    more = ["90 %", "90 %", "windows", "on front"] if intervals else []
    heads = ["time", f"energy{estimated}", "power"]
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
        rows.append([*row, short(p.configuration, names)])
    return _table(rows)


def plot_lines(result: Result) -> list[str]:
    """Energy against time on logarithmic axes: o front, . dominated, T today, X recommended.

    The axes span these; dominated points beyond them are not drawn.
    """
    named = [("T", result.baseline), ("X", result.recommended)]
    shown = [*result.front_points, *(point for _, point in named if point is not None)]
    if len({point.configuration for point in shown}) < 2:
        return []
    front = {point.configuration for point in result.front_points}
    marks = [(point, "o" if point.configuration in front else ".") for point in result.points]
    marks.sort(key=lambda mark: mark[1] == "o")  # what matters more is drawn later
    marks += [(point, mark) for mark, point in named if point is not None]
    lines = ascii_plot(marks, shown, units_of(result), width=_WIDTH, height=_HEIGHT)
    estimated = label(energy_mark(result))
    indent = " " * (lines[-2].index("+") + 2)
    key = f"{indent}o front  . dominated  T today  X recommended"
    return [*lines, f"{indent}energy{estimated} over time to solution, log axes", key]


def recommendation_lines(result: Result) -> list[str]:
    """Return what to do, and what is unproven about it."""
    return [result.headline, *details(result)] if result.recommendation is not None else []


def summary_lines(result: Result) -> list[str]:
    """Return the summary that `tuner optimize` prints at its end."""
    units = units_of(result)
    estimated = label(energy_mark(result))
    names = varying_knobs(point.configuration for point in result.points)
    lines = [result.stopped, ""]
    if said := prediction(result):
        lines += [said, ""]
    lines.append(
        f"Front of {result.name}: {len(result.front_points)} of {len(result.points)} "
        f"{found_word(result)} configurations, "
        + (f"{result.steps:,} x " if result.length_known else "of one ")
        + str(result.about.get("unit_of_work", "step"))
    )
    lines += front_lines(result.front_points, names, intervals=True, units=units)
    if result.predicted:
        never = "Not tried" if prediction(result) else "Never measured"
        lines += ["", f"{never}, and likely on the front (predicted):"]
        lines += front_lines(result.predicted, names, intervals=True, units=units)
    if same := _same_in_all(result, names):
        lines.append(f"The same in all that was {found_word(result)}: {same}")
    if plot := plot_lines(result):
        lines += ["", *plot]
    if result.baseline is not None:
        lines += [
            "",
            "Today: "
            f"{units.energy_text(result.baseline.energy_to_solution_kJ)}{estimated} and "
            f"{units.time_text(result.baseline.time_to_solution_s)} with "
            + short(result.baseline.configuration, names)
            + (f" ({result.baseline_name})" if result.baseline_name else ""),
        ]
    lines += ["", *recommendation_lines(result)]
    lines += [sentence] if (sentence := evidence_sentence(result)) else []
    lines.append(f"Choice: {result.choice.sentence}")
    if result.plan is None:
        lines.append(spent_line(result))
    if result.leave_one_out is not None:
        loo = result.leave_one_out
        lines.append(
            f"Surrogates, {loo.method}: median error {percent(loo.time_error)} of step time and "
            f"{percent(loo.power_error)} of power."
        )
    for record in result.failures:
        assert record.failure is not None
        if _interrupted(record):  # by the user: nothing that could be mended
            continue
        lines.append(
            f"Failed: {record.request.probe_id} {record.request.launch.short}: "
            f"{record.failure.sentence}"
        )
    lines += [*plan_lines(result), *probe_lines(result)]
    if result.report_path is not None:
        lines.append(f"Report: {result.report_path}")
    return lines


def _same_in_all(result: Result, varying: Sequence[str]) -> str:
    """Name the knobs in which no measured point differs; "" if the table shows all knobs."""
    if not varying:
        return ""
    names = ordered_knobs(point.configuration for point in result.points)
    same = [name for name in names if name not in varying]
    if not same or not result.points:
        return ""
    return short(result.points[0].configuration, same)


def _compiled(record: ProbeRecord) -> str:
    """Return the part of a launch that torch.compile took; "" if it took none."""
    seconds = record.compilation_s
    return f" (compilation {number(seconds)} s of it)" if seconds else ""


def _interrupted(record: ProbeRecord) -> bool:
    return record.failure is not None and record.failure.was_cancelled


def spent_line(result: Result) -> str:
    """Return the cost of the search and its payback; for past runs, that nothing was spent."""
    spent = result.spent
    if result.points and not spent.energy_kJ and not spent.time_s:
        return payback(result)
    if prediction(result):
        return f"{real_search_cost(result)} {payback(result)}".rstrip()
    cost = f"{spent_text(result)}{label(energy_mark(result))}"
    text = f"Spent: {cost} and {duration(spent.time_s)} in {spent.probes} probes"
    after = payback_after(result)
    return f"{text}, repaid {after}." if after else f"{text}."


def target_lines(target: Target) -> list[str]:
    """Return the front predicted for more GPUs."""
    names = varying_knobs(p.configuration for p in (*target.front_points, target.baseline))
    return [
        target.sentence,
        *front_lines(target.front_points, names, intervals=True),
        "The default configuration there:",
        *front_lines([target.baseline], names),
        f"Choice there: {target.choice.sentence}",
    ]


def record_lines(record: ProbeRecord) -> list[str]:
    """One probe's record for people: what was asked, measured, and what it cost."""
    estimated = label(record.meter.mark)
    lines = [f"probe {record.request.launch.short}"]
    for m in record.measurements:
        error = m.step_time_rse
        lines += [
            f"  live            {m.live.short if m.live else 'left to the device'}",
            f"  step time       {number(m.step_time_s)} s"
            + (f" +- {percent(error)}" if math.isfinite(error) else ""),
            f"  power           {number(m.power_W)} W{estimated}",
            f"  energy a step   {number(m.energy_per_step_J)} J{estimated}",
            f"  window          {m.steps} steps in {number(m.window_s)} s",
        ]
        if m.accumulation is not None:
            each = ", ".join(number(k) for k in sorted(set(m.accumulation.micro_batches)))
            lines.append(
                f"  extrapolated    from steps of {each} micro-batches to "
                f"{m.accumulation.accumulation}"
            )
        if m.delivered:
            pairs = ", ".join(f"{name} {number(value)}" for name, value in m.delivered.items())
            lines.append(f"  delivered       {pairs}")
        if m.peak_memory_bytes is not None:
            lines.append(f"  peak memory     {number(m.peak_memory_bytes / 1e9)} GB, fullest rank")
        lines += [f"  note            {flag}" for flag in m.flags]
    lines += [
        f"meter {record.meter.name}: {record.meter.scope} scope, {record.meter.source}{estimated}",
        f"cost {number(record.energy_J)} J{estimated} and {number(record.wall_s)} s, of which the "
        f"launch {number(record.launch_s)} s{_compiled(record)}",
    ]
    if record.failure is not None:
        lines.append(f"failed: {record.failure.sentence}")
        lines += [f"  | {line}" for line in record.failure.log_tail.splitlines()]
    return lines
