"""Executor on a Ray cluster: it leases nodes to probes and keeps their time limits.

A probe leases what it is charged for: whole nodes where the energy of a node is measured, else as
many devices as the cluster lists for a node; one node if its ranks fit into one, several if not.
The nodes themselves, which join and leave while the study runs, are `tuner.executors.ray_nodes`'.
A probe that exceeds its limit is cancelled; an agent that does not answer is killed, and everything
it started dies with it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.executors.ray_cluster import LOOK_S, actor_is_gone, import_ray, join_ray
from tuner.executors.ray_nodes import NodePool, Slot
from tuner.executors.ray_security import exposures
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.workload.agent import MakeRunner
from tuner.workload.deepspeed_config import ops_needed
from tuner.workload.node.ops import BUILD_LIMIT_S
from tuner.workload.probe import (
    Failure,
    MeterInfo,
    ProbeRecord,
    ProbeRequest,
    shown_by,
)
from tuner.workload.runners import Continuation
from tuner.workload.trace import partial_record, save_partial

#: Time an agent may take beyond the probe's own limit (reading meters, writing files) before it is
#: sent a cancellation, and then before it is killed.
_GRACE_S = 20.0
_CANCEL_S = 10.0
#: A lease that is not granted by then is given up, and its nodes are set aside for a while.
_LEASE_S, _ASIDE_S = 60.0, 30.0
#: A node that failed (damaged GPUs, a full disk) is tried again after this time.
_ASIDE_FAILED_S = 600.0
#: A probe for which no node became free for this long fails; the study continues with the next.
_NO_NODE_S = 600.0
#: A probe that needs more nodes than the cluster has left fails after this time; smaller ones are
#: started before it meanwhile. No further probe is requested while more than this number wait.
_SHORT_S, _SHORT_MOST = 60.0, 1
#: An agent that cannot be reached may be gone, or its whole node: Ray knows after some seconds.
_UNREACHABLE_S, _ASK_AGAIN_S = 30.0, 0.5


@dataclass
class Flight:
    """A probe with the slots and the lease it was given.

    `extend` returns further settings of an extendable probe. `result` refers to the agent's answer,
    None until the lease is granted. At `deadline_s` it is cancelled, or killed if it was cancelled
    before. Since `unreachable_s` the agent cannot be reached, 0 while it can. `so_far` is the
    record at its last request for settings.
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
    so_far: ProbeRecord | None = None
    extend: Continuation | None = None

    @property
    def nodes(self) -> str:
        """Names of its nodes."""
        return ", ".join(dict.fromkeys(slot.name for slot in self.slots))

    def launch(self, limit_s: float) -> None:
        """Send the request to the agent of its first slot; its answer is due in `limit_s`."""
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
        if time.monotonic() >= self.ask_s:
            self.result = self.slots[0].agent.pid.remote()

    def wait_for_agent(self) -> bool:
        """Note that the agent cannot be reached; return True to wait for it a little longer."""
        now_s = time.monotonic()
        self.unreachable_s = self.unreachable_s or now_s
        if now_s - self.unreachable_s >= _UNREACHABLE_S:
            return False
        self.result, self.ask_s = None, now_s + _ASK_AGAIN_S
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


@dataclass
class Queued:
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

    def failure(self, nodes: int, listed: int) -> tuple[str, str] | None:
        """Return kind and sentence of the failure of a probe that waited too long, or None.

        `nodes` are in use, and the study's cluster has `listed`.
        """
        now_s, are = time.monotonic(), "is" if nodes == 1 else "are"
        if nodes and self.short_s and listed < self.need:
            return "refused", f"it needs {self.need} nodes, and {nodes} {are} in use"
        if nodes and self.short_s and now_s - self.short_s > _SHORT_S:
            left = f"for {_SHORT_S:.0f} s no more than {nodes} {are} left in the Ray cluster"
            return "node", f"it needs {self.need} nodes, and {left}"
        if now_s - self.since_s <= _NO_NODE_S:
            return None
        if self.need == 1:
            return "node", f"no node came free within {_NO_NODE_S:.0f} s"
        return "node", f"{self.need} nodes were not free together within {_NO_NODE_S:.0f} s"


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
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._ray = ray = import_ray()
        self._job, self._cluster, self._say = job, cluster, say
        self._run_dir = Path(run_dir).resolve()
        self._flights: list[Flight] = []
        self._queue: deque[Queued] = deque()
        self._done: deque[ProbeRecord] = deque()
        if not ray.is_initialized():
            say("starting Ray" if address is None else f"joining Ray at {address}")
        cpus = None if cluster.device.is_gpu else cluster.devices_per_node
        self._link = join_ray(address, cpus=cpus)
        self.pool = pool = NodePool(
            ray,
            job,
            cluster,
            run_dir=str(self._run_dir),
            make_runner=make_runner,
            local=self._link.started,
            say=say,
        )
        try:
            pool.warn_of_exposures(exposures())
            pool.refresh()
            pool.admit(LOOK_S, wait_for_all=True)
            pool.require_slots()
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
        nodes = len(self.pool.node_ids)
        short = sum(queued.need > nodes for queued in self._queue)
        room = len(self.pool.free())
        if short < len(self._queue) or short > _SHORT_MOST:
            room = 0
        return max(1, self.in_flight + room)

    @property
    def in_flight(self) -> int:
        return len(self._flights) + len(self._queue) + len(self._done)

    def places(self) -> dict[str, str]:
        """Return the names of the nodes of each probe that has a lease, by probe."""
        return {flight.request.probe_id: flight.nodes for flight in list(self._flights)}

    def prepare(self) -> None:
        """Import the frameworks on every node; drop those that cannot; InputError if none can."""
        self._say("preparing each node: what the job imports is imported once for all probes")
        self.pool.prepare()

    def submit(self, request: ProbeRequest, extend: Continuation | None = None) -> None:
        ranks = Configuration(request.launch).world_size
        nodes = -(-ranks // self._cluster.devices_per_node)
        self._queue.append(Queued(request, max(1, nodes), extend=extend))
        self._dispatch()

    def wait(self, timeout_s: float | None = None) -> ProbeRecord | None:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._done:
            if not self._flights and not self._queue:
                return None
            self._tick()
            if not self._done and until is not None and time.monotonic() >= until:
                return None
        return self._done.popleft()

    def now_s(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """Kill the probes in flight; stop Ray if this executor started it."""
        if not self._ray.is_initialized():
            self._link.leave()
            return
        for flight in self._flights:
            self._ray.util.remove_placement_group(flight.lease)
        self._flights.clear()
        self._queue.clear()
        self.pool.close()
        self._link.leave()

    # ---- leases and flights

    def _refresh_nodes(self) -> None:
        for left in self.pool.refresh():
            for flight in [f for f in self._flights if f.result is None and not f.unreachable_s]:
                if any(slot.node == left for slot in flight.slots):
                    self._requeue(flight)

    def _dispatch(self) -> None:
        for queued in tuple(self._queue):
            need, nodes = queued.need, len(self.pool.node_ids)
            queued.note_nodes(nodes)
            free: dict[str, Slot] = {}
            for slot in self.pool.free():
                free.setdefault(slot.node, slot)
            if len(free) >= need:
                self._queue.remove(queued)
                self._lease(queued, list(free.values())[:need])
            elif failure := queued.failure(nodes, self._cluster.nodes):
                self._queue.remove(queued)
                self._fail(queued.request, *failure)
            elif not queued.short_s:
                return  # the next node to become free is for this probe

    def _lease(self, queued: Queued, slots: list[Slot]) -> None:
        from ray.util.placement_group import placement_group

        lease = placement_group(
            [{self.pool.resource: slot.amount} for slot in slots],
            strategy="STRICT_SPREAD" if len(slots) > 1 else "STRICT_PACK",
            bundle_label_selector=[{"ray.io/node-id": slot.node} for slot in slots],
        )
        for slot in slots:
            slot.take()
        now_s = time.monotonic()
        flight = Flight(queued.request, slots, lease, now_s, extend=queued.extend)
        self._flights.append(flight)
        if lease.wait(timeout_seconds=1):
            self._launch(flight)

    def _launch(self, flight: Flight) -> None:
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

    def _await_lease(self, flight: Flight) -> None:
        if flight.lease.wait(timeout_seconds=0.01):
            self._launch(flight)
        elif time.monotonic() - flight.since_s > _LEASE_S:
            self._requeue(flight, _ASIDE_S)
            if not self.pool.drop_unreachable(flight.slots):
                self._say(
                    f"{flight.nodes} did not come free within {_LEASE_S:.0f} s; others use it"
                )

    def _requeue(self, flight: Flight, aside_s: float = 0.0) -> None:
        self._release(flight, aside_s)
        need = len(flight.slots)
        self._queue.appendleft(Queued(flight.request, need, flight.since_s, extend=flight.extend))

    def _release(self, flight: Flight, aside_s: float = 0.0) -> None:
        self._flights.remove(flight)
        self._ray.util.remove_placement_group(flight.lease)
        for slot in flight.slots:
            slot.release(aside_s)

    def _land(self, flight: Flight) -> None:
        lead = flight.slots[0]
        try:
            answer = self._ray.get(flight.result)
        except actor_is_gone(self._ray) as error:
            unsure = isinstance(error, self._ray.exceptions.ActorUnavailableError)
            if unsure and flight.wait_for_agent():
                return
            self._release(flight)
            self._lost(flight, error)
        except self._ray.exceptions.RayError as error:
            self._release(flight)
            sentence = f"the agent failed: {type(error).__name__}"
            self._fail_flight(flight, "crash", sentence, str(error))
        else:
            if flight.unreachable_s:  # it answers again, but the probe's own answer was lost
                self._release(flight)
                sentence = "the node agent could not be reached when the probe ended"
                self._fail_flight(flight, "node", sentence)
            elif "busy" in answer:
                self._say(f"{lead.name} is set aside: {answer['busy']}")
                self._requeue(flight, _ASIDE_S)
            elif "visited" in answer:
                self._further(flight, ProbeRecord.from_json(answer["visited"]))
            else:
                record = ProbeRecord.from_json(answer)
                aside_s, failure = 0.0, record.failure
                if failure and failure.of_node and self.pool.has_others(flight.slots):
                    self._say(f"{lead.name} is set aside: {failure.message}")
                    aside_s = _ASIDE_FAILED_S
                self._release(flight, aside_s)
                self._done.append(record)

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
            self._say(f"node {lead.name} left the Ray cluster; {len(self.pool.names)} are in use")
            sentence = f"node lost: {lead.name} left the Ray cluster while it measured"
            self._fail_flight(flight, "node", sentence, host=lead.name)
            return
        kind = "time_limit" if flight.cancelled else "crash"
        sentence = f"the node agent died: {str(error).strip().splitlines()[0]}"
        if isinstance(error, self._ray.exceptions.OutOfMemoryError):
            kind = shown_by("no memory")
            sentence = (
                "out of host memory: Ray's memory monitor ended the node agent before the kernel "
                "ended a rank; start Ray with RAY_memory_monitor_refresh_ms=0"
            )
        self._fail_flight(flight, kind, sentence)
        self.pool.replace_agent(lead)

    def _keep_limits(self) -> None:
        for flight in self._flights:
            if flight.cancel():
                self._ray.kill(flight.slots[0].agent)  # its ranks and fork server die with it

    def _fail_flight(
        self, flight: Flight, kind: str, sentence: str, log: str = "", host: str = ""
    ) -> None:
        so_far = flight.so_far or ProbeRecord(flight.request, (), self.meter)
        failure = Failure(kind, sentence, log)
        record = partial_record(so_far.request, so_far.measurements, self.meter, failure)
        self._done.append(replace(record, host=host))

    def _fail(self, request: ProbeRequest, kind: str, sentence: str) -> None:
        self._done.append(partial_record(request, (), self.meter, Failure(kind, sentence)))
