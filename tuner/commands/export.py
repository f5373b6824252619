"""`tuner export`: a run's answer for other tools."""

from __future__ import annotations

import argparse

from tuner.commands.shared import OK, Commands, answer


def _export(args: argparse.Namespace) -> int:
    from tuner.api import load_result

    result = load_result(args.run, runs_dir=args.runs_dir)
    path = result.export(args.to, args.out)
    answer(args, {"to": args.to, "out": str(path)}, [f"{args.to}: {path}"])
    return OK


def add(commands: Commands) -> None:
    """The command of this module."""
    export = commands.of_run("export", _export, "a run's points as CSV, Parquet, T4, W&B or MLflow")
    export.add_argument(
        "--to", required=True, metavar="FORMAT", help="csv, parquet, t4, wandb or mlflow"
    )
    export.add_argument("--out", metavar="PATH", help="file or folder (default: in the run)")
