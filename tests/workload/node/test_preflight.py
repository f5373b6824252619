"""What a node is found to be before a study uses it, on a twin GPU node and files of our own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.support.sysfs import make_proc
from tests.twin import TwinGpu, TwinNode
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.plugins import install_command
from tuner.workload.node.facts import NodeFacts, inspect_node
from tuner.workload.node.platforms.nvidia import Nvidia

pytestmark = pytest.mark.needs("cc")
Make = Callable[..., TwinNode]
NO_ENV: dict[str, str] = {}
GIB = 2**30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    return make_proc(tmp_path / "proc", total_gib=512, available_gib=400)


def seen(proc: Path, **more: Any) -> NodeFacts:
    cgroup = proc.parent / "cgroup"
    cgroup.mkdir(exist_ok=True)
    return inspect_node(
        proc=proc, cgroup=cgroup, environ=NO_ENV, **({"affinity": range(64)} | more)
    )


def test_a_gpu_with_a_process_on_it_is_not_measured(proc: Path, twin_node: Make) -> None:
    node = twin_node(TwinGpu(), TwinGpu())
    node.processes(0, compute=[(4242, GIB), (17, GIB)])
    facts = seen(proc)
    (sentence,) = facts.refusals()
    assert "GPU 0 is used by processes 17, 4242" in sentence
    assert Nvidia(NO_ENV).busy((17, 4242)) == ()
    assert Nvidia({"CUDA_VISIBLE_DEVICES": "1"}).busy() == ()  # visible GPUs only


def test_memory_held_by_nobody_that_can_be_seen_makes_a_gpu_busy(twin_node: Make) -> None:
    node = twin_node(TwinGpu(memory_bytes=8 * GIB, reserved_bytes=450 * 2**20))
    assert Nvidia(NO_ENV).busy() == ()  # the driver's reserve is nobody's
    node.set(used_bytes=3 * GIB)
    (phrase,) = Nvidia(NO_ENV).busy()
    assert "3.0 GiB of GPU 0's memory" in phrase


def test_a_desktop_is_no_reason_against_its_card(proc: Path, twin_node: Make) -> None:
    node = twin_node(TwinGpu(memory_bytes=24 * GIB))
    node.processes(0, graphics=[(900, 2 * GIB), (901, GIB)])
    assert Nvidia(NO_ENV).busy() == ()
    facts = seen(proc)
    assert facts.refusals() == ()
    # What the display holds is no memory for the job.
    assert facts.cluster is not None
    assert facts.cluster.device.memory_bytes == 21 * GIB
    node.processes(0, graphics=[(900, GIB)], compute=[(77, GIB)])
    (phrase,) = Nvidia(NO_ENV).busy()
    assert "used by process 77" in phrase


def test_an_idle_mps_server_is_no_reason_either(twin_node: Make) -> None:
    node = twin_node()
    with subprocess.Popen(["sleep", "30"]) as other:
        try:
            node.processes(0, compute=[(other.pid, 2**25)])
            assert "used by process" in Nvidia(NO_ENV).busy()[0]
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
        assert Nvidia(NO_ENV).busy() == ()
    finally:
        server.communicate(b"\n")


def test_clocks_that_may_not_be_set_refuse_the_node_only_where_they_are_searched(
    proc: Path, twin_node: Make
) -> None:
    twin_node(root=False)
    facts = seen(proc)
    assert facts.cluster is not None
    assert facts.why_clocks_fixed
    assert facts.refusals(facts.cluster) == ()
    searched = replace(facts.cluster, clock_control=True)
    (sentence,) = facts.refusals(searched)
    assert "clocks may not be set" in sentence


def test_missing_packages_refuse_the_node_with_the_line_that_installs_them(proc: Path) -> None:
    facts = replace(seen(proc), packages={**seen(proc).packages, "torch": None, "deepspeed": None})
    assert facts.refusals()[0] == (
        f"node {facts.host} is not used: torch, deepspeed are not installed there "
        f"({install_command('train')})"
    )


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


@pytest.mark.parametrize(
    ("gpus", "cores", "refused", "warned"),
    [(2, 1, True, True), (2, 2, False, True), (2, 7, False, True), (2, 8, False, False)],
)
def test_a_rank_needs_a_core_and_wants_four(
    proc: Path, twin_node: Make, gpus: int, cores: int, refused: bool, warned: bool
) -> None:
    twin_node(*[TwinGpu()] * gpus)
    facts = seen(proc, affinity=range(cores))
    assert any("granted for 2 GPUs" in sentence for sentence in facts.refusals()) == refused
    assert bool(facts.warning()) == warned
    assert facts.cluster is not None
    one = replace(facts.cluster, devices_per_node=1)  # a study of one GPU on each node
    assert facts.refusals(one) == ()
    assert facts.to_json()["cores"] == cores


def test_a_quota_counts_as_well_and_in_parts_of_a_core(proc: Path, twin_node: Make) -> None:
    twin_node(TwinGpu(), TwinGpu())
    cgroup = proc.parent / "cgroup"
    cgroup.mkdir()
    (cgroup / "cpu.max").write_text("150000 100000\n")
    (sentence,) = seen(proc).refusals()
    assert "1.5 cores are granted for 2 GPUs" in sentence


def test_devices_that_are_cores_have_one_each(proc: Path, twin_node: Make) -> None:
    twin_node().fail("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    facts = seen(proc, affinity=range(2))
    assert facts.cluster is not None
    assert facts.cluster.devices_per_node == 2
    assert facts.refusals() == ()
    assert facts.warning() == ""


def test_a_process_on_one_core_of_a_node_is_refused(tmp_path: Path) -> None:
    """As srun starts it: bound to one core, on this machine and on a node that has 16."""
    code = (
        "from tuner.workload.node.facts import inspect_node\n"
        "facts = inspect_node(); print(facts.cores, [s for s in facts.refusals() if 'cores' in s])"
    )
    for cores, bound, told in ((0, "0", True), (16, "3", True), (16, "3-6", False)):
        path = tmp_path / f"node-{cores}-{bound}"
        node = TwinNode(path, [TwinGpu()] * 4, virtual_time=False, cores=cores)
        try:
            done = subprocess.run(
                ["taskset", "-c", bound, sys.executable, "-c", code],
                env=os.environ | node.environment(),
                capture_output=True,
                text=True,
                check=True,
            )
        finally:
            node.close()
        assert ("is granted for 4 GPUs" in done.stdout) == told, done.stdout
        assert done.stdout.startswith("4.0 []" if not told else "1.0 ['node"), done.stdout
