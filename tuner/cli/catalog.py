"""Lists of what is built in (`jobs`, `clusters`, `spaces`, `knobs`) and `tuner completion`."""

from __future__ import annotations

import argparse
import copy

from tuner.cli.options import OK, Commands, answer, columns
from tuner.search_spaces.errors import InputError

SHELLS = ("bash", "zsh")


def _jobs(args: argparse.Namespace) -> int:
    from tuner.search_spaces.job import job_names, load_job

    jobs = [load_job(name) for name in job_names()]
    rows = [
        (
            job.name,
            str(job.model.get("model_type")),
            f"sequences of {job.sequence_length} tokens, {job.global_batch} a step",
            f"{job.steps:,} steps",
            job.precision,
        )
        for job in jobs
    ]
    answer(args, [{**job.to_json(), "model": dict(job.model)} for job in jobs], columns(rows))
    return OK


def _clusters(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from tuner.search_spaces.cluster import cluster_names, load_cluster

    clusters = [load_cluster(name) for name in cluster_names()]
    rows = [
        (
            cluster.name,
            f"{cluster.nodes} node{'s' * (cluster.nodes != 1)}",
            f"{cluster.devices_per_node} x {cluster.device.name}",
            "clocks can be set" if cluster.clock_control else "clocks cannot be set",
        )
        for cluster in clusters
    ]
    answer(args, [asdict(cluster) for cluster in clusters], columns(rows))
    return OK


def _spaces(args: argparse.Namespace) -> int:
    from tuner.search_spaces.space import ALIASES, load_space, space_names

    spaces = [load_space(name) for name in space_names()]
    answer(
        args,
        [{"name": s.name, "what": s.what, "knobs": sorted(s.choices)} for s in spaces],
        columns(
            [
                (
                    ", ".join([s.name, *(a for a, name in ALIASES.items() if name == s.name)]),
                    s.what,
                )
                for s in spaces
            ]
        ),
    )
    return OK


def _knobs(args: argparse.Namespace) -> int:
    from tuner.search_spaces.knob_packs import load_pack, pack_names

    packs = [load_pack(name) for name in pack_names()]
    lines = []
    for pack in packs:
        rows = [
            (f"  {knob.name}", ", ".join(map(str, knob.values)), knob.how or "placeholder or hook")
            for knob in pack.knobs
        ]
        lines += [f"{pack.name}: {pack.what}", *columns(rows)]
    data = [
        {"name": p.name, "what": p.what, "knobs": {k.name: k.to_table() for k in p.knobs}}
        for p in packs
    ]
    answer(args, data, lines)
    return OK


def _completion(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise InputError(
            "shtab is not installed; install it with pip install 'joulefront[terminal]'"
        ) from error

    parser = copy.copy(args.parser)
    parser.prog = "tuner"
    _complete_runs(parser)
    script = shtab.complete(parser, args.shell, preamble=_RUN_NAMES[args.shell])
    answer(args, {"shell": args.shell, "script": script}, [script])
    return OK


#: Shell functions that complete the names of runs.
_NAMES = (
    '$(cd "${JOULEFRONT_RUNS:-runs}" 2>/dev/null && for f in */study.toml; do '
    '[ -e "$f" ] && echo "${f%%/*}"; done)'
)
_RUN_NAMES = {
    "bash": f'_tuner_runs() {{ compgen -W "{_NAMES}" -- "$1"; }}',
    "zsh": f'_tuner_runs() {{ compadd -- ${{(f)"{_NAMES}"}} }}',
}


def _complete_runs(parser: argparse.ArgumentParser) -> None:
    """Let every argument that is a run be completed by the names of runs."""
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for command in action.choices.values():
                _complete_runs(command)
        elif action.metavar in ("RUN", "OTHER"):
            action.complete = dict.fromkeys(SHELLS, "_tuner_runs")  # type: ignore[attr-defined]


def add(commands: Commands) -> None:
    """Add the commands of this module."""
    commands.command("jobs", _jobs, "list the built-in jobs")
    commands.command("clusters", _clusters, "list the built-in clusters")
    commands.command("spaces", _spaces, "list the built-in search spaces")
    commands.command("knobs", _knobs, "list the packs of knobs for --knobs")
    text = 'print a completion script for your shell: eval "$(tuner completion bash)"'
    completion = commands.command("completion", _completion, text)
    completion.set_defaults(parser=commands.parser)
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash or zsh")
