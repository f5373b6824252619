"""What looks like a fault of a GPU node and is none: it is neither refused nor blamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from benchmarks.twin.front import small_job
from tests.twin import TwinGpu, TwinNode
from tuner.cluster.joining import NodeAgent
from tuner.problem.from_job import identity_of
from tuner.problem.job_request import cluster_of
from tuner.search_spaces.errors import InputError
from tuner.study.session import _check_same_study
from tuner.workload.node.facts import inspect_node
from tuner.workload.node.measure.window import DeviceWatch
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.platforms.nvidia import Nvidia
from tuner.workload.records.probe import Failure

pytestmark = pytest.mark.needs("cc")
Make = Callable[..., TwinNode]
GIB = 2**30


class TestCoresOfAGpuNode:
    @pytest.fixture(autouse=True)
    def _environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        monkeypatch.setattr("tuner.cluster.joining.strip_token", lambda: None)

    def test_a_study_of_cores_does_not_ask_who_uses_the_gpus(
        self, twin_node: Make, tmp_path: Path
    ) -> None:
        node = twin_node(TwinGpu(), virtual_time=False)
        node.processes(0, compute=[(77, 9 * GIB)])
        agent = NodeAgent(str(tmp_path))
        entered = agent.enter(small_job(), cluster_of("cpu-2"), None)
        assert entered.refused == ()
        assert agent.busy() == ()
        agent.close()

    def test_a_study_of_cores_needs_no_nvml(self, twin_node: Make, tmp_path: Path) -> None:
        node = twin_node(TwinGpu(), virtual_time=False)
        node.fail("nvmlInit", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
        agent = NodeAgent(str(tmp_path))
        assert agent.enter(small_job(), cluster_of("cpu-2"), None).refused == ()
        agent.close()

    @pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
    def test_doctor_misses_no_gpu_that_is_not_wanted(self, twin_node: Make, hidden: str) -> None:
        twin_node(TwinGpu()).fail("nvmlInit", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
        facts = inspect_node(environ={"CUDA_VISIBLE_DEVICES": hidden})
        assert not [thing for thing in facts.missing if "usable GPUs" in str(thing)]


@pytest.mark.parametrize(
    "call",
    ["nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetRetiredPages"],
)
def test_errors_of_last_week_that_were_not_told_before_are_not_new(
    twin_node: Make, call: str
) -> None:
    node = twin_node(TwinGpu(compute=(7, 0) if "Retired" in call else (8, 0)))
    node.ecc_error(uncorrected=3)
    node.fail(call, pynvml.NVML_ERROR_TIMEOUT, times=1)
    watch = DeviceWatch(Nvidia())
    assert watch.cause(Failure("crash", "x")).kind == "crash"


def test_a_study_continues_after_a_reboot_and_with_another_browser(twin_node: Make) -> None:
    """Display and kernel take other shares of the memory; a power profile is another device."""
    job, run = small_job(), SimpleNamespace(name="mine")

    def problem(host_bytes: int = 0) -> Any:
        cluster = detect_cluster()
        cluster = replace(cluster, host_memory_bytes=cluster.host_memory_bytes + host_bytes)
        return SimpleNamespace(identity=identity_of(job, cluster, {}))

    node = twin_node(TwinGpu(power_profiles=0))
    node.processes(0, graphics=[(1, GIB // 2)])
    before = problem()
    node.processes(0, graphics=[(1, GIB // 2), (2, GIB // 4)])
    _check_same_study(run, problem(-(2**26)), before.identity)
    node.set(power_profiles=1 << pynvml.NVML_POWER_PROFILE_MAX_Q)
    with pytest.raises(InputError, match=r"device.name was A100-SXM-80GB and is .*MAX_Q"):
        _check_same_study(run, problem(), before.identity)
    node.set(power_profiles=0, memory_bytes=40 * GIB)
    with pytest.raises(InputError, match="another question"):
        _check_same_study(run, problem(), before.identity)


@pytest.mark.parametrize(("held", "busy"), [(GIB // 2, False), (30 * GIB, True)])
def test_a_notebook_that_has_looked_at_its_gpu_can_tune(
    twin_node: Make, held: int, busy: bool
) -> None:
    """The context of the process that tunes is idle; a model that it still holds is in the way."""
    node = twin_node()
    node.processes(0, compute=[(os.getpid(), held)])
    assert bool(Nvidia().busy()) == busy
    watch = DeviceWatch(Nvidia())
    node.processes(0, compute=[(os.getpid(), held), (41, 40 * GIB)])
    assert watch.others({41}) == ""
    node.processes(0, compute=[(os.getpid(), held), (77, held)])
    assert Nvidia().busy()
