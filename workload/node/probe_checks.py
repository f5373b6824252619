"""Checks of a probe's ranks and windows, and the failures that they show."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob
from tuner.workload.hook import GROUPS
from tuner.workload.node.clocks.base import GovernorError
from tuner.workload.node.measure.agreement import Levels
from tuner.workload.node.measure.measurement import drift_of
from tuner.workload.node.measure.stragglers import HostWatch, Straggler, device_state, stragglers
from tuner.workload.node.measure.window import Conductor, ProbeFailed
from tuner.workload.node.meters import MeterError
from tuner.workload.node.meters.base import device_states
from tuner.workload.node.meters.timeline import Timeline
from tuner.workload.node.rank_group import NoReply, ServerError
from tuner.workload.node.rank_launch import ProbeNode
from tuner.workload.records.probe import (
    LONG_STEP_S,
    Failure,
    Measurement,
    PowerSample,
    ProbeRequest,
)
from tuner.workload.records.trace import partial_record, save_partial, write_power_samples
from tuner.workload.scripts.evidence import batches_seen

#: Processes that a command starts at once reach their first steps this far apart, seconds.
LEAST_WAIT_S = 2.0
#: A second training has this long to begin after a first of a few steps, seconds.
SECOND_LIMIT_S = 60.0


def failure_of(
    error: ServerError | InputError | MeterError | GovernorError | OSError,
    log_tail: Callable[[], str],
) -> Failure:
    """Return the failure of a probe that this error ended."""
    if isinstance(error, NoReply):  # a build that takes too long, or a machine that hangs
        return Failure("node", f"ranks could not be started: {error}", log_tail())
    if isinstance(error, ServerError):
        detail = error.detail or log_tail()
        return Failure("crash", f"ranks could not be started: {error}", detail)
    if isinstance(error, InputError):
        return Failure("refused", str(error))
    action = "hold the probe's files" if isinstance(error, OSError) else "be metered or set"
    return Failure("node", f"the node cannot {action}: {error}")


def ops_needed(launch: Settings, job: TrainingJob | None = None) -> tuple[str, ...]:
    """Return the DeepSpeed ops, by builder name, that a launch of a job compiles and loads."""
    if job is not None and not job.on_deepspeed:
        return ()
    places = [launch.get(name, "none") for name in ("optimizer_offload", "parameter_offload")]
    adam = ("CPUAdamBuilder",) if places[0] != "none" else ()
    return (*adam, "AsyncIOBuilder") if "nvme" in places else adam


def prepare_ops(
    node: ProbeNode,
    request: ProbeRequest,
    environment: dict[str, Any],
    enter: Callable[[str], None],
) -> None:
    """Import the frameworks and build the ops of a launch, both once a machine.

    A build is a phase that `enter` shows; `environment` notes its seconds, also of a failed one.
    """
    ops = ops_needed(request.launch, node.job)
    began_s = time.monotonic()
    if building := node.server.missing_ops(ops):
        names = ", ".join(name.removesuffix("Builder") for name in building)
        enter(f"building DeepSpeed's {names}, once a machine")
    try:
        node.prepare(ops)
    finally:
        if building:
            environment["built_s"] = time.monotonic() - began_s


def measured_levels(
    node: ProbeNode, request: ProbeRequest, timeline: Timeline, nodes: int
) -> Levels:
    """Measure the idle power before a launch; return it with the limit of the lease's devices."""
    meter, device = timeline.meter, node.cluster.device
    idle_W = node.idle.measure(
        meter, request.window.idle_s, node.cancelled.wait, samples=lambda: timeline.samples
    )
    most_W = math.inf
    if meter.info.scope == "gpu":
        limits_W = [live.get("power_limit_W") for live in request.live]
        each_W = max([device.max_W, *(w for w in limits_W if isinstance(w, int | float))])
        most_W = each_W * node.cluster.devices_per_node * nodes
    return Levels(idle_W, node.idle.sampled_W, most_W)


def keep_so_far(
    node: ProbeNode, request: ProbeRequest, measurements: Sequence[Measurement]
) -> None:
    """Save a probe's measurements so far, if the node keeps them for a driver that may die."""
    if node.keep:
        save_partial(node.run_dir, partial_record(request, measurements, node.meter.info))


def keep_timeline(
    run_dir: Path,
    probe_id: str,
    timeline: Timeline,
    *,
    since_s: float,
    phases: Sequence[tuple[float, str]],
) -> dict[str, Any]:
    """Stop a timeline and write its samples; return notes for the record's environment."""
    notes: dict[str, Any] = {}
    samples = timeline.stop()
    try:
        write_power_samples(run_dir, probe_id, samples, since_s=since_s, phases=phases)
    except OSError as error:  # only a picture is lost
        notes["power_samples"] = f"not written: {error}"
    return {**notes, "power_samples_lost": timeline.lost}


def drift_flags(measurements: Sequence[Measurement], *, of_power: bool) -> list[str]:
    """Return the flags of windows whose probe drifted, or was not checked for it."""
    drift = drift_of(measurements, of_power=of_power)
    if drift is None:
        return ["drift was not checked: no setting was measured twice"]
    return [f"drift: {drift.sentence}"] if drift.notable else []


def found_stragglers(
    conductor: Conductor,
    samples: Sequence[PowerSample],
    host: HostWatch,
    *,
    ranks: int,
    nodes: int,
    each: int,
) -> list[Straggler]:
    """Return the ranks that others waited for, with the causes that devices and hosts show.

    Args:
        each: devices of a node.
    """
    conductor.arrivals.close(conductor.done)
    seen = [device_states(sample) for sample in samples]
    on_node = ranks // nodes
    states = {
        rank: host.state(
            device_state(rank, device, seen, str(rank // on_node) if nodes > 1 else "")
        )
        for rank, device in enumerate(devices_in_use(nodes, each, ranks))
    }
    return stragglers(conductor.arrivals, states)


def devices_in_use(nodes: int, each: int, ranks: int) -> list[int]:
    """Return the device of each rank by its number among those of all nodes."""
    return [node * each + rank for node in range(nodes) for rank in range(ranks // nodes)]


def peak_bytes(peaks: Sequence[Mapping[str, int]], held_bytes: int | None = None) -> int | None:
    """Return the memory of the fullest rank, or that held on the fullest device, if more."""
    values = [peak.get("device_bytes", peak.get("host_bytes", 0)) for peak in peaks]
    if held_bytes and any("device_bytes" in peak for peak in peaks):
        values.append(held_bytes)
    return max(values) if values else None


def inspect_cause(conductor: Conductor, first_step_s: float) -> None:
    """Run the steps that the hook counts besides the first; fewer if they are long or it ends.

    A process that trains beside the ranks has as long as these had to reach its first step.
    """
    conductor.wait_for_others(max(LEAST_WAIT_S, first_step_s))
    try:
        while conductor.done < GROUPS and sum(conductor.run(1)) < LONG_STEP_S:
            pass
    except ProbeFailed:
        if not conductor.ended_by_itself:
            raise
        conductor.require_one_training(SECOND_LIMIT_S)


def require_batches(conductor: Conductor, job: TrainingJob, configuration: Configuration) -> None:
    """Check that the ranks train the batches of the configuration; ProbeFailed if they do not."""
    if not job.counts_batches:
        return
    if conductor.done < GROUPS:
        conductor.run(GROUPS - conductor.done)
    seen = batches_seen(conductor.facts)
    wanted = configuration.micro_batch, configuration.accumulation(job.global_batch)
    if seen.steps and (seen.micro_batch, seen.accumulation) != wanted:
        found = f"{seen.micro_batch} samples x {seen.accumulation} backward passes a step"
        wanted_text = f"{wanted[0]} x {wanted[1]}"
        raise ProbeFailed(
            Failure("refused", f"each rank trains {found} where {wanted_text} are to be measured")
        )
