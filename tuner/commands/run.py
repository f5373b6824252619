"""`tuner run`: train under a point of a run, and compare with what was promised."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from tuner.commands.apply import POINT
from tuner.commands.shared import FAILED, INTERRUPTED, OK, Commands, answer


def _run(args: argparse.Namespace) -> int:
    from tuner.api import load_result
    from tuner.follow import follow

    def say(sentence: str) -> None:
        if not args.quiet:
            print(f"tuner: {sentence}", file=sys.stderr, flush=True)

    result = load_result(args.run, runs_dir=args.runs_dir)
    done = follow(
        result,
        args.point,
        program=args.program,
        steps=args.steps,
        clocks=args.clocks,
        say=say,
        # With --json standard output is the answer alone.
        output=sys.stderr if args.json else sys.stdout,
    )
    answer(args, done.to_json(), done.lines())
    if done.interrupted:
        return INTERRUPTED
    return OK if done.failure is None else FAILED


def _after_dashes(parser: argparse.ArgumentParser) -> None:
    """What follows "--" is the program, whatever argparse would make of it."""
    plain = parser.parse_known_args

    def parse(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        words = list(args or ())
        cut = words.index("--") if "--" in words else len(words)
        found, extra = plain(words[:cut], namespace)
        found.program = words[cut + 1 :]
        return found, extra

    parser.parse_known_args = parse  # type: ignore[method-assign,assignment]


def add(commands: Commands) -> None:
    """The command of this module."""
    run = commands.of_run("run", _run, "train as chosen, and compare with what was promised")
    run.usage = "tuner run [RUN] [options] [-- PROGRAM ...]"
    run.add_argument("--point", default="best", metavar="POINT", help=POINT)
    run.add_argument("--steps", type=int, metavar="N", help="of the built-in program: fewer steps")
    run.add_argument(
        "--no-clocks", dest="clocks", action="store_false", help="leave the clocks as they are"
    )
    run.add_argument("--quiet", action="store_true", help="no word while it trains")
    _after_dashes(run)
