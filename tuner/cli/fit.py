"""`tuner fit`: memory, time and energy of one configuration, and what would make it fit."""

from __future__ import annotations

import argparse
from typing import Any

from tuner.cli.arguments import add_shared
from tuner.cli.options import OK, UNMET, answer
from tuner.cli.parser import Commands
from tuner.search_spaces.errors import InputError


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
    )
    windows: dict[str, Any] = {}
    if args.run is not None:
        from tuner.problem.run_folder import find_run
        from tuner.problem.study_file import parse_cluster
        from tuner.workload.trace import read_trace

        folder = find_run(args.run, args.runs_dir)
        windows["records"] = read_trace(folder.trace).records
        windows["probed_on"] = parse_cluster(folder.read_study() or {})
    costs = forecast(prediction.job, prediction.cluster, prediction.configuration, **windows)
    data = {**costs.to_json(), **prediction.to_json(), "known_error": list(costs.known_error)}
    answer(args, data, fit_lines(prediction, costs))
    return OK if prediction.fits else UNMET


def add(commands: Commands) -> None:
    """Add the command of this module."""
    parser = commands.command(
        "fit", _fit, "predict one configuration: memory, what would make it fit, time and energy"
    )
    add = parser.add_argument
    add(
        "what",
        nargs="*",
        metavar="[JOB] KNOB=VALUE",
        help="job file or name, and knobs (default: plain data parallelism)",
    )
    add_shared(parser, "--cluster")
    add(
        "--gpus",
        type=int,
        metavar="N",
        help="number of GPUs of the cluster's kind (default: the cluster's)",
    )
    add(
        "--space",
        default="full",
        metavar="NAME",
        help="search space file or name of the changes to try (default: full)",
    )
    add("--run", metavar="RUN", help="correct time and energy by the probes of this run")
    add_shared(parser, "--runs-dir")
