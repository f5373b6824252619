"""Executor on a Ray cluster: it leases nodes to probes and keeps their time limits.

A probe leases what it is charged for: whole nodes where the energy of a node is measured, else as
many devices as the cluster lists for a node; one node if its ranks fit into one, several if not.
The nodes themselves, which join and leave while the study runs, are `tuner.cluster.nodes`'.
A probe that exceeds its limit is cancelled; an agent that does not answer is killed, and everything
it started dies with it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tuner.cluster.agent import MakeRunner
from tuner.cluster.autoscaling import NodeDemand
from tuner.cluster.flights import NO_NODE_S, Flight, Losses, QueuedProbe
from tuner.cluster.joining import actor_is_gone, import_ray, join_ray, resource_of
from tuner.cluster.nodes import Leases, NodePool, Slot, admit_first, holders
from tuner.cluster.security import exposures
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.workload.node.probe_run import ops_needed
from tuner.workload.records.probe import (
    Continuation,
    Failure,
    MeterInfo,
    ProbeRecord,
    ProbeRequest,
)
from tuner.workload.records.trace import partial_record, save_partial
from tuner.workload.scripts.installed import BUILD_LIMIT_S

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

    def submit(self, request: ProbeRequest, extend: Continuation | None = None) -> None:
        ranks = Configuration(request.launch).world_size
        nodes = -(-ranks // self._cluster.devices_per_node)
        self._queue.append(QueuedProbe(request, max(1, nodes), extend=extend))
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
        flight = Flight(queued.request, slots, lease, *since_s, extend=queued.extend)
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
            QueuedProbe(flight.request, need, flight.queued_s, extend=flight.extend)
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
