"""`tuner runs` lists, removes, stops and opens runs."""

from __future__ import annotations

import argparse

from tuner.cli.arguments import add_shared
from tuner.cli.options import OK, answer, columns
from tuner.cli.parser import Commands
from tuner.search_spaces.errors import InputError

ACTIONS = ("list", "rm", "stop", "open")


def _runs(args: argparse.Namespace) -> int:
    from tuner.problem.run_list import list_runs, remove_run, stop_run

    if args.action == "list":
        if args.run:
            raise InputError(f"give an action: tuner runs rm {args.run[0]}, or stop")
        entries = list_runs(args.runs_dir)
        rows = [("name", "job", "cluster", "kind", "state", "probes", "changed", "size")]
        rows += [
            (
                *(e.name, e.job, e.cluster, e.kind, e.state),
                *(str(e.probes), e.changed, f"{e.size_bytes / 1e6:.1f} MB"),
            )
            for e in entries
        ]
        lines = columns(rows) if entries else [f"no runs in {args.runs_dir}"]
        answer(args, [entry.to_json() for entry in entries], lines)
        return OK
    if not args.run:
        raise InputError(f"name the runs: tuner runs {args.action} NAME ...")
    if args.action == "open":
        return _open(args)
    act = {"rm": remove_run, "stop": stop_run}[args.action]
    paths = [str(act(args.runs_dir, name)) for name in args.run]
    done = {"rm": "removed", "stop": "ends after the running probes:"}[args.action]
    answer(args, {args.action: paths}, [f"{done} {path}" for path in paths])
    return OK


def _open(args: argparse.Namespace) -> int:
    from tuner.evidence.bundle import open_bundle

    if args.name and len(args.run) > 1:
        raise InputError("--name is for one bundle")
    opened = [open_bundle(file, runs_dir=args.runs_dir, name=args.name) for file in args.run]
    lines = [f"opened {run.path}; next: tuner show {run.name}" for run in opened]
    answer(args, {"open": [str(run.path) for run in opened]}, lines)
    return OK


def add(commands: Commands) -> None:
    """Add the commands of this module."""
    runs = commands.command("runs", _runs, "list runs; remove (rm) or stop some, or open a bundle")
    runs.add_argument(
        "action",
        nargs="?",
        default="list",
        choices=ACTIONS,
        metavar="ACTION",
        help="list, rm (delete), stop (end a search after its running probes) or open (unpack a "
        "bundle as a run) (default: list)",
    )
    runs.add_argument("run", nargs="*", metavar="RUN", help="names of runs, or files for open")
    runs.add_argument("--name", metavar="NAME", help="name of the run that open makes")
    add_shared(runs, "--runs-dir")
