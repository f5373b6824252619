"""Governors: set clocks and power limits, read back the delivered values, restore the earlier ones.

Permission is found out before the first probe without a write to the GPU, but for ways of which
only a setting that is tried tells (`tuner.workload.clocks.ways`). A request is snapped to the
nearest supported value; `delivered` is what the device then runs at. Before the first change a
guard process is given the earlier settings (`tuner.workload.clocks.guard_client`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.search_spaces.knobs import Value
from tuner.workload.clocks.base import (
    Applied,
    GovernorError,
    all_or_nothing,
    per_device,
    require_settable,
    snapped,
)
from tuner.workload.clocks.guard import Earlier, put_back
from tuner.workload.clocks.guard_client import Guard
from tuner.workload.clocks.ways import earlier_lock, needs_root, ways
from tuner.workload.meters.errors import MeterError
from tuner.workload.meters.gpus import Gpu, ask, clock_state, open_nvml, over_devices, visible_gpus

#: Reason for fixed clocks where the user wants them so.
LEFT_ALONE = "they are left alone (--no-clocks, or clock_control = false in the cluster's file)"


@dataclass(frozen=True)
class _Wanted:
    """Target values, one per GPU; None restores a knob."""

    clock_MHz: tuple[int, ...] | None = None
    memory_clock_MHz: tuple[int, ...] | None = None
    limit_mW: tuple[int, ...] | None = None


class NvmlGovernor:
    """SM clock, memory clock and power limit of the visible GPUs, through NVML.

    Args:
        devices: indices, UUIDs or prefixes of UUIDs; None takes CUDA_VISIBLE_DEVICES.
        environ: with EARLIER_CLOCKS_MHZ=MIN,MAX, the lock that an administrator has set. NVML
            cannot be asked for it; without, putting back releases the lock.
        guard_nvml: where the guard process finds NVML (`tuner.workload.clocks.guard_client.Guard`);
            "" starts none. By default the real NVML is guarded and a stand-in is not.

    Attributes:
        means: how clocks are set: "locked clocks", "application clocks", or another way.
        needs_root: True if the driver permits a way to set clocks to root only.

    MeterError if no GPU is visible, InputError if the devices cannot be used as named.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        nvml: Any = None,
        environ: Mapping[str, str] | None = None,
        leave_alone: bool = False,
        guard_nvml: str | None = None,
    ) -> None:
        self._guard_nvml = ("pynvml" if nvml is None else "") if guard_nvml is None else guard_nvml
        self._closed = False
        self._environ = os.environ if environ is None else environ
        self._earlier_clocks_MHz = earlier_lock(self._environ)
        self._nvml = open_nvml(nvml)
        try:
            self.gpus = visible_gpus(self._nvml, devices=devices, environ=environ)
            if not self.gpus:
                raise MeterError("NVML runs, but no GPU is visible to this process")
            self._limits_mW = {gpu.uuid: self._limit_mW(gpu) for gpu in self.gpus}
            self._limit_known = all(limit is not None for limit in self._limits_mW.values())
            self.means, self.needs_root = "locked clocks", False
            self.why_not = LEFT_ALONE if leave_alone else self._find_means()
            self.can_set = not self.why_not
            self.supported_clocks_MHz = self._supported() if self.can_set else ()
            self.limit_range_W = self._limit_range_W() if self.can_set else (0.0, 0.0)
        except BaseException:
            self._nvml.nvmlShutdown()
            raise
        self._guard = Guard(self._guard_nvml or None)
        self._touched: dict[tuple[str, str], Earlier] = {}

    # ---- what stands, and what is possible

    def _limit_mW(self, gpu: Gpu) -> int | None:
        nvml = self._nvml
        return ask(nvml, None, lambda: nvml.nvmlDeviceGetPowerManagementLimit(gpu.handle))

    def _find_means(self) -> str:
        """Choose `means`; return the reason if nothing can be set, else an empty string."""
        alone, why_not = self._nvml, ""
        for way in ways(alone, self._environ):
            self.means, self._nvml = way.means, way.nvml
            refused = way.why_not(self.gpus[0])
            self.needs_root |= way.permitted is False
            if not (refused or way.permitted):  # a setting that is tried tells
                refused = self._try_setting()
            if not refused:
                if self._guard_nvml == "pynvml":
                    self._guard_nvml = way.guard
                older = way.means in ("locked clocks", "guard") and not self._lockable()
                if older and self._application_clocks(free=False):
                    self.means = "application clocks"
                return ""
            if why_not:
                refused = f"{way.where} does not do it either: {refused}"
            why_not = f"{why_not}; and {refused}" if why_not else refused
        self._nvml = alone
        if self._application_clocks(free=True):
            self.means, self._limit_known = "application clocks", False
            return ""
        return why_not

    def _lockable(self) -> bool:
        """Return True if the GPUs can lock clocks: Volta or later (NVML API)."""
        nvml = self._nvml
        return all(
            tuple(ask(nvml, (7, 0), lambda: nvml.nvmlDeviceGetCudaComputeCapability(gpu.handle)))  # noqa: B023
            >= (7, 0)
            for gpu in self.gpus
        )

    def _application_clocks(self, *, free: bool) -> bool:
        """Return True if every GPU has application clocks and, if `free`, any user may set them."""
        nvml = self._nvml
        for gpu in self.gpus:
            try:
                self._application_MHz(gpu)
                restricted = nvml.nvmlDeviceGetAPIRestriction(
                    gpu.handle, nvml.NVML_RESTRICTED_API_SET_APPLICATION_CLOCKS
                )
            except (nvml.NVMLError, AttributeError):
                return False
            if free and restricted != nvml.NVML_FEATURE_DISABLED:
                return False
        return True

    def _application_MHz(self, gpu: Gpu) -> tuple[int, int]:
        """Return the present application clocks: (memory, SM)."""
        nvml = self._nvml
        memory = nvml.nvmlDeviceGetApplicationsClock(gpu.handle, nvml.NVML_CLOCK_MEM)
        return memory, nvml.nvmlDeviceGetApplicationsClock(gpu.handle, nvml.NVML_CLOCK_SM)

    def _try_setting(self) -> str:
        """Set the present values again, which is harmless, to find out if setting is permitted."""
        nvml = self._nvml
        for gpu in self.gpus:
            try:
                try:
                    limit_mW = self._limits_mW[gpu.uuid]
                    if limit_mW is None:
                        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
                    nvml.nvmlDeviceSetPowerManagementLimit(gpu.handle, limit_mW)
                except nvml.NVMLError_NotSupported:
                    # Some cards take no limit, but still lock clocks, under the same permission.
                    self._limit_known = False
                    mode = nvml.nvmlDeviceGetPersistenceMode(gpu.handle)
                    nvml.nvmlDeviceSetPersistenceMode(gpu.handle, mode)
            except nvml.NVMLError_NoPermission:
                self.needs_root = True
                return needs_root(gpu)
            except nvml.NVMLError as error:
                return f"GPU {gpu.index} ({gpu.name}) takes no settings: {error}"
        return ""

    @property
    def _no_limit(self) -> str:
        return f"power_limit_W cannot be set: {self.gpus[0].name} takes no limit"

    def _supported(self) -> tuple[int, ...]:
        """Return the SM clocks, ascending, MHz, of every GPU at its highest memory clock."""
        nvml, common = self._nvml, None
        for gpu in self.gpus:
            try:
                memory = max(nvml.nvmlDeviceGetSupportedMemoryClocks(gpu.handle))
                clocks = nvml.nvmlDeviceGetSupportedGraphicsClocks(gpu.handle, memory)
            except (nvml.NVMLError, ValueError):
                return ()
            common = set(clocks) if common is None else common & set(clocks)
        return tuple(sorted(common or ()))

    def _limit_range_W(self) -> tuple[float, float]:
        """Return the power limits that all GPUs take, at most the present ones; (0, 0): none."""
        nvml = self._nvml
        if not self._limit_known:
            return 0.0, 0.0
        lowest = [
            ask(nvml, None, lambda: nvml.nvmlDeviceGetPowerManagementLimitConstraints(gpu.handle))  # noqa: B023
            for gpu in self.gpus
        ]
        if None in lowest:
            return 0.0, 0.0
        highest_mW = min(each or 0 for each in self._limits_mW.values())
        return max(low for low, _ in lowest) / 1000, highest_mW / 1000

    def _snap(self, name: str, clock_MHz: int, offered: Sequence[int], notes: list[str]) -> int:
        if not offered:
            raise InputError(f"{name} cannot be set: {self.gpus[0].name} lists no clocks")
        return snapped(name, clock_MHz, offered, notes, f" on {self.gpus[0].name}")

    def _memory_clocks(self) -> tuple[int, ...]:
        nvml = self._nvml
        lists = [
            set(ask(nvml, (), lambda: nvml.nvmlDeviceGetSupportedMemoryClocks(gpu.handle)))  # noqa: B023
            for gpu in self.gpus
        ]
        return tuple(sorted(set.intersection(*lists)))

    def _clocks(self, name: str, value: Value, ranks: int, notes: list[str]) -> tuple[int, ...]:
        """Convert a clock setting to one supported clock per GPU."""
        offered = self.supported_clocks_MHz if name == "clock_MHz" else self._memory_clocks()
        values = per_device(name, value, ranks, "GPUs")
        if not all(isinstance(clock, int) for clock in values):
            raise InvalidValue(name, value, "an integer, or one a pipeline stage")
        return tuple(self._snap(name, int(clock), offered, notes) for clock in values)  # type: ignore[arg-type]

    def _limits(self, value: Value, ranks: int) -> tuple[int, ...]:
        """Convert a power limit to one per GPU, in milliwatts."""
        if not self._limit_known:
            raise InputError(self._no_limit)
        limits = []
        values = per_device("power_limit_W", value, ranks, "GPUs")
        for gpu, watts in zip(self.gpus, values, strict=False):
            if not isinstance(watts, int | float):
                raise InvalidValue("power_limit_W", value, "a number of watts")
            limit_mW = round(1000 * watts)
            low, high = self._nvml.nvmlDeviceGetPowerManagementLimitConstraints(gpu.handle)
            if not low <= limit_mW <= high:
                legal = f"from {low / 1000:g} to {high / 1000:g} on {gpu.name}"
                raise InvalidValue("power_limit_W", value, legal)
            limits.append(limit_mW)
        return tuple(limits)

    # ---- the protocol

    def apply(self, live: Settings, *, ranks: int | None = None) -> Applied:
        require_settable(self, live)
        ranks = len(self.gpus) if ranks is None else min(ranks, len(self.gpus))
        notes: list[str] = []
        settings = dict(live)
        wanted = _Wanted()
        with all_or_nothing(self, live, "the GPUs", self._nvml.NVMLError):
            for name in ("clock_MHz", "memory_clock_MHz"):
                if name not in live:
                    continue
                value = live[name]
                clocks = self._clocks(name, value, ranks, notes)
                if isinstance(value, tuple):
                    settings[name] = clocks[: ranks : ranks // len(value)]
                else:
                    settings[name] = clocks[0]
                wanted = replace(wanted, **{name: clocks})
            if "power_limit_W" in live:
                wanted = replace(wanted, limit_mW=self._limits(live["power_limit_W"], ranks))
            notes += self._notes(wanted)
            self._change(wanted, self.gpus[:ranks])
        return Applied(Settings(settings), tuple(notes))

    def _notes(self, wanted: _Wanted) -> list[str]:
        """Return the notes to show when clocks are first changed."""
        if self.means == "application clocks":  # NVML tells the earlier ones
            return []
        first = not any("Locked" in what for _, what in self._touched)
        unknown = wanted.memory_clock_MHz is not None or (
            wanted.clock_MHz is not None and self._earlier_clocks_MHz is None
        )
        if not (first and unknown):
            return []
        return [
            "NVML cannot tell whether clocks were locked before; the lock will be released "
            "afterwards"
        ]

    def _change(self, wanted: _Wanted, used: Sequence[Gpu]) -> None:
        """Set the GPUs in use; restore knobs, and other GPUs, that were changed before.

        GPUs that no rank uses are left alone: a lock raises their idle power.
        """
        nvml, by_application = self._nvml, self.means == "application clocks"
        sets_clock, sets_memory = wanted.clock_MHz is not None, wanted.memory_clock_MHz is not None
        for gpu in used:
            stood: dict[str, tuple[int, ...]] = {}
            if by_application and (sets_clock or sets_memory):
                stood["ApplicationsClocks"] = self._application_MHz(gpu)
            elif sets_clock:
                stood["GpuLockedClocks"] = self._earlier_clocks_MHz or ()
            if sets_memory and not by_application:
                stood["MemoryLockedClocks"] = ()
            if wanted.limit_mW is not None:
                stood["PowerManagementLimit"] = (self._limits_mW[gpu.uuid] or 0,)
            for what, values in stood.items():
                self._touched.setdefault((gpu.uuid, what), Earlier(gpu.uuid, what, values))
        if self._touched:
            self._guard.expect(list(self._touched.values()))
        stay = {(gpu.uuid, what) for gpu in used for what in stood}
        back = [earlier for key, earlier in self._touched.items() if key not in stay]
        if problems := put_back(nvml, back):
            raise GovernorError("; ".join(problems))
        for number, gpu in enumerate(used):
            if by_application and (sets_clock or sets_memory):
                memory, sm = self._touched[gpu.uuid, "ApplicationsClocks"].values
                nvml.nvmlDeviceSetApplicationsClocks(
                    gpu.handle,
                    wanted.memory_clock_MHz[number] if wanted.memory_clock_MHz else memory,
                    wanted.clock_MHz[number] if wanted.clock_MHz else sm,
                )
            else:
                if wanted.memory_clock_MHz is not None:
                    clock = wanted.memory_clock_MHz[number]
                    nvml.nvmlDeviceSetMemoryLockedClocks(gpu.handle, clock, clock)
                if wanted.clock_MHz is not None:
                    clock = wanted.clock_MHz[number]
                    try:
                        nvml.nvmlDeviceSetGpuLockedClocks(gpu.handle, clock, clock)
                    except nvml.NVMLError_NotSupported:  # nor can it be put back
                        for left in used[number:]:
                            del self._touched[left.uuid, "GpuLockedClocks"]
                        raise
            if wanted.limit_mW is not None:
                limit_mW = wanted.limit_mW[number]
                try:
                    nvml.nvmlDeviceSetPowerManagementLimit(gpu.handle, limit_mW)
                except nvml.NVMLError_NotSupported:
                    self._limit_known = False  # which only the attempt tells
                    for left in used[number:]:
                        del self._touched[left.uuid, "PowerManagementLimit"]
                    self.restore()
                    raise InputError(self._no_limit) from None
                if (now_mW := self._limit_mW(gpu)) != limit_mW:
                    raise GovernorError(
                        f"the power limit of GPU {gpu.index} is {now_mW} mW after {limit_mW} mW "
                        "was set"
                    )

    def delivered(self) -> dict[str, float]:
        return over_devices([clock_state(self._nvml, gpu) for gpu in self.gpus])

    def restore(self) -> None:
        if problems := put_back(self._nvml, list(self._touched.values())):
            raise GovernorError("; ".join(problems))
        self._touched = {}
        self._guard.done()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.restore()
        finally:
            self._guard.take_over()  # there is one if restoring failed: it tries once more
            ask(self._nvml, None, self._nvml.nvmlShutdown)
