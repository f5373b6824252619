"""Executor on a Ray cluster: it leases nodes to probes and keeps their time limits.

A probe leases what it is charged for: whole nodes where the energy of a node is measured, else as
many devices as the cluster lists for a node; one node if its ranks fit into one, several if not.
The nodes themselves, which join and leave while the study runs, are `tuner.cluster.nodes`'.
A probe that exceeds its limit is cancelled; an agent that does not answer is killed, and everything
it started dies with it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tuner.cluster.agent import MakeRunner
from tuner.cluster.head import NodeDemand
from tuner.cluster.joining import actor_is_gone, import_ray, join_ray, resource_of
from tuner.cluster.nodes import Leases, NodePool, Slot, admit_first, holders
from tuner.cluster.security import exposures
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.job import TrainingJob
from tuner.workload.node.probe_run import ops_needed
from tuner.workload.records.probe import (
    Failure,
    MeterInfo,
    NextSettings,
    ProbeRecord,
    ProbeRequest,
    shown_by,
)
from tuner.workload.records.trace import partial_record, save_partial
from tuner.workload.scripts.installed import BUILD_LIMIT_S

# Probes that have nodes of a Ray cluster, and those that wait for some.
#
# Their time limits: how long an agent may take, and how long a probe waits for nodes; and the cause
# of an agent's death while it had a probe.


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

    `next_settings` returns further settings of an extendable probe. `result` refers to the agent's
    answer, None until the lease is granted. It waits for nodes since `queued_s`, and for this lease
    since `since_s`. It began at `began_s`, seconds since the epoch. At `deadline_s` it is
    cancelled, or killed if it was cancelled before. Since `unreachable_s` the agent cannot be
    reached, 0 while it can. `so_far` is the record at its last request for settings.
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
    next_settings: NextSettings | None = None

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
        more = self.next_settings(request, so_far.measurements) if self.next_settings else ()
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
    next_settings: NextSettings | None = None

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


#: Time an agent may take beyond the probe's own limit (reading meters, writing files) before it is
#: sent a cancellation.
_GRACE_S = 20.0
#: A lease that is not granted by then is given up, and its nodes are set aside for a while.
_LEASE_S, _ASIDE_S = 60.0, 30.0
#: A node that failed (damaged GPUs, a full disk) is tried again after this time.
_ASIDE_FAILED_S = 600.0
#: No further probe is requested while more than this number wait for nodes that are lost.
_SHORT_MOST = 1


GAUGES = {
    "joulefront_probes": "Probes that are measured now.",
    "joulefront_nodes": "Nodes that these probes have.",
    "joulefront_power_watts": "Power of these probes in their latest windows, watts.",
}


class Gauges:
    """Gauges of one run, by `ray.util.metrics`; Ray exports them every few seconds."""

    def __init__(self, run: str) -> None:
        from ray.util.metrics import Gauge

        self._gauges = {
            name: Gauge(name, description=text, tag_keys=("run",)).set_default_tags({"run": run})
            for name, text in GAUGES.items()
        }

    def set(self, probes: int, nodes: int, power_W: float) -> None:
        """Set them."""
        for gauge, value in zip(self._gauges.values(), (probes, nodes, power_W), strict=True):
            gauge.set(value)


class RayExecutor:
    """Executor that runs probes on every node of a Ray cluster that has the cluster's devices.

    InputError if Ray is not installed, does not answer, or has no node with the devices. `run_dir`
    is the folder of logs and power samples, on the agent's node, too.
    """

    def __init__(
        self,
        job: TrainingJob,
        cluster: Cluster,
        *,
        run_dir: str | Path,
        address: str | None = None,
        make_runner: MakeRunner | None = None,
        announce: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._ray = ray = import_ray()
        self._job, self._cluster, self._announce = job, cluster, announce
        self._run_dir = Path(run_dir).resolve()
        self._flights: list[Flight] = []
        self._queue: deque[QueuedProbe] = deque()
        self._done: deque[ProbeRecord] = deque()
        self._held: set[str] = set()  # nodes that were said to be held by others
        if not ray.is_initialized():
            announce("starting Ray" if address is None else f"joining Ray at {address}")
        cpus = None if cluster.device.is_gpu else cluster.devices_per_node
        self._link = join_ray(address, cpus=cpus)
        self._leases = Leases(ray, self._link.head, resource_of(cluster))
        self._losses = Losses(ray)
        self._gauges = Gauges(self._run_dir.name)
        devices = {resource_of(cluster): float(cluster.devices_per_node)}
        self._demand = NodeDemand(ray, self._link.head, devices, cluster.nodes, announce)
        self.pool = pool = NodePool(
            ray,
            job,
            cluster,
            run_dir=str(self._run_dir),
            make_runner=make_runner,
            local=self._link.started,
            announce=announce,
        )
        try:
            pool.warn_of_exposures(exposures())
            if not self._link.started:
                self._demand.meet()
            self._link.head.call(self._admit_first)
        except BaseException:
            self.close()
            raise

    # ---- the protocol

    @property
    def meter(self) -> MeterInfo:
        assert self.pool.meter is not None
        return self.pool.meter

    @property
    def capacity(self) -> int:
        """Number of probes in flight and of further ones that can be submitted now."""
        nodes, free = len(self.pool.node_ids), self.pool.free()
        wait = [queued for queued in self._queue if queued.need <= nodes]
        short = len(self._queue) - len(wait)
        held_back = len(wait) > 1 or any(not each.lets_pass(free, self._flights) for each in wait)
        room = 0 if held_back or short > _SHORT_MOST else len(free)
        return max(1, self.in_flight + room)

    @property
    def in_flight(self) -> int:
        return len(self._flights) + len(self._queue) + len(self._done)

    def places(self) -> dict[str, str]:
        """Return the names of the nodes of each probe that has a lease, by probe."""
        return {flight.request.probe_id: flight.nodes for flight in list(self._flights)}

    def prepare(self) -> None:
        """Import the frameworks on every node; drop those that cannot; InputError if none can."""
        self._announce("preparing each node: what the job imports is imported once for all probes")
        self._link.head.call(self.pool.prepare)

    def submit(self, request: ProbeRequest, next_settings: NextSettings | None = None) -> None:
        ranks = Configuration(request.launch).world_size
        nodes = -(-ranks // self._cluster.devices_per_node)
        self._queue.append(QueuedProbe(request, max(1, nodes), next_settings=next_settings))
        self._link.head.call(self._dispatch)

    def wait(self, timeout_s: float | None = None) -> ProbeRecord | None:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._done:
            if not self._flights and not self._queue:
                return None
            self._link.head.call(self._tick)
            if not self._done and until is not None and time.monotonic() >= until:
                return None
        return self._done.popleft()

    def now_s(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """Kill the probes in flight; stop Ray if this executor started it."""
        if not self._ray.is_initialized() or self._link.head.raylet_ended:
            self._link.leave()
            return
        self._leases.give_back(*(flight.lease for flight in self._flights))
        self._flights.clear()
        self._queue.clear()
        self.pool.close()
        self._demand.withdraw()
        self._link.leave()

    # ---- leases and flights

    def _admit_first(self) -> None:
        self.pool.refresh()
        admit_first(self.pool, self._announce)

    def _refresh_nodes(self) -> None:
        for left in self.pool.refresh():
            for flight in [f for f in self._flights if f.result is None and not f.unreachable_s]:
                if any(slot.node == left for slot in flight.slots):
                    self._requeue(flight)

    def _dispatch(self) -> None:
        if self._link.head.silent_s():
            return
        first: QueuedProbe | None = None  # of those that wait until enough nodes are free
        for queued in tuple(self._queue):
            nodes, free = len(self.pool.node_ids), self.pool.free()
            queued.note_nodes(nodes)
            slots = list({slot.node: slot for slot in free}.values())[: queued.need]
            if first is not None and not first.lets_pass(free, self._flights):
                return  # the next node to become free is for that probe
            if len(slots) == queued.need:
                self._queue.remove(queued)
                self._lease(queued, slots)
            elif failure := queued.failure(nodes, self._cluster.nodes):
                self._queue.remove(queued)
                self._fail(queued.request, *failure)
            elif not queued.short_s:
                first = first or queued

    def _lease(self, queued: QueuedProbe, slots: list[Slot]) -> None:
        name = f"joulefront-{self._run_dir.name}-{queued.request.probe_id}"
        lease = self._leases.take(name, slots)
        for slot in slots:
            slot.take()
        since_s = queued.since_s, time.monotonic()
        flight = Flight(queued.request, slots, lease, *since_s, next_settings=queued.next_settings)
        self._flights.append(flight)
        if flight.receives_lease(1.0):
            self._launch(flight)

    def _launch(self, flight: Flight) -> None:
        self._held.discard(flight.nodes)
        # The node may have to compile ops first.
        builds = ops_needed(flight.request.launch, self._job)
        limit_s = flight.request.time_limit_s + _GRACE_S
        flight.launch(limit_s + BUILD_LIMIT_S if builds else limit_s)

    def _tick(self) -> None:
        running = [flight.result for flight in self._flights if flight.result is not None]
        if running:
            # Short waits, so that limits are kept and Ctrl-C is heard.
            ready, _ = self._ray.wait(running, num_returns=len(running), timeout=0.0)
            if not ready:
                ready, _ = self._ray.wait(running, num_returns=1, timeout=0.5)
            for flight in [f for f in self._flights if f.result in ready]:
                self._land(flight)
        else:
            time.sleep(0.1)
        if not self._link.head.responds():
            time.sleep(0.5)
            return
        self._leases.give_back()
        for flight in [f for f in self._flights if f.result is None]:
            if not flight.unreachable_s:
                self._await_lease(flight)
            else:
                flight.call_again()
        self._keep_limits()
        if self.pool.is_stale:
            self._refresh_nodes()
        self.pool.admit(0.0)
        self._dispatch()
        self._gauges.set(
            len(running),
            len({slot.node for flight in self._flights for slot in flight.slots}),
            sum(flight.power_W for flight in self._flights),
        )

    def _await_lease(self, flight: Flight) -> None:
        if flight.receives_lease(0.01):
            self._launch(flight)
        elif time.monotonic() - flight.since_s > _LEASE_S:
            self._requeue(flight, _ASIDE_S)
            if not self.pool.drop_unreachable(flight.slots) and flight.nodes not in self._held:
                self._held.add(flight.nodes)
                self._announce_holders(flight)

    def _announce_holders(self, flight: Flight) -> None:
        own = {each.lease.id.hex() for each in self._flights}
        found = holders({slot.node for slot in flight.slots}, self.pool.resource, own)
        shown = ", ".join(found) or "others, of which Ray tells no name"
        held = f"its {self.pool.resource}s are held by {shown}"
        self._announce(
            f"{flight.nodes} did not come free within {_LEASE_S:.0f} s: {held}; a probe waits for "
            f"up to {NO_NODE_S / 60:.0f} minutes"
        )

    def _requeue(self, flight: Flight, aside_s: float = 0.0) -> None:
        self._release(flight, aside_s)
        need = len(flight.slots)
        self._queue.appendleft(
            QueuedProbe(flight.request, need, flight.queued_s, next_settings=flight.next_settings)
        )

    def _release(self, flight: Flight, aside_s: float = 0.0) -> None:
        self._flights.remove(flight)
        self._leases.give_back(flight.lease)
        for slot in flight.slots:
            slot.release(aside_s)

    def _land(self, flight: Flight) -> None:
        lead = flight.slots[0]
        try:
            reply = self._ray.get(flight.result)
        except actor_is_gone(self._ray) as error:
            if not self._link.head.responds():
                return  # what became of it is asked when the head answers
            unsure = isinstance(error, self._ray.exceptions.ActorUnavailableError)
            if unsure and flight.wait_for_agent():
                return
            self._release(flight)
            self._lost(flight, error)
        except self._ray.exceptions.RayError as error:
            self._release(flight)
            sentence = f"the agent failed: {type(error).__name__}"
            self._fail_flight(flight, Failure("crash", sentence, str(error)))
        else:
            if flight.unreachable_s:  # it answers again, but the probe's own answer was lost
                self._release(flight)
                sentence = "the node agent could not be reached when the probe ended"
                self._fail_flight(flight, Failure("node", sentence))
            elif "busy" in reply:
                self._announce(f"{lead.name} is set aside: {reply['busy']}")
                self._requeue(flight, _ASIDE_S)
            elif "visited" in reply:
                self._further(flight, ProbeRecord.from_json(reply["visited"]))
            else:
                record = ProbeRecord.from_json(reply)
                aside_s, failure = 0.0, record.failure
                of_node = failure is not None and failure.of_node
                if failure and of_node and self.pool.replace_ended(flight.slots[1:]):
                    failure = self._losses.failure_of_peer(flight, failure)
                    record = replace(record, failure=failure)
                elif failure and of_node and self.pool.has_others(flight.slots):
                    self._announce(f"{lead.name} is set aside: {failure.message}")
                    aside_s = _ASIDE_FAILED_S
                self._release(flight, aside_s)
                self._done.append(flight.until_now(record) if of_node else record)

    def _further(self, flight: Flight, so_far: ProbeRecord) -> None:
        # The agent's node may have no folder in common with this one.
        partial = partial_record(so_far.request, so_far.measurements, self.meter)
        save_partial(self._run_dir, partial)
        flight.proceed(so_far)

    def _lost(self, flight: Flight, error: Exception) -> None:
        lead, *others = flight.slots
        for slot in others:
            slot.agent.end_share.remote()
        self.pool.drop_agent(lead.agent)
        alive = {n["NodeID"] for n in self._ray.nodes() if n["Alive"]}
        if lead.node not in alive:
            self._refresh_nodes()
            self._announce(
                f"node {lead.name} left the Ray cluster; {len(self.pool.names)} are in use"
            )
            sentence = f"node lost: {lead.name} left the Ray cluster while it measured"
            self._fail_flight(flight, Failure("node", sentence))
            return
        self._fail_flight(flight, self._losses.failure(flight, error))
        self.pool.replace_agent(lead)

    def _keep_limits(self) -> None:
        for flight in self._flights:
            if flight.cancel():
                self._ray.kill(flight.slots[0].agent)  # its ranks and fork server die with it

    def _fail_flight(self, flight: Flight, failure: Failure) -> None:
        self._done.append(flight.failed(failure, self.meter))

    def _fail(self, request: ProbeRequest, kind: str, sentence: str) -> None:
        self._done.append(partial_record(request, (), self.meter, Failure(kind, sentence)))
