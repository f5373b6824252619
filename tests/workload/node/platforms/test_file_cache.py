"""Files that Linux caches in the memory of a superchip's GPU: nobody's, and given up on demand."""

from __future__ import annotations

from collections.abc import Callable

import pynvml
import pytest

from tests.twin import TwinGpu, TwinNode
from tuner.workload.node.facts import inspect_node
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.platforms.nvidia import Nvidia

pytestmark = pytest.mark.needs("cc")
Make = Callable[..., TwinNode]
NO_ENV: dict[str, str] = {}
GIB = 2**30
GH200 = TwinGpu(
    name="NVIDIA GH200 480GB", memory_bytes=96 * GIB, compute=(9, 0), c2c=True, numa_node=1
)


@pytest.mark.parametrize("cached_GiB", [8, 60, 95])
def test_cached_files_are_no_neighbour(twin_node: Make, cached_GiB: int) -> None:
    twin_node(GH200).cache_files(0, cached_GiB * GIB)
    assert Nvidia(NO_ENV).busy() == ()


def test_the_kernel_module_tells_the_node_where_nvml_does_not(twin_node: Make) -> None:
    node = twin_node(GH200)
    node.cache_files(0, 8 * GIB)
    node.fail("nvmlDeviceGetNumaNodeId", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    assert Nvidia(NO_ENV).busy() == ()


def test_what_somebody_holds_beside_them_is_seen(twin_node: Make) -> None:
    node = twin_node(GH200)
    node.set(0, used_bytes=10 * GIB)
    node.cache_files(0, 8 * GIB)
    (phrase,) = Nvidia(NO_ENV).busy()
    assert phrase.startswith("10.0 GiB of GPU 0's memory are held by a process")
    node.processes(0, compute=[(4242, 10 * GIB)])
    assert Nvidia(NO_ENV).busy() == ("GPU 0 is used by process 4242",)


def test_shared_memory_is_no_cache(twin_node: Make) -> None:
    twin_node(GH200).cache_files(0, 8 * GIB, shared_bytes=7 * GIB)
    (phrase,) = Nvidia(NO_ENV).busy()
    assert phrase.startswith("7.0 GiB of GPU 0's memory")


def test_the_cache_of_another_gpus_node_explains_nothing(twin_node: Make) -> None:
    node = twin_node(GH200, TwinGpu(**{**vars(GH200), "numa_node": 2}))
    node.cache_files(0, 8 * GIB)
    node.set(1, used_bytes=8 * GIB)
    (phrase,) = Nvidia(NO_ENV).busy()
    assert "8.0 GiB of GPU 1's memory" in phrase


def test_the_memory_of_a_discrete_gpu_holds_no_cache(twin_node: Make) -> None:
    twin_node(TwinGpu(used_bytes=8 * GIB))
    (phrase,) = Nvidia(NO_ENV).busy()
    assert "8.0 GiB of GPU 0's memory are held" in phrase


def test_own_processes_that_only_looked_stay_idle_beside_the_cache(twin_node: Make) -> None:
    import os

    node = twin_node(GH200)
    node.cache_files(0, 8 * GIB)
    node.processes(0, compute=[(os.getpid(), GIB // 4)])
    assert Nvidia(NO_ENV).busy() == ()


def test_a_job_may_take_the_memory_and_doctor_says_what_is_in_it(twin_node: Make) -> None:
    node = twin_node(GH200)
    without = detect_cluster(environ=NO_ENV).device.memory_bytes
    node.cache_files(0, 8 * GIB)
    cluster = detect_cluster(environ=NO_ENV)
    assert cluster.device.memory_bytes == without == 96 * GIB
    facts = inspect_node(environ=NO_ENV)
    assert any("8.0 GiB of GPU 0's memory hold cached files" in note for note in facts.notes)
    assert not [line for line in facts.refusals() if "free devices" in line]


def test_ended_ranks_are_not_waited_for_because_of_files_that_they_read(twin_node: Make) -> None:
    node = twin_node(GH200)
    node.cache_files(0, 20 * GIB)
    assert Nvidia(NO_ENV).wait_for_release(clock=node.clock, sleep=node.sleep) == 0.0
