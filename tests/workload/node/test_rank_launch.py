"""The environment of ranks on a node with GPUs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.commands import finished
from tests.twin import TwinGpu, TwinNode
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.workload.node.host import usable_cores
from tuner.workload.node.meters.gpus import cuda_numbering
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.rank_launch import Place, ProbeNode, RankLaunch
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import ProbeRequest
from tuner.workload.scripts.script_facts import Launcher

Make = Callable[..., TwinNode]
UUIDS = ("GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333")


def rank_env(
    env: dict[str, str],
    place: Place,
    ranks: int = 2,
    rank: int | None = None,
    launcher: str = "",
    own: int = 0,
) -> dict[str, str]:
    node = SimpleNamespace(
        server=SimpleNamespace(env=env),
        cluster=load_cluster("h100-32"),
        run_dir=Path("run"),
        job=load_job(),
        program=None,
    )
    launched = SimpleNamespace(launcher=Launcher(launcher)) if launcher else None
    request = ProbeRequest("p", Configuration.of(data_parallel=ranks).launch)
    launch = RankLaunch(cast(ProbeNode, node), request, job=cast(Any, launched))
    return dict(launch._rank_env(place.first if rank is None else rank, ranks, place, own))


@pytest.mark.needs("cc")
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


@pytest.mark.needs("cc")
def test_without_a_list_every_gpu_stays_visible(twin_node: Make) -> None:
    twin_node(TwinGpu(), TwinGpu())
    assert cuda_numbering({}) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_threads_are_those_of_the_cores_that_were_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(0, 2, ("127.0.0.1", 1), "lo")
    monkeypatch.setattr(os, "cpu_count", lambda: 224)
    assert rank_env({}, place)["OMP_NUM_THREADS"] == str(max(1, usable_cores() // 2))


def test_a_bound_rank_has_no_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch divides the cores among all GPUs: 2 ranks on a node of 8 have an eighth each."""
    monkeypatch.setattr("tuner.workload.node.platforms.nvidia.usable_cores", lambda: 64)
    place = Place(0, 2, ("127.0.0.1", 1), "lo")
    assert rank_env({}, place, own=8)["OMP_NUM_THREADS"] == "8"
    assert rank_env({}, place, own=48)["OMP_NUM_THREADS"] == "32"


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


#: What the step that starts Ray on a node (`srun --ntasks=1 ... ray start`) tells its only task,
#: and what mpirun and a job operator would.
TASK = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_NPROCS": "1",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1",
    "SLURM_STEP_ID": "3",
    "SLURM_STEPID": "3",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_GTIDS": "0",
    "SLURM_TASK_PID": "71",
    "PMI_RANK": "0",
    "PMI_SIZE": "1",
    "PMIX_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
#: What describes the job and the user's wishes stays.
OF_JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "OMPI_MCA_btl": "tcp",
    "PMIX_MCA_gds": "hash",
}
THIRD_OF_EIGHT = {"place": Place(0, 4, ("10.0.0.1", 1)), "ranks": 8, "rank": 3}


def test_a_rank_does_not_take_over_another_launchers_task() -> None:
    env = rank_env(TASK | OF_JOB | {"NODE_RANK": "5"}, **THIRD_OF_EIGHT)
    assert not set(TASK) & set(env)
    assert set(OF_JOB.items()) <= set(env.items())
    assert (env["RANK"], env["NODE_RANK"], env["GROUP_RANK"], env["WORLD_SIZE"]) == (
        "3",
        "0",
        "0",
        "8",
    )


def test_what_srun_says_of_its_nodes_stays_under_srun() -> None:
    """Its numbers of a rank are set anew by the launcher's environment."""
    env = rank_env(TASK, **THIRD_OF_EIGHT, launcher="srun")
    assert env["SLURM_NTASKS_PER_NODE"] == "1"
    assert "PMI_SIZE" not in env
    assert "TORCHELASTIC_RUN_ID" not in env


@pytest.mark.slow
@pytest.mark.real
def test_lightning_finds_its_rank_inside_a_slurm_job() -> None:
    """Lightning's own choice of an environment, in that of a rank."""
    pytest.importorskip("lightning.pytorch")
    code = (
        "import lightning.pytorch as lightning\n"
        "trainer = lightning.Trainer(accelerator='cpu', devices=4, num_nodes=2, logger=False)\n"
        "found = trainer.strategy.cluster_environment\n"
        "print('found', found.world_size(), found.global_rank(), found.local_rank())\n"
    )
    env = rank_env({**os.environ, **TASK, "SLURM_JOB_NAME": "tune"}, **THIRD_OF_EIGHT)
    done = finished([sys.executable, "-c", code], env=env, timeout=300)
    assert "found 8 3 3" in done.stdout, done.stderr


@pytest.mark.extra("tuner.workload.program.built_in_job")
@pytest.mark.needs("cc")
def test_ranks_need_cores_and_gpus_without_ranks_do_not(
    twin_node: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torchrun --nproc-per-node 2` on a node of 8 GPUs of which a batch system gave 4 cores."""
    twin_node(*[TwinGpu()] * 8)
    said: list[str] = []
    runner = LocalRunner(load_job(), detect_cluster(), run_dir=tmp_path, announce=said.append)
    monkeypatch.setattr(runner.node.server, "start", lambda: None)
    monkeypatch.setattr("tuner.workload.node.rank_launch.granted_cores", lambda: 4.0)
    monkeypatch.setattr("tuner.workload.node.platforms.nvidia.granted_cores", lambda: 4.0)
    runner.prepare()
    assert any("4 cores are granted for 8 GPUs" in sentence for sentence in said)
    for ranks, refused in ((2, False), (8, True)):
        request = ProbeRequest(f"p{ranks}", Configuration.of(data_parallel=ranks).launch)
        place = Place(0, ranks, ("127.0.0.1", 1), "lo")
        with (
            pytest.raises(InputError, match="4 cores are granted for 8 GPUs")
            if refused
            else (contextlib.nullcontext())
        ):
            assert len(RankLaunch(runner.node, request).specs("here", place)) == ranks
    runner.close()
