"""A node whose probe failed by the node is set aside, unless no other is left."""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.studies import record, request
from tuner.cluster.executor import Flight, RayExecutor
from tuner.cluster.head import Head
from tuner.cluster.joining import JoinedRay
from tuner.cluster.nodes import Leases, NodePool, Slot
from tuner.study.rules import node_failures
from tuner.workload.records.probe import Failure, MeterInfo

ray = pytest.importorskip("ray")


def executor_with(slots: list[Slot], answer: dict[str, Any], said: list[str]) -> RayExecutor:
    made = object.__new__(RayExecutor)
    made._ray = SimpleNamespace(
        get=lambda result: answer,
        nodes=list,
        exceptions=ray.exceptions,
        util=SimpleNamespace(remove_placement_group=lambda lease: None),
    )
    made._link = JoinedRay(False, lambda: None, Head(str, lambda *_: None))
    made._leases = Leases(made._ray, made._link.head, "GPU")
    made._announce, made._done, made.pool = said.append, deque(), object.__new__(NodePool)
    made.pool.slots, made.pool._ray = slots, made._ray
    made.pool._announce = said.append
    made._flights = [Flight(request(), slots[:1], None, 0.0, 0.0)]
    slots[0].taken = True
    return made


@pytest.mark.parametrize(
    ("nodes", "kind", "aside"),
    [(2, "node", True), (1, "node", False), (2, "crash", False)],
)
def test_a_node_with_damaged_gpus_is_set_aside(nodes: int, kind: str, aside: bool) -> None:
    """The launch, which is not blamed, is proposed again and goes to another."""
    failed = record(failure=Failure(kind, "GPU-1 has 2 more uncorrectable memory errors"))
    slots = [Slot(f"id{n}", f"node{n}", "", SimpleNamespace(), 1.0) for n in range(nodes)]
    said: list[str] = []
    executor = executor_with(slots, failed.to_json(), said)
    executor._land(executor._flights[0])
    assert executor._done.popleft().failure == failed.failure
    now_s = time.monotonic()
    assert slots[0].free(now_s) != aside
    assert all(slot.free(now_s) for slot in slots[1:])
    assert bool(said) == aside
    if aside:
        assert said == ["node0 is set aside: GPU-1 has 2 more uncorrectable memory errors"]
        assert not slots[0].free(now_s + 300)
        assert slots[0].free(now_s + 601)


@pytest.mark.parametrize(
    ("nodes", "aside"), [(4, True), (3, False)], ids=["enough are left", "the next would wait"]
)
def test_two_nodes_are_set_aside_only_if_two_are_left(nodes: int, aside: bool) -> None:
    """One of them is sound; probes of two nodes would wait ten minutes for it, and others, too."""
    failed = record(failure=Failure("node", "GPU-1 has 2 more uncorrectable memory errors"))
    slots = [Slot(f"id{n}", f"node{n}", "", SimpleNamespace(), 1.0) for n in range(nodes)]
    executor = executor_with(slots, failed.to_json(), [])
    executor._flights[0].slots = slots[:2]
    executor._land(executor._flights[0])
    assert [slot.free(time.monotonic()) for slot in slots[:2]] == [not aside] * 2


def test_parts_of_a_node_that_fail_before_one_is_known_count_once() -> None:
    """Each at its own moment, at once: a GPU that is lost cannot be metered."""
    slots = [Slot("id", "node", "", SimpleNamespace(), 0.25) for _ in range(4)]
    failed = record(failure=Failure("node", "the node cannot be metered"), wall_s=0.01)
    executor = executor_with(slots, failed.to_json(), [])
    flights = [Flight(request(), [slot], None, 0.0, 0.0) for slot in slots]
    for number, flight in enumerate(flights):
        flight.began_s -= 4.0 - number  # which takes a second to plan each
    executor._flights = list(flights)
    for flight in flights:
        executor._land(flight)
    assert node_failures(list(executor._done), 0) is None
    for _ in range(2):  # one after the other
        time.sleep(0.01)  # the dates are of milliseconds
        executor._flights = [again := Flight(request(), slots[:1], None, 0.0, 0.0)]
        executor._land(again)
    assert node_failures(list(executor._done), 0) is not None


def test_nodes_that_leave_at_once_do_not_end_the_search() -> None:
    """A cluster of spot nodes: each leaves once, which is no node that fails again and again."""
    slots = [Slot(f"id{n}", f"node{n}", "", SimpleNamespace(), 1.0) for n in range(16)]
    executor = executor_with(slots, {}, [])
    executor.pool.meter = MeterInfo("nvml", "gpu", "NVML")
    executor._ray.nodes = list
    executor.pool._listed, executor._refresh_nodes = {}, lambda: None  # type: ignore[method-assign]
    for slot in slots[:3]:
        executor._lost(Flight(request(), [slot], None, 0.0, 0.0), "the actor died")
    records = list(executor._done)
    assert [one.host for one in records] == ["node0", "node1", "node2"]
    assert node_failures(records, 0) is None
