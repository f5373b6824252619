"""The governor: sets clocks and power limits, reads back what was delivered, puts the earlier back.

Whether it may set anything is found out before the first probe, by setting what already stands. A
request is snapped to what the device supports, saying so; what the device then really runs at is
`delivered`, and that is what models learn from. Before anything is touched, a guard process learns
what stood before (`workload.guard`), so that a killed agent leaves no clock wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from search_spaces.cluster import Cluster
from search_spaces.configuration import Settings
from search_spaces.errors import InputError, InvalidValue, UnknownName
from search_spaces.knobs import Value
from workload.guard import Earlier, Guard, GuardError, put_back
from workload.meters.errors import MeterError
from workload.meters.gpus import Gpu, ask, clock_state, open_nvml, over_devices, visible_gpus

__all__ = [
    "Applied",
    "FixedGovernor",
    "Governor",
    "GovernorError",
    "NvmlGovernor",
    "open_governor",
]

LIVE = ("clock_MHz", "power_limit_W")


class GovernorError(Exception):
    """A device refused what it should take, or could not be put back; one sentence says which."""


@dataclass(frozen=True)
class Applied:
    """What came of a request.

    Attributes:
        requested: the live settings that were asked for.
        settings: what was set: the request, snapped to what the devices support.
        notes: what a reader must know, a phrase each ("clock_MHz 1000 snapped to 1005").
    """

    requested: Settings
    settings: Settings
    notes: tuple[str, ...] = ()


@runtime_checkable
class Governor(Protocol):
    """Controls the live knobs of one node's devices.

    Attributes:
        can_set: whether live knobs may be set here.
        why_not: where not, one sentence with what an administrator would run; else empty.
        supported_clocks_MHz: the clocks that may be asked for, ascending; empty where none may.
    """

    can_set: bool
    why_not: str
    supported_clocks_MHz: tuple[int, ...]

    def apply(self, live: Settings) -> Applied:
        """Make `live` the whole live setting: a knob it does not name goes back to what it was.

        Raises:
            InputError: the setting is not one that these devices take, or none may be set.
            GovernorError: a device refused; the earlier settings were put back.
        """
        ...

    def delivered(self) -> dict[str, float]:
        """What the devices run at this instant: "clock_MHz", "throttle_power" (0 or 1), ...

        Means over the devices, the hottest temperature and any throttle; empty where unknown.
        """
        ...

    def restore(self) -> None:
        """Put back what stood before the first `apply`.

        Raises:
            GovernorError: something could not be put back; the sentence says what.
        """
        ...

    def close(self) -> None:
        """Restore and let go. May be called twice."""
        ...


class FixedGovernor:
    """ "Cannot control clocks here": the live knobs are a fixed dimension."""

    can_set = False
    supported_clocks_MHz: tuple[int, ...] = ()

    def __init__(self, why_not: str) -> None:
        self.why_not = why_not

    def apply(self, live: Settings) -> Applied:
        if live:
            raise InputError(f"cannot set {live.key} here: {self.why_not}")
        return Applied(live, live)

    def delivered(self) -> dict[str, float]:
        return {}

    def restore(self) -> None:
        pass

    def close(self) -> None:
        pass


class NvmlGovernor:
    """SM clock (locked clocks) and power limit of the visible GPUs, through NVML.

    Args:
        devices: indices, UUIDs or prefixes of UUIDs; None takes CUDA_VISIBLE_DEVICES.
        nvml: what stands in for the pynvml module.
        environ: where CUDA_VISIBLE_DEVICES stands; the process's environment by default.
        earlier_clocks_MHz: the (lowest, highest) lock that an administrator has set. NVML cannot be
            asked for it; without this, putting back releases the lock.
        guard_nvml: where the guard process finds NVML (`workload.guard.Guard`); "" starts none. By
            default the real NVML is guarded and a stand-in is not.

    Raises:
        MeterError: NVML does not start, or no GPU is visible.
        InputError: the devices cannot be used as named (`workload.meters.gpus`).
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        nvml: Any = None,
        environ: Mapping[str, str] | None = None,
        earlier_clocks_MHz: tuple[int, int] | None = None,
        guard_nvml: str | None = None,
    ) -> None:
        self._guard_nvml = ("pynvml" if nvml is None else "") if guard_nvml is None else guard_nvml
        self._guard: Guard | None = None
        self._closed = False
        self._earlier_clocks_MHz = earlier_clocks_MHz
        self._nvml = open_nvml(nvml)
        try:
            self.gpus = visible_gpus(self._nvml, devices=devices, environ=environ)
            if not self.gpus:
                raise MeterError("NVML runs, but no GPU is visible to this process")
            self._limits_mW = {gpu.uuid: self._limit_mW(gpu) for gpu in self.gpus}
            self._limit_known = all(limit is not None for limit in self._limits_mW.values())
            self.why_not = self._try_setting()
            self.can_set = not self.why_not
            self.supported_clocks_MHz = self._supported() if self.can_set else ()
        except BaseException:
            self._nvml.nvmlShutdown()
            raise
        self._touched = {gpu.uuid: Earlier(gpu.uuid) for gpu in self.gpus}

    # ---- what stands, and what is possible

    def _limit_mW(self, gpu: Gpu) -> int | None:
        nvml = self._nvml
        return ask(nvml, None, lambda: nvml.nvmlDeviceGetPowerManagementLimit(gpu.handle))

    def _try_setting(self) -> str:
        """Set what already stands: harmless, and tells whether setting is permitted."""
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
                return (
                    f"setting clocks and power limits of GPU {gpu.index} needs root; run tuner as "
                    "root or in a container with --cap-add SYS_ADMIN, or let an administrator fix "
                    f"the clock with: nvidia-smi -i {gpu.index} -lgc MIN,MAX"
                )
            except nvml.NVMLError as error:
                return f"GPU {gpu.index} ({gpu.name}) takes no settings: {error}"
        return ""

    def _supported(self) -> tuple[int, ...]:
        """SM clocks that every GPU offers at its highest memory clock, ascending, MHz."""
        nvml, common = self._nvml, None
        for gpu in self.gpus:
            try:
                memory = max(nvml.nvmlDeviceGetSupportedMemoryClocks(gpu.handle))
                clocks = nvml.nvmlDeviceGetSupportedGraphicsClocks(gpu.handle, memory)
            except (nvml.NVMLError, ValueError):
                return ()
            common = set(clocks) if common is None else common & set(clocks)
        return tuple(sorted(common or ()))

    def _snap(self, clock_MHz: int, notes: list[str]) -> int:
        offered = self.supported_clocks_MHz
        if not offered:
            raise InputError(f"clock_MHz cannot be set: {self.gpus[0].name} lists no clocks")
        if not offered[0] <= clock_MHz <= offered[-1]:
            legal = f"from {offered[0]} to {offered[-1]} on {self.gpus[0].name}"
            raise InvalidValue("clock_MHz", clock_MHz, legal)
        nearest = min(offered, key=lambda clock: (abs(clock - clock_MHz), clock))
        if nearest != clock_MHz:
            notes.append(f"clock_MHz {clock_MHz} snapped to {nearest}")
        return nearest

    def _clocks(self, value: Value, notes: list[str]) -> tuple[int, ...]:
        """One clock a GPU. A tuple holds one a pipeline stage, and stages are blocks of ranks."""
        stages = value if isinstance(value, tuple) else (value,)
        if len(self.gpus) % len(stages):
            legal = f"one clock, or one for each of stages that divide the {len(self.gpus)} GPUs"
            raise InvalidValue("clock_MHz", value, legal)
        if not all(isinstance(clock, int) for clock in stages):
            raise InvalidValue("clock_MHz", value, "an integer, or one a pipeline stage")
        snapped = [self._snap(int(clock), notes) for clock in stages]
        each = len(self.gpus) // len(stages)
        return tuple(clock for clock in snapped for _ in range(each))

    def _check_limit(self, value: Value) -> int:
        if not self._limit_known:
            raise InputError(f"power_limit_W cannot be set: {self.gpus[0].name} takes no limit")
        if not isinstance(value, int | float):
            raise InvalidValue("power_limit_W", value, "a number of watts")
        limit_mW = round(1000 * value)
        for gpu in self.gpus:
            low, high = self._nvml.nvmlDeviceGetPowerManagementLimitConstraints(gpu.handle)
            if not low <= limit_mW <= high:
                legal = f"from {low / 1000:g} to {high / 1000:g} on {gpu.name}"
                raise InvalidValue("power_limit_W", value, legal)
        return limit_mW

    # ---- the protocol

    def apply(self, live: Settings) -> Applied:
        for name in live:
            if name not in LIVE:
                raise UnknownName("live knob", name, LIVE)
        if live and not self.can_set:
            raise InputError(f"cannot set {live.key} here: {self.why_not}")
        notes: list[str] = []
        settings = dict(live)
        clocks: tuple[int, ...] | None = None
        limit_mW: int | None = None
        try:
            if "clock_MHz" in live:
                clocks = self._clocks(live["clock_MHz"], notes)
                per_stage = live["clock_MHz"]
                if isinstance(per_stage, tuple):
                    each = len(clocks) // len(per_stage)
                    settings["clock_MHz"] = clocks[::each]
                else:
                    settings["clock_MHz"] = clocks[0]
                first = not any(gpu.clocks_touched for gpu in self._touched.values())
                if first and self._earlier_clocks_MHz is None:
                    notes.append(
                        "NVML cannot tell whether clocks were locked before; the lock will be "
                        "released afterwards"
                    )
            if "power_limit_W" in live:
                limit_mW = self._check_limit(live["power_limit_W"])
            self._change(clocks, limit_mW)
        except (self._nvml.NVMLError, GovernorError) as error:
            sentence = f"the GPUs did not take {live.key}: {error}"
            try:
                self.restore()
            except GovernorError as worse:
                sentence += f"; and {worse}"
            raise GovernorError(sentence) from error
        except GuardError as error:
            raise GovernorError(f"{live.key} was not set: {error}") from error
        return Applied(live, Settings(settings), tuple(notes))

    def _change(self, clocks: tuple[int, ...] | None, limit_mW: int | None) -> None:
        """Set every GPU; a knob that is None goes back to what it was where it was touched."""
        nvml = self._nvml
        for gpu in self.gpus:
            earlier = self._touched[gpu.uuid]
            if clocks is not None:
                earlier = replace(
                    earlier, clocks_touched=True, locked_clocks_MHz=self._earlier_clocks_MHz
                )
            if limit_mW is not None:
                earlier = replace(earlier, power_limit_mW=self._limits_mW[gpu.uuid])
            self._touched[gpu.uuid] = earlier
        self._tell_guard()
        if clocks is None or limit_mW is None:
            back = [
                replace(
                    earlier,
                    clocks_touched=earlier.clocks_touched and clocks is None,
                    power_limit_mW=earlier.power_limit_mW if limit_mW is None else None,
                )
                for earlier in self._touched.values()
            ]
            if problems := put_back(nvml, back):
                raise GovernorError("; ".join(problems))
        for number, gpu in enumerate(self.gpus):
            if clocks is not None:
                nvml.nvmlDeviceSetGpuLockedClocks(gpu.handle, clocks[number], clocks[number])
            if limit_mW is not None:
                nvml.nvmlDeviceSetPowerManagementLimit(gpu.handle, limit_mW)
                if (now_mW := self._limit_mW(gpu)) != limit_mW:
                    raise GovernorError(
                        f"the power limit of GPU {gpu.index} is {now_mW} mW after {limit_mW} mW "
                        "was set"
                    )

    def _tell_guard(self) -> None:
        earlier = list(self._touched.values())
        touched = any(gpu.clocks_touched or gpu.power_limit_mW is not None for gpu in earlier)
        if not self._guard_nvml or not touched:
            return
        if self._guard is None:
            self._guard = Guard(nvml=self._guard_nvml)
        try:
            self._guard.expect(earlier)
        except GuardError:  # somebody killed it: a new one learns the same
            self._guard.take_over()
            self._guard = Guard(nvml=self._guard_nvml)
            self._guard.expect(earlier)

    def delivered(self) -> dict[str, float]:
        return over_devices([clock_state(self._nvml, gpu) for gpu in self.gpus])

    def restore(self) -> None:
        if problems := put_back(self._nvml, list(self._touched.values())):
            raise GovernorError("; ".join(problems))
        self._touched = {gpu.uuid: Earlier(gpu.uuid) for gpu in self.gpus}
        if self._guard is not None:
            self._guard.done()
            self._guard = None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.restore()
        finally:
            if self._guard is not None:  # restoring failed: the guard tries once more
                self._guard.take_over()
            ask(self._nvml, None, self._nvml.nvmlShutdown)


def open_governor(cluster: Cluster, *, nvml: Any = None) -> Governor:
    """The governor of this node of `cluster`: NVML's for GPUs, else the fixed one, which says why.

    Raises:
        InputError: the GPUs cannot be used as named (`workload.meters.gpus`).
    """
    if cluster.device.type == "cpu":
        return FixedGovernor(
            "this cluster has no GPUs, and joulefront sets the clocks of GPUs only; an "
            "administrator can fix a processor's clock with: cpupower frequency-set"
        )
    try:
        return NvmlGovernor(nvml=nvml)
    except MeterError as error:
        return FixedGovernor(f"clocks are set through NVML, and that is not to be had: {error}")
