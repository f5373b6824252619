"""The socket of platforms: the shipped ones follow the contract, and plug-ins come beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.entry_points import install_plugin
from tests.twin import TwinGpu, TwinNode
from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.testing.platforms import PlatformContract
from tuner.workload.node.facts import inspect_node
from tuner.workload.node.platforms import SOCKET, detect_cluster, platform_of, platforms
from tuner.workload.node.platforms.cores import Cores
from tuner.workload.node.platforms.nvidia import Nvidia

GROUP = "joulefront.platforms"
PLUGIN = """
from dataclasses import replace
from tuner.search_spaces.cluster import Cluster, Device
from tuner.workload.node.platforms.cores import Cores

class Mine(Cores):
    PROTOCOL = 1

    def cluster(self, host):
        device = Device("X1", "xpu", 2**36, 1e14, 1e12, 60.0, 400.0)
        return Cluster("this-machine", device, 2, host_memory_bytes=host.memory_bytes)

import sys
sys.modules[__name__] = Mine
"""


class TestCores(PlatformContract):
    entry, cores = "cpu", True

    def without_devices(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cores:
        return Cores({}, sys=tmp_path)

    def with_devices(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cores:
        return Cores({}, sys=tmp_path)


@pytest.mark.needs("cc")
class TestNvidia(PlatformContract):
    entry = "cuda"

    @pytest.fixture(autouse=True)
    def _node(self, twin_node: Callable[..., TwinNode]) -> None:
        twin_node(TwinGpu(), TwinGpu(), virtual_time=False, children=True)

    def without_devices(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nvidia:
        return Nvidia({"CUDA_VISIBLE_DEVICES": ""}, sys=tmp_path)

    def with_devices(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nvidia:
        return Nvidia({}, sys=tmp_path)


def test_a_platform_of_another_distribution_is_found_before_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    install_plugin(tmp_path, monkeypatch, GROUP, "xpu", PLUGIN)
    assert list(platforms()) == ["cuda", "xpu", "cpu"]
    cluster = detect_cluster()
    assert cluster.device.name == "X1"
    assert isinstance(platform_of(cluster), platforms()["xpu"])
    assert SOCKET.plugins.left_out == []


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("xpu", "raise RuntimeError('no driver')", "cannot be loaded (RuntimeError: no driver)"),
        ("xpu", PLUGIN.replace("PROTOCOL = 1", "PROTOCOL = 2"), "must have PROTOCOL = 1, not 2"),
        ("xpu", "PROTOCOL = 1", "must have meters() and open_meter()"),
        ("cuda", PLUGIN, "the name 'cuda' is taken; a plug-in needs a name of its own"),
    ],
)
def test_a_platform_that_cannot_be_used_is_one_sentence_of_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, fault: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    install_plugin(tmp_path, monkeypatch, GROUP, name, source)
    facts = inspect_node()
    (note,) = (note for note in facts.notes if "is left out" in note)
    assert note.startswith(f"the platform {name!r} (")
    assert fault in note
    assert list(platforms()) == ["cuda", "cpu"]
    assert detect_cluster().device.type == "cpu"  # the core goes on without it


def test_devices_without_their_platform_say_what_to_install() -> None:
    cluster = Cluster("amd", Device("MI300X", "rocm", 2**37, 1e15, 5e12, 150.0, 750.0), 8)
    with pytest.raises(InputError, match=r"type 'rocm' need a platform.*joulefront-amd"):
        platform_of(cluster)
    with pytest.raises(InvalidValue, match="cuda or rocm or cpu"):
        Device("T1", "tpu", 2**37, 1e15, 5e12, 150.0, 750.0)
