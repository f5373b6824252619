"""`tuner runs` lists, removes, archives and stops runs; `tuner diff` compares two."""

from __future__ import annotations

import argparse

from tuner.cli.arguments import add_shared
from tuner.cli.options import OK, Commands, answer, columns
from tuner.search_spaces.errors import InputError

ACTIONS = ("list", "rm", "archive", "stop")


def _runs(args: argparse.Namespace) -> int:
    from tuner.problem.run_list import archive_run, list_runs, remove_run, stop_run

    if args.action == "list":
        if args.run:
            raise InputError(f"give an action: tuner runs rm {args.run[0]}, or archive")
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
    act = {"rm": remove_run, "archive": archive_run, "stop": stop_run}[args.action]
    paths = [str(act(args.runs_dir, name)) for name in args.run]
    done = {
        "rm": "removed",
        "archive": "archived as",
        "stop": "ends after the running probes:",
    }[args.action]
    answer(args, {args.action: paths}, [f"{done} {path}" for path in paths])
    return OK


def _diff(args: argparse.Namespace) -> int:
    from tuner.api import load_result
    from tuner.results.run_difference import run_difference

    first, second = (load_result(run, runs_dir=args.runs_dir) for run in (args.a, args.b))
    found = run_difference(first, second)
    lines = columns([("", *found.names), *found.rows])
    answer(args, found.to_json(), [*lines, found.sentence])
    return OK


def add(commands: Commands) -> None:
    """Add the commands of this module."""
    runs = commands.command(
        "runs", _runs, "list runs, or remove (rm), archive or stop some of them"
    )
    runs.add_argument(
        "action",
        nargs="?",
        default="list",
        choices=ACTIONS,
        metavar="ACTION",
        help="list, rm (delete) or archive (pack into archive/NAME.tar.gz), stop (end a "
        "search after its running probes) (default: list)",
    )
    runs.add_argument(
        "run", nargs="*", metavar="RUN", help="names of runs, for rm, archive and stop"
    )
    add_shared(runs, "--runs-dir")
    diff = commands.command("diff", _diff, "compare two runs: question, baseline, recommendation")
    diff.add_argument("a", metavar="RUN", help="name or folder of the run to compare with")
    diff.add_argument("b", metavar="OTHER", help="name or folder of the run that is compared")
    add_shared(diff, "--runs-dir")
