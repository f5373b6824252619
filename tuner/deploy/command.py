"""`tuner apply`, and `tuner run RUN`: launch files of a chosen point, and training with it."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TextIO, cast

from tuner.cli.options import FAILED, INTERRUPTED, OK, UNMET, announcer, print_answer
from tuner.cli.parser import Commands, add_shared
from tuner.terminal import SafeStream, VisibleStream, raw_stream


def _apply(args: argparse.Namespace) -> int:
    from tuner.api import load_result
    from tuner.deploy.launch_files import clock_settings, synthetic_notice, write_launch_files
    from tuner.display.advice import advice_lines, evidence_sentence
    from tuner.display.text import legend_lines
    from tuner.display.view import View
    from tuner.problem.run_folder import find_run
    from tuner.search_spaces.safe_files import require_own

    folder = find_run(args.run, args.runs_dir)
    require_own(folder.path)  # wherever the files go, they start what this folder says
    result = load_result(folder.path)
    named = "best" if args.point == "recommended" else f"point-{args.point}"
    tidy = named if named.replace("-", "").isalnum() else "point"
    out = Path(args.out or folder.path / tidy)
    inside = None if args.out else folder.path
    written = write_launch_files(
        result, out, point=args.point, ray_train=args.ray_train, inside=inside
    )
    files = [str(path) for path in written]
    point = result.point(args.point)
    lines = advice_lines(result)
    lines += [sentence] if (sentence := evidence_sentence(result)) else []
    if args.point != "recommended":
        lines = [f"Point {args.point}: {point.configuration.short}"]
    notice = synthetic_notice(result.job) if result.job is not None else ""
    start = "./clocks.sh ./launch.sh" if clock_settings(point.configuration) else "./launch.sh"
    unmet = args.point in ("recommended", "best") and not result.choice.met
    if unmet and result.choice.sentence not in lines:
        lines.append(result.choice.sentence)
    if unmet:
        found = View(result).words.found
        lines.append(f"No {found} configuration meets the limits; these files start the nearest:")
    lines += legend_lines([*lines, point.configuration.short])
    lines += [*files, *([f"{notice}."] if notice else [])]
    data = {
        "files": files,
        "best": result.best.to_json() if result.best else None,
        "point": point.to_json(),
        "recommendation": result.recommendation.to_json() if result.recommendation else None,
        **{"synthetic": bool(notice), "met": not unmet},
    }
    lines.append(f"Start it with: cd {shlex.quote(str(out))} && {start}")
    print_answer(args, data, lines)
    return UNMET if unmet else OK


def train_command(args: argparse.Namespace) -> int:
    """Train with a point of a run; return the exit code."""
    from tuner.api import load_result
    from tuner.deploy.train import train
    from tuner.problem.run_folder import find_run
    from tuner.search_spaces.safe_files import require_own

    # With --json standard output is the answer alone. A file or a pipe gets what the program prints
    # byte for byte; a terminal does not get its control characters.
    output = sys.stderr if args.json else sys.stdout
    stream = VisibleStream if output.isatty() else SafeStream
    folder = find_run(args.run, args.runs_dir)
    require_own(folder.path)
    result = load_result(folder.path)
    done = train(
        result,
        args.point,
        program=args.program,
        steps=args.steps,
        clocks=args.clocks,
        announce=announcer(args, "tuner: "),
        output=cast(TextIO, stream(raw_stream(output), may_fail=True)),
    )
    print_answer(args, done.to_json(), done.lines())
    if done.interrupted:
        return INTERRUPTED
    return OK if done.failure is None else FAILED


def add(commands: Commands) -> None:
    """Add the command of this module."""
    apply = commands.of_run("apply", _apply, "write the files that start the job as recommended")
    add_shared(apply, "--point")
    apply.add_argument("--out", metavar="DIR", help="output folder (default: best in the run)")
    text = "also write what Ray Train's TorchTrainer takes: ray_train.json"
    apply.add_argument("--ray-train", action="store_true", help=text)
