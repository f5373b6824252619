"""Answer of a study in about ten lines: what to do, how sure, what else, what it cost, next step.

`tuner show` prints tables, plot, every failure and the surrogates' error (`text.summary_lines`).
"""

from __future__ import annotations

from tuner.display.advice import evidence_sentence
from tuner.display.plan_text import plan_lines
from tuner.display.program_note import program_note
from tuner.display.text import (
    energy_mark,
    found_word,
    recommendation_lines,
    spent_line,
    units_of,
)
from tuner.formatting import label, settings_text
from tuner.problem.constraints import Constraints
from tuner.results.choose import AnotherChoice
from tuner.results.parts import Point
from tuner.results.result import Result
from tuner.workload.probe import ProbeRecord


def menu(result: Result) -> list[tuple[str, AnotherChoice]]:
    """Return the fastest point, the knee and the least energy, each point once with its names."""
    rows = [
        ("fastest", result.choose(Constraints(objective="time"))),
        ("knee", result.choose(Constraints(objective="knee"))),
        ("least energy", result.choose(Constraints(objective="energy"))),
    ]
    names: dict[str, list[str]] = {}
    for name, found in rows:
        names.setdefault(found.name, []).append(name)
    by_name = {found.name: found for _, found in rows}
    return [(", ".join(words), by_name[key]) for key, words in names.items()]


def answer_lines(result: Result) -> list[str]:
    """Return the answer that `tuner optimize` and `tuner dev replay` end with."""
    stopped = [result.stopped] if result.stopped else []
    if not result.points:
        nothing = f"Nothing was {found_word(result)}, so there is nothing to recommend."
        return [nothing, *_failures(result), *stopped, *_next(result)]
    lines = recommendation_lines(result)
    if not result.choice.met:
        lines.append(result.choice.sentence)
    lines += _menu_lines(result)
    if result.baseline is not None and _lacked_memory(result):
        lines.append(f"Today: {result.baseline.configuration.short}, {result.baseline_name}.")
    if result.plan is not None:
        lines += plan_lines(result)
    else:
        lines += [sentence] if (sentence := evidence_sentence(result)) else []
        lines.append(spent_line(result))
    if note := program_note(result):
        lines.append(note)
    return [*lines, *_failures(result), *stopped, *_next(result)]


def _menu_lines(result: Result) -> list[str]:
    """Return today and the menu as rows of a table; ">" marks what is recommended."""
    units, today, recommended = units_of(result), result.baseline, result.recommended
    of_today: list[str] = ["today"] if today is not None else []
    others: list[tuple[str, str, Point]] = []
    for name, found in menu(result):
        if today is not None and found.point.configuration == today.configuration:
            of_today.append(name)
        else:
            others.append((name, found.name, found.point))
    shown = [point.configuration for point in (today, *(row[2] for row in others)) if point]
    if recommended is not None and recommended.configuration not in shown:
        others.insert(0, ("recommended", "", recommended))
    rows = [("", "point", "time", "", f"energy{label(energy_mark(result))}", "", "settings")]
    every = [(", ".join(of_today), "", today)] if today is not None else []
    for name, number, point in [*every, *others]:
        chosen = recommended is not None and point.configuration == recommended.configuration
        compared = result.judged.differences(point)
        energy, time = (f"{100 * d.relative:+.0f} %" for d in compared) if compared else ("", "")
        rows.append(
            (
                f"{'>' if chosen else ' '} {name}",
                number if number.isdigit() else "",
                units.time_text(point.time_to_solution_s),
                time,
                units.energy_text(point.energy_to_solution_kJ),
                energy,
                settings_text(point.configuration, today.configuration if today else None),
            )
        )
    widths = [max(len(each[i]) for each in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]


def _lacked_memory(result: Result) -> list[ProbeRecord]:
    """Return the default baselines that ran out of memory, which the baseline's name tells."""
    if result.baseline is None:
        return []
    return [
        record
        for record in result.failures
        if record.request.purpose == "baseline"
        and record.failure is not None
        and record.failure.kind == "out_of_memory"
    ]


def _failures(result: Result) -> list[str]:
    failed = [
        record
        for record in result.failures
        if record.failure is not None and not record.failure.was_cancelled
    ]
    told = _lacked_memory(result)
    failed = [record for record in failed if record not in told]
    if not failed:
        return []
    first = failed[0]
    assert first.failure is not None
    others = f", and {len(failed) - 1} more (tuner show {result.name})" if failed[1:] else ""
    return [f"Failed: {first.request.probe_id}: {first.failure.sentence}{others}"]


def _next(result: Result) -> list[str]:
    """Return where to go from here."""
    steps = [f"tuner show {result.name}"]
    if result.points:
        other = "--max-slowdown 5%" if result.baseline is not None else "--minimize energy"
        steps.append(f"tuner choose {result.name} {other}")
    if result.points and result.job is not None:
        steps.insert(0, f"tuner apply {result.name} [--point N]")
    lines = [f"Next: {', '.join(steps)}"]
    return lines + ([f"Report: {result.report_path}"] if result.report_path is not None else [])
