"""`tuner optimize`: a search by real probes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tuner.cli.options import (
    FAILED,
    OK,
    UNMET,
    add_options,
    add_script,
    add_storage,
    made_of_options,
    print_answer,
    progress,
    require_trust,
    script_of,
)
from tuner.cli.parser import Commands, add_shared
from tuner.problem.constraints import Constraints
from tuner.problem.job_request import JobRequest
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.plugins import extra_module
from tuner.study.request import StudyRequest

if TYPE_CHECKING:
    from tuner.result import Result


def _optimize(args: argparse.Namespace) -> int:
    from tuner.api import search_for
    from tuner.workload.scripts.user_code import of_files

    if args.job and args.script:
        raise InputError(f"give either the job {args.job!r} or --script")
    script = script_of(args)
    if not args.job and script is None:
        raise InputError(
            "name what to tune: tuner optimize --steps N -- torchrun ... train.py, or a built-in "
            "job: tuner optimize tiny-gpt"
        )
    request = made_of_options(
        args,
        StudyRequest,
        job=args.job,
        script=script,
        cluster=args.cluster,
        space=args.space,
        constraints=made_of_options(args, Constraints),
        search=made_of_options(args, SearchSettings),
        baseline=args.baseline,
        knobs=(*args.knobs, *args.knob),
        device_kind=args.device_kind,
        storage=args.storage,
        runs_dir=args.runs_dir,
    )
    if args.dry_run:
        preview = extra_module("tuner.doctor.dry_run", "tuner optimize --dry-run")
        described = preview.dry_run(request)
        print_answer(args, described.to_json(), described.lines(), fit=False)
        return OK
    if args.executor != "simulated":
        starts = of_files(args.knobs, script.framework if script else None, args.job)
        require_trust(args, starts)
    with progress(args) as on_progress:
        result = search_for(request, progress=False, on_progress=on_progress)
    from tuner.display.text import answer_lines  # a command that fails needs none of it

    print_answer(args, result.to_json(), ["", *answer_lines(result)])
    return exit_code(result)


def exit_code(result: Result) -> int:
    """Return the exit code of a search."""
    if not result.points:
        return FAILED
    return OK if result.choice.met else UNMET


#: Options of a request that a replay has, too.
OF_SEARCH = ("try_first",)


def add_study(parser: argparse.ArgumentParser) -> None:
    """Add the options of a search, of its run and of its progress."""
    add_options(parser.add_argument_group("limits and objective of the training job"), Constraints)
    group = parser.add_argument_group("limits of the search")
    add_options(group, SearchSettings)
    add_options(group, StudyRequest, only=OF_SEARCH)
    group = parser.add_argument_group("the run and its progress")
    add = group.add_argument
    add_storage(group, "URL of the study's database")
    add_options(group, StudyRequest, only=("name",))
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
    optimize = commands.command(
        "optimize",
        _optimize,
        "tune a job on this machine or cluster",
        hint="put -- before your command: tuner optimize [OPTIONS] -- {command}",
        usage="tuner optimize [OPTIONS] [JOB | -- COMMAND ...]",
    )
    job = optimize.add_argument_group("the job and what to try")
    add = job.add_argument
    add_shared(job, "JOB")
    add_shared(job, "--space", "--today", "--knob", "--knobs")
    add_options(job, JobRequest)
    add(
        "--dry-run",
        action="store_true",
        help="print what the search would take, start, write and set, and stop",
    )
    add_options(job, StudyRequest, only=("plan",))
    add_script(optimize)
    add_shared(optimize, "--trust")
    where = optimize.add_argument_group("where to run it")
    add_shared(where, "--cluster")
    add_options(where, StudyRequest, only=("executor", "ray_address", "meter"))
    add_shared(where, "--device-kind")
    add_study(optimize)
    optimize.show_first(
        (
            *("--steps", "--global-batch", "--knob", "--deadline", "--max-slowdown"),
            *("--minimize", "--search-time", "--name"),
        ),
        "tuner optimize --steps 5000 -- torchrun --nproc-per-node 8 train.py --lr 3e-4",
        "tuner optimize --max-slowdown 5% -- torchrun train.py --batch-size {micro_batch=32}",
    )
