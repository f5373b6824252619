"""`tuner rebuild`: the study made again from the trace."""

from __future__ import annotations

import argparse

from tuner.commands.shared import OK, Commands, answer


def _rebuild(args: argparse.Namespace) -> int:
    from tuner.rebuild import rebuild
    from tuner.runs import find_run

    made = rebuild(find_run(args.run, args.runs_dir), storage=args.storage)
    answer(args, made.to_json(), made.lines())
    return OK


def add(commands: Commands) -> None:
    """The commands of this module."""
    made = commands.of_run("rebuild", _rebuild, "make a run's study again from its trace")
    made.add_argument("--storage", metavar="URL", help="into this database (default: the journal)")
