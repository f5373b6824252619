"""GPUs of laptops, workstations and superchips, which tell NVML less than a data centre's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pynvml
import pytest

from tests.support.sysfs import make_proc
from tests.twin import TwinGpu, TwinNode
from tuner.cli.main import main
from tuner.doctor.command import node_lines
from tuner.models.analytic.model import AnalyticModel
from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.search_spaces.job import load_job
from tuner.workload.node.clocks.governor import NvmlGovernor
from tuner.workload.node.facts import inspect_node
from tuner.workload.node.measure.window import new_faults
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.platforms.nvidia import Nvidia
from tuner.workload.node.probe_run import apply_live
from tuner.workload.records.probe import UnappliedSetting

pytestmark = pytest.mark.needs("cc")
Make = Callable[..., TwinNode]
NO_ENV: dict[str, str] = {}
GIB = 2**30
LAPTOP = TwinGpu(
    name="NVIDIA GeForce RTX 4090 Laptop GPU",
    memory_bytes=16 * GIB,
    cores=9728,
    bus_bits=256,
    memory_MHz=(9001,),
    clock_MHz=tuple(range(210, 2041, 15)),
    compute=(8, 9),
    nvlinks=0,
    tells_limit=False,
)
#: DGX Spark: one memory, no limit, and neither memory clock nor bus are told.
SPARK = TwinGpu(
    name="NVIDIA GB10",
    cores=6144,
    bus_bits=0,
    compute=(12, 1),
    tells_memory=False,
    tells_limit=False,
    clock_MHz=tuple(range(208, 3004, 13)),
    nvlinks=0,
)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    return make_proc(tmp_path / "proc", total_gib=128, available_gib=90)


def detected(proc: Path) -> Cluster:
    return detect_cluster(proc=proc, cgroup=proc, environ=NO_ENV)


# ---- no power limit


def test_a_laptop_is_planned_with_a_stated_power(
    proc: Path, twin_node: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    twin_node(LAPTOP)
    device = detected(proc).device
    assert 100 < device.max_W < 250  # the product's page says up to 150 W
    assert 0 < device.idle_W < device.max_W
    assert device.min_limit_W is None  # no limit that could be set
    assert any("NVML tells no power limit" in source for source in device.sources)
    runs = ["--runs-dir", str(proc.parent / "runs")]
    assert main(["plan", "tiny-gpt", "--quiet", *runs]) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpu", "max_W"),
    [
        # The limit that the board enforces is one, where no default is told.
        (replace(LAPTOP, enforced_limit_W=115.0), 115.0),
        # A product that has a device file has its power there.
        (TwinGpu(tells_limit=False), 400.0),
        # A GPU that tells its default is not guessed, whatever it is held to.
        (TwinGpu(name="NVIDIA X9000", enforced_limit_W=300.0), 400.0),
    ],
)
def test_what_is_told_is_not_assumed(
    proc: Path, twin_node: Make, gpu: TwinGpu, max_W: float
) -> None:
    twin_node(gpu)
    device = detected(proc).device
    assert device.max_W == max_W
    assert not any("J x cores" in source for source in device.sources)


def test_a_device_without_power_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"max_W of device 'X'.*greater than 0"):
        Device("X", "cuda", GIB, 1e12, 1e11, 0.0, 0.0)


# ---- no memory


def test_one_memory_for_host_and_gpu(proc: Path, twin_node: Make) -> None:
    twin_node(SPARK)
    cluster = detected(proc)
    assert cluster.device.name == "GB10"
    assert cluster.device.memory_bytes == 128 * GIB
    assert cluster.device.shares_host_memory
    text = "\n".join(node_lines(inspect_node(proc=proc, cgroup=proc, environ=NO_ENV), verbose=True))
    assert "the host's memory" in text


def test_offloading_frees_nothing_where_the_memory_is_one(proc: Path, twin_node: Make) -> None:
    """What is offloaded stays in the very memory that it is to leave."""
    twin_node(SPARK)
    cluster = detected(proc)
    own = replace(cluster, device=replace(cluster.device, shares_host_memory=False))
    offloaded = Configuration.of(zero_stage=2, optimizer_offload="cpu", micro_batch=1)
    kept = Configuration.of(zero_stage=2, micro_batch=1)

    def saved(on: Cluster) -> float:
        model = AnalyticModel(load_job("qwen2.5-7b"), on)
        each = model.predict([kept, offloaded]).memory_bytes
        return float(1 - each[1] / each[0])

    assert saved(own) > 0.3
    assert saved(cluster) < 0.1


@pytest.mark.parametrize("code", [999, 15])
def test_another_error_is_no_shared_memory(proc: Path, twin_node: Make, code: int) -> None:
    """A GPU whose memory cannot be read now is not one that computes in the host's."""
    twin_node(TwinGpu()).fail("nvmlDeviceGetMemoryInfo", code)
    with pytest.raises(InputError, match="cannot be asked"):
        detected(proc)


def test_a_known_product_keeps_its_own_memory(proc: Path, twin_node: Make) -> None:
    twin_node(TwinGpu(name="NVIDIA H200", tells_memory=False))
    device = detected(proc).device
    assert (device.name, device.shares_host_memory) == ("H200-SXM-141GB", False)
    assert device.memory_bytes > 128 * GIB


# ---- doctor


@pytest.mark.parametrize(
    ("gpu", "note"),
    [
        (TwinGpu(smoothing=1), "power smoothing is on for GPU 0"),
        (TwinGpu(enforced_limit_W=300.0), "GPU 0 is held to 300 W, below its power limit of 400 W"),
        (TwinGpu(fabric_state=3, fabric_status=23), "): CUDA may not start, or without NVLink"),
        (TwinGpu(fabric_state=3, fabric_status=999), "with the NVLink fabric ended with an error"),
        (TwinGpu(fabric_state=0, fabric_status=999), ""),  # not supported: the status says nothing
        (TwinGpu(compute_mode=3), "GPU 0 takes one process at a time"),
        (TwinGpu(compute_mode=1), "GPU 0 takes one process at a time"),
        (TwinGpu(recovery_action=0, fabric_state=3, link_recoveries=7, smoothing=0), ""),
        (TwinGpu(), ""),
    ],
)
def test_doctor_notes_what_lowers_or_smooths_power(
    proc: Path, twin_node: Make, gpu: TwinGpu, note: str
) -> None:
    twin_node(gpu)
    facts = inspect_node(proc=proc, cgroup=proc, environ=NO_ENV, affinity=range(64))
    assert facts.cluster is not None
    assert "; ".join(facts.notes) == note or (note and note in facts.notes[0])


# ---- settings that are refused


def test_a_gpu_that_lists_nothing_to_set_is_left_alone(proc: Path, twin_node: Make) -> None:
    node = twin_node(TwinGpu(lists_clocks=False, tells_limit=False))
    facts = inspect_node(proc=proc, cgroup=proc, environ=NO_ENV, affinity=range(64))
    assert facts.cluster is not None
    assert not facts.cluster.clock_control
    assert "clocks    left as they are" in node_lines(facts)
    assert not any("permission" in line for line in node_lines(facts))  # nobody could permit it
    assert "takes neither a clock nor a power limit" in facts.why_clocks_fixed
    assert node.log == []


@pytest.mark.parametrize(
    ("gpu", "clocks", "limit"),
    [
        (TwinGpu(), True, True),
        (TwinGpu(lists_clocks=False), False, True),
        (TwinGpu(compute=(6, 0)), False, True),  # no lock before Volta, though clocks are listed
        (TwinGpu(tells_limit=False), True, False),
        (TwinGpu(min_limit_W=400.0), True, False),  # the lowest is the highest
    ],
)
def test_only_what_can_be_set_is_offered(
    proc: Path, twin_node: Make, gpu: TwinGpu, clocks: bool, limit: bool
) -> None:
    twin_node(gpu)
    cluster = detected(proc)
    assert cluster.clock_control
    assert bool(cluster.clocks_MHz) == clocks
    assert (cluster.device.min_limit_W is not None) == limit


def refused(live: dict[str, int]) -> str:
    """Apply a live setting as a probe does; return the knob that is unsupported, or ""."""
    with closing(NvmlGovernor(environ=NO_ENV, guarded=False)) as governor:
        done = apply_live(governor, lambda _: [], (), Settings(live), ranks=2)
        return ",".join(done.unsupported) if isinstance(done, UnappliedSetting) else ""


def test_a_refusal_is_the_knobs_and_leaves_nothing_set(twin_node: Make) -> None:
    node = twin_node(TwinGpu(), TwinGpu(lockable=False))
    assert refused({"power_limit_W": 250, "clock_MHz": 900}) == "clock_MHz"
    # The first GPU had taken it.
    assert [node.locked_MHz(0), node.locked_MHz(1)] == [None, None]
    assert [node.limit_W(0), node.limit_W(1)] == [400.0, 400.0]
    assert refused({"power_limit_W": 250}) == ""


# ---- neighbours, health and links


def busy(node: TwinNode, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setattr("tuner.workload.node.platforms.nvidia.time.sleep", node.sleep)
    return Nvidia(NO_ENV).busy()


def test_a_neighbour_by_time_slices_is_seen(
    twin_node: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = twin_node(TwinGpu(), TwinGpu())
    node.set(1, used_bytes=3 * GIB, load=0.6)
    (phrase,) = busy(node, monkeypatch)
    assert phrase == "GPU 1 works for a process that cannot be seen from here"
    assert Nvidia(NO_ENV).busy({1}) == ()  # beside our own ranks the load is theirs


def test_what_has_just_ended_is_no_neighbour(
    twin_node: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML's utilisation is that of up to the last second."""
    node = twin_node(TwinGpu(load=1.0))

    def sleep(seconds: float) -> None:
        node.sleep(seconds)
        node.set(load=0.0)

    monkeypatch.setattr("tuner.workload.node.platforms.nvidia.time.sleep", sleep)
    assert Nvidia(NO_ENV).busy() == ()


#: Without persistence mode, its start takes a second and counts as work for one more.
SLEEPER = TwinGpu(persistence=False, start_s=1.0, start_busy_s=1.0)


@pytest.mark.parametrize("start_busy_s", [0.5, 0.7, 1.0, 1.1])
@pytest.mark.parametrize("gpus", [1, 4])
def test_the_start_of_a_gpu_is_no_neighbour(
    twin_node: Make, monkeypatch: pytest.MonkeyPatch, gpus: int, start_busy_s: float
) -> None:
    node = twin_node(*(replace(SLEEPER, start_busy_s=start_busy_s) for _ in range(gpus)))
    assert busy(node, monkeypatch) == ()


@pytest.mark.parametrize("persistence", [True, False])
@pytest.mark.parametrize("load", [0.0, 0.6])
def test_a_look_for_neighbours_opens_nvml_once(
    twin_node: Make, monkeypatch: pytest.MonkeyPatch, load: float, persistence: bool
) -> None:
    node = twin_node(TwinGpu(persistence=persistence))
    node.set(0, load=load)
    opened = Mock(side_effect=pynvml.nvmlInit)
    monkeypatch.setattr(pynvml, "nvmlInit", opened)
    assert bool(busy(node, monkeypatch)) == bool(load)
    assert opened.call_count == 1
    Nvidia(NO_ENV).wait_for_release(5.0, node.clock, node.sleep)
    assert opened.call_count == 2


def test_a_display_that_draws_is_no_neighbour_and_its_memory_is_no_jobs(
    proc: Path, twin_node: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = twin_node(TwinGpu(load=0.1))
    free_bytes = detected(proc).device.memory_bytes
    node.processes(0, graphics=[(900, GIB)])
    assert busy(node, monkeypatch) == ()
    assert detected(proc).device.memory_bytes == free_bytes - GIB


def test_a_slice_computes_and_draws_by_its_share_of_the_memory(proc: Path, twin_node: Make) -> None:
    with twin_node(TwinGpu()).joined():
        whole = detected(proc).device
    with twin_node(TwinGpu(mig=1)).joined():
        device = detected(proc).device
    share = device.memory_bytes / whole.memory_bytes
    assert 0.1 < share < 0.2
    for name in ("peak_flops", "fp32_flops", "memory_bandwidth_Bps", "idle_W", "max_W"):
        assert getattr(device, name) == pytest.approx(share * getattr(whole, name)), name


@pytest.mark.parametrize(
    ("compute", "default_MHz", "lowest_W", "expected"),
    [
        ((8, 0), 1155, 100.0, (1410, 100.0)),
        ((7, 0), 1155, 100.0, (1410, 100.0)),
        ((6, 1), 1155, 100.0, (1155, 100.0)),  # runs at its default clock, and does not boost
        ((6, 1), 0, 100.0, (1410, 100.0)),
        ((8, 0), 0, 400.0, (1410, None)),  # the lowest limit is the highest
        ((8, 0), 0, 0.0, (1410, None)),
    ],
)
def test_clock_and_limit_of_a_gpu_that_may_not_be_set(
    proc: Path,
    twin_node: Make,
    compute: tuple[int, int],
    default_MHz: int,
    lowest_W: float,
    expected: tuple[int, float | None],
) -> None:
    gpu = TwinGpu(compute=compute, default_application_MHz=default_MHz, min_limit_W=lowest_W)
    twin_node(gpu, root=False)
    device = detected(proc).device
    assert (device.default_clock_MHz, device.min_limit_W) == expected


@pytest.mark.parametrize(
    ("links", "link_Bps"), [((12, 12), 300e9), ((12, 0), 31.5e9), ((0, 12), 31.5e9)]
)
def test_a_gpu_without_a_bridge_bounds_the_link(
    proc: Path, twin_node: Make, links: tuple[int, ...], link_Bps: float
) -> None:
    twin_node(*(TwinGpu(nvlinks=each) for each in links))
    assert detected(proc).link_Bps == pytest.approx(link_Bps, rel=0.01)


def test_h20_is_not_an_h200(proc: Path, twin_node: Make) -> None:
    clocks = tuple(range(345, 1981, 15))
    gpu = TwinGpu(name="NVIDIA H20", memory_bytes=96 * GIB, cores=9984, compute=(9, 0))
    twin_node(replace(gpu, clock_MHz=clocks))
    assert detected(proc).device.peak_flops == 148e12


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"recovery_action": 1}, "1 more recovery actions to wait for"),
        ({"link_recoveries": 4}, "1 more recoveries of NVLink"),
        ({"link_recoveries": 3, "recovery_action": 0}, ""),
    ],
)
def test_what_happens_to_a_gpu_in_a_probe_is_the_nodes(
    twin_node: Make, change: dict[str, int], sentence: str
) -> None:
    node = twin_node(TwinGpu(recovery_action=0, link_recoveries=3))
    before = Nvidia(NO_ENV).faults()
    node.set(0, **change)
    assert sentence in new_faults(before, Nvidia(NO_ENV).faults())
    assert bool(new_faults(before, Nvidia(NO_ENV).faults())) == bool(sentence)
