"""`tuner runs` lists, removes, stops and opens runs, and rebuilds the study of one."""

from __future__ import annotations

import argparse

from tuner.cli.arguments import add_shared
from tuner.cli.options import (
    OK,
    add_storage,
    answer,
    columns,
    storage_of,
)
from tuner.cli.parser import Commands, print_latest
from tuner.search_spaces.errors import InputError

ACTIONS = ("list", "rm", "stop", "open", "rebuild")


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
    if args.action == "rebuild":
        return _rebuild(args)
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


def _rebuild(args: argparse.Namespace) -> int:
    from tuner.problem.run_folder import find_run
    from tuner.study.rebuild import rebuild

    if len(args.run) > 1:
        raise InputError("tuner runs rebuild takes one run")
    if not args.run:
        print_latest(args)
    folder = find_run(args.run[0] if args.run else None, args.runs_dir)
    made = rebuild(folder, storage=storage_of(args))
    answer(args, made.to_json(), made.lines())
    return OK


def add(commands: Commands) -> None:
    """Add the commands of this module."""
    runs = commands.command(
        "runs", _runs, "list runs; remove (rm), stop or rebuild some, or open a bundle"
    )
    runs.add_argument(
        "action",
        nargs="?",
        default="list",
        choices=ACTIONS,
        metavar="ACTION",
        help="list, rm (delete), stop (end a search after its running probes), open (unpack a "
        "bundle as a run) or rebuild (make a run's study again from its trace) (default: list)",
    )
    runs.add_argument("run", nargs="*", metavar="RUN", help="names of runs, or files for open")
    runs.add_argument("--name", metavar="NAME", help="name of the run that open makes")
    add_storage(runs, "URL of the database that rebuild writes to")
    add_shared(runs, "--runs-dir")
