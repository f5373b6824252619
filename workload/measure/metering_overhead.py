"""Overhead of metering: one probe that alternates metered and unmetered blocks of steps.

After an ordinary window the ranks run pairs of blocks of the same number of steps, one with the
power timeline on and one without, in random order, so that drift falls on both alike. The processor
time of the sampling thread is a second figure, without the noise of the step time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from tuner.workload.measure.window import Conductor
from tuner.workload.meters.timeline import Timeline
from tuner.workload.node.probe_run import Probe
from tuner.workload.node.rank_launch import ProbeNode
from tuner.workload.node.runner import LocalRunner
from tuner.workload.probe import ProbeRecord, ProbeRequest


class OverheadProbe(Probe):
    """Probe with step times of `pairs` of blocks of `block_s`, with and without metering."""

    def __init__(self, node: ProbeNode, request: ProbeRequest, pairs: int, block_s: float) -> None:
        super().__init__(node, request)
        self._pairs, self._block_s = pairs, block_s
        self.metered_s: list[float] = []
        self.plain_s: list[float] = []
        self.busy_share, self.resolution_s = 0.0, math.nan  # of a core, by the sampling thread
        self.samples = self.lost = 0  # in the metered blocks, and missing from their grid

    def measure(
        self, conductor: Conductor, timeline: Timeline, step_time_s: float, notes: Sequence[str]
    ) -> None:
        super().measure(conductor, timeline, step_time_s, notes)
        timeline.stop()
        if self.measurements:
            step_time_s = self.measurements[-1].step_time_s
        steps = max(1, round(self._block_s / step_time_s))
        order = random.Random(self.request.probe_id)
        busy_s = sampled_s = 0.0
        for _ in range(self._pairs):
            for metered in order.sample((True, False), 2):
                if not metered:
                    self.plain_s.append(sum(conductor.run(steps)) / steps)
                    continue
                timeline = Timeline(self.meter)
                try:
                    seconds = sum(conductor.run(steps))
                finally:
                    self.samples += len(timeline.stop())
                self.metered_s.append(seconds / steps)
                busy_s, sampled_s = busy_s + timeline.busy_s, sampled_s + seconds
                self.lost += timeline.lost
        self.busy_share, self.resolution_s = busy_s / sampled_s, self.meter.resolution_s


def measure_overhead(
    runner: LocalRunner, request: ProbeRequest, *, pairs: int, block_s: float
) -> tuple[ProbeRecord, OverheadProbe]:
    """Run one probe, then steps with and without metering; return its record and the times."""
    made: list[OverheadProbe] = []

    def make(node: ProbeNode, request: ProbeRequest) -> Probe:
        made.append(OverheadProbe(node, request, pairs, block_s))
        return made[0]

    record = runner.run_as(make, request)
    return record, made[0]
