"""Agents that die and nodes that fail: what is blamed, and what is set aside.

An agent that dies is nobody's fault once; with the same launch again, it is the launch's. A node
whose probe failed by the node is set aside, unless no other is left.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.cluster.made_up import Nodes, Ray
from tests.support.studies import record
from tuner.cluster.executor import Flight, Losses
from tuner.cluster.nodes import Slot
from tuner.search_spaces.configuration import Settings
from tuner.study.rules import node_failures
from tuner.workload.records.probe import Failure, ProbeRequest

ray = pytest.importorskip("ray")
ONE, OTHER = Settings(data_parallel=1), Settings(data_parallel=2)
DIED = ray.exceptions.RayActorError(error_msg="The actor died.\nIts log says no more.")
DAMAGED = Failure("node", "GPU-1 has 2 more uncorrectable memory errors")


def slots_of(count: int, *, of_one_node: bool = False) -> list[Slot]:
    """Return whole nodes, or equal parts of one."""
    if of_one_node:
        return [Slot("id", "node", "", object(), 1 / count) for _ in range(count)]
    return [Slot(f"id{n}", f"node{n}", "", object(), 1.0) for n in range(count)]


def executor_of(slots: list[Slot], *alive: str) -> Nodes:
    """Return an executor that has taken the first of its slots, on a Ray with these nodes alive."""
    made = Nodes(*slots, ray=Ray(*alive))
    made._ray.exceptions, made._losses = ray.exceptions, Losses(ray)
    slots[0].taken = True
    return made


def flight(launch: Settings = ONE, slot: Slot | None = None, **more: Any) -> Flight:
    (other,) = slots_of(1, of_one_node=True)
    now_s = time.monotonic()
    return Flight(ProbeRequest("p0001", launch), [slot or other], None, now_s, now_s, **more)


def kinds_of(*lost: tuple[Flight, Exception]) -> list[str]:
    losses = Losses(ray)
    return [losses.failure(*each).kind for each in lost]


# ---- agents that die


def test_an_agent_that_dies_once_with_a_launch_does_not_cost_the_launch() -> None:
    losses = Losses(ray)
    for launch in (ONE, OTHER):
        failure = losses.failure(flight(launch), DIED)
        assert failure == Failure("node", "the node agent died: The actor died.")
        assert not failure.blames_configuration


def test_a_launch_that_ends_its_agents_is_blamed_at_the_second() -> None:
    losses = Losses(ray)
    losses.failure(flight(ONE), DIED)
    losses.failure(flight(OTHER), DIED)
    failure = losses.failure(flight(ONE), DIED)
    assert failure == Failure(
        "crash", "the node agent died with this launch again: The actor died."
    )
    assert failure.type.blames == "launch"


def test_an_agent_that_was_ended_for_a_known_reason_counts_for_nothing_else() -> None:
    late, full = flight(cancelled=True), ray.exceptions.OutOfMemoryError("9.9 GB of 10")
    assert kinds_of((late, DIED), (flight(), full), (flight(), DIED), (flight(), DIED)) == [
        "time_limit",
        "out_of_memory",
        "node",
        "crash",
    ]


def test_a_launch_that_ends_agents_of_other_nodes_is_blamed_at_the_second_too() -> None:
    losses, told = Losses(ray), Failure("node", "node lost: node b is gone: its agent ended", "log")
    assert losses.failure_of_peer(flight(), told) == told
    assert losses.failure_of_peer(flight(), told) == Failure("crash", told.message, "log")
    assert losses.failure(flight(), DIED).kind == "crash"


def test_launches_that_all_end_their_agents_do_not_end_the_search_as_a_bad_node() -> None:
    """Each is tried again before the next, so every second failure is one of a launch."""
    executor = executor_of(slots_of(1, of_one_node=True), "id")
    for launch in (ONE, ONE, OTHER, OTHER):
        executor._lost(flight(launch), DIED)
        assert node_failures(list(executor._done), 0) is None
    assert [each.failure.kind for each in executor._done if each.failure] == ["node", "crash"] * 2
    assert {each.host for each in executor._done} == {"node"}


def test_a_node_that_goes_with_four_probes_does_not_end_the_search() -> None:
    executor = executor_of(slots_of(4, of_one_node=True))
    for each in [flight(Settings(data_parallel=count)) for count in (1, 2, 3, 4)]:
        executor._lost(each, DIED)
    assert [each.failure.kind for each in executor._done if each.failure] == ["node"] * 4
    assert node_failures(list(executor._done), 0) is None


def test_nodes_that_leave_at_once_do_not_end_the_search() -> None:
    """A cluster of spot nodes: each leaves once, which is no node that fails again and again."""
    slots = slots_of(16)
    executor = executor_of(slots)
    for slot in slots[:3]:
        executor._lost(flight(slot=slot), DIED)
    records = list(executor._done)
    assert [one.host for one in records] == ["node0", "node1", "node2"]
    assert node_failures(records, 0) is None


# ---- nodes that fail


@pytest.mark.parametrize(
    ("nodes", "kind", "aside"),
    [(2, "node", True), (1, "node", False), (2, "crash", False)],
)
def test_a_node_with_damaged_gpus_is_set_aside(nodes: int, kind: str, aside: bool) -> None:
    """The launch, which is not blamed, is proposed again and goes to another."""
    failure = Failure(kind, DAMAGED.message)
    slots = slots_of(nodes)
    executor = executor_of(slots)
    executor.lands(slots[:1], record(failure=failure).to_json())
    assert executor._done.popleft().failure == failure
    now_s = time.monotonic()
    assert slots[0].free(now_s) != aside
    assert all(slot.free(now_s) for slot in slots[1:])
    assert bool(executor.said) == aside
    if aside:
        assert executor.said == [f"node0 is set aside: {DAMAGED.message}"]
        assert not slots[0].free(now_s + 300)
        assert slots[0].free(now_s + 601)


@pytest.mark.parametrize(
    ("nodes", "aside"), [(4, True), (3, False)], ids=["enough are left", "the next would wait"]
)
def test_two_nodes_are_set_aside_only_if_two_are_left(nodes: int, aside: bool) -> None:
    """One of them is sound; probes of two nodes would wait ten minutes for it, and others, too."""
    slots = slots_of(nodes)
    executor_of(slots).lands(slots[:2], record(failure=DAMAGED).to_json())
    assert [slot.free(time.monotonic()) for slot in slots[:2]] == [not aside] * 2


def test_parts_of_a_node_that_fail_before_one_is_known_count_once() -> None:
    """Each at its own moment, at once: a GPU that is lost cannot be metered."""
    slots = slots_of(4, of_one_node=True)
    executor = executor_of(slots)
    failed = record(failure=Failure("node", "the node cannot be metered"), wall_s=0.01).to_json()
    executor._ray.answers[None] = failed
    flights = [executor.flies([slot]) for slot in slots]
    for number, each in enumerate(flights):
        each.began_s -= 4.0 - number  # which takes a second to plan each
    for each in flights:
        executor._land(each)
    assert node_failures(list(executor._done), 0) is None
    for _ in range(2):  # one after the other
        time.sleep(0.01)  # the dates are of milliseconds
        executor.lands(slots[:1], failed)
    assert node_failures(list(executor._done), 0) is not None
