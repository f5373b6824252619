"""Commands about existing runs: `tuner show`, `choose` and `runs`."""

from __future__ import annotations

import argparse
from pathlib import Path

from tuner.cli.options import (
    OK,
    UNMET,
    add_options,
    columns,
    made_of_options,
    print_answer,
)
from tuner.cli.parser import Commands, add_shared
from tuner.problem.constraints import Constraints
from tuner.search_spaces.errors import InputError


def _show(args: argparse.Namespace) -> int:
    from tuner.api import load_result
    from tuner.display.text import summary_lines

    if args.html:
        return _write_page(args)
    if args.out:
        raise InputError("--out is for --html")
    result = load_result(args.run, runs_dir=args.runs_dir)
    print_answer(args, result.to_json(), summary_lines(result))
    return OK


def _write_page(args: argparse.Namespace) -> int:
    from tuner.api import load_result
    from tuner.problem.run_folder import find_run
    from tuner.search_spaces.plugins import extra_module
    from tuner.search_spaces.safe_files import require_own

    report = extra_module("tuner.display.report", "tuner show --html")
    folder = find_run(args.run, args.runs_dir)
    result = load_result(folder.path)
    records = folder.records()
    if not args.out:
        require_own(folder.path)
    path = report.write_report(result, Path(args.out or folder.report), records=records)
    print_answer(args, {"report": str(path)}, [f"Report: {path}"])
    return OK


def _choose(args: argparse.Namespace) -> int:
    from tuner.api import load_result

    result = load_result(args.run, runs_dir=args.runs_dir)
    chosen = result.choose(made_of_options(args, Constraints))
    print_answer(args, chosen.to_json(), str(chosen).splitlines())
    return OK if chosen.met else UNMET


def _runs(args: argparse.Namespace) -> int:
    from tuner.problem.run_folder import list_runs, remove_run, stop_run

    if args.action == "list":
        if args.run:
            raise InputError(f"give an action: tuner runs rm {args.run[0]}, or stop")
        entries = list_runs(args.runs_dir)
        rows = [("name", "job", "cluster", "kind", "state", "probes", "changed")]
        rows += [
            (e.name, e.job, e.cluster, e.kind, e.state, str(e.probes), e.changed.partition("-")[2])
            for e in entries
        ]
        lines = columns(rows) if entries else [f"no runs in {args.runs_dir}"]
        print_answer(args, [vars(entry) for entry in entries], lines)
        return OK
    if not args.run:
        raise InputError(f"name the runs: tuner runs {args.action} NAME ...")
    act = {"rm": remove_run, "stop": stop_run}[args.action]
    paths = [str(act(args.runs_dir, name)) for name in args.run]
    done = {"rm": "removed", "stop": "ends after the running probes:"}[args.action]
    print_answer(args, {args.action: paths}, [f"{done} {path}" for path in paths])
    return OK


def add(commands: Commands) -> None:
    """Add the commands of this module."""
    show = commands.of_run(
        "show", _show, "show a run: its front and its answer", hint="limits are for tuner choose"
    )
    show.add_argument("--html", action="store_true", help="write the report, one HTML file")
    show.add_argument(
        "--out", metavar="FILE", help="file of --html (default: report.html in the run)"
    )
    choose = commands.of_run(
        "choose", _choose, "choose again under other limits; nothing is measured"
    )
    add_options(choose.add_argument_group("limits and objective of the training job"), Constraints)
    choose.show_first(
        ("run", "--deadline", "--max-slowdown", "--budget", "--minimize", "--json"),
        "tuner choose my-run --max-slowdown 5%",
        "tuner choose my-run --minimize energy",
    )
    runs = commands.command("runs", _runs, "list runs; remove (rm) or stop some")
    runs.add_argument(
        "action",
        nargs="?",
        default="list",
        choices=("list", "rm", "stop"),
        metavar="ACTION",
        help="list, rm (delete) or stop (end a search after its running probes) (default: list)",
    )
    runs.add_argument("run", nargs="*", metavar="RUN", help="names of runs")
    add_shared(runs, "--runs-dir")
