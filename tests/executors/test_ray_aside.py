"""A node whose probe failed by the node is set aside, unless no other is left."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import tuner
from tuner.executors.ray_executor import Flight, RayExecutor
from tuner.executors.ray_nodes import NodePool, Slot
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.typed import dump_fields
from tuner.study.rules import node_failures
from tuner.testing.studies import record, request
from tuner.workload.measure.stragglers import RankState, Straggler
from tuner.workload.probe import Failure, MeterInfo

ray = pytest.importorskip("ray")


def executor_with(slots: list[Slot], answer: dict[str, Any], said: list[str]) -> RayExecutor:
    made = object.__new__(RayExecutor)
    made._ray = SimpleNamespace(
        get=lambda result: answer,
        exceptions=ray.exceptions,
        util=SimpleNamespace(remove_placement_group=lambda lease: None),
    )
    made._say, made._done, made.pool = said.append, deque(), object.__new__(NodePool)
    made.pool.slots = slots
    made.pool._avoid_stragglers, made.pool._say = True, said.append
    made._flights = [Flight(request(), slots[:1], None, 0.0)]
    slots[0].taken = True
    return made


@pytest.mark.parametrize(
    ("nodes", "kind", "aside"),
    [(2, "node", True), (1, "node", False), (2, "crash", False)],
)
def test_second_day_7_a_node_with_damaged_gpus_is_set_aside(
    nodes: int, kind: str, aside: bool
) -> None:
    """second_day_7: the launch, which is not blamed, is proposed again and goes to another."""
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


def straggler(cause: str, node: str = "") -> dict[str, Any]:
    state = RankState(5, node, 5, clock_MHz=1305.0)
    return dump_fields(Straggler(state, 0.1, 0.09, cause, 1305.0, 1755.0))


@pytest.mark.parametrize(
    ("cause", "node", "slow"),
    [
        ("heat", "", [True, False, False]),
        ("heat", "1", [False, True, False]),
        ("priority", "", [False, False, False]),  # the user's own
        ("unknown", "1", [False, False, False]),
    ],
)
def test_the_node_of_a_straggler_is_avoided(cause: str, node: str, slow: list[bool]) -> None:
    done = replace(record(), environment={"stragglers": [straggler(cause, node)]})
    slots = [Slot(f"id{n}", f"node{n}", "", SimpleNamespace(), 1.0) for n in range(3)]
    said: list[str] = []
    executor = executor_with(slots, done.to_json(), said)
    executor._flights[0].slots = slots[:2]
    executor._land(executor._flights[0])
    assert [slot.slow for slot in slots] == slow
    sound = [slot for slot in slots if not slot.slow]
    assert executor.pool.free(1) == sound
    # A probe of all nodes is not kept waiting for one that never comes.
    assert len(executor.pool.free(3)) == 3
    assert len(said) == any(slow)
    if said:
        assert "is avoided: GPU 5: heat, 1,305 MHz where the others run 1,755; costs 9 %" in said[0]
    for slot in sound:
        slot.taken = True  # the next probe waits for it
    assert executor.pool.free(1) == []
    for slot in sound:
        slot.taken, slot.aside_s = False, time.monotonic() + 60  # they failed since
    assert executor.pool.free(1) == [slot for slot in slots if slot.slow]


def test_the_last_node_is_not_avoided_and_none_where_it_was_not_asked_for() -> None:
    done = replace(record(), environment={"stragglers": [straggler("heat")]})
    for nodes, asked in ((1, True), (2, False)):
        slots = [Slot(f"id{n}", f"node{n}", "", SimpleNamespace(), 1.0) for n in range(nodes)]
        said: list[str] = []
        executor = executor_with(slots, done.to_json(), said)
        executor.pool._avoid_stragglers = asked
        executor._land(executor._flights[0])
        assert (executor.pool.free(1), said) == (slots, [])


def test_all_nodes_may_be_slow() -> None:
    done = replace(record(), environment={"stragglers": [straggler("heat")]})
    slots = [Slot(f"id{n}", f"node{n}", "", SimpleNamespace(), 1.0) for n in range(2)]
    for first in (slots, slots[::-1]):
        executor = executor_with(slots, done.to_json(), [])
        executor._flights[0].slots = first[:1]
        executor._land(executor._flights[0])
        slots[0].taken = False
    assert executor.pool.free(1) == slots


def test_stragglers_are_avoided_on_a_ray_cluster_only() -> None:
    with pytest.raises(InputError, match="avoid_stragglers"):
        tuner.optimize("tiny-bert", avoid_stragglers=True)


def test_nodes_that_leave_at_once_do_not_end_the_search() -> None:
    """A cluster of spot nodes: each leaves once, which is no node that fails again and again."""
    slots = [Slot(f"id{n}", f"node{n}", "", SimpleNamespace(), 1.0) for n in range(16)]
    executor = executor_with(slots, {}, [])
    executor.pool.meter = MeterInfo("nvml", "gpu", "NVML")
    executor._ray.nodes = list
    executor.pool._listed, executor._refresh_nodes = {}, lambda: None  # type: ignore[method-assign]
    for slot in slots[:3]:
        executor._lost(Flight(request(), [slot], None, 0.0), "the actor died")
    records = list(executor._done)
    assert [one.host for one in records] == ["node0", "node1", "node2"]
    assert node_failures(records, 0) is None
