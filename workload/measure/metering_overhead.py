"""Overhead of metering: one probe that alternates metered and unmetered blocks of steps.

After an ordinary window the ranks run pairs of blocks of the same number of steps, one with the
power timeline on and one without, in random order, so that drift falls on both alike. The processor
time of the sampling thread is a second figure, without the noise of the step time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.workload.measure.window import Conductor
from tuner.workload.meters.timeline import Timeline
from tuner.workload.node.probe_run import Probe
from tuner.workload.node.rank_launch import ProbeNode
from tuner.workload.node.runner import LocalRunner
from tuner.workload.probe import ProbeRecord, ProbeRequest


@dataclass(frozen=True)
class MeteringOverhead:
    """Step times with and without metering in pairs, and the sampling thread's share of a core."""

    metered_s: tuple[float, ...]
    plain_s: tuple[float, ...]
    busy_share: float
    samples: int
    lost: int
    resolution_s: float


class _OverheadProbe(Probe):
    def __init__(self, node: ProbeNode, request: ProbeRequest, pairs: int, block_s: float) -> None:
        super().__init__(node, request)
        self._pairs, self._block_s = pairs, block_s
        self.metered_s: list[float] = []
        self.plain_s: list[float] = []
        self.busy_s = self.sampled_s = 0.0
        self.samples = self.lost = 0

    def measure(
        self, conductor: Conductor, timeline: Timeline, step_time_s: float, notes: Sequence[str]
    ) -> None:
        super().measure(conductor, timeline, step_time_s, notes)
        timeline.stop()
        if self.measurements:
            step_time_s = self.measurements[-1].step_time_s
        steps = max(1, round(self._block_s / step_time_s))
        order = random.Random(self.request.probe_id)
        for _ in range(self._pairs):
            for metered in order.sample((True, False), 2):
                if metered:
                    self.metered_s.append(self._metered(conductor, steps))
                else:
                    self.plain_s.append(sum(conductor.run(steps)) / steps)

    def _metered(self, conductor: Conductor, steps: int) -> float:
        timeline = Timeline(self.meter, beside=self.node.beside)
        try:
            seconds = sum(conductor.run(steps))
        finally:
            self.samples += len(timeline.stop())
        self.busy_s, self.sampled_s = self.busy_s + timeline.busy_s, self.sampled_s + seconds
        self.lost += timeline.lost
        return seconds / steps


def measure_overhead(
    runner: LocalRunner, request: ProbeRequest, *, pairs: int, block_s: float
) -> tuple[ProbeRecord, MeteringOverhead]:
    """Run one probe, then steps with and without metering; return its record and the times."""
    made: list[_OverheadProbe] = []

    def make(node: ProbeNode, request: ProbeRequest) -> Probe:
        made.append(_OverheadProbe(node, request, pairs, block_s))
        return made[0]

    record = runner.run_as(make, request)
    (probe,) = made
    return record, MeteringOverhead(
        tuple(probe.metered_s),
        tuple(probe.plain_s),
        probe.busy_s / probe.sampled_s if probe.sampled_s else 0.0,
        probe.samples,
        probe.lost,
        runner.node.meter.resolution_s,
    )
