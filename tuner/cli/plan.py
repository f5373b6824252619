"""`tuner plan` predicts every configuration at once, `tuner fit` one: and what makes it fit."""

from __future__ import annotations

import argparse
from typing import Any

from tuner.cli.arguments import add_shared
from tuner.cli.options import (
    OK,
    UNMET,
    add_options,
    answer,
    given_options,
    made_of_options,
    progress,
)
from tuner.cli.parser import Commands
from tuner.problem.constraints import Constraints
from tuner.problem.job_request import JobRequest
from tuner.search_spaces.errors import InputError
from tuner.study.request import PlanRequest


def _plan(args: argparse.Namespace) -> int:
    named = any((args.job, args.space, args.baseline, args.cluster != "auto"))
    if args.run is not None and (named or given_options(args, JobRequest)):
        raise InputError("--run says what is trained, where and in which space; give --gpus")
    from tuner.api import plan_for
    from tuner.display.text import answer_lines

    request = made_of_options(
        args,
        PlanRequest,
        name=args.name,
        job=args.job,
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
    answer(args, result.to_json(), answer_lines(result), fit=True)
    return OK if result.choice.met else UNMET


def _numbers(text: str | None) -> list[int]:
    """Return the numbers of GPUs in "8,16,32"."""
    if text is None:
        return []
    found = []
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) < 1:
            raise InputError(f"--gpus takes numbers such as 8,16,32, not {word.strip()!r}")
        found.append(int(word))
    return found


def _fit(args: argparse.Namespace) -> int:
    from tuner.display.plan_text import fit_lines
    from tuner.planning.fit import fit
    from tuner.results.predict import forecast
    from tuner.search_spaces.configuration import Configuration
    from tuner.search_spaces.knobs import split_words, values_of

    jobs, knobs = split_words(args.what)
    if len(jobs) > 1:
        raise InputError(f"{jobs[1]!r} is a second job; tuner fit takes one job and KNOB=VALUE")
    prediction = fit(
        jobs[0] if jobs else None,
        cluster=args.cluster,
        configuration=Configuration.of(values_of(knobs)) if knobs else None,
        space=args.space,
        gpus=args.gpus,
        sequence_length=args.sequence_length,
        global_batch=args.global_batch,
    )
    windows: dict[str, Any] = {}
    if args.run is not None:
        from tuner.problem.run_folder import find_run
        from tuner.problem.study_spec import parse_cluster
        from tuner.workload.trace import read_trace

        folder = find_run(args.run, args.runs_dir)
        windows["records"] = read_trace(folder.trace).records
        windows["probed_on"] = parse_cluster(folder.read_study() or {})
    costs = forecast(prediction.job, prediction.cluster, prediction.configuration, **windows)
    data = {**costs.to_json(), **prediction.to_json(), "known_error": list(costs.known_error)}
    answer(args, data, fit_lines(prediction, costs))
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
        help="job file or name, or a model's config.json, folder or name in transformers' cache; "
        "and knobs (default: plain data parallelism)",
    )
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


def _add_plan(commands: Commands) -> None:
    parser = commands.command(
        "plan", _plan, "predict every configuration for a cluster; nothing is measured"
    )
    job = parser.add_argument_group("the job and what to predict")
    add = job.add_argument
    add_shared(job, "JOB")
    add_shared(job, "--cluster", "--space")
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
