"""The result as plain text: the answer in about ten lines, and the summary with tables and plot.

Aligned columns and characters that every terminal and log file shows; no colour. A figure without a
meter is followed by "(estimated)", as on every page.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from tuner.display.advice import advice_lines, evidence_sentence
from tuner.display.columns import ENERGY, TEXT, WITH_INTERVAL, Text
from tuner.display.micro_batch_text import micro_batch_lines
from tuner.display.plan_text import doubt_lines, plan_lines, probe_lines, share_lines
from tuner.display.view import View, figure_texts
from tuner.formatting import (
    Units,
    after_comma,
    change,
    common_mark,
    label,
    number,
    ordered_knobs,
    percent,
    probability,
    right_aligned,
    settings_text,
    short,
    varying_knobs,
)
from tuner.problem.constraints import Constraints
from tuner.results.parts import AnotherChoice, Evidence, Explanation, Point
from tuner.results.recommendation import point_name
from tuner.results.result import Result
from tuner.search_spaces.configuration import Configuration
from tuner.workload.measure.stragglers import sentence
from tuner.workload.probe import ProbeRecord

_WIDTH, _HEIGHT = 60, 12
#: Estimated powers within this factor are the estimate's error.
_ALIKE = 1.03
#: Factor between two energies within which their first three digits hardly differ.
_LOOKS_THE_SAME = 1.005


def front_lines(view: View, points: Sequence[Point], names: Sequence[str]) -> list[str]:
    """Return points as aligned columns: those of `TEXT`, with intervals, and the named knobs."""
    if not points:
        return ["nothing measured"]
    estimated = label(common_mark(point.meter for point in points))
    cells: list[tuple[str, Text]] = []
    for column in TEXT:
        cells.append((column.name + estimated * (column is ENERGY), column.text))
        if column in WITH_INTERVAL:
            cells.append(("90 %", column.below))
    rows = [
        [*(cell(view, point) for _, cell in cells), short(point.configuration, names)]
        for point in points
    ]
    return right_aligned([[*(head for head, _ in cells), ""], *rows])


def brief_front_lines(points: Sequence[Point], names: Sequence[str]) -> list[str]:
    """Return points of an unfinished search as aligned columns: time, energy, power, and the named
    knobs."""
    units = Units.of(points)
    estimated = label(common_mark(point.meter for point in points))
    rows = [[*figure_texts(point, units), short(point.configuration, names)] for point in points]
    return right_aligned([["time", f"energy{estimated}", "power", ""], *rows])


def ascii_plot(
    marks: Sequence[tuple[Point, str]],
    span: Sequence[Point],
    units: Units,
    *,
    width: int,
    height: int,
) -> list[str]:
    """Return a plot of energy against time to solution in plain characters, on logarithmic axes.

    Args:
        marks: points and their characters; later ones are drawn over earlier ones.
        span: the points that the axes span; marks beyond them are not drawn.
    """
    x = [math.log(point.time_to_solution_s) for point in span]
    y = [math.log(point.energy_to_solution_kJ) for point in span]
    span_x, span_y = max(x) - min(x) or 1.0, max(y) - min(y) or 1.0
    grid = [[" "] * width for _ in range(height)]
    for point, mark in marks:
        column = (math.log(point.time_to_solution_s) - min(x)) / span_x * (width - 1)
        row = (max(y) - math.log(point.energy_to_solution_kJ)) / span_y * (height - 1)
        if -0.5 <= column < width - 0.5 and -0.5 <= row < height - 0.5:
            grid[round(row)][round(column)] = mark
    top, bottom = (units.energy_text(math.exp(end)) for end in (max(y), min(y)))
    left, right = (units.time_text(math.exp(end)) for end in (min(x), max(x)))
    side = max(len(top), len(bottom))
    sides = [top, *[""] * (height - 2), bottom]
    return [
        *(f"{sides[i]:>{side}} |{''.join(row).rstrip()}" for i, row in enumerate(grid)),
        f"{'':>{side}} +{'-' * width}",
        f"{'':>{side}}  {left}{right:>{width - len(left)}}",
    ]


def plot_lines(view: View) -> list[str]:
    """Return the plot of a result: o front, . dominated, T today, X recommended."""
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
    names = varying_knobs(point.configuration for point in result.points)
    lines = [result.stopped, ""]
    if view.prediction:
        lines += [view.prediction, ""]
    lines.append(
        f"Front of {result.name}: {len(result.front_points)} of {len(result.points)} "
        f"{view.found} configurations, "
        + (f"{result.length:,} x " if result.length else "of one ")
        + str(result.about.get("unit_of_work", "step"))
    )
    lines += front_lines(view, result.front_points, names)
    if result.predicted:
        never = "Not tried" if view.is_predicted else "Never measured"
        lines += ["", f"{never}, and likely on the front (predicted):"]
        lines += front_lines(view, result.predicted, names)
    if same := _same_in_all(result, names):
        lines.append(f"The same in all that was {view.found}: {same}")
    if plot := plot_lines(view):
        lines += ["", *plot]
    if (today := result.baseline) is not None:
        name = f" ({result.baseline_name})" if result.baseline_name else ""
        time, energy, _ = figure_texts(today, view.units)
        figures = f"{energy}{view.estimated} and {time}"
        lines += ["", f"Today: {figures} with {short(today.configuration, names)}{name}"]
    lines += ["", *advice_lines(result)]
    lines += [evidence] if (evidence := evidence_sentence(result)) else []
    lines.append(f"Choice: {result.choice.sentence}")
    if result.plan is None:
        lines.append(view.spent_line)
    lines += [view.surrogates] if view.surrogates else []
    for record in result.failures:
        assert record.failure is not None
        if not record.failure.was_cancelled:  # by the user: nothing that could be mended
            probe = f"{record.request.probe_id} {record.request.launch.short}"
            lines.append(f"Failed: {probe}: {record.failure.sentence}")
    lines += [f"Straggler in {probe}: {sentence(each)}" for probe, each in result.stragglers]
    lines += [*plan_lines(result), *probe_lines(result)]
    if result.report_path is not None:
        lines.append(f"Report: {result.report_path}")
    return lines


def _same_in_all(result: Result, varying: Sequence[str]) -> str:
    # The knobs in which no measured point differs; "" if the table shows all knobs.
    if not varying:
        return ""
    names = ordered_knobs(point.configuration for point in result.points)
    same = [name for name in names if name not in varying]
    if not same or not result.points:
        return ""
    return short(result.points[0].configuration, same)


def record_lines(record: ProbeRecord) -> list[str]:
    """Return a probe's record for people: what was asked, measured, and what it cost."""
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
        time, energy, power = figure_texts(each, units)
        text = f"{time:>10}  {energy:>12}{estimated}  {power}"
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
    where = ((time, explanation.time_s, "s"), (energy, explanation.energy_J, "J"))
    for title, parts, unit in where:
        lines += ["", *share_lines(title, parts, unit)] if parts else []
    if explanation.model_error:
        errors = explanation.model_error.items()
        pairs = ", ".join(f"{name} {100 * share:+.0f} %" for name, share in errors)
        lines.append(f"  The model alone would have been off by: {pairs}.")
    if explanation.knobs:
        lines += ["", "What each knob bought here, all else equal (90 % intervals)"]
        lines += [f"  {effect.sentence}" for effect in explanation.knobs]
    return [*lines, *([""] if explanation.notes else []), *explanation.notes]


def menu(result: Result) -> list[tuple[str, Point]]:
    """Return the fastest point, the knee and the least energy, each point once with its names.

    Of energies that look the same in three digits, the fastest stands for the least.
    """
    fastest, knee, least = (
        result.choose(Constraints(objective=objective)).point
        for objective in ("time", "knee", "energy")
    )
    if result.recommended is None or least.configuration != result.recommended.configuration:
        most_kJ = _LOOKS_THE_SAME * least.energy_to_solution_kJ
        alike = [p for p in result.front_points if p.energy_to_solution_kJ <= most_kJ]
        least = min(alike, key=lambda p: p.time_to_solution_s, default=least)
    named: dict[Configuration, tuple[list[str], Point]] = {}
    for name, point in (("fastest", fastest), ("knee", knee), ("least energy", least)):
        named.setdefault(point.configuration, ([], point))[0].append(name)
    return [(", ".join(names), point) for names, point in named.values()]


def answer_lines(result: Result) -> list[str]:
    """Return the answer that `tuner optimize` and `tuner dev replay` end with."""
    view = View(result)
    stopped = [result.stopped] if result.stopped else []
    if not result.points:
        nothing = f"Nothing was {view.found}, so there is nothing to recommend."
        return [nothing, *_failures(result), *stopped, *_next(result)]
    lines = [*doubt_lines(result.plan.doubts if result.plan else ()), *advice_lines(result)]
    if (found := result.micro_batch) is not None:
        lines += micro_batch_lines(found)
    if not result.choice.met:
        lines.append(result.choice.sentence)
    lines += _menu_lines(view)
    if result.baseline is not None and result.replaced_baselines:
        lines.append(f"Today: {result.baseline.configuration.short}, {result.baseline_name}.")
    if result.plan is not None:
        lines += plan_lines(result)
    else:
        lines += [evidence] if (evidence := evidence_sentence(result)) else []
        lines.append(view.spent_line)
    lines += [view.notices] if view.notices else []
    return [*lines, *_failures(result), *stopped, *_next(result)]


def _menu_lines(view: View) -> list[str]:
    # Today and the menu as rows of a table; ">" marks what is recommended.
    result, recommended = view.result, view.result.recommended
    offered = {point.configuration: (words, point) for words, point in menu(result)}
    points = {p.configuration: p for p in (result.baseline, recommended) if p is not None}
    points |= {configuration: point for configuration, (_, point) in offered.items()}
    rows = [("", "time", "", f"energy{after_comma(view.mark)}", "", "settings")]
    for configuration, point in points.items():
        compared = result.judged.differences(point)
        energy, time = (f"{100 * d.relative:+.0f} %" for d in compared) if compared else ("", "")
        chosen = recommended is not None and configuration == recommended.configuration
        words, in_menu = offered.get(configuration, ("", None))
        settings = settings_text(configuration, view.today)
        if view.is_today(point):
            name = "today"
        else:
            name = "recommended" if chosen else _short_role(words)
            known_as = point_name(result, point)
            if in_menu is not None and known_as.isdigit():
                settings += f" #{known_as}"
        times, energies, _ = figure_texts(point, view.units)
        rows.append((f"{'>' if chosen else ' '} {name}", times, time, energies, energy, settings))
    watts = _constant_W(list(points.values()))
    widths = [max(len(row[i]) for row in rows[1:]) for i in range(5)]
    widths[3] = max(widths[3], len(rows[0][3]) - widths[4] - 1)
    rows[0] = ("", "time".rjust(widths[1]), "", rows[0][3].ljust(widths[3]), "", "settings")
    lines = [_row(row, widths, energy=watts is None) for row in rows]
    if watts is not None:
        lines.append(f"No meter here: energy is estimated as {number(watts)} W x time.")
    return lines


def _row(cells: tuple[str, ...], widths: list[int], *, energy: bool) -> str:
    name, time, slower, joules, more, settings = cells
    times = f"{name:{widths[0]}}  {time:>{widths[1]}} {slower:>{widths[2]}}"
    energies = f"  {joules:>{widths[3]}} {more:>{widths[4]}}" if energy else ""
    return f"{times}{energies}  {settings}"


def _constant_W(points: Sequence[Point]) -> float | None:
    # The power of all points if it is estimated and hardly differs: then energy tells nothing that
    # time does not.
    powers = [point.power_W for point in points if point.meter.name == "estimated"]
    alike = len(powers) == len(points) > 1 and max(powers) <= _ALIKE * min(powers)
    return max(powers) if alike else None


def _short_role(words: str) -> str:
    # The knee is named only where it is nothing else.
    names = [word for word in words.split(", ") if word != "knee"]
    return "best in both" if len(names) > 1 else "".join(names) or "knee"


def _failures(result: Result) -> list[str]:
    failed = [
        (record.request.probe_id, record.failure.sentence)
        for record in result.failures
        if record.failure is not None
        if not record.failure.was_cancelled and record not in result.replaced_baselines
    ]
    if not failed:
        return []
    others = f", and {len(failed) - 1} more (tuner show {result.name})" if failed[1:] else ""
    return [f"Failed: {': '.join(failed[0])}{others}"]


def _next(result: Result) -> list[str]:
    command = "apply" if result.points and result.job is not None else "show"
    steps = [f"tuner {command} {result.name}{' [--point N]' if command == 'apply' else ''}"]
    if result.points:
        other = "--max-slowdown 5%" if result.baseline is not None else "--minimize energy"
        steps.append(f"tuner choose {result.name} {other}")
    lines = [f"{'Next: ' if not i else '      '}{step}" for i, step in enumerate(steps)]
    return lines + ([f"Report: {result.report_path}"] if result.report_path is not None else [])
