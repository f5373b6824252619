"""The platform of AMD's GPUs, on a stand-in of amdsmi: the contract of one that is not NVIDIA's."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from amdsmi_stub import FakeClock, Stub, StubGpu
from joulefront_amd.meter import AmdMeter, opened
from joulefront_amd.platform import Amd

from tuner.doctor.command import node_lines
from tuner.models.analytic.constants import constants_of, load_constants
from tuner.search_spaces.errors import InputError
from tuner.testing.platforms import PlatformContract
from tuner.workload.node.facts import inspect_node
from tuner.workload.node.meters.base import TAKEN, Meter, MeterError
from tuner.workload.node.platforms import SOCKET, detect_cluster, platform_of, platforms
from tuner.workload.node.platforms.base import Host
from tuner.workload.scripts.installed import TorchBuild

HOST = Host(2**38, 64)
Make = Callable[..., Stub]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> Make:
    def make(*gpus: StubGpu, release: int = 7) -> Stub:
        stub = Stub(list(gpus) or [StubGpu(), StubGpu()], lambda: clock.now_s, release=release)
        monkeypatch.setitem(sys.modules, "amdsmi", stub.module())
        return stub

    return make


def meter_of(clock: FakeClock, environ: dict[str, str] | None = None) -> AmdMeter:
    def sleep(seconds: float) -> None:
        clock.now_s += seconds

    return AmdMeter(environ or {}, clock=lambda: clock.now_s, sleep=sleep, sample_period_s=3600.0)


@pytest.mark.parametrize("release", [6, 7])
def test_the_machine_is_its_gpus(made: Make, tmp_path: Path, release: int) -> None:
    stub = made(release=release)
    cluster = Amd({}, sys=tmp_path).cluster(HOST)
    assert cluster is not None
    device = cluster.device
    assert (device.name, device.type, device.is_gpu) == ("AMD Instinct MI300X", "rocm", True)
    assert (cluster.devices_per_node, device.plural) == (2, "GPUs")
    assert device.memory_bytes == 196592 * 2**20
    assert device.peak_flops == pytest.approx(1307e12, rel=0.01)  # data sheet
    assert device.memory_bandwidth_Bps == pytest.approx(5.3e12, rel=0.01)
    assert device.max_W == 750
    assert isinstance(platform_of(cluster), Amd)
    assert constants_of(device).compute_W == load_constants("cuda").compute_W
    assert not stub.is_open  # whatever was opened is closed


def test_energy_is_the_accumulators(made: Make, clock: FakeClock) -> None:
    stub = made(StubGpu(power_W=300), StubGpu(power_W=500))
    with closing(meter_of(clock)) as meter:
        assert isinstance(meter, Meter)
        assert meter.info.name in TAKEN  # no meter of a user may have it
        assert "accumulators of 2 GPUs" in meter.info.source
        assert meter.info.independent
        first = meter.boundary(opens=True)
        clock.now_s += 10.0
        last = meter.boundary(opens=False)
        assert last.energy_J - first.energy_J == pytest.approx(8000, rel=1e-3)
        assert last.time_s - first.time_s == pytest.approx(10.0, abs=1e-6)
        sample = meter.sample()
        assert sample.power_W == 800
        assert sample.extra["gpu1_power_W"] == 500
        assert sample.extra["clock_MHz"] == 2100
        assert (sample.extra["utilisation"], sample.extra["throttle_power"]) == (1.0, 1.0)
        assert sample.extra["throttle_thermal"] == 0.0  # "N/A"
    meter.close()
    assert not stub.is_open
    with pytest.raises(MeterError, match="closed"):
        meter.read()


@pytest.mark.parametrize(
    "change",
    [{"accumulator_share": 0.0}, {"accumulator_share": 0.03}, {"unsupported": {"energy_count"}}],
    ids=["stands still", "wrong unit", "virtual machine"],
)
def test_power_is_integrated_where_the_accumulator_is_wrong(
    made: Make, clock: FakeClock, change: dict[str, object]
) -> None:
    made(StubGpu(power_W=300, **change), StubGpu(power_W=500))  # type: ignore[arg-type]
    with closing(meter_of(clock)) as meter:
        assert "power of 1 GPUs without a right accumulator" in meter.info.source
        assert not meter.info.independent
        first = meter.read()
        for _ in range(20):
            clock.now_s += 0.5
            last = meter.read()
        assert last.energy_J - first.energy_J == pytest.approx(8000, rel=1e-3)


def test_an_accumulator_that_stops_later_is_an_error_and_no_zero(
    made: Make, clock: FakeClock
) -> None:
    stub = made(StubGpu())
    with closing(meter_of(clock)) as meter:
        stub.gpus[0].accumulator_share = 0.0
        clock.now_s += 3.0
        with pytest.raises(MeterError, match=r"went backwards|has not moved"):
            meter.read()
        with pytest.raises(MeterError):
            meter.read()  # its joules are lost


def test_average_power_counts_where_no_current_one_is_told(made: Make, clock: FakeClock) -> None:
    made(StubGpu(power_key="average"))
    with closing(meter_of(clock)) as meter:
        assert meter.sample().power_W == 330


def test_a_gpu_without_power_is_not_metered(made: Make, clock: FakeClock) -> None:
    """The odd chiplets of an MI250X: the even one tells the power of both."""
    stub = made(StubGpu(), StubGpu(power_key=""))
    with pytest.raises(MeterError, match=r"GPU 1 .* does not tell its power"):
        meter_of(clock)
    assert not stub.is_open


@pytest.mark.parametrize(
    ("environ", "indices"),
    [
        ({}, [1, 0, 2]),  # HIP's order
        ({"HIP_VISIBLE_DEVICES": "0"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "2, 0"}, [2, 1]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, [2]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0000000000000002"}, [2]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "1,-1,0"}, [0]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}, [0]),
    ],
)
def test_visible_gpus_are_hips(made: Make, environ: dict[str, str], indices: list[int]) -> None:
    made(StubGpu(hip_id=1), StubGpu(hip_id=0), StubGpu(hip_id=2))
    with opened(environ) as gpus:
        assert [gpu.index for gpu in gpus] == indices


@pytest.mark.parametrize(
    "environ",
    [
        {"HIP_VISIBLE_DEVICES": "5"},
        {"HIP_VISIBLE_DEVICES": "0,0"},
        {"ROCR_VISIBLE_DEVICES": "x"},
        {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"},
    ],
)
def test_a_variable_that_names_no_gpu_is_refused(made: Make, environ: dict[str, str]) -> None:
    made()
    with pytest.raises(InputError, match="VISIBLE_DEVICES"):
        Amd(environ).cluster(HOST)
    assert Amd(environ).facts().broken
    assert Amd(environ).busy() == ()


@pytest.mark.parametrize("how", ["absent", "no library", "no driver"])
def test_without_amdsmi_there_are_no_gpus(
    made: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    """Amdsmi without ROCm's library raises KeyError, not ImportError."""
    if how == "no driver":
        made().loaded = False
    elif how == "absent":
        monkeypatch.setitem(sys.modules, "amdsmi", None)
    else:
        monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
        (tmp_path / "amdsmi.py").write_text("raise KeyError('ROCM_PATH')\n")
        monkeypatch.syspath_prepend(str(tmp_path))
    platform = Amd({})
    assert platform.cluster(HOST) is None
    assert platform.facts().why_none.startswith("none: amdsmi")
    assert (platform.busy(), platform.faults(), platform.memory_held([1])) == ((), {}, None)
    assert platform.memory_nodes() is None
    assert detect_cluster(environ={"CUDA_VISIBLE_DEVICES": ""}).device.type == "cpu"


def test_machines_that_cannot_be_metered_as_one_kind_are_refused(made: Make) -> None:
    made(StubGpu(), StubGpu(name="AMD Instinct MI210"))
    with pytest.raises(InputError, match="different GPUs: AMD Instinct MI210, AMD Instinct MI300X"):
        Amd({}).cluster(HOST)
    made(StubGpu(partition="CPX"))
    with pytest.raises(InputError, match="compute partition CPX"):
        Amd({}).cluster(HOST)
    made(StubGpu(unsupported={"gpu_asic_info"}))
    with pytest.raises(InputError, match="does not tell gpu_asic_info"):
        Amd({}).cluster(HOST)


def test_processes_damage_and_memory_nodes(made: Make) -> None:
    stub = made(StubGpu(processes=[(7, 2**30), (8, 0)]), StubGpu(processes=[(9, 2**31)]))
    platform = Amd({})
    assert platform.busy() == ("GPU 0 is used by process 7", "GPU 1 is used by process 9")
    assert platform.busy({7, 9}) == ()
    assert platform.memory_held([7, 9]) == 2**31
    before = platform.faults()
    stub.gpus[1].errors = 2
    assert [*platform.faults().values()][1] == {"uncorrectable memory errors": 2}
    assert [*before.values()][1] == {"uncorrectable memory errors": 0}
    assert platform.memory_nodes() == [0, 1]
    stub.gpus[1].unsupported.add("numa")
    assert platform.memory_nodes() == [0, 0]
    assert [gpu.index for gpu in platform.facts().devices] == [0, 1]
    assert platform.facts().driver == "6.14.14"


def test_clocks_are_left_alone(made: Make) -> None:
    made()
    cluster = Amd({}).cluster(HOST)
    assert cluster is not None
    assert not cluster.clock_control
    assert cluster.device.clocks_MHz == ()
    assert "left alone" in platform_of(cluster).why_fixed(cluster)
    assert not Amd({}).clocks().can_set


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (TorchBuild("2.9.0+rocm6.4", "", hip="6.4.43484"), ""),
        (TorchBuild("2.9.0+cu130", "13.0"), "built without ROCm"),
        (TorchBuild("2.9.0+cpu", ""), "built without ROCm"),
    ],
)
def test_torch_must_be_built_with_rocm(build: TorchBuild, words: str) -> None:
    why = Amd({}).why_not_torch(build)
    assert words in why
    assert bool(why) == bool(words)


def test_doctor_lists_amdsmi_only_where_there_are_such_gpus(
    made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = TorchBuild("2.9.0+cpu", "")
    monkeypatch.setattr("tuner.workload.node.facts.installed_torch", lambda: torch)
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    assert "amdsmi" not in {
        meter.name for meter in inspect_node(environ=hidden, sys=tmp_path).meters
    }
    made()
    facts = inspect_node(environ={}, sys=tmp_path)
    assert [gpu.name for gpu in facts.gpus] == ["AMD Instinct MI300X"] * 2
    assert not facts.ready
    assert "without ROCm" in "\n".join(node_lines(facts))


class TestContract(PlatformContract):
    """The contract of joulefront's platforms."""

    entry = "rocm"

    def without_devices(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Amd:
        monkeypatch.setitem(sys.modules, "amdsmi", None)
        return Amd({}, sys=tmp_path)

    def with_devices(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Amd:
        began_s = time.monotonic()
        stub = Stub([StubGpu(), StubGpu()], lambda: time.monotonic() - began_s + 100.0, release=7)
        monkeypatch.setitem(sys.modules, "amdsmi", stub.module())
        return Amd({}, sys=tmp_path)


def test_it_is_found_as_an_installed_distribution(made: Make) -> None:
    made()
    assert platforms()["rocm"] is Amd
    assert list(platforms()) == ["cuda", "rocm", "cpu"]  # a machine's cores come last
    assert SOCKET.plugins.left_out == []
