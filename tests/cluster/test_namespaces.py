"""Probes across two network namespaces: two nodes that reach each other by address only.

Two nodes on one machine share its loopback, which would hide a rendezvous at 127.0.0.1, or ranks
that talk over the wrong interface. Here each has a network of its own, joined by a virtual cable.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.needs import require
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
HEAD, OTHER = "10.213.77.1", "10.213.77.2"

pytestmark = [pytest.mark.real, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

BUILT_IN = f"""
import json, sys
from dataclasses import replace
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.job import load_job
from tuner.cluster.executor import RayExecutor
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.records.probe import ProbeRequest, WindowPolicy

cluster = replace(detect_cluster(), devices_per_node=1, nodes=2)
executor = RayExecutor(load_job(), cluster, run_dir=sys.argv[1], address="{HEAD}:6399")
while len({{slot.node for slot in executor.pool.slots}}) < 2:
    executor.pool.refresh()
    executor.pool.admit(1.0)
executor.prepare()
launch = Settings(data_parallel=2, micro_batch=2)
executor.submit(ProbeRequest("both", launch, window=WindowPolicy(min_s=0.5, max_s=1.0)))
record = executor.wait(300)
addresses = sorted({{slot.address for slot in executor.pool.slots}})
executor.close()
print("ANSWER " + json.dumps({{"record": record.to_json(), "addresses": addresses}}))
"""

#: In the second probe the other node dies, with all that runs on it.
USERS = f"""
import json, os, signal, subprocess, sys, threading, time
from dataclasses import replace
from pathlib import Path
import ray, tuner
from tuner.deploy.launch_files import write_launch_files
from tuner.cluster import executor as ray_executor
from tuner.problem.settings import SearchSettings
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.records.probe import WindowPolicy
from tuner.workload.records.trace import read_trace

run = Path(sys.argv[1]) / "runs" / "two"

def kill_the_other_node():
    while not list(run.glob("probes/p0001/**/rank*.log")):
        time.sleep(0.1)
    time.sleep(1.0)
    named = subprocess.run(["ip", "netns", "pids", os.environ["JF_SECOND"]], capture_output=True)
    for pid in named.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    ray_executor.NO_NODE_S = 5.0  # what needs two nodes is given up sooner

ray.init(address="{HEAD}:6399")
while sum(node["Alive"] for node in ray.nodes()) < 2:
    time.sleep(0.2)
ray.shutdown()
threading.Thread(target=kill_the_other_node, daemon=True).start()
cluster = replace(detect_cluster(), devices_per_node=1, nodes=2)
script = tuner.Script(
    "torchrun --nnodes 2 --nproc_per_node 1 --node_rank 0 --master_addr {HEAD} "
    "plain_deepspeed.py --epochs 10000000 --deepspeed --deepspeed_config ds.json",
    cwd=Path(sys.argv[1]),
    steps=10**8,
)
result = tuner.optimize(
    script,
    cluster=cluster,
    search=SearchSettings(max_probes=2, verify=False, window=WindowPolicy(min_s=2.0, max_s=3.0)),
    try_first=["dp2 mb8 zero0"],
    ray_address="{HEAD}:6399",
    name="two",
    runs_dir=Path(sys.argv[1]) / "runs",
    report=False,
)
records = read_trace(run / "trace" / "probes.jsonl").records
nodes = [record.environment.get("nodes") for record in records]
failures = [
    record.failure and [record.failure.kind, record.failure.message] for record in records
]
best = Path(sys.argv[1]) / "best"
write_launch_files(result, best, point=result.baseline.configuration)
lines = (best / "launch.sh").read_text().splitlines()
(command,) = [line for line in lines if line[:8] == "torchrun"]
print("ANSWER " + json.dumps({{
    "command": command,
    "devices": result.job.devices, "batch": result.job.global_batch, "nodes": nodes,
    "failures": failures, "stop": str(result.stop), "baseline": result.baseline.configuration.short,
    "in_play": [name for name, offer in result.job.offers.items() if offer.turned],
}}))
"""


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    """Two namespaces with a cable between them."""
    require("namespaces")
    first, second = (f"jf-{os.getpid()}-{side}" for side in "ab")
    cable = [f"jf{os.getpid() % 100000}{side}" for side in "ab"]
    try:
        try:
            run("ip", "netns", "add", first)
            run("ip", "netns", "add", second)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces may not be made here: {error.stderr.decode()!r}")
        run("ip", "link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for name, end, address in ((first, cable[0], HEAD), (second, cable[1], OTHER)):
            run("ip", "link", "set", end, "netns", name)
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", end, "up")
        yield first, second
    finally:
        for name in (first, second):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture(scope="module")
def drive(namespaces: tuple[str, str]) -> Iterator[Callable[[str, Path], Any]]:
    """Run a program beside the first of two Ray nodes, with a folder; return its answer."""
    ray = str(Path(sys.executable).parent / "ray")
    environment = {
        "JF_SECOND": namespaces[1],
        # A proxy of this machine cannot be reached from inside, and gRPC would ask it.
        **{name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
        "PYTHONPATH": str(ROOT),
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # nobody else is on this cable
    }
    started: list[subprocess.Popen[bytes]] = []

    def inside(name: str, *words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            ["ip", "netns", "exec", name, *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        started.append(process)
        return process

    def drive(program: str, folder: Path) -> Any:
        file = folder / "across.py"
        file.write_text(program)
        driver = inside(namespaces[0], sys.executable, str(file), str(folder))
        told = driver.communicate(timeout=600)[0].decode()
        lines = [line for line in told.splitlines() if line.startswith("ANSWER ")]
        assert lines, told[-4000:]
        return json.loads(lines[0].removeprefix("ANSWER "))

    # Short, for sockets lie below it; and not where another Ray of this machine keeps its own.
    with tempfile.TemporaryDirectory(prefix="jf", ignore_cleanup_errors=True) as folder:
        start = (ray, "start", "--block", "--num-cpus=1", "--object-store-memory=80000000")
        try:
            head = ("--head", "--port=6399", "--include-dashboard=false", f"--temp-dir={folder}")
            inside(namespaces[0], *start, *head, f"--node-ip-address={HEAD}")
            up = [ray, "health-check", "--address", f"{HEAD}:6399"]
            asked = ["ip", "netns", "exec", namespaces[0], *up]
            for _ in range(20):
                said = subprocess.run(asked, capture_output=True, check=False, env=environment)
                if said.returncode == 0:
                    break
            joining = (*start, f"--address={HEAD}:6399", f"--node-ip-address={OTHER}")
            inside(namespaces[1], *joining)
            yield drive
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()


@pytest.mark.long
def test_ranks_meet_over_the_nodes_own_addresses(
    drive: Callable[[str, Path], Any], tmp_path: Path
) -> None:
    answer = drive(BUILT_IN, tmp_path)
    assert answer["addresses"] == [HEAD, OTHER]
    assert answer["record"]["failure"] is None, answer["record"]["failure"]
    assert len(answer["record"]["environment"]["nodes"]) == 2


def test_a_users_script_is_probed_across_nodes_until_one_dies(
    drive: Callable[[str, Path], Any], tmp_path: Path, namespaces: tuple[str, str]
) -> None:
    # The last test of this file: the second node is gone after it.
    shutil.copy(ROOT / "tests/scripts/plain_deepspeed.py", tmp_path)
    config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    answer = drive(USERS, tmp_path)
    assert (answer["devices"], answer["batch"]) == (2, 16)
    assert answer["baseline"].startswith("dp2 mb4")
    assert {"zero_stage", "micro_batch"} <= set(answer["in_play"])
    assert answer["failures"][0] is None
    kind, message = answer["failures"][1]
    assert kind == "node"
    assert "node" in message
    assert answer["stop"]
    command = f"torchrun --nnodes 2 --nproc_per_node 1 --node_rank 0 --master_addr {HEAD} "
    assert answer["command"].startswith(command)
    assert len(answer["nodes"][0]) == 2  # today's configuration, on both
    wait_until(lambda: not ranks_in(namespaces[0]))


def ranks_in(namespace: str) -> list[str]:
    """Return the command lines of ranks, and of what forks them, in a namespace."""
    named = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True
    )
    found = []
    for pid in named.stdout.split():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if "plain_deepspeed" in words or "fork_server" in words:
                found.append(words)
    return found
