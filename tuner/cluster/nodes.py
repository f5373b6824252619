"""Nodes of a Ray cluster as slots for probes: their agents, their admission, joining and leaving.

A slot is room for one probe: a node, or a part of its devices, with the agent that runs probes
there. The agents live as long as the study, so the frameworks are imported once per node. A node
is inspected before it is used, and one whose GPUs other processes use is asked again later. A probe
leases the devices of its slots by a placement group of Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.cluster.agent import MakeRunner, NodeStatus
from tuner.cluster.head import Head
from tuner.cluster.joining import POLL_S, actor_is_gone, place_agent, resource_of
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob
from tuner.workload.records.probe import MeterInfo

#: Period at which Ray is asked for its nodes.
_NODES_S = 5.0
#: A node that other processes keep busy is asked again after this time.
_BUSY_RETRY_S = 60.0
#: Limits on the imports of a node, and of the first that is ready: the others are set aside.
_PREPARED_S, _FIRST_PREPARED_S = 300.0, 900.0
#: An idle agent answers at once. One that does not within the first time is gone, whatever Ray
#: says of its node, which is asked again after the second.
_REPLY_S, _GONE_RETRY_S = 5.0, 120.0


@dataclass
class Slot:
    """Room for one probe: a node, or a part of its devices.

    `node` is Ray's id; `devices` are the UUIDs of the agent's GPUs, empty for all of the node.
    Until `aside_s` on the monotonic clock it is not used.
    """

    node: str
    name: str
    address: str
    agent: Any
    amount: float
    devices: tuple[str, ...] = ()
    taken: bool = False
    aside_s: float = 0.0
    requested_s: float = 0.0

    def note_request(self) -> None:
        self.requested_s = time.monotonic()

    def free(self, now_s: float) -> bool:
        """Return True if a probe may be given this slot now."""
        return not self.taken and now_s >= self.aside_s

    def take(self) -> None:
        """Give it to a probe."""
        self.taken = True

    def release(self, aside_s: float = 0.0) -> None:
        """Take it back from a probe, and leave it unused for some seconds."""
        self.taken = False
        if aside_s:
            self.aside_s = time.monotonic() + aside_s


class NodePool:
    """Slots on the nodes of a Ray cluster that have the cluster's devices.

    `make_runner` makes the runner of each node, None for the one that measures; `local` is True if
    Ray was started here, for this study only; all nodes share `meter`, None until one is admitted.
    """

    def __init__(
        self,
        ray: Any,
        job: TrainingJob,
        cluster: Cluster,
        *,
        run_dir: str,
        make_runner: MakeRunner | None,
        local: bool,
        announce: Callable[[str], None],
    ) -> None:
        self._ray = ray
        self._job, self._cluster, self._make_runner = job, cluster, make_runner
        self._run_dir, self._local, self._announce = run_dir, local, announce
        self.resource = resource_of(cluster)
        self.slots: list[Slot] = []
        self.meter: MeterInfo | None = None
        self.refusals: list[str] = []
        self._entering: dict[Any, Slot] = {}  # by the reference to the agent's answer
        self._listed: dict[str, dict[str, Any]] = {}  # nodes that were asked, as Ray lists them
        self._busy_until_s: dict[str, float] = {}
        self._refreshed_s = 0.0
        self._prepared = False
        self._warned: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the nodes in use, each once."""
        return tuple({slot.node: slot.name for slot in self.slots}.values())

    @property
    def node_ids(self) -> set[str]:
        """Ids of the nodes that are in use, or are inspected and may be soon."""
        since_s = time.monotonic() - POLL_S
        entering = [slot for slot in self._entering.values() if slot.requested_s >= since_s]
        return {slot.node for slot in (*self.slots, *entering)}

    @property
    def unanswered(self) -> list[str]:
        """Names of the nodes that have not answered a request to join."""
        return sorted({slot.name for slot in self._entering.values()})

    @property
    def has_busy(self) -> bool:
        """True if a node was left out because others use it."""
        return bool(self._busy_until_s)

    def require_slots(self) -> None:
        """Raise InputError if no node can be used."""
        if self.refusals and not self.slots:
            raise InputError(self.refusals[0])
        if not self.slots:
            raise InputError(
                f"no node of the Ray cluster has {self._cluster.devices_per_node} "
                f"{self.resource}s, which cluster {self._cluster.name!r} asks of each"
            )

    def free(self) -> list[Slot]:
        """Return the slots that a probe may be given now."""
        now_s = time.monotonic()
        return [each for each in self.slots if each.free(now_s)]

    def has_others(self, slots: Sequence[Slot]) -> bool:
        """Return True if as many slots beside these are not set aside, on nodes of their own."""
        now_s = time.monotonic()
        left = {s.node for s in self.slots if s.aside_s <= now_s and s not in slots}
        return len(left) >= len(slots)

    @property
    def is_stale(self) -> bool:
        """True if it is time to call `refresh`."""
        return time.monotonic() - self._refreshed_s > _NODES_S

    def warn_of_exposures(self, sentences: Sequence[str]) -> None:
        """Announce, once each, ways for others to enter a cluster that was not started here."""
        if not self._local:
            self._warn(*sentences)

    def _warn(self, *sentences: str) -> None:
        for sentence in sentences:
            if sentence and sentence not in self._warned:
                self._warned.add(sentence)
                self._announce(f"warning: {sentence}")

    def refresh(self) -> list[str]:
        """Ask nodes that are new, and drop those that left; return the ids of the dropped ones."""
        self._refreshed_s = now_s = time.monotonic()
        for node_id in [n for n, until_s in self._busy_until_s.items() if now_s >= until_s]:
            del self._busy_until_s[node_id]
            self._listed.pop(node_id, None)
        alive = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        dropped = []
        for left in [node for node in self._listed if node not in alive]:
            name = self._listed.pop(left)["NodeManagerHostname"]
            if any(slot.node == left for slot in self.slots):
                self.slots = [slot for slot in self.slots if slot.node != left]
                dropped.append(left)
                self._announce(f"node {name} left the Ray cluster; {len(self.names)} are in use")
        for node_id, node in alive.items():
            if node_id not in self._listed:
                self._listed[node_id] = node
                if self._leasable(node) >= self._cluster.devices_per_node:
                    self._request_entry(self._place(node))
        return dropped

    def admit(self, timeout_s: float, *, wait_for_all: bool = False) -> None:
        """Use the nodes that have answered, or report why they cannot be used."""
        if not self._entering:
            return
        count = len(self._entering) if wait_for_all else 1
        ready, _ = self._ray.wait(list(self._entering), num_returns=count, timeout=timeout_s)
        for reply in ready:
            slot = self._entering.pop(reply)
            try:
                entered = self._ray.get(reply)
            except self._ray.exceptions.RayError as error:
                last_line = str(error).strip().splitlines()[-1]
                self._refuse(slot, f"node {slot.name} is not used: its agent failed ({last_line})")
                continue
            self.warn_of_exposures(entered.exposures)
            self._warn(entered.facts.warning(self._cluster))
            if reason := self.reason_to_refuse(entered):
                self._refuse(slot, reason)
                if entered.facts.busy:
                    self._busy_until_s[slot.node] = time.monotonic() + _BUSY_RETRY_S
            else:
                self._take(slot, entered)

    def reason_to_refuse(self, entered: NodeStatus) -> str:
        """Return why a node cannot be used, or an empty string."""
        if entered.refused:
            return entered.refused[0]
        facts, wanted = entered.facts, self._cluster.device
        if self.resource == "GPU" and facts.kind != wanted.name:
            return (
                f"node {facts.host} is not used: it has {facts.kind}, and this study is about "
                f"{wanted.name}; two kinds never share a front"
            )
        meter, shared = entered.meter, self.meter
        if meter and shared and (meter.name, meter.scope) != (shared.name, shared.scope):
            return (
                f"node {facts.host} is not used: it is metered by {meter.name} ({meter.scope} "
                f"scope) and the others by {shared.name} ({shared.scope} scope)"
            )
        return ""

    def prepare(self) -> None:
        """Import the frameworks on every node; drop those that cannot."""
        self._prepared = True
        replies = {slot.agent.prepare.remote(): slot for slot in self.slots}
        begin_s = time.monotonic()
        ready, late = self._ray.wait(list(replies), num_returns=len(replies), timeout=_PREPARED_S)
        if not ready:
            ready, late = self._ray.wait(late, num_returns=1, timeout=_FIRST_PREPARED_S)
        troubles = []
        for reply in ready:
            slot = replies[reply]
            try:
                trouble = self._ray.get(reply)
            except self._ray.exceptions.RayError as error:
                trouble = f"the agent on {slot.name} failed: {type(error).__name__}"
            if trouble:
                troubles.append(trouble)
                self.slots.remove(slot)
                self._announce(trouble)
        for slot in (replies[reply] for reply in late):
            waited_s = time.monotonic() - begin_s
            troubles.append(
                f"node {slot.name} is set aside: its imports take longer than {waited_s:.0f} s; "
                "a file system that stalls is the usual cause"
            )
            self._set_aside(slot, troubles[-1])
        if not self.slots:
            raise InputError(troubles[0])

    def _set_aside(self, slot: Slot, sentence: str) -> None:
        # It is asked again later, with an agent of its own.
        self.drop_agent(slot.agent)
        self._ray.kill(slot.agent)
        self._busy_until_s[slot.node] = time.monotonic() + _GONE_RETRY_S
        self._announce(sentence)

    def drop_agent(self, agent: Any) -> None:
        """Stop using the slots of an agent that died."""
        self.slots = [slot for slot in self.slots if slot.agent is not agent]

    def drop_unreachable(self, slots: Sequence[Slot]) -> bool:
        """Stop using those of some slots whose agent gives no answer; return True if there are."""
        replies = {slot.agent.pid.remote(): slot for slot in slots}
        ready, _ = self._ray.wait(list(replies), num_returns=len(replies), timeout=_REPLY_S)
        gone = [slot for reply, slot in replies.items() if reply not in ready]
        for reply in ready:
            try:
                self._ray.get(reply)
            except actor_is_gone(self._ray):
                gone.append(replies[reply])
        for slot in gone:
            self._set_aside(slot, f"node {slot.name} is set aside: its agent cannot be reached")
        return bool(gone)

    def replace_agent(self, lost: Slot) -> None:
        """Place a new agent where one died, unless the node left or it was replaced before."""
        node, same = self._listed.get(lost.node), (lost.node, lost.devices)
        if node is None or any(
            (slot.node, slot.devices) == same for slot in (*self.slots, *self._entering.values())
        ):
            return
        self._request_entry(self._place(node, lost.devices, lost.amount))

    def replace_ended(self, slots: Sequence[Slot]) -> bool:
        """Place new agents where those of some slots ended; return True if there are such."""
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        ended = [slot for slot in slots if slot.node in alive and self._has_ended(slot.agent)]
        for slot in ended:
            self.drop_agent(slot.agent)
            self.replace_agent(slot)
        return bool(ended)

    def _has_ended(self, agent: Any) -> bool:
        ready, _ = self._ray.wait([agent.pid.remote()], num_returns=1, timeout=_REPLY_S)
        try:
            self._ray.get(ready)
        except actor_is_gone(self._ray):
            return True
        return False

    def close(self) -> None:
        """Close and kill every agent."""
        agents = list({id(slot.agent): slot.agent for slot in self.slots}.values())
        closing = [agent.close.remote() for agent in agents]
        if closing:
            self._ray.wait(closing, num_returns=len(closing), timeout=10)
        for agent in [*agents, *(slot.agent for slot in self._entering.values())]:
            self._ray.kill(agent)
        self.slots.clear()
        self._entering.clear()

    def _place(
        self, node: dict[str, Any], devices: tuple[str, ...] = (), amount: float | None = None
    ) -> Slot:
        # A runner that measures answers one probe; one that only computes, as many as there is
        # room for, in one process.
        calls = 8 if self._make_runner is None else 8 + self._parts(node)
        agent = place_agent(node["NodeID"], self._run_dir, calls=calls, local=self._local)
        name, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
        amount = self._leasable(node) if amount is None else amount
        return Slot(node["NodeID"], name, address, agent, amount, devices)

    def _leasable(self, node: dict[str, Any]) -> float:
        return float(node["Resources"].get(self.resource, 0))

    def _parts(self, node: dict[str, Any]) -> int:
        return int(self._leasable(node) // self._cluster.devices_per_node)

    def _request_entry(self, slot: Slot) -> None:
        slot.note_request()
        reply = slot.agent.enter.remote(
            self._job, self._cluster, self._make_runner, slot.devices, self._prepared
        )
        self._entering[reply] = slot

    def _refuse(self, slot: Slot, sentence: str) -> None:
        self._ray.kill(slot.agent)
        if sentence not in self.refusals:
            self.refusals.append(sentence)
            self._announce(sentence)

    def _take(self, slot: Slot, entered: NodeStatus) -> None:
        node = self._listed.get(slot.node)
        if node is None:  # it left meanwhile
            return
        assert entered.meter is not None
        if self.meter is None:
            self.meter = entered.meter
        each, parts = self._cluster.devices_per_node, self._parts(node)
        if self._make_runner is not None:
            same = (slot.node, slot.name, slot.address, slot.agent, float(each))
            self.slots += [Slot(*same, slot.devices), *(Slot(*same) for _ in range(parts - 1))]
            return
        gpus = tuple(gpu.uuid for gpu in entered.facts.gpus)
        parts = min(parts, len(gpus) // each)
        if cores := entered.facts.cores:  # parts train at the same time
            parts = max(1, min(parts, int(cores // each)))
        if entered.meter.scope != "node" and len(gpus) > each and not slot.devices:
            # An agent for each part, with GPUs of its own, also for one: the others are not its.
            self._ray.kill(slot.agent)
            for part in range(parts):
                uuids = gpus[part * each : (part + 1) * each]
                self._request_entry(self._place(node, uuids, float(each)))
            self.admit(POLL_S, wait_for_all=True)
            return
        self.slots.append(slot)


#: A study starts when all nodes have answered, or so long after the first did. While none has, it
#: waits for the longest time: hundreds of workers that import from one file system take minutes.
_GRACE_S, _LATEST_S, _NOTICE_S = 30.0, 300.0, 60.0
#: It waits so long for the first node that others do not use, and looks so often.
_BUSY_S, _RETRY_S = 600.0, 1.0
#: Limit on one wait for answers, so that Ctrl-C is heard.
_WAIT_S = 2.0


def admit_first(pool: NodePool, announce: Callable[[str], None]) -> None:
    """Use the nodes that answer in time; InputError if none can be used.

    Those that are late are admitted while the study runs.
    """
    begin_s = now_s = time.monotonic()
    until_s, notified = begin_s + _LATEST_S, False
    while pool.unanswered and now_s < until_s:
        if not notified and not pool.slots and now_s >= begin_s + _NOTICE_S:
            notified = True
            announce(f"{_unanswered(pool, now_s - begin_s)}; waiting up to {_LATEST_S:.0f} s")
        none = not pool.slots
        pool.admit(min(until_s - now_s, _WAIT_S))
        now_s = time.monotonic()
        if none and pool.slots:
            until_s = now_s + _GRACE_S
    if not pool.slots and pool.unanswered:
        raise InputError(f"{_unanswered(pool, now_s - begin_s)}; mend that, and try again")
    if not pool.slots and pool.has_busy:
        _wait_for_busy(pool, announce)
    pool.require_slots()


def _wait_for_busy(pool: NodePool, announce: Callable[[str], None]) -> None:
    announce(f"waiting up to {_BUSY_S / 60:.0f} minutes until a node is free")
    until_s = time.monotonic() + _BUSY_S
    while not pool.slots and time.monotonic() < until_s:
        time.sleep(_RETRY_S)
        pool.refresh()
        pool.admit(_WAIT_S)


def _unanswered(pool: NodePool, waited_s: float) -> str:
    names = pool.unanswered
    have = f"{names[0]} has" if len(names) == 1 else f"{len(names)} nodes have"
    return (
        f"{have} the devices, and none answered within {waited_s:.0f} s: their processes start "
        "slowly (imports from a shared file system), or ports between the nodes are closed"
    )


class Leases:
    """Placement groups that are taken and given back; the latter waits while the head is silent."""

    def __init__(self, ray: Any, head: Head, resource: str) -> None:
        self._ray, self._head, self._resource = ray, head, resource
        self._given_back: list[Any] = []

    def take(self, name: str, slots: Sequence[Slot]) -> Any:
        """Return a lease of the devices of some slots, which may be granted later."""
        from ray.util.placement_group import placement_group

        return placement_group(
            [{self._resource: slot.amount} for slot in slots],
            name=name,
            strategy="STRICT_SPREAD" if len(slots) > 1 else "STRICT_PACK",
            bundle_label_selector=[{"ray.io/node-id": slot.node} for slot in slots],
        )

    def give_back(self, *leases: Any) -> None:
        """Give leases back, and those that could not be before."""
        self._given_back += leases
        while self._given_back and not self._head.silent_s():
            self._ray.util.remove_placement_group(self._given_back.pop())


#: Limit on the call of Ray's state API, which only clusters with ray[default] have.
_STATE_S = 5


def holders(nodes: Collection[str], resource: str, own: Collection[str]) -> list[str]:
    """Return a phrase for each placement group and actor that holds devices on one of some nodes.

    Args:
        nodes: Ray's ids of nodes.
        resource: Ray's name of the devices.
        own: ids of placement groups that do not count.
    """
    groups = {f"placement group {name}" for name in _groups(nodes, resource, own)}
    return [*sorted(groups), *sorted(set(_actors(nodes, resource)))]


def _groups(nodes: Collection[str], resource: str, own: Collection[str]) -> Iterator[str]:
    from ray.util import placement_group_table

    for key, group in placement_group_table().items():
        where = group["bundles_to_node_id"]
        requests = (where[n] in nodes and resource in b for n, b in group["bundles"].items())
        if group["state"] == "CREATED" and key not in own and any(requests):
            yield repr(group["name"]) if group["name"] else key[:12]


def _actors(nodes: Collection[str], resource: str) -> Iterator[str]:
    from ray.util.state import list_actors
    from ray.util.state.exception import RayStateApiException

    try:
        listed: list[Any] = list_actors(
            filters=[("state", "=", "ALIVE")], detail=True, timeout=_STATE_S
        )
    except (RayStateApiException, OSError, ValueError):  # the head has no ray[default]
        return
    for actor in listed:
        requests = resource in (actor.required_resources or {})
        if requests and actor.node_id in nodes and not actor.placement_group_id:
            named = f" {actor.name!r}" if actor.name else ""
            yield f"actor {actor.class_name}{named} of Ray job {actor.job_id}"
