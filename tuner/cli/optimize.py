"""`tuner optimize` and `tuner dev replay`: a study on processes or on a recording."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cli.arguments import add_shared
from tuner.cli.options import (
    FAILED,
    OK,
    UNMET,
    add_options,
    add_script,
    add_storage,
    answer,
    made_of_options,
    on_data,
    progress,
    script_of,
    storage_of,
)
from tuner.cli.parser import Commands
from tuner.cli.trust import require_trust
from tuner.problem.constraints import Constraints
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.errors import InputError

if TYPE_CHECKING:
    from tuner.results.result import Result


def _optimize(args: argparse.Namespace) -> int:
    from tuner.api import optimize
    from tuner.display.answer import answer_lines
    from tuner.problem.file_starts import of_files

    if args.job and args.script:
        raise InputError(f"give either the job {args.job!r} or --script")
    if args.data and args.script:
        raise InputError("--data is for a job; a script reads its own")
    question: dict[str, Any] = {
        "cluster": args.cluster,
        "space": args.space,
        "constraints": made_of_options(args, Constraints),
        "search": made_of_options(args, SearchSettings),
        "baseline": args.baseline,
        "clocks": args.clocks,
        "knobs": (*args.knobs, *args.knob),
        "allow_changed_training": args.allow_changed_training,
        "executor": args.executor,
        "ray_address": args.ray,
        "device_kind": args.device_kind,
        "name": args.name,
        "runs_dir": args.runs_dir,
    }
    job = script_of(args) or on_data(args.job, args.data)
    if args.dry_run:
        from tuner.api import dry_run

        described = dry_run(job, **question)
        answer(args, described.to_json(), described.lines())
        return OK
    if args.executor != "simulated":
        starts = of_files(args.knobs, getattr(job, "framework", None), args.job)
        require_trust(args, starts, "a file that you name")
    with progress(args) as on_progress:
        result = optimize(
            job,
            **question,
            transfer=args.transfer,
            plan=args.plan,
            try_first=args.try_first,
            prefer=args.prefer,
            sampler=args.sampler,
            surrogate=args.surrogate,
            storage=storage_of(args),
            progress=False,
            on_progress=on_progress,
        )
    answer(args, result.to_json(), ["", *answer_lines(result)], fit=True)
    return _exit_code(result)


def _exit_code(result: Result) -> int:
    if not result.points:
        return FAILED
    return OK if result.choice.met else UNMET


def _replay(args: argparse.Namespace) -> int:
    from tuner.api import replay
    from tuner.display.answer import answer_lines

    run = Path(args.runs_dir) / args.path
    with progress(args) as on_progress:
        result = replay(
            run if run.is_dir() and not Path(args.path).exists() else args.path,
            group=args.group,
            steps=args.steps,
            in_flight=args.in_flight,
            constraints=made_of_options(args, Constraints),
            search=made_of_options(args, SearchSettings),
            transfer=args.transfer,
            try_first=args.try_first,
            prefer=args.prefer,
            sampler=args.sampler,
            surrogate=args.surrogate,
            storage=storage_of(args),
            name=args.name,
            runs_dir=args.runs_dir,
            progress=False,
            on_progress=on_progress,
        )
    answer(args, result.to_json(), ["", *answer_lines(result)], fit=True)
    return _exit_code(result)


def _add_study(parser: argparse.ArgumentParser) -> None:
    add_options(parser.add_argument_group("limits and objective of the training job"), Constraints)
    group = parser.add_argument_group("limits of the search")
    add_options(group, SearchSettings)
    group.add_argument(
        "--sampler",
        metavar="NAME",
        help="joulefront, tpe, nsgaii, gp or random (default: joulefront)",
    )
    group.add_argument(
        "--surrogate",
        metavar="TEXT",
        help="model of step time and power: gaussian-process, or a scikit-learn regressor as "
        "sklearn.MODULE.CLASS(NAME=VALUE) (default: gaussian-process)",
    )
    group.add_argument(
        "--transfer",
        action="append",
        default=[],
        metavar="RUN|TABLE",
        help="earlier measurements to start from, of this job elsewhere or of another; repeatable",
    )
    group.add_argument(
        "--try",
        dest="try_first",
        action="append",
        default=[],
        metavar="CONFIGURATION",
        help="probe this configuration first: 'dp8 mb4 zero1'; repeatable",
    )
    group.add_argument(
        "--prefer",
        action="append",
        default=[],
        metavar="KNOB=VALUE:WEIGHT",
        help="knob values that are expected to be good, such as 'zero1:3 mb8:2', with weights over "
        "the 1 of other values; the more is measured, the less they count; repeatable",
    )
    group = parser.add_argument_group("the run and its progress")
    add = group.add_argument
    add_storage(group, "URL of the study's database")
    add("--name", metavar="NAME", help="name of the run; an existing run is continued")
    add_shared(group, "--runs-dir", "--quiet")
    add(
        "-v",
        "--verbose",
        action="store_true",
        help="print each step of a probe, and why it is made",
    )
    add("--log-file", metavar="FILE", help="append every step of the search to this file")
    add("--plain", action="store_true", help="print progress as plain lines, even at a terminal")


def add(commands: Commands) -> None:
    """Add the commands of this module."""
    optimize = commands.command("optimize", _optimize, "tune a job on this machine or cluster")
    optimize.usage = "tuner optimize [OPTIONS] [JOB | -- COMMAND ...]"
    job = optimize.add_argument_group("the job and what to try")
    add = job.add_argument
    add_shared(job, "JOB")
    add_shared(job, "--space", "--today", "--data", "--knob", "--knobs")
    add(
        "--allow-changed-training",
        action="store_true",
        help="also search knobs that are declared to change what is learnt",
    )
    add(
        "--no-clocks",
        dest="clocks",
        action="store_false",
        help="leave clocks and power limits alone",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print what the search would take, start, write and set, and stop",
    )
    add("--plan", metavar="RUN", help="begin with the probes that this plan names")
    add_script(optimize)
    add_shared(optimize, "--trust")
    where = optimize.add_argument_group("where to run it")
    add = where.add_argument
    add_shared(where, "--cluster")
    add(
        "--executor",
        metavar="NAME",
        help="ray, inline or simulated, which answers probes by predictions (default: ray, or "
        "inline without Ray)",
    )
    add("--ray", metavar="ADDRESS", help="Ray cluster to run on: auto or HOST:PORT")
    add_shared(where, "--device-kind")
    _add_study(optimize)
    optimize.show_first(
        (
            *("--steps", "--global-batch", "--knob", "--deadline", "--max-slowdown"),
            *("--minimize", "--search-time", "--name"),
        ),
        "tuner optimize --steps 5000 -- torchrun --nproc-per-node 8 train.py --lr 3e-4",
        "tuner optimize --max-slowdown 5% -- torchrun train.py --batch-size {micro_batch=32}",
    )


def add_replay(commands: Commands) -> None:
    """Add the command `tuner dev replay`."""
    replay = commands.command("replay", _replay, "run a study on a trace or a recorded table")
    add = replay.add_argument
    add("path", metavar="PATH", help="folder of a table, run or its folder, or trace")
    add("--group", metavar="NAME", help="search problem of a table that holds several")
    add("--steps", type=int, metavar="N", help="steps of the whole training")
    add(
        "--in-flight",
        type=int,
        default=1,
        metavar="N",
        help="probes that run together (default: 1)",
    )
    _add_study(replay)
    replay.show_first(
        ("path", "--group", "--steps", "--max-probes", "--deadline", "--minimize", "--name"),
        "tuner dev replay my-table --steps 1000",
        "tuner dev replay runs/first --max-probes 10 --name again",
    )
