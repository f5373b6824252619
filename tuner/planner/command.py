"""`tuner plan` predicts all configurations; `tuner fit` one, and changes that make it fit."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cli.options import (
    OK,
    UNMET,
    add_options,
    given_options,
    made_of_options,
    print_answer,
    progress,
)
from tuner.cli.parser import Commands, add_shared
from tuner.problem.constraints import Constraints
from tuner.problem.job_request import JobRequest
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import whole_number

if TYPE_CHECKING:
    from tuner.search_spaces.job import TrainingJob


def _plan(args: argparse.Namespace) -> int:
    given = any((args.job, args.space, args.baseline, args.cluster != "auto"))
    if args.run is not None and (given or given_options(args, JobRequest)):
        raise InputError("--run says what is trained, where and in which space; give --gpus")
    from tuner.display.text import answer_lines
    from tuner.planner.plan import PlanRequest, plan_for

    job, lines = args.job, list[str]()
    if named := _framework_named(args.job, args):
        if args.run is not None:
            raise InputError("--run says what is trained; leave the file or the command out")
        job, lines = _stated_job(named, args)
    if job is None and args.run is None:
        raise InputError(
            "name what to plan: tuner plan opt-350m --cluster a100-8 (`tuner list jobs` and "
            "`tuner list clusters` list more), or a file of yours"
        )
    request = made_of_options(
        args,
        PlanRequest,
        name=args.name,
        job=job,
        cluster=args.cluster,
        space=args.space,
        constraints=made_of_options(args, Constraints),
        baseline=args.baseline,
        runs_dir=args.runs_dir,
        gpus=_numbers(args.gpus),
        run=args.run,
    )
    with progress(args) as on_progress:
        result = plan_for(request, progress=False, on_progress=on_progress)
    data = {**result.to_json(), "read": lines} if lines else result.to_json()
    print_answer(args, data, [*lines, *answer_lines(result)])
    return OK if result.choice.met else UNMET


def _stated_job(named: str | list[str], args: argparse.Namespace) -> tuple[TrainingJob, list[str]]:
    """Return the job of a framework's file or command, and notes on it.

    Its configuration is what is run today, if --today names no other.
    """
    from tuner.planner.stated_training import stated_plan

    found = stated_plan(named, args.cluster, model_config=args.model_config)
    if args.baseline is None:
        args.baseline = found.configuration
    doubts = [f"Doubtful: {sentence}." for sentence in found.training.doubts]
    return found.job, [*doubts, *found.sentences]


def _numbers(text: str | None) -> list[int]:
    """Return the numbers of GPUs in "8,16,32"."""
    if text is None:
        return []
    found = []
    for word in text.split(","):
        if not (number := whole_number(word.strip())):
            raise InputError(f"--gpus takes numbers such as 8,16,32, not {word.strip()!r}")
        found.append(number)
    return found


def _framework_named(job: str | None, args: argparse.Namespace) -> str | list[str] | None:
    """Return the framework's file or command in the arguments; None for a job."""
    from tuner.workload.scripts.frameworks.commands import is_training_file

    program: list[str] = args.program
    if program and job:
        raise InputError(f"give either {job!r} or a command after --")
    named = program or (job if job is not None and is_training_file(job) else None)
    if args.model_config is not None and not named:
        raise InputError("--model-config is for a framework's file or command")
    return named


def _fit(args: argparse.Namespace) -> int:
    from tuner.planner.evaluate import forecast
    from tuner.planner.fit import fit
    from tuner.planner.text import fit_lines
    from tuner.search_spaces.configuration import Configuration
    from tuner.search_spaces.knobs import split_words, values_of

    jobs, knobs = split_words(args.what)
    if len(jobs) > 1:
        raise InputError(f"{jobs[1]!r} is a second job; tuner fit takes one job and KNOB=VALUE")
    changed = Configuration.of(values_of(knobs)) if knobs else None
    options: dict[str, Any] = {
        "cluster": args.cluster,
        "space": args.space,
        "gpus": args.gpus,
        "sequence_length": args.sequence_length,
        "global_batch": args.global_batch,
    }
    if named := _framework_named(jobs[0] if jobs else None, args):
        from tuner.planner.stated_training import fit_training

        options["model_config"] = args.model_config
        prediction = fit_training(named, changed=changed, **options)
    else:
        prediction = fit(jobs[0] if jobs else None, configuration=changed, **options)
    windows: dict[str, Any] = {}
    if args.run is not None:
        from tuner.problem.run_folder import find_run
        from tuner.problem.study_spec import parse_cluster
        from tuner.workload.records.trace import read_trace

        folder = find_run(args.run, args.runs_dir)
        windows["records"] = read_trace(folder.trace).records
        windows["probed_on"] = parse_cluster(folder.read_study() or {})
    costs = forecast(prediction.job, prediction.cluster, prediction.configuration, **windows)
    data = {**costs.to_json(), **prediction.to_json(), "known_error": list(costs.known_error)}
    print_answer(args, data, fit_lines(prediction, costs))
    return OK if prediction.fits else UNMET


def add(commands: Commands) -> None:
    """Add the commands of this module."""
    _add_plan(commands)
    parser = commands.command(
        "fit", _fit, "predict one configuration: memory, what would make it fit, time and energy"
    )
    add = parser.add_argument
    add(
        "what",
        nargs="*",
        metavar="[JOB] KNOB=VALUE",
        help="job file or name, a model's config.json, folder or name in transformers' cache, or a "
        "YAML file of a framework; or a command after --; and knobs (default: plain data "
        "parallelism)",
    )
    _add_model_config(add)
    add_shared(parser, "--cluster")
    add(
        "--gpus",
        type=int,
        metavar="N",
        help="number of GPUs of the cluster's kind (default: the cluster's)",
    )
    add(
        "--sequence-length",
        type=int,
        metavar="N",
        help="tokens of a sequence (default: the job's; of a model alone, up to 4,096)",
    )
    add(
        "--global-batch",
        type=int,
        metavar="N",
        help="sequences of an optimizer step (default: the job's; of a model alone, 256)",
    )
    add(
        "--space",
        default="full",
        metavar="NAME",
        help="search space file or name of the changes to try (default: full)",
    )
    add("--run", metavar="RUN", help="correct time and energy by the probes of this run")
    add_shared(parser, "--runs-dir")


def _add_model_config(add: Callable[..., Any]) -> None:
    add(
        "--model-config",
        type=Path,
        metavar="FILE",
        help="config.json of the model that a framework's file or a command after -- names",
    )


def _add_plan(commands: Commands) -> None:
    parser = commands.command(
        "plan", _plan, "predict every configuration for a cluster; nothing is measured"
    )
    job = parser.add_argument_group("the job and what to predict")
    add = job.add_argument
    add_shared(job, "JOB")
    add_shared(job, "--cluster", "--space")
    _add_model_config(add)
    add("--gpus", metavar="N,N,...", help="numbers of GPUs to compare, up to the cluster's")
    add(
        "--run",
        metavar="RUN",
        help="predict its job and space for --gpus, with the models corrected by its probes",
    )
    add_shared(job, "--today")
    add_options(job, JobRequest)
    add_options(parser.add_argument_group("limits and objective of the training job"), Constraints)
    group = parser.add_argument_group("the run")
    group.add_argument("--name", metavar="NAME", help="name of the run")
    add_shared(group, "--runs-dir", "--quiet")
    group.add_argument("--plain", action="store_true", help="print progress as plain lines")
    parser.show_first(
        ("job", "--cluster", "--gpus", "--deadline", "--max-slowdown", "--minimize", "--name"),
        "tuner plan opt-350m --cluster a100-8 --max-slowdown 10%",
        "tuner plan lmm-7b --cluster gh200-32 --gpus 8,16,32 --deadline 24h",
    )
