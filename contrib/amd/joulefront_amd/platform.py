"""AMD's GPUs. No GPU has been measured with this platform yet.

Clocks and power caps are left alone, since no guard restores them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from joulefront_amd.meter import AmdGpu, AmdMeter, as_number, opened
from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.errors import InputError
from tuner.workload.node.clocks.base import FixedGovernor, Governor
from tuner.workload.node.host import usable_cores, why_few_cores
from tuner.workload.node.meters import Meter
from tuner.workload.node.meters.base import MeterError, NoDriver
from tuner.workload.node.platforms.base import (
    ClockFacts,
    Counters,
    DeviceFacts,
    GpuFacts,
    Host,
    Platform,
)
from tuner.workload.records.probe import MeterInfo
from tuner.workload.scripts.installed import TorchBuild

#: Operations of dense bf16 a clock and compute unit, by architecture (AMD's CDNA 1 to 4 white
#: papers; peaks of MI100, MI210, MI300X and MI355X follow to 1 %).
BF16_OPERATIONS = {"gfx908": 512, "gfx90a": 1024, "gfx942": 2048, "gfx950": 4096}
#: Of an architecture that is not listed, such as a graphics card's (RDNA 3).
USUAL_OPERATIONS = 512
#: Memory bandwidth where amdsmi tells none (before release 6.4): MI300X's data sheet.
USUAL_BPS = 5.3e12
#: Idle power as a share of the cap, and bandwidth of a link: guesses, named in `sources`.
IDLE_SHARE, LINK_BPS = 0.2, 64e9
CLOCKS_ALONE = "the clocks and power caps of AMD's GPUs are left alone: no guard restores them"


class Amd(Platform):
    """The visible GPUs."""

    PROTOCOL = 1
    always_listed = False
    accelerator = "cuda"  # as torch and DeepSpeed call ROCm

    def meters(self, cluster: Cluster) -> Mapping[str, Callable[[], Meter]]:
        return {"amdsmi": partial(AmdMeter, self.environ)}

    def open_governor(self, cluster: Cluster, meter: MeterInfo | None = None) -> Governor:
        return FixedGovernor(CLOCKS_ALONE)

    def clocks(self) -> ClockFacts:
        return ClockFacts(False, CLOCKS_ALONE, CLOCKS_ALONE)

    def _each(self, question: Callable[[AmdGpu], Any]) -> list[Any]:
        with contextlib.suppress(InputError, MeterError), opened(self.environ) as gpus:
            return [question(gpu) for gpu in gpus]
        return []

    def busy(self, own: Collection[int] = ()) -> tuple[str, ...]:
        def others(gpu: AmdGpu) -> str:
            running = gpu.query([], "gpu_process_list")
            holding = [each["pid"] for each in running if each["memory_usage"]["vram_mem"]]
            pids = sorted(set(holding) - set(own))
            noun = "processes" if len(pids) > 1 else "process"
            return f"GPU {gpu.index} is used by {noun} {', '.join(map(str, pids))}" * bool(pids)

        return tuple(filter(None, self._each(others)))

    def memory_held(self, pids: Collection[int]) -> int | None:
        def held(gpu: AmdGpu) -> int:
            running = gpu.query([], "gpu_process_list")
            return sum(each["memory_usage"]["vram_mem"] for each in running if each["pid"] in pids)

        return max(self._each(held), default=0) or None

    def faults(self) -> Counters:
        def counters(gpu: AmdGpu) -> tuple[str, dict[str, int]]:
            reply = gpu.query({}, "gpu_total_ecc_count").get("uncorrectable_count")
            return gpu.uuid, {} if reply is None else {"uncorrectable memory errors": int(reply)}

        return dict(self._each(counters))

    def memory_nodes(self) -> list[int] | None:
        def node(gpu: AmdGpu) -> int:
            try:
                reply = int(gpu.smi.amdsmi_topo_get_numa_node_number(gpu.handle))
            except gpu.smi.AmdSmiException:
                return 0
            return reply if reply < 2**31 else 0

        return self._each(node) or None

    def why_not_torch(self, build: TorchBuild) -> str:
        if build.hip:
            return ""
        return (
            f"torch {build.version} is built without ROCm; install a build with ROCm "
            "(https://pytorch.org/get-started/locally)"
        )

    def why_few_cores(self, cores: float, ranks: int, *each: float) -> str:
        return why_few_cores(cores, ranks, *each)

    def rank_environment(
        self, env: Mapping[str, str], ranks: int, own: int, interface: str
    ) -> Mapping[str, str]:
        share = max(1, usable_cores() // ranks)
        return {"OMP_NUM_THREADS": str(min(share, own or share))}

    def facts(self) -> DeviceFacts:
        try:
            with opened(self.environ) as gpus:
                found = tuple(GpuFacts(g.index, g.uuid, g.name, g.memory_bytes) for g in gpus)
                reply = gpus[0].query({}, "gpu_driver_info") if gpus else {}
        except NoDriver as error:
            return DeviceFacts(why_none=f"none: {error}")
        except (InputError, MeterError) as error:
            return DeviceFacts(why_none=str(error), broken=True)
        return DeviceFacts(found, str(reply.get("driver_version", "")))

    def cluster(self, host: Host) -> Cluster | None:
        try:
            with opened(self.environ) as gpus:
                return _cluster(gpus, host) if gpus else None
        except NoDriver:
            return None
        except MeterError as error:
            raise InputError(f"the GPUs of this machine cannot be asked: {error}") from error


def _cluster(gpus: list[AmdGpu], host: Host) -> Cluster:
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        raise InputError(f"this machine has different GPUs: {', '.join(names)}; show one kind only")
    first = gpus[0]
    if (mode := first.query("SPX", "gpu_compute_partition")) not in ("SPX", "N/A", ""):
        raise InputError(
            f"GPU {first.index} is divided (compute partition {mode}), and its parts tell one "
            "power together; set SPX"
        )
    asic, vram = first.get("gpu_asic_info"), first.query({}, "gpu_vram_info")
    clock_MHz = int(first.get("clock_info", first.smi.AmdSmiClkType.GFX)["max_clk"])
    cap = first.get("power_cap_info")
    cap_W = (cap.get("default_power_cap") or cap["power_cap"]) / 1e6
    units = as_number(asic["num_compute_units"])
    if not units or not cap_W:
        raise InputError(
            f"GPU {first.index} ({first.name}) tells no compute units, or no power cap"
        )
    each = BF16_OPERATIONS.get(str(asic["target_graphics_version"]), USUAL_OPERATIONS)
    bandwidth_GBps = as_number(vram.get("vram_max_bandwidth")) or 0.0
    device = Device(
        name=first.name,
        type="rocm",
        memory_bytes=first.memory_bytes,
        peak_flops=units * each * clock_MHz * 1e6,
        memory_bandwidth_Bps=1e9 * bandwidth_GBps or USUAL_BPS,
        idle_W=IDLE_SHARE * cap_W,
        max_W=cap_W,
        default_clock_MHz=clock_MHz,
        sources=(
            "memory, power cap, highest clock: amdsmi",
            f"peak_flops: {units:.0f} compute units x {each} operations x the highest clock",
            "memory_bandwidth_Bps: amdsmi"
            if bandwidth_GBps
            else "memory_bandwidth_Bps: a guess, MI300X's",
            f"idle_W: a guess, {IDLE_SHARE:.0%} of the cap",
        ),
    )
    return Cluster(
        name="this-machine",
        device=device,
        devices_per_node=len(gpus),
        link_Bps=LINK_BPS,
        host_link_Bps=LINK_BPS,
        host_memory_bytes=host.memory_bytes,
        sources=("detected: amdsmi; link_Bps, host_link_Bps: guesses",),
    )
