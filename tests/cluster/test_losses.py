"""An agent that dies is nobody's fault once; with the same launch again, it is the launch's."""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace

import pytest

from tests.cluster.test_aside import executor_with
from tuner.cluster.executor import Flight, Losses
from tuner.cluster.nodes import Slot
from tuner.search_spaces.configuration import Settings
from tuner.study.rules import node_failures
from tuner.workload.records.probe import Failure, MeterInfo, ProbeRequest

ray = pytest.importorskip("ray")
ONE, OTHER = Settings(data_parallel=1), Settings(data_parallel=2)
DIED = ray.exceptions.RayActorError(error_msg="The actor died.\nIts log says no more.")


def flight(launch: Settings = ONE, *, cancelled: bool = False) -> Flight:
    slot = Slot("id", "node", "", SimpleNamespace(), 1.0)
    now_s = time.monotonic()
    return Flight(ProbeRequest("p0001", launch), [slot], None, now_s, now_s, cancelled=cancelled)


def kinds_of(*lost: tuple[Flight, Exception]) -> list[str]:
    losses = Losses(ray)
    return [losses.failure(*each).kind for each in lost]


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
    slots = [Slot("id", "node", "", SimpleNamespace(), 1.0)]
    executor = executor_with(slots, {}, [])
    executor._losses, executor._done = Losses(ray), deque()
    executor.pool.meter = MeterInfo("nvml", "gpu", "NVML")
    executor.pool._listed = {}
    executor._ray.nodes = lambda: [{"NodeID": "id", "Alive": True}]
    for launch in (ONE, ONE, OTHER, OTHER):
        executor._lost(flight(launch), DIED)
        assert node_failures(list(executor._done), 0) is None
    assert [each.failure.kind for each in executor._done if each.failure] == ["node", "crash"] * 2
    assert {each.host for each in executor._done} == {"node"}


def test_a_node_that_goes_with_four_probes_does_not_end_the_search() -> None:
    slots = [Slot("id", "node", "", SimpleNamespace(), 0.25) for _ in range(4)]
    executor = executor_with(slots, {}, [])
    executor._losses, executor._done = Losses(ray), deque()
    executor.pool.meter = MeterInfo("nvml", "gpu", "NVML")
    executor._ray.nodes = list
    executor._refresh_nodes = lambda: None
    flights = [flight(Settings(data_parallel=count)) for count in (1, 2, 3, 4)]
    for each in flights:
        executor._lost(each, DIED)
    assert [each.failure.kind for each in executor._done if each.failure] == ["node"] * 4
    assert node_failures(list(executor._done), 0) is None
