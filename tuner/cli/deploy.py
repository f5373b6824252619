"""`tuner apply` and `tuner run`: launch files of a chosen point, and training with it."""

from __future__ import annotations

import argparse
import shlex
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from tuner.cli import measure
from tuner.cli.arguments import add_shared
from tuner.cli.options import (
    FAILED,
    INTERRUPTED,
    OK,
    UNMET,
    add_options,
    announcer,
    answer,
    given_options,
    made_of_options,
    require_trust,
)
from tuner.cli.parser import Commands
from tuner.problem.constraints import Constraints
from tuner.search_spaces.errors import InputError
from tuner.terminal import SafeStream, VisibleStream, raw_stream

if TYPE_CHECKING:
    from tuner.online.earlier_measurements import EarlierMeasurements


#: Limits that a tuned training can keep.
_OF_TUNING = ("max_slowdown", "budget_kJ", "deadline_s", "power_cap_W")


def _apply(args: argparse.Namespace) -> int:
    from tuner.api import load_result
    from tuner.deploy.launch_files import clock_settings, synthetic_notice, write_launch_files
    from tuner.display.advice import advice_lines, evidence_sentence
    from tuner.display.text import legend_lines
    from tuner.display.view import View
    from tuner.problem.run_folder import find_run
    from tuner.search_spaces.safe_files import require_own

    folder = find_run(args.run, args.runs_dir)
    require_own(folder.path)  # wherever the files go, they start what this folder says
    result = load_result(folder.path)
    named = "best" if args.point == "recommended" else f"point-{args.point}"
    tidy = named if named.replace("-", "").isalnum() else "point"
    out = Path(args.out or folder.path / tidy)
    inside = None if args.out else folder.path
    written = write_launch_files(
        result, out, point=args.point, ray_train=args.ray_train, inside=inside
    )
    files = [str(path) for path in written]
    point = result.point(args.point)
    lines = advice_lines(result)
    lines += [sentence] if (sentence := evidence_sentence(result)) else []
    if args.point != "recommended":
        lines = [f"Point {args.point}: {point.configuration.short}"]
    notice = synthetic_notice(result.job) if result.job is not None else ""
    start = "./clocks.sh ./launch.sh" if clock_settings(point.configuration) else "./launch.sh"
    unmet = args.point in ("recommended", "best") and not result.choice.met
    if unmet and result.choice.sentence not in lines:
        lines.append(result.choice.sentence)
    if unmet:
        found = View(result).words.found
        lines.append(f"No {found} configuration meets the limits; these files start the nearest:")
    lines += legend_lines([*lines, point.configuration.short])
    lines += [*files, *([f"{notice}."] if notice else [])]
    data = {
        "files": files,
        "best": result.best.to_json() if result.best else None,
        "point": point.to_json(),
        "recommendation": result.recommendation.to_json() if result.recommendation else None,
        **{"synthetic": bool(notice), "met": not unmet},
    }
    lines.append(f"Start it with: cd {shlex.quote(str(out))} && {start}")
    answer(args, data, lines)
    return UNMET if unmet else OK


def _tune(args: argparse.Namespace) -> int:
    from tuner.display.online_text import tuning_json, tuning_lines
    from tuner.online.agent import tune
    from tuner.online.metrics import Metrics
    from tuner.online.request import TuningRequest
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
        made_of_options(args, Constraints, only=_OF_TUNING),
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
    from tuner.online.earlier_measurements import earlier_of

    if args.run is not None and args.transfer is not None:
        raise InputError("name a run, or --transfer with an earlier tuned training, and not both")
    if args.transfer is not None:
        return earlier_of(Path(args.transfer))
    if args.run is None:
        return None
    from tuner.problem.run_folder import find_run

    return earlier_of(find_run(args.run, args.runs_dir).path, args.point)


def _run(args: argparse.Namespace) -> int:
    if args.run is not None or not args.program or args.tune or args.follow_power:
        for flag in measure.given_options(args):
            raise InputError(f"{flag} is for a command that is only measured: tuner run -- ...")
    if args.tune or args.follow_power:
        return _tune(args)
    if given := given_options(args, Constraints, only=_OF_TUNING):
        raise InputError(f"{' and '.join(given)}: limits of a run are for --tune")
    if args.transfer is not None or args.knob or args.knobs:
        raise InputError("--transfer, --knob and --knobs are for --tune")
    if args.metrics_port is not None or args.metrics_file is not None:
        raise InputError("--metrics-port and --metrics-file are for --tune and --follow-power")
    if args.run is None and args.program:
        return measure.measure_command(args)
    from tuner.api import load_result
    from tuner.deploy.train import train
    from tuner.problem.run_folder import find_run
    from tuner.search_spaces.safe_files import require_own

    # With --json standard output is the answer alone. A file or a pipe gets what the program prints
    # byte for byte; a terminal does not get its control characters.
    output = sys.stderr if args.json else sys.stdout
    stream = VisibleStream if output.isatty() else SafeStream
    folder = find_run(args.run, args.runs_dir)
    require_own(folder.path)
    result = load_result(folder.path)
    done = train(
        result,
        args.point,
        program=args.program,
        steps=args.steps,
        clocks=args.clocks,
        announce=announcer(args, "tuner: "),
        output=cast(TextIO, stream(raw_stream(output), may_fail=True)),
    )
    answer(args, done.to_json(), done.lines())
    if done.interrupted:
        return INTERRUPTED
    return OK if done.failure is None else FAILED


def add(commands: Commands) -> None:
    """Add the commands of this module."""
    apply = commands.of_run("apply", _apply, "write the files that start the job as recommended")
    add_shared(apply, "--point")
    apply.add_argument("--out", metavar="DIR", help="output folder (default: best in the run)")
    text = "also write what Ray Train's TorchTrainer takes: ray_train.json"
    apply.add_argument("--ray-train", action="store_true", help=text)

    run = commands.of_run(
        "run",
        _run,
        "measure a command as it stands, or train as a run recommends",
        hint="a command to measure follows --: tuner run -- python train.py",
        usage="tuner run [options] -- COMMAND ... | tuner run RUN [options] [-- PROGRAM ...]",
    )
    measure.add_options(run)
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
        only=_OF_TUNING,
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
