"""Conditions of real fleets on the twin node: what doctor says of each, and what a study does.

Numbers are those of the third audit's table, and from 45 on those of later findings. Each condition
is a node, and a check of what a user meets on it; those that need ranks, Slurm or other vendors are
left to tests.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pynvml

from benchmarks.twin.energy import window_error
from benchmarks.twin.smoothing import GPU, window_of
from tests.twin import TwinGpu, TwinNode, joined_node
from tests.workload.node.platforms import fleet_checks as checks
from tuner.search_spaces.errors import InputError
from tuner.workload.node.facts import NodeFacts, inspect_node
from tuner.workload.node.meters.base import MeterError
from tuner.workload.node.meters.gpus import cuda_numbering, opened_gpus, time_alone
from tuner.workload.node.meters.nvml import NvmlMeter
from tuner.workload.node.platforms import detect_cluster, platform_of
from tuner.workload.node.platforms.nvidia import Nvidia
from tuner.workload.scripts.installed import TorchBuild

A100, OTHER = TwinGpu(), TwinGpu(name="NVIDIA H200")
VGPU = TwinGpu(has_counter=False, gpu_scope=0, has_usage=False, lockable=False)
#: A torch that can use the twin's GPUs, so that what else doctor misses is told by the node.
CUDA_BUILD = TorchBuild("2.13.0", "13.0", "sm_80 sm_90 sm_100 sm_120")


@dataclass(frozen=True)
class Condition:
    """A node in a condition.

    Attributes:
        number: in the audit's table.
        prepare: changes the node after it was made.
        refused: part of the sentence by which a study refuses it; empty if it does not.
        check: returns what is wrong besides, given the node.
    """

    number: int
    title: str
    gpus: tuple[TwinGpu, ...] = (A100, A100)
    prepare: Callable[[TwinNode], Any] | None = None
    refused: str = ""
    check: Callable[[TwinNode], str] | None = None
    options: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def _joined(condition: Condition) -> Iterator[TwinNode]:
    with joined_node(*condition.gpus, **condition.options) as node:
        if condition.prepare is not None:
            condition.prepare(node)
        with patch("tuner.workload.node.platforms.nvidia.time.sleep", node.sleep):
            yield node


def study_refusal() -> str:
    """Return the sentence by which every study on this node is refused; "" if none is."""
    try:
        cluster = detect_cluster(environ={})
        platform = platform_of(cluster)
        platform.open_meter(cluster).close()
        return "; ".join(platform.busy())
    except (InputError, MeterError) as error:
        return str(error)


def doctor() -> NodeFacts:
    """Return what doctor finds, with a torch that can use the GPUs and enough cores."""
    with (
        patch("tuner.workload.node.facts.installed_torch", lambda: CUDA_BUILD),
        patch("tuner.workload.node.facts.shared_memory_bytes", lambda: 2**36),
    ):
        return inspect_node(
            environ={}, affinity=range(64), find_program=lambda name: f"/usr/bin/{name}"
        )


def _time_alone(_: TwinNode) -> str:
    with time_alone(True):
        cluster = detect_cluster()
        with contextlib.closing(platform_of(cluster).open_meter(cluster)) as meter:
            told = meter.info.has_energy
    return "a study of time alone is told energy" if told else ""


def _windows_of(**change: Any) -> Callable[[TwinNode], str]:
    def check(_: TwinNode) -> str:
        found = window_of(replace(GPU, smoothing=-1, **change))
        right = abs(found.error) < 0.01
        return "" if right else f"a window is off by {100 * found.error:+.1f} %"

    return check


def _ramps(_: TwinNode) -> str:
    found = window_of(replace(GPU, ramp_W_per_s=200))
    return "" if abs(found.error) < 0.01 else f"a window is off by {100 * found.error:+.1f} %"


def _numbering(environ: dict[str, str], seen: list[int]) -> Callable[[TwinNode], str]:
    def check(_: TwinNode) -> str:
        with opened_gpus(environ) as (_nvml, gpus):
            found = [gpu.index for gpu in gpus]
        return "" if found == seen else f"{environ} is {found}"

    return check


def _named_by_uuid(_: TwinNode) -> str:
    names = cuda_numbering({}).get("CUDA_VISIBLE_DEVICES", "")
    return "" if names.count("GPU-") == 3 else f"ranks get {names!r}"


def _note(part: str) -> Callable[[TwinNode], str]:
    def check(_: TwinNode) -> str:
        notes = doctor().notes
        return "" if any(part in note for note in notes) else f"doctor notes {notes}"

    return check


def _clocks(control: bool) -> Callable[[TwinNode], str]:
    def check(node: TwinNode) -> str:
        if node.log:
            return f"looking has set {node.log}"
        found = detect_cluster(environ={}).clock_control
        return "" if found == control else f"clocks can{'' if found else 'not'} be set"

    return check


def _refuses_the_lock_only(_: TwinNode) -> str:
    from tuner.search_spaces.configuration import Settings
    from tuner.workload.node.clocks.base import UnsupportedKnob
    from tuner.workload.node.clocks.governor import NvmlGovernor

    with contextlib.closing(NvmlGovernor(environ={}, guarded=False)) as governor:
        try:
            governor.apply(Settings(clock_MHz=900))
            return "a lock that the GPU refuses was taken"
        except UnsupportedKnob:
            governor.apply(Settings(power_limit_W=300))
            return ""


def _leaves_the_knob(code: int) -> Callable[[TwinNode], str]:
    def check(node: TwinNode) -> str:
        node.fail("nvmlDeviceSetGpuLockedClocks", code)
        return _refuses_the_lock_only(node)

    return check


def _held_beside_files(node: TwinNode) -> None:
    node.set(0, used_bytes=10 * GIB)
    node.cache_files(0, 8 * GIB)


def _no_library(node: TwinNode) -> str:
    node.fail("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    with tempfile.TemporaryDirectory() as dev:
        Path(dev, "nvidia0").touch()
        try:
            detect_cluster(dev=dev, environ={})
        except InputError as error:
            named = "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in str(error)
            return "" if named else f"a study says {error}"
    return "the node is taken for one of cores"


def _keeps_a_limit(node: TwinNode) -> str:
    from tuner.search_spaces.configuration import Settings
    from tuner.workload.node.clocks.governor import NvmlGovernor

    with contextlib.closing(NvmlGovernor(environ={}, guarded=False)) as governor:
        governor.apply(Settings(power_limit_W=300))
        node.set(0, limit_W=250.0)
        told = governor.foreign()
    stands = node.limit_W(0), node.limit_W(1)
    if stands != (250.0, 400.0):
        return f"limits stand at {stands}"
    return "" if len(told) == 1 else f"a window is flagged by {told}"


def _power(_: TwinNode) -> str:
    device = detect_cluster(environ={}).device
    return "" if 0 < device.idle_W < device.max_W else f"max_W is {device.max_W}"


def _meter_survives(node: TwinNode) -> str:
    meter = NvmlMeter(environ={}, clock=node.clock, sleep=node.sleep)
    with contextlib.closing(meter):
        for _ in range(30):
            node.sleep(0.1)
            meter.read()
    return ""


def _meter_breaks(event: Callable[[TwinNode], Any]) -> Callable[[TwinNode], str]:
    def check(node: TwinNode) -> str:
        meter = NvmlMeter(environ={}, clock=node.clock, sleep=node.sleep)
        with contextlib.closing(meter):
            node.set(load=1.0)
            node.sleep(5.0)
            meter.read()
            event(node)
            try:
                for _ in range(40):
                    node.sleep(0.1)
                    meter.read()
            except MeterError:
                return ""
        return "joules were lost and nothing says so"

    return check


def _calls_of(seconds: float) -> Callable[[TwinNode], str]:
    def check(_: TwinNode) -> str:
        errors = [abs(window_error(seed).error) for seed in range(5) if seconds]
        return "" if max(errors, default=0) < 0.02 else f"windows are off by {max(errors):.1%}"

    return check


def _remembers_others(node: TwinNode) -> str:
    node.processes(0, compute=[(4242, 2**30)])
    return "" if "4242" in "; ".join(Nvidia({}).busy()) else "another process is not seen"


GIB = 2**30
GH200 = TwinGpu(name="NVIDIA GH200 480GB", memory_bytes=96 * GIB, compute=(9, 0), c2c=True,
                numa_node=1)  # fmt: skip
SLEEPER = replace(A100, persistence=False, start_s=1.5, start_busy_s=1.0)
LAPTOP = replace(A100, name="NVIDIA GeForce RTX 4090 Laptop GPU", tells_limit=False)
CONDITIONS = (
    Condition(1, "driver updated, not reloaded", prepare=lambda n: n.fail("nvmlInit", 18),
              refused="reload the driver"),
    Condition(2, "a container that has lost its GPUs", prepare=lambda n: n.fail("nvmlInit", 999),
              refused="start it again"),
    Condition(4, "no energy counter", (replace(A100, has_counter=False),),
              check=_windows_of(has_counter=False)),
    Condition(5, "neither energy nor power", (VGPU, VGPU), refused="--minimize time",
              check=_time_alone),
    Condition(6, "a counter every 20 ms", check=_windows_of(counter_period_s=0.02)),
    Condition(6, "a counter every 500 ms", check=_windows_of(counter_period_s=0.5)),
    Condition(8, "sensors filtered over 0.5 s", check=_windows_of(filter_s=0.5)),
    Condition(10, "a counter of the module", check=lambda _: checks.superchip()),
    Condition(11, "slow NVML calls", check=_calls_of(0.02)),
    Condition(13, "power smoothing", (replace(A100, smoothing=1),) * 2, check=_ramps),
    Condition(14, "one GPU in another power profile",
              (replace(A100, power_profiles=2), replace(A100, power_profiles=0)),
              refused="different GPUs"),
    Condition(15, "no fabric manager", (replace(A100, fabric_state=1),) * 2, refused="fabric"),
    Condition(15, "a fabric that registers GPUs", (replace(A100, fabric_state=2),) * 2,
              refused="still being registered"),
    Condition(16, "CUDA_VISIBLE_DEVICES by number", (A100,) * 4,
              check=_numbering({"CUDA_VISIBLE_DEVICES": " 3 , 2"}, [3, 2])),
    Condition(16, "CUDA_VISIBLE_DEVICES by prefix", (A100,) * 4,
              check=_numbering({"CUDA_VISIBLE_DEVICES": "GPU-00000001"}, [1])),
    Condition(16, "CUDA_VISIBLE_DEVICES that ends", (A100,) * 4,
              check=_numbering({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, [0])),
    Condition(17, "different GPUs", (A100, OTHER), refused="different GPUs"),
    Condition(18, "MIG on without a slice", (replace(A100, mig=-1),), refused="has MIG on"),
    Condition(18, "a MIG slice", (replace(A100, mig=1),), refused="--minimize time"),
    Condition(18, "two MIG slices", (replace(A100, mig=2),), refused="name one"),
    Condition(19, "memory not told", (TwinGpu(name="NVIDIA GB10", tells_memory=False),)),
    Condition(20, "no limit told", (LAPTOP,), check=_power),
    Condition(21, "setters need root", options={"root": False}, check=_clocks(False)),
    Condition(22, "setters listed and refused", (replace(A100, lockable=False),) * 2,
              check=_refuses_the_lock_only),
    Condition(22, "setters not listed",
              (replace(A100, lists_clocks=False, tells_limit=False),) * 2, check=_clocks(False)),
    Condition(23, "a lock accepted, its clock not reached",
              check=lambda _: checks.assumed_clocks()),
    Condition(26, "a limit enforced below the limit", (replace(A100, enforced_limit_W=300.0),),
              check=_note("is held to 300 W")),
    Condition(27, "persistence off", (replace(A100, persistence=False),)),
    Condition(30, "an ECC error during a probe", check=lambda _: checks.damage()),
    Condition(31, "a remap pending", prepare=lambda n: n.ecc_error(1),
              check=_note("remapped at its next reset")),
    Condition(31, "a reset pending", (A100, replace(A100, recovery_action=1)),
              refused="waits for a reset"),
    Condition(32, "a GPU lost in a probe", check=_meter_breaks(lambda n: n.set(1, lost=1))),
    Condition(33, "a GPU lost before, no variable", (A100,) * 4,
              prepare=lambda n: n.set(2, lost=1), check=_named_by_uuid),
    Condition(34, "a counter that wraps",
              (replace(A100, counter_modulus_mJ=2**32, counter_start_mJ=2**32 - 100_000),),
              check=_meter_survives),
    Condition(34, "a driver reloaded", check=_meter_breaks(lambda n: n.reset_counter(1))),
    Condition(34, "a counter that stands", check=_meter_breaks(lambda n: n.stall(1))),
    Condition(35, "one failing call", check=_meter_survives,
              prepare=lambda n: n.fail("nvmlDeviceGetTotalEnergyConsumption", 999, first=9,
                                       times=1)),
    Condition(36, "another user's process", check=_remembers_others),
    Condition(36, "another user's process, before", refused="is used by process 4242",
              prepare=lambda n: n.processes(0, compute=[(4242, 2**30)])),
    Condition(37, "a neighbour by time slices", refused="cannot be seen from here",
              prepare=lambda n: n.set(0, used_bytes=3 * 2**30, load=0.6)),
    Condition(39, "a GPU hidden by a control group", (A100,) * 3,
              prepare=lambda n: n.set(1, open_error=pynvml.NVML_ERROR_NO_PERMISSION),
              check=_numbering({}, [0, 2])),
    Condition(45, "cached files in a superchip's memory", (GH200,),
              prepare=lambda n: n.cache_files(0, 8 * GIB), check=_note("hold cached files")),
    Condition(45, "a neighbour beside cached files", (GH200,), refused="10.0 GiB of GPU 0's",
              prepare=_held_beside_files),
    Condition(46, "a limit that another sets", check=_keeps_a_limit),
    Condition(47, "a clock that the driver does not permit",
              check=_leaves_the_knob(pynvml.NVML_ERROR_NO_PERMISSION)),
    Condition(47, "a setter that never works", check=_leaves_the_knob(pynvml.NVML_ERROR_UNKNOWN)),
    Condition(48, "a GPU that its first client starts", (SLEEPER,) * 2),
    Condition(48, "a neighbour on a GPU that starts", (SLEEPER,) * 2,
              prepare=lambda n: n.set(1, load=0.3), refused="GPU 1 works"),
    Condition(49, "no library of NVML in a container", check=_no_library),
    Condition(50, "a fabric that ended with an error",
              (replace(A100, fabric_state=3, fabric_status=999),) * 2,
              check=_note("ended with an error")),
    Condition(51, "compute mode prohibited", (A100, replace(A100, compute_mode=2)),
              refused="compute mode prohibited"),
    Condition(51, "compute mode exclusive", (replace(A100, compute_mode=3),) * 2,
              check=_note("one process at a time")),
)  # fmt: skip


def wrong(condition: Condition) -> tuple[str, bool]:
    """Return what is wrong in a condition, and whether doctor contradicts a study."""
    with _joined(condition) as node:
        refusal, facts = study_refusal(), doctor()
        # Permission to set clocks is missing to a user, and a study goes on without.
        reasons = [thing.subject for thing in facts.missing if "permission" not in thing.subject]
        contradicts = bool(refusal) != bool(reasons)
        found = ""
        if bool(refusal) != bool(condition.refused) or condition.refused not in refusal:
            found = f"a study says {refusal!r}"
        elif condition.check is not None:
            found = condition.check(node)
        if contradicts:
            found += f" doctor misses {reasons}, and a study says {refusal!r}"
        return found.strip(), contradicts
