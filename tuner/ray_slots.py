"""Room for probes on a Ray cluster, and what is on its way: the executor's own bookkeeping.

A slot is a node or a part of one, with the agent that runs probes there; a flight is a probe with
the slots and the lease it was given; what is queued waits for slots.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from workload.probe import Measurement, ProbeRequest

__all__ = ["Flight", "Queued", "Slot"]


@dataclass
class Slot:
    """Room for one probe: a node, or a part of its devices.

    Attributes:
        node: Ray's id of it.
        name, address: of the node.
        agent: the actor that runs the probe.
        amount: devices to lease.
        devices: UUIDs of the GPUs that are the agent's; empty: all of the node.
        taken: whether a probe has it.
        aside_s: until when it is not used, on the monotonic clock.
    """

    node: str
    name: str
    address: str
    agent: Any
    amount: float
    devices: tuple[str, ...] = ()
    taken: bool = False
    aside_s: float = 0.0

    def free(self, now_s: float) -> bool:
        return not self.taken and now_s >= self.aside_s


@dataclass
class Flight:
    """One probe on its way.

    Attributes:
        request: what is asked.
        slots: where; the first leads.
        lease: its placement group.
        since_s: when the lease was asked for.
        result: what the agent will answer; None until the lease is had.
        unreachable_s: since when the agent cannot be reached; 0 while it can.
        ask_s: when to ask it again.
        measured: what an open probe had measured when it last asked what else to visit.
    """

    request: ProbeRequest
    slots: list[Slot]
    lease: Any
    since_s: float
    result: Any = None
    deadline_s: float = 0.0
    cancelled: bool = False
    unreachable_s: float = 0.0
    ask_s: float = 0.0
    measured: tuple[Measurement, ...] = ()


@dataclass
class Queued:
    """A probe that waits for room.

    Attributes:
        request: what is asked.
        since_s: since when it waits.
        short_s: since when the cluster has fewer nodes than it needs; 0 while it has enough.
    """

    request: ProbeRequest
    since_s: float = field(default_factory=time.monotonic)
    short_s: float = 0.0
