"""One stateful fake of NVML: GPUs that draw power, obey clocks and limits, and fail when told.

A `FakeNVML` stands where the pynvml module stands: same functions, units, constants and error
classes (the real ones), so `except pynvml.NVMLError_NoPermission` works. Power follows
idle + k V(f)^2 f u, with the clock f lowered by a lock, the power limit or heat, and the load u
piecewise constant; every energy is therefore an exact sum, and `true_energy_J` tells it. With
`state_file` the state lives in a file under a lock, so the GPUs outlive a killed process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

STATE_FILE = "JOULEFRONT_FAKE_NVML"  # where `from_environment` finds the state

Load = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class FakeGpu:
    """Specification of one fake GPU; an A100 by default.

    Attributes:
        load: (seconds since the fake began, utilisation 0 to 1), piecewise constant.
        load_period_s: the load repeats with this period; None: the last value stays.
        peak_W: draw at the highest clock and full load (may be above the limit: it is then capped).
        counter_period_s: interval between updates of the energy counter.
        counter_start_mJ: what the counter holds when the fake begins.
        counter_modulus_mJ: the counter wraps here; None: it does not.
        averaged_s: span over which nvmlDeviceGetPowerUsage averages.
        ignores_lock: accepts a clock lock, and does not deliver it.
        limit_settable: False: power limits are not supported.
        limit_ignored: power limits are accepted and do not act.
        slow_memory_MHz: lower memory clocks that it offers beside `memory_clock_MHz`.
        memory_share: share of its power that is the memory's, told separately; 0: it is not told.
        module_W: what its superchip module draws besides it; 0: it sits on no module.
        module_counter: the energy counter is the module's (as on a GH200).
        lockable: False: clocks cannot be locked.
        application_free: anybody may set application clocks (NVML's API restriction is lifted).
    """

    name: str = "NVIDIA A100-SXM4-80GB"
    uuid: str = ""
    memory_bytes: int = 80 * 2**30
    idle_W: float = 60.0
    peak_W: float = 380.0
    limit_W: float = 400.0
    min_limit_W: float = 100.0
    max_limit_W: float = 400.0
    clocks_MHz: tuple[int, ...] = tuple(range(210, 1411, 15))
    memory_clock_MHz: int = 1593
    load: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    load_period_s: float | None = None
    has_counter: bool = True
    counter_period_s: float = 0.1
    counter_start_mJ: int = 987_654_321
    counter_modulus_mJ: int | None = None
    instant_power: bool = True
    has_power: bool = True
    averaged_s: float = 1.0
    mig: bool = False
    ignores_lock: bool = False
    limit_settable: bool = True
    limit_ignored: bool = False
    slow_memory_MHz: tuple[int, ...] = ()
    memory_share: float = 0.0
    module_W: float = 0.0
    module_counter: bool = False
    lockable: bool = True
    application_free: bool = False
    cores: int = 6912
    bus_bits: int = 5120
    compute: tuple[int, int] = (8, 0)


@dataclass(frozen=True)
class _Handle:
    index: int


def _voltage(share: float) -> float:
    """Relative voltage at a share of the top clock: flat below a knee, then rising."""
    return max(0.7, 0.4 + 0.6 * share)


class _Gpu:
    """One GPU's physics over its history of events (time, what, value)."""

    def __init__(self, spec: FakeGpu, epoch_s: float, events: list[list[Any]]) -> None:
        self.spec, self.epoch_s, self.events = spec, epoch_s, events

    def at(self, what: str, now_s: float, default: Any = None) -> Any:
        value = default
        for time_s, name, new in self.events:
            if name == what and time_s <= now_s:
                value = new
        return value

    def when(self, what: str, now_s: float) -> float | None:
        times = [time_s for time_s, name, _ in self.events if name == what and time_s <= now_s]
        return times[-1] if times else None

    def utilisation(self, now_s: float) -> float:
        forced = self.at("load", now_s)
        if forced is not None:
            return forced
        since_s, spec = now_s - self.epoch_s, self.spec
        if spec.load_period_s:
            since_s %= spec.load_period_s
        value = 0.0
        for start_s, share in spec.load:
            # Breakpoints are computed as epoch + start; do not miss one by its rounding.
            if start_s <= since_s + 1e-9:
                value = share
        return value

    def memory_MHz(self, now_s: float) -> int:
        """Return the delivered memory clock: the highest that a lock allows."""
        spec, lock = self.spec, self.at("memory_lock", now_s)
        offered = sorted((*spec.slow_memory_MHz, spec.memory_clock_MHz))
        if lock is None or spec.ignores_lock:
            return offered[-1]
        return max([clock for clock in offered if clock <= lock[1]], default=offered[0])

    def _power_at(self, clock: int, load: float, now_s: float) -> float:
        share = clock / self.spec.clocks_MHz[-1]
        memory = self.memory_MHz(now_s) / self.spec.memory_clock_MHz
        dynamic = (self.spec.peak_W - self.spec.idle_W) * _voltage(share) ** 2 * share
        return self.spec.idle_W + dynamic * (0.75 + 0.25 * memory) * load

    def state(self, now_s: float) -> tuple[int, float, int]:
        """(delivered clock MHz, power W, reasons for a lower clock as NVML's bits)."""
        spec, load = self.spec, self.utilisation(now_s)
        clocks, reasons = spec.clocks_MHz, 0
        lock = None if spec.ignores_lock else self.at("lock", now_s)
        application = None if spec.ignores_lock else self.at("application", now_s)
        wanted = clocks[-1] if load > 0 else clocks[0]
        if application is not None and application[1] < wanted:
            wanted = application[1]
            reasons |= pynvml.nvmlClocksEventReasonApplicationsClocksSetting
        if lock is not None:
            wanted = min(max(wanted, lock[0]), lock[1])
            if lock[1] < clocks[-1]:
                reasons |= pynvml.nvmlClocksEventReasonApplicationsClocksSetting
        heat = self.at("heat", now_s)
        if heat is not None and heat < wanted:
            wanted, reasons = heat, reasons | pynvml.nvmlClocksEventReasonSwThermalSlowdown
        clock = max([c for c in clocks if c <= wanted], default=clocks[0])
        limit = self.at("limit_W", now_s, spec.limit_W)
        if spec.limit_ignored:
            limit = math.inf
        fits = [c for c in clocks if c <= clock and self._power_at(c, load, now_s) <= limit]
        capped = max(fits, default=clocks[0])
        if capped < clock:
            clock, reasons = capped, reasons | pynvml.nvmlClocksEventReasonSwPowerCap
        if load == 0:
            reasons |= pynvml.nvmlClocksEventReasonGpuIdle
        return clock, self._power_at(clock, load, now_s), reasons

    def energy_J(self, start_s: float, end_s: float) -> float:
        start_s = max(start_s, self.epoch_s)
        if end_s <= start_s:
            return 0.0
        edges = {start_s, end_s} | {event[0] for event in self.events}
        period_s = self.spec.load_period_s
        first = int((start_s - self.epoch_s) // period_s) if period_s else 0
        last = int((end_s - self.epoch_s) // period_s) if period_s else 0
        for turn in range(first, last + 1):
            base_s = self.epoch_s + turn * (period_s or 0.0)
            edges |= {base_s + load_s for load_s, _ in self.spec.load}
        inside = sorted(edge for edge in edges if start_s <= edge <= end_s)
        return sum(self.state(a + (b - a) / 2)[1] * (b - a) for a, b in pairwise(inside))

    def counter_mJ(self, now_s: float) -> int:
        stalled_s = self.when("stall", now_s)
        now_s = now_s if stalled_s is None else stalled_s
        since_s, start = self.epoch_s, self.spec.counter_start_mJ
        if (reset_s := self.when("reset", now_s)) is not None:
            since_s, start = reset_s, 0
        period_s = self.spec.counter_period_s
        ticks = int((now_s - self.epoch_s) / period_s + 1e-6)
        updated_s = self.epoch_s + ticks * period_s
        energy_J = self.energy_J(since_s, updated_s)
        if self.spec.module_counter:
            energy_J += self.spec.module_W * max(0.0, updated_s - since_s)
        value = start + int(1000 * energy_J)
        modulus = self.spec.counter_modulus_mJ
        return value % modulus if modulus else value


class FakeNVML:
    """Stands where the pynvml module stands.

    Args:
        gpus: how the GPUs are made; ignored where `state_file` already holds a machine.
        clock: seconds; `time.monotonic` agrees between processes.
        root: whether setters are permitted.
        state_file: keeps the machine in this file, for several processes and after their death.
    """

    def __init__(
        self,
        gpus: Sequence[FakeGpu] = (FakeGpu(),),
        *,
        clock: Callable[[], float] = time.monotonic,
        root: bool = True,
        state_file: str | Path | None = None,
    ) -> None:
        self._clock = clock
        self._thread_lock = threading.RLock()
        self._path = Path(state_file) if state_file is not None else None
        self._inits = 0
        fresh: dict[str, Any] = {
            "epoch_s": clock(),
            "root": root,
            "gpus": [
                asdict(gpu) | {"uuid": gpu.uuid or f"GPU-{i:08x}-aaaa-bbbb-cccc-0123456789ab"}
                for i, gpu in enumerate(gpus)
            ],
            "events": [[] for _ in gpus],
            "faults": [],
            "calls": {},
            "log": [],
        }
        self._memory = json.loads(json.dumps(fresh))
        if self._path is not None and not self._path.exists():
            self._write(json.dumps(fresh))

    def __getattr__(self, name: str) -> Any:
        """Return pynvml's constants and error classes, and functions that this class has."""
        value = getattr(pynvml, name)
        if callable(value) and not (isinstance(value, type) and issubclass(value, Exception)):
            raise AttributeError(f"the fake NVML has no {name}")
        return value

    # ---- the state, shared under a lock

    def _write(self, text: str) -> None:
        assert self._path is not None
        half = self._path.with_name(f"{self._path.name}.{os.getpid()}.half")
        half.write_text(text)
        os.replace(half, self._path)  # a killed writer leaves the old state whole

    @contextlib.contextmanager
    def _state(self) -> Iterator[dict[str, Any]]:
        with self._thread_lock:
            if self._path is None:
                yield self._memory
                return
            with open(f"{self._path}.lock", "a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                text = self._path.read_text()
                state = json.loads(text)
                try:
                    yield state
                finally:
                    if (changed := json.dumps(state)) != text:
                        self._write(changed)

    @staticmethod
    def _gpu(state: dict[str, Any], index: int) -> _Gpu:
        data = state["gpus"][index]
        lists = {k: tuple(v) for k, v in data.items() if isinstance(v, list)}
        return _Gpu(FakeGpu(**(data | lists)), state["epoch_s"], state["events"][index])

    @contextlib.contextmanager
    def _call(
        self,
        name: str,
        handle: _Handle | None = None,
        *,
        sets: Sequence[Any] | None = None,
        free: str = "",
    ) -> Iterator[Any]:
        """One NVML call: checks, scripted faults, then the GPU (or the whole state)."""
        with self._state() as state:
            if not self._inits:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
            index = handle.index if handle else None
            self._fault(state, name, index)
            if index is None:
                yield state
                return
            gpu = self._gpu(state, index)
            if gpu.at("lost", self._clock()):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            permitted = state["root"] or (free and getattr(gpu.spec, free))
            if sets is not None and not permitted:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
            yield gpu
            if sets is not None:
                state["log"].append([self._clock(), name, index, list(sets)])

    @staticmethod
    def _fault(state: dict[str, Any], name: str, index: int | None) -> None:
        faults = [f for f in state["faults"] if f["name"] == name and f["gpu"] in (None, index)]
        if not faults:
            return
        calls = state["calls"][name] = state["calls"].get(name, 0) + 1
        for fault in faults:
            if fault["first"] <= calls < fault["first"] + fault["times"]:
                raise pynvml.NVMLError(fault["code"])

    # ---- what a test does to the machine

    def fail(
        self, name: str, code: int, *, first: int = 1, times: int = 10**9, gpu: int | None = None
    ) -> None:
        """Let the calls of `name`, counted from now, fail from the `first` on, `times` times."""
        with self._state() as state:
            state["calls"][name] = 0
            fault = {"name": name, "code": code, "first": first, "times": times, "gpu": gpu}
            state["faults"].append(fault)

    def event(self, what: str, value: Any = True, *, gpu: int = 0) -> None:
        """From now on: "load" (share or None), "heat" (clock cap MHz or None), "lost", "stall" or
        "reset" (of the energy counter), "lock" ([low, high] MHz or None), "limit_W", "application"
        ([memory, SM] MHz or None), "memory_lock"."""
        with self._state() as state:
            state["events"][gpu].append([self._clock(), what, value])

    def permit(self, root: bool) -> None:
        with self._state() as state:
            state["root"] = root

    def true_energy_J(self, start_s: float, end_s: float) -> float:
        """Exact energy of all GPUs between two times of the clock."""
        with self._state() as state:
            gpus = [self._gpu(state, i) for i in range(len(state["gpus"]))]
            return sum(gpu.energy_J(start_s, end_s) for gpu in gpus)

    def locked_MHz(self, gpu: int = 0) -> tuple[int, int] | None:
        with self._state() as state:
            lock = self._gpu(state, gpu).at("lock", self._clock())
            return None if lock is None else (lock[0], lock[1])

    def memory_locked_MHz(self, gpu: int = 0) -> tuple[int, int] | None:
        with self._state() as state:
            lock = self._gpu(state, gpu).at("memory_lock", self._clock())
            return None if lock is None else (lock[0], lock[1])

    def application_MHz(self, gpu: int = 0) -> tuple[int, int] | None:
        """(memory, SM) application clocks that were set."""
        with self._state() as state:
            clocks = self._gpu(state, gpu).at("application", self._clock())
            return None if clocks is None else (clocks[0], clocks[1])

    def limit_W(self, gpu: int = 0) -> float:
        with self._state() as state:
            found = self._gpu(state, gpu)
            return found.at("limit_W", self._clock(), found.spec.limit_W)

    @property
    def log(self) -> list[tuple[str, int, tuple[Any, ...]]]:
        """Every setter that went through: (function, GPU, arguments)."""
        with self._state() as state:
            return [(name, gpu, tuple(sets)) for _, name, gpu, sets in state["log"]]

    # ---- NVML

    def nvmlInit(self) -> None:
        with self._state() as state:
            self._fault(state, "nvmlInit", None)
            self._inits += 1

    def nvmlShutdown(self) -> None:
        with self._call("nvmlShutdown"):
            self._inits -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        with self._call("nvmlSystemGetDriverVersion"):
            return "570.00"

    def nvmlDeviceGetCount(self) -> int:
        with self._call("nvmlDeviceGetCount") as state:
            return len(state["gpus"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> _Handle:
        with self._call("nvmlDeviceGetHandleByIndex") as state:
            if not 0 <= index < len(state["gpus"]):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            return _Handle(index)

    def nvmlDeviceGetHandleByUUID(self, uuid: str | bytes) -> _Handle:
        text = uuid.decode() if isinstance(uuid, bytes) else uuid
        with self._call("nvmlDeviceGetHandleByUUID") as state:
            for index, gpu in enumerate(state["gpus"]):
                if gpu["uuid"] == text:
                    return _Handle(index)
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetHandleByPciBusId(self, address: str | bytes) -> _Handle:
        """Find GPU n at bus n + 1, by an address as `lspci -D` writes it."""
        text = address.decode() if isinstance(address, bytes) else address
        with self._call("nvmlDeviceGetHandleByPciBusId") as state:
            for index in range(len(state["gpus"])):
                if text == f"0000:{index + 1:02x}:00.0":
                    return _Handle(index)
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: _Handle) -> str:
        with self._call("nvmlDeviceGetUUID", handle) as gpu:
            return gpu.spec.uuid

    def nvmlDeviceGetName(self, handle: _Handle) -> str:
        with self._call("nvmlDeviceGetName", handle) as gpu:
            return gpu.spec.name

    def nvmlDeviceGetMemoryInfo(self, handle: _Handle) -> SimpleNamespace:
        with self._call("nvmlDeviceGetMemoryInfo", handle) as gpu:
            total, used = gpu.spec.memory_bytes, 500 * 2**20
            return SimpleNamespace(total=total, used=used, free=total - used)

    def nvmlDeviceGetMigMode(self, handle: _Handle) -> list[int]:
        with self._call("nvmlDeviceGetMigMode", handle) as gpu:
            return [int(gpu.spec.mig), int(gpu.spec.mig)]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: _Handle) -> list[Any]:
        with self._call("nvmlDeviceGetComputeRunningProcesses", handle):
            return []

    def nvmlDeviceGetNumGpuCores(self, handle: _Handle) -> int:
        with self._call("nvmlDeviceGetNumGpuCores", handle) as gpu:
            return gpu.spec.cores

    def nvmlDeviceGetMemoryBusWidth(self, handle: _Handle) -> int:
        with self._call("nvmlDeviceGetMemoryBusWidth", handle) as gpu:
            return gpu.spec.bus_bits

    def nvmlDeviceGetCudaComputeCapability(self, handle: _Handle) -> list[int]:
        with self._call("nvmlDeviceGetCudaComputeCapability", handle) as gpu:
            return list(gpu.spec.compute)

    def nvmlDeviceGetArchitecture(self, handle: _Handle) -> int:
        with self._call("nvmlDeviceGetArchitecture", handle) as gpu:
            kinds = {6: 4, 7: 5, 8: 7, 9: 9}  # NVML_DEVICE_ARCH_PASCAL, VOLTA, AMPERE, HOPPER
            return kinds.get(gpu.spec.compute[0], pynvml.NVML_DEVICE_ARCH_UNKNOWN)

    def nvmlDeviceGetC2cModeInfoV(self, handle: _Handle) -> SimpleNamespace:
        """Return that the GPU is linked to a Grace processor, if its module's power is given."""
        with self._call("nvmlDeviceGetC2cModeInfoV", handle) as gpu:
            if not gpu.spec.module_W:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return SimpleNamespace(isC2cEnabled=1)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: _Handle) -> int:
        with self._call("nvmlDeviceGetTotalEnergyConsumption", handle) as gpu:
            if not gpu.spec.has_counter:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return gpu.counter_mJ(self._clock())

    def nvmlDeviceGetPowerUsage(self, handle: _Handle) -> int:
        with self._call("nvmlDeviceGetPowerUsage", handle) as gpu:
            if not gpu.spec.has_power:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            now_s = self._clock()
            span_s = min(gpu.spec.averaged_s, now_s - gpu.epoch_s)
            if span_s <= 0:
                return round(1000 * gpu.state(now_s)[1])
            return round(1000 * gpu.energy_J(now_s - span_s, now_s) / span_s)

    def nvmlDeviceGetFieldValues(self, handle: _Handle, fields: Sequence[Any]) -> list[Any]:
        with self._call("nvmlDeviceGetFieldValues", handle) as gpu:
            spec, now_s = gpu.spec, self._clock()
            offered = spec.instant_power and spec.has_power
            scopes = {
                pynvml.NVML_POWER_SCOPE_GPU: (1.0, 0.0, True),
                pynvml.NVML_POWER_SCOPE_MODULE: (1.0, spec.module_W, spec.module_W > 0),
                pynvml.NVML_POWER_SCOPE_MEMORY: (spec.memory_share, 0.0, spec.memory_share > 0),
            }
            values = []
            for field in fields:
                number, scope = field if isinstance(field, tuple) else (field, 0)
                value = pynvml.c_nvmlFieldValue_t()
                value.fieldId, value.scopeId = number, scope
                value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
                share, more_W, told = scopes.get(scope, (0.0, 0.0, False))
                power_W = None
                if number == pynvml.NVML_FI_DEV_POWER_INSTANT and offered and told:
                    power_W = gpu.state(now_s)[1]
                elif number == pynvml.NVML_FI_DEV_POWER_AVERAGE and offered and told:
                    span_s = min(spec.averaged_s, now_s - gpu.epoch_s)
                    power_W = gpu.state(now_s)[1]
                    if span_s > 0:
                        power_W = gpu.energy_J(now_s - span_s, now_s) / span_s
                if power_W is not None:
                    value.nvmlReturn = pynvml.NVML_SUCCESS
                    value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
                    value.value.uiVal = round(1000 * (share * power_W + more_W))
                values.append(value)
            return values

    def nvmlDeviceGetTemperature(self, handle: _Handle, sensor: int) -> int:
        with self._call("nvmlDeviceGetTemperature", handle) as gpu:
            now_s = self._clock()
            hot = gpu.at("heat", now_s) is not None
            return 87 if hot else round(28 + 0.1 * gpu.state(now_s)[1])

    def nvmlDeviceGetUtilizationRates(self, handle: _Handle) -> SimpleNamespace:
        with self._call("nvmlDeviceGetUtilizationRates", handle) as gpu:
            share = round(100 * gpu.utilisation(self._clock()))
            return SimpleNamespace(gpu=share, memory=share // 2)

    def nvmlDeviceGetClockInfo(self, handle: _Handle, kind: int) -> int:
        with self._call("nvmlDeviceGetClockInfo", handle) as gpu:
            if kind == pynvml.NVML_CLOCK_MEM:
                return gpu.memory_MHz(self._clock())
            return gpu.state(self._clock())[0]

    def nvmlDeviceGetMaxClockInfo(self, handle: _Handle, kind: int) -> int:
        with self._call("nvmlDeviceGetMaxClockInfo", handle) as gpu:
            memory = kind == pynvml.NVML_CLOCK_MEM
            return gpu.spec.memory_clock_MHz if memory else gpu.spec.clocks_MHz[-1]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: _Handle) -> int:
        with self._call("nvmlDeviceGetCurrentClocksEventReasons", handle) as gpu:
            return gpu.state(self._clock())[2]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: _Handle) -> int:
        with self._call("nvmlDeviceGetCurrentClocksThrottleReasons", handle) as gpu:
            return gpu.state(self._clock())[2]

    def nvmlDeviceGetSupportedMemoryClocks(self, handle: _Handle) -> list[int]:
        with self._call("nvmlDeviceGetSupportedMemoryClocks", handle) as gpu:
            return sorted((*gpu.spec.slow_memory_MHz, gpu.spec.memory_clock_MHz), reverse=True)

    def nvmlDeviceGetSupportedGraphicsClocks(self, handle: _Handle, memory_MHz: int) -> list[int]:
        with self._call("nvmlDeviceGetSupportedGraphicsClocks", handle) as gpu:
            if memory_MHz not in (*gpu.spec.slow_memory_MHz, gpu.spec.memory_clock_MHz):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            return list(reversed(gpu.spec.clocks_MHz))  # NVML lists the highest first

    def nvmlDeviceGetIndex(self, handle: _Handle) -> int:
        with self._call("nvmlDeviceGetIndex", handle):
            return handle.index

    def _lock(self, name: str, handle: _Handle, what: str, lock: list[int] | None) -> None:
        with self._call(name, handle, sets=lock or []) as gpu:
            if not gpu.spec.lockable:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            if lock is not None and not 0 < lock[0] <= lock[1]:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            gpu.events.append([self._clock(), what, lock])

    def nvmlDeviceSetGpuLockedClocks(self, handle: _Handle, low: int, high: int) -> None:
        self._lock("nvmlDeviceSetGpuLockedClocks", handle, "lock", [low, high])

    def nvmlDeviceResetGpuLockedClocks(self, handle: _Handle) -> None:
        self._lock("nvmlDeviceResetGpuLockedClocks", handle, "lock", None)

    def nvmlDeviceSetMemoryLockedClocks(self, handle: _Handle, low: int, high: int) -> None:
        self._lock("nvmlDeviceSetMemoryLockedClocks", handle, "memory_lock", [low, high])

    def nvmlDeviceResetMemoryLockedClocks(self, handle: _Handle) -> None:
        self._lock("nvmlDeviceResetMemoryLockedClocks", handle, "memory_lock", None)

    def nvmlDeviceGetAPIRestriction(self, handle: _Handle, api: int) -> int:
        with self._call("nvmlDeviceGetAPIRestriction", handle) as gpu:
            free = (
                gpu.spec.application_free
                and api == pynvml.NVML_RESTRICTED_API_SET_APPLICATION_CLOCKS
            )
            return pynvml.NVML_FEATURE_DISABLED if free else pynvml.NVML_FEATURE_ENABLED

    def nvmlDeviceGetApplicationsClock(self, handle: _Handle, kind: int) -> int:
        with self._call("nvmlDeviceGetApplicationsClock", handle) as gpu:
            clocks = gpu.at("application", self._clock())
            clocks = clocks or [gpu.spec.memory_clock_MHz, gpu.spec.clocks_MHz[-1]]
            return clocks[0] if kind == pynvml.NVML_CLOCK_MEM else clocks[1]

    def nvmlDeviceSetApplicationsClocks(self, handle: _Handle, memory: int, sm: int) -> None:
        name = "nvmlDeviceSetApplicationsClocks"
        with self._call(name, handle, sets=[memory, sm], free="application_free") as gpu:
            if sm not in gpu.spec.clocks_MHz:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            gpu.events.append([self._clock(), "application", [memory, sm]])

    def nvmlDeviceGetPowerManagementLimit(self, handle: _Handle) -> int:
        with self._call("nvmlDeviceGetPowerManagementLimit", handle) as gpu:
            return round(1000 * gpu.at("limit_W", self._clock(), gpu.spec.limit_W))

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: _Handle) -> int:
        with self._call("nvmlDeviceGetPowerManagementDefaultLimit", handle) as gpu:
            return round(1000 * gpu.spec.max_limit_W)

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: _Handle) -> list[int]:
        with self._call("nvmlDeviceGetPowerManagementLimitConstraints", handle) as gpu:
            return [round(1000 * gpu.spec.min_limit_W), round(1000 * gpu.spec.max_limit_W)]

    def nvmlDeviceSetPowerManagementLimit(self, handle: _Handle, limit_mW: int) -> None:
        with self._call("nvmlDeviceSetPowerManagementLimit", handle, sets=[limit_mW]) as gpu:
            if not gpu.spec.limit_settable:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            if not gpu.spec.min_limit_W <= limit_mW / 1000 <= gpu.spec.max_limit_W:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            gpu.events.append([self._clock(), "limit_W", limit_mW / 1000])

    def nvmlDeviceGetPersistenceMode(self, handle: _Handle) -> int:
        with self._call("nvmlDeviceGetPersistenceMode", handle):
            return 1

    def nvmlDeviceSetPersistenceMode(self, handle: _Handle, mode: int) -> None:
        with self._call("nvmlDeviceSetPersistenceMode", handle, sets=[mode]):
            pass


def from_environment() -> FakeNVML:
    """Return the fake whose state file the environment names: for the processes of a kill test."""
    return FakeNVML(state_file=os.environ[STATE_FILE])


class FakeClock:
    """Seconds that pass only when told."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
