"""`tuner replay`: a search on a recording."""

from __future__ import annotations

import argparse
from pathlib import Path

from tuner.cli.optimize import OF_SEARCH, add_study, exit_code
from tuner.cli.options import made_of_options, print_answer, progress
from tuner.cli.parser import Commands
from tuner.problem.constraints import Constraints
from tuner.problem.settings import SearchSettings


def _replay(args: argparse.Namespace) -> int:
    from tuner.display.text import answer_lines
    from tuner.recordings.problem import replay

    run = Path(args.runs_dir) / args.path
    with progress(args) as on_progress:
        result = replay(
            run if run.is_dir() and not Path(args.path).exists() else args.path,
            group=args.group,
            steps=args.steps,
            recorded_order=args.recorded_order,
            in_flight=args.in_flight,
            constraints=made_of_options(args, Constraints),
            search=made_of_options(args, SearchSettings),
            storage=args.storage,
            runs_dir=args.runs_dir,
            progress=False,
            on_progress=on_progress,
            **{name: getattr(args, name) for name in (*OF_SEARCH, "name")},
        )
    print_answer(args, result.to_json(), ["", *answer_lines(result)])
    return exit_code(result)


def add(commands: Commands) -> None:
    """Add the command of this module."""
    replay = commands.command(
        "replay", _replay, "search a recorded run or table again; nothing is started"
    )
    add = replay.add_argument
    add(
        "path",
        metavar="PATH",
        help="a run or its zip file, a recorded table's folder, or a trace",
    )
    add("--group", metavar="NAME", help="search problem of a table that holds several")
    add("--steps", type=int, metavar="N", help="steps of the whole training")
    add(
        "--recorded-order",
        action="store_true",
        help="make the recorded probes in their order (default: the search chooses)",
    )
    add(
        "--in-flight",
        type=int,
        default=1,
        metavar="N",
        help="probes that run together (default: 1)",
    )
    add_study(replay)
    replay.show_first(
        (
            "path",
            "--recorded-order",
            "--steps",
            "--max-probes",
            "--deadline",
            "--minimize",
            "--name",
        ),
        "tuner replay my-table --steps 1000",
        "tuner replay runs/first --max-probes 10 --name again",
    )
