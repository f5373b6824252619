"""Processor time that a probe's lead spends on the power of many nodes.

Peers answer within the process, and the samples of a window are already there, so the time is the
lead's own. It is counted per sample of the timeline: 10 of them are taken in a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cache
from typing import Any, cast

from benchmarks.figures import Figure
from tuner.cluster.multi_node import MultiNodeTimeline, Nodes
from tuner.cluster.peer import Peer, with_shared_states
from tuner.workload.node.meters import Reading
from tuner.workload.node.meters.base import Meter
from tuner.workload.records.probe import MeterInfo, PowerSample

NODES, GPUS = 1024, 8
#: Samples of a window of four seconds, and windows of a probe.
SAMPLES, WINDOWS = 40, 4


def sample(at_s: float) -> PowerSample:
    """Return the sample of a node, as NVML's meter takes it."""
    extra = {"clock_MHz": 1500.0, "temperature_C": 60.0, "throttle": 0.0}
    for gpu in range(GPUS):
        extra |= {
            f"gpu{gpu}_power_W": 500.0,
            f"gpu{gpu}_clock_MHz": 1500.0,
            f"gpu{gpu}_temperature_C": 60.0,
        }
    return PowerSample(at_s, 4000.0, extra)


class _Meter:
    info = MeterInfo("nvml", "gpu", "a benchmark's samples")
    resolution_s = 0.1

    def sample(self) -> PowerSample:
        return sample(time.monotonic())

    def read(self) -> Reading:
        return Reading(time.monotonic(), 0.0)


class _Peer:
    """Peer whose timeline already holds the samples of the windows so far."""

    def __init__(self) -> None:
        self.taken: list[PowerSample] = []

    def take(self, samples: Iterable[PowerSample]) -> None:
        """Add a window's samples as the node sends them; that is its work, not the lead's."""
        self.taken += with_shared_states(tuple(samples))

    def samples(self, after: int) -> tuple[PowerSample, ...]:
        return tuple(self.taken[after:])


def lead_ms(nodes: int) -> float:
    """Return the processor time of the lead for one sample of all nodes, milliseconds."""
    peers = [_Peer() for _ in range(nodes - 1)]
    group = Nodes([cast("Peer", peer) for peer in peers])
    timeline: Any = MultiNodeTimeline(cast("Meter", _Meter()), group, GPUS)
    timeline._ticker.stop()  # its own samples are made up, too
    timeline._samples.clear()
    spent_s = 0.0
    for window in range(WINDOWS):
        at_s = [0.1 * (window * SAMPLES + k) for k in range(SAMPLES)]
        timeline._samples += map(sample, at_s)
        for peer in peers:
            peer.take(map(sample, at_s))
        began_s = time.process_time()
        assert len(timeline.samples) == (window + 1) * SAMPLES
        spent_s += time.process_time() - began_s
    group.close()
    return 1000 * spent_s / (WINDOWS * SAMPLES)


@cache
def figures() -> list[Figure]:
    """Return the time of the lead on few and on many nodes."""
    return [Figure(f"lead_ms_{nodes}_nodes", lead_ms(nodes), "ms") for nodes in (16, NODES)]
