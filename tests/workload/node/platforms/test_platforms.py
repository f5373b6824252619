"""Platforms: each answers without devices, and another vendor's is one class."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tuner.doctor.command import node_lines
from tuner.search_spaces.cluster import Cluster, load_cluster, load_device
from tuner.workload.node.clocks.base import FixedGovernor, Governor
from tuner.workload.node.facts import inspect_node
from tuner.workload.node.measure.window import DeviceWatch, ProbeFailed
from tuner.workload.node.meters import Meter
from tuner.workload.node.meters.base import TAKEN
from tuner.workload.node.meters.rapl import EstimatedMeter
from tuner.workload.node.platforms import SOCKET, detect_cluster, platform_of, platforms
from tuner.workload.node.platforms.base import ClockFacts, DeviceFacts, GpuFacts, Host, Platform
from tuner.workload.records.probe import Failure, MeterInfo

HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}


class Other(Platform):
    """Two devices of another vendor, of which the second is in use and has failed before."""

    accelerator = "xpu"
    damage = 3

    def meters(self, cluster: Cluster) -> Mapping[str, Callable[[], Meter]]:
        return {"own": lambda: EstimatedMeter(idle_W=60.0, max_W=400.0)}

    def open_governor(self, cluster: Cluster, meter: MeterInfo | None = None) -> Governor:
        return FixedGovernor("its clocks are the firmware's")

    def clocks(self) -> ClockFacts:
        return ClockFacts(False, "the firmware's", "its clocks are the firmware's")

    def cluster(self, host: Host) -> Cluster | None:
        device = replace(load_device("A100-SXM-80GB"), name="X1")
        return Cluster("this-machine", device, 2, host_memory_bytes=host.memory_bytes)

    def facts(self) -> DeviceFacts:
        return DeviceFacts(tuple(GpuFacts(i, f"X-{i}", "X1", 2**36) for i in range(2)), "1.0")

    def busy(self, own: Collection[int] = ()) -> tuple[str, ...]:
        return () if 7 in own else ("device 1 is used by process 7",)

    def faults(self) -> Mapping[str, Mapping[str, int]]:
        return {"X-1": {"lost lanes": Other.damage}}

    def why_few_cores(self, cores: float, ranks: int, *each: float) -> str:
        return "" if cores >= ranks else "too few cores for X1"


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOCKET.shipped, "cuda", f"{__name__}:Other")


@pytest.mark.usefixtures("other")
class TestAnotherVendor:
    def test_the_machine_is_its_devices_for_study_doctor_and_preflight(self) -> None:
        assert detect_cluster().device.name == "X1"
        facts = inspect_node()
        assert [gpu.name for gpu in facts.gpus] == ["X1", "X1"]
        assert (facts.driver, facts.clock_control) == ("1.0", False)
        assert "2 x X1" in "\n".join(node_lines(facts))
        assert (facts.kind, [gpu.uuid for gpu in facts.gpus]) == ("X1", ["X-0", "X-1"])
        assert "device 1 is used by process 7" in " ".join(facts.refusals())
        wanted = replace(load_cluster("a100-8"), clock_control=True)
        assert "firmware's" in " ".join(facts.refusals(wanted))

    def test_it_is_metered_watched_and_set_by_its_own_means(self) -> None:
        cluster = detect_cluster()
        meter = platform_of(cluster).open_meter(cluster)
        assert "60 W idle" in meter.info.source
        meter.close()
        assert platform_of(cluster).why_fixed(cluster) == "its clocks are the firmware's"
        watch = DeviceWatch(platform_of(cluster))
        with pytest.raises(ProbeFailed, match="device 1 is used"):
            watch.require_free()
        assert watch.others({7}) == ""
        crash = Failure("crash", "x")
        assert watch.cause(crash) is crash
        Other.damage += 1
        assert watch.cause(crash).message == "X-1 has 1 more lost lanes: x"


@pytest.mark.parametrize("kind", platforms().values())
def test_every_platform_answers_on_a_machine_without_its_devices(
    kind: type[Platform], tmp_path: Path
) -> None:
    platform = kind(HIDDEN, sys=tmp_path)
    assert platform.busy() == ()
    assert platform.faults() == {}
    assert platform.memory_held([1]) is None
    assert platform.wait_for_release() < 5.0
    assert platform.facts().devices == ()
    assert platform.capabilities() == ""
    meters = platform.meters(load_cluster("cpu-2"))
    assert meters
    assert set(meters) <= set(TAKEN)


def test_a_machine_whose_gpus_are_hidden_is_one_of_cores(tmp_path: Path) -> None:
    cluster = detect_cluster(environ=HIDDEN, sys=tmp_path)
    assert not cluster.device.is_gpu
    assert platform_of(cluster).contention([1]) is not None
    assert platform_of(cluster).rank_environment({}, 1, 0, "")["CUDA_VISIBLE_DEVICES"] == ""
