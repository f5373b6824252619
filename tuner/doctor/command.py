"""`tuner doctor`, and `tuner dev`: one probe, and drivers checked."""

from __future__ import annotations

import argparse
import os
from argparse import SUPPRESS
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cli.options import (
    FAILED,
    OK,
    add_quantity,
    add_script,
    announcer,
    job_of_words,
    print_answer,
    require_trust,
    script_of,
)
from tuner.cli.parser import Commands, add_shared
from tuner.search_spaces.errors import InputError

if TYPE_CHECKING:
    from tuner.search_spaces.cluster import Cluster
    from tuner.search_spaces.configuration import Configuration
    from tuner.search_spaces.job import TrainingJob
    from tuner.workload.node.facts import NodeFacts
    from tuner.workload.node.runner import LocalRunner
    from tuner.workload.records.probe import ProbeRequest
    from tuner.workload.scripts.command import Script
    from tuner.workload.scripts.script_job import ScriptJob

#: What a GPU without persistence mode does.
_FORGETS = ", persistence mode off (it forgets its clocks when no process uses it)"


def _changed(job: Any, words: Sequence[str]) -> Any:
    # A script's configuration of today with KNOB=VALUE changed.
    from tuner.search_spaces.configuration import Configuration, Settings
    from tuner.search_spaces.knob_declarations import CHANGED, declared_words, with_baseline
    from tuner.search_spaces.knobs import split_words, values_of

    declared, rest = declared_words(words, job.knobs)
    others, knobs = split_words(rest)
    for word in others:
        raise InputError(f"give either the job {word!r} or --script")
    names = {*(knob.name for knob in job.knobs), CHANGED}
    today = {**job.baseline.launch, **job.baseline.live}
    standard = {name: value for name, value in today.items() if name not in names}
    chosen = Configuration.of({**standard, **values_of(knobs)})
    kept = {name: value for name, value in today.items() if name in names - {CHANGED}}
    launch = Settings({**chosen.launch, **kept, **declared})
    return with_baseline(Configuration(launch, chosen.live), job.knobs)


def _probe(args: argparse.Namespace) -> int:
    # Needs neither Ray nor Optuna.
    from contextlib import closing
    from datetime import datetime

    from tuner.search_spaces.errors import InvalidConfiguration
    from tuner.search_spaces.rules import why_it_cannot_run
    from tuner.search_spaces.safe_files import require_own
    from tuner.workload.node.runner import LocalRunner
    from tuner.workload.records.trace import TraceWriter
    from tuner.workload.scripts.job import launchable

    announce, script, blank = announcer(args), script_of(args), None
    if script is not None:
        script, blank, cluster = _script_to_probe(args, script)
        job: TrainingJob = blank
        configuration = _changed(blank, args.what)
    elif args.knob or args.knobs:
        raise InputError(
            "--knob and --knobs are for --script here; tuner optimize has them for jobs"
        )
    else:
        job, cluster, configuration = job_of_words(args, "a probe")
    folder = Path(args.runs_dir) / f"probe-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    require_own(folder)
    with closing(LocalRunner(job, cluster, run_dir=folder, announce=announce)) as runner:
        if script is not None and blank is not None:
            job = inspected = _inspected(script, blank, runner, cluster, folder, announce)
            configuration = _changed(inspected, args.what)
        phrases = launchable(job, cluster).refused(configuration)
        if phrases := phrases or why_it_cannot_run(configuration, job, cluster):
            raise InvalidConfiguration(configuration.short, phrases)
        runner.prepare()
        announce(f"probing {configuration.short}")
        record = runner.run(_request(job, cluster, configuration, args.time_limit_s))
    with TraceWriter(folder / "trace" / "probes.jsonl") as writer:
        writer.append(record)
    from tuner.display.text import record_lines

    print_answer(args, record.to_json(), [*record_lines(record), f"record: {writer.path}"])
    return OK if record.ok else FAILED


def _script_to_probe(args: argparse.Namespace, script: Script) -> tuple[Script, ScriptJob, Cluster]:
    # The script with its knobs and values of today, and what its command alone says.
    from tuner.problem.job_request import cluster_of, with_knobs
    from tuner.workload.scripts.inspection import blank_job
    from tuner.workload.scripts.user_code import of_files

    require_trust(args, of_files(args.knobs, script.framework, None))
    script = with_knobs(script, (*args.knobs, *args.knob)).stating(args.what)
    cluster = cluster_of(args.cluster)
    return script, blank_job(script, cluster), cluster


def _inspected(
    script: Script,
    blank: ScriptJob,
    runner: LocalRunner,
    cluster: Cluster,
    folder: Path,
    announce: Callable[[str], None],
) -> ScriptJob:
    from tuner.workload.scripts.inspection import inspect_script

    runner.prepare()
    job = inspect_script(
        script, blank, runner.run_for_job, cluster=cluster, folder=folder, announce=announce
    )
    runner.set_job(job)
    for sentence in job.sentences():
        announce(sentence)
    return job


def _request(
    job: TrainingJob, cluster: Cluster, configuration: Configuration, probe_s: float | None
) -> ProbeRequest:
    from tuner.models.prior import prior_of
    from tuner.problem.problem import probe_limits
    from tuner.workload.records.probe import ProbeRequest, WindowPolicy

    prior = prior_of(job, cluster)
    limits = probe_limits(job, prior, [configuration], WindowPolicy(), probe_s=probe_s)
    return ProbeRequest(
        "p0000",
        configuration.launch,
        (configuration.live,),
        time_limit_s=limits.probe_s,
        first_step_limit_s=limits.first_step_s,
        step_limit_s=limits.step_s,
        purpose="probe",
    )


def node_lines(node: NodeFacts, *, verbose: bool = False) -> list[str]:
    """Return readiness for probes, machine, energy, clocks, software, and missing parts."""
    free = f"{node.free_bytes / 2**30:.0f} GiB free"
    devices = f"{node.cores:g} cores, {free}, no GPU: each core is a device"
    if node.gpus:
        devices = f"{len(node.gpus)} x {node.gpus[0].name}, {node.cores:g} cores, {free}"
    meter = next((meter for meter in node.meters if meter.available), None)
    estimated = meter is not None and meter.estimated
    energy = "; ".join(["nothing here meters or estimates it", *(m.note for m in node.meters)])
    if meter is not None:
        how = f"metered by {meter.name}"
        if estimated:
            by = "" if meter.name == "estimated" else f" by {meter.name}"
            how = f"estimated{by}, not metered"
        energy = f"{how}: {meter.note}"
    from tuner.workload.node.platforms.base import NEEDED

    absent = [name for name in NEEDED if node.packages.get(name) is None]
    if absent:
        verdict = f"plans and measures commands; to search, install {', '.join(absent)}"
    elif node.import_errors:
        verdict = f"cannot train: {' and '.join(node.import_errors)} cannot be imported"
    elif meter is None:
        verdict = "cannot measure: there is no meter"
    elif node.missing:
        verdict = "probes train here; what is missing is listed below"
    elif estimated:
        verdict = "ready, without an energy meter: times are measured, energies are estimated"
    else:
        verdict = "ready: probes train here, in real DeepSpeed processes"
    versions = (f"{name} {version}" for name, version in node.packages.items() if version)
    return [
        f"verdict   {verdict}",
        f"machine   {node.host}: {devices}",
        f"energy    {energy}",
        f"clocks    {'searched, and put back' if node.clock_control else 'left as they are'}",
        f"software  Python {node.python}, {', '.join(versions)}",
        *(_details(node) if verbose else ()),
        *(f"note      {note}" for note in node.notes),
        *(line for thing in node.missing for line in thing.text()),
    ]


def _details(node: NodeFacts) -> Iterator[str]:
    gib = 2**30
    shared = f"/dev/shm {node.shm_bytes / gib:.1f} GiB"
    yield f"memory    {node.memory_bytes / gib:.1f} GiB; {shared}"
    for gpu in node.gpus:
        forgets = _FORGETS * (not gpu.persistence_mode)
        size = f"{gpu.memory_bytes / gib:.1f} GiB" if gpu.memory_bytes else "the host's memory"
        yield f"GPU {gpu.index:<6}{gpu.name}, {size}, {gpu.uuid}{forgets}"
    yield f"driver    {node.driver}" if node.gpus else f"GPUs      {node.gpu_note}"
    yield from (f"meter     {m.name}: {m.note}" for m in node.meters if m.available)
    yield from (f"no meter  {m.name}: {m.note}" for m in node.meters if not m.available)
    if not node.clock_control:
        yield f"clocks    {node.clock_note}"
    paths = ", ".join(f"{name}: {path or '-'}" for name, path in node.programs.items())
    yield f"programs  {paths}"


def _doctor(args: argparse.Namespace) -> int:
    if args.ray is not None:
        from tuner.executors.choose import kind_named
        from tuner.workload.node.meters.base import own_meter

        with own_meter(args.meter):
            seen = kind_named("ray").survey(args.ray, device_kind=args.device_kind)
        print_answer(args, seen.to_json(), seen.lines())
        return OK if seen.cluster is not None else FAILED
    from tuner.workload.node.facts import inspect_node
    from tuner.workload.node.meters.base import own_meter

    with own_meter(args.meter):
        facts = inspect_node(imports=not args.brief)
    print_answer(args, facts.to_json(), node_lines(facts, verbose=args.verbose))
    return OK if facts.ready or args.brief else FAILED


def _check(args: argparse.Namespace) -> int:
    from tuner.workload.scripts import SOCKET
    from tuner.workload.scripts.command import search_path

    frameworks = SOCKET.needed("framework", "tuner dev frameworks")
    drivers = frameworks.load_drivers(Path(args.file))
    driver, found = frameworks.best_fit(drivers, search_path(Path.cwd(), ()))
    title = f"{driver.name} {found.version}".strip()
    lines = [f"{args.file} can be read: {len(driver.knobs)} knobs, {len(driver.keys)} keys"]
    if not driver.sources:
        lines.append("no key is verified: no keys = [FILE] say where they are declared")
    elif not found.files:
        lines.append(f"no key is verified: {driver.name} is not installed here")
    else:
        lines.append(f"{len(found.found)} keys stand in the sources of {title}")
        lines += [f"{title} has no {key}" for key in found.gone]
    if (
        found.version
        and driver.versions
        and not frameworks.check_version(driver.versions, found.version)
    ):
        lines.append(f"the installed version is not in {driver.versions}")
    data: dict[str, Any] = {
        **{"framework": driver.name, "version": found.version, "found": list(found.found)},
        **{"gone": list(found.gone), "files": [str(path) for path in found.files]},
    }
    print_answer(args, data, lines)
    return 1 if found.gone else OK


def _add_dev(commands: Commands) -> None:
    """Add the commands of `tuner dev` of this module."""
    probe = commands.command("probe", _probe, "run one probe on this machine and print its record")
    add_shared(probe, "[JOB] KNOB=VALUE", "--cluster")
    add_script(probe)
    add_shared(probe, "--knob", "--knobs", "--trust")
    add_quantity(
        probe,
        "time-limit",
        "time_limit_s",
        "s",
        "kill the probe after this time (default: the limit of its first step, 5min or three "
        "times what the inspection of the script took, and what its steps are predicted to take)",
    )
    add_shared(probe, "--runs-dir", "--quiet")
    probe.show_first(
        ("what", "--cluster", "--script", "--knob", "--time-limit", "--json"),
        "tuner dev probe tiny-gpt micro_batch=4",
        "tuner dev probe zero_stage=2 -- torchrun --nproc-per-node 2 train.py",
    )

    check = commands.command(
        "frameworks", _check, "check the driver of a framework against what is installed"
    )
    check.add_argument("action", choices=("check",), metavar="check", help="the only action")
    check.add_argument("file", metavar="FILE", help="TOML file of a driver")


def add(commands: Commands) -> None:
    """Add `tuner doctor` and `tuner dev`."""
    doctor = commands.command(
        "doctor",
        _doctor,
        "list what this machine, or a Ray cluster, offers, and what is missing",
    )
    doctor.add_argument("-v", "--verbose", action="store_true", help="list every fact")
    doctor.add_argument("--brief", action="store_true", help=SUPPRESS)  # for Makefiles
    doctor.add_argument(
        "--ray", metavar="ADDRESS", help="inspect this Ray cluster: auto or HOST:PORT"
    )
    add_shared(doctor, "--device-kind")
    doctor.add_argument(
        "--meter", metavar="MODULE:CLASS", help="inspect a meter of your own (docs/your-meter.md)"
    )
    dev = commands.family("dev", "tools to develop with: one probe, drivers")
    _add_dev(dev)
    dev.describe({"commands": ("probe", "frameworks")})
