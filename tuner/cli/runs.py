"""Commands about existing runs: `tuner show`, `choose`, `explain`, `compare`, `export`,
`dashboard` and `runs`; and `tuner import`, which makes a run of CSV files.
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import sys
from pathlib import Path
from typing import Any

from tuner.cli.arguments import POINT, add_shared
from tuner.cli.options import (
    OK,
    UNMET,
    add_options,
    add_storage,
    answer,
    columns,
    made_of_options,
)
from tuner.cli.parser import Commands, print_latest, take_latest
from tuner.problem.constraints import Constraints
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.study.csv_import import CsvOptions


def _show(args: argparse.Namespace) -> int:
    from tuner.api import load_result
    from tuner.display.text import summary_lines

    if args.html:
        return _write_page(args)
    if args.out:
        raise InputError("--out is for --html")
    result = load_result(args.run, runs_dir=args.runs_dir)
    answer(args, result.to_json(), summary_lines(result))
    return OK


def _write_page(args: argparse.Namespace) -> int:
    from tuner.api import load_result
    from tuner.display.report import write_report
    from tuner.problem.run_folder import find_run
    from tuner.search_spaces.safe_files import require_own

    folder = find_run(args.run, args.runs_dir)
    result = load_result(folder.path)
    records = folder.records()
    if not args.out:
        require_own(folder.path)
    path = write_report(result, Path(args.out or folder.report), records=records)
    answer(args, {"report": str(path)}, [f"Report: {path}"])
    return OK


def _import(args: argparse.Namespace) -> int:
    from tuner.api import front_of_csv
    from tuner.display.text import summary_lines

    if not args.files:
        raise InputError("name the CSV files: tuner import FILE ...")
    result, read = front_of_csv(
        args.files,
        made_of_options(args, CsvOptions),
        baseline=args.baseline or (),
        name=args.name,
        runs_dir=args.runs_dir,
    )
    answer(args, {**result.to_json(), "read": read}, [read, *summary_lines(result)])
    return OK


def _choose(args: argparse.Namespace) -> int:
    from tuner.api import load_result

    result = load_result(args.run, runs_dir=args.runs_dir)
    chosen = result.choose(made_of_options(args, Constraints))
    answer(args, chosen.to_json(), str(chosen).splitlines())
    return OK if chosen.met else UNMET


def _run_named(word: str, runs_dir: str) -> Path | None:
    from tuner.problem.run_folder import find_run

    try:
        return find_run(word, runs_dir).path
    except UnknownName:
        return None


def _compare(args: argparse.Namespace) -> int:
    from tuner.api import load_result

    words = [word for word in (args.run, *args.points) if word is not None]
    runs = [_run_named(word, args.runs_dir) for word in words]
    if len(words) == 2 and all(runs):
        return _compare_runs(args, *words)
    points = words if words and runs[0] is None else words[1:]
    if len(points) > 2:
        raise InputError("tuner compare takes two runs, or a run and at most two of its points")
    if points and points == words:
        take_latest(args)
    result = load_result(None if points == words else words[0], runs_dir=args.runs_dir)
    a, b = points if len(points) == 2 else ("today", *(points or ["best"]))
    comparison = result.compare(a, b)
    from tuner.formatting import settings_legend

    legend = settings_legend([comparison.a, comparison.b])
    lines = [*comparison.lines(), *([f"({legend})"] if legend else [])]
    answer(args, comparison.to_json(), lines)
    return OK


def _compare_runs(args: argparse.Namespace, one: str, other: str) -> int:
    from tuner.answer.run_difference import compare_runs
    from tuner.api import load_result

    first, second = (load_result(run, runs_dir=args.runs_dir) for run in (one, other))
    try:
        first.point(other)
    except InputError:
        pass
    else:
        raise InputError(
            f"{other!r} is a run and a point of run {one!r}: write {Path(args.runs_dir) / other} "
            f"for the run, or two points: tuner compare {one} today {other}"
        )
    comparison = compare_runs(first, second)
    answer(args, comparison.to_json(), comparison.lines())
    return OK


def _dashboard(args: argparse.Namespace) -> int:
    from tuner.display.dashboard import refresh, serve
    from tuner.display.guard import guarded_url
    from tuner.problem.run_folder import find_run
    from tuner.search_spaces.safe_files import require_own

    # By URL alone: every study that several users keep in one database.
    url = args.storage
    alone = url is not None and args.run is None
    if args.run is None and not alone:
        take_latest(args)
        print_latest(args)
    folder = None if alone else find_run(args.run, args.runs_dir)
    storage: Any
    if folder is None:
        storage, subject = url, "every study of the storage"
    else:
        if url is None:
            require_own(folder.path)
        storage, subject = url or folder.journal, folder.name
        if url is None and not folder.journal.is_file():
            raise InputError(f"{folder.name} keeps no journal; name its storage with --storage URL")
        refresh(folder, url)
    token = secrets.token_urlsafe(32)
    page = guarded_url(args.host, args.port, token)
    lines = [f"{subject} at {page} (Ctrl-C ends it)"]
    if ".localhost:" in page:
        lines.append("A browser that does not find this host finds it as 127.0.0.1.")
    answer(args, {"url": page, "run": subject}, lines)
    sys.stdout.flush()
    serve(storage, token=token, host=args.host, port=args.port)
    return OK


def _explain(args: argparse.Namespace) -> int:
    from tuner.api import load_result

    explanation = load_result(args.run, runs_dir=args.runs_dir).explain(args.at or args.point)
    answer(args, explanation.to_json(), str(explanation).splitlines())
    return OK


def _export(args: argparse.Namespace) -> int:
    from contextlib import nullcontext

    from tuner.deploy.bundle import make_bundle, redacted_copy
    from tuner.display.export import write_csv
    from tuner.problem.run_folder import find_run
    from tuner.study.load import result_of

    kind = {".csv": "csv", ".zip": "bundle"}.get(Path(args.to).suffix.lower())
    if kind is not None:
        raise InputError(f"--to takes the format: --to {kind} --out {shlex.quote(args.to)}")
    run = find_run(args.run, args.runs_dir)
    if args.to == "bundle":
        made = make_bundle(run, Path(args.out) if args.out else None, redact=args.redact)
        answer(args, made.to_json(), made.lines())
        return OK
    if args.to != "csv":
        raise UnknownName("format", args.to, ["csv", "bundle"])
    out = args.out
    if args.redact:
        out = out or f"{run.name}-redacted.csv"
    with redacted_copy(run) if args.redact else nullcontext(run) as source:
        path = write_csv(result_of(source), out)
    data = {"to": args.to, "out": str(path), **({"redacted": True} if args.redact else {})}
    answer(args, data, [f"{args.to}: {path}"])
    return OK


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
        answer(args, [vars(entry) for entry in entries], lines)
        return OK
    if not args.run:
        raise InputError(f"name the runs: tuner runs {args.action} NAME ...")
    act = {"rm": remove_run, "stop": stop_run}[args.action]
    paths = [str(act(args.runs_dir, name)) for name in args.run]
    done = {"rm": "removed", "stop": "ends after the running probes:"}[args.action]
    answer(args, {args.action: paths}, [f"{done} {path}" for path in paths])
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
    csv = commands.command("import", _import, "make a run of CSV files: one row a past run")
    add = csv.add_argument
    add("files", nargs="*", metavar="FILE", help="CSV files with time, energy and knobs")
    add_options(csv, CsvOptions)
    subject = "configuration in use today"
    add("--today", dest="baseline", nargs="+", metavar="KNOB=VALUE", help=subject)
    add("--name", metavar="NAME", help="name of the run")
    add_shared(csv, "--runs-dir")
    choose = commands.of_run(
        "choose", _choose, "choose again under other limits; nothing is measured"
    )
    add_options(choose.add_argument_group("limits and objective of the training job"), Constraints)
    choose.show_first(
        ("run", "--deadline", "--max-slowdown", "--budget", "--minimize", "--json"),
        "tuner choose my-run --max-slowdown 5%",
        "tuner choose my-run --minimize energy",
    )
    compare = commands.of_run("compare", _compare, "compare two points of a run, or two runs")
    text = f"{POINT} (default: today and best); or another run"
    compare.add_argument("points", nargs="*", metavar="POINT|RUN", help=text)
    dashboard = commands.of_run("dashboard", _dashboard, "serve a run's study in optuna-dashboard")
    dashboard.set_defaults(of_run=False)
    add_storage(dashboard, "URL of the database (without RUN, all its studies are served)")
    dashboard.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    dashboard.add_argument("--port", type=int, default=8080, help="port (default: 8080)")
    explain = commands.of_run(
        "explain", _explain, "where a point's time and energy go, and what each knob changes"
    )
    explain.add_argument("at", nargs="?", metavar="POINT", help=f"{POINT} (default: best)")
    explain.add_argument("--point", default="best", metavar="POINT", help="the same")
    export = commands.of_run("export", _export, "a run's points as CSV, or the run as one file")
    text = "csv, or bundle (a zip file)"
    export.add_argument("--to", required=True, metavar="FORMAT", help=text)
    export.add_argument(
        "--out", metavar="PATH", help="file (default: in the run; a bundle, or redacted: here)"
    )
    text = "replace host and user names, paths, and what looks like a secret"
    export.add_argument("--redact", action="store_true", help=text)
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
