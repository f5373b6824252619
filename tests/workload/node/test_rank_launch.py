"""The environment of ranks on a node with GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job
from tuner.testing.commands import finished
from tuner.testing.twin import TwinGpu, TwinNode
from tuner.workload.meters.gpus import cuda_numbering
from tuner.workload.node.host import usable_cores
from tuner.workload.node.rank_launch import Place, ProbeNode, RankLaunch
from tuner.workload.probe import ProbeRequest

Make = Callable[..., TwinNode]
UUIDS = ("GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333")


def rank_env(env: dict[str, str], place: Place, ranks: int = 2) -> dict[str, str]:
    node = SimpleNamespace(
        server=SimpleNamespace(env=env),
        cluster=load_cluster("h100-32"),
        run_dir=Path("run"),
        job=load_job(),
    )
    request = ProbeRequest("p", Configuration.of(data_parallel=ranks).launch)
    launch = RankLaunch(cast(ProbeNode, node), request)
    return dict(launch._rank_env(place.first, ranks, place))


@pytest.mark.twin
@pytest.mark.parametrize(
    ("visible", "indices"),
    [("GPU-bbbb,GPU-aaaa1", "2,0"), ("1,2", "1,2"), ("GPU-aaaa2222,-1,0", "1")],
)
def test_ranks_get_indices_in_the_order_of_the_bus(
    twin_node: Make, visible: str, indices: str
) -> None:
    twin_node(*[TwinGpu(uuid=uuid) for uuid in UUIDS])
    env = rank_env({"CUDA_VISIBLE_DEVICES": visible}, Place(0, 2, ("127.0.0.1", 1), "lo"))
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == (indices, "PCI_BUS_ID")


@pytest.mark.twin
def test_without_a_list_every_gpu_stays_visible(twin_node: Make) -> None:
    twin_node(TwinGpu(), TwinGpu())
    assert cuda_numbering({}) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.twin
def test_deepspeed_reads_the_list(tmp_path: Path) -> None:
    """ZeRO 1 and 2 call this at every start; a UUID is a ValueError there."""
    node = TwinNode(
        tmp_path / "twin-node",
        [TwinGpu(uuid=uuid, used_bytes=i * 2**30) for i, uuid in enumerate(UUIDS)],
        virtual_time=False,
    )
    code = (
        "from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator\n"
        "print('free', CUDA_Accelerator().available_memory(0))\n"
    )

    def run(more: dict[str, str]) -> subprocess.CompletedProcess[str]:
        env = os.environ | node.environment() | {"CUDA_VISIBLE_DEVICES": "GPU-bbbb"} | more
        command = [sys.executable, "-c", code]
        return finished(command, env=env)

    with node.joined():
        more = cuda_numbering({"CUDA_VISIBLE_DEVICES": "GPU-bbbb"})
    free = 80 * 2**30 - 2 * 2**30 - TwinGpu().reserved_bytes
    assert f"free {free}" in run(more).stdout
    assert "ValueError" in run({}).stderr  # what it does with the list as it was
    node.close()


def test_threads_are_those_of_the_cores_that_were_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(0, 2, ("127.0.0.1", 1), "lo")
    monkeypatch.setattr(os, "cpu_count", lambda: 224)
    assert rank_env({}, place)["OMP_NUM_THREADS"] == str(max(1, usable_cores() // 2))


@pytest.mark.parametrize(
    ("interface", "env", "expected"),
    [
        ("ib0", {}, "ib0"),
        ("ib0", {"NCCL_SOCKET_IFNAME": "eth"}, "eth"),
        ("lo", {}, None),
        ("", {}, None),
    ],
)
def test_nccl_meets_on_the_interface_of_the_route(
    interface: str, env: dict[str, str], expected: Any
) -> None:
    place = Place(0, 2, ("10.0.0.1", 1), interface)
    assert rank_env(env, place).get("NCCL_SOCKET_IFNAME") == expected
