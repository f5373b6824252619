"""What becomes of a probe whose launch, driver, storage or node goes while it waits for another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optuna
import pytest

from tests.cluster.made_up import Agent, Nodes, Ray, pool_of
from tests.support.studies import METER, measured, record
from tests.waiting import wait_until
from tuner.cluster import agent as node_agent
from tuner.cluster.agent import NodeStatus
from tuner.cluster.executor import (
    _LEASE_S,
    _SHORT_MOST,
    NO_NODE_S,
    SHORT_S,
    TOGETHER_S,
)
from tuner.cluster.joining import POLL_S
from tuner.cluster.nodes import Slot
from tuner.executors.local import InlineExecutor, run_safely
from tuner.search.evidence import Observations
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.space import Candidates
from tuner.workload.node.facts import NodeFacts
from tuner.workload.node.platforms.base import GpuFacts
from tuner.workload.records.probe import (
    Failure,
    Measurement,
    NextSettings,
    ProbeRecord,
    ProbeRequest,
)
from tuner.workload.records.trace import TraceWriter, recover_pending

optuna.logging.set_verbosity(optuna.logging.ERROR)

SPEEDS = tuple(Settings(speed=speed) for speed in (1, 2, 3))
SHAPE = Settings(shape=1)
WIDE = ProbeRequest("wide", Settings(data_parallel=16))


def open_request(name: str = "p0000") -> ProbeRequest:
    return ProbeRequest(name, SHAPE, SPEEDS[:1], extendable=True)


# -- what was measured is kept while the driver is asked -------------------------------------------


class Launch:
    """Measures a window, asks, and visits what it is told."""

    meter = METER

    def run(self, request: ProbeRequest) -> ProbeRecord:
        raise AssertionError

    def run_interactive(self, request: ProbeRequest, next_settings: NextSettings) -> ProbeRecord:
        windows = [measured(request.live[0])]
        while more := next_settings(request, tuple(windows)):
            request = replace(request, live=(*request.live, *more))
            windows += [measured(live) for live in more]
        return ProbeRecord(request, tuple(windows), METER)

    def close(self) -> None:
        pass


def test_an_interrupt_while_it_is_asked_leaves_the_windows_in_the_run_folder(
    tmp_path: Path,
) -> None:
    asked: list[int] = []

    def next_settings(
        request: ProbeRequest, windows: Sequence[Measurement]
    ) -> tuple[Settings, ...]:
        asked.append(len(windows))
        if len(windows) == 2:
            raise KeyboardInterrupt
        return SPEEDS[1:2]

    executor = InlineExecutor(Launch(), keep_in=tmp_path)
    executor.submit(open_request(), next_settings)
    with pytest.raises(KeyboardInterrupt):
        executor.wait()
    (kept,) = recover_pending(tmp_path)
    assert [m.live for m in kept.measurements] == list(SPEEDS[:2])
    assert kept.request.live == SPEEDS[:2]
    assert kept.failure.kind == "cancelled"
    assert kept.energy_J == sum(m.energy_J for m in kept.measurements)


def test_a_driver_that_fails_when_asked_costs_no_window(tmp_path: Path) -> None:
    def next_settings(
        request: ProbeRequest, windows: Sequence[Measurement]
    ) -> tuple[Settings, ...]:
        raise RuntimeError("no answer")

    ended = run_safely(Launch(), open_request(), tmp_path, next_settings=next_settings)
    assert "no answer" in ended.failure.message
    assert [m.live for m in ended.measurements] == list(SPEEDS[:1])


def test_a_launch_that_comes_to_its_end_keeps_its_whole_record(tmp_path: Path) -> None:
    told = iter([SPEEDS[1:], ()])
    ended = run_safely(
        Launch(), open_request(), tmp_path, next_settings=lambda request, windows: next(told)
    )
    assert ended.ok
    assert recover_pending(tmp_path)[0].ok
    with TraceWriter(tmp_path / "trace" / "probes.jsonl") as writer:
        writer.append(ended)
    assert recover_pending(tmp_path) == ()


def test_an_answer_that_comes_too_late_gets_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agent, "HOLD_S", 0.05)
    agent = node_agent.Agent(str(tmp_path))
    agent._runner = Launch()
    told = agent.run(open_request().to_json())
    assert [live["speed"] for live in told["visited"]["request"]["live"]] == [1]
    wait_until(lambda: recover_pending(tmp_path)[0].ok)  # the launch is ended meanwhile
    late = ProbeRecord.from_json(agent.continue_probe("p0000", [SPEEDS[1].to_json()]))
    assert late.ok
    assert late.request.live == SPEEDS[:1] == tuple(m.live for m in late.measurements)
    assert agent._open == {}


# -- the study -------------------------------------------------------------------------------------


def observed(record: ProbeRecord) -> Observations:
    every = Candidates.from_configurations(Configuration(SHAPE, speed) for speed in SPEEDS)
    return Observations.of([record], (), every, np.zeros(len(SPEEDS), dtype=int))


def test_a_setting_that_the_launch_never_heard_of_is_not_to_blame() -> None:
    found = observed(ProbeRecord(open_request(), (measured(SPEEDS[0]),), METER))
    assert found.closed == {0}
    assert not found.failed_launches


def test_a_setting_that_was_due_when_the_launch_failed_is() -> None:
    request = replace(open_request(), live=SPEEDS[:2])
    failure = Failure("crash", "a rank died")
    found = observed(ProbeRecord(request, (measured(SPEEDS[0]),), METER, failure))
    assert found.closed == {0, 1}
    assert found.failed_launches == {0}


# -- the queue of a Ray cluster --------------------------------------------------------------------


def test_what_fits_goes_before_a_probe_whose_node_was_lost() -> None:
    executor = Nodes("a")
    executor.wants("wide", 16)
    assert executor.capacity == 2  # it, and what the node that is left has room for
    executor.wants("small", 8)
    assert executor.leased == [("small", ["a"])]
    assert [queued.request.probe_id for queued in executor._queue] == ["wide"]
    executor.pool.slots.append(Slot("b", "b", "b", None, 8.0))
    executor.pool.slots[0].taken = False
    executor._dispatch()
    assert executor.leased[-1] == ("wide", ["a", "b"])


def test_a_probe_that_only_waits_for_busy_nodes_keeps_its_place() -> None:
    executor = Nodes("a", "b")
    executor.pool.slots[0].taken = True
    executor.wants("wide", 16)
    executor.wants("small", 8)
    assert executor.leased == []
    assert executor.capacity == 2  # and nothing more is asked for


def four_nodes_of_which_one_measures_since(ago_s: float) -> Nodes:
    executor = Nodes("a", "b", "c", "d", nodes=4)
    (slot,) = taken = executor.pool.slots[:1]
    slot.take()
    executor.flies(taken, since_s=time.monotonic() - ago_s)
    return executor


def test_a_probe_that_begins_with_those_that_a_wide_one_waits_for_goes_before_it() -> None:
    executor = four_nodes_of_which_one_measures_since(1.0)
    wide = executor.wants("wide", 32)
    assert executor.capacity == 5  # what measures, the wide one, and three free nodes
    executor.wants("small", 8)
    assert executor.leased == [("small", ["b"])]
    executor.wants("pair", 16)
    assert executor.leased[1:] == [("pair", ["c", "d"])]
    assert executor.capacity == executor.in_flight
    # A second one that waits is not asked to be passed by.
    executor.pool.slots[3].taken = False
    assert executor.capacity == executor.in_flight + 1
    executor.wants("wide too", 32)
    assert executor.capacity == executor.in_flight
    for slot in executor.pool.slots:
        slot.taken = False
    executor._flights.clear()
    executor._dispatch()
    assert executor.leased[-1] == (wide.request.probe_id, ["a", "b", "c", "d"])


@pytest.mark.parametrize(("began_ago_s", "waits_s"), [(TOGETHER_S + 1, 0.0), (1.0, TOGETHER_S + 1)])
def test_a_wide_probe_is_not_passed_for_long(began_ago_s: float, waits_s: float) -> None:
    """By one that would end long after those that it waits for, or by many short ones in turn."""
    executor = four_nodes_of_which_one_measures_since(began_ago_s)
    executor.wants("wide", 32).since_s -= waits_s
    assert executor.capacity == executor.in_flight
    executor.wants("small", 8)
    assert executor.leased == []


def test_only_probes_that_have_the_nodes_of_a_wide_one_count() -> None:
    executor = four_nodes_of_which_one_measures_since(TOGETHER_S + 1)
    last = executor.pool.slots[3]
    last.take()  # has just begun; the wide one needs the nodes before it
    executor.flies([last])
    executor.wants("wide", 24)
    executor.wants("small", 8)
    assert executor.leased == []


def test_nodes_that_others_hold_come_free_at_no_time_that_is_known() -> None:
    executor = Nodes("a", "b")
    executor.pool.slots[0].aside_s = time.monotonic() + 30
    executor.wants("wide", 16)
    executor.wants("small", 8)
    assert executor.leased == []


def test_what_needs_more_nodes_than_the_cluster_has_is_refused() -> None:
    executor = Nodes("a", "b")
    executor.wants("wide", 32)
    (refused,) = executor._done
    assert refused.failure == Failure("refused", "it needs 4 nodes, and 2 are in use")


def test_a_probe_that_too_few_nodes_are_left_for_fails_with_a_sentence() -> None:
    executor = Nodes("a")
    waits = executor.wants("wide", 16)
    assert not executor._done
    waits.short_s -= SHORT_S + 1
    executor._dispatch()
    failure = executor._done[0].failure
    assert failure.kind == "node"
    assert failure.message == (
        "it needs 2 nodes, and for 60 s no more than 1 is left in the Ray cluster"
    )
    assert not executor._queue


def test_its_wait_begins_when_the_node_is_lost_and_ends_when_it_is_back() -> None:
    executor = Nodes("a", "b")
    executor.pool.slots[0].taken = True
    waits = executor.wants("wide", 16)
    waits.since_s -= SHORT_S + 1
    lost = executor.pool.slots.pop()
    executor._dispatch()
    assert waits.short_s > time.monotonic() - 10
    executor.pool.slots.append(lost)
    executor._dispatch()
    assert waits.short_s == 0.0
    waits.since_s -= NO_NODE_S
    executor._dispatch()
    failure = executor._done[0].failure
    assert failure.message == "2 nodes were not free together within 600 s"


@pytest.mark.parametrize("lost", [Agent(answers=False), Agent(dies=True)], ids=["silent", "dead"])
def test_a_lost_node_that_ray_still_counts_is_not_waited_for(lost: Agent) -> None:
    executor = Nodes("a", "b")
    first, second = executor.pool.slots
    first.agent, second.agent = Agent(), lost
    lease = SimpleNamespace(wait=lambda timeout_seconds: False)
    asked_s = time.monotonic() - _LEASE_S - 1
    executor._await_lease(executor.flies([first, second], WIDE, lease=lease, since_s=asked_s))
    assert (executor._ray.killed, executor.pool.names) == ([lost], ("a",))
    first.aside_s = 0.0  # the one that answers is asked again after a while
    executor._dispatch()
    (waits,) = executor._queue
    assert waits.short_s > 0
    waits.short_s -= SHORT_S + 1
    executor._dispatch()
    assert "no more than 1 is left" in executor._done[0].failure.message


def test_memory_that_rays_monitor_ran_out_of_is_learnt_as_that() -> None:
    """Ray 2.60 reports an actor that its monitor ended by OutOfMemoryError, no RayActorError."""
    executor = Nodes("a", ray=Ray("a"))
    (slot,) = executor.pool.slots
    replaced: list[Slot] = []
    executor.pool.replace_agent = replaced.append  # type: ignore[method-assign]

    def full(answer: Agent) -> int:
        raise MemoryError("1 worker(s) were killed due to the node running low on memory.")

    executor._ray.get = full
    executor.lands([slot], None)
    failure = executor._done[0].failure
    assert (failure.kind, replaced) == ("out_of_memory", [slot])
    assert "RAY_memory_monitor_refresh_ms=0" in failure.message


@pytest.mark.parametrize("dies", [True, False])
def test_the_agent_of_a_second_node_that_died_is_replaced(dies: bool) -> None:
    """Else every launch on both nodes would fail, and the third failure would end the search."""
    executor = Nodes("a", "b", ray=Ray("a", "b"))
    first, second = executor.pool.slots
    replaced: list[Slot] = []
    executor.pool.replace_agent = replaced.append  # type: ignore[method-assign]
    lost = record(failure=Failure("node", "node lost: node b is gone: its agent ended")).to_json()
    for _ in range(2):
        first.agent, second.agent = Agent(), Agent(dies=dies)
        executor.pool.slots = [first, second]
        executor.lands([first, second], lost, WIDE)
    kinds = [each.failure.kind for each in executor._done if each.failure]
    assert kinds == (["node", "crash"] if dies else ["node", "node"])
    assert replaced == [second] * 2 * dies
    assert executor.pool.names == (("a",) if dies else ("a", "b"))
    assert first.free(time.monotonic())


def test_nodes_whose_agents_answer_are_busy_with_others() -> None:
    executor = Nodes("a", "b")
    for slot in executor.pool.slots:
        slot.agent = Agent()
    assert not executor.pool.drop_unreachable(executor.pool.slots)
    assert (executor._ray.killed, executor.pool.names) == ([], ("a", "b"))


def test_an_agent_that_does_not_enter_is_not_counted_for_ever() -> None:
    executor = Nodes("a")
    new = Slot("b", "b", "b", None, 8.0, requested_s=time.monotonic())
    executor.pool._entering["answer"] = new
    waits = executor.wants("wide", 16)
    assert waits.short_s == 0.0
    new.requested_s -= POLL_S + 1
    executor._dispatch()
    assert waits.short_s > 0


def test_no_more_than_a_few_are_passed_by() -> None:
    executor = Nodes("a")
    for number in range(_SHORT_MOST + 1):
        assert executor.capacity > executor.in_flight
        executor.wants(f"wide{number}", 16)
    assert executor.capacity == executor.in_flight


@pytest.mark.parametrize(("cores", "parts"), [(3.0, 1), (4.0, 2), (0.5, 1)])
def test_gpus_that_no_part_has_are_charged_to_none(
    cores: float, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node of 4 GPUs, a study of 2, and cores for one part: the meter of an agent on the whole
    node would add the power of two GPUs that train nothing."""
    cluster = replace(load_cluster("h100-32"), devices_per_node=2)
    pool = pool_of(Ray(), cluster)
    node = {
        "NodeID": "a",
        "NodeManagerHostname": "a",
        "NodeManagerAddress": "1.2.3.4",
        "Resources": {"GPU": 4},
    }
    pool._listed["a"] = node
    asked: list[Slot] = []
    monkeypatch.setattr("tuner.cluster.nodes.place_agent", lambda *_, **__: object())
    monkeypatch.setattr(pool, "_request_entry", asked.append)
    gpus = tuple(GpuFacts(number, f"GPU-{number}", "", 0) for number in range(4))
    facts = NodeFacts("a", cluster, cores=cores, gpus=gpus)
    meter = replace(METER, scope="gpu")
    pool._take(Slot("a", "a", "1.2.3.4", object(), 4.0), NodeStatus(facts, (), meter))
    assert [slot.devices for slot in asked] == [("GPU-0", "GPU-1"), ("GPU-2", "GPU-3")][:parts]
    assert not pool.slots
    assert all(slot.amount == 2.0 for slot in asked)
