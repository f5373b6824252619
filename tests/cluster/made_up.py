"""The Ray executor over nodes that are made up: no Ray is started, and waiting takes no time."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tests.support.fake_clock import FakeClock
from tests.support.studies import METER, record
from tuner.cluster.executor import Flight, Losses, QueuedProbe, RayExecutor
from tuner.cluster.head import Head
from tuner.cluster.joining import JoinedRay
from tuner.cluster.nodes import Leases, NodePool, Slot
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.job import load_job
from tuner.workload.records.probe import ProbeRequest

HEAD = Head(str, lambda address, timeout_s: None)  # it answers


class Clock(FakeClock):
    """The module `time` to those who wait; a wait takes no time but this."""

    monotonic = FakeClock.__call__


class Agent:
    """An agent that answers at once, never, or by Ray's error that it died."""

    pid = property(lambda self: self)

    def __init__(self, answers: bool = True, dies: bool = False) -> None:
        self.answers, self.dies = answers, dies

    def remote(self) -> Agent:
        return self


class Ray:
    """Ray whose leases are never granted, with these nodes alive.

    Attributes:
        killed: the agents that it was told to kill.
        answers: by what is asked, in place of an agent's.
    """

    class exceptions:
        RayActorError = RuntimeError
        OutOfMemoryError = MemoryError

        class ActorUnavailableError(RuntimeError):
            pass

    def __init__(self, *alive: str) -> None:
        self._alive = alive
        self.killed: list[Agent] = []
        self.answers: dict[Any, Any] = {}
        self.util = SimpleNamespace(remove_placement_group=lambda lease: None)
        self.kill = self.killed.append

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": name, "Alive": True} for name in self._alive]

    def wait(
        self, answers: list[Agent], num_returns: int, timeout: float
    ) -> tuple[list[Agent], list[Agent]]:
        assert timeout <= 10
        return [a for a in answers if a.answers], [a for a in answers if not a.answers]

    def get(self, asked: Any) -> Any:
        each = asked if isinstance(asked, list) else [asked]
        if any(isinstance(one, Agent) and one.dies for one in each):
            raise RuntimeError("the actor died")
        return 1 if isinstance(asked, list) else self.answers.get(asked, 1)


def pool_of(
    ray: Any,
    cluster: Cluster | None = None,
    said: list[str] | None = None,
    make_runner: Any = None,
) -> NodePool:
    """Return the pool of a study on one node of eight GPUs, or on another cluster."""
    return NodePool(
        ray,
        load_job(),
        cluster or replace(load_cluster("h200-8"), nodes=1),
        run_dir=".",
        make_runner=make_runner,
        local=False,
        announce=[].append if said is None else said.append,
    )


class Nodes(RayExecutor):
    """The executor over nodes that are made up; a lease is noted and holds its nodes.

    Args:
        slots: of its nodes; a name is one of a node of its own.
        nodes: of the study's cluster.
    """

    def __init__(self, *slots: Slot | str, nodes: int = 2, ray: Any = None) -> None:
        self._ray = ray or Ray()
        self._cluster = replace(load_cluster("h200-8"), nodes=nodes)
        self.said: list[str] = []
        self._announce = self.said.append
        self.pool = pool_of(self._ray, self._cluster, self.said)
        self.pool.slots = [
            Slot(each, each, each, None, 8.0) if isinstance(each, str) else each for each in slots
        ]
        self.pool.meter = METER
        self._link = JoinedRay(False, lambda: None, HEAD)
        self._leases, self._losses = Leases(self._ray, HEAD, "GPU"), Losses(self._ray)
        self._flights, self._queue, self._done, self._held = [], deque(), deque(), set()
        self.leased: list[tuple[str, list[str]]] = []

    def _lease(self, queued: QueuedProbe, slots: list[Slot]) -> None:
        self.leased.append((queued.request.probe_id, [slot.node for slot in slots]))
        for slot in slots:
            slot.taken = True
        self.flies(slots, queued.request)

    def flies(self, slots: list[Slot], request: ProbeRequest | None = None, **more: Any) -> Flight:
        """Return a further flight that has these slots, and has just begun."""
        now_s = time.monotonic()
        times = {"queued_s": now_s, "since_s": now_s, **more}
        made = Flight(request or record().request, slots, **{"lease": None, **times})
        self._flights.append(made)
        return made

    def lands(self, slots: list[Slot], answer: Any, request: ProbeRequest | None = None) -> None:
        """Land a flight on these slots with an agent's answer."""
        told = Agent()
        self._ray.answers[told] = answer
        self._land(self.flies(slots, request, result=told))

    def wants(self, name: str, gpus: int) -> QueuedProbe:
        nodes = -(-gpus // self._cluster.devices_per_node)
        self._queue.append(QueuedProbe(ProbeRequest(name, Settings(data_parallel=gpus)), nodes))
        self._dispatch()
        return self._queue[-1] if self._queue else QueuedProbe(record().request, 1)
