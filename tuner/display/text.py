"""The result as plain text: the answer in about ten lines, and the summary with tables and plot.

Aligned columns and characters that every terminal and log file shows; no colour. A figure without a
meter is followed by "(estimated)", as on every page.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence

from tuner.answer.answer import Answer, choose_again
from tuner.answer.judge import WORTH
from tuner.answer.parts import AnotherChoice, Evidence, Explanation, Point
from tuner.answer.views import SOCKET as VIEWS
from tuner.answer.views import views
from tuner.display.advice import (
    advice_lines,
    continuation,
    evidence_sentence,
    findings,
    headline,
    noise_lines,
    noise_sentence,
    prediction_lines,
)
from tuner.display.view import (
    TEXT,
    WITH_INTERVAL,
    Text,
    View,
    energy_columns,
    failures_of,
    figure_texts,
    too_short_of,
)
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
    settings_legend,
    settings_text,
    short,
    signed_percent,
    varying_knobs,
)
from tuner.problem.constraints import Constraints
from tuner.problem.settings import COMPLETE, LIMITS, stop_sentence
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.knobs import short_word
from tuner.workload.node.measure.measurement import part_lines
from tuner.workload.node.measure.stragglers import sentence
from tuner.workload.records.probe import Failure, ProbeRecord

_WIDTH, _HEIGHT = 60, 12
#: Estimated powers within this factor are the estimate's error.
_ALIKE = 1.03


def front_lines(view: View, points: Sequence[Point], names: Sequence[str]) -> list[str]:
    """Return points as aligned columns: those of `TEXT`, with intervals, and the named knobs."""
    if not points:
        return ["nothing measured"]
    cells: list[tuple[str, Text]] = []
    for column in energy_columns(TEXT, view):
        cells.append((column.name, column.text))
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
    if not all(energy for _, energy, _, _ in rows):
        return right_aligned([["time", ""], *([time, names] for time, _, _, names in rows)])
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
    drawn = [*result.front_points, *(point for _, point in named if point is not None)]
    if len({point.configuration for point in drawn}) < 2 or not result.has_energy:
        return []
    marks = [(p, "o" if p.configuration in view.front else ".") for p in result.points]
    marks.sort(key=lambda mark: mark[1] == "o")  # what matters more is drawn later
    marks += [(point, mark) for mark, point in named if point is not None]
    lines = ascii_plot(marks, drawn, view.units, width=_WIDTH, height=_HEIGHT)
    indent = " " * (lines[-2].index("+") + 2)
    key = f"{indent}o front  . dominated  T today  X recommended"
    return [*lines, f"{indent}energy{view.estimated} over time to solution, log axes", key]


def summary_lines(result: Answer) -> list[str]:
    """Return the summary that `tuner show` prints."""
    view = View(result)
    if not result.points:
        lines = [*_nothing_found(view, _every_failure(result))]
        lines += [f"Straggler in {probe}: {sentence(each)}" for probe, each in result.stragglers]
        lines += [line for each in views() for line in each.summary_lines(result)]
        return lines + _report_lines(result)
    names = varying_knobs(point.configuration for point in result.points)
    lines = [result.stopped, ""]
    if view.words.notice:
        lines += [view.words.notice, ""]
    lines.append(
        f"Front of {result.name}: {len(result.front_points)} of {len(result.points)} "
        f"{view.words.found} configurations, "
        + (f"{result.length:,} x " if result.length else "of one ")
        + str(result.about.get("unit_of_work", "step"))
        + (view.shown(f"; energy {view.mark}") if view.mark else "")
    )
    lines += front_lines(view, result.front_points, names)
    if result.predicted:
        lines += ["", f"{view.words.untried}, and likely on the front (predicted):"]
        lines += front_lines(view, result.predicted, names)
    if same := _same_in_all(result, names):
        lines.append(f"The same in all that was {view.words.found}: {same}")
    if plot := plot_lines(view):
        lines += ["", *plot]
    if (today := result.baseline) is not None:
        name = f" ({result.baseline_name})" if result.baseline_name else ""
        time, energy, _ = figure_texts(today, view.units)
        figures = f"{energy}{view.estimated} and {time}" if energy else time
        lines += ["", f"Today: {figures} with {short(today.configuration, names)}{name}"]
    lines += ["", *advice_lines(result)]
    lines += [evidence] if (evidence := evidence_sentence(result)) else []
    lines.append(f"Choice: {result.choice.sentence}")
    if result.plan is None:
        lines.append(view.spent_line)
    lines += [view.surrogates] if view.surrogates else []
    lines += _every_failure(result)
    lines += [f"Straggler in {probe}: {sentence(each)}" for probe, each in result.stragglers]
    for each in views():
        lines += each.summary_lines(result)
    lines += legend_lines(lines)
    return lines + _report_lines(result)


def _same_in_all(result: Answer, varying: Sequence[str]) -> str:
    # The knobs in which no measured point differs; "" if the table shows all knobs.
    if not varying:
        return ""
    names = ordered_knobs(point.configuration for point in result.points)
    same = [name for name in names if name not in varying]
    if not same or not result.points:
        return ""
    return short(result.points[0].configuration, same)


def choice_lines(chosen: AnotherChoice) -> list[str]:
    """Return a choice: the answer, today beside it, the evidence, the next step."""
    point, today = chosen.point, chosen.today_configuration
    estimated = label(point.meter.mark)
    rows = [("today", each) for each in chosen.compared]
    units = Units.of([point, *chosen.compared])
    units = units.telling([(each, point) for each in chosen.compared])
    keeps = point.configuration == today
    lines = [chosen.choice.sentence]
    if keeps and chosen.alone:
        limits = chosen.limits.phrase(units)
        lines = [f"Keep what you run today: nothing else trains {limits}."]
    for name, each in rows if keeps else [*rows, ("choice", point)]:
        before = today if each.configuration != today else None
        time, energy, power = figure_texts(each, units)
        text = f"{time:>10}  {energy:>12}{estimated}  {power}" if energy else f"{time:>10}"
        lines.append(f"  {name:<7}{text}  {short(each.configuration, baseline=before)}")
    lines += legend_lines(lines)
    if chosen.energy is not None and chosen.time is not None:
        energy = change(1 + chosen.energy.relative, 1, "less energy", "more energy")
        time = change(1 + chosen.time.relative, 1, "less time", "more time")
        found = point.meter.shown(f"{energy}{estimated} and ") + time
        if max(abs(chosen.energy.relative), abs(chosen.time.relative)) < WORTH:
            found = f"no difference worth a change ({found})"
        if not chosen.saving_known:
            found = "the measurements are too uncertain to tell a saving"
        lines.append(f"Against today: {found}.")
    if chosen.shrunk is not None:
        lines.append(noise_sentence(chosen.shrunk, units, today))
    lines.append(_evidence(chosen))
    lines.append(f"Launch files: tuner apply {chosen.run} --point {shlex.quote(chosen.name)}")
    return lines


def _evidence(chosen: AnotherChoice) -> str:
    if chosen.evidence is Evidence.PREDICTED:
        return "A prediction by the analytic models: nothing was measured."
    if chosen.p_better is None:
        return "It is what runs today." if chosen.compared else "Measured."
    sure = f"Better than today with a probability of {probability(chosen.p_better)}"
    if chosen.evidence is Evidence.VERIFIED:
        return f"{sure}, by launches made after it was chosen."
    return f"{sure}, by the launches of the search."


def explanation_lines(explanation: Explanation) -> list[str]:
    """Return an explanation as text: time and energy by part, and the gain of each knob."""
    point, estimated = explanation.point, label(explanation.mark)
    name = point.configuration.short
    lines = [name, *legend_lines([name]), f"  {point.how_measured}"]
    predicted = point.source == "predicted"
    shares = "predicted" if predicted else "the model's shares of what was measured"
    time = f"Where the time of a step goes ({shares})"
    energy = f"Where the energy of a step goes ({shares}){estimated}"
    where = [(time, explanation.time_s, "s"), (energy, explanation.energy_J, "J")]
    for title, parts, unit in where:
        lines += ["", *share_lines(title, parts, unit)] if parts else []
    if explanation.model_error and not predicted:
        errors = explanation.model_error.items()
        pairs = ", ".join(f"{name} {signed_percent(share)}" for name, share in errors)
        lines.append(f"  The model alone would have been off by: {pairs}.")
    if explanation.parts_W:
        title = "Power by part (measured; a module holds its GPU and Grace, Grace holds the others)"
        lines += ["", title, *(f"  {line}" for line in part_lines(explanation.parts_W))]
    if explanation.knobs:
        bought = "is predicted to change" if predicted else "bought"
        lines += ["", f"What each knob {bought} here, all else equal (90 % intervals)"]
        lines += [f"  {effect.sentence}" for effect in explanation.knobs]
    return [*lines, *([""] if explanation.notes else []), *explanation.notes]


def share_lines(title: str, parts: Mapping[str, float], unit: str) -> list[str]:
    """Return parts of a whole as a table: value and share, below a title."""
    if not parts:  # a device whose file says that it draws nothing
        return [title, f"  0 {unit}"]
    total = math.fsum(parts.values())
    wide = max(len(name) for name in parts)
    return [
        title,
        *(
            f"  {name:<{wide}}  {number(value):>9} {unit}  {percent(value / total):>6}"
            for name, value in parts.items()
        ),
    ]


def menu(result: Answer) -> list[tuple[str, Point]]:
    """Return the fastest point, the knee and the least energy, each point once with its names."""
    if not result.has_energy:
        return [("fastest", choose_again(result, Constraints(objective="time")).point)]
    fastest = min(result.points, key=lambda p: (p.time_to_solution_s, p.energy_to_solution_kJ))
    knee, least = (
        choose_again(result, Constraints(objective=objective)).point
        for objective in ("knee", "energy")
    )
    named: dict[Configuration, tuple[list[str], Point]] = {}
    for name, point in (("fastest", fastest), ("knee", knee), ("least energy", least)):
        named.setdefault(point.configuration, ([], point))[0].append(name)
    return [(", ".join(names), point) for names, point in named.values()]


def answer_lines(result: Answer) -> list[str]:
    """Return the answer that `tuner optimize` and `tuner replay` end with."""
    view = View(result)
    if not result.points:
        return [*_nothing_found(view, _failures(result)), *_next(result)]
    lines = [line for each in views() for line in each.opening_lines(result)]
    lines += _advice(result)
    if not result.choice.met:
        lines.append(result.choice.sentence)
    lines += [*_menu_lines(view), *_sharding_lines(result)]
    if result.baseline is not None and result.replaced_baselines:
        lines.append(f"Today: {result.baseline.configuration.short}, {result.baseline_name}.")
    for each in views():
        lines += each.answer_lines(result)
    if result.plan is None:
        lines.append(view.spent_line)
    lines += [view.notices] if view.notices else []
    lines += _too_short(result) if view.failed_in_passing else _failures(result)
    lines += [f"{notice[:1].upper()}{notice[1:]}." for notice in VIEWS.plugins.left_out]
    return [*lines, *_stopped(result), *_next(result)]


def _nothing_found(view: View, failures: Sequence[str]) -> list[str]:
    # The answer of a search without a point, for these reasons.
    result = view.result
    nothing = f"Nothing was {view.words.found}, so there is nothing to recommend."
    stopped = [*filter(None, [result.stopped])]
    if too_short_of(result) and not failures_of(result):
        nothing = "Keep what you run today: the training is over before it can be measured."
        stopped = []  # no candidate is left, for that reason
    return [nothing, *failures, *stopped, *([view.spent_line] if result.spent.probes else [])]


def _advice(result: Answer) -> list[str]:
    # A plan says below that it is predicted, and the next step how the search is continued.
    if result.recommendation is None:
        return []
    lines = [headline(result), *findings(result), *noise_lines(result)]
    if result.plan is None:
        lines += prediction_lines(result)
    return lines


def _stopped(result: Answer) -> list[str]:
    # That more launches would tell is said already: a limit would be a second reason to continue.
    stop, advice = result.stop, result.recommendation
    is_inconclusive = advice is not None and advice.more is not None
    if stop is None or stop.kind in COMPLETE or (is_inconclusive and stop.kind in LIMITS):
        return []
    return [stop_sentence(stop, brief=True)]


def _menu_lines(view: View) -> list[str]:
    # Today and the menu as rows of a table; ">" marks what is recommended.
    result, recommended = view.result, view.result.recommended
    offered = {point.configuration: (words, point) for words, point in menu(result)}
    named = (*result.compared, *([recommended] if recommended else []))
    points = {point.configuration: point for point in named}
    points |= {configuration: point for configuration, (_, point) in offered.items()}
    units = view.units.telling(view.pairs(points.values()))
    watts = _constant_W(list(points.values()))
    head = "settings" if watts is None else f"settings (energy: no meter, {number(watts)} W x time)"
    rows = [("", "time", "", f"energy{after_comma(view.mark)}", "", head)]
    for configuration, point in points.items():
        ratios = view.ratios(point)
        energy, time = (signed_percent(ratio - 1) for ratio in ratios) if ratios else ("", "")
        chosen = recommended is not None and configuration == recommended.configuration
        words, in_menu = offered.get(configuration, ("", None))
        settings = settings_text(configuration, view.result.today_configuration)
        if view.is_today(point):
            name = "today"
        else:
            role = _short_role(words) if result.saving_known else view.words.found
            name = "recommended" if chosen else role
            label = result.name_of(point)
            if in_menu is not None and label.isdigit() and not chosen:
                settings += f" #{label}"
        times, energies, _ = figure_texts(point, units)
        rows.append((f"{'>' if chosen else ' '} {name}", times, time, energies, energy, settings))
    widths = [max(len(row[i]) for row in rows[1:]) for i in range(5)]
    widths[3] = max(widths[3], len(rows[0][3]) - widths[4] - 1)
    rows[0] = ("", "time".rjust(widths[1]), "", rows[0][3].ljust(widths[3]), "", head)
    metered = watts is None and view.result.has_energy
    lines = [_row(row, widths, energy=metered) for row in rows]
    return lines + legend_lines([*(row[-1] for row in rows[1:]), *_advice(result)])


def legend_lines(settings: Iterable[str]) -> list[str]:
    """Return "  (mb16 = micro-batch 16; #4 is for --point 4)"; empty without short names."""
    shown = list(settings)
    legend = settings_legend(shown)
    numbers = [word for text in shown for word in text.split() if word.startswith("#")]
    of_point = f"{numbers[0]} is for --point {numbers[0][1:]}" if numbers else ""
    text = "; ".join(filter(None, [legend, of_point]))
    return [f"  ({text})"] if text else []


#: Knobs that shard within groups of ranks, and what then crosses the network.
_GROUPED = {
    "zero_hpz_partition_size": "parameters cross the network once a step",
    "hsdp_replicas": "only gradients cross the network",
}


def _sharding_lines(result: Answer) -> list[str]:
    # Said where a job spans nodes and what is recommended keeps its gathers within them.
    cluster, recommended = result.cluster, result.recommended
    if recommended is None or cluster is None:
        return []
    configuration, node = recommended.configuration, cluster.devices_per_node
    ranks = {
        "zero_hpz_partition_size": configuration.get("zero_hpz_partition_size"),
        "hsdp_replicas": configuration.data_parallel
        // int(str(configuration.get("hsdp_replicas"))),
    }
    return [
        f"Shard within the node ({short_word(knob, configuration.get(knob))}): {crosses}."
        for knob, crosses in _GROUPED.items()
        if configuration.get(knob) != 1 and int(str(ranks[knob])) <= node < configuration.world_size
    ]


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


def _every_failure(result: Answer) -> list[str]:
    found = ((record.request, record.failure) for record in result.failures)
    return [
        _unmeasured(f"{request.probe_id} {request.launch.short}", failure)
        for request, failure in found
        # What the user cancelled is nothing that could be mended.
        if failure is not None and not failure.was_cancelled
    ]


def _failures(result: Answer) -> list[str]:
    return [*_first_of(failures_of(result), result), *_too_short(result)]


def _too_short(result: Answer) -> list[str]:
    return _first_of(too_short_of(result), result)


def _first_of(records: Sequence[ProbeRecord], result: Answer) -> list[str]:
    if not records:
        return []
    first = records[0]
    assert first.failure is not None
    others = f", and {len(records) - 1} more (tuner show {result.name})" if records[1:] else ""
    return [f"{_unmeasured(first.request.probe_id, first.failure)}{others}"]


def _unmeasured(probe: str, failure: Failure) -> str:
    # "Failed: p0003: crash: ...", or "Too short: p0003: ...".
    if failure.type.too_short:
        return f"{failure.type.phrase.capitalize()}: {probe}: {failure.message}"
    return f"Failed: {probe}: {failure.sentence}"


def _next(result: Answer) -> list[str]:
    advice, again = result.recommendation, continuation(result)
    if advice is not None and advice.action == "train" and result.job is not None:
        then = f"tuner apply {result.name}"
        if again:
            then += f", or {again}"
    else:
        then = again or f"tuner show {result.name}"
    return [f"Next: {then}", *_report_lines(result)]


def _report_lines(result: Answer) -> list[str]:
    return [f"Report: {result.report_path}"] if result.report_path is not None else []


def record_lines(record: ProbeRecord) -> list[str]:
    """Return a probe's record as text: its request, measurements and cost."""
    estimated = label(record.meter.mark)
    lines = [f"probe {record.request.launch.short}"]
    charged = record.meter.shown(
        f"meter {record.meter.name}: {record.meter.scope} scope, {record.meter.source}{estimated}"
    )
    for m in record.measurements:
        error = m.step_time_rse
        lines += [
            f"  live            {m.live.short if m.live else 'left to the device'}",
            f"  step time       {number(m.step_time_s)} s"
            + (f" +- {percent(error)}" if math.isfinite(error) else ""),
        ]
        if charged:
            lines.append(f"  power           {number(m.power_W)} W{estimated}")
            lines.append(f"  energy a step   {number(m.energy_per_step_J)} J{estimated}")
        lines.append(f"  window          {m.steps} steps in {number(m.window_s)} s")
        if m.delivered:
            pairs = ", ".join(f"{name} {number(value)}" for name, value in m.delivered.items())
            lines.append(f"  delivered       {pairs}")
        lines += [f"  by part         {line}" for line in part_lines(m.parts_W)]
        if m.peak_memory_bytes is not None:
            lines.append(f"  peak memory     {number(m.peak_memory_bytes / 1e9)} GB, fullest rank")
        lines += [f"  note            {flag}" for flag in m.flags]
    compilation = ""
    if record.compilation_s:
        compilation = f" (compilation {number(record.compilation_s)} s of it)"
    cost = record.meter.shown(f"{number(record.energy_J)} J{estimated} and ")
    lines += [
        charged or record.meter.sentence,
        f"cost {cost}{number(record.wall_s)} s, of which the launch {number(record.launch_s)} s"
        f"{compilation}",
    ]
    if record.built_s:
        lines.append(f"before that, a build took {number(record.built_s)} s; it is charged to none")
    if record.failure is not None:
        lines.append(f"{record.failure.outcome}: {record.failure.message}")
        lines += [f"  | {line}" for line in record.failure.log_tail.splitlines()]
    return lines
