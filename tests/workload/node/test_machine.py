"""What a machine is found to be: cores, memory and GPUs, each from files or a fake."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from tests.support.commands import finished
from tests.twin import TwinGpu, TwinNode
from tuner.doctor.command import node_lines
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError
from tuner.workload.node import facts
from tuner.workload.node.facts import import_errors, inspect_node
from tuner.workload.node.host import host_memory, usable_cores
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.platforms.base import NEEDED

GIB = 2**30
Make = Callable[..., TwinNode]
NO_ENV: dict[str, str] = {}


@pytest.fixture
def no_gpus(twin_node: Make) -> None:
    """A machine without NVML."""
    twin_node().fail("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


class Host:
    """A /proc and a /sys/fs/cgroup of our own; a core like no shipped one."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()
        self.write("proc/meminfo", f"MemTotal: {64 * 2**20} kB\nMemAvailable: {40 * 2**20} kB\n")
        self.write("proc/self/cgroup", "0::/\n")
        self.core = folder / "mycore.toml"
        self.core.write_text(
            'type = "cpu"\nmemory_bytes = 1\npeak_flops = 5e9\nmemory_bandwidth_Bps = 4e9\n'
            "idle_W = 3.5\nmax_W = 11.0\n"
        )

    def write(self, path: str, text: str) -> None:
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def cores(self, affinity: range = range(16)) -> int:
        return usable_cores(proc=self.proc, cgroup=self.cgroup, affinity=affinity)

    def memory(self) -> tuple[int, int]:
        return host_memory(proc=self.proc, cgroup=self.cgroup)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


class TestHost:
    def test_affinity_without_a_quota(self, host: Host) -> None:
        assert host.cores(range(6)) == 6
        host.write("cgroup/cpu.max", "max 100000\n")
        assert host.cores(range(6)) == 6

    @pytest.mark.parametrize(
        ("quota", "cores"), [("400000 100000", 4), ("350000 100000", 3), ("20000 100000", 1)]
    )
    def test_quota_of_version_2(self, host: Host, quota: str, cores: int) -> None:
        host.write("cgroup/cpu.max", quota + "\n")
        assert host.cores() == cores

    def test_the_tightest_group_on_the_way_to_the_root_counts(self, host: Host) -> None:
        host.write("proc/self/cgroup", "0::/slurm/job/step\n")
        host.write("cgroup/slurm/job/step/cpu.max", "max 100000\n")
        host.write("cgroup/slurm/job/cpu.max", "300000 100000\n")
        host.write("cgroup/slurm/cpu.max", "800000 100000\n")
        host.write("cgroup/slurm/job/memory.max", f"{8 * GIB}\n")
        host.write("cgroup/slurm/job/memory.current", f"{3 * GIB}\n")
        assert host.cores() == 3
        assert host.memory() == (8 * GIB, 5 * GIB)

    def test_version_1(self, host: Host) -> None:
        host.write("proc/self/cgroup", "4:memory:/box\n3:cpuacct,cpu:/box\n0::/\n")
        host.write("cgroup/cpu/box/cpu.cfs_quota_us", "200000\n")
        host.write("cgroup/cpu/box/cpu.cfs_period_us", "100000\n")
        host.write("cgroup/cpu/cpu.cfs_quota_us", "-1\n")
        host.write("cgroup/memory/box/memory.limit_in_bytes", f"{4 * GIB}\n")
        host.write("cgroup/memory/box/memory.usage_in_bytes", f"{1 * GIB}\n")
        host.write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
        assert host.cores() == 2
        assert host.memory() == (4 * GIB, 3 * GIB)

    def test_a_mounted_group_that_is_the_containers_root(self, host: Host) -> None:
        host.write("proc/self/cgroup", "0::/docker/4711\n")  # named as outside, not there inside
        host.write("cgroup/cpu.max", "200000 100000\n")
        assert host.cores() == 2

    def test_memory_without_limits(self, host: Host) -> None:
        assert host.memory() == (64 * GIB, 40 * GIB)

    def test_unreadable_memory_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="memory of this machine"):
            host_memory(proc=tmp_path, cgroup=tmp_path)


class TestCpuCluster:
    def test_each_usable_core_is_a_device_of_the_stated_envelope(
        self, no_gpus: None, host: Host
    ) -> None:
        host.write("cgroup/cpu.max", "200000 100000\n")
        cluster = detect_cluster(proc=host.proc, cgroup=host.cgroup, core=str(host.core))
        assert cluster.name == "this-machine"
        assert not cluster.device.is_gpu
        assert cluster.nodes == 1
        assert cluster.devices_per_node <= 2
        assert cluster.device.memory_bytes == 64 * GIB // cluster.devices_per_node
        assert (cluster.device.idle_W, cluster.device.max_W) == (3.5, 11.0)
        assert not cluster.clock_control
        assert cluster.clocks_MHz == ()

    def test_hidden_gpus_leave_the_cores(self, twin_node: Make, host: Host) -> None:
        twin_node()
        cluster = detect_cluster(
            proc=host.proc,
            cgroup=host.cgroup,
            affinity=range(5),
            core=str(host.core),
            environ={"CUDA_VISIBLE_DEVICES": ""},
        )
        assert (cluster.device.type, cluster.devices_per_node) == ("cpu", 5)

    def test_this_very_machine(self, no_gpus: None) -> None:
        cluster = detect_cluster()
        assert cluster.devices_per_node >= 1
        assert cluster.host_memory_bytes > 2**28
        assert 0 < cluster.device.idle_W < cluster.device.max_W


class TestGpuCluster:
    def detect(self, host: Host, environ: dict[str, str] = NO_ENV) -> Cluster:
        return detect_cluster(proc=host.proc, cgroup=host.cgroup, environ=environ)

    def test_a_known_product_is_completed_by_its_device_file(
        self, twin_node: Make, host: Host
    ) -> None:
        node = twin_node(TwinGpu(limit_W=300.0), TwinGpu())
        cluster = self.detect(host)
        assert cluster.devices_per_node == 2
        device = cluster.device
        assert device.name == "A100-SXM-80GB"
        assert device.peak_flops == 312e12
        assert device.memory_bytes == 80 * GIB
        assert (device.min_limit_W, device.max_W) == (100.0, 400.0)
        assert device.clocks_MHz == tuple(range(210, 1411, 15))
        assert cluster.clocks_MHz == device.clocks_MHz
        assert cluster.host_memory_bytes == 64 * GIB
        assert node.limit_W(0) == 300.0  # detection changes nothing

    @pytest.mark.parametrize(
        ("name", "memory_GiB", "device"),
        [
            ("NVIDIA A100-SXM4-40GB", 40, "A100-SXM-40GB"),
            ("NVIDIA H100 80GB HBM3", 79.6, "H100-SXM-80GB"),
            ("NVIDIA H200", 140.4, "H200-SXM-141GB"),
            ("NVIDIA A40", 45, "A40"),
            ("Tesla V100-SXM2-16GB", 16, "V100-SXM2-16GB"),
            ("NVIDIA GH200 480GB", 95.6, "GH200-96GB"),
            ("NVIDIA H100 PCIe", 79.6, "H100-PCIe-80GB"),
            ("NVIDIA H100 NVL", 93.6, "H100-NVL-94GB"),
            ("NVIDIA H100 NVL", 47, None),
            ("NVIDIA GeForce RTX 4090", 24, "RTX-4090-24GB"),
            ("NVIDIA A400", 45, None),
        ],
    )
    def test_products_are_told_apart(
        self, twin_node: Make, host: Host, name: str, memory_GiB: float, device: str | None
    ) -> None:
        twin_node(TwinGpu(name=name, memory_bytes=int(memory_GiB * GIB)))
        cluster = self.detect(host)
        assert cluster.device.name == (device or name)

    def test_an_unknown_product_gets_stated_assumptions(self, twin_node: Make, host: Host) -> None:
        twin_node(TwinGpu(name="NVIDIA X9000"))
        cluster = self.detect(host)
        device = cluster.device
        # An A100 by its cores and bus: the data sheet says 312 TFLOP/s and 2.04 TB/s.
        assert device.peak_flops == pytest.approx(312e12, rel=0.01)
        assert device.memory_bandwidth_Bps == pytest.approx(2.04e12, rel=0.01)
        assert sum("assumed" in source for source in device.sources) == 3

    @pytest.mark.parametrize(
        ("name", "compute", "cores", "max_MHz", "sheet"),
        [
            ("NVIDIA GeForce RTX 4090", (8, 9), 16384, 2520, 165.2e12),
            ("NVIDIA GeForce RTX 3090", (8, 6), 10496, 1695, 71e12),
            ("NVIDIA GeForce RTX 5090", (12, 0), 21760, 2407, 209.5e12),
            ("NVIDIA GeForce RTX 2080 Ti", (7, 5), 4352, 1635, 56.9e12),
            ("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 24064, 2617, 503.8e12),
            ("NVIDIA B300", (10, 3), 20480, 1920, 2500e12),
        ],
    )
    def test_assumed_peaks_are_those_of_the_data_sheets(
        self,
        twin_node: Make,
        host: Host,
        name: str,
        compute: tuple[int, int],
        cores: int,
        max_MHz: int,
        sheet: float,
    ) -> None:
        clocks = (210, max_MHz)
        twin_node(TwinGpu(name=name, compute=compute, cores=cores, clock_MHz=clocks))
        assert self.detect(host).device.peak_flops == pytest.approx(sheet, rel=0.03)

    def test_different_gpus_are_refused_and_one_kind_may_be_chosen(
        self, twin_node: Make, host: Host
    ) -> None:
        twin_node(TwinGpu(), TwinGpu(name="NVIDIA A40", memory_bytes=45 * GIB))
        with pytest.raises(InputError, match="different GPUs"):
            self.detect(host)
        environ = {"CUDA_VISIBLE_DEVICES": "GPU-00000001"}
        cluster = self.detect(host, environ)
        assert (cluster.device.name, cluster.devices) == ("A40", 1)

    def test_a_lost_gpu_is_said(self, twin_node: Make, host: Host) -> None:
        twin_node().set(lost=1)
        with pytest.raises(InputError, match="GPU is lost"):
            self.detect(host)

    def test_an_older_gpu_keeps_its_application_clock(self, host: Host, twin_node: Make) -> None:
        twin_node(TwinGpu(name="Tesla P100", compute=(6, 0), default_application_MHz=1155))
        assert self.detect(host).device.default_clock_MHz == 1155

    @pytest.mark.parametrize(("c2c", "link_Bps"), [(True, 450e9), (False, 63e9)])
    def test_a_grace_processor_is_linked_by_c2c(
        self, host: Host, twin_node: Make, c2c: bool, link_Bps: float
    ) -> None:
        twin_node(TwinGpu(name="NVIDIA GH200 480GB", c2c=c2c, pcie_generation=5, compute=(9, 0)))
        assert self.detect(host).host_link_Bps == pytest.approx(link_Bps, rel=0.01)


class TestFacts:
    def test_without_gpus(self, no_gpus: None, host: Host) -> None:
        facts = inspect_node(
            proc=host.proc,
            cgroup=host.cgroup,
            sys=host.cgroup,
            core=str(host.core),
            find_program=lambda name: None,
        )
        assert facts.gpus == ()
        assert [(meter.name, meter.available) for meter in facts.meters] == [
            ("nvml", False),
            ("rapl", False),
            ("estimated", True),
        ]
        text = "\n".join(node_lines(facts, verbose=True))
        assert "no meter  nvml: NVML does not start: NVML Shared Library Not Found" in text
        assert "no meter  rapl: this machine has no RAPL" in text
        assert "missing   g++, with which" in text
        assert "missing   ninja, with which" in text
        assert not facts.ready
        assert "3.5 W idle + 7.5 W x utilisation" in text
        assert json.loads(json.dumps(facts.to_json()))["memory_bytes"] == 64 * GIB

    @pytest.mark.parametrize("root", [True, False])
    def test_with_gpus(self, twin_node: Make, host: Host, root: bool) -> None:
        node = twin_node(TwinGpu(), TwinGpu(has_counter=False), root=root)
        facts = inspect_node(
            proc=host.proc, cgroup=host.cgroup, sys=host.cgroup, core=str(host.core)
        )
        assert [gpu.name for gpu in facts.gpus] == ["NVIDIA A100-SXM4-80GB"] * 2
        assert facts.driver == "580.65.06"
        assert facts.meters[0].available
        assert "1 twin GPU without a counter" in facts.meters[0].note
        assert facts.clock_control == root
        text = "\n".join(node_lines(facts, verbose=True))
        assert ("clocks    searched, and put back" in text) == root
        assert ("joulefront-guard" in text) == (not root)
        assert node.locked_MHz() is None

    @pytest.mark.needs("cc")
    def test_a_gpu_that_forgets_its_clocks_is_named(
        self, twin_node: Callable[..., TwinNode], tmp_path: Path
    ) -> None:
        twin_node(TwinGpu(), TwinGpu()).set(1, persistence=0)
        facts = inspect_node(sys=tmp_path)
        assert [gpu.persistence_mode for gpu in facts.gpus] == [True, False]
        (line,) = [
            line for line in node_lines(facts, verbose=True) if "persistence mode off" in line
        ]
        assert line.startswith("GPU 1")

    def test_no_framework_is_imported(self) -> None:
        code = (
            "import sys; from tuner.workload.node.facts import inspect_node; "
            "from tuner.doctor.command import node_lines; "
            "node_lines(inspect_node()); "
            "print([m for m in ('torch', 'deepspeed', 'ray', 'optuna') if m in sys.modules])"
        )
        done = finished([sys.executable, "-c", code])
        assert done.stdout.strip() == "[]", done.stderr


def test_memory_of_nodes_without_processors_is_the_gpus(host: Host, tmp_path: Path) -> None:
    """GH200: 64 GiB, of which 24 are HBM."""
    for number, cpus, size in ((0, "0-71", 40), (1, "", 24), (2, "", 0)):
        host.write(f"node/node{number}/cpulist", f"{cpus}\n")
        lines = (f"{name}: {size * 2**20} kB" for name in ("MemTotal", "MemFree"))
        host.write(
            f"node/node{number}/meminfo", "".join(f"Node {number} {line}\n" for line in lines)
        )
    found = host_memory(proc=host.proc, cgroup=host.cgroup, nodes=tmp_path / "node")
    assert found == (40 * GIB, 16 * GIB)


MODULES = {
    "sound": "print('a banner')",
    "torn": "from json import ResolvedRevision",
    "wordless": "raise RuntimeError()",
    "leaving": "raise SystemExit(3)",
    "dying": "import os; print('x', flush=True); os._exit(7)",
    "waiting": "import time; time.sleep(60)",
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_errors_of_imports_are_told_by_package(modules: None) -> None:
    found = import_errors(["torn", "sound", "wordless", "leaving"])
    assert found.keys() == {"torn", "wordless", "leaving"}
    assert "cannot import name 'ResolvedRevision'" in found["torn"]
    assert found["wordless"].startswith("RuntimeError")
    assert found["leaving"] == "SystemExit: 3"


def test_a_package_that_ends_the_interpreter_is_named(modules: None) -> None:
    ended = {"dying": "the interpreter ended with code 7"}
    assert import_errors(["sound", "dying", "torn"]) == ended
    assert import_errors(["sound", "dying"]) == ended


def test_what_takes_too_long_stays_unknown(modules: None) -> None:
    assert import_errors(["torn", "waiting"], limit_s=3.0).keys() == {"torn"}
    assert import_errors([]) == {}


def test_a_machine_that_cannot_import_is_not_called_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "ImportError: cannot import name 'ResolvedRevision' from 'huggingface_hub'"
    asked = []

    def errors(packages: list[str]) -> dict[str, str]:
        asked.extend(packages)
        return {"transformers": why}

    monkeypatch.setattr(facts, "import_errors", errors)
    monkeypatch.setattr(facts, "installed_version", lambda name: "5.24.0")
    found = facts.inspect_node(imports=True)
    assert asked == [*NEEDED]
    assert not found.ready
    text = "\n".join(node_lines(found))
    assert "cannot train: transformers cannot be imported" in text
    assert f"transformers 5.24.0 that can be imported: {why}" in text
    assert facts.inspect_node().import_errors == {}
