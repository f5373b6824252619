"""`tuner bundle` packs a run as evidence for others; `tuner open` opens and checks such a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from tuner.cli.arguments import add_shared
from tuner.cli.options import FAILED, OK, Commands, answer


def _bundle(args: argparse.Namespace) -> int:
    from tuner.evidence.bundle import make_bundle
    from tuner.problem.run_folder import find_run

    run = find_run(args.run, args.runs_dir)
    made = make_bundle(run, Path(args.out) if args.out else None, redact=args.redact)
    answer(args, made.to_json(), made.lines())
    return OK


def _open(args: argparse.Namespace) -> int:
    from tuner.evidence.opened import open_bundle

    opened = open_bundle(args.file, runs_dir=args.runs_dir, name=args.name)
    answer(args, opened.to_json(), opened.lines())
    return OK if opened.sound else FAILED


def add(commands: Commands) -> None:
    """Add the commands of this module."""
    bundle = commands.of_run(
        "bundle", _bundle, "pack a run into one file that another machine opens, checks and replays"
    )
    bundle.add_argument(
        "--out", metavar="FILE", help="output file (default: RUN.evidence.zip in this folder)"
    )
    bundle.add_argument(
        "--redact",
        action="store_true",
        help="replace host and user names, paths, and what looks like a secret",
    )
    opened = commands.command(
        "open", _open, "open a bundle as a run: check its files and compute its answer again"
    )
    opened.add_argument("file", metavar="FILE", help="the bundle")
    opened.add_argument("--name", metavar="NAME", help="name of the run (default: the bundle's)")
    add_shared(opened, "--runs-dir")
