"""Everyday states of a shared cluster: devices that others hold, nodes that are late or stall."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cluster.joining_states import false_sentences
from tests.cluster.made_up import Clock, Nodes, pool_of
from tests.cluster.own_ray import OwnRay
from tests.support.studies import METER
from tuner.cluster import executor as ray_executor
from tuner.cluster import head as ray_head
from tuner.cluster import nodes as ray_nodes
from tuner.cluster.agent import NodeStatus
from tuner.cluster.executor import RayExecutor
from tuner.cluster.head import Head
from tuner.cluster.joining import join_ray
from tuner.cluster.nodes import Leases, admit_first
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.workload.node.facts import NodeFacts
from tuner.workload.records.probe import ProbeRequest
from tuner.workload.records.trace import read_trace

pytest.importorskip("ray")


class NeverGranted:
    """A lease of devices that others hold."""

    id = SimpleNamespace(hex=lambda: "ours")

    def wait(self, timeout_seconds: float) -> bool:
        time.sleep(min(timeout_seconds, 0.01))
        return False


def test_a_probe_whose_devices_others_hold_is_given_up_and_they_are_named_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each lease began the limit of ten minutes anew."""
    for name, value_s in {"_LEASE_S": 0.2, "_ASIDE_S": 0.1}.items():
        monkeypatch.setattr(ray_executor, name, value_s)
    monkeypatch.setattr(ray_executor, "NO_NODE_S", 2.0)
    leases: list[str] = []

    def lease(*_: Any, name: str, **__: Any) -> NeverGranted:
        leases.append(name)
        return NeverGranted()

    module = importlib.import_module("ray.util.placement_group")
    monkeypatch.setattr(module, "placement_group", lease)
    monkeypatch.setattr(ray_executor, "holders", lambda *_: ["actor Train of Ray job 01"])
    made = Nodes("n1", nodes=1)
    made._lease = partial(RayExecutor._lease, made)  # type: ignore[method-assign]
    made._run_dir, made._gauges = tmp_path / "qwen", SimpleNamespace(set=lambda *_: None)
    made.pool.drop_unreachable = lambda slots: False  # type: ignore[method-assign]
    made.pool._refreshed_s = time.monotonic() + 1e6
    made.submit(ProbeRequest("p0007", Settings(data_parallel=8)))
    ended = made.wait(20)
    assert ended.failure.message == "no node came free within 2 s"
    assert len(leases) > 2
    assert set(leases) == {"joulefront-qwen-p0007"}
    (sentence,) = made.said
    assert "n1 did not come free" in sentence
    assert "its GPUs are held by actor Train of Ray job 01" in sentence


HOLDS = """
import os, ray
from ray.util.placement_group import placement_group
ray.init(address=os.environ["JF_ADDRESS"], log_to_driver=False, logging_level="ERROR")
group = placement_group([{"CPU": 1}], name="their-training")
ray.get(group.ready())
print("held", flush=True)
input()
"""
ASKS = """
import json, os, ray
from tuner.cluster.nodes import holders
ray.init(address=os.environ["JF_ADDRESS"], log_to_driver=False, logging_level="ERROR")
node = ray.nodes()[0]["NodeID"]
(own,) = ray.util.placement_group_table()
found = [holders([node], "CPU", []), holders([node], "CPU", [own]), holders(["x"], "CPU", [])]
print("ANSWER " + json.dumps([*found, holders([node], "GPU", [])]))
"""


@pytest.fixture
def own_ray() -> Iterator[OwnRay]:
    with OwnRay.started() as made:
        yield made


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.ray
def test_ray_tells_who_holds_the_devices(own_ray: OwnRay) -> None:
    with own_ray.python(HOLDS) as other:
        assert other.stdout.readline() == "held\n"
        out, err = own_ray.python(ASKS).communicate(timeout=120)
        assert "ANSWER" in out, err[-2000:]
        named = ["placement group 'their-training'"]
        assert json.loads(out.partition("ANSWER ")[2]) == [named, [], [], []]
        other.communicate("\n", timeout=60)


# ---- heads that refuse, that are of others, and that die


@pytest.mark.real
@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_each_reason_against_joining_is_the_one_that_is_said() -> None:
    """All of them were 'no Ray cluster answers', after a minute, and blamed the token"""
    assert false_sentences() == []


def test_an_address_of_another_machine_is_not_here() -> None:
    assert ray_head._is_here("127.0.0.1")
    assert ray_head._is_here("::1")
    assert not ray_head._is_here("203.0.113.7")
    assert not ray_head._is_here("2001:db8::7")


def test_auto_means_the_cluster_of_ray_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(InputError, match="'ray://head:10001' is not an address of a Ray cluster"):
        join_ray("auto")


def test_a_head_that_is_silent_for_too_long_ends_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    responds = True

    def query(address: str, timeout_s: float) -> None:
        if not responds:
            raise ConnectionRefusedError

    head, returned = Head(str, query), list[Any]()
    ray = SimpleNamespace(util=SimpleNamespace(remove_placement_group=returned.append))
    leases = Leases(ray, head, "GPU")
    responds = False
    assert not head.responds()
    leases.give_back("one")
    assert returned == []  # it would wait for a minute
    responds = True
    assert head.responds()
    leases.give_back()
    assert returned == ["one"]
    responds = False
    monkeypatch.setattr(ray_head, "GONE_S", 0.0)
    with pytest.raises(InputError, match="every finished probe is kept, and the same command"):
        head.responds()


def test_a_raylet_that_refuses_connections_has_ended_unless_it_always_did() -> None:
    raylet = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{raylet.getsockname()[1]}"

    def query(address: str, timeout_s: float) -> None:
        if address:
            socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 1).close()

    head = Head(str, query, raylet=address)
    assert head.responds()
    assert not head.raylet_ended
    raylet.close()
    assert head.raylet_ended
    with pytest.raises(InputError, match="has ended; every finished probe is kept, and the same"):
        head.responds()

    def fails() -> None:
        raise RuntimeError("placement group does not exist")

    with pytest.raises(InputError, match="has ended; every finished"):
        head.call(fails)
    # A firewall that refuses them, and a raylet that is slow, are not ends.
    assert Head(str, query, raylet=address).responds()
    with pytest.raises(RuntimeError, match="placement group"):
        Head(str, query, raylet=address).call(fails)

    def slow(address: str, timeout_s: float) -> None:
        if address:
            raise TimeoutError

    assert not Head(str, slow, raylet=address).raylet_ended


def test_a_call_that_waits_for_a_head_that_is_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_head, "GONE_S", 0.5)
    monkeypatch.setattr(ray_head, "_POLL_S", 0.1)
    ends = threading.Event()

    def query(address: str, timeout_s: float) -> None:
        raise ConnectionRefusedError

    with pytest.raises(InputError, match="every finished probe is kept"):
        Head(str, query).call(lambda: ends.wait(20) and None)
    ends.set()

    def fails() -> None:
        raise InputError("no device")

    with pytest.raises(InputError, match="no device"):
        Head(str, lambda *_: None).call(fails)


ROOT = Path(__file__).resolve().parents[2]
SEARCHES = """
import os, sys
from tests.support.windows import shorten
shorten()
from tuner.cli.main import main
from tuner.cluster import head
head.GONE_S = float(os.environ.get("JF_GONE_S", head.GONE_S))
sys.exit(main(["optimize", "tiny-gpt", "--ray", os.environ["JF_ADDRESS"], "--name", "spot",
    "--runs-dir", os.environ["JF_RUNS"], "--no-verify", "--max-probes", "6"]))
"""


@contextlib.contextmanager
def search_with_a_probe(
    own_ray: OwnRay, runs: Path, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """A search on it that has finished its first probe."""
    trace = runs / "spot" / "trace" / "probes.jsonl"
    with own_ray.python(SEARCHES, JF_RUNS=str(runs), PYTHONPATH=str(ROOT), **variables) as search:
        until_s = time.monotonic() + 200
        while not trace.exists() or not trace.stat().st_size:
            assert search.poll() is None, search.communicate()
            assert time.monotonic() < until_s
            time.sleep(0.2)
        yield search
    assert read_trace(trace).records


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("program", "number", "code", "told"),
    [
        ("gcs_server", signal.SIGKILL, 2, "the head of the Ray cluster has not answered for 8 s"),
        pytest.param(
            *(
                "raylet",
                signal.SIGKILL,
                2,
                "Ray's process on this machine (raylet) has ended; every",
            ),
            marks=pytest.mark.long,
        ),
        ("raylet", signal.SIGTERM, 2, "Ray's process on this machine (raylet) has ended; every"),
        pytest.param(
            *("", signal.SIGTERM, 130, "interrupted; every finished probe is in"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_ends_a_search_is_one_sentence_and_it_keeps_what_it_has(
    own_ray: OwnRay, tmp_path: Path, program: str, number: int, code: int, told: str
) -> None:
    """Ray ended the process by lines of its own; "" is the search itself."""
    asked = {"JF_GONE_S": "8"} if program == "gcs_server" else {}
    with search_with_a_probe(own_ray, tmp_path / "runs", **asked) as search:
        (process,) = own_ray.processes(program) if program else (search,)
        process.send_signal(number)
        begin_s = time.monotonic()
        out, err = search.communicate(timeout=150)
    assert search.returncode == code, (out, err)
    assert time.monotonic() - begin_s < 100
    assert err.splitlines()[-1].startswith(f"tuner: {told}"), err
    assert out == ""
    for words in ("Stack trace", "Traceback", "SIGTERM received", "raylet)"):
        assert words not in err.replace("(raylet) has", "")


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_two_searches_at_once_take_turns_on_a_node(own_ray: OwnRay, tmp_path: Path) -> None:
    """Two users of one cluster: nothing of either is measured beside the other's ranks."""
    program = SEARCHES.replace('"6"', '"2", "--space", "micro-batch"')  # which builds nothing
    searches = [
        own_ray.python(program, JF_RUNS=str(tmp_path / name), PYTHONPATH=str(ROOT))
        for name in ("first", "second")
    ]
    try:
        told = [search.communicate(timeout=800) for search in searches]
    finally:
        for search in searches:
            search.kill()
    assert [search.returncode for search in searches] == [0, 0], told
    probes = []
    for name in ("first", "second"):
        records = read_trace(tmp_path / name / "spot" / "trace" / "probes.jsonl").records
        assert len(records) == 2
        assert all(record.ok for record in records)
        began = [datetime.fromisoformat(record.started_at).timestamp() for record in records]
        probes += [(at, at + r.wall_s) for at, r in zip(began, records, strict=True)]
    for (_, ended), (begun, _) in pairwise(sorted(probes)):
        assert ended <= begun + 1  # which is told in whole seconds


# ---- nodes that are late


class LateRay:
    """Ray with nodes of eight GPUs; what their agents are asked is answered as `replies` says.

    With `later`, a moment and its replies, these come at that moment.
    """

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, clock: Clock, *names: str) -> None:
        self.names, self.killed, self.replies = names, list[Any](), dict[str, Any]()
        self.later: tuple[float, dict[str, Any]] = math.inf, {}
        self._clock = clock

    def nodes(self) -> list[dict[str, Any]]:
        one = {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"GPU": 8.0}}
        return [{**one, "NodeID": name, "NodeManagerHostname": name} for name in self.names]

    def wait(self, calls: list[str], num_returns: int, timeout: float) -> Any:
        until_s = self._clock.now_s + timeout
        while True:
            ready = [each for each in calls if each in self._replies()]
            if len(ready) >= num_returns or self._clock.now_s >= until_s:
                return ready, [each for each in calls if each not in ready]
            self._clock.now_s = min(until_s, self._clock.now_s + 0.25)

    def get(self, call: str) -> Any:
        return self._replies()[call]

    def _replies(self) -> dict[str, Any]:
        at_s, replies = self.later
        return replies if self._clock.now_s >= at_s else self.replies

    def kill(self, agent: Any) -> None:
        self.killed.append(agent.name)


def agent_on(name: str) -> Any:
    def asked(*_: Any, **__: Any) -> str:
        return name

    call = SimpleNamespace(remote=asked)
    return SimpleNamespace(name=name, enter=call, prepare=call)


#: A pool whose nodes are used as their agents enter, each as one.
pool = partial(pool_of, make_runner=SimpleNamespace())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time of those who wait for nodes, which the test does not take."""
    made = Clock(0.0)
    monkeypatch.setattr(ray_nodes, "time", made)
    monkeypatch.setattr(ray_nodes, "place_agent", lambda node, *_, **__: agent_on(node))
    return made


def entered(busy: tuple[str, ...] = ()) -> NodeStatus:
    facts = NodeFacts("n1", load_cluster("h200-8"), busy=busy)
    return NodeStatus(facts, busy, METER)


def test_nodes_that_do_not_answer_are_not_said_to_lack_devices(clock: Clock) -> None:
    """A firewall, or a file system that is slow at the first start."""
    said: list[str] = []
    late = pool(LateRay(clock, "n1", "n2"), said=said)
    late.refresh()
    with pytest.raises(InputError, match="2 nodes have the devices, and none answered within 300"):
        admit_first(late, late._announce)
    (sentence,) = said
    assert "ports between the nodes are closed; waiting up to 300 s" in sentence
    assert clock.now_s == 300


def test_a_study_starts_soon_after_the_first_node_and_takes_the_others_later(clock: Clock) -> None:
    ray = LateRay(clock, "n1", "n2")
    late = pool(ray)
    ray.replies["n1"] = entered()
    late.refresh()
    admit_first(late, late._announce)
    assert clock.now_s == 30
    assert late.names == ("n1",)
    assert late.node_ids == {"n1", "n2"}  # a probe of two nodes waits for it
    ray.replies["n2"] = entered()
    late.admit(0.1)
    assert late.names == ("n1", "n2")


def test_a_study_waits_for_nodes_on_which_others_measure(clock: Clock) -> None:
    ray, said = LateRay(clock, "n1"), list[str]()
    ray.replies["n1"] = entered(busy=("GPU 0 is used by process 7",))
    ray.later = 500.0, {"n1": entered()}
    waiting = pool(ray, said=said)
    waiting.refresh()
    admit_first(waiting, waiting._announce)
    assert waiting.names == ("n1",)
    assert said[-1].startswith("waiting up to")
    assert 500 <= clock.now_s < 600
    ray.later = math.inf, {}
    never = pool(ray, said=said)
    never.refresh()
    with pytest.raises(InputError, match="GPU 0 is used by process 7"):
        admit_first(never, never._announce)


def test_a_cluster_without_the_devices_is_told_at_once(clock: Clock) -> None:
    with pytest.raises(InputError, match="no node of the Ray cluster has 8 GPUs"):
        admit_first(pool(LateRay(clock)), print)
    assert clock.now_s == 0


def test_a_node_whose_imports_stall_is_set_aside_and_asked_again(clock: Clock) -> None:
    """The search waited for it without a limit."""
    ray, said = LateRay(clock, "hangs", "n2"), list[str]()
    stalled = pool(ray, said=said)
    ray.replies["hangs"] = ray.replies["n2"] = entered()
    stalled.refresh()
    admit_first(stalled, stalled._announce)
    ray.replies = {"n2": ""}
    stalled.prepare()
    assert stalled.names == ("n2",)
    assert ray.killed == ["hangs"]
    assert said == [
        "node hangs is set aside: its imports take longer than 300 s; a file system that stalls is "
        "the usual cause"
    ]
    clock.sleep(120)
    stalled.refresh()  # with a new agent
    ray.replies["hangs"] = entered()
    stalled.admit(0.1)
    assert stalled.names == ("n2", "hangs")


def test_where_all_imports_are_slow_the_first_is_waited_for(clock: Clock) -> None:
    ray = LateRay(clock, "n1", "n2")
    slow = pool(ray)
    ray.replies["n1"] = ray.replies["n2"] = entered()
    slow.refresh()
    admit_first(slow, slow._announce)
    ray.replies, ray.later = {}, (clock.now_s + 1000, {"n1": ""})
    slow.prepare()
    assert slow.names == ("n1",)
    ray.later = math.inf, {}
    with pytest.raises(InputError, match="imports take longer"):
        slow.prepare()
