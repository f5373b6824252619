"""Commands about an existing run: `tuner front`, `choose`, `compare`, `report`, `dashboard`,
`explain`, `export` and `rebuild`."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path
from typing import Any

from tuner.cli.arguments import POINT
from tuner.cli.options import (
    OK,
    UNMET,
    Commands,
    add_options,
    add_storage,
    answer,
    given_options,
    made_of_options,
    storage_of,
)
from tuner.problem.constraints import Constraints
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.study.csv_import import CsvOptions


def _front(args: argparse.Namespace) -> int:
    from tuner.api import load_result
    from tuner.display.text import summary_lines

    if args.from_csv:
        return _front_of_csv(args)
    for flag in given_options(args, Constraints, only=_CSV_LIMITS):
        raise InputError(
            f"{flag} is for --from-csv here; to choose again on a run's front: tuner choose "
            f"{args.run or ''}".rstrip()
        )
    for flag in _given_for_csv(args):
        raise InputError(f"{flag} is for --from-csv; a run has its own")
    result = load_result(args.run, runs_dir=args.runs_dir)
    answer(args, result.to_json(), summary_lines(result), fit=True)
    return OK


#: Limits that choose on the front of CSV files.
_CSV_LIMITS = ("budget_kJ", "deadline_s", "max_slowdown", "power_cap_W")


def _given_for_csv(args: argparse.Namespace) -> list[str]:
    given = [*given_options(args, CsvOptions), *given_options(args, Constraints, only=_CSV_LIMITS)]
    return given + [flag for flag in ("--baseline", "--name") if getattr(args, flag[2:])]


def _front_of_csv(args: argparse.Namespace) -> int:
    from tuner.api import front_of_csv
    from tuner.display.text import summary_lines

    if args.run is not None:
        raise InputError(f"give either the run {args.run!r} or --from-csv")
    result, read = front_of_csv(
        args.from_csv,
        made_of_options(args, CsvOptions),
        constraints=made_of_options(args, Constraints, only=_CSV_LIMITS),
        baseline=args.baseline or (),
        name=args.name,
        runs_dir=args.runs_dir,
    )
    answer(args, {**result.to_json(), "read": read}, [read, *summary_lines(result)], fit=True)
    return OK


def _add_csv(front: argparse.ArgumentParser) -> None:
    group = front.add_argument_group(
        "past runs", "a front from CSV files alone: one row a run, its time, energy and knobs"
    )
    add = group.add_argument
    add("--from-csv", nargs="+", metavar="FILE", help="CSV files of past runs")
    add_options(group, CsvOptions)
    add("--baseline", nargs="+", metavar="KNOB=VALUE", help="configuration in use today")
    add_options(group, Constraints, only=_CSV_LIMITS)
    add("--name", metavar="NAME", help="name of the run folder")


def _choose(args: argparse.Namespace) -> int:
    from tuner.api import load_result

    result = load_result(args.run, runs_dir=args.runs_dir)
    chosen = result.choose(made_of_options(args, Constraints))
    answer(args, chosen.to_json(), chosen.lines(), fit=True)
    return OK if chosen.met else UNMET


def _compare(args: argparse.Namespace) -> int:
    from tuner.api import load_result

    comparison = load_result(args.run, runs_dir=args.runs_dir).compare(args.a, args.b)
    answer(args, comparison.to_json(), comparison.lines(), fit=True)
    return OK


def _report(args: argparse.Namespace) -> int:
    from tuner.api import load_result
    from tuner.display.report import write_report
    from tuner.problem.run_folder import find_run
    from tuner.search_spaces.safe_files import require_own
    from tuner.workload.trace import read_trace

    folder = find_run(args.run, args.runs_dir)
    result = load_result(folder.path)
    records = read_trace(folder.trace).records if folder.trace.exists() else ()
    if not args.out:
        require_own(folder.path)
    path = write_report(result, Path(args.out or folder.report), records=records)
    answer(args, {"report": str(path)}, [f"Report: {path}"])
    return OK


def _dashboard(args: argparse.Namespace) -> int:
    from tuner.display.dashboard import refresh, serve
    from tuner.display.guarded import guarded_url
    from tuner.problem.run_folder import find_run
    from tuner.search_spaces.safe_files import require_own

    # By URL alone: every study that several users keep in one database.
    url = storage_of(args)
    alone = url is not None and args.run is None
    folder = None if alone else find_run(args.run, args.runs_dir)
    storage: Any
    if folder is None:
        storage, what = url, "every study of the storage"
    else:
        if url is None:
            require_own(folder.path)
        storage, what = url or folder.journal, folder.name
        if url is None and not folder.journal.is_file():
            raise InputError(f"{folder.name} keeps no journal; name its storage with --storage URL")
        refresh(folder, url)
    token = secrets.token_urlsafe(32)
    page = guarded_url(args.host, args.port, token)
    lines = [f"{what} at {page} (Ctrl-C ends it)"]
    if ".localhost:" in page:
        lines.append("A browser that does not find this host finds it as 127.0.0.1.")
    answer(args, {"url": page, "run": what}, lines)
    sys.stdout.flush()
    serve(
        storage,
        token=token,
        host=args.host,
        port=args.port,
        writable=args.writable,
    )
    return OK


def _explain(args: argparse.Namespace) -> int:
    from tuner.api import load_result

    explanation = load_result(args.run, runs_dir=args.runs_dir).explain(args.point)
    answer(args, explanation.to_json(), explanation.lines())
    return OK


def _export(args: argparse.Namespace) -> int:
    from tuner.api import load_result

    if args.to == "bundle":
        from tuner.evidence.bundle import make_bundle
        from tuner.problem.run_folder import find_run

        out = Path(args.out) if args.out else None
        made = make_bundle(find_run(args.run, args.runs_dir), out, redact=args.redact)
        answer(args, made.to_json(), made.lines())
        return OK
    if args.redact:
        return _export_redacted(args)
    result = load_result(args.run, runs_dir=args.runs_dir)
    path = result.export(args.to, args.out)
    answer(args, {"to": args.to, "out": str(path)}, [f"{args.to}: {path}"])
    return OK


def _export_redacted(args: argparse.Namespace) -> int:
    from tuner.display.export import FORMATS
    from tuner.evidence.bundle import redacted_copy
    from tuner.problem.run_folder import find_run
    from tuner.study.load import result_of

    if args.to not in FORMATS:
        raise UnknownName("format", args.to, [*FORMATS, "bundle"])
    run = find_run(args.run, args.runs_dir)
    out = args.out or f"{run.name}-redacted{FORMATS[args.to].ending}"
    with redacted_copy(run) as copy:
        path = result_of(copy).export(args.to, out)
    answer(args, {"to": args.to, "out": str(path), "redacted": True}, [f"{args.to}: {path}"])
    return OK


def _rebuild(args: argparse.Namespace) -> int:
    from tuner.problem.run_folder import find_run
    from tuner.study.rebuild import rebuild

    made = rebuild(find_run(args.run, args.runs_dir), storage=storage_of(args))
    answer(args, made.to_json(), made.lines())
    return OK


def add(commands: Commands) -> None:
    """Add the commands of this module."""
    front = commands.of_run(
        "front", _front, "show the front of a run, or of past runs in CSV files"
    )
    _add_csv(front)
    choose = commands.of_run(
        "choose", _choose, "choose again on a run's front, under other limits; nothing is measured"
    )
    add_options(choose.add_argument_group("limits and objective of the training job"), Constraints)
    compare = commands.of_run(
        "compare",
        _compare,
        "show by how much two measured points differ",
        hint="its points are those of one run (--from, --to); for two runs: tuner diff RUN OTHER",
    )
    for name, default in (("a", "baseline"), ("b", "best")):
        what = f'"best", "baseline" or a configuration (default: {default})'
        flag = "--from" if name == "a" else "--to"
        compare.add_argument(flag, dest=name, default=default, metavar="POINT", help=what)
    out = commands.of_run("report", _report, "write a run's report")
    out.add_argument("--out", metavar="FILE", help="output file (default: report.html in the run)")
    dashboard = commands.of_run("dashboard", _dashboard, "serve a run's study in optuna-dashboard")
    add_storage(dashboard, "URL of the database (without RUN, all its studies are served)")
    dashboard.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    dashboard.add_argument("--port", type=int, default=8080, help="port (default: 8080)")
    dashboard.add_argument(
        "--writable", action="store_true", help="let the page change and delete studies and notes"
    )

    explain = commands.of_run(
        "explain", _explain, "show where a point's time and energy go, and what each knob changes"
    )
    explain.add_argument(
        "--point", default="best", metavar="POINT", help=f"{POINT} (default: best)"
    )
    export = commands.of_run(
        "export", _export, "a run's points as CSV, Parquet or T4, or the run as one file"
    )
    export.add_argument(
        "--to",
        required=True,
        metavar="FORMAT",
        help="csv, parquet, t4, or bundle, which `tuner runs open` unpacks",
    )
    export.add_argument(
        "--out", metavar="PATH", help="file (default: in the run; a bundle, or redacted: here)"
    )
    export.add_argument(
        "--redact",
        action="store_true",
        help="replace host and user names, paths, and what looks like a secret",
    )
    rebuild = commands.of_run("rebuild", _rebuild, "rebuild a run's study from its trace")
    add_storage(rebuild, "URL of the database to write to")
