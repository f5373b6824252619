"""Comparison of points and runs, and the explanation of a point."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.options import OK, print_answer
from tuner.cli.parser import POINT, Commands, take_latest
from tuner.search_spaces.errors import InputError, UnknownName

if TYPE_CHECKING:
    from tuner.answer.answer import Answer
    from tuner.answer.parts import Comparison


def _run_named(word: str, runs_dir: str) -> Path | None:
    from tuner.problem.run_folder import find_run

    try:
        return find_run(word, runs_dir).path
    except UnknownName:
        return None


def _compare(args: argparse.Namespace) -> int:
    from tuner.api import load_result

    words = [word for word in (args.run, *args.points) if word is not None]
    runs = [_run_named(word, args.runs_dir) for word in words]
    if len(words) == 2 and all(runs):
        return _compare_runs(args, *words)
    points = words if words and runs[0] is None else words[1:]
    if len(points) > 2:
        raise InputError("tuner compare takes two runs, or a run and at most two of its points")
    if points and points == words:
        take_latest(args)
    result = load_result(None if points == words else words[0], runs_dir=args.runs_dir)
    a, b = points if len(points) == 2 else ("today", *(points or ["best"]))
    comparison = result.compare(a, b)
    from tuner.formatting import settings_legend

    legend = settings_legend([comparison.a, comparison.b])
    lines = [*comparison.lines(), *([f"({legend})"] if legend else [])]
    print_answer(args, comparison.to_json(), lines)
    return OK


def _compare_runs(args: argparse.Namespace, one: str, other: str) -> int:
    from tuner.api import load_result

    first, second = (load_result(run, runs_dir=args.runs_dir) for run in (one, other))
    try:
        first.point(other)
    except InputError:
        pass
    else:
        raise InputError(
            f"{other!r} is a run and a point of run {one!r}: write {Path(args.runs_dir) / other} "
            f"for the run, or two points: tuner compare {one} today {other}"
        )
    comparison = compare_runs(first, second)
    print_answer(args, comparison.to_json(), comparison.lines())
    return OK


def _explain(args: argparse.Namespace) -> int:
    from tuner.api import load_result

    explanation = load_result(args.run, runs_dir=args.runs_dir).explain(args.at or args.point)
    print_answer(args, explanation.to_json(), str(explanation).splitlines())
    return OK


def compare_runs(first: Answer, second: Answer) -> Comparison:
    """Compare the recommendations of two runs by their intervals.

    Raises:
        InputError: one of them measured nothing, or their figures cannot be compared.
    """
    from tuner.answer.judge import differences_by_intervals
    from tuner.answer.parts import Comparison

    if obstacles := _obstacles(first, second):
        raise InputError(
            f"the figures of {first.name} and {second.name} cannot be compared: "
            f"{'; '.join(obstacles)}"
        )
    a, b = first.recommended, second.recommended
    if a is None or b is None:
        raise InputError(f"{(second if a else first).name} measured nothing to compare")
    energy, time = differences_by_intervals(a, b)
    names = [f"{run.name}: {p.configuration.short}" for run, p in ((first, a), (second, b))]
    return Comparison(names[0], names[1], time, energy, b.meter)


def _job(result: Answer) -> str:
    from tuner.problem.problem import Recording

    recording = Recording.of(result.about)
    name = result.job.name if result.job else recording.table if recording else ""
    length = f"{result.length:,} steps" if result.length else "of unknown length"
    return f"{name}, {length}".removeprefix(", ")


def _obstacles(first: Answer, second: Answer) -> list[str]:
    found = []
    if _job(first) != _job(second):
        found.append(f"they train {_job(first)} and {_job(second)}")
    batches = [result.job.global_batch if result.job else None for result in (first, second)]
    if None not in batches and batches[0] != batches[1]:
        found.append(f"a step trains a global batch of {batches[0]} and of {batches[1]}")
    meters = [{p.meter.scope for p in result.points} for result in (first, second)]
    if all(meters) and meters[0] != meters[1]:
        scopes = [" and ".join(sorted(each)) for each in meters]
        found.append(f"their energy has the scopes {scopes[0]} and {scopes[1]}")
    sources = [{p.source for p in result.points} for result in (first, second)]
    if all(sources) and sources[0] != sources[1]:
        found.append("one was measured and the other was predicted")
    return found


def add(commands: Commands) -> None:
    """Add the commands of this module."""
    compare = commands.of_run("compare", _compare, "compare two points of a run, or two runs")
    text = f"{POINT} (default: today and best); or another run"
    compare.add_argument("points", nargs="*", metavar="POINT|RUN", help=text)
    explain = commands.of_run(
        "explain", _explain, "where a point's time and energy go, and what each knob changes"
    )
    explain.add_argument("at", nargs="?", metavar="POINT", help=f"{POINT} (default: best)")
    explain.add_argument("--point", default="best", metavar="POINT", help="the same")
