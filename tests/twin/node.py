"""A twin node as a test holds it: what its GPUs are, what happens to them, and the exact truth."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pynvml

from tests.twin import layout
from tests.twin.gpu import TwinGpu
from tests.twin.node_state import STATE, NodeState


class TwinNode(NodeState):
    """A node whose GPUs are a library.

    Args:
        path: the state file, which is made.
        gpus: the GPUs, in PCI order.
        virtual_time: time passes only by `sleep`, so that tests are fast and exact; else it is
            CLOCK_MONOTONIC, the same in all processes.
        root: setters are permitted.
        call_s, init_s: time that an NVML call takes, and that nvmlInit takes in each process.
        driver_version, cuda_driver: the versions that NVML and the CUDA driver report.
        cores: cores of the node, which processes that are started there see; 0: this machine's.
    """

    def __init__(
        self,
        path: str | Path,
        gpus: Sequence[TwinGpu] = (TwinGpu(),),
        *,
        virtual_time: bool = True,
        root: bool = True,
        call_s: float = 0.0,
        init_s: float = 0.0,
        driver_version: str = "580.65.06",
        cuda_driver: int = 13000,
        cores: int = 0,
    ) -> None:
        with Path(path).open("wb") as file:
            file.truncate(ctypes.sizeof(layout.Node))
        self._open(Path(path))
        state = self._state
        state.gpus, state.is_virtual, state.root = len(gpus), virtual_time, root
        state.now_s, state.call_s, state.init_s = 1000.0, call_s, init_s
        state.cores = cores
        state.driver_version, state.cuda_driver = driver_version.encode(), cuda_driver
        for index, gpu in enumerate(gpus):
            gpu.write(state.gpu[index], index)
            Path(f"{path}.gpu{index}").touch()  # its device file, which guards lock
        self._cached_bytes: dict[int, int] = {}
        self._library.twin_start(ctypes.byref(state))
        state.magic = layout.MAGIC
        self._tell_rights(root)

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
    def joined(self, *, children: bool = False) -> Iterator[None]:
        """Put this process on the node: the unmodified pynvml then loads the twin's library.

        A library that is loaded by its path answers later loads of its soname. With `children`, the
        processes that this one starts are on the node, too.

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
        joining = self.environment() if children else {STATE: str(self.path)}
        before = {name: os.environ.get(name) for name in joining}
        os.environ.update(joining)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            while by_soname.nvmlShutdown() == 0:
                pass  # a failed test may have left it open on this state

    # ---- what happens to it

    def set(self, gpu: int | None = None, **values: Any) -> None:
        """Set fields of one GPU's state, or of every GPU's, from now on.

        `load` is the utilisation, `heat_MHz` a forced thermal cap (0: none), `lost` 1 drops the GPU
        from the bus, `open_error` is the error code of NVML when the GPU is opened (4: no
        permission), `used_bytes` is memory in use; any other field of `TwinGpu` works too.
        """
        with self._updated() as state:
            for index in range(state.gpus) if gpu is None else [gpu]:
                for name, value in values.items():
                    getattr(state.gpu[index], name)  # a misspelt name is an error
                    setattr(state.gpu[index], name, value)

    def stall(self, gpu: int = 0, *, on: bool = True) -> None:
        """Let the energy counter stand still."""
        with self._locked() as state:
            self._library.twin_stall(state, gpu, on)

    def reset_counter(self, gpu: int = 0) -> None:
        """Let the energy counter begin anew, as when the driver is loaded again."""
        with self._locked() as state:
            self._library.twin_reset_counter(state, gpu)

    def fail(
        self, name: str, code: int, *, first: int = 1, times: int = 10**9, gpu: int | None = None
    ) -> None:
        """Let the calls of `name`, counted from now, fail from the `first` on, `times` times."""
        assert hasattr(pynvml, name), f"NVML has no function {name}"
        with self._locked() as state:
            fault = state.fault[state.fault_count]
            fault.name, fault.gpu, fault.code = name.encode(), -1 if gpu is None else gpu, code
            fault.first, fault.times, fault.calls = first, times, 0
            state.fault_count += 1

    def ecc_error(self, gpu: int = 0, *, corrected: int = 0, uncorrected: int = 1) -> None:
        """Let errors of the memory be counted, and its pages or rows be put out of use."""
        with self._updated() as state:
            device = state.gpu[gpu]
            for kind, errors in enumerate((corrected, uncorrected)):
                device.ecc_volatile[kind] += errors
                device.ecc_aggregate[kind] += errors
            device.repaired[1] += uncorrected
            device.repair_pending = int(bool(device.repair_pending or uncorrected))

    def play(self, gpu: int, rows: Sequence[Sequence[float]], errors: Sequence[int] = ()) -> None:
        """Answer with recorded readings from now on (`tests.twin.replay`).

        Args:
            gpu: whose.
            rows: seconds, and readings in the order of `nvml_recording.COLUMNS`; NaN if it failed.
            errors: the error of each column.
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
        self._tell_rights(root)

    def _tell_rights(self, root: bool) -> None:
        """Write what the kernel says of a process that is on this node."""
        folder = Path(f"{self.path}.proc/self")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "status").write_text(f"CapEff:\t{0x1FFFFFFFFFF if root else 0:016x}\n")
        (folder / "uid_map").write_text("0 0 4294967295\n")

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
            held = sum(size for _, size in (*compute, *graphics))
            device.used_bytes = held + self._cached_bytes.get(gpu, 0)

    def cache_files(self, gpu: int, cached_bytes: int, *, shared_bytes: int = 0) -> None:
        """Let Linux keep files in a GPU's memory, which is a memory node (`TwinGpu.numa_node`).

        Args:
            shared_bytes: the part that is shared memory (tmpfs), and no cache.
        """
        with self._locked() as state:
            device = state.gpu[gpu]
            node, grown = device.numa_node, cached_bytes - self._cached_bytes.get(gpu, 0)
            device.used_bytes += grown
            total, bus = device.memory_bytes, device.pci_bus
        status = Path(f"{self.path}.proc/driver/nvidia/gpus/0000:{bus:02x}:00.0/numa_status")
        status.parent.mkdir(parents=True, exist_ok=True)
        status.write_text(f"Node:            {node}\nStatus:          online\n")
        self._cached_bytes[gpu] = cached_bytes
        lines = {"MemTotal": total, "FilePages": cached_bytes, "Shmem": shared_bytes}
        folder = Path(f"{self.path}.sys/devices/system/node/node{node}")
        folder.mkdir(parents=True, exist_ok=True)
        text = [f"Node {node} {name}: {size // 1024:14} kB" for name, size in lines.items()]
        (folder / "meminfo").write_text("\n".join(text) + "\n")

    # ---- the truth

    def _gpu(self, index: int) -> layout.Gpu:
        with self._updated() as state:
            return state.gpu[index]

    def energy_J(self, gpu: int | None = None) -> float:
        """Return the exact energy since the node began, of one GPU or of all."""
        with self._updated() as state:
            chosen = range(state.gpus) if gpu is None else [gpu]
            return sum(state.gpu[index].energy_J for index in chosen)

    def power_W(self, gpu: int = 0) -> float:
        """Return the exact power now."""
        return self._gpu(gpu).power_W

    def temperature_C(self, gpu: int = 0) -> float:
        """Return the temperature now."""
        return self._gpu(gpu).temperature_C

    def clock_MHz_s(self, gpu: int = 0) -> float:
        """Return the integral of the delivered clock over time, MHz s."""
        return self._gpu(gpu).clock_MHz_s

    def work_s(self, gpu: int = 0) -> float:
        """Return the work of ranks that is done, seconds at the highest clock."""
        return self._gpu(gpu).work_s

    def late_s(self) -> float:
        """Return the time that GPUs waited for late ranks, which follows no law, seconds."""
        with self._updated() as state:
            return sum(state.gpu[index].late_s for index in range(state.gpus))

    def ranks(self, gpu: int = 0) -> list[int]:
        """Return the process ids of the ranks that use a GPU."""
        with self._updated() as state:
            device = state.gpu[gpu]
            return [device.rank[i].pid for i in range(device.rank_count)]

    def device_s(self, clock_MHz: float, gpu: int = 0) -> float:
        """Return the law of speed: seconds for a second of work at the highest clock."""
        return float(self._library.twin_law_device_s(self._state, gpu, clock_MHz))

    def law_W(self, clock_MHz: float, load: float, gpu: int = 0) -> float:
        """Return the law of power, watts, at the present temperature."""
        return float(self._library.twin_law_W(self._state, gpu, clock_MHz, load))

    def locked_MHz(self, gpu: int = 0) -> tuple[int, int] | None:
        """Return the lock of the SM clock, (lowest, highest); None without one."""
        device = self._gpu(gpu)
        return (device.lock_low, device.lock_high) if device.lock_high else None

    def memory_locked_MHz(self, gpu: int = 0) -> tuple[int, int] | None:
        """Return the lock of the memory clock, (lowest, highest); None without one."""
        device = self._gpu(gpu)
        return (device.memory_low, device.memory_high) if device.memory_high else None

    def limit_W(self, gpu: int = 0) -> float:
        """Return the power limit."""
        return self._gpu(gpu).limit_W

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


@contextlib.contextmanager
def joined_node(*gpus: TwinGpu, **options: Any) -> Iterator[TwinNode]:
    """Make a twin node, put this process on it, and close it at the end."""
    with tempfile.TemporaryDirectory() as folder:
        node = TwinNode(Path(folder) / "node", gpus, **options)
        with node.joined():
            try:
                yield node
            finally:
                node.close()
