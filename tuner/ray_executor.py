"""Probes on a Ray cluster: agents on its nodes, one placement group a probe.

The agents live as long as the study, so the frameworks are imported once a node. A probe leases
what it is charged for: whole nodes where the energy of a node is measured, else as many devices as
the cluster says a node has; one node where its ranks fit into one, several where they do not. Nodes
are looked at before they are used, come and go while the study runs, and are set aside while
somebody else is on their GPUs. A probe that outlives its limit is cancelled; an agent that does not
answer is killed, and everything it started dies with it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_spaces.cluster import Cluster
from search_spaces.configuration import Configuration
from search_spaces.errors import InputError
from search_spaces.job import TrainingJob
from tuner.ray_agent import Entered, MakeRunner
from tuner.ray_cluster import LOOK_S, import_ray, join_ray, place_agent
from tuner.ray_slots import Flight, Queued, Slot
from workload.probe import (
    Failure,
    FailureKind,
    GoOn,
    Measurement,
    MeterInfo,
    ProbeRecord,
    ProbeRequest,
)
from workload.trace import put_by, unfinished

__all__ = ["RayExecutor"]

#: What an agent may take beyond the probe's own limit (reading meters, writing files) before it is
#: told to cancel, and then before it is killed.
_GRACE_S = 20.0
_CANCEL_S = 10.0
#: A lease that is not had by then is given up, and its nodes are set aside for a while.
_LEASE_S, _ASIDE_S = 60.0, 30.0
#: A probe for which no node was free so long fails; the study goes on with the next.
_NO_NODE_S = 600.0
#: One that needs more nodes than the cluster has left fails after this; what fits goes before it
#: meanwhile. With more than so many of them no further probe is asked for.
_SHORT_S, _SHORT_MOST = 60.0, 1
#: How often it is asked which nodes are there.
_NODES_S = 5.0
#: A node that others keep busy is asked again after this.
_ASK_BUSY_S = 60.0
#: An agent that cannot be reached may be gone, or its whole node: Ray knows after some seconds.
_UNREACHABLE_S, _ASK_AGAIN_S = 30.0, 0.5


class RayExecutor:
    """Runs probes on every node of a Ray cluster that has the cluster's devices.

    Args:
        job: what is trained.
        cluster: the kind of node; a probe whose ranks fit into one is given one.
        run_dir: where logs and power samples go (on the agent's node).
        address: "auto" joins a running Ray, HOST:PORT joins that one, None starts one here.
        make_runner: what answers on each node; None measures.
        say: told what takes long and which nodes are not used, a sentence each.

    Raises:
        InputError: Ray is not installed, does not answer, or has no node with the devices.
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
        self._job, self._cluster, self._make_runner = job, cluster, make_runner
        self._run_dir = Path(run_dir).resolve()
        self._say = say
        self._on_gpus = cluster.device.type == "cuda"
        if not ray.is_initialized():
            say("starting Ray" if address is None else f"joining Ray at {address}")
        self._ours = join_ray(address, cpus=None if self._on_gpus else cluster.devices_per_node)
        self._resource = "GPU" if self._on_gpus else "CPU"
        self._slots: list[Slot] = []
        self._flights: list[Flight] = []
        self._queue: deque[Queued] = deque()
        self._done: deque[ProbeRecord] = deque()
        self._entering: dict[Any, Slot] = {}  # what a node will say -> its first slot
        self._seen: dict[str, dict[str, Any]] = {}  # nodes that were asked, as Ray lists them
        self._busy_until_s: dict[str, float] = {}  # nodes to ask again, and when
        self._looked_s = 0.0
        self._ops: tuple[str, ...] | None = None  # until `prepare`
        self._refusals: list[str] = []
        self._meter: MeterInfo | None = None
        self.go_on: GoOn | None = None
        try:
            self._find_nodes()
            self._admit(LOOK_S, all_of_them=True)
            if not self._slots:
                raise InputError(
                    self._refusals[0]
                    if self._refusals
                    else f"no node of the Ray cluster has {cluster.devices_per_node} "
                    f"{self._resource}s, which cluster {cluster.name!r} asks of each"
                )
        except BaseException:
            self.close()
            raise

    # ---- the protocol

    @property
    def meter(self) -> MeterInfo:
        assert self._meter is not None
        return self._meter

    @property
    def capacity(self) -> int:
        """Probes in flight, and how many more there is room for."""
        now_s = time.monotonic()
        there = len(self._there())
        short = sum(self._need(queued.request) > there for queued in self._queue)
        room = sum(slot.free(now_s) for slot in self._slots)
        if short < len(self._queue) or short > _SHORT_MOST:
            room = 0
        return max(1, self.in_flight + room)

    @property
    def in_flight(self) -> int:
        return len(self._flights) + len(self._queue) + len(self._done)

    def places(self) -> dict[str, str]:
        """The nodes of each probe in flight, by probe; none yet for one that waits for room."""
        return {
            flight.request.probe_id: ", ".join(dict.fromkeys(slot.name for slot in flight.slots))
            for flight in list(self._flights)
        }

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes in use, each once."""
        return tuple({slot.node: slot.name for slot in self._slots}.values())

    def prepare(self, ops: Sequence[str] = ()) -> None:
        """Import the frameworks and load DeepSpeed ops on every node; drops those that cannot.

        Raises:
            InputError: no node can; the sentence is the first one's.
        """
        self._ops = tuple(ops)
        what = "".join(f" and loading {op}" for op in ops)
        self._say(
            f"importing torch, deepspeed and transformers{what}, once for all probes (an op is "
            "compiled once a machine, up to a minute)"
        )
        asked = [slot.agent.prepare.remote(self._ops) for slot in self._slots]
        troubles = []
        for slot, answer in zip(list(self._slots), asked, strict=True):
            try:
                trouble = self._ray.get(answer)
            except self._ray.exceptions.RayError as error:
                trouble = f"the agent on {slot.name} failed: {type(error).__name__}"
            if trouble:
                troubles.append(trouble)
                self._slots.remove(slot)
                self._say(trouble)
        if not self._slots:
            raise InputError(troubles[0])

    def submit(self, request: ProbeRequest) -> None:
        self._queue.append(Queued(request))
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
        """Kill what is in flight; stop Ray where this executor started it."""
        ray = self._ray
        if not ray.is_initialized():
            return
        for flight in self._flights:
            ray.util.remove_placement_group(flight.lease)
        self._flights.clear()
        self._queue.clear()
        agents = list({id(slot.agent): slot.agent for slot in self._slots}.values())
        closing = [agent.close.remote() for agent in agents]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=10)
        for agent in [*agents, *(slot.agent for slot in self._entering.values())]:
            ray.kill(agent)
        self._slots.clear()
        self._entering.clear()
        if self._ours:
            ray.shutdown()

    # ---- nodes that come and go

    def _find_nodes(self) -> None:
        """Ask nodes that are new, and let go of those that left."""
        self._looked_s = now_s = time.monotonic()
        for node_id in [n for n, until_s in self._busy_until_s.items() if now_s >= until_s]:
            del self._busy_until_s[node_id]
            self._seen.pop(node_id, None)
        listed = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        for left in [node for node in self._seen if node not in listed]:
            name = self._seen.pop(left)["NodeManagerHostname"]
            if any(slot.node == left for slot in self._slots):
                self._slots = [slot for slot in self._slots if slot.node != left]
                self._ask_elsewhere(left)
                self._say(f"node {name} left the Ray cluster; {len(self.nodes)} are in use")
        for node_id, node in listed.items():
            if node_id not in self._seen:
                self._seen[node_id] = node
                if node["Resources"].get(self._resource, 0) >= self._cluster.devices_per_node:
                    self._ask(self._slot_of(node))

    def _ask_elsewhere(self, left: str) -> None:
        """Queue again what waits for a lease that a node which left was to be part of."""
        for flight in [f for f in self._flights if f.result is None and not f.unreachable_s]:
            if any(slot.node == left for slot in flight.slots):
                self._release(flight)
                self._queue.appendleft(Queued(flight.request, flight.since_s))

    def _slot_of(self, node: dict[str, Any], devices: tuple[str, ...] = ()) -> Slot:
        # A runner that measures answers one probe; one that only computes, as many as there is
        # room for, in one process.
        calls = 8 if self._make_runner is None else 8 + self._parts(node)
        agent = place_agent(node["NodeID"], str(self._run_dir), calls=calls)
        name, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
        return Slot(node["NodeID"], name, address, agent, self._offers(node), devices)

    def _offers(self, node: dict[str, Any]) -> float:
        return float(node["Resources"].get(self._resource, 0))

    def _parts(self, node: dict[str, Any]) -> int:
        return int(self._offers(node) // self._cluster.devices_per_node)

    def _ask(self, slot: Slot) -> None:
        asked = slot.agent.enter.remote(
            self._job, self._cluster, self._make_runner, slot.devices, self._ops
        )
        self._entering[asked] = slot

    def _admit(self, timeout_s: float, *, all_of_them: bool = False) -> None:
        """Take in the nodes that have answered, or say why they are not used."""
        if not self._entering:
            return
        count = len(self._entering) if all_of_them else 1
        ready, _ = self._ray.wait(list(self._entering), num_returns=count, timeout=timeout_s)
        for answer in ready:
            slot = self._entering.pop(answer)
            try:
                entered = self._ray.get(answer)
            except self._ray.exceptions.RayError as error:
                told = str(error).strip().splitlines()[-1]
                self._refuse(slot, f"node {slot.name} is not used: its agent failed ({told})")
                continue
            reason = self._unfit(entered)
            if reason:
                self._refuse(slot, reason)
                if entered.facts.busy:
                    self._busy_until_s[slot.node] = time.monotonic() + _ASK_BUSY_S
            else:
                self._take(slot, entered)

    def _unfit(self, entered: Entered) -> str:
        """Why a node is not used; empty where it is."""
        if entered.refused:
            return entered.refused[0]
        facts, asked = entered.facts, self._cluster.device
        if self._on_gpus and facts.kind != asked.name:
            return (
                f"node {facts.host} is not used: it has {facts.kind}, and this study is about "
                f"{asked.name}; two kinds never share a front"
            )
        meter = entered.meter
        if (
            meter is not None
            and self._meter is not None
            and ((meter.name, meter.scope) != (self._meter.name, self._meter.scope))
        ):
            return (
                f"node {facts.host} is not used: it is metered by {meter.name} ({meter.scope} "
                f"scope) and the others by {self._meter.name} ({self._meter.scope} scope)"
            )
        return ""

    def _refuse(self, slot: Slot, sentence: str) -> None:
        self._ray.kill(slot.agent)
        if sentence not in self._refusals:
            self._refusals.append(sentence)
            self._say(sentence)

    def _take(self, slot: Slot, entered: Entered) -> None:
        """Use a node: as one, or in parts where only what a probe uses is charged to it."""
        node = self._seen.get(slot.node)
        if node is None:  # it left meanwhile
            return
        assert entered.meter is not None
        if self._meter is None:
            self._meter = entered.meter
        each, parts = self._cluster.devices_per_node, self._parts(node)
        if self._make_runner is not None:
            slot.amount = float(each)
            same = (slot.node, slot.name, slot.address, slot.agent, slot.amount)
            self._slots += [slot, *(Slot(*same) for _ in range(parts - 1))]
            return
        gpus = entered.facts.gpus
        parts = min(parts, len(gpus) // each)
        if entered.meter.scope != "node" and parts > 1 and not slot.devices:
            # An agent for each part, with GPUs of its own.
            self._ray.kill(slot.agent)
            for part in range(parts):
                new = self._slot_of(node, gpus[part * each : (part + 1) * each])
                new.amount = float(each)
                self._ask(new)
            self._admit(LOOK_S, all_of_them=True)
            return
        self._slots.append(slot)

    # ---- leases and flights

    def _dispatch(self) -> None:
        """Lease nodes for what is queued, in order, past what too few nodes are left for."""
        for queued in tuple(self._queue):
            now_s, need, there = time.monotonic(), self._need(queued.request), len(self._there())
            queued.short_s = (queued.short_s or now_s) if need > there else 0.0
            have: dict[str, Slot] = {}
            for slot in self._slots:
                if slot.free(now_s) and slot.node not in have:
                    have[slot.node] = slot
            if len(have) >= need:
                self._queue.remove(queued)
                self._lease(queued.request, list(have.values())[:need])
            elif hopeless := self._hopeless(queued, need, there):
                self._queue.remove(queued)
                self._fail(queued.request, *hopeless)
            elif not queued.short_s:
                return  # what comes free next is its own

    def _need(self, request: ProbeRequest) -> int:
        """How many nodes a probe takes."""
        return max(
            1, -(-Configuration(request.launch).world_size // self._cluster.devices_per_node)
        )

    def _there(self) -> set[str]:
        """The nodes that are in use, and those that are being looked at."""
        return {slot.node for slot in (*self._slots, *self._entering.values())}

    def _hopeless(self, queued: Queued, need: int, there: int) -> tuple[FailureKind, str] | None:
        """How a probe fails that is not to be waited for any longer; None where it is."""
        now_s = time.monotonic()
        are = "is" if there == 1 else "are"
        if there and queued.short_s and self._cluster.nodes < need:
            return "refused", f"it needs {need} nodes, and {there} {are} in use"
        if there and queued.short_s and now_s - queued.short_s > _SHORT_S:
            left = f"for {_SHORT_S:.0f} s no more than {there} {are} left in the Ray cluster"
            return "node", f"it needs {need} nodes, and {left}"
        if now_s - queued.since_s <= _NO_NODE_S:
            return None
        if need == 1:
            return "node", f"no node came free within {_NO_NODE_S:.0f} s"
        return "node", f"{need} nodes were not free together within {_NO_NODE_S:.0f} s"

    def _lease(self, request: ProbeRequest, slots: list[Slot]) -> None:
        """A placement group over the slots' devices, on exactly these nodes."""
        from ray.util.placement_group import placement_group

        lease = placement_group(
            [{self._resource: slot.amount} for slot in slots],
            strategy="STRICT_SPREAD" if len(slots) > 1 else "STRICT_PACK",
            bundle_label_selector=[{"ray.io/node-id": slot.node} for slot in slots],
        )
        for slot in slots:
            slot.taken = True
        flight = Flight(request, slots, lease, time.monotonic())
        self._flights.append(flight)
        if lease.wait(timeout_seconds=1):
            self._launch(flight)

    def _launch(self, flight: Flight) -> None:
        lead, *others = flight.slots
        peers = [(f"node {slot.name}", slot.agent) for slot in others]
        flight.result = lead.agent.run.remote(flight.request.to_json(), peers, lead.address)
        flight.deadline_s = time.monotonic() + flight.request.time_limit_s + _GRACE_S

    def _tick(self) -> None:
        """One look at everything; waits half a second at most."""
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
            elif time.monotonic() >= flight.ask_s:
                flight.result = flight.slots[0].agent.pid.remote()
        self._keep_limits()
        if time.monotonic() - self._looked_s > _NODES_S:
            self._find_nodes()
        self._admit(0.0)
        self._dispatch()

    def _await_lease(self, flight: Flight) -> None:
        if flight.lease.wait(timeout_seconds=0.01):
            self._launch(flight)
        elif time.monotonic() - flight.since_s > _LEASE_S:
            self._release(flight, aside=True)
            names = ", ".join(slot.name for slot in flight.slots)
            self._say(f"{names} did not come free within {_LEASE_S:.0f} s; others use it")
            self._queue.appendleft(Queued(flight.request, flight.since_s))

    def _release(self, flight: Flight, *, aside: bool = False) -> None:
        self._flights.remove(flight)
        self._ray.util.remove_placement_group(flight.lease)
        for slot in flight.slots:
            slot.taken = False
            if aside:
                slot.aside_s = time.monotonic() + _ASIDE_S

    def _land(self, flight: Flight) -> None:
        """A probe has ended: its record, or what became of its node."""
        lead = flight.slots[0]
        try:
            told = self._ray.get(flight.result)
        except self._ray.exceptions.RayActorError as error:
            now_s = time.monotonic()
            flight.unreachable_s = flight.unreachable_s or now_s
            waited_s = now_s - flight.unreachable_s
            unsure = isinstance(error, self._ray.exceptions.ActorUnavailableError)
            if unsure and waited_s < _UNREACHABLE_S:
                flight.result, flight.ask_s = None, now_s + _ASK_AGAIN_S
                return
            self._release(flight)
            self._lost(flight, str(error).strip().splitlines()[0])
        except self._ray.exceptions.RayError as error:
            self._release(flight)
            sentence = f"the agent failed: {type(error).__name__}"
            self._fail(flight.request, "crash", sentence, str(error), flight.measured)
        else:
            if flight.unreachable_s:  # it answers again, and the probe's answer went astray
                self._release(flight)
                sentence = "the node agent could not be reached when the probe ended"
                self._fail(flight.request, "node", sentence, measured=flight.measured)
            elif "busy" in told:
                self._say(f"{lead.name} is set aside: {told['busy']}")
                self._release(flight, aside=True)
                self._queue.appendleft(Queued(flight.request, flight.since_s))
            elif "visited" in told:
                self._further(flight, ProbeRecord.from_json(told["visited"]))
            else:
                self._release(flight)
                self._done.append(ProbeRecord.from_json(told))

    def _further(self, flight: Flight, so_far: ProbeRecord) -> None:
        """Ask what else an open probe visits, and tell its agent."""
        request = so_far.request
        flight.measured = so_far.measurements
        # The agent's node may have no folder in common with this one.
        put_by(self._run_dir, unfinished(request, flight.measured, self.meter))
        more = self.go_on(request, flight.measured) if self.go_on is not None else ()
        flight.request = replace(request, live=(*request.live, *more))
        lead = flight.slots[0].agent
        flight.result = lead.go_on.remote(request.probe_id, [live.to_json() for live in more])

    def _lost(self, flight: Flight, told: str) -> None:
        """The lead's agent died: with its node, or alone, and then it is replaced."""
        lead, *others = flight.slots
        for slot in others:
            slot.agent.end_share.remote()
        self._slots = [slot for slot in self._slots if slot.agent is not lead.agent]
        alive = {n["NodeID"] for n in self._ray.nodes() if n["Alive"]}
        if lead.node not in alive:
            self._find_nodes()
            self._say(f"node {lead.name} left the Ray cluster; {len(self.nodes)} are in use")
            sentence = f"node lost: {lead.name} left the Ray cluster while it measured"
            self._fail(flight.request, "node", sentence, measured=flight.measured)
            return
        kind: FailureKind = "time_limit" if flight.cancelled else "crash"
        self._fail(flight.request, kind, f"the node agent died: {told}", measured=flight.measured)
        node, same = self._seen.get(lead.node), (lead.node, lead.devices)
        if node is None or any(
            (slot.node, slot.devices) == same for slot in (*self._slots, *self._entering.values())
        ):
            return  # it has left since, or another probe of the same agent has replaced it
        slot = self._slot_of(node, lead.devices)
        slot.amount = lead.amount
        self._ask(slot)

    def _keep_limits(self) -> None:
        now = time.monotonic()
        for flight in self._flights:
            if flight.result is None or flight.unreachable_s or now < flight.deadline_s:
                continue
            agent = flight.slots[0].agent
            if not flight.cancelled:
                flight.cancelled = True
                flight.deadline_s = now + _CANCEL_S
                agent.cancel.remote()
            else:
                self._ray.kill(agent)  # its ranks and fork server die with it
                flight.deadline_s = now + _CANCEL_S

    def _fail(
        self,
        request: ProbeRequest,
        kind: FailureKind,
        sentence: str,
        log: str = "",
        measured: tuple[Measurement, ...] = (),
    ) -> None:
        failure = Failure(kind, sentence, log)
        self._done.append(unfinished(request, measured, self.meter, failure))
