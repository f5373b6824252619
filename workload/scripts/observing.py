"""Observation of a user's command: it is started once exactly as it stands, before any search.

What its ranks report becomes the job. Its ranks are started one by one from then on, if they then
train what was observed; else each probe starts the whole command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError
from tuner.workload.records.probe import INSPECTIONS, Announce
from tuner.workload.scripts.command import Observation, Script
from tuner.workload.scripts.evidence import batches_seen, difference
from tuner.workload.scripts.inspection import (
    LaunchInspector,
    RunProbe,
    announce_cost,
    announce_optimizers,
    announce_today,
    blank_job,
    inspection_request,
    job_of_facts,
    proven,
    require_steps,
)
from tuner.workload.scripts.script_facts import LINES
from tuner.workload.scripts.script_job import ScriptJob
from tuner.workload.scripts.torch_knobs import with_torch_knobs

#: Why a program without a knob is started as it stands, a phrase.
NOTHING_TO_SET = "none of its arguments changes"


@dataclass(frozen=True)
class ObservedLaunch:
    """Facts from the observed launch of a command.

    Attributes:
        script: the command with its observation.
        facts: of the hook, as after a launch of single ranks.
    """

    script: Script
    facts: Mapping[str, Any]
    first_step_s: float

    @property
    def why_as_it_stands(self) -> str:
        """Reason against starting its ranks one by one, a phrase; "" if they may be."""
        assert self.script.observation is not None
        return self.script.observation.why_as_it_stands


def job_to_observe(script: Script) -> ScriptJob:
    """Return the job of a command that is to be started as it stands for the first time."""
    return ScriptJob(
        name=script.name,
        model={},
        sequence_length=0,
        global_batch=0,
        steps=script.steps,
        precision="fp32",
        cwd=str(Path(script.cwd).resolve()),
        line=script.filled,
        as_it_stands=True,
        secrets=script.secrets,
    )


def observe_script(
    script: Script,
    run: RunProbe,
    *,
    folder: Path,
    announce: Announce,
    cluster: Cluster | None = None,
) -> ObservedLaunch | None:
    """Start a command once as it stands, and return its ranks' reports.

    None for a script without a launcher that needs one: it can be started as a rank. InputError if
    it fails before its first steps, with the last words of its log.
    """
    job = job_to_observe(script)
    jobs = script.job_script
    if jobs is not None:
        announce(
            f"everything in {jobs.path.name} runs here once, until its ranks have trained 4 steps"
        )
        if cluster is not None and (other := jobs.differences(cluster)):
            announce(other)
    else:
        announce(f"starting your command once, as it stands, to see how {script.name!r} trains")
    record = run(job, inspection_request("inspection", job.baseline, INSPECTIONS[1]))
    if record.failure is not None and record.failure.kind == "no_rank" and script.is_script_alone:
        announce(
            f"started alone, it looks for a rank, so a launcher's is set: {record.failure.message}"
        )
        return None
    require_steps(script, record, folder)
    announce_cost(record, announce)
    facts = record.environment["facts"]
    if "process" not in facts:
        raise InputError(
            f"{script.name!r} trains, but its rank 0 did not report how it was started: it writes "
            "to a connection that is not its own, or closes it"
        )
    first_step_s = record.environment["first_step_s"]
    if jobs is not None:
        log = folder / "probes" / record.request.probe_id / LINES
        if ran := jobs.ran(log, facts["process"]["began_s"], first_step_s):
            announce(ran)
    observation = Observation.of(facts["processes"])
    program = facts["process"]["program"]
    for name in ("arguments", "named"):  # of ranks that another process of the command has started
        facts = {**facts, name: facts.get(name) or program.get(name, {})}
    seen = script.observed(observation)
    return ObservedLaunch(seen, facts, first_step_s)


def job_of_observed(
    seen: ObservedLaunch,
    run: RunProbe,
    *,
    cluster: Cluster,
    folder: Path,
    announce: Announce,
    adds_knobs: bool = False,
) -> ScriptJob:
    """Return an observed command as a job with the knobs it supports.

    With `adds_knobs` those of torch are among them (`tuner.workload.scripts.torch_knobs`).

    Its ranks are started one by one from what they reported if they then train what was observed;
    else each probe starts the whole command.
    """
    script = seen.script
    assert script.observation is not None
    threads = script.observation.threads
    blank, why = blank_job(script, cluster), seen.why_as_it_stands
    inspect = LaunchInspector(run, folder, announce)
    today = job_of_facts(script, replace(blank, as_it_stands=True), seen.facts, seen.first_step_s)
    announce_today(today, announce)
    announce_optimizers(seen.facts, announce)
    tried = False

    def with_added(job: ScriptJob) -> ScriptJob:
        nonlocal tried
        job = replace(job, frame=replace(job.frame, threads=threads))
        if tried or not adds_knobs:
            return job
        before = inspect.launches
        job = with_torch_knobs(job, seen.facts, inspect.of_torch, cluster, announce)
        tried = inspect.launches > before
        return job

    if not why:
        job, why = _of_ranks(seen, blank, inspect, with_added, cluster=cluster)
        if not why:
            announce_today(job.without_torch_knobs, announce, before=today)
            return with_added(job)
    announce(f"each probe starts your command as it stands: {why}")
    job = replace(today, frame=replace(today.frame, ranks_stay=why))
    job = proven(job, seen.facts, inspect, devices=cluster.devices_per_node)
    announce_today(job, announce, before=today)
    return with_added(job)


def _of_ranks(
    seen: ObservedLaunch,
    blank: ScriptJob,
    inspect: LaunchInspector,
    with_added: Callable[[ScriptJob], ScriptJob],
    *,
    cluster: Cluster,
) -> tuple[ScriptJob, str]:
    """Return the job whose ranks are started one by one, and why it is not the same, or ""."""
    facts, script, devices = seen.facts, seen.script, cluster.devices_per_node
    alone = "started one by one, its ranks"
    if "micro_batch" in facts:  # whether its batches follow DeepSpeed shows at another split
        again = inspect(blank, blank.baseline, alter=True)
        if isinstance(again, str):
            again = inspect(blank, blank.baseline)
        if isinstance(again, str):
            return blank, f"{alone} do not train ({again})"
        if again.get("global_batch") != facts.get("global_batch"):
            return blank, f"{alone} train a global batch of {again.get('global_batch')}"
        job = job_of_facts(script, blank, again, seen.first_step_s)
        return proven(job, again, inspect, devices=devices), ""
    job = proven(
        job_of_facts(script, blank, facts, seen.first_step_s), facts, inspect, devices=devices
    )
    if job.frame.given or job.frame.keeps:  # proven by launches that trained the same otherwise
        return job, ""
    if not inspect.launches and _starts_alone(script) and (job.frame.micro_batch or not _able(job)):
        able = with_added(job)
        if inspect.launches and able.knobs != job.knobs:
            return able, ""  # that it trains the same so shows that its ranks train one by one
        if able.knobs == job.knobs and not (_able(job) or _sets_threads(script)):
            return able, NOTHING_TO_SET
    again = inspect(blank, blank.baseline, why="to see if its ranks train the same one by one")
    if isinstance(again, str):
        return job, f"{alone} do not train ({again})"
    if other := difference(job, facts, again):
        return job, f"{alone} {other}"
    if not job.frame.micro_batch and batches_seen(again).micro_batch:  # one look counted nothing
        job = job_of_facts(script, blank, again, seen.first_step_s)
        job = proven(job, again, inspect, devices=devices)
    return job, ""


def _able(job: ScriptJob) -> bool:
    return any(offer.turned for offer in job.offers.values())


def _starts_alone(script: Script) -> bool:
    # A line that does more than start its program would do all of that in each probe.
    typed = replace(script, observation=None, cwd=Path(script.typed_in or script.cwd))
    return typed.is_script_alone and script.job_script is None


def _sets_threads(script: Script) -> bool:
    # A variable that the line sets itself would hide that of a knob.
    observation = script.observation
    return observation is not None and "OMP_NUM_THREADS" in observation.variables
