"""`tuner explain` and `tuner compare`: the parts of a point, and two points or two runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from tuner.cli.arguments import POINT
from tuner.cli.options import OK, answer
from tuner.cli.parser import Commands, take_latest
from tuner.search_spaces.errors import InputError, UnknownName


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
    answer(args, comparison.to_json(), lines)
    return OK


def _compare_runs(args: argparse.Namespace, one: str, other: str) -> int:
    from tuner.answer.run_difference import compare_runs
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
    answer(args, comparison.to_json(), comparison.lines())
    return OK


def _explain(args: argparse.Namespace) -> int:
    from tuner.api import load_result

    explanation = load_result(args.run, runs_dir=args.runs_dir).explain(args.at or args.point)
    answer(args, explanation.to_json(), str(explanation).splitlines())
    return OK


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
