"""Runs as files for others: the import of CSV files, and exports of a run."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from tuner.cli.options import OK, add_options, made_of_options, print_answer
from tuner.cli.parser import Commands, add_shared
from tuner.exchange.csv_import import CsvOptions
from tuner.search_spaces.errors import InputError, UnknownName


def _import(args: argparse.Namespace) -> int:
    from tuner.display.text import summary_lines
    from tuner.exchange.csv_import import front_of_csv

    if not args.files:
        raise InputError("name the CSV files: tuner import FILE ...")
    result, read = front_of_csv(
        args.files,
        made_of_options(args, CsvOptions),
        baseline=args.baseline or (),
        name=args.name,
        runs_dir=args.runs_dir,
    )
    print_answer(args, {**result.to_json(), "read": read}, [read, *summary_lines(result)])
    return OK


def _export(args: argparse.Namespace) -> int:
    from contextlib import nullcontext

    from tuner.display.export import write_csv
    from tuner.exchange.archive import REDACTION, redacted_copy, write_zip
    from tuner.problem.run_folder import find_run
    from tuner.study.load import answer_of_run

    kind = Path(args.to).suffix.lower().removeprefix(".")
    if kind in ("csv", "zip"):
        raise InputError(f"--to takes the format: --to {kind} --out {shlex.quote(args.to)}")
    if args.to not in ("csv", "zip"):
        raise UnknownName("format", args.to, ["csv", "zip"])
    run = find_run(args.run, args.runs_dir)
    data: dict[str, Any] = {"to": args.to, **({"redacted": True} if args.redact else {})}
    if args.to == "zip":
        data |= write_zip(run, Path(args.out) if args.out else None, redact=args.redact)
        whole = "contains    host names, paths and arguments; --redact replaces them"
        redacted = f"redacted    {REDACTION}; read it before you publish it"
        lines = [
            f"zip         {data['out']}, {data['files']} files",
            redacted if args.redact else whole,
            f"sha256      {data['sha256']}",
            f"open it     tuner show {shlex.quote(data['out'])}",
        ]
        print_answer(args, data, lines)
        return OK
    out = args.out
    if args.redact:
        out = out or f"{run.name}-redacted.csv"
    with redacted_copy(run) if args.redact else nullcontext(run) as source:
        data["out"] = str(write_csv(answer_of_run(source), out))
    print_answer(args, data, [f"csv: {data['out']}"])
    return OK


def add(commands: Commands) -> None:
    """Add the commands of this module."""
    csv = commands.command("import", _import, "make a run of CSV files: one row a past run")
    add = csv.add_argument
    add("files", nargs="*", metavar="FILE", help="CSV files with time, energy and knobs")
    add_options(csv, CsvOptions)
    subject = "configuration in use today"
    add("--today", dest="baseline", nargs="+", metavar="KNOB=VALUE", help=subject)
    add("--name", metavar="NAME", help="name of the run")
    add_shared(csv, "--runs-dir")
    export = commands.of_run("export", _export, "a run's points as CSV, or the run as one file")
    text = "csv, or zip (the run as one file, which tuner show reads)"
    export.add_argument("--to", required=True, metavar="FORMAT", help=text)
    export.add_argument(
        "--out", metavar="PATH", help="file (default: in the run; a zip file, or redacted: here)"
    )
    text = "replace host and user names, paths, and what looks like a secret"
    export.add_argument("--redact", action="store_true", help=text)
