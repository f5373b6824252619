"""The result as plain text: the front as a table and a small plot, the choice, the cost.

Aligned columns and characters that every terminal and log file shows; no colour. A figure without a
meter is followed by "(estimated)", as on every page.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from tuner.display.advice import advice_lines, evidence_sentence
from tuner.display.ascii_plot import ascii_plot
from tuner.display.columns import BRIEF_TEXT, ENERGY, POWER, TEXT, TIME, WITH_INTERVAL, Text
from tuner.display.plan_text import plan_lines, probe_lines
from tuner.display.view import View
from tuner.formatting import (
    Units,
    change,
    common_mark,
    label,
    number,
    ordered_knobs,
    percent,
    probability,
    right_aligned,
    short,
    varying_knobs,
)
from tuner.results.parts import AnotherChoice, Evidence, Explanation, Point
from tuner.results.result import Result
from tuner.workload.measure.stragglers import sentence
from tuner.workload.probe import ProbeRecord

_WIDTH, _HEIGHT = 60, 12


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
    cells: list[tuple[str, Text]] = []
    for column in TEXT if intervals else BRIEF_TEXT:
        cells.append((column.name + estimated * (column is ENERGY), column.text))
        if intervals and column in WITH_INTERVAL:
            cells.append(("90 %", column.below))
    rows = [
        [*(cell(point, units) for _, cell in cells), short(point.configuration, names)]
        for point in points
    ]
    return right_aligned([[*(head for head, _ in cells), ""], *rows])


def plot_lines(view: View) -> list[str]:
    """Energy against time on logarithmic axes: o front, . dominated, T today, X recommended.

    The axes span these; dominated points beyond them are not drawn.
    """
    result = view.result
    named = [("T", result.baseline), ("X", result.recommended)]
    shown = [*result.front_points, *(point for _, point in named if point is not None)]
    if len({point.configuration for point in shown}) < 2:
        return []
    marks = [(p, "o" if p.configuration in view.front else ".") for p in result.points]
    marks.sort(key=lambda mark: mark[1] == "o")  # what matters more is drawn later
    marks += [(point, mark) for mark, point in named if point is not None]
    lines = ascii_plot(marks, shown, view.units, width=_WIDTH, height=_HEIGHT)
    indent = " " * (lines[-2].index("+") + 2)
    key = f"{indent}o front  . dominated  T today  X recommended"
    return [*lines, f"{indent}energy{view.estimated} over time to solution, log axes", key]


def summary_lines(result: Result) -> list[str]:
    """Return the summary that `tuner show` prints."""
    view = View(result)
    units, names = view.units, varying_knobs(point.configuration for point in result.points)
    lines = [result.stopped, ""]
    if view.prediction:
        lines += [view.prediction, ""]
    lines.append(
        f"Front of {result.name}: {len(result.front_points)} of {len(result.points)} "
        f"{view.found} configurations, "
        + (f"{result.steps:,} x " if result.length_known else "of one ")
        + str(result.about.get("unit_of_work", "step"))
    )
    lines += front_lines(result.front_points, names, intervals=True, units=units)
    if result.predicted:
        never = "Not tried" if view.is_predicted else "Never measured"
        lines += ["", f"{never}, and likely on the front (predicted):"]
        lines += front_lines(result.predicted, names, intervals=True, units=units)
    if same := _same_in_all(result, names):
        lines.append(f"The same in all that was {view.found}: {same}")
    if plot := plot_lines(view):
        lines += ["", *plot]
    if result.baseline is not None:
        name = f" ({result.baseline_name})" if result.baseline_name else ""
        lines += [
            "",
            f"Today: {ENERGY.text(result.baseline, units)}{view.estimated} and "
            f"{TIME.text(result.baseline, units)} with "
            f"{short(result.baseline.configuration, names)}{name}",
        ]
    lines += ["", *advice_lines(result)]
    lines += [evidence] if (evidence := evidence_sentence(result)) else []
    lines.append(f"Choice: {result.choice.sentence}")
    if result.plan is None:
        lines.append(view.spent_line)
    if (loo := result.leave_one_out) is not None:
        lines.append(
            f"Surrogates, {loo.method}: median error {percent(loo.time_error)} of step time and "
            f"{percent(loo.power_error)} of power."
        )
    for record in result.failures:
        assert record.failure is not None
        if not record.failure.was_cancelled:  # by the user: nothing that could be mended
            lines.append(
                f"Failed: {record.request.probe_id} {record.request.launch.short}: "
                f"{record.failure.sentence}"
            )
    lines += [f"Straggler in {probe}: {sentence(each)}" for probe, each in result.stragglers]
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
    compilation = ""
    if record.compilation_s:
        compilation = f" (compilation {number(record.compilation_s)} s of it)"
    lines += [
        f"meter {record.meter.name}: {record.meter.scope} scope, {record.meter.source}{estimated}",
        f"cost {number(record.energy_J)} J{estimated} and {number(record.wall_s)} s, of which the "
        f"launch {number(record.launch_s)} s{compilation}",
    ]
    if record.failure is not None:
        lines.append(f"failed: {record.failure.sentence}")
        lines += [f"  | {line}" for line in record.failure.log_tail.splitlines()]
    return lines


def choice_lines(chosen: AnotherChoice) -> list[str]:
    """Return a choice: the answer, today beside it, the evidence, the next step."""
    point, today = chosen.point, chosen.baseline
    units = Units.of([point, *([today] if today else [])])
    estimated = label(point.meter.mark)
    rows = [("today", today)] if today else []
    lines = [chosen.choice.sentence]
    for name, each in [*rows, ("choice", point)]:
        before = today.configuration if today and each is not today else None
        text = f"{TIME.text(each, units):>10}  {ENERGY.text(each, units):>12}{estimated}  "
        text += POWER.text(each, units)
        lines.append(f"  {name:<7}{text}  {short(each.configuration, baseline=before)}")
    if chosen.energy is not None and chosen.time is not None:
        energy = change(1 + chosen.energy.relative, 1, "less energy", "more energy")
        time = change(1 + chosen.time.relative, 1, "less time", "more time")
        lines.append(f"Against today: {energy}{estimated} and {time}.")
    lines.append(_evidence(chosen))
    lines.append(f"Launch files: tuner apply {chosen.run} --point {shlex.quote(chosen.name)}")
    return lines


def _evidence(chosen: AnotherChoice) -> str:
    if chosen.evidence is Evidence.PREDICTED:
        return "A prediction by the analytic models: nothing was measured."
    if chosen.p_better is None:
        return "It is what runs today." if chosen.baseline is not None else "Measured."
    sure = f"Better than today with a probability of {probability(chosen.p_better)}"
    if chosen.evidence is Evidence.VERIFIED:
        return f"{sure}, by launches made after it was chosen."
    return f"{sure}, by the launches of the search."


def explanation_lines(explanation: Explanation) -> list[str]:
    """Return an explanation: where time and energy go, and what each knob bought."""
    point, estimated = explanation.point, label(explanation.mark)
    lines = [point.configuration.short, f"  {point.how_measured}"]
    time = "Where the time of a step goes (the model's shares of what was measured)"
    energy = f"Where the energy of a step goes (likewise){estimated}"
    for title, parts, unit in (
        (time, explanation.time_s, "s"),
        (energy, explanation.energy_J, "J"),
    ):
        if not parts:
            continue
        total = math.fsum(parts.values())
        wide = max(len(name) for name in parts)
        lines += ["", title]
        lines += [
            f"  {name:<{wide}}  {number(value):>9} {unit}  {percent(value / total):>6}"
            for name, value in parts.items()
        ]
    if explanation.model_error:
        errors = explanation.model_error.items()
        pairs = ", ".join(f"{name} {100 * share:+.0f} %" for name, share in errors)
        lines.append(f"  The model alone would have been off by: {pairs}.")
    if explanation.knobs:
        lines += ["", "What each knob bought here, all else equal (90 % intervals)"]
        lines += [f"  {effect.sentence}" for effect in explanation.knobs]
    return [*lines, *([""] if explanation.notes else []), *explanation.notes]
