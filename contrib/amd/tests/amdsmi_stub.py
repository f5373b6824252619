"""Stand-in for AMD's amdsmi: the names and shapes of answers of its Python interface.

From `py-interface/amdsmi_interface.py` and `amdsmi_exception.py` of amdsmi 6.3 and 7: answers are
dictionaries, values that a GPU does not tell are "N/A", errors are an `AmdSmiLibraryException` with
a code of `amdsmi_status_t`. Before release 6.4 there is neither `amdsmi_get_gpu_enumeration_info`
nor "vram_max_bandwidth".
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass
class FakeClock:
    """Seconds that pass only when a test says so."""

    now_s: float = 1000.0


NOT_SUPPORTED, NO_PERM, DRIVER_NOT_LOADED, NOT_INIT = 2, 10, 34, 32
#: Joules of a step of the accumulator (the documentation's example: 15.3 uJ).
RESOLUTION_UJ = 15.259021759033203


class AmdSmiException(Exception):
    """Base of amdsmi's errors."""


class AmdSmiLibraryException(AmdSmiException):
    """Error of the library, with a code of `amdsmi_status_t`."""

    def __init__(self, err_code: int) -> None:
        super().__init__(err_code)
        self.err_code = err_code

    def __str__(self) -> str:
        return f"Error code:\n\t{self.err_code} | AMDSMI_STATUS"

    def get_error_code(self) -> int:
        return self.err_code


class AmdSmiClkType(enum.IntEnum):
    """Kinds of clocks."""

    GFX = 0
    MEM = 4


class AmdSmiTemperatureType(enum.IntEnum):
    """Sensors of temperature."""

    HOTSPOT = 1


class AmdSmiTemperatureMetric(enum.IntEnum):
    """Figures of a sensor."""

    CURRENT = 0


@dataclass
class StubGpu:
    """One GPU: an MI300X that draws a constant power."""

    name: str = "AMD Instinct MI300X"
    power_W: float = 330.0
    #: Of the accumulator's energy to the true one; 0 if it stands still.
    accumulator_share: float = 1.0
    #: "current" (MI300), "average" (MI200), or "" for none.
    power_key: str = "current"
    hip_id: int | None = None
    partition: str = "SPX"
    processes: list[tuple[int, int]] = field(default_factory=list)
    errors: int = 0
    unsupported: set[str] = field(default_factory=set)


class Stub:
    """The module `amdsmi` with these GPUs, in the order of the driver; time is the clock's."""

    def __init__(self, gpus: list[StubGpu], clock: Any, *, release: int = 7) -> None:
        self.gpus, self._clock, self._opened, self.release = gpus, clock, 0, release
        self.loaded = True

    @property
    def is_open(self) -> bool:
        return self._opened > 0

    def module(self) -> ModuleType:
        made = ModuleType("amdsmi")
        kinds = (AmdSmiException, AmdSmiLibraryException, AmdSmiClkType)
        for kind in (*kinds, AmdSmiTemperatureType, AmdSmiTemperatureMetric):
            setattr(made, kind.__name__, kind)
        for name in dir(self):
            if name.startswith("amdsmi_"):
                setattr(made, name, getattr(self, name))
        if self.release < 7:
            del made.amdsmi_get_gpu_enumeration_info
        return made

    def _gpu(self, handle: int, what: str) -> StubGpu:
        if not self._opened:
            raise AmdSmiLibraryException(NOT_INIT)
        if what in self.gpus[handle].unsupported:
            raise AmdSmiLibraryException(NOT_SUPPORTED)
        return self.gpus[handle]

    def amdsmi_init(self) -> None:
        if not self.loaded:
            raise AmdSmiLibraryException(DRIVER_NOT_LOADED)
        self._opened += 1

    def amdsmi_shut_down(self) -> None:
        if not self._opened:
            raise AmdSmiLibraryException(NOT_INIT)
        self._opened -= 1

    def amdsmi_get_processor_handles(self) -> list[int]:
        return list(range(len(self.gpus)))

    def amdsmi_get_gpu_device_uuid(self, handle: int) -> str:
        self._gpu(handle, "gpu_device_uuid")
        return f"a2ff74a1-0000-1000-80{handle}0-5cdb63d3a1fe"

    def amdsmi_get_gpu_enumeration_info(self, handle: int) -> dict[str, Any]:
        gpu = self._gpu(handle, "gpu_enumeration_info")
        hip_id = handle if gpu.hip_id is None else gpu.hip_id
        return {
            "drm_render": 128 + handle,
            "drm_card": handle,
            "hsa_id": 2 + handle,
            "hip_id": hip_id,
            "hip_uuid": f"GPU-{handle:016x}",
        }

    def amdsmi_get_gpu_asic_info(self, handle: int) -> dict[str, Any]:
        return {
            "market_name": self._gpu(handle, "gpu_asic_info").name,
            "vendor_id": "0x1002",
            "num_compute_units": 304,
            "target_graphics_version": "gfx942",
        }

    def amdsmi_get_gpu_vram_usage(self, handle: int) -> dict[str, int]:
        self._gpu(handle, "gpu_vram_usage")
        return {"vram_total": 196592, "vram_used": 285}

    def amdsmi_get_gpu_vram_info(self, handle: int) -> dict[str, Any]:
        self._gpu(handle, "gpu_vram_info")
        told: dict[str, Any] = {
            "vram_type": 5,
            "vram_vendor": "HYNIX",
            "vram_size": 196592,
            "vram_bit_width": 8192,
        }
        return told | ({"vram_max_bandwidth": 5324} if self.release >= 7 else {})

    def amdsmi_get_energy_count(self, handle: int) -> dict[str, Any]:
        gpu = self._gpu(handle, "energy_count")
        now_s = self._clock()
        joules = 1000.0 + now_s * gpu.power_W * gpu.accumulator_share
        steps = int(joules * 1e6 / RESOLUTION_UJ) if gpu.accumulator_share else 65_536
        return {
            "energy_accumulator": steps,
            "counter_resolution": RESOLUTION_UJ,
            "timestamp": int(now_s * 1e9),
        }

    def amdsmi_get_power_info(self, handle: int) -> dict[str, Any]:
        gpu = self._gpu(handle, "power_info")
        told = {
            f"{key}_socket_power": int(gpu.power_W) if key == gpu.power_key else "N/A"
            for key in ("current", "average")
        }
        volts = {"gfx_voltage": 800, "soc_voltage": "N/A", "mem_voltage": "N/A"}
        return {**told, **volts, "power_limit": 750_000_000}

    def amdsmi_get_power_cap_info(self, handle: int) -> dict[str, int]:
        self._gpu(handle, "power_cap_info")
        return {
            "power_cap": 750_000_000,
            "default_power_cap": 750_000_000,
            "dpm_cap": 0,
            "min_power_cap": 0,
            "max_power_cap": 750_000_000,
        }

    def amdsmi_get_clock_info(self, handle: int, kind: AmdSmiClkType) -> dict[str, Any]:
        self._gpu(handle, "clock_info")
        clk = 2100 if kind is AmdSmiClkType.GFX else 1300
        top = {"min_clk": 132, "max_clk": 2100}
        return {"clk": clk, **top, "clk_locked": "N/A", "clk_deep_sleep": False}

    def amdsmi_get_violation_status(self, handle: int) -> dict[str, Any]:
        self._gpu(handle, "violation_status")
        return {"active_prochot_thrm": False, "active_ppt_pwr": True, "active_socket_thrm": "N/A"}

    def amdsmi_get_temp_metric(
        self, handle: int, sensor: AmdSmiTemperatureType, metric: AmdSmiTemperatureMetric
    ) -> int:
        self._gpu(handle, "temp_metric")
        return 55

    def amdsmi_get_gpu_activity(self, handle: int) -> dict[str, Any]:
        self._gpu(handle, "gpu_activity")
        return {"gfx_activity": 100, "umc_activity": 30, "mm_activity": "N/A"}

    def amdsmi_get_gpu_process_list(self, handle: int) -> list[dict[str, Any]]:
        return [
            {
                "name": "N/A",
                "pid": pid,
                "mem": held,
                "engine_usage": {"gfx": 0, "enc": 0},
                "memory_usage": {"gtt_mem": 0, "cpu_mem": 0, "vram_mem": held},
            }
            for pid, held in self._gpu(handle, "gpu_process_list").processes
        ]

    def amdsmi_get_gpu_total_ecc_count(self, handle: int) -> dict[str, int]:
        errors = self._gpu(handle, "gpu_total_ecc_count").errors
        return {"correctable_count": 3, "uncorrectable_count": errors, "deferred_count": 0}

    def amdsmi_get_gpu_compute_partition(self, handle: int) -> str:
        return self._gpu(handle, "gpu_compute_partition").partition

    def amdsmi_get_gpu_driver_info(self, handle: int) -> dict[str, str]:
        self._gpu(handle, "gpu_driver_info")
        return {"driver_name": "amdgpu", "driver_version": "6.14.14", "driver_date": "N/A"}

    def amdsmi_topo_get_numa_node_number(self, handle: int) -> int:
        return 2**32 - 1 if "numa" in self.gpus[handle].unsupported else handle
