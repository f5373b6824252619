"""`tuner list`: built-in jobs, clusters, devices and knobs by name; and `tuner completion`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from tuner.cli.options import OK, columns, print_answer
from tuner.cli.parser import Commands
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.plugins import install_command

SHELLS = ("bash", "zsh")
#: What a kind of thing holds as JSON, and its lines.
Listing = tuple[list[dict[str, Any]], list[str]]


def _named(kind: str, names: Sequence[str], name: str | None) -> Sequence[str]:
    if name is not None and name not in names:
        raise UnknownName(kind, name, names)
    return names if name is None else [name]


def _jobs(name: str | None) -> Listing:
    from tuner.search_spaces.job import job_names, load_job

    jobs = [load_job(each) for each in _named("job", job_names(), name)]
    rows = [("job", "model", "tokens", "sequences a step", "steps", "precision")]
    rows += [
        (
            *(job.name, str(job.model.get("model_type"))),
            *(f"{job.sequence_length:,}", f"{job.global_batch:,}", f"{job.steps:,}"),
            job.precision,
        )
        for job in jobs
    ]
    return [{**job.to_json(), "model": dict(job.model)} for job in jobs], columns(rows)


def _clusters(name: str | None) -> Listing:
    from dataclasses import asdict

    from tuner.search_spaces.cluster import cluster_names, load_cluster

    clusters = [load_cluster(each) for each in _named("cluster", cluster_names(), name)]
    rows = [
        (
            cluster.name,
            f"{cluster.nodes} node{'s' * (cluster.nodes != 1)}",
            f"{cluster.devices_per_node} x {cluster.device.name}",
            "clocks can be set" if cluster.clock_control else "clocks cannot be set",
        )
        for cluster in clusters
    ]
    return [asdict(cluster) for cluster in clusters], columns(rows)


def _devices(name: str | None) -> Listing:
    from dataclasses import asdict

    from tuner.models.prior import SOCKET
    from tuner.search_spaces.cluster import device_names, devices_called, load_device

    if name is not None and name not in device_names() and (called := devices_called(name)):
        name = called[0]
    devices = [load_device(each) for each in _named("device", device_names(), name)]
    models = SOCKET.part("analytic")
    origins = {each.name: models.origin_of(each) if models else "not installed" for each in devices}
    rows = [("device", "memory", "bf16", "bandwidth", "limit", "constants")]
    rows += [
        (
            device.name,
            f"{device.memory_bytes / 1e9:.0f} GB",
            # Three digits, and all of those before the point.
            f"{device.peak_flops / 1e12:,.{0 if device.peak_flops >= 1e14 else 2}f} TFLOP/s",
            f"{device.memory_bandwidth_Bps / 1e9:,.0f} GB/s",
            f"{device.max_W:,.0f} W",
            origins[device.name],
        )
        for device in devices
    ]
    return [{**asdict(device), "constants": origins[device.name]} for device in devices], columns(
        rows
    )


def _spaces(name: str | None) -> Listing:
    from tuner.search_spaces.space import load_space, space_names

    spaces = [load_space(each) for each in _named("space", space_names(), name)]
    rows = [(s.name, s.what) for s in spaces]
    return [{"name": s.name, "what": s.what, "knobs": sorted(s.choices)} for s in spaces], columns(
        rows
    )


def _knobs(name: str | None) -> Listing:
    from tuner.search_spaces.knob_declarations import load_pack, pack_names

    packs = [load_pack(each) for each in _named("pack", pack_names(), name)]
    lines = []
    for pack in packs:
        lines.append(f"{pack.name}: {pack.what}")
        for knob in pack.knobs:
            lines.append(f"  {knob.name}  {', '.join(map(str, knob.values))}")
            lines.append(f"    {knob.how or 'placeholder or hook'}")
    data = [
        {"name": p.name, "what": p.what, "knobs": {k.name: k.to_table() for k in p.knobs}}
        for p in packs
    ]
    return data, lines


def _frameworks(name: str | None) -> Listing:
    from tuner.workload.scripts import SOCKET

    every = SOCKET.needed("framework", "tuner list frameworks").shipped_drivers()
    names = _named("framework", [driver.name for driver in every], name)
    drivers = [driver for driver in every if driver.name in names]
    lines = []
    for driver in drivers:
        knobs = ", ".join([*driver.knobs, *driver.declared])
        lines += [f"{driver.name} {driver.versions}".strip(), f"  {driver.what}"]
        lines.append(f"  knobs: {knobs}")
    data = [
        {
            **{"framework": d.name, "versions": d.versions, "what": d.what},
            **{"knobs": list(d.knobs), "declared": list(d.declared), "keys": list(d.keys)},
        }
        for d in drivers
    ]
    return data, lines


#: Kinds of things that are built in, and whether every field of one is shown by its name.
KINDS = {
    "jobs": (_jobs, True),
    "clusters": (_clusters, True),
    "devices": (_devices, True),
    "spaces": (_spaces, True),
    "knobs": (_knobs, False),
    "frameworks": (_frameworks, False),
}


def _list(args: argparse.Namespace) -> int:
    if args.what is None:
        print_answer(args, list(KINDS), [f"tuner list {what}" for what in KINDS])
        return OK
    listing, has_fields = KINDS[args.what]
    data, lines = listing(args.name)
    if args.name is not None and has_fields:
        fields = [(key, value) for key, value in data[0].items() if value not in (None, "", [], {})]
        lines = columns(
            [(key, v if isinstance(v, str) else json.dumps(v, default=str)) for key, v in fields]
        )
    print_answer(args, data, lines)
    return OK


def _completion(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise InputError(
            f"shtab is not installed; install it with {install_command('terminal')}"
        ) from error
    from tuner.cli.main import command_parser

    parser = command_parser()
    _complete_runs(parser)
    script = shtab.complete(parser, args.shell, preamble=_RUN_NAMES[args.shell])
    print_answer(args, {"shell": args.shell, "script": script}, [script], fit=False)
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
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for command in action.choices.values():
                _complete_runs(command)
        elif action.metavar in ("RUN", "POINT|RUN"):
            action.complete = dict.fromkeys(SHELLS, "_tuner_runs")  # type: ignore[attr-defined]


def add(commands: Commands) -> None:
    """Add the commands of this module."""
    listed = commands.command("list", _list, "list what is built in: jobs, devices, knobs ...")
    listed.add_argument(
        "what", nargs="?", choices=list(KINDS), metavar="WHAT", help=", ".join(KINDS)
    )
    listed.add_argument("name", nargs="?", metavar="NAME", help="show this one")
    text = 'print a completion script for your shell: eval "$(tuner completion bash)"'
    completion = commands.command("completion", _completion, text)
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash or zsh")
