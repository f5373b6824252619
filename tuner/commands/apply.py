"""`tuner apply`: the files that start the job under a point of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from tuner.commands.shared import OK, Commands, answer

POINT = "best, knee, baseline, the number of a point of the front, or a key (default: best)"


def _apply(args: argparse.Namespace) -> int:
    from tuner.api import load_result
    from tuner.launch_files import write_launch_files
    from tuner.runs import find_run
    from tuner.summary import verification_lines
    from tuner.wording import knobs

    folder = find_run(args.run, args.runs_dir)
    result = load_result(folder.path)
    named = "best" if args.point == "best" else f"point-{args.point}"
    tidy = named if named.replace("-", "").isalnum() else "point"
    out = Path(args.out or folder.path / tidy)
    files = [str(path) for path in write_launch_files(result, out, point=args.point)]
    point = result.point(args.point)
    told = [result.choice.sentence, *verification_lines(result)]
    if args.point != "best":
        told = [f"Point {args.point}: {' '.join(knobs(point.configuration))}"]
    start = "./clocks.sh ./launch.sh" if point.configuration.live else "./launch.sh"
    best = result.best.to_json() if result.best else None
    answer(
        args,
        {"files": files, "best": best, "point": point.to_json()},
        [*told, *files, f"Start it with: cd {out} && {start}"],
    )
    return OK


def add(commands: Commands) -> None:
    """The command of this module."""
    apply = commands.of_run("apply", _apply, "write the files that start the job as chosen")
    apply.add_argument("--point", default="best", metavar="POINT", help=POINT)
    apply.add_argument("--out", metavar="DIR", help="where to (default: best in the run)")
