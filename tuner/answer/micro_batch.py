"""The fastest and the largest safe micro-batch of a study that searched the micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.answer.judge import Judge
from tuner.answer.parts import Point
from tuner.answer.significance import Difference
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import ProbeRecord

#: Name of the space whose answer this is.
SPACE = "micro-batch"
#: Share of the memory that a safe micro-batch takes at most: a probe sees the first steps alone,
#: and fragments and longer samples come later.
SAFE_SHARE = 0.9


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch that was measured.

    Attributes:
        accumulation: micro-batches of a rank in one optimizer step, which keep the global batch.
        peak_bytes: of the fullest rank; None if it was not measured.
        time, energy: difference from today's; None for today's own, and if today was not measured.
    """

    size: int
    accumulation: int
    samples_per_s: float
    J_per_sample: float
    energy_mark: str
    has_energy: bool
    peak_bytes: int | None
    time: Difference | None = None
    energy: Difference | None = None


@dataclass(frozen=True)
class MicroBatchAdvice:
    """Outcome of a search of the micro-batch.

    Attributes:
        largest_safe: the largest measured one whose peak leaves a margin and that is smaller than
            any that ran out of memory; None if there is none, or peak or limit is unknown.
        limit_bytes: memory that a rank may use; None if unknown.
        beyond: why none larger is called safe: "whole_batch" (there is none), "out_of_memory",
            "margin" (a larger one leaves less than the margin), "failed", or "not_tried".
        measured: number of micro-batches that were measured.
        beyond_size: the smallest larger one of which `beyond` was seen; None if there is none.
    """

    fastest: MicroBatch
    today: MicroBatch | None
    largest_safe: MicroBatch | None
    limit_bytes: int | None
    margin_bytes: int | None
    margin_share: float | None
    beyond: str
    beyond_size: int | None
    measured: int
    safe_share: float = SAFE_SHARE


def is_searched(about: Mapping[str, Any]) -> bool:
    """Return whether a study's space is the micro-batch alone."""
    space = about.get("space")
    return isinstance(space, Mapping) and space.get("name") == SPACE


def doublings(candidates: Candidates, today: Configuration) -> tuple[Configuration, ...]:
    """Return the candidates of the doubled micro-batch of today, doubled again, and so on.

    Each is tried before any smaller one: they are what may be faster, and the first that runs out
    of memory leaves the larger ones for last.
    """
    sizes = {each.micro_batch: each for each in candidates.configurations}
    size = 2 * today.micro_batch
    found = []
    while size <= max(sizes):
        if size in sizes:
            found.append(sizes[size])
        size *= 2
    return tuple(found)


def micro_batch_answer(
    judge: Judge, failures: Sequence[ProbeRecord], job: TrainingJob, cluster: Cluster | None
) -> MicroBatchAdvice | None:
    """Return the answer of a search of the micro-batch; None if nothing was measured."""
    if not judge.points or judge.points[0].source != "measured":
        return None
    like = (judge.baseline or judge.points[0]).configuration
    sizes = [_of(judge, job, point) for point in judge.points if _alike(point.configuration, like)]
    lacking, failed = _failed(failures, like)
    limit = _limit_bytes(cluster, like)
    safe = [each for each in sizes if _is_safe(each, limit, lacking)]
    largest = max(safe, key=lambda each: each.size, default=None)
    margin = limit - largest.peak_bytes if largest and limit and largest.peak_bytes else None
    today = _number(like, "micro_batch") if judge.baseline else None
    beyond, beyond_size = _beyond(largest, sizes, lacking, failed)
    return MicroBatchAdvice(
        fastest=max(sizes, key=lambda each: each.samples_per_s),
        today=next((each for each in sizes if each.size == today), None),
        largest_safe=largest,
        limit_bytes=limit,
        margin_bytes=margin,
        margin_share=margin / limit if margin is not None and limit else None,
        beyond=beyond,
        beyond_size=beyond_size,
        measured=len(sizes),
    )


def _alike(configuration: Configuration, other: Configuration) -> bool:
    # The same but for the micro-batch.
    def rest(each: Configuration) -> tuple[dict[str, Any], dict[str, Any]]:
        launch = {name: value for name, value in each.launch.items() if name != "micro_batch"}
        return launch, dict(each.live)

    return rest(configuration) == rest(other)


def _number(configuration: Configuration, knob: str, default: int = 1) -> int:
    value = configuration.get(knob)
    return int(value) if isinstance(value, int | float) else default


def _of(judge: Judge, job: TrainingJob, point: Point) -> MicroBatch:
    configuration = point.configuration
    size = _number(configuration, "micro_batch")
    samples = _number(configuration, "global_batch", job.global_batch)
    energy, time = judge.differences(point) or (None, None)
    return MicroBatch(
        size=size,
        accumulation=samples // (size * _number(configuration, "data_parallel")),
        samples_per_s=samples * judge.steps / point.time_to_solution_s,
        J_per_sample=1000 * point.energy_to_solution_kJ / (samples * judge.steps),
        energy_mark=point.meter.mark,
        has_energy=point.meter.has_energy,
        peak_bytes=point.peak_memory_bytes,
        time=time,
        energy=energy,
    )


def _failed(failures: Sequence[ProbeRecord], like: Configuration) -> tuple[set[int], set[int]]:
    # Micro-batches that ran out of memory, and that failed otherwise.
    lacking: set[int] = set()
    others: set[int] = set()
    for record in failures:
        if record.failure is None or record.failure.was_cancelled:
            continue
        for configuration in record.request.configurations():
            if _alike(configuration, like):
                size = _number(configuration, "micro_batch")
                (lacking if record.failure.type.lacks_memory else others).add(size)
    return lacking, others


def _limit_bytes(cluster: Cluster | None, configuration: Configuration) -> int | None:
    # Of a rank: its GPU's memory, or its share of the host's.
    if cluster is None:
        return None
    if (own := cluster.device.memory_limit_bytes) and not cluster.device.shares_host_memory:
        return int(own)
    ranks = min(_number(configuration, "data_parallel"), cluster.devices_per_node)
    return cluster.host_memory_bytes // ranks or None


def _is_safe(each: MicroBatch, limit: int | None, lacking: Iterable[int]) -> bool:
    if limit is None or each.peak_bytes is None:
        return False
    return each.peak_bytes <= SAFE_SHARE * limit and each.size < min(lacking, default=each.size + 1)


def _beyond(
    largest: MicroBatch | None, sizes: list[MicroBatch], lacking: set[int], failed: set[int]
) -> tuple[str, int | None]:
    least = largest.size if largest is not None else 0
    seen = {each.size: "margin" for each in sizes} | dict.fromkeys(failed, "failed")
    seen |= dict.fromkeys(lacking, "out_of_memory")
    for size in sorted(seen):
        if size > least:
            return seen[size], size
    if largest is not None and largest.accumulation == 1:
        return "whole_batch", None
    return "not_tried", None
