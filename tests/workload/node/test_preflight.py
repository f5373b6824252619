"""What a node is found to be before a study uses it, on a twin GPU node and files of our own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tuner.search_spaces.cluster import load_cluster
from tuner.testing.twin import TwinGpu, TwinNode
from tuner.workload.node.preflight import NodeFacts, busy_gpus, look

pytestmark = pytest.mark.twin
Make = Callable[..., TwinNode]
NO_ENV: dict[str, str] = {}
GIB = 2**30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "self" / "cgroup").write_text("0::/\n")
    (folder / "meminfo").write_text(f"MemTotal: {512 * 2**20} kB\nMemAvailable: {400 * 2**20} kB\n")
    return folder


def seen(proc: Path, **more: Any) -> NodeFacts:
    cgroup = proc.parent / "cgroup"
    cgroup.mkdir(exist_ok=True)
    return look(proc=proc, cgroup=cgroup, environ=NO_ENV, **more)


def test_a_node_of_gpus_tells_what_a_study_needs(proc: Path, twin_node: Make) -> None:
    twin_node(TwinGpu(), TwinGpu())
    facts = seen(proc)
    assert facts.kind == "A100-SXM-80GB"
    assert facts.cluster is not None
    assert facts.cluster.devices_per_node == 2
    assert facts.driver
    assert facts.clock_note == ""
    assert len(facts.gpus) == 2
    assert facts.refusals(facts.cluster) == ()
    assert facts.to_json()["clocks_may_be_set"] is True


def test_a_gpu_with_a_process_on_it_is_not_measured(proc: Path, twin_node: Make) -> None:
    node = twin_node(TwinGpu(), TwinGpu())
    node.processes(0, compute=[(4242, GIB), (17, GIB)])
    facts = seen(proc)
    (sentence,) = facts.refusals()
    assert "GPU 0 is used by processes 17, 4242" in sentence
    assert busy_gpus(environ=NO_ENV, own=(17, 4242)) == ()
    assert busy_gpus(environ={"CUDA_VISIBLE_DEVICES": "1"}) == ()  # visible GPUs only


def test_memory_held_by_nobody_that_can_be_seen_makes_a_gpu_busy(twin_node: Make) -> None:
    node = twin_node(TwinGpu(memory_bytes=8 * GIB, reserved_bytes=450 * 2**20))
    assert busy_gpus(environ=NO_ENV) == ()  # the driver's reserve is nobody's
    node.set(used_bytes=3 * GIB)
    (phrase,) = busy_gpus(environ=NO_ENV)
    assert "3.0 GiB of GPU 0's memory" in phrase


def test_a_desktop_is_no_reason_against_its_card(proc: Path, twin_node: Make) -> None:
    node = twin_node(TwinGpu(memory_bytes=24 * GIB))
    node.processes(0, graphics=[(900, 2 * GIB), (901, GIB)])
    assert busy_gpus(environ=NO_ENV) == ()
    facts = seen(proc)
    assert facts.refusals() == ()
    # What the display holds is no memory for the job.
    assert facts.cluster is not None
    assert facts.cluster.device.memory_bytes == 21 * GIB
    node.processes(0, graphics=[(900, GIB)], compute=[(77, GIB)])
    (phrase,) = busy_gpus(environ=NO_ENV)
    assert "used by process 77" in phrase


def test_an_idle_mps_server_is_no_reason_either(twin_node: Make) -> None:
    node = twin_node()
    with subprocess.Popen(["sleep", "30"]) as other:
        try:
            node.processes(0, compute=[(other.pid, 2**25)])
            assert "used by process" in busy_gpus(environ=NO_ENV)[0]
        finally:
            other.kill()
    server = subprocess.Popen(
        [sys.executable, "-c", "open('/proc/self/comm', 'w').write('nvidia-cuda-mps-server')\n"
         "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert server.stdout is not None
    server.stdout.readline()
    node.processes(0, compute=[(server.pid, 2**25)])
    try:
        assert busy_gpus(environ=NO_ENV) == ()
    finally:
        server.communicate(b"\n")


def test_clocks_that_may_not_be_set_refuse_the_node_only_where_they_are_searched(
    proc: Path, twin_node: Make
) -> None:
    twin_node(root=False)
    facts = seen(proc)
    assert facts.cluster is not None
    assert facts.clock_note
    assert facts.refusals(facts.cluster) == ()
    searched = replace(facts.cluster, clock_control=True)
    (sentence,) = facts.refusals(searched)
    assert "clocks may not be set" in sentence


def test_too_little_free_memory_refuses_the_node(proc: Path, twin_node: Make) -> None:
    twin_node(TwinGpu(), TwinGpu())
    (proc / "meminfo").write_text(f"MemTotal: {64 * 2**20} kB\nMemAvailable: {2**19} kB\n")
    facts = seen(proc)
    (sentence,) = facts.refusals(load_cluster("h200-8"))
    assert "0.5 GiB of its memory are free" in sentence
    assert "2.0 GiB" in sentence


def test_a_driver_that_does_not_answer_is_trouble_and_no_traceback(
    proc: Path, twin_node: Make
) -> None:
    node = twin_node(TwinGpu(), TwinGpu(name="NVIDIA H100 80GB HBM3"))
    (sentence,) = seen(proc).refusals()
    assert "different GPUs" in sentence
    node.fail("nvmlDeviceGetCount", pynvml.NVML_ERROR_GPU_IS_LOST)
    (sentence,) = seen(proc).refusals()
    assert "is not used" in sentence


def test_a_node_without_gpus_or_compiler_is_one_of_cores(proc: Path, twin_node: Make) -> None:
    twin_node().fail("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    facts = seen(proc, which=lambda name: None)
    assert facts.kind == "cpu-core"
    assert facts.driver == ""
    assert facts.compiler == ""
    assert facts.gpus == ()
