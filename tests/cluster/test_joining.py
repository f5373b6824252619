"""A Ray cluster of several nodes on this machine: real probes on one and on two of them.

One process with a cluster of its own does it all, because a cluster takes ten seconds to start; its
answers are checked here one by one. The survey's choices are tested on nodes that are made up.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from tuner.cluster.joining import SurveyedNode, _choose_kind, join_ray
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.workload.node.facts import NodeFacts
from tuner.workload.node.platforms.base import NEEDED

GIB = 2**30


def node(
    number: int, cluster: str, devices: int, *, busy: str = "", clocks: bool = True
) -> SurveyedNode:
    here = replace(load_cluster(cluster), nodes=1, clock_control=clocks, devices_per_node=devices)
    facts = NodeFacts(
        f"n{number}",
        here,
        driver="580.1",
        why_clocks_fixed="" if clocks else "they need root",
        programs={"g++": "/usr/bin/g++"},
        memory_bytes=512 * GIB,
        free_bytes=400 * GIB,
        busy=(busy,) if busy else (),
        packages=dict.fromkeys(NEEDED, "1.0"),
    )
    return SurveyedNode(f"id{number}", f"10.0.0.{number}", facts, devices)


def test_kinds_are_kept_apart_and_the_larger_group_is_used() -> None:
    nodes = (node(1, "h200-8", 8), node(2, "a100-8", 8), node(3, "h200-8", 8))
    seen = _choose_kind(nodes, None)
    assert (seen.cluster.device.name, seen.cluster.nodes) == (nodes[0].facts.kind, 2)
    assert f"left out: {nodes[1].facts.kind}" in seen.sentences()[0]
    other = _choose_kind(nodes, nodes[1].facts.kind)
    assert (other.cluster.device.name, other.cluster.nodes) == (nodes[1].facts.kind, 1)


def test_a_kind_that_is_not_there_lists_those_that_are() -> None:
    with pytest.raises(UnknownName, match="device kind"):
        _choose_kind((node(1, "h200-8", 8),), "H300")


def test_busy_nodes_are_not_counted_and_say_why() -> None:
    nodes = (node(1, "h200-8", 8), node(2, "h200-8", 8, busy="GPU 3 is used by process 99"))
    seen = _choose_kind(nodes, None)
    assert seen.cluster.nodes == 1
    assert seen.sentences()[0].startswith("1 node with 8 x ")
    assert "node n2 is not used: GPU 3 is used by process 99" in seen.sentences()
    assert [entry["refused"] for entry in seen.to_json()["nodes"]] == [
        [],
        ["node n2 is not used: GPU 3 is used by process 99"],
    ]
    assert sum("refused" in line for line in seen.lines()) == 1


def test_one_size_of_node_keeps_the_most_devices_in_use() -> None:
    nodes = (node(1, "h200-8", 8), node(2, "h200-8", 4), node(3, "h200-8", 4), node(4, "h200-8", 4))
    seen = _choose_kind(nodes, None)
    assert (seen.cluster.devices_per_node, seen.cluster.nodes) == (4, 4)


def test_clocks_are_searched_where_most_nodes_permit_them() -> None:
    nodes = (node(1, "h200-8", 8), node(2, "h200-8", 8), node(3, "h200-8", 8, clocks=False))
    seen = _choose_kind(nodes, None)
    assert seen.cluster.clock_control
    assert seen.cluster.nodes == 2


def test_a_cluster_where_nothing_is_fit_has_no_cluster() -> None:
    assert (
        _choose_kind((node(1, "h200-8", 8, busy="GPU 0 is used by process 1"),), None).cluster
        is None
    )
    assert _choose_kind((), None).cluster is None


def test_words_that_contradict_each_other_are_one_sentence() -> None:
    from tests.support.studies import run_optimize as optimize

    with pytest.raises(InputError, match="device_kind chooses among the nodes"):
        optimize(device_kind="A100-SXM-80GB")
    with pytest.raises(InputError, match="by the executor ray, not 'inline'"):
        optimize(executor="inline", ray_address="auto")
    with pytest.raises(InputError, match="is of"):
        optimize(cluster="h200-8", ray_address="auto", device_kind="A100-SXM-80GB")


@pytest.mark.ray
@pytest.mark.parametrize("address", ["127.0.0.1", "ray://head:10001", "head:port", "head:70000"])
def test_an_address_that_is_none_is_one_sentence(address: str) -> None:
    with pytest.raises(InputError, match="is not an address of a Ray cluster; it must be auto"):
        join_ray(address)


@pytest.mark.ray
def test_where_nobody_listens_it_is_said_at_once() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(InputError, match="no Ray cluster answers at"):
            join_ray(f"127.0.0.1:{port}")


@pytest.mark.ray
@pytest.mark.parametrize("command", [["doctor"], ["optimize", "tiny-gpt"]])
def test_the_command_says_it_in_one_sentence(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from tuner.cli.main import main

    assert main([*command, "--ray", "nowhere"]) == 2
    assert capsys.readouterr().err == (
        "tuner: 'nowhere' is not an address of a Ray cluster; it must be auto, or HOST:PORT of its "
        "head node (6379 unless another port was chosen)\n"
    )


# ---- for real

SCRIPT = """
import json, os, sys, threading, time
os.environ["RAY_worker_niceness"] = "0"
import ray
from dataclasses import replace
from ray.cluster_utils import Cluster as RayCluster
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.job import load_job
from tuner.cluster.joining import survey
from tuner.cluster.executor import RayExecutor
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.records.probe import ProbeRequest, WindowPolicy

said = []
answers = {"said": said}
ray_cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1})
second = ray_cluster.add_node(num_cpus=1)
cluster = replace(detect_cluster(), devices_per_node=1, nodes=2)
quick, long = WindowPolicy(min_s=0.5, max_s=1.0), WindowPolicy(min_s=600.0, max_s=600.0)
one, two = Settings(data_parallel=1, micro_batch=4), Settings(data_parallel=2, micro_batch=2)

seen = survey(ray_cluster.address)
answers["survey"] = seen.to_json()
executor = RayExecutor(
    load_job(), cluster, run_dir=sys.argv[1], address=ray_cluster.address, announce=said.append)
executor.prepare()
answers["capacity"] = executor.capacity

def probes(*requests):
    for request in requests:
        executor.submit(request)
    records = [executor.wait(240) for _ in requests]
    return {r.request.probe_id: r.to_json() for r in records}

answers["together"] = probes(
    *(ProbeRequest(name, launch, window=quick) for name, launch in
      (("a", one), ("b", one), ("both", two))))

def die():
    while not os.path.exists(sys.argv[1] + "/probes/dies/from-rank1/rank1.log"):
        time.sleep(0.2)
    ray_cluster.remove_node(second, allow_graceful=False)

threading.Thread(target=die).start()
answers["lost"] = probes(ProbeRequest("dies", two, window=long))["dies"]
answers["after"] = probes(ProbeRequest("after", one, window=quick))["after"]
ray_cluster.add_node(num_cpus=1)
answers["rejoined"] = probes(ProbeRequest("again", two, window=quick))["again"]
executor.close()
ray.shutdown()
ray_cluster.shutdown()
print("ANSWERS " + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("cluster")
    script = folder / "several_nodes.py"
    script.write_text(SCRIPT)
    (folder / "run").mkdir()
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        start_new_session=True,
    )
    try:
        out, errors = process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    line = [text for text in out.splitlines() if text.startswith("ANSWERS ")]
    assert line, out[-2000:] + errors[-4000:]
    return json.loads(line[0].removeprefix("ANSWERS "))


@pytest.mark.real
@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(900)
class TestSeveralNodes:
    def test_the_survey_finds_both(self, answers: Any) -> None:
        assert len(answers["survey"]["nodes"]) == 2
        assert answers["survey"]["cluster"]["nodes"] == 2
        assert answers["survey"]["cluster"]["devices_per_node"] == 1
        assert answers["capacity"] == 2

    def test_probes_run_one_a_node_and_then_one_on_both(self, answers: Any) -> None:
        records = answers["together"]
        assert all(record["failure"] is None for record in records.values()), records
        assert len(records["both"]["environment"]["nodes"]) == 2
        assert records["both"]["waiting_devices"] == 0
        assert 0 < records["both"]["environment"]["relay_s"] < 1.0

    def test_a_node_that_dies_fails_its_probe_as_lost_and_the_next_one_runs(
        self, answers: Any
    ) -> None:
        assert answers["lost"]["failure"]["kind"] == "node", answers["lost"]["failure"]
        assert answers["lost"]["failure"]["message"].startswith("node lost: ")
        assert answers["after"]["failure"] is None

    def test_a_node_that_joins_is_used(self, answers: Any) -> None:
        assert answers["rejoined"]["failure"] is None, answers["rejoined"]["failure"]
        assert len(answers["rejoined"]["environment"]["nodes"]) == 2
