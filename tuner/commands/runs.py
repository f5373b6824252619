"""What is done with a run that stands: `tuner front`, `compare`, `report`, `dashboard`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from search_spaces.errors import InputError
from tuner.commands.shared import OK, Commands, answer


def _front(args: argparse.Namespace) -> int:
    from tuner.api import load_result
    from tuner.summary import summary_lines

    if args.from_csv:
        return _front_of_csv(args)
    for name in CSV_OPTIONS:
        if getattr(args, name):
            raise InputError(f"--{name.replace('_', '-')} is for --from-csv; a run knows it itself")
    result = load_result(args.run, runs_dir=args.runs_dir)
    answer(args, result.to_json(), summary_lines(result))
    return OK


#: Options of `tuner front` that only past runs need.
CSV_OPTIONS = (
    "time_column",
    "energy_column",
    "power_column",
    "knobs",
    "baseline",
    "energy_scope",
    "estimated",
    "steps",
    "budget_kJ",
    "deadline_s",
    "power_cap_W",
    "name",
)


def _front_of_csv(args: argparse.Namespace) -> int:
    from tuner.past_runs import front_of_csv
    from tuner.summary import summary_lines

    if args.run is not None:
        raise InputError(f"give either the run {args.run!r} or --from-csv")
    told = {name: getattr(args, name) for name in CSV_OPTIONS if getattr(args, name)}
    told["knobs"] = [name.strip() for name in (args.knobs or "").split(",") if name.strip()]
    result, read = front_of_csv(args.from_csv, runs_dir=args.runs_dir, **told)
    answer(args, {**result.to_json(), "read": read}, [read, *summary_lines(result)])
    return OK


def _add_csv(front: argparse.ArgumentParser) -> None:
    group = front.add_argument_group(
        "past runs", "a front from CSV files alone: one row a run, its time, energy and knobs"
    )
    add = group.add_argument
    add("--from-csv", nargs="+", metavar="FILE", help="CSV files of past runs")
    add("--time-column", metavar="NAME", help="the time of a row; told by its name if not given")
    add("--energy-column", metavar="NAME", help="its energy, joules or as the name says")
    add("--power-column", metavar="NAME", help="or its average power, watts")
    add("--knobs", metavar="A,B", help="columns of the configuration; those that vary otherwise")
    add("--baseline", nargs="+", metavar="KNOB=VALUE", help="the configuration in use today")
    add("--energy-scope", choices=("gpu", "module", "node"), help="what it charges (gpu)")
    add("--estimated", action="store_true", help="nobody metered the energy")
    add("--steps", type=int, metavar="N", help="rows of work that make the solution (default: 1)")
    add("--budget-kJ", type=float, metavar="X", help="energy that the job may use")
    add("--deadline-s", type=float, metavar="X", help="time that it may take")
    add("--power-cap-W", type=float, metavar="X", help="bound on its average power")
    add("--name", metavar="NAME", help="of the run folder that is made")


def _compare(args: argparse.Namespace) -> int:
    from tuner.api import load_result

    comparison = load_result(args.run, runs_dir=args.runs_dir).compare(args.a, args.b)
    answer(args, comparison.to_json(), comparison.lines())
    return OK


def _report(args: argparse.Namespace) -> int:
    from tuner.api import load_result
    from tuner.report import write_report
    from tuner.runs import find_run
    from workload.trace import read_trace

    folder = find_run(args.run, args.runs_dir)
    result = load_result(folder.path)
    records = read_trace(folder.trace).records if folder.trace.exists() else ()
    path = write_report(result, Path(args.out or folder.report), records=records)
    answer(args, {"report": str(path)}, [f"Report: {path}"])
    return OK


def _dashboard(args: argparse.Namespace) -> int:
    from tuner.dashboard import ARTIFACTS, refresh, serve
    from tuner.runs import find_run

    # By URL alone: every study that several users keep in one database.
    alone = args.storage is not None and args.run is None
    folder = None if alone else find_run(args.run, args.runs_dir)
    if folder is None:
        storage, what, artifacts = args.storage, "every study of the storage", args.artifacts
    else:
        storage, what = args.storage or folder.journal, folder.name
        if args.storage is None and not folder.journal.is_file():
            raise InputError(f"{folder.name} keeps no journal; name its storage with --storage URL")
        artifacts = args.artifacts or folder.path / ARTIFACTS
        refresh(folder, args.storage)
    url = f"http://{args.host}:{args.port}/"
    answer(args, {"url": url, "run": what}, [f"{what} at {url} (Ctrl-C ends it)"])
    sys.stdout.flush()
    serve(storage, host=args.host, port=args.port, artifacts=artifacts)
    return OK


def add(commands: Commands) -> None:
    """The commands of this module."""
    front = commands.of_run("front", _front, "the front of a run, or of CSV files of past runs")
    _add_csv(front)
    compare = commands.of_run(
        "compare", _compare, "by how much one measured point differs from another"
    )
    for name, default in (("a", "baseline"), ("b", "best")):
        what = f'"best", "baseline" or a configuration\'s key (default: {default})'
        flag = "--from" if name == "a" else "--to"
        compare.add_argument(flag, dest=name, default=default, metavar="POINT", help=what)
    out = commands.of_run("report", _report, "write a run's report")
    out.add_argument("--out", metavar="FILE", help="where to (default: report.html in the run)")
    dashboard = commands.of_run("dashboard", _dashboard, "serve a run's study in optuna-dashboard")
    dashboard.add_argument(
        "--storage", metavar="URL", help="where it was kept by URL; without RUN: every study there"
    )
    dashboard.add_argument("--artifacts", metavar="DIR", help="pictures (default: in the run)")
    dashboard.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    dashboard.add_argument("--port", type=int, default=8080, help="port (default: 8080)")
