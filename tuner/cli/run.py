"""`tuner run`: a command that is only measured, one that is tuned meanwhile, or a point of a run.

Each of the three is an extra; here are their options.
"""

from __future__ import annotations

import argparse
from typing import Any

from tuner.cli.options import add_options, given_options
from tuner.cli.parser import Commands, add_shared
from tuner.problem.constraints import Constraints
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.plugins import extra_module

#: Limits that a tuned training can keep.
OF_TUNING = ("max_slowdown", "budget_kJ", "deadline_s", "power_cap_W")


#: Options of `tuner run` that belong to the point of a run, and their defaults.
_OF_POINT: dict[str, tuple[str, Any]] = {
    "--point": ("point", "recommended"),
    "--steps": ("steps", None),
    "--no-clocks": ("clocks", True),
}


def _add_options_of_measuring(parser: Any) -> None:
    """Add the options of a measured command."""
    group = parser.add_argument_group("only measure: the command after --, without RUN")
    group.add_argument(
        "--out",
        metavar="FILE",
        help="file of the receipt (default: energy.json in a new folder of RUNS/receipts)",
    )
    group.add_argument(
        "--samples",
        type=float,
        metavar="N",
        help="samples of an optimizer step, over all ranks (default: counted)",
    )
    group.add_argument(
        "--slurm-comment",
        action="store_true",
        help="also set the receipt as the comment of the Slurm job",
    )
    group.add_argument("--meter", metavar="MODULE:CLASS", help="a meter of your own")


def _given_of_measuring(args: argparse.Namespace) -> list[str]:
    """Return the options of a measured command that were given."""
    given = {
        "--out": args.out is not None,
        "--samples": args.samples is not None,
        "--slurm-comment": args.slurm_comment,
        "--meter": args.meter is not None,
    }
    return [flag for flag, is_given in given.items() if is_given]


def _run(args: argparse.Namespace) -> int:
    if args.run is not None or not args.program or args.tune or args.follow_power:
        for flag in _given_of_measuring(args):
            raise InputError(f"{flag} is for a command that is only measured: tuner run -- ...")
    if args.tune or args.follow_power:
        online = extra_module("tuner.online.command", "tuner run --tune")
        tuned: int = online.tune_command(args)
        return tuned
    if given := given_options(args, Constraints, only=OF_TUNING):
        raise InputError(f"{' and '.join(given)}: limits of a run are for --tune")
    if args.transfer is not None or args.knob or args.knobs:
        raise InputError("--transfer, --knob and --knobs are for --tune")
    if args.metrics_port is not None or args.metrics_file is not None:
        raise InputError("--metrics-port and --metrics-file are for --tune and --follow-power")
    if args.run is None and args.program:
        for flag, (name, default) in _OF_POINT.items():
            if getattr(args, name) != default:
                raise InputError(
                    f"{flag} is of a run's point; name the run: tuner run RUN {flag} ..."
                )
        receipt = extra_module("tuner.receipt.command", "tuner run -- COMMAND")
        measured: int = receipt.measure_command(args)
        return measured
    deploy = extra_module("tuner.deploy.command", "tuner run RUN")
    code: int = deploy.train_command(args)
    return code


def add(commands: Commands) -> None:
    """Add the command of this module."""
    run = commands.of_run(
        "run",
        _run,
        "measure a command as it stands, or train as a run recommends",
        hint="a command to measure follows --: tuner run -- python train.py",
        usage="tuner run [options] -- COMMAND ... | tuner run RUN [options] [-- PROGRAM ...]",
    )
    _add_options_of_measuring(run)
    add_shared(run, "--point")
    text = (
        "steps of the built-in program (default: the job's), or of the tuned training, if "
        "its framework does not say (for --deadline and --budget)"
    )
    run.add_argument("--steps", type=int, metavar="N", help=text)
    run.add_argument(
        "--no-clocks", dest="clocks", action="store_false", help="leave the clocks as they are"
    )
    run.add_argument(
        "--tune",
        action="store_true",
        help="tune the clocks while the command after -- trains; begins with what RUN, if named, "
        "measured of --point",
    )
    text = "with --tune: begin with what a study or an earlier tuned training measured"
    run.add_argument("--transfer", metavar="FOLDER", help=text)
    add_options(
        run.add_argument_group("limits of a tuned training (default: a slowdown of 5%)"),
        Constraints,
        only=OF_TUNING,
    )
    text = "follow a target by the clocks while the command after -- trains: watts, or none"
    run.add_argument("--follow-power", metavar="FILE|URL", help=text)
    run.add_argument(
        "--metrics-port",
        metavar="[HOST:]PORT",
        help="with --tune or --follow-power: serve metrics for Prometheus (default host: loopback)",
    )
    run.add_argument(
        "--metrics-file", metavar="FILE", help="the same in a file, while the training runs"
    )
    for flag, metavar in (("--knob", "live:NAME=VALUE,..."), ("--knobs", "FILE")):
        text = "live knobs for --tune; repeatable"
        run.add_argument(flag, action="append", default=[], metavar=metavar, help=text)
    add_shared(run, "--trust", "--quiet")
    run.show_first(
        ("run", "--out", "--slurm-comment", "--point", "--tune", "--max-slowdown", "--json"),
        "tuner run -- torchrun --nproc-per-node 8 train.py          only measure it",
        "tuner run RUN -- train.py                                  train as RUN recommends",
        "tuner run --tune -- torchrun --nproc-per-node 8 train.py   tune the clocks meanwhile",
    )
