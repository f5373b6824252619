"""Answer of a study in about ten lines: what to do, how sure, what else, what it cost, next step.

`tuner show` prints tables, plot, every failure and the surrogates' error (`text.summary_lines`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tuner.display.advice import advice_lines, evidence_sentence
from tuner.display.columns import ENERGY, TIME
from tuner.display.plan_text import plan_lines
from tuner.display.view import View
from tuner.formatting import after_comma, number, settings_text
from tuner.problem.constraints import Constraints
from tuner.results.parts import Point
from tuner.results.recommendation import point_name
from tuner.results.result import Result
from tuner.search_spaces.configuration import Configuration

#: Estimated powers within this factor are the estimate's error.
_ALIKE = 1.03
#: Factor between two energies within which their first three digits hardly differ.
_LOOKS_THE_SAME = 1.005


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
    lines = advice_lines(result)
    if not result.choice.met:
        lines.append(result.choice.sentence)
    lines += _menu_lines(view)
    if result.baseline is not None and result.replaced_baselines:
        lines.append(f"Today: {result.baseline.configuration.short}, {result.baseline_name}.")
    if result.plan is not None:
        lines += plan_lines(result)
    else:
        lines += [sentence] if (sentence := evidence_sentence(result)) else []
        lines.append(view.spent_line)
    lines += [view.notices] if view.notices else []
    return [*lines, *_failures(result), *stopped, *_next(result)]


def _menu_lines(view: View) -> list[str]:
    """Return today and the menu as rows of a table; ">" marks what is recommended."""
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
        times, energies = TIME.text(point, view.units), ENERGY.text(point, view.units)
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
    """Return name, time and energy, each with its change, and settings in columns."""
    name, time, slower, joules, more, settings = cells
    times = f"{name:{widths[0]}}  {time:>{widths[1]}} {slower:>{widths[2]}}"
    energies = f"  {joules:>{widths[3]}} {more:>{widths[4]}}" if energy else ""
    return f"{times}{energies}  {settings}"


def _constant_W(points: Sequence[Point]) -> float | None:
    """Return the power of all points if it is estimated and hardly differs: energy tells nothing
    then that time does not."""
    powers = [point.power_W for point in points if point.meter.name == "estimated"]
    alike = len(powers) == len(points) > 1 and max(powers) <= _ALIKE * min(powers)
    return max(powers) if alike else None


def _short_role(words: str) -> str:
    """Return one name of a point; the knee is named only where it is nothing else."""
    names = [word for word in words.split(", ") if word != "knee"]
    return "best in both" if len(names) > 1 else "".join(names) or "knee"


def _failures(result: Result) -> list[str]:
    failed = [
        record
        for record in result.failures
        if record.failure is not None and not record.failure.was_cancelled
    ]
    failed = [record for record in failed if record not in result.replaced_baselines]
    if not failed:
        return []
    first = failed[0]
    assert first.failure is not None
    others = f", and {len(failed) - 1} more (tuner show {result.name})" if failed[1:] else ""
    return [f"Failed: {first.request.probe_id}: {first.failure.sentence}{others}"]


def _next(result: Result) -> list[str]:
    """Return where to go from here."""
    command = "apply" if result.points and result.job is not None else "show"
    steps = [f"tuner {command} {result.name}{' [--point N]' if command == 'apply' else ''}"]
    if result.points:
        other = "--max-slowdown 5%" if result.baseline is not None else "--minimize energy"
        steps.append(f"tuner choose {result.name} {other}")
    lines = [f"{'Next: ' if not i else '      '}{step}" for i, step in enumerate(steps)]
    return lines + ([f"Report: {result.report_path}"] if result.report_path is not None else [])
