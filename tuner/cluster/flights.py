"""Probes that have nodes of a Ray cluster, and those that wait for some.

Their time limits: how long an agent may take, and how long a probe waits for nodes; and the cause
of an agent's death while it had a probe.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from tuner.cluster.nodes import Slot
from tuner.search_spaces.configuration import Settings
from tuner.workload.records.probe import (
    Continuation,
    Failure,
    MeterInfo,
    ProbeRecord,
    ProbeRequest,
    shown_by,
)
from tuner.workload.records.trace import partial_record

#: An agent that exceeded its limit is sent a cancellation, and is killed after this time.
_CANCEL_S = 10.0
#: A probe for which no node became free for this long fails; the study continues with the next.
NO_NODE_S = 600.0
#: A probe that needs more nodes than the cluster has left fails after this time; smaller ones are
#: started before it meanwhile.
SHORT_S = 60.0
#: An agent that cannot be reached may be gone, or its whole node: Ray knows after some seconds.
_UNREACHABLE_S, _RETRY_S = 30.0, 0.5
#: Probes that begin within this time take about as long as each other.
TOGETHER_S = 10.0


@dataclass
class Flight:
    """A probe with the slots and the lease it was given.

    `extend` returns further settings of an extendable probe. `result` refers to the agent's answer,
    None until the lease is granted. It waits for nodes since `queued_s`, and for this lease since
    `since_s`. It began at `began_s`, seconds since the epoch. At `deadline_s` it is cancelled, or
    killed if it was cancelled before. Since `unreachable_s` the agent cannot be reached, 0 while it
    can. `so_far` is the record at its last request for settings.
    """

    request: ProbeRequest
    slots: list[Slot]
    lease: Any
    queued_s: float
    since_s: float
    result: Any = None
    began_s: float = field(default_factory=time.time)
    deadline_s: float = 0.0
    cancelled: bool = False
    unreachable_s: float = 0.0
    retry_s: float = 0.0
    so_far: ProbeRecord | None = None
    extend: Continuation | None = None

    @property
    def nodes(self) -> str:
        return ", ".join(dict.fromkeys(slot.name for slot in self.slots))

    @property
    def power_W(self) -> float:
        """Power in the latest reported window; 0 before the first."""
        measured = self.so_far.measurements if self.so_far is not None else ()
        return measured[-1].power_W if measured else 0.0

    def receives_lease(self, timeout_s: float) -> bool:
        """Return True if Ray grants its lease within a time."""
        try:
            return bool(self.lease.wait(timeout_seconds=timeout_s))
        except Exception as error:
            # A raylet that ends takes its leases along before it refuses connections.
            if "does not exist" not in str(error):
                raise
            return False

    def launch(self, limit_s: float) -> None:
        """Send the request to the agent of its first slot; its answer is due in `limit_s`."""
        self.began_s = time.time()
        lead, *others = self.slots
        peers = [(f"node {slot.name}", slot.agent) for slot in others]
        self.result = lead.agent.run.remote(self.request.to_json(), peers, lead.address)
        self.deadline_s = time.monotonic() + limit_s

    def proceed(self, so_far: ProbeRecord) -> None:
        """Send the agent further settings, or none, for the record that it reported."""
        self.so_far, request = so_far, so_far.request
        more = self.extend(request, so_far.measurements) if self.extend else ()
        live = [each.to_json() for each in more]
        self.result = self.slots[0].agent.continue_probe.remote(request.probe_id, live)

    def call_again(self) -> None:
        """Ask the agent for a sign of life if it is time to."""
        if time.monotonic() >= self.retry_s:
            self.result = self.slots[0].agent.pid.remote()

    def wait_for_agent(self) -> bool:
        """Note that the agent cannot be reached; return True to wait for it a little longer."""
        now_s = time.monotonic()
        self.unreachable_s = self.unreachable_s or now_s
        if now_s - self.unreachable_s >= _UNREACHABLE_S:
            return False
        self.result, self.retry_s = None, now_s + _RETRY_S
        return True

    def cancel(self) -> bool:
        """Send a cancellation if it is overdue; return True if it was cancelled before."""
        now_s = time.monotonic()
        if self.result is None or self.unreachable_s or now_s < self.deadline_s:
            return False
        before, self.cancelled, self.deadline_s = self.cancelled, True, now_s + _CANCEL_S
        if not before:
            self.slots[0].agent.cancel.remote()
        return before

    def failed(self, failure: Failure, meter: MeterInfo) -> ProbeRecord:
        """Return the record of the probe up to now, which its agent cannot give any more."""
        so_far = self.so_far or ProbeRecord(self.request, (), meter)
        return self.until_now(partial_record(so_far.request, so_far.measurements, meter, failure))

    def until_now(self, record: ProbeRecord) -> ProbeRecord:
        """Return the probe's record from its launch until now, when its end is known here.

        A probe that begins meanwhile is none that was tried after it (`rules.node_failures`).
        """
        return replace(
            record,
            host=self.slots[0].name,
            started_at=datetime.fromtimestamp(self.began_s, UTC).isoformat(timespec="milliseconds"),
            wall_s=max(0.0, time.time() - self.began_s),
        )


@dataclass
class QueuedProbe:
    """A probe that waits for slots on `need` nodes.

    The cluster has had too few nodes since `short_s`, 0 if it has enough.
    """

    request: ProbeRequest
    need: int
    since_s: float = field(default_factory=time.monotonic)
    short_s: float = 0.0
    extend: Continuation | None = None

    def note_nodes(self, nodes: int) -> None:
        """Note the number of nodes that the cluster has now."""
        self.short_s = (self.short_s or time.monotonic()) if self.need > nodes else 0.0

    def lets_pass(self, free: Sequence[Slot], flights: Sequence[Flight]) -> bool:
        """Return True if a probe that begins now hardly delays this one, which waits for nodes.

        It ends with the probes that this one waits for anyway if they have just begun. That holds
        for `TOGETHER_S` of its wait, so it is not passed for ever (cf. EASY backfilling: Lifka,
        "The ANL/IBM SP scheduling system", 1995).
        """
        since_s, nodes = time.monotonic() - TOGETHER_S, {slot.node for slot in free}
        for flight in sorted(flights, key=lambda each: each.since_s):
            nodes |= {slot.node for slot in flight.slots}
            if len(nodes) >= self.need:
                return min(self.since_s, flight.since_s) > since_s
        return False

    def failure(self, nodes: int, listed: int) -> tuple[str, str] | None:
        """Return kind and sentence of the failure of a probe that waited too long, or None.

        `nodes` are in use, and the study's cluster has `listed`.
        """
        now_s, are = time.monotonic(), "is" if nodes == 1 else "are"
        if nodes and self.short_s and listed < self.need:
            return "refused", f"it needs {self.need} nodes, and {nodes} {are} in use"
        if nodes and self.short_s and now_s - self.short_s > SHORT_S:
            left = f"for {SHORT_S:.0f} s no more than {nodes} {are} left in the Ray cluster"
            return "node", f"it needs {self.need} nodes, and {left}"
        if now_s - self.since_s <= NO_NODE_S:
            return None
        if self.need == 1:
            return "node", f"no node came free within {NO_NODE_S:.0f} s"
        return "node", f"{self.need} nodes were not free together within {NO_NODE_S:.0f} s"


#: Agents that die with one launch before it is blamed. Anybody may end an agent once; one that dies
#: with the same launch again, in a new process, is the work of the launch. Not fitted.
_LOSSES = 2


class Losses:
    """Causes of dead agents, by Ray's records and by the agents that a launch lost before."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._of_launch: Counter[Settings] = Counter()

    def failure(self, flight: Flight, error: Exception) -> Failure:
        """Return the failure of a probe whose agent died, though its node is alive."""
        if isinstance(error, self._ray.exceptions.OutOfMemoryError):
            return Failure(
                shown_by("no memory"),
                "out of host memory: Ray's memory monitor ended the node agent before the kernel "
                "ended a rank; start Ray with RAY_memory_monitor_refresh_ms=0",
            )
        reason = str(error).strip().splitlines()[0]
        if flight.cancelled:
            return Failure("time_limit", f"the node agent died: {reason}")
        if self._is_first(flight):
            return Failure("node", f"the node agent died: {reason}")
        return Failure("crash", f"the node agent died with this launch again: {reason}")

    def failure_of_peer(self, flight: Flight, failure: Failure) -> Failure:
        """Return the failure of a probe on several nodes, reported by another than the first."""
        return failure if self._is_first(flight) else replace(failure, kind="crash")

    def _is_first(self, flight: Flight) -> bool:
        self._of_launch[flight.request.launch] += 1
        return self._of_launch[flight.request.launch] < _LOSSES
