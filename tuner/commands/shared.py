"""What several commands share: exit codes, the answer, and arguments that mean the same."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from search_spaces.errors import InputError

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def answer(args: argparse.Namespace, data: Any, lines: Sequence[str]) -> None:
    """Print the answer: JSON where it was asked for, else the lines."""
    if args.json:
        from workload.trace import strict_json

        print(json.dumps(strict_json(data), indent=2, default=str))
    else:
        print("\n".join(lines))


@contextmanager
def progress(args: argparse.Namespace) -> Iterator[Any]:
    """Whom a study tells its progress: a live view at a terminal, else plain lines, or nobody."""
    if args.quiet:
        yield None
        return
    from tuner.live import LiveView, can_be_live
    from tuner.progress import ProgressPrinter

    if args.plain or not can_be_live(sys.stderr):
        yield ProgressPrinter()
        return
    with LiveView() as view:
        yield view


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]


def choices(args: argparse.Namespace) -> dict[str, Any]:
    names = (
        "budget_kJ",
        "deadline_s",
        "power_cap_W",
        "peak_power_W",
        "max_gpus",
        "objective",
        "price_per_kWh",
        "price_per_gpu_hour",
        "grid_gCO2_per_kWh",
        "verify",
        "probe_budget_kJ",
        "max_probes",
        "search_s",
        "storage",
        "name",
        "runs_dir",
        "seed",
        "sampler",
        "transfer",
    )
    return {name: getattr(args, name) for name in names}


def asked(
    args: argparse.Namespace, what: str, size: Callable[[Any, int], Any] | None = None
) -> tuple[Any, Any, Any]:
    """Job, cluster and configuration of a command that takes [JOB] KNOB=VALUE."""
    from search_spaces.cluster import load_cluster
    from search_spaces.configuration import Configuration
    from search_spaces.job import load_job
    from search_spaces.knobs import Value, parse_value
    from search_spaces.space import default_configuration
    from workload.machine import detect_cluster

    jobs = [word for word in args.what if "=" not in word]
    if len(jobs) > 1:
        raise InputError(f"{jobs[1]!r} is a second job; {what} takes one job and KNOB=VALUE")
    values: dict[str, Value] = {}
    for word in args.what:
        name, equals, text = word.partition("=")
        if equals:
            values[name] = parse_value(name, text)
    job = load_job(jobs[0] if jobs else None)
    cluster = detect_cluster() if args.cluster == "auto" else load_cluster(args.cluster)
    if size is not None and args.target_gpus is not None:
        cluster = size(cluster, args.target_gpus)
    return job, cluster, Configuration.of(values) if values else default_configuration(job, cluster)


def script_of(args: argparse.Namespace) -> Any:
    """The user's script; None where the command names none."""
    told = ("steps", "global_batch", "sequence_length", "model_config")
    if args.script is None:
        for name in told:
            if getattr(args, name) is not None:
                option = name.replace("_", "-")
                raise InputError(f"--{option} is for --script; a job says it itself")
        return None
    from workload.script import Script

    return Script(args.script, **{name: getattr(args, name) for name in told})


def add_choices(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--budget-kJ", type=float, metavar="X", help="energy that the training job may use")
    add("--deadline-s", type=float, metavar="X", help="time that the training job may take")
    add("--power-cap-W", type=float, metavar="X", help="bound on the job's average power")
    add("--peak-power-W", type=float, metavar="X", help="bound on its power at any moment")
    add("--max-gpus", type=int, metavar="N", help="bound on its number of GPUs")
    add(
        "--choose",
        dest="objective",
        metavar="WHAT",
        help="knee, least-energy, least-time, least-edp, least-cost or least-carbon",
    )
    add("--price-per-kWh", type=float, metavar="X", help="of energy, for least-cost")
    add("--price-per-gpu-hour", type=float, metavar="X", help="of a GPU, for least-cost")
    add("--grid-gCO2-per-kWh", type=float, metavar="X", help="of your grid, for least-carbon")
    add(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="do not measure the choice and the baseline again before recommending",
    )
    add("--probe-budget-kJ", type=float, metavar="X", help="energy that the search may use")
    add("--max-probes", type=int, metavar="N", help="probes that the search may make")
    add("--search-s", type=float, metavar="X", help="no probe starts after this many seconds")
    add("--storage", metavar="URL", help="the study's database (default: a journal in the run)")
    add("--name", metavar="NAME", help="the run; one that stands goes on where it stopped")
    add("--runs-dir", default="runs", metavar="DIR", help="where runs are (default: runs)")
    add("--seed", type=int, default=0, metavar="N", help="of everything random (default: 0)")
    add(
        "--sampler", metavar="NAME", help="joulefront (default), tpe, nsgaii, gp, botorch or random"
    )
    add(
        "--transfer",
        action="append",
        default=[],
        metavar="RUN|TABLE",
        help="earlier measurements to start from, of this job elsewhere or of another; repeatable",
    )
    add("--quiet", action="store_true", help="no progress")
    add("--plain", action="store_true", help="progress as plain lines, also at a terminal")


def add_script(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--script", metavar="CMD", help='your own training script, "train.py --data DIR"')
    add("--steps", type=int, metavar="N", help="of a script: optimizer steps of the solution")
    add("--global-batch", type=int, metavar="N", help="of a script: samples a step, if unknown")
    add("--sequence-length", type=int, metavar="N", help="of a script: tokens a sample")
    add("--model-config", type=Path, metavar="FILE", help="of a script: Hugging Face config.json")


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but what a command does not know is told by that command."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown arguments: {' '.join(unknown)}")
        return found, unknown


class Commands:
    """Where a module of this package adds its commands.

    Args:
        parser: of the whole command.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser
        self._parsers = parser.add_subparsers(
            dest="command", metavar="COMMAND", parser_class=Parser
        )

    def command(
        self, name: str, run: Callable[[argparse.Namespace], int], what: str
    ) -> argparse.ArgumentParser:
        """A command: `run` is called with its arguments and returns the exit code."""
        added: argparse.ArgumentParser = self._parsers.add_parser(name, help=what, description=what)
        added.add_argument("--json", action="store_true", help="the answer as JSON")
        added.set_defaults(run_command=run)
        return added

    def of_run(
        self, name: str, run: Callable[[argparse.Namespace], int], what: str
    ) -> argparse.ArgumentParser:
        """A command about a run that stands."""
        added = self.command(name, run, what)
        added.add_argument("run", nargs="?", metavar="RUN", help="name or folder (default: latest)")
        added.add_argument("--runs-dir", default="runs", metavar="DIR", help="where runs are")
        return added
