"""Binding of ranks to cores, of real processes on a twin GPU node."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.twin import TwinGpu, TwinNode
from tests.waiting import wait_until
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.platforms.nvidia import Nvidia
from tuner.workload.node.rank_group import ServerError
from tuner.workload.node.rank_launch import Place, RankLaunch, bound_ranks
from tuner.workload.node.rank_server import RankServer, control_socket
from tuner.workload.node.runner import LocalRunner
from tuner.workload.program.built_in_job import OFFLOAD_RULE
from tuner.workload.records.probe import ProbeRequest
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.inspection import blank_job
from tuner.workload.scripts.job import launchable
from tuner.workload.scripts.script_facts import Launcher

SHOW = """
import os
policies = {line.split()[1] for line in open("/proc/self/numa_maps")}
cores, threads = sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"]
print("cores", cores, "threads", threads, flush=True)
print("memory", sorted(policies), flush=True)
print("shown", flush=True)
"""
CORES = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
needs_numactl = pytest.mark.needs("numactl")


@pytest.fixture
def cluster(twin_node: Callable[..., TwinNode]) -> Cluster:
    """A twin node of two GPUs whose memory node is this machine's first."""
    gpu = TwinGpu(cpus=tuple(CORES), memory_node=0)
    twin_node(gpu, gpu, virtual_time=False, children=True)
    return detect_cluster()


@pytest.fixture
def start(
    cluster: Cluster, tmp_path: Path, one_fork_server: None
) -> Iterator[Callable[..., tuple[list[str], dict[str, Any]]]]:
    """Start the ranks of a command; return what each printed, and what the record keeps."""
    runners = []

    def started(command: str, ranks: int = 2, on: Cluster = cluster) -> Any:
        (tmp_path / "show.py").write_text(SHOW)
        job = blank_job(Script(command, cwd=tmp_path), on)
        runner = LocalRunner(job, on, run_dir=tmp_path / f"run{len(runners)}")
        runners.append(runner)
        request = ProbeRequest("p", Configuration.of(data_parallel=ranks).launch)
        launch = RankLaunch(runner.node, request)
        runner.prepare()
        listener, address, remove = control_socket()
        try:
            specs = launch.specs(address, Place(0, ranks, ("127.0.0.1", 1), "lo"))
            group = runner.node.server.spawn(specs, listener)
            logs = [Path(spec.log) for spec in specs]
            wait_until(lambda: all(_shown(log) for log in logs))
            group.kill()
        finally:
            remove()
        return [log.read_text() for log in logs], launch.environment["binding"]

    yield started
    for runner in runners:
        runner.close()


def _shown(log: Path) -> bool:
    return log.exists() and "shown" in log.read_text()


@pytest.mark.needs("cc")
@pytest.mark.real
@two_cores
@needs_numactl
@pytest.mark.slow
def test_ranks_have_the_cores_that_the_command_asks_for(start: Callable[..., Any]) -> None:
    """Without the option, ranks on GPUs share all cores."""
    for command in (
        "torchrun --nproc-per-node 2 --numa-binding exclusive show.py",
        "deepspeed --num_gpus 2 --bind_cores_to_rank show.py",
    ):
        logs, kept = start(command)
        for rank, log in enumerate(logs):
            assert f"cores [{CORES[rank]}] threads 1" in log, log
        assert kept["cpus"] == [str(core) for core in CORES[:2]]
    assert all("'bind:0'" in log for log in logs), logs


@pytest.mark.slow
@pytest.mark.needs("cc")
@pytest.mark.real
@two_cores
def test_a_list_of_cores_is_divided_and_a_wrong_one_refused(start: Callable[..., Any]) -> None:
    last = CORES[-1]
    logs, kept = start(f"deepspeed --bind_cores_to_rank --bind_core_list {last} show.py", ranks=1)
    assert f"cores [{last}] " in logs[0]
    assert kept["rule"] == f"cores:{last}"
    with pytest.raises(InputError, match="--bind_cores_to_rank cannot be applied on this node"):
        start(f"deepspeed --bind_cores_to_rank --bind_core_list {last} show.py", ranks=2)


@pytest.mark.slow
@pytest.mark.needs("cc")
@pytest.mark.real
def test_torchruns_binding_needs_gpus(start: Callable[..., Any]) -> None:
    cores = replace(load_cluster("cpu-2"), devices_per_node=2)
    command = "torchrun --nproc-per-node 2 --numa-binding node show.py"
    with pytest.raises(InputError, match="--numa-binding node cannot be applied"):
        start(command, on=cores)


def test_the_built_in_program_is_bound_under_offload_on_gpus() -> None:
    job, gpus = load_job(), load_cluster("h100-32")
    plain = Configuration.of(data_parallel=2)
    offload = Configuration.of(data_parallel=2, zero_stage=2, optimizer_offload="cpu")
    assert launchable(job, gpus).binding(plain) == ""
    assert launchable(job, gpus).binding(offload) == OFFLOAD_RULE
    assert launchable(job, load_cluster("cpu-2")).binding(offload) == ""


@pytest.mark.needs("cc")
def test_offload_is_measured_unbound_where_no_binding_is_possible(
    twin_node: Callable[..., TwinNode],
) -> None:
    """The rule is given the memory node of each GPU; one that refuses costs no probe."""
    twin_node(TwinGpu(memory_node=3), TwinGpu(memory_node=1), TwinGpu())
    given = []

    def bind(rule: str, ranks: int, gpu_nodes: list[int]) -> None:
        given.append((rule, ranks, gpu_nodes))
        raise ServerError("RuntimeError: numactl CLI is required for NUMA binding\nmore")

    server = cast(RankServer, SimpleNamespace(bind=bind))
    found = bound_ranks(OFFLOAD_RULE, server, 2, platform=Nvidia(), by_command=False)
    assert found == ([], "RuntimeError: numactl CLI is required for NUMA binding")
    assert given == [(OFFLOAD_RULE, 2, [3, 1, 0])]
    with pytest.raises(InputError, match="--numa-binding exclusive cannot be applied"):
        bound_ranks(OFFLOAD_RULE, server, 2, platform=Nvidia(), by_command=True)
    given_away = cast(RankServer, SimpleNamespace(bind=lambda *_: [{"cpus": [4000, 4001]}]))
    with pytest.raises(InputError, match="cores 4000-4001 are not among"):
        bound_ranks("cores:4000-4001", given_away, 1, platform=Nvidia(), by_command=True)


def test_a_binding_is_kept_with_the_job() -> None:
    launcher = Launcher("torchrun", ("torchrun",), ("t.py",), 2, binding="numa:node")
    assert Launcher.from_json(launcher.to_json()) == launcher
    assert "binding" not in replace(launcher, binding="").to_json()
