"""Launches that show how a user's script trains, before any search.

What both ways of a first look share is here: `blank_job`, `job_of_facts`, `LaunchInspector` and
sentences. The usual way, on this machine, starts the command as it stands (`observing.py`). The
other one is `inspect_script`: on Ray, and for a script alone that looks for a rank.

It is started as it runs today, on all devices of its nodes and under the hook, and stopped
after its first steps. The batch is split differently where that is possible
(`ScriptJob.inspection_start`); a script that does not start this way is started once
more unchanged. What was seen becomes the `ScriptFacts` of a `ScriptJob`.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.data_files import read_json_object
from tuner.search_spaces.errors import LARGEST, InputError
from tuner.search_spaces.job import Precision
from tuner.search_spaces.knob_declarations import Knob
from tuner.search_spaces.model_sizes import READER
from tuner.search_spaces.plugins import shipped_module
from tuner.workload.hook import micro_batches
from tuner.workload.records.probe import (
    FIRST_STEP_LIMIT_S,
    INSPECTIONS,
    Announce,
    Failure,
    ProbeRecord,
    ProbeRequest,
)
from tuner.workload.scripts import SOCKET
from tuner.workload.scripts.command import Script, meets_nowhere, meets_on_gpus_alone
from tuner.workload.scripts.evidence import last_words, quoted, seen_today
from tuner.workload.scripts.script_facts import LAUNCH, OFFLOADS, Launcher, ScriptFacts
from tuner.workload.scripts.script_job import ScriptJob
from tuner.workload.scripts.torch_knobs import settings_today, with_torch_knobs

#: Runs one probe of a job.
RunProbe = Callable[[ScriptJob, ProbeRequest], ProbeRecord]
#: Starts the script of a job under a configuration, and returns the facts of its first steps or, as
#: a phrase, why there are none.
Inspect = Callable[[ScriptJob, Configuration], Mapping[str, Any] | str]

#: Option that is named as the length of a training, and a value.
_LENGTH = re.compile(
    r"(?P<option>(?:--?|\+{1,2})?(?:[\w-]+[./])*(?:max|num|total|n)[_-]?(?:train(?:ing)?[_-])?"
    r"(?:steps?|iters?|iterations|updates))=(?P<value>.*)",
    re.I,
)
#: Words for a length without an end.
_ENDLESS = re.compile(r"[-+]?inf(inity)?|none|null", re.I)
#: Lengths that differ by less are equal: steps of an epoch are rounded.
_SAME_STEPS = 0.02
#: Why a script is not started on more ranks than today, a phrase.
_ON_GPUS = "its process group is NCCL's, which needs GPUs"
_NOWHERE = "it makes no process group (with torch.distributed, the number of ranks is searched)"
#: Facts of the hook that are fields of `ScriptFacts`, by the same name.
_SEEN = (
    *("owner", "client_optimizer", "can_checkpoint", "checkpoints", "compiled", "stages"),
    *("live", "own"),
)


def inspect_script(
    script: Script,
    blank: ScriptJob,
    run: RunProbe,
    *,
    cluster: Cluster,
    folder: Path,
    announce: Announce = lambda sentence: None,
    adds_knobs: bool = False,
) -> ScriptJob:
    """Start a script once, and return it as a job with the knobs it supports.

    With `adds_knobs` those of torch are among them (`tuner.workload.scripts.torch_knobs`).

    InputError if the command is wrong, the script fails in its first steps (with their number, the
    kind of failure and the log), or what it trains contradicts what was told. `blank` is of
    `blank_job`.
    """
    request = inspection_request("inspection", blank.baseline, INSPECTIONS[0])
    announce(f"starting {script.name!r} once, to see how it trains")
    record = run(blank, request)
    failure = record.failure
    if failure is not None and failure.type.split:
        record = run(blank, replace(request, purpose=INSPECTIONS[1]))
        if record.ok:
            announce(f"in other micro-batches it does not start: {failure.message}")
    require_steps(script, record, folder)
    announce_cost(record, announce)
    facts = record.environment["facts"]
    job = job_of_facts(script, blank, facts, record.environment["first_step_s"])
    announce_today(job, announce)
    announce_optimizers(facts, announce)
    inspect = LaunchInspector(run, folder, announce)
    found = proven(job, facts, inspect, devices=cluster.devices_per_node)
    announce_today(found, announce, before=job)
    if adds_knobs:
        found = with_torch_knobs(found, facts, inspect.of_torch, cluster, announce)
    return found


def proven(
    job: ScriptJob, facts: Mapping[str, Any], inspect: Inspect, *, devices: int
) -> ScriptJob:
    """Return the job with the arguments that are proven to carry its batch, where that is tried.

    Args:
        facts: of the unchanged launch.
        inspect: launches the script otherwise.
        devices: of a node.
    """
    if (proof := SOCKET.part("proof")) is None:
        return job
    found: ScriptJob = proof.proven(job, facts, inspect, devices=devices)
    return found


def announce_today(
    job: ScriptJob,
    announce: Announce,
    baseline: Configuration | None = None,
    *,
    before: ScriptJob | None = None,
) -> None:
    """Announce today's training of the script, or its difference from the one announced `before`.

    Args:
        baseline: today's configuration; the command's own if None.
    """
    facts = job.today_facts(baseline)
    for line in facts.lines if before is None else facts.changed_lines(before.today_facts()):
        announce(line)


def announce_optimizers(facts: Mapping[str, Any], announce: Announce) -> None:
    """Announce whose steps are counted, if several optimizers step."""
    if others := facts.get("others"):
        announce(
            f"{len(others) + 1} optimizers step: a step is one of {facts.get('steps_of')}, which "
            f"stepped first (the others: {', '.join(others.values())})"
        )


class LaunchInspector:
    """Further launches of a script, each of which shows the facts of its first steps.

    Attributes:
        launches: their number so far.
    """

    def __init__(self, run: RunProbe, folder: Path, announce: Announce) -> None:
        self._run, self._folder, self._announce = run, folder, announce
        self.launches = 0

    def __call__(
        self,
        job: ScriptJob,
        configuration: Configuration,
        *,
        alter: bool = False,
        why: str = "to see what its arguments do",
    ) -> Mapping[str, Any] | str:
        """Return the facts of a launch, or why it did not train, a phrase.

        `why` is the reason of the launch, for the user.
        """
        self.launches += 1
        name = f"inspection{self.launches + 1}"  # the first look is not one of them
        start = job.start(configuration, self._folder / "probes" / name)
        ranks = configuration.world_size
        self._announce(
            f"starting {shlex.join(start.words)!r} on {ranks} rank{'s' * (ranks != 1)}, {why}"
        )
        purpose = INSPECTIONS[0 if alter else 1]
        record = self._run(job, inspection_request(name, configuration, purpose))
        if record.failure is None:
            facts: Mapping[str, Any] = record.environment["facts"]
            return facts
        alone = record.failure.kind == "alone"
        return "it makes no process group of all ranks" if alone else record.failure.message

    def of_torch(self, job: ScriptJob, configuration: Configuration) -> Mapping[str, Any] | str:
        """Return the facts of a launch with other settings of torch, as `__call__`."""
        others = " and ".join(
            f"{knob.name}={configuration.get(knob.name)}"
            for knob in job.knobs
            if knob.target[0] == "torch" and configuration.get(knob.name) != knob.baseline
        )
        return self(job, configuration, why=f"to see if it trains the same with {others}")


def require_steps(script: Script, record: ProbeRecord, folder: Path) -> None:
    """Raise InputError if an inspection failed, with the last words of its log."""
    if record.failure is None:
        return
    log = folder / "probes" / record.request.probe_id / "rank0.log"
    if record.failure.kind in ("ended", "no_steps"):
        outcome = f"{script.name!r} was started once, and {record.failure.message}"
    elif record.failure.kind == "hook":
        outcome = (
            f"joulefront's own hook, not the script {script.name!r}, failed {_when(record)}: "
            f"{record.failure.message}; please report it"
        )
    else:
        outcome = f"the script {script.name!r} failed {_when(record)}: {record.failure.sentence}"
    raise InputError(f"{outcome}{_last_words(record.failure)}; its log is {log}")


def announce_cost(record: ProbeRecord, announce: Announce) -> None:
    """Announce the time and energy of an inspection."""
    how = f" ({record.meter.mark})" if record.meter.mark else ""
    announce(f"that took {record.wall_s:.1f} s and {record.energy_J / 1000:.2g} kJ{how}")


def inspection_request(name: str, configuration: Configuration, purpose: str) -> ProbeRequest:
    """Return the request of a launch that ends after the first steps."""
    return ProbeRequest(
        name,
        configuration.launch,
        time_limit_s=FIRST_STEP_LIMIT_S,
        first_step_limit_s=FIRST_STEP_LIMIT_S,
        purpose=purpose,
    )


def _when(record: ProbeRecord) -> str:
    steps = record.environment.get("steps_done", 0)
    if not steps:
        return "before its first optimizer step"
    return f"after {steps} optimizer step{'s' * (steps != 1)}"


def _last_words(failure: Failure) -> str:
    """Return the program's own last line; "" if the failure's message has it, or has an error."""
    if re.search(r"\w(Error|Exception): ", failure.message) or failure.message.endswith('"'):
        return ""
    last = last_words(failure.log_tail)
    if last in failure.message or failure.message in last:
        return ""
    return f': "{quoted(last)}"'


def blank_job(script: Script, cluster: Cluster, nodes: int = 1) -> ScriptJob:
    """Return the job that the command alone describes; values that it does not name are unknown.

    InputError if the command is wrong, its launcher starts other ranks or nodes, the batches that
    it names do not make the global batch, or a placeholder does not say today's value.
    """
    launcher = script.launcher
    if nodes == 1:
        require_one_node(script)
    if launcher is not None and launcher.words and launcher.nodes != nodes:
        raise InputError(f"nodes is {nodes}, and {launcher.kind} starts on {launcher.nodes}")
    blank = ScriptJob(
        name=script.name,
        model={},
        sequence_length=0,
        global_batch=0,
        steps=script.steps,
        precision="fp32",
        words=script.words,
        cwd=str(Path(script.cwd).resolve()),
        devices=nodes * ranks_today(script, cluster, nodes),
        launcher=launcher_on(script, cluster),
        driver=script.framework_of_command,
        secrets=script.secrets,
        line=script.line if script.observation is not None else "",
        folder=script.typed_in if script.observation is not None else "",
    )
    driven = blank.driven
    if driven is not None:
        length = script.sequence_length or driven.length
        steps = script.steps or finite(driven.fact("steps") or 0)
        blank = replace(blank, sequence_length=length, steps=steps, program=driven.program)
    micro, times = _batches_of_command(script, blank)
    whole = micro * times * blank.baseline.data_parallel or script.global_batch or 0
    seen = script.observation.imports if script.observation is not None else ()
    alone = blank.devices == 1 and not cluster.device.is_gpu
    stay = _ON_GPUS if alone and meets_on_gpus_alone(blank.words, blank.cwd) else ""
    if blank.devices == 1 and meets_nowhere(blank.words, blank.cwd):
        stay = _NOWHERE
    frame = ScriptFacts(micro_batch=micro, accumulation=times, imports=seen, ranks_stay=stay)
    job = replace(blank, global_batch=whole, frame=frame)
    _require_todays_values(job, script.knobs)
    return job.declares(script.knobs)


def _batches_of_command(script: Script, blank: ScriptJob) -> tuple[int, int]:
    replicas = blank.baseline.data_parallel
    micro, times = micro_batches(blank.file_config, replicas)
    if blank.driven is not None:
        micro, times = blank.driven.batches[0] or micro, blank.driven.batches[1] or times
    shown = blank.placeholders
    for name, found in (("micro_batch", micro), ("gradient_accumulation", times)):
        stated = shown.get(name)
        if stated and found and blank.file_config and int(stated) != found:
            raise InputError(
                f"the command says {{{name}={stated}}}, and its DeepSpeed configuration {found}; "
                "make them equal, or leave the placeholder out"
            )
    micro = int(shown.get("micro_batch") or micro)
    times = int(shown.get("gradient_accumulation") or times)
    whole = script.global_batch
    if whole and times and not micro:
        micro = whole // (replicas * times)
    if whole and micro and not times:
        times = whole // (micro * replicas)
    if whole and micro and micro * times * replicas != whole:
        raise InputError(
            f"micro-batch {micro} x accumulation {times} x {replicas} replicas are not the global "
            f"batch {whole}; say today's values as {{micro_batch=N}} and "
            "{gradient_accumulation=N}"
        )
    return micro, times


def _require_todays_values(job: ScriptJob, declared: Sequence[Knob]) -> None:
    # Every saving is compared with today's values, so none is guessed.
    given_names = {name for name, value in job.stated_values.items() if value}
    given_names |= {"micro_batch"} if job.frame.micro_batch else set()
    given_names |= {"gradient_accumulation"} if job.frame.accumulation else set()
    given_names |= {"zero_stage", *OFFLOADS} if job.file_config else set()
    named = {*LAUNCH, "gradient_accumulation"}
    named |= {knob.name for knob in declared if knob.baseline is None}
    lacking = [name for name in job.placeholders if name in named and name not in given_names]
    if lacking:
        raise InputError(
            f"{', '.join(f'{{{name}}}' for name in lacking)} "
            f"{'does' if len(lacking) == 1 else 'do'} not say what you use today; write "
            f"{' '.join(f'{{{name}=VALUE}}' for name in lacking)} with the value that you use today"
        )


def require_one_node(script: Script) -> None:
    """Raise InputError for a launcher of several nodes without a Ray cluster."""
    launcher = script.read_launcher if script.observable else script.launcher
    if launcher is not None and launcher.nodes > 1:
        raise InputError(
            f"{launcher.kind} starts on {launcher.nodes} nodes, which probes do on a Ray cluster: "
            f"tuner optimize --ray ADDRESS -- {script.shown} (docs/clusters.md)"
        )


def ranks_today(script: Script, cluster: Cluster, nodes: int = 1) -> int:
    """Return the ranks that the command starts on a node; InputError if it has not the devices."""
    launcher, devices = script.launcher, cluster.devices_per_node
    started = launcher is not None and bool(launcher.words)
    ranks = launcher.processes if launcher else 0
    if ranks > devices:
        assert launcher is not None
        raise InputError(
            f"{launcher.kind} would start {ranks} processes, and this node has {devices} "
            f"{cluster.device.plural}; ask for at most {devices}"
        )
    if launcher is not None and launcher.nodes > 1 and ranks not in (0, devices):
        raise InputError(
            f"{launcher.kind} would start {ranks} of {devices} possible processes on each of "
            f"{launcher.nodes} nodes, and a probe across nodes has a rank on each device"
        )
    return ranks or (devices if started or nodes > 1 else 1)


def launcher_on(script: Script, cluster: Cluster) -> Launcher | None:
    """Return the launcher without the threads that it sets where a device is one core."""
    launcher = script.launcher
    if launcher is None or cluster.device.is_gpu:
        return launcher
    env = {name: value for name, value in launcher.env.items() if name != "OMP_NUM_THREADS"}
    return replace(launcher, env=env)


def job_of_facts(
    script: Script, blank: ScriptJob, facts: Mapping[str, Any], first_step_s: float
) -> ScriptJob:
    """Return the job of which one launch has shown the facts.

    InputError if they contradict what the user says.
    """
    seen = seen_today(script, blank, facts)
    assumed = [*(script.launcher.notes if script.launcher else ()), *seen.notes]
    engine, batch = "micro_batch" in facts, facts.get("batch") or []
    steps, by = _steps(script, blank, facts)
    kind = "torch" if facts.get("counts") == "optimizer" else str(facts.get("counts"))
    if engine:
        kind = "pipeline" if facts.get("pipeline") else "deepspeed"
    found = {name: facts[name] for name in _SEEN if name in facts}
    frame = replace(
        seen.frame,
        kind=kind,
        measured=engine and bool(batch) and batch[0] == facts["micro_batch"],
        sources={**seen.frame.sources, **({"steps": by} if by else {})},
        reads=tuple(facts.get("reads", ())),
        turns=tuple(facts.get("owned", ())),
        imports=blank.frame.imports,
        ranks_stay=blank.frame.ranks_stay,
        settings=settings_today(facts),
        first_step_s=first_step_s,
        **found,
    )
    length = blank.sequence_length or (batch[1] if facts.get("tokens") and len(batch) == 2 else 0)
    job = replace(
        blank,
        global_batch=seen.global_batch,
        steps=steps,
        precision=_precision(seen.frame.config),
        sequence_length=length,
        model=_model(script, facts),
        frame=frame,
        driver=blank.driver if seen.driver_holds else None,
    )
    job = replace(job, assumed=(*assumed, *_without_prediction(job)))
    return job.declares(script.knobs)


def _steps(script: Script, blank: ScriptJob, facts: Mapping[str, Any]) -> tuple[int | None, str]:
    # Return the steps of the whole training, None if unknown, and where they come from.
    stated = facts.get("length") or {}
    shown, found = script.steps, finite(int(stated.get("steps", 0)))
    if shown is not None and found and shown - found > max(1, _SAME_STEPS * found):
        raise InputError(
            f"--steps is {shown:,}, but the script {script.name!r} trains {found:,} optimizer "
            f"steps, as {stated['by']} says; write --steps {found}, leave it out, or give the "
            "command the length that you train"
        )
    if shown is not None:
        more = f"; at most {found:,} by {stated['by']}" if found and found > shown else ""
        return blank.steps, f"--steps{more}"
    if blank.steps and blank.driver is not None:
        return blank.steps, f"{blank.driver.name}'s keys"
    return blank.steps or found, f"{stated['by']}'s own count" if found else ""


def announce_endless(script: Script, announce: Announce) -> None:
    """Announce, before anything is started, a length in the command that never ends."""
    try:
        words = shlex.split(script.command)
    except ValueError:  # of a shell that closes its quotes otherwise
        return
    pairs = [f"{one}={two}" for one, two in pairwise(words) if one.startswith("-")]
    for word in (*words, *pairs) if script.steps is None else ():
        found = _LENGTH.fullmatch(word)
        if found is not None and _never_ends(found["value"]):
            announce(
                f"{found['option']} {found['value']} names no end: if nothing else counts its "
                "steps, energy and time are per optimizer step (--steps N gives the total)"
            )
            return


def _never_ends(value: str) -> bool:
    with contextlib.suppress(ValueError, OverflowError):
        return finite(int(float(value))) is None
    return _ENDLESS.fullmatch(value) is not None


def finite(steps: int) -> int | None:
    """Return a stated length; None if it is none: a number that is never reached is no length."""
    return steps if 0 < steps <= LARGEST else None


def _model(script: Script, facts: Mapping[str, Any]) -> dict[str, Any]:
    if script.model_config is not None:
        given = Path(script.model_config)
        return read_json_object(given, f"model config {given}")
    carried = dict(facts.get("model", {}))
    if (reader := shipped_module(READER)) is None:
        return {}
    try:
        reader.facts_in(carried)
    except InputError:
        return {}  # of a kind that is not a language model, or of none at all
    return carried


def _without_prediction(job: ScriptJob) -> tuple[str, ...]:
    missing = []
    if not job.model:
        missing.append("the model (its sizes: --model-config)")
    if not job.sequence_length:
        missing.append("the sequence length (--sequence-length)")
    if not missing:
        return ()
    return (
        f"nothing is predicted before it is measured: {' and '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not known",
    )


def _precision(config: Mapping[str, Any]) -> Precision:
    for name in ("bf16", "fp16"):
        if (config.get(name) or {}).get("enabled") is True:
            return name
    return "fp32"
