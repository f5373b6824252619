"""A twin node as a test holds it: what its GPUs are, what happens to them, and the exact truth."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tuner.testing.twin import layout
from tuner.testing.twin.build import build

__all__ = ["STATE", "TwinGpu", "TwinNode"]

#: Environment variable that names the state file; a process with it and the libraries' folder on
#: LD_LIBRARY_PATH is on the twin node.
STATE = "JOULEFRONT_TWIN"

#: NVML's architecture numbers by major compute capability (NVML API reference); 8.9 is Ada.
ARCHITECTURES = {6: 4, 7: 5, 8: 7, 9: 9, 10: 10, 12: 10}


@dataclass(frozen=True)
class TwinGpu:
    """Specification of one twin GPU; an A100 with ideal sensors by default.

    Attributes:
        reserved_bytes: memory that the driver keeps for itself.
        used_bytes: memory that is in use beside it.
        pci_bus: number of the bus; 0 takes the next.
        clock_MHz, memory_MHz: the clocks on offer, ascending.
        peak_W: draw at the highest clock and full load (may be above the limit: it is then capped).
        leak_per_K: growth of the idle power by kelvin above 30 degrees.
        heat_K_per_W, heat_s: thermal resistance and time constant.
        slowdown_C: temperature from which the clock is lowered.
        reach_MHz: listed clocks above this are never delivered under load, and NVML gives no
            reason (a consumer card's voltage limiter); 0: all are reached.
        switch_s: latency of a change of clock.
        filter_s: time constant between the true power and what the sensors and the counter see.
        sensor_period_s, sensor_window_s: interval between the power sensor's updates, and the span
            that each one averages.
        averaged_s: span of the averaged power.
        counter_period_s, counter_delay_s: interval between the counter's updates, and the age of
            the energy that an update publishes.
        phase_s: the first tick of sensor and counter, in periods.
        module_W: draw of the superchip's module besides the GPU; 0: it sits on no module.
        counter_is_module, usage_is_module: what the counter and nvmlDeviceGetPowerUsage cover.
        gpu_scope: power of the scope "GPU" is 0: not offered, 1: the GPU's, 2: the module's.
        idle_follows: an idle GPU stands at a locked clock; else it falls to the lowest.
        application_free: any user may set application clocks.
        default_application_MHz: default application clock; 0: the call is not supported.
        load: utilisation, until `TwinNode.set` changes it.
        pace: seconds of the device at its highest clock for a second of a rank's CPU time. Above 0
            the load is that of the ranks, which are held back to the device's speed (`rank.c`);
            from 1 on, with room for other processes on the cores.
        clock_free_share: share of that work that is bound by memory and does not follow the clock.
        host_s: CPU time of a rank's start (imports, the model), which is no work of the device.
    """

    name: str = "NVIDIA A100-SXM4-80GB"
    uuid: str = ""
    memory_bytes: int = 80 * 2**30
    reserved_bytes: int = 400 * 2**20
    used_bytes: int = 0
    pci_bus: int = 0
    cores: int = 6912
    bus_bits: int = 5120
    compute: tuple[int, int] = (8, 0)
    pcie_generation: int = 4
    pcie_width: int = 16
    nvlinks: int = 12
    c2c: bool = False
    mig: bool = False
    clock_MHz: tuple[int, ...] = tuple(range(210, 1411, 15))
    memory_MHz: tuple[int, ...] = (1593,)
    idle_W: float = 60.0
    peak_W: float = 380.0
    leak_per_K: float = 0.0
    limit_W: float = 400.0
    default_limit_W: float = 400.0
    min_limit_W: float = 100.0
    max_limit_W: float = 400.0
    ambient_C: float = 28.0
    heat_K_per_W: float = 0.1
    heat_s: float = 20.0
    slowdown_C: float = 85.0
    reach_MHz: float = 0.0
    switch_s: float = 0.0
    filter_s: float = 0.0
    sensor_period_s: float = 0.0
    sensor_window_s: float = 0.001
    averaged_s: float = 1.0
    counter_period_s: float = 0.1
    counter_delay_s: float = 0.0
    phase_s: float = 0.0
    module_W: float = 0.0
    memory_share: float = 0.0
    counter_start_mJ: int = 987_654_321
    counter_modulus_mJ: int = 0
    has_counter: bool = True
    counter_is_module: bool = False
    has_usage: bool = True
    usage_is_module: bool = False
    gpu_scope: int = 1
    lockable: bool = True
    ignores_lock: bool = False
    limit_settable: bool = True
    ignores_limit: bool = False
    idle_follows: bool = True
    application_free: bool = False
    default_application_MHz: int = 0
    load: float = 0.0
    pace: float = 0.0
    clock_free_share: float = 0.0
    host_s: float = 0.0

    def write(self, gpu: layout.Gpu, index: int) -> None:
        """Fill in the state of GPU `index`."""
        for entry in fields(self):
            value: Any = getattr(self, entry.name)
            if entry.name == "compute":
                gpu.compute_major, gpu.compute_minor = value
                gpu.architecture = 8 if value == (8, 9) else ARCHITECTURES.get(value[0], 9)
            elif entry.name in ("clock_MHz", "memory_MHz"):
                array = getattr(gpu, entry.name)
                array[: len(value)] = value
            elif isinstance(value, str):
                setattr(gpu, entry.name, value.encode())
            else:
                setattr(gpu, entry.name, value)
        gpu.clocks, gpu.memory_clocks = len(self.clock_MHz), len(self.memory_MHz)
        gpu.uuid = (self.uuid or f"GPU-{index:08x}-aaaa-bbbb-cccc-0123456789ab").encode()
        gpu.pci_bus = self.pci_bus or 0x10 * (index + 1)
        gpu.persistence = 1


@functools.cache
def _control() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build().control))
    library.twin_layout.restype = ctypes.c_int64
    library.twin_law_device_s.restype = library.twin_law_W.restype = ctypes.c_double
    sizes = [library.twin_layout(ctypes.c_int64(which)) for which in (0, 1)]
    if sizes != [ctypes.sizeof(layout.Node), ctypes.sizeof(layout.Gpu)]:
        raise RuntimeError("tuner.testing.twin.layout does not mirror csrc/state.h")
    return library


class TwinNode:
    """A node whose GPUs are a library.

    Args:
        path: the state file, which is made.
        gpus: the GPUs, in PCI order.
        virtual_time: time passes only by `sleep`, so that tests are fast and exact; else it is
            CLOCK_MONOTONIC, the same in all processes.
        root: setters are permitted.
        call_s: how long an NVML call takes, in virtual time.
        driver_version, cuda_driver: the versions that NVML and the CUDA driver report.
    """

    def __init__(
        self,
        path: str | Path,
        gpus: Sequence[TwinGpu] = (TwinGpu(),),
        *,
        virtual_time: bool = True,
        root: bool = True,
        call_s: float = 0.0,
        driver_version: str = "580.65.06",
        cuda_driver: int = 13000,
    ) -> None:
        with Path(path).open("wb") as file:
            file.truncate(ctypes.sizeof(layout.Node))
        self._open(Path(path))
        state = self._state
        state.gpus, state.is_virtual, state.root = len(gpus), virtual_time, root
        state.now_s, state.call_s = 1000.0, call_s
        state.driver_version, state.cuda_driver = driver_version.encode(), cuda_driver
        for index, gpu in enumerate(gpus):
            gpu.write(state.gpu[index], index)
        self._library.twin_start(ctypes.byref(state))
        state.magic = layout.MAGIC

    def _open(self, path: Path) -> None:
        self.path, self.libraries, self._library = path, build(), _control()
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), ctypes.sizeof(layout.Node))
        self._state = layout.Node.from_buffer(self._map)

    @classmethod
    def of_environment(cls) -> TwinNode:
        """Return the node on which this process is, made by another process."""
        node = cls.__new__(cls)
        node._open(Path(os.environ[STATE]))
        return node

    # ---- joining the node

    def environment(self) -> dict[str, str]:
        """Return the variables with which a process that is started now is on this node."""
        variables = {STATE: str(self.path)}
        for name, own in (
            ("LD_LIBRARY_PATH", self.libraries.folder),
            ("LD_PRELOAD", self.libraries.rank),
        ):
            others = [part for part in os.environ.get(name, "").split(":") if part != str(own)]
            variables[name] = ":".join(filter(None, [str(own), *others]))
        return variables

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Put this process on the node: the unmodified pynvml then loads the twin's library.

        A library that is loaded by its path answers later loads of its soname.

        Raises:
            RuntimeError: another libnvidia-ml.so.1 is loaded in this process already.
        """
        ctypes.CDLL(str(self.libraries.nvml))
        by_soname = ctypes.CDLL("libnvidia-ml.so.1")
        loaded = Path("/proc/self/maps").read_text()
        others = [
            line for line in loaded.splitlines() if "libnvidia-ml" in line and "twin" not in line
        ]
        if others:
            raise RuntimeError(f"another NVML is loaded in this process: {others[0]}")
        before = os.environ.get(STATE)
        os.environ[STATE] = str(self.path)
        try:
            yield
        finally:
            while by_soname.nvmlShutdown() == 0:
                pass  # a failed test may have left it open on this state
            if before is None:
                del os.environ[STATE]
            else:
                os.environ[STATE] = before

    def close(self) -> None:
        """Release the state file."""
        del self._state
        with contextlib.suppress(BufferError):  # a caller keeps a part of it
            self._map.close()
        self._file.close()

    # ---- time

    def clock(self) -> float:
        """Return the node's time, seconds."""
        return self._state.now_s if self._state.is_virtual else time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        if not self._state.is_virtual:
            time.sleep(seconds)
            return
        with self._locked():
            self._state.now_s += seconds

    @contextlib.contextmanager
    def _locked(self) -> Iterator[layout.Node]:
        """Return the state, up to date, while no other process can change it."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield self._state
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def _updated(self) -> Iterator[layout.Node]:
        with self._locked() as state:
            self._library.twin_update(ctypes.byref(state))
            yield state

    # ---- what happens to it

    def set(self, gpu: int | None = None, **values: Any) -> None:
        """Set fields of one GPU's state, or of every GPU's, from now on.

        `load` is the utilisation, `heat_MHz` a forced thermal cap (0: none), `lost` 1 drops the GPU
        from the bus, `used_bytes` is memory in use; any other field of `TwinGpu` works too.
        """
        with self._updated() as state:
            for index in range(state.gpus) if gpu is None else [gpu]:
                for name, value in values.items():
                    getattr(state.gpu[index], name)  # a misspelt name is an error
                    setattr(state.gpu[index], name, value)

    def stall(self, gpu: int = 0, *, on: bool = True) -> None:
        """Let the energy counter stand still."""
        with self._locked() as state:
            self._library.twin_stall(
                ctypes.byref(state), ctypes.c_int64(gpu), ctypes.c_int64(int(on))
            )

    def reset_counter(self, gpu: int = 0) -> None:
        """Let the energy counter begin anew, as when the driver is loaded again."""
        with self._locked() as state:
            self._library.twin_reset_counter(ctypes.byref(state), ctypes.c_int64(gpu))

    def fail(
        self, name: str, code: int, *, first: int = 1, times: int = 10**9, gpu: int | None = None
    ) -> None:
        """Let the calls of `name`, counted from now, fail from the `first` on, `times` times."""
        with self._locked() as state:
            fault = state.fault[state.fault_count]
            fault.name, fault.gpu, fault.code = name.encode(), -1 if gpu is None else gpu, code
            fault.first, fault.times, fault.calls = first, times, 0
            state.fault_count += 1

    def play(self, gpu: int, rows: Sequence[Sequence[float]], errors: Sequence[int] = ()) -> None:
        """Answer with recorded readings from now on (`tuner.testing.twin.replay`).

        Args:
            gpu: whose.
            rows: seconds, and readings in the order of `nvml_recording.COLUMNS`; NaN if it failed.
            errors: the error of each column.

        Raises:
            ValueError: there is no row, or too many.
        """
        if not 0 < len(rows) <= layout.MAX_ROWS:
            raise ValueError(f"{len(rows)} rows; from 1 to {layout.MAX_ROWS} can be replayed")
        with self._updated() as state:
            device = state.gpu[gpu]
            for entry, row in zip(device.row, rows, strict=False):
                entry[:] = row
            device.row_error[: len(errors)] = errors
            device.row_count = len(rows)

    def permit(self, root: bool) -> None:
        """Permit or forbid setters."""
        with self._locked() as state:
            state.root = root

    def processes(
        self,
        gpu: int,
        *,
        compute: Sequence[tuple[int, int]] = (),
        graphics: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Put processes on a GPU, each with its pid and memory in bytes."""
        with self._locked() as state:
            device = state.gpu[gpu]
            for kind, listed in (("compute", compute), ("graphics", graphics)):
                setattr(device, f"{kind}_count", len(listed))
                for entry, (pid, size) in zip(getattr(device, kind), listed, strict=False):
                    entry.pid, entry.bytes = pid, size
            device.used_bytes = sum(size for _, size in (*compute, *graphics))

    # ---- the truth

    def energy_J(self, gpu: int | None = None) -> float:
        """Return the exact energy since the node began, of one GPU or of all."""
        with self._updated() as state:
            chosen = range(state.gpus) if gpu is None else [gpu]
            return sum(state.gpu[index].energy_J for index in chosen)

    def power_W(self, gpu: int = 0) -> float:
        """Return the exact power now."""
        with self._updated() as state:
            return state.gpu[gpu].power_W

    def temperature_C(self, gpu: int = 0) -> float:
        """Return the temperature now."""
        with self._updated() as state:
            return state.gpu[gpu].temperature_C

    def clock_MHz_s(self, gpu: int = 0) -> float:
        """Return the integral of the delivered clock over time, MHz s."""
        with self._updated() as state:
            return state.gpu[gpu].clock_MHz_s

    def work_s(self, gpu: int = 0) -> float:
        """Return the CPU time of ranks that the device has executed, seconds."""
        with self._updated() as state:
            return state.gpu[gpu].work_s

    def ranks(self, gpu: int = 0) -> list[int]:
        """Return the process ids of the ranks that use a GPU."""
        with self._updated() as state:
            device = state.gpu[gpu]
            return [device.rank[i].pid for i in range(device.rank_count)]

    def device_s(self, clock_MHz: float, gpu: int = 0) -> float:
        """Return the law of speed: seconds of the device for a second of a rank's CPU time."""
        state, clock = ctypes.byref(self._state), ctypes.c_double(clock_MHz)
        return float(self._library.twin_law_device_s(state, ctypes.c_int64(gpu), clock))

    def law_W(self, clock_MHz: float, load: float, gpu: int = 0) -> float:
        """Return the law of power, watts, at the present temperature."""
        state, clock = ctypes.byref(self._state), ctypes.c_double(clock_MHz)
        share = ctypes.c_double(load)
        return float(self._library.twin_law_W(state, ctypes.c_int64(gpu), clock, share))

    def locked_MHz(self, gpu: int = 0) -> tuple[int, int] | None:
        """Return the lock of the SM clock, (lowest, highest); None without one."""
        device = self._state.gpu[gpu]
        return (device.lock_low, device.lock_high) if device.lock_high else None

    def memory_locked_MHz(self, gpu: int = 0) -> tuple[int, int] | None:
        """Return the lock of the memory clock, (lowest, highest); None without one."""
        device = self._state.gpu[gpu]
        return (device.memory_low, device.memory_high) if device.memory_high else None

    def application_MHz(self, gpu: int = 0) -> tuple[int, int] | None:
        """Return the application clocks that were set, (memory, SM); None without any."""
        device = self._state.gpu[gpu]
        return (device.application_memory, device.application_sm) if device.application_sm else None

    def limit_W(self, gpu: int = 0) -> float:
        """Return the power limit."""
        return self._state.gpu[gpu].limit_W

    @property
    def log(self) -> list[tuple[str, int, tuple[int, int]]]:
        """Every setter that went through: (function, GPU, its arguments), the oldest first."""
        with self._locked() as state:
            first = max(0, state.log_count - layout.MAX_LOG)
            entries = [state.log[i % layout.MAX_LOG] for i in range(first, state.log_count)]
            return [(entry.name.decode(), entry.gpu, (entry.a, entry.b)) for entry in entries]

    @property
    def descriptor_losses(self) -> int:
        """Number of NVML calls that found the library's descriptor closed by somebody else."""
        return self._state.descriptor_losses

    def cuda_touches(self) -> list[tuple[int, str]]:
        """Return the calls that would have started the CUDA driver: (pid, function)."""
        try:
            lines = Path(f"{self.path}.cuda").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(int(pid), name) for pid, name in (line.split() for line in lines)]
