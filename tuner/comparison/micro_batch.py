"""View of a study of the micro-batch alone: the largest that leaves some of the memory."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.answer.answer import Answer
from tuner.answer.parts import Point
from tuner.answer.views import View
from tuner.formatting import varying_knobs
from tuner.search_spaces.configuration import Configuration

#: Share of the memory that is to be left: a probe sees the first steps alone, and fragments and
#: longer samples come later.
LEFT = 0.1
_GIB = 2**30


class MicroBatchView(View):
    """View of the largest micro-batch that was measured and may be called safe."""

    PROTOCOL = 1

    def answer_lines(self, answer: Answer) -> list[str]:
        """Return a line on the largest safe micro-batch, and on what is known of a larger one."""
        points = [point for point in answer.points if point.source == "measured"]
        lacking, failed = _failures(answer)
        sizes = [point.configuration for point in points]
        limit = _limit_bytes(answer, sizes[0]) if sizes else None
        if varying_knobs([*sizes, *lacking, *failed]) != ("micro_batch",) or limit is None:
            return []
        least_lacking = min((each.micro_batch for each in lacking), default=None)
        safe = [
            point
            for point in points
            if point.peak_memory_bytes is not None
            and point.peak_memory_bytes <= (1 - LEFT) * limit
            and (least_lacking is None or point.configuration.micro_batch < least_lacking)
        ]
        subject = f"micro-batch that leaves {100 * LEFT:.0f} % of the memory"
        if not safe:
            return [f"No {subject} was measured."]
        largest = max(safe, key=lambda point: point.configuration.micro_batch)
        assert largest.peak_memory_bytes is not None
        used = f"peak {largest.peak_memory_bytes / _GIB:.1f} of {limit / _GIB:.1f} GiB"
        beyond = _beyond(answer, largest, points, lacking, failed)
        size = largest.configuration.micro_batch
        return [f"Largest {subject}, of those measured: {size}, {used}; {beyond}."]


def _failures(answer: Answer) -> tuple[list[Configuration], list[Configuration]]:
    # Configurations that ran out of memory, and those that failed otherwise.
    lacking: list[Configuration] = []
    others: list[Configuration] = []
    for record in answer.failures:
        if record.failure is not None and not record.failure.was_cancelled:
            found = lacking if record.failure.type.lacks_memory else others
            found += record.request.configurations()
    return lacking, others


def _limit_bytes(answer: Answer, configuration: Configuration) -> int | None:
    # Of a rank: its GPU's memory, or its share of the host's.
    cluster = answer.cluster
    if cluster is None:
        return None
    if (own := cluster.device.memory_limit_bytes) and not cluster.device.shares_host_memory:
        return int(own)
    ranks = min(configuration.world_size, cluster.devices_per_node)
    return cluster.host_memory_bytes // ranks or None


def _beyond(
    answer: Answer,
    largest: Point,
    points: Sequence[Point],
    lacking: Sequence[Configuration],
    failed: Sequence[Configuration],
) -> str:
    # Of the smallest larger one that was tried.
    known = {p.configuration.micro_batch: "leaves less" for p in points}
    known |= {each.micro_batch: "failed" for each in failed}
    known |= {each.micro_batch: "ran out of memory" for each in lacking}
    for size in sorted(known):
        if size > largest.configuration.micro_batch:
            return f"{size} {known[size]}"
    batch = answer.job.global_batch if answer.job is not None else 0
    if batch and largest.configuration.accumulation(batch) == 1:
        return "it is a rank's whole batch"
    return "no larger one was tried"


VIEW = MicroBatchView()
