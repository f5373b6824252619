"""`tuner explain`: where a point's time and energy go, which knob bought what, what holds here."""

from __future__ import annotations

import argparse

from tuner.commands.apply import POINT
from tuner.commands.shared import OK, Commands, answer


def _explain(args: argparse.Namespace) -> int:
    from tuner.api import load_result

    explanation = load_result(args.run, runs_dir=args.runs_dir).explain(args.point)
    answer(args, explanation.to_json(), explanation.lines())
    return OK


def add(commands: Commands) -> None:
    """The command of this module."""
    explain = commands.of_run(
        "explain", _explain, "where a point's time and energy go, and which knob bought what"
    )
    explain.add_argument("--point", default="best", metavar="POINT", help=POINT)
