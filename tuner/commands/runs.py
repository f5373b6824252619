"""What is done with a run that stands: `tuner front`, `compare`, `report`, `dashboard`, `apply`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tuner.commands.shared import OK, Commands, answer


def _front(args: argparse.Namespace) -> int:
    from tuner.api import load_result
    from tuner.summary import summary_lines

    result = load_result(args.run, runs_dir=args.runs_dir)
    answer(args, result.to_json(), summary_lines(result))
    return OK


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
    from tuner.dashboard import serve
    from tuner.runs import find_run

    folder = find_run(args.run, args.runs_dir)
    url = f"http://{args.host}:{args.port}/"
    answer(args, {"url": url, "run": folder.name}, [f"{folder.name} at {url} (Ctrl-C ends it)"])
    sys.stdout.flush()
    serve(args.storage or folder.journal, host=args.host, port=args.port)
    return OK


def _apply(args: argparse.Namespace) -> int:
    from tuner.api import load_result
    from tuner.launch_files import write_launch_files
    from tuner.runs import find_run

    folder = find_run(args.run, args.runs_dir)
    result = load_result(folder.path)
    out = Path(args.out or folder.path / "best")
    files = [str(path) for path in write_launch_files(result, out)]
    chosen = result.best.to_json() if result.best else None
    answer(args, {"files": files, "best": chosen}, [result.choice.sentence, *files])
    return OK


def add(commands: Commands) -> None:
    """The commands of this module."""
    commands.of_run("front", _front, "the front of a run and the choice on it")
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
    dashboard.add_argument("--storage", metavar="URL", help="where the study was kept by URL")
    dashboard.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    dashboard.add_argument("--port", type=int, default=8080, help="port (default: 8080)")
    out = commands.of_run("apply", _apply, "write the files that start the job as chosen")
    out.add_argument("--out", metavar="DIR", help="where to (default: best in the run)")
