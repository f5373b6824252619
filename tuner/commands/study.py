"""`tuner optimize` and `tuner replay`: a study, by processes or from a recording."""

from __future__ import annotations

import argparse

from search_spaces.errors import InputError
from tuner.commands.shared import (
    FAILED,
    OK,
    Commands,
    add_choices,
    add_script,
    answer,
    choices,
    progress,
    script_of,
)


def _optimize(args: argparse.Namespace) -> int:
    from tuner.api import optimize
    from tuner.summary import summary_lines

    if args.job and args.job_option:
        raise InputError(f"give the job once: {args.job!r} or --job {args.job_option!r}")
    args.job = args.job or args.job_option
    if args.job and args.script:
        raise InputError(f"give either the job {args.job!r} or --script")
    with progress(args) as on_progress:
        result = optimize(
            script_of(args) or args.job,
            cluster=args.cluster,
            space=args.space,
            executor=args.executor,
            ray_address=args.ray,
            device_kind=args.device_kind,
            baseline=args.baseline,
            in_flight=args.in_flight,
            target_gpus=args.target_gpus,
            on_progress=on_progress,
            **choices(args),
        )
    answer(args, result.to_json(), ["", *summary_lines(result)])
    return OK if result.points else FAILED


def _replay(args: argparse.Namespace) -> int:
    from tuner.api import replay
    from tuner.summary import summary_lines

    with progress(args) as on_progress:
        result = replay(
            args.path,
            group=args.group,
            steps=args.steps,
            in_flight=args.in_flight,
            on_progress=on_progress,
            **choices(args),
        )
    answer(args, result.to_json(), ["", *summary_lines(result)])
    return OK if result.points else FAILED


def add(commands: Commands) -> None:
    """The commands of this module."""
    optimize = commands.command("optimize", _optimize, "tune a job on this machine or cluster")
    optimize.add_argument("job", nargs="?", metavar="JOB", help="a job file or a name")
    optimize.add_argument("--job", dest="job_option", metavar="JOB", help="the same, as an option")
    optimize.add_argument("--cluster", default="auto", metavar="NAME", help="auto, name or file")
    optimize.add_argument("--space", default="default", metavar="NAME", help="name or file")
    optimize.add_argument(
        "--executor",
        metavar="NAME",
        help="ray, inline or simulated (default: simulated for another kind of machine, else ray)",
    )
    optimize.add_argument(
        "--baseline",
        nargs="+",
        metavar="FILE|KNOB=VALUE",
        help="what you run today: your DeepSpeed JSON and flags (default: plain data parallelism)",
    )
    optimize.add_argument("--ray", metavar="ADDRESS", help="run on this Ray: auto or HOST:PORT")
    optimize.add_argument(
        "--device-kind", metavar="NAME", help="which kind of device of the Ray cluster to use"
    )
    optimize.add_argument("--in-flight", type=int, metavar="N", help="probes together, simulated")
    optimize.add_argument(
        "--target-gpus", type=int, metavar="N", help="also predict the front for so many GPUs"
    )
    add_script(optimize)
    add_choices(optimize)

    replay = commands.command("replay", _replay, "the same study, answered from a trace or a table")
    replay.add_argument("path", metavar="PATH", help="a table's folder, a run, or a trace")
    replay.add_argument("--group", metavar="NAME", help="which search problem of the table")
    replay.add_argument("--steps", type=int, metavar="N", help="units of work of the solution")
    replay.add_argument("--in-flight", type=int, default=1, metavar="N", help="probes together")
    add_choices(replay)
