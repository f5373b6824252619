"""Answer of a study in about ten lines: what to do, how sure, what else, what it cost, next step.

`tuner front` prints tables, plot, every failure and the surrogates' error (`text.summary_lines`).
"""

from __future__ import annotations

import shlex

from tuner.display.plan_text import plan_lines
from tuner.display.program_note import program_note
from tuner.display.text import (
    changes,
    energy_mark,
    found_word,
    payback,
    prediction,
    real_search_cost,
    recommendation_lines,
    spent_text,
    units_of,
)
from tuner.formatting import duration, label, settings_text
from tuner.problem.constraints import Constraints
from tuner.results.choose import AnotherChoice
from tuner.results.parts import Point
from tuner.results.result import Result
from tuner.workload.probe import ProbeRecord

__all__ = ["answer_lines", "menu"]

#: Share by which a point may be slower than the fastest one, for the second row of the menu.
NEAR = 0.05


def menu(result: Result) -> list[tuple[str, AnotherChoice]]:
    """Return the points that people ask for: the name of each, several names where they coincide.

    The fastest, the least energy within 5 % of its time, the knee and the least energy.
    """
    fastest = result.choose(Constraints(objective="least-time"))
    near_s = (1 + NEAR) * fastest.point.time_to_solution_s
    rows = [
        ("fastest", fastest),
        (f"within {100 * NEAR:.0f} % of the fastest", result.choose(deadline_s=near_s)),
        ("knee", result.choose(Constraints(objective="knee"))),
        ("least energy", result.choose(Constraints(objective="least-energy"))),
    ]
    names: dict[str, list[str]] = {}
    for name, found in rows:
        names.setdefault(found.name, []).append(name)
    by_name = {found.name: found for _, found in rows}
    return [(", ".join(words), by_name[key]) for key, words in names.items()]


def answer_lines(result: Result) -> list[str]:
    """Return the answer that `tuner optimize` and `tuner replay` end with."""
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
    elif prediction(result):
        lines.append(f"{real_search_cost(result)} {payback(result)}")
    else:
        if result.verification is not None:
            lines.append(result.verification.sentence)
        lines.append(_spent(result))
    if note := program_note(result):
        lines.append(note)
    if result.target is not None:
        lines.append(f"{result.target.sentence} {result.target.choice.sentence}")
    return [*lines, *_failures(result), *stopped, *_next(result)]


def _menu_lines(result: Result) -> list[str]:
    units, today = units_of(result), result.baseline
    recommended = result.recommended

    def row(name: str, point: Point, command: str) -> tuple[str, ...]:
        against = ""
        if today is not None and point.configuration != today.configuration:
            energy, time = changes(result, point)
            against = f"{time}, {energy}"
        chosen = recommended is not None and point.configuration == recommended.configuration
        before = today.configuration if today is not None else None
        return (
            f"  {name}{' (recommended)' if chosen else ''}",
            units.time_text(point.time_to_solution_s),
            units.energy_text(point.energy_to_solution_kJ),
            against,
            settings_text(point.configuration, before),
            command,
        )

    estimated = label(energy_mark(result))
    rows: list[tuple[str, ...]] = [
        ("", "time", f"energy{estimated}", "against today" if today else "", "settings", "")
    ]
    rows += [row("today", today, "")] if today is not None else []
    choices = menu(result)
    shown = [p.configuration for p in (today, *(found.point for _, found in choices)) if p]
    if recommended is not None and recommended.configuration not in shown:
        rows.append(row("choice", recommended, _apply(result, "recommended")))
    for name, found in choices:
        rows.append(row(name, found.point, _apply(result, found.name)))
    widths = [max(len(each[i]) for each in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]


def _apply(result: Result, point: str) -> str:
    """Return the command for a point; "" for a recorded table, which has no job to start."""
    if result.job is None:
        return f"point {point}" if point.isdigit() else ""
    return f"tuner apply {result.name} --point {shlex.quote(point)}"


def _spent(result: Result) -> str:
    spent = result.spent
    if not spent.energy_kJ and not spent.time_s:
        return payback(result)
    cost = f"{spent_text(result)}{label(energy_mark(result))}"
    return f"Spent: {cost} and {duration(spent.time_s)} in {spent.probes} probes. {payback(result)}"


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
    others = f", and {len(failed) - 1} more (tuner front {result.name})" if failed[1:] else ""
    kind = first.failure.kind.replace("_", " ")
    return [f"Failed: {first.request.probe_id}: {kind}: {first.failure.message}{others}"]


def _next(result: Result) -> list[str]:
    """Return where to go from here."""
    steps = [f"tuner front {result.name} (tables and plot)"]
    if result.points:
        steps.append(f"tuner choose {result.name} --deadline 2h (other limits)")
    if result.points and result.job is not None:
        steps.insert(0, f"tuner apply {result.name} (launch files)")
    lines = [f"Next: {', '.join(steps)}"]
    return lines + ([f"Report: {result.report_path}"] if result.report_path is not None else [])
