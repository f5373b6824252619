"""One contract over all meters, then what is particular to each."""

from __future__ import annotations

import math
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.support.fake_clock import FakeClock
from tests.twin import TwinGpu, TwinNode
from tests.waiting import wait_until
from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.workload.node.clocks.governor import NvmlGovernor
from tuner.workload.node.meters import Meter, MeterError
from tuner.workload.node.meters.base import TAKEN, Timeline
from tuner.workload.node.meters.gpus import Gpu, NoEnergy, cuda_numbering, visible_gpus
from tuner.workload.node.meters.nvml import NvmlMeter
from tuner.workload.node.meters.rapl import EstimatedMeter, RaplMeter
from tuner.workload.node.platforms import platforms
from tuner.workload.records.probe import MeterInfo, PowerSample

Make = Callable[..., TwinNode]
Metered = Callable[..., tuple[TwinNode, NvmlMeter]]
NO_ENV: dict[str, str] = {}


def put(file: Path, text: str) -> None:
    """Write as the kernel does: a reader in another thread sees all of it or none."""
    half = file.with_suffix(".half")
    half.write_text(text)
    half.replace(file)


@dataclass
class Rig:
    """A meter over a machine whose power is known.

    Attributes:
        advance: let so many seconds pass at the constant power.
        power_W: that power.
        resolution_J: how far a window's energy may be off: what the counter's steps hide.
        vanish: take the meter's source away.
    """

    meter: Meter
    advance: Callable[[float], None]
    power_W: float
    resolution_J: float
    vanish: Callable[[], None]
    scope: str
    estimated: bool = False


def nvml_rig(make: Make, **spec: Any) -> Rig:
    gpus = [TwinGpu(load=load, **spec) for load in (1.0, 0.5)]
    node = make(*gpus)
    meter = NvmlMeter(clock=node.clock, sleep=node.sleep, environ=NO_ENV)

    def advance(seconds: float) -> None:
        until_s = node.clock() + seconds
        while node.clock() < until_s:  # a meter without a counter looks every 50 ms by itself
            node.sleep(min(0.05, until_s - node.clock()))
            if not gpus[0].has_counter:
                meter.read()

    power_W = node.power_W(0) + node.power_W(1)
    resolution_J = power_W * gpus[0].counter_period_s
    return Rig(meter, advance, power_W, resolution_J, lambda: node.set(1, lost=1), "gpu")


def nvml_sampled_rig(make: Make) -> Rig:
    return nvml_rig(make, has_counter=False)


def nvml_averaged_rig(make: Make) -> Rig:
    return nvml_rig(make, has_counter=False, gpu_scope=0)


class Powercap:
    """A tree of powercap files that counts on."""

    RANGE_UJ = 65_532_610_987

    def __init__(self, root: Path) -> None:
        self.root = root
        self.zones: dict[str, float] = {}
        self.lock = threading.Lock()
        for folder, name, watts in (
            ("intel-rapl:0", "package-0", 100.0),
            ("intel-rapl:0/intel-rapl:0:0", "core", 70.0),
            ("intel-rapl:0/intel-rapl:0:1", "dram", 20.0),
            ("intel-rapl:1", "package-1", 60.0),
            ("intel-rapl:2", "psys", 250.0),
            ("intel-rapl-mmio:0", "package-0", 100.0),
        ):
            place = root / folder
            place.mkdir(parents=True)
            (place / "name").write_text(name + "\n")
            (place / "max_energy_range_uj").write_text(f"{self.RANGE_UJ}\n")
            (place / "energy_uj").write_text(f"{self.RANGE_UJ - 150_000_000}\n")
            self.zones[folder] = watts

    def advance(self, seconds: float) -> None:
        with self.lock:
            self._advance(seconds)

    def _advance(self, seconds: float) -> None:
        for folder, watts in self.zones.items():
            file = self.root / folder / "energy_uj"
            step = round(watts * seconds * 1e6)
            put(file, f"{(int(file.read_text()) + step) % self.RANGE_UJ}\n")


def rapl_rig(tmp: Path) -> Rig:
    clock, tree = FakeClock(), Powercap(tmp)

    def advance(seconds: float) -> None:
        clock.advance(seconds)
        tree.advance(seconds)

    meter = RaplMeter(tmp, clock=clock, sleep=advance)
    vanish = (tmp / "intel-rapl:1" / "energy_uj").unlink
    return Rig(meter, advance, 180.0, 1e-3, vanish, "node")  # both packages and the DRAM


class Stat:
    """A /proc/stat whose cores are busy a given share of the time."""

    def __init__(self, file: Path, busy: dict[int, float]) -> None:
        self.file, self.busy, self.seconds = file, busy, 500.0
        self.lock = threading.Lock()
        self.advance(0.0)

    def advance(self, seconds: float) -> None:
        with self.lock:
            self._advance(seconds)

    def _advance(self, seconds: float) -> None:
        self.seconds += seconds
        lines = ["cpu  1 2 3 4 5 6 7 8 9 10"]
        for cpu, share in self.busy.items():
            work, idle = round(100 * self.seconds * share), round(100 * self.seconds * (1 - share))
            user, system = work - work // 4, work // 4
            lines.append(f"cpu{cpu} {user} 0 {system} {idle} 77 0 0 99 {user} 0")
        put(self.file, "\n".join([*lines, "intr 1 2 3", "ctxt 5"]) + "\n")


def estimated_rig(tmp: Path) -> Rig:
    clock, stat = FakeClock(), Stat(tmp / "stat", {0: 1.0, 1: 0.25, 2: 1.0})

    def advance(seconds: float) -> None:
        clock.advance(seconds)
        stat.advance(seconds)

    meter = EstimatedMeter(
        idle_W=2.0, max_W=10.0, cpus=(0, 1), stat=stat.file, tick_s=0.01, clock=clock, sleep=advance
    )
    # 2 cores x 2 W, and 1.25 busy cores x 8 W; ticks of 10 ms on each core.
    return Rig(meter, advance, 14.0, 2 * 8.0 * 0.01, stat.file.unlink, "node", estimated=True)


@pytest.fixture(
    params=[nvml_rig, nvml_sampled_rig, nvml_averaged_rig, rapl_rig, estimated_rig],
    ids=lambda make: make.__name__.removesuffix("_rig"),
)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    on_twin = request.param.__name__.startswith("nvml")
    made = request.param(request.getfixturevalue("twin_node") if on_twin else tmp_path)
    yield made
    made.meter.close()


class TestContract:
    def test_is_a_meter_that_says_where_its_figures_come_from(self, rig: Rig) -> None:
        assert isinstance(rig.meter, Meter)
        info = rig.meter.info
        assert isinstance(info, MeterInfo)
        assert info.name in TAKEN  # no meter of a user may have it
        assert info.scope == rig.scope
        assert info.estimated == rig.estimated
        assert len(info.source) > 10
        assert len(info.host) > 10  # what of the host is charged is said
        assert rig.meter.resolution_s > 0

    def test_boundaries_enclose_the_energy_between_them(self, rig: Rig) -> None:
        rig.advance(0.77)
        opened = rig.meter.boundary(opens=True)
        rig.advance(5.21)
        closed = rig.meter.boundary(opens=False)
        length_s = closed.time_s - opened.time_s
        assert length_s == pytest.approx(5.21, abs=0.3)  # it may wait for an update
        energy_J = closed.energy_J - opened.energy_J
        assert energy_J == pytest.approx(rig.power_W * length_s, abs=rig.resolution_J + 1e-6)

    @pytest.mark.parametrize("window_s", [0.3, 5.0, 61.7])
    def test_energy_of_a_window_is_the_truth_within_the_resolution(
        self, rig: Rig, window_s: float
    ) -> None:
        rig.advance(1.23)
        first = rig.meter.read()
        rig.advance(window_s)
        second = rig.meter.read()
        assert second.time_s - first.time_s == pytest.approx(window_s)
        energy_J = second.energy_J - first.energy_J
        assert energy_J == pytest.approx(rig.power_W * window_s, abs=rig.resolution_J + 1e-6)

    def test_readings_never_decrease_and_start_at_nothing(self, rig: Rig) -> None:
        readings = [rig.meter.read()]
        random_s = random.Random(1)
        for _ in range(60):
            rig.advance(random_s.uniform(0.0, 0.4))
            readings.append(rig.meter.read())
        assert readings[0].energy_J == pytest.approx(0.0, abs=rig.resolution_J)
        energies = [reading.energy_J for reading in readings]
        assert energies == sorted(energies)
        assert energies[-1] > 0

    def test_sampled_power_is_the_power(self, rig: Rig) -> None:
        rig.advance(2.0)
        rig.meter.sample()
        rig.advance(2.0)
        sample = rig.meter.sample()
        assert isinstance(sample, PowerSample)
        assert sample.power_W == pytest.approx(rig.power_W, rel=0.05)

    def test_two_samples_at_one_instant_do_not_divide_by_nothing(self, rig: Rig) -> None:
        rig.advance(1.0)
        powers = [rig.meter.sample().power_W, rig.meter.sample().power_W]
        assert all(math.isfinite(power) and power > 0 for power in powers)

    def test_no_reading_is_an_error_and_never_zero(self, rig: Rig) -> None:
        rig.advance(1.0)
        rig.meter.read()
        rig.vanish()
        with pytest.raises(MeterError):
            rig.meter.read()
        with pytest.raises(MeterError):
            rig.meter.sample()
        with pytest.raises(MeterError):
            rig.meter.boundary(opens=True)

    def test_closed_meter_does_not_read_and_closes_twice(self, rig: Rig) -> None:
        rig.meter.close()
        rig.meter.close()
        with pytest.raises(MeterError, match="closed"):
            rig.meter.read()

    def test_reads_and_samples_from_two_threads(self, rig: Rig) -> None:
        timeline = Timeline(rig.meter, period_s=0.002)
        for _ in range(30):
            rig.advance(0.11)
            rig.meter.read()
        wait_until(lambda: timeline.samples or timeline.errors)
        timeline.stop()
        assert not timeline.errors


BUSY = TwinGpu(load=1.0)
SUPERCHIP = replace(BUSY, name="NVIDIA GH200 480GB", c2c=True, module_W=150.0)


class TestNvml:
    def test_sources_are_named(self, metered: Metered) -> None:
        without = TwinGpu(has_counter=False)
        _, meter = metered(TwinGpu(), without, without)
        assert meter.info.source == (
            "NVML total-energy counter of 1 twin GPU, and NVML power of 2 twin GPUs without a "
            "counter, integrated every 50 ms"
        )

    def test_a_gpu_that_tells_nothing_is_refused(self, metered: Metered) -> None:
        with pytest.raises(MeterError, match="neither its energy nor its power"):
            metered(TwinGpu(has_counter=False, has_usage=False, gpu_scope=0))
        with pytest.raises(pynvml.NVMLError_Uninitialized):  # NVML was let go again
            pynvml.nvmlDeviceGetCount()

    @pytest.mark.parametrize("has_counter", [True, False])
    def test_changing_load_is_integrated(self, metered: Metered, has_counter: bool) -> None:
        node, meter = metered(TwinGpu(has_counter=has_counter))
        start, before_J = meter.read(), node.energy_J()
        for _ in range(12):
            for seconds, load in ((0.7, 0.0), (1.2, 1.0), (0.6, 0.4)):
                node.set(load=load)
                for _ in range(round(seconds / 0.05)):
                    node.sleep(0.05)
                    meter.read()
        end = meter.read()
        truth_J = node.energy_J() - before_J
        assert end.energy_J - start.energy_J == pytest.approx(truth_J, rel=0.02)

    @pytest.mark.parametrize(
        ("lose", "says"),
        [(TwinNode.reset_counter, "went backwards"), (TwinNode.stall, "has not moved")],
        ids=["reset", "stall"],
    )
    def test_a_counter_that_loses_joules_breaks_the_meter_for_good(
        self, metered: Metered, lose: Callable[[TwinNode], None], says: str
    ) -> None:
        node, meter = metered(BUSY)
        node.sleep(1.0)
        meter.read()
        lose(node)
        node.sleep(3.0)
        for _ in range(2):
            with pytest.raises(MeterError, match=says):
                meter.read()
            node.sleep(1.0)

    def test_a_counter_of_32_bits_wraps_and_goes_on(self, metered: Metered) -> None:
        node, meter = metered(
            replace(BUSY, counter_start_mJ=2**32 - 100_000, counter_modulus_mJ=2**32)
        )
        for _ in range(10):
            node.sleep(0.5)
            meter.read()
        assert meter.read().energy_J == pytest.approx(5 * 380.0, rel=1e-6)

    def test_a_step_back_that_no_wrap_explains_breaks_the_meter(self, metered: Metered) -> None:
        node, meter = metered(
            replace(BUSY, counter_start_mJ=9_900_000, counter_modulus_mJ=10_000_000)
        )
        node.sleep(1.0)
        with pytest.raises(MeterError, match="went backwards"):
            meter.read()

    @pytest.mark.parametrize("period_s", [0.02, 0.05, 0.1])
    def test_a_boundary_is_finer_than_the_counters_steps(
        self, metered: Metered, period_s: float
    ) -> None:
        node, meter = metered(TwinGpu(counter_period_s=period_s), BUSY)
        node.sleep(0.9)
        opened, before_J = meter.boundary(opens=True), node.energy_J()
        assert opened.time_s == node.clock()  # the wait is before the window
        for seconds, loads in ((1.033, (1.0, 1.0)), (5.238, (0.0, 1.0)), (0.829, (0.0, 0.0))):
            for gpu, load in enumerate(loads):
                node.set(gpu, load=load)
            node.sleep(seconds)
        truth_J, end_s = node.energy_J() - before_J, node.clock()
        closed = meter.boundary(opens=False)
        assert closed.time_s == end_s  # and after it
        assert node.clock() > end_s
        assert closed.energy_J - opened.energy_J == pytest.approx(truth_J, abs=1.0)

    @pytest.mark.parametrize("period_s", [0.02, 0.1, 0.2])
    def test_the_update_period_of_the_slowest_is_found(
        self, metered: Metered, period_s: float
    ) -> None:
        slow = replace(BUSY, counter_period_s=period_s)
        _, meter = metered(slow, replace(BUSY, counter_period_s=0.02))
        assert meter.resolution_s == pytest.approx(period_s, abs=0.0015)

    @pytest.mark.parametrize("module_counter", [True, False])
    def test_a_counter_of_the_module_does_not_pass_for_the_gpus(
        self, metered: Metered, module_counter: bool
    ) -> None:
        node, meter = metered(replace(SUPERCHIP, counter_is_module=module_counter))
        assert ("without a counter" in meter.info.source) == module_counter
        assert meter.info.independent != module_counter
        first = meter.read()
        for _ in range(100):
            node.sleep(0.05)
            meter.read()
        assert meter.read().energy_J - first.energy_J == pytest.approx(5 * 380.0, rel=0.03)

    @pytest.mark.parametrize(("gpu_scope", "period_s"), [(1, 0.05), (0, 1.0)])
    def test_power_that_is_averaged_is_as_coarse_as_its_average(
        self, metered: Metered, gpu_scope: int, period_s: float
    ) -> None:
        """A 1 s average smears the edges, so short windows are flagged."""
        counts = replace(BUSY, counter_period_s=0.02)
        _, meter = metered(counts, TwinGpu(has_counter=False, gpu_scope=gpu_scope))
        assert meter.resolution_s == period_s

    def test_a_call_that_fails_twice_costs_one_reading(self, metered: Metered) -> None:
        node, meter = metered(BUSY)
        node.fail("nvmlDeviceGetTotalEnergyConsumption", pynvml.NVML_ERROR_UNKNOWN, times=2)
        node.sleep(1.0)
        with pytest.raises(MeterError):
            meter.read()
        assert meter.read().energy_J == pytest.approx(380.0, abs=38.0)

    def test_power_that_nobody_sampled_is_not_made_up(self, metered: Metered) -> None:
        node, meter = metered(TwinGpu(has_counter=False), sample_period_s=60.0)
        node.sleep(3.0)
        with pytest.raises(MeterError, match=r"not sampled for 3\.0 s"):
            meter.read()

    def test_the_timeline_tells_clock_heat_and_throttling(self, metered: Metered) -> None:
        node, meter = metered(BUSY, BUSY)
        node.set(0, lock_low=1200, lock_high=1200)
        node.set(1, heat_MHz=900, temperature_C=87)
        node.sleep(0.01)
        extra = meter.sample().extra
        assert extra["clock_MHz"] == 1050
        assert extra["temperature_C"] == 87
        assert extra["utilisation"] == 1.0
        assert (extra["throttle_thermal"], extra["throttle_power"]) == (1.0, 0.0)
        for gpu in range(2):
            assert extra[f"gpu{gpu}_power_W"] == pytest.approx(node.power_W(gpu), abs=0.1)
            assert extra[f"gpu{gpu}_clock_MHz"] == (1200, 900)[gpu]

    def test_a_reading_is_of_the_middle_of_its_calls(self, twin_node: Make) -> None:
        node = twin_node(BUSY, BUSY, call_s=0.02)
        with closing(NvmlMeter(environ=NO_ENV, clock=node.clock, sleep=node.sleep)) as meter:
            called_s = node.clock()
            assert meter.read().time_s == pytest.approx((called_s + node.clock()) / 2)

    def test_older_drivers_know_the_reasons_by_their_older_name(self, metered: Metered) -> None:
        node, meter = metered(replace(BUSY, limit_W=200.0))
        code = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
        node.fail("nvmlDeviceGetCurrentClocksEventReasons", code)
        assert meter.sample().extra["throttle_power"] == 1.0


class TestVisibleGpus:
    UUIDS = ("GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333")

    def visible(self, make: Make, value: str | None, **spec: Any) -> list[Gpu]:
        make(*[TwinGpu(uuid=uuid, **spec) for uuid in self.UUIDS])
        pynvml.nvmlInit()
        environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        return visible_gpus(pynvml, environ=environ)

    @pytest.mark.parametrize(
        ("value", "indices"),
        [
            (None, (0, 1, 2)),
            ("", ()),
            ("-1", ()),
            ("NoDevFiles", ()),
            ("1", (1,)),
            ("2,0", (2, 0)),
            (" 2 , 0 ", (2, 0)),
            ("0,-1,2", (0,)),
            ("GPU-bbbb3333", (2,)),
            ("GPU-aaaa2,GPU-b", (1, 2)),
            ("gpu-BBBB", (2,)),
        ],
    )
    def test_forms_of_cuda_visible_devices(
        self, twin_node: Make, value: str | None, indices: tuple[int, ...]
    ) -> None:
        gpus = self.visible(twin_node, value)
        assert tuple(gpu.index for gpu in gpus) == indices
        assert tuple(gpu.uuid for gpu in gpus) == tuple(self.UUIDS[i] for i in indices)

    @pytest.mark.parametrize(
        ("value", "says"),
        [
            ("7", "names no GPU"),
            ("GPU-cccc", "names no GPU"),
            ("GPU-aaaa", "names several"),
            ("1,1", "twice"),
            ("MIG-4711", "no GPU or MIG slice"),
            ("MIG-GPU-aaaa1111/0/0", "no GPU or MIG slice"),  # names of drivers before R470
            ("zero", "names no GPU"),
        ],
    )
    def test_what_cannot_be_metered_is_refused_with_the_reason(
        self, twin_node: Make, value: str, says: str
    ) -> None:
        with pytest.raises(InputError, match=says):
            self.visible(twin_node, value)

    def test_the_only_slice_of_a_gpu_is_used(self, twin_node: Make) -> None:
        twin_node(TwinGpu(mig=1))
        pynvml.nvmlInit()
        (gpu,) = visible_gpus(pynvml, environ={})
        assert gpu.uuid.startswith("MIG-0-")
        assert gpu.name.endswith(" MIG 1g.10gb")
        assert gpu.memory_bytes == 10 * 2**30
        assert cuda_numbering({})["CUDA_VISIBLE_DEVICES"] == gpu.uuid

    @pytest.mark.parametrize("value", ["1", "MIG-1-"])
    def test_a_slice_is_named(self, twin_node: Make, value: str) -> None:
        node = twin_node(TwinGpu(), TwinGpu(mig=2))
        pynvml.nvmlInit()
        environ = {"CUDA_VISIBLE_DEVICES": value}
        if value == "1":  # its GPU's number stands for both
            with pytest.raises(InputError, match=r"one MIG slice in a program.*: MIG-0-.*, MIG-1-"):
                visible_gpus(pynvml, environ=environ)
            return
        (gpu,) = visible_gpus(pynvml, environ=environ)
        assert (gpu.index, gpu.whole and gpu.whole.index) == (1, 1)
        assert gpu.uuid.startswith("MIG-1-")
        assert node.log == []

    def test_slices_and_gpus_are_not_used_together(self, twin_node: Make) -> None:
        with pytest.raises(InputError, match="no GPU beside it; name one"):
            self.visible(twin_node, None, mig=1)

    def test_a_slice_has_neither_meter_nor_clocks(self, twin_node: Make) -> None:
        node = twin_node(TwinGpu(mig=1))
        with pytest.raises(NoEnergy, match="MIG slice, shares its GPU's meter"):
            NvmlMeter()
        governor = NvmlGovernor()
        assert not governor.can_set
        assert "shares its GPU's clocks" in governor.why_not
        assert governor.delivered() == {}
        governor.close()
        assert node.log == []

    def test_numbers_are_ambiguous_among_different_gpus(self, twin_node: Make) -> None:
        twin_node(TwinGpu(), TwinGpu(name="NVIDIA A40"))
        pynvml.nvmlInit()
        environ = {"CUDA_VISIBLE_DEVICES": "1"}
        with pytest.raises(InputError, match="CUDA_DEVICE_ORDER"):
            visible_gpus(pynvml, environ=environ)
        (gpu,) = visible_gpus(pynvml, environ=environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
        assert gpu.name == "NVIDIA A40"

    def test_only_visible_gpus_are_metered(self, metered: Metered) -> None:
        node, meter = metered(BUSY, TwinGpu(), environ={"CUDA_VISIBLE_DEVICES": "1"})
        node.sleep(10.0)
        assert meter.read().energy_J == pytest.approx(600.0)


class TestRapl:
    def test_counts_packages_and_dram_once(self, tmp_path: Path) -> None:
        Powercap(tmp_path / "devices")
        flat = tmp_path / "class"  # links, as the kernel makes it
        flat.mkdir()
        for place in (tmp_path / "devices").glob("**/intel-rapl:*"):
            (flat / place.name).symlink_to(place)
        for tree in (tmp_path / "devices", flat):
            with closing(RaplMeter(tree)) as meter:
                source = "RAPL counters of package-0, package-0/dram, package-1"
                assert meter.info.source == source

    def test_none_here_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(MeterError, match="has no RAPL"):
            RaplMeter(tmp_path / "nothing")

    def test_root_only_says_what_to_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Powercap(tmp_path)
        read_text = Path.read_text

        def refuse(self: Path, *args: object, **more: object) -> str:
            if self.name == "energy_uj":
                raise PermissionError(13, "Permission denied")
            return read_text(self)

        monkeypatch.setattr(Path, "read_text", refuse)  # the tests may run as root
        with pytest.raises(MeterError, match="CVE-2020-8694") as told:
            RaplMeter(tmp_path)
        assert "chmod g+r" in str(told.value)
        assert "a+r" not in str(told.value)  # every user of the node could read it


class TestEstimated:
    def test_states_its_assumption_in_numbers(self, tmp_path: Path) -> None:
        stat = Stat(tmp_path / "stat", {0: 0.0, 1: 0.0})
        meter = EstimatedMeter(idle_W=5, max_W=12.5, cpus=(0, 1), host_W=20, stat=stat.file)
        assert meter.info.source == ("20 W + 2 cores x (5 W idle + 7.5 W x utilisation)")
        assert meter.info.estimated

    def test_a_core_that_goes_away_and_returns_counts_no_backward_step(
        self, tmp_path: Path
    ) -> None:
        clock, stat = FakeClock(), Stat(tmp_path / "stat", {0: 1.0, 1: 1.0})
        meter = EstimatedMeter(
            idle_W=0, max_W=10, cpus=(0, 1), stat=stat.file, tick_s=0.01, clock=clock
        )
        stat.advance(1.0)
        assert meter.read().energy_J == pytest.approx(20.0)
        stat.busy = {0: 1.0}
        stat.advance(1.0)
        assert meter.read().energy_J == pytest.approx(30.0)
        stat.busy = {0: 1.0, 1: 0.001}  # it counts anew, from less
        stat.advance(1.0)
        assert meter.read().energy_J == pytest.approx(40.0, abs=0.2)

    def test_other_cores_are_not_charged(self, tmp_path: Path) -> None:
        stat = Stat(tmp_path / "stat", {0: 1.0})
        with pytest.raises(MeterError, match=r"none of the cores \[4, 5\]"):
            EstimatedMeter(idle_W=1, max_W=2, cpus=(4, 5), stat=stat.file)

    @pytest.mark.parametrize(("idle_W", "max_W"), [(-1, 5), (6, 5)])
    def test_an_impossible_envelope_is_refused(self, idle_W: float, max_W: float) -> None:
        with pytest.raises(InvalidValue, match="idle_W"):
            EstimatedMeter(idle_W=idle_W, max_W=max_W)

    def test_garbage_is_not_a_reading(self, tmp_path: Path) -> None:
        (tmp_path / "stat").write_text("cpu0 one two\n")
        with pytest.raises(MeterError):
            EstimatedMeter(idle_W=1, max_W=2, cpus=(0,), stat=tmp_path / "stat")


CORE = Device("core", "cpu", 2**30, 1e9, 1e9, idle_W=3.0, max_W=9.0)
GPU = Device("A100", "cuda", 2**36, 1e14, 1e12, idle_W=60.0, max_W=400.0)
CPUS, GPUS = Cluster("cpus", CORE, 2), Cluster("gpus", GPU, 2)


class TestOpenMeter:
    def open(self, cluster: Cluster, sys: Path) -> MeterInfo:
        meter = platforms()[cluster.device.type](sys=sys).open_meter(cluster)
        meter.read()
        meter.close()
        return meter.info

    def test_gpus_are_metered_by_nvml(self, twin_node: Make, tmp_path: Path) -> None:
        twin_node()
        assert self.open(GPUS, tmp_path).name == "nvml"

    def test_cores_by_rapl_where_it_is(self, twin_node: Make, tmp_path: Path) -> None:
        twin_node()
        Powercap(tmp_path / "class" / "powercap")
        assert self.open(CPUS, tmp_path).name == "rapl"

    def test_cores_by_an_estimate_of_the_clusters_own_envelope(self, tmp_path: Path) -> None:
        info = self.open(CPUS, tmp_path)
        assert info.name == "estimated"
        assert "x (3 W idle + 6 W x utilisation)" in info.source

    @pytest.mark.parametrize("missing", ["package", "library"])
    def test_gpus_without_nvml_are_not_passed_off_as_cores(
        self, twin_node: Make, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Powercap(tmp_path / "class" / "powercap")
        if missing == "package":
            monkeypatch.setitem(sys.modules, "pynvml", None)
        else:
            twin_node().fail("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        with pytest.raises(InputError, match="cluster 'gpus' cannot be metered: NVML"):
            self.open(GPUS, tmp_path)


class Failing:
    """Meter one of whose samples raises what no meter should."""

    def __init__(self, error: Exception) -> None:
        self._error, self._samples = error, 0

    def sample(self) -> PowerSample:
        self._samples += 1
        if self._samples == 5:
            raise self._error
        return PowerSample(time.monotonic(), 100.0)


class TestTimeline:
    @pytest.mark.parametrize(
        "error",
        [
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "a bad name"),
            AttributeError("nvmlDeviceGetX"),
            OSError(5, "Input/output error"),
            KeyError("gfx_0_clk"),
            MeterError("GPU 0 is lost"),
        ],
    )
    def test_a_sample_that_fails_ends_no_timeline(self, error: Exception) -> None:
        timeline = Timeline(Failing(error), period_s=0.005)
        while len(timeline.samples) < 10:
            time.sleep(0.005)
        timeline.stop()
        assert timeline.lost >= 1
        (sentence,) = timeline.errors
        assert sentence

    def test_counts_samples_it_came_too_late_for(self) -> None:
        class Slow:
            calls = 0
            release, started, goes_on = (threading.Event() for _ in range(3))

            def sample(self) -> PowerSample:
                self.calls += 1
                self.started.set()
                if self.calls == 1:
                    self.release.wait(30)
                elif self.calls == 3:
                    self.goes_on.set()
                return PowerSample(0.0, 1.0)

        slow = Slow()
        timeline = Timeline(slow, period_s=0.01)
        assert slow.started.wait(30)
        threading.Event().wait(0.1)  # ten periods pass inside one sample
        slow.release.set()
        assert slow.goes_on.wait(30)
        timeline.stop()
        assert timeline.lost >= 5
