"""What a node is found to be before a study uses it, from a fake NVML and files of our own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from tuner.search_spaces.cluster import load_cluster
from tuner.testing.fake_nvml import FakeGpu, FakeNVML
from tuner.workload.node.preflight import NodeFacts, busy_gpus, look

NO_ENV: dict[str, str] = {}
GIB = 2**30


class Occupied(FakeNVML):
    """A node on whose first GPU somebody works."""

    pids: tuple[int, ...] = ()
    used_bytes = 500 * 2**20

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        first = self.nvmlDeviceGetIndex(handle) == 0
        return [SimpleNamespace(pid=pid) for pid in self.pids] if first else []

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> SimpleNamespace:
        total = super().nvmlDeviceGetMemoryInfo(handle).total
        first = self.nvmlDeviceGetIndex(handle) == 0
        used = self.used_bytes if first else 500 * 2**20
        return SimpleNamespace(total=total, used=used, free=total - used)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "self" / "cgroup").write_text("0::/\n")
    (folder / "meminfo").write_text(f"MemTotal: {512 * 2**20} kB\nMemAvailable: {400 * 2**20} kB\n")
    return folder


def seen(proc: Path, nvml: Any, **more: Any) -> NodeFacts:
    cgroup = proc.parent / "cgroup"
    cgroup.mkdir(exist_ok=True)
    return look(nvml=nvml, proc=proc, cgroup=cgroup, environ=NO_ENV, **more)


def test_a_node_of_gpus_tells_what_a_study_needs(proc: Path) -> None:
    facts = seen(proc, FakeNVML([FakeGpu(), FakeGpu()]))
    assert facts.kind == "A100-SXM-80GB"
    assert facts.cluster is not None
    assert facts.cluster.devices_per_node == 2
    assert facts.driver
    assert facts.clock_note == ""
    assert len(facts.gpus) == 2
    assert facts.refusals(facts.cluster) == ()
    assert facts.to_json()["clocks_may_be_set"] is True


def test_a_gpu_with_a_process_on_it_is_not_measured(proc: Path) -> None:
    nvml = Occupied([FakeGpu(), FakeGpu()])
    nvml.pids = (4242, 17)
    facts = seen(proc, nvml)
    (sentence,) = facts.refusals()
    assert "GPU 0 is used by processes 17, 4242" in sentence
    assert busy_gpus(nvml, environ=NO_ENV, own=(17, 4242)) == ()


def test_memory_held_by_nobody_that_can_be_seen_makes_a_gpu_busy() -> None:
    nvml = Occupied()
    nvml.used_bytes = 30 * GIB
    (phrase,) = busy_gpus(nvml, environ=NO_ENV)
    assert "30.0 GiB of GPU 0's memory" in phrase
    nvml.used_bytes = 500 * 2**20  # the driver's own
    assert busy_gpus(nvml, environ=NO_ENV) == ()


def test_only_visible_gpus_are_looked_at() -> None:
    nvml = Occupied([FakeGpu(), FakeGpu()])
    nvml.pids = (4242,)
    assert busy_gpus(nvml, environ={"CUDA_VISIBLE_DEVICES": "1"}) == ()


def test_clocks_that_may_not_be_set_refuse_the_node_only_where_they_are_searched(
    proc: Path,
) -> None:
    facts = seen(proc, FakeNVML(root=False))
    assert facts.cluster is not None
    assert facts.clock_note
    assert facts.refusals(facts.cluster) == ()
    searched = replace(facts.cluster, clock_control=True)
    (sentence,) = facts.refusals(searched)
    assert "clocks may not be set" in sentence


def test_too_little_free_memory_refuses_the_node(proc: Path) -> None:
    (proc / "meminfo").write_text(f"MemTotal: {64 * 2**20} kB\nMemAvailable: {2**19} kB\n")
    facts = seen(proc, FakeNVML([FakeGpu(), FakeGpu()]))
    (sentence,) = facts.refusals(load_cluster("h200-8"))
    assert "0.5 GiB of its memory are free" in sentence
    assert "2.0 GiB" in sentence


def test_a_driver_that_does_not_answer_is_trouble_and_no_traceback(proc: Path) -> None:
    nvml = FakeNVML([FakeGpu(), FakeGpu(name="NVIDIA H100 80GB HBM3")])
    facts = seen(proc, nvml)
    (sentence,) = facts.refusals()
    assert "different GPUs" in sentence
    lost = FakeNVML()
    lost.fail("nvmlDeviceGetCount", pynvml.NVML_ERROR_GPU_IS_LOST)
    (sentence,) = seen(proc, lost).refusals()
    assert "is not used" in sentence


def test_a_node_without_gpus_or_compiler_is_one_of_cores(proc: Path) -> None:
    gone = FakeNVML()
    gone.fail("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    facts = seen(proc, gone, which=lambda name: None)
    assert facts.kind == "cpu-core"
    assert facts.driver == ""
    assert facts.compiler == ""
    assert facts.gpus == ()
