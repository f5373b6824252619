"""`tuner run --tune` and `--follow-power`: clocks that are set while a command trains."""

from __future__ import annotations

import argparse
from contextlib import ExitStack, closing
from pathlib import Path

from tuner.cli.options import announcer, answer, made_of_options, require_trust
from tuner.cli.run import OF_TUNING
from tuner.online.earlier_measurements import EarlierMeasurements, earlier_of
from tuner.problem.constraints import Constraints
from tuner.search_spaces.errors import InputError


def tune_command(args: argparse.Namespace) -> int:
    """Run the command after -- with tuned clocks, and print how it went; return the exit code."""
    from tuner.online.agent import tune
    from tuner.online.metrics import Metrics
    from tuner.online.request import TuningRequest
    from tuner.online.text import tuning_json, tuning_lines
    from tuner.receipt.measure import end_as
    from tuner.search_spaces.knob_declarations import load_pack, parse_knob
    from tuner.workload.scripts.user_code import of_files

    subject = "--tune" if args.tune else "--follow-power"
    if args.tune and args.follow_power:
        raise InputError("--follow-power sets the clocks by its target; leave out --tune")
    if not args.clocks:
        raise InputError(f"{subject} sets the clocks; leave out --no-clocks")
    if not args.program:
        raise InputError(f"{subject} needs the command that trains after --: -- torchrun ...")
    request = TuningRequest(
        made_of_options(args, Constraints, only=OF_TUNING),
        args.steps,
        args.follow_power,
        _earlier(args),
        Path(args.runs_dir) / "tuned" if args.tune else None,
        (*(k for pack in args.knobs for k in load_pack(pack).knobs), *map(parse_knob, args.knob)),
    )
    require_trust(args, of_files(args.knobs, None, None))
    output = 2 if args.json else None  # with --json standard output is the answer alone
    announce = announcer(args, "tuner: ")
    with ExitStack() as publishing:
        metrics = None
        if args.metrics_port is not None or args.metrics_file is not None:
            metrics = publishing.enter_context(
                closing(Metrics(args.metrics_file, announce=announce))
            )
        if metrics is not None and args.metrics_port is not None:
            publishing.enter_context(metrics.served(args.metrics_port))
        done = tune(
            args.program,
            request,
            metrics=metrics,
            announce=announce,
            output=output,
            ignored=args.ignored_signals,
        )
    answer(args, tuning_json(done), tuning_lines(done))
    return end_as(done.exit_code)


def _earlier(args: argparse.Namespace) -> EarlierMeasurements | None:
    # Measurements that a tuned training begins with, if a run of them is named.
    if args.run is not None and args.transfer is not None:
        raise InputError("name a run, or --transfer with an earlier tuned training, and not both")
    if args.transfer is not None:
        return earlier_of(Path(args.transfer))
    if args.run is None:
        return None
    from tuner.problem.run_folder import find_run

    return earlier_of(find_run(args.run, args.runs_dir).path, args.point)
