"""`tuner plan`: the front of every configuration, predicted at once."""

from __future__ import annotations

import argparse

from tuner.cli.arguments import add_shared
from tuner.cli.options import (
    OK,
    UNMET,
    Commands,
    add_options,
    answer,
    made_of_options,
    progress,
)
from tuner.problem.constraints import Constraints
from tuner.search_spaces.errors import InputError


def _plan(args: argparse.Namespace) -> int:
    from tuner.api import plan
    from tuner.display.answer import answer_lines

    with progress(args) as on_progress:
        result = plan(
            args.job,
            cluster=args.cluster,
            space=args.space,
            gpus=_numbers(args.gpus),
            constraints=made_of_options(args, Constraints),
            baseline=args.baseline,
            allow_changed_training=args.allow_changed_training,
            name=args.name,
            runs_dir=args.runs_dir,
            on_progress=on_progress,
        )
    answer(args, result.to_json(), answer_lines(result))
    return OK if result.choice.met else UNMET


def _numbers(text: str | None) -> list[int]:
    """Return the numbers of GPUs in "8,16,32".

    Raises:
        InputError: one is no positive integer.
    """
    if text is None:
        return []
    found = []
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) < 1:
            raise InputError(f"--gpus takes numbers such as 8,16,32, not {word.strip()!r}")
        found.append(int(word))
    return found


def add(commands: Commands) -> None:
    """Add the command of this module."""
    parser = commands.command(
        "plan", _plan, "predict every configuration for a cluster; nothing is measured"
    )
    job = parser.add_argument_group("the job and what to predict")
    add = job.add_argument
    add_shared(job, "JOB", "--cluster", "--space")
    add("--gpus", metavar="N,N,...", help="numbers of GPUs of this cluster's kind to compare")
    add_shared(job, "--baseline")
    add(
        "--allow-changed-training",
        action="store_true",
        help="also predict what changes what is learnt, such as FP8",
    )
    add_options(parser.add_argument_group("limits and objective of the training job"), Constraints)
    group = parser.add_argument_group("the run")
    group.add_argument("--name", metavar="NAME", help="name of the run")
    add_shared(group, "--runs-dir", "--quiet")
    group.add_argument("--plain", action="store_true", help="print progress as plain lines")
