"""Governor of GPUs: sets clocks and power limits, reads back the delivered ones, restores.

Permission is found out before the first probe without a write to the GPU
(`tuner.workload.node.clocks.clock_backends`). A request is snapped to the nearest supported value;
`delivered` is what the device then runs at. Before the first change a guard process is given the
earlier settings (`tuner.workload.node.clocks.own_guard`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InvalidValue
from tuner.search_spaces.knobs import Value, by_stage, stage_values
from tuner.workload.node.clocks import guard
from tuner.workload.node.clocks.base import (
    AppliedSettings,
    GovernorError,
    SetByOthers,
    UnsupportedKnob,
    all_or_nothing,
    per_device,
    require_settable,
    snapped,
)
from tuner.workload.node.clocks.clock_backends import (
    NVML_MEANS,
    available_backends,
    earlier_lock,
)
from tuner.workload.node.clocks.own_guard import EarlierValues, Guard, GuardError, put_back
from tuner.workload.node.meters.base import MeterError, over_devices
from tuner.workload.node.meters.gpus import Gpu, clock_state, open_nvml, query, visible_gpus

#: Reason for fixed clocks where the user wants them so.
LEFT_ALONE = "they are left alone (--no-clocks, or clock_control = false in the cluster's file)"
#: What NVML sets for each knob, in the order in which it is set.
_NVML_SETTING = {
    "memory_clock_MHz": "MemoryLockedClocks",
    "clock_MHz": "GpuLockedClocks",
    "power_limit_W": "PowerManagementLimit",
}
#: What a GPU, or its driver, refuses with the setter.
_NOUNS = {
    "MemoryLockedClocks": "lock of its memory's clock",
    "GpuLockedClocks": "lock of its clock",
    "PowerManagementLimit": "limit",
}
#: Reason for fixed clocks where there is nothing to set.
TAKES_NONE = "takes neither a clock nor a power limit: NVML lists none"


def _limit_mW(gpu: Gpu) -> int | None:
    return gpu.query(None, "PowerManagementLimit")


class NvmlGovernor:
    """SM clock, memory clock and power limit of the visible GPUs, through NVML.

    `environ` holds CUDA_VISIBLE_DEVICES, and EARLIER_CLOCKS_MHZ=MIN,MAX, the lock that an
    administrator has set: NVML cannot be asked for it, and without, putting back releases the lock.
    `means` is how clocks are set: "locked clocks", "zeusd" or "guard".

    MeterError if no GPU is visible, InputError if the devices cannot be used as named.
    """

    def __init__(
        self,
        *,
        environ: Mapping[str, str] | None = None,
        leave_alone: bool = False,
        guarded: bool = True,
    ) -> None:
        self._closed = False
        self._environ = os.environ if environ is None else environ
        self._earlier_clocks_MHz = earlier_lock(self._environ)
        self._nvml = open_nvml()  # the chosen way's, once there is one
        self._guard = Guard(None)
        try:
            self.gpus = visible_gpus(self._nvml, environ=environ)
            if not self.gpus:
                raise MeterError("NVML runs, but no GPU is visible to this process")
            self._limits_mW = {gpu.uuid: _limit_mW(gpu) for gpu in self.gpus}
            self._ours_mW: dict[str, int] = {}  # the limits that this search holds
            self._others_mW: dict[str, int] = {}  # those that another process has set meanwhile
            self._changed: list[str] = []  # sentences on these
            self._unsupported: dict[str, str] = {}  # the reason against each refused setting
            self._worked = set[str]()  # settings that a GPU has taken
            if None in self._limits_mW.values():
                self._unsupported["PowerManagementLimit"] = self._takes_none("PowerManagementLimit")
            self.means = NVML_MEANS
            self._restored: Callable[[], Collection[str]] | None = None  # by the way itself
            self.why_not = LEFT_ALONE if leave_alone else self._find_means(guarded)
            self.can_set = not self.why_not
            self.supported_clocks_MHz = self._supported() if self.can_set else ()
            self.limit_range_W = self._limit_range_W() if self.can_set else (0.0, 0.0)
            if self.can_set and not self.supported_clocks_MHz and not any(self.limit_range_W):
                self.can_set, self.why_not = False, f"{self.gpus[0].name} {TAKES_NONE}"
        except BaseException:
            self._nvml.nvmlShutdown()
            raise
        self._touched: dict[tuple[str, str], EarlierValues] = {}

    # ---- what stands, and what is possible

    def _find_means(self, guarded: bool) -> str:
        # Returns the reasons if nothing can be set.
        if self.gpus[0].whole:
            return f"{self.gpus[0].name}, a MIG slice, shares its GPU's clocks"
        why_not = ""
        for way in available_backends(self._nvml, self.gpus[0], self._environ):
            try:
                refused = way.why_not()
            except self._nvml.NVMLError as error:
                refused = str(error)
            if not refused:
                self.means, self._nvml = way.means, way.library
                self._restored = way.restored
                if guarded and way.guard:
                    self._guard = Guard(way.guard)
                return ""
            if why_not:
                refused = f"{why_not}; and {way.where} does not do it either: {refused}"
            why_not = refused
        return why_not

    def _takes_none(self, setting: str) -> str:
        return f"{self.gpus[0].name} takes no {_NOUNS[setting]}"

    def _unsupported_knob(self, setting: str) -> UnsupportedKnob:
        (knob,) = (knob for knob, name in _NVML_SETTING.items() if name == setting)
        return UnsupportedKnob(knob, self._unsupported[setting])

    def _supported(self) -> tuple[int, ...]:
        # GPUs before Volta cannot lock a clock (NVML API).
        if any((0, 0) < gpu.capability < (7, 0) for gpu in self.gpus):
            return ()
        return tuple(sorted(set.intersection(*(set(gpu.clocks_MHz) for gpu in self.gpus))))

    def _limit_range_W(self) -> tuple[float, float]:
        ranges = [gpu.query(None, "PowerManagementLimitConstraints") for gpu in self.gpus]
        if "PowerManagementLimit" in self._unsupported or None in ranges:
            return 0.0, 0.0
        if any(low == high for low, high in ranges):  # a limit that is fixed
            return 0.0, 0.0
        highest_mW = min(each or 0 for each in self._limits_mW.values())
        return max(low for low, _ in ranges) / 1000, highest_mW / 1000

    def _snap(self, name: str, clock_MHz: int, offered: Sequence[int], notes: list[str]) -> int:
        if not offered:
            raise UnsupportedKnob(name, f"{self.gpus[0].name} lists no clocks")
        return snapped(name, clock_MHz, offered, notes, f" on {self.gpus[0].name}")

    def _clocks(self, name: str, value: Value, ranks: int, notes: list[str]) -> tuple[int, ...]:
        offered = self.supported_clocks_MHz
        if name == "memory_clock_MHz":
            offered = tuple(
                sorted(set.intersection(*(set(gpu.memory_clocks_MHz) for gpu in self.gpus)))
            )
        values = per_device(name, value, ranks, "GPUs")
        if not all(isinstance(clock, int) for clock in values):
            raise InvalidValue(name, value, "an integer, or one a pipeline stage")
        return tuple(self._snap(name, int(clock), offered, notes) for clock in values)  # type: ignore[arg-type]

    def _limits(self, value: Value, ranks: int) -> tuple[int, ...]:
        limits = []
        values = per_device("power_limit_W", value, ranks, "GPUs")
        for gpu, watts in zip(self.gpus, values, strict=False):
            if not isinstance(watts, int | float):
                raise InvalidValue("power_limit_W", value, "a number of watts")
            limit_mW = round(1000 * watts)
            low, high = gpu.get("PowerManagementLimitConstraints")
            if not low <= limit_mW <= high:
                legal = f"from {low / 1000:g} to {high / 1000:g} on {gpu.name}"
                raise InvalidValue("power_limit_W", value, legal)
            if limit_mW > (most_mW := self._others_mW.get(gpu.uuid, limit_mW)):
                raise SetByOthers(
                    f"a power limit of {watts:g} W is above the {most_mW / 1000:g} W to which "
                    f"another process has set GPU {gpu.index} since; that stays"
                )
            limits.append(limit_mW)
        return tuple(limits)

    # ---- the protocol

    def apply(self, live: Settings, *, ranks: int | None = None) -> AppliedSettings:
        require_settable(self, live)
        ranks = len(self.gpus) if ranks is None else min(ranks, len(self.gpus))
        notes: list[str] = []
        settings = dict(live)
        wanted = [dict[str, tuple[int, ...]]() for _ in range(ranks)]
        self._look()
        with all_or_nothing(self, live, "the GPUs", self._nvml.NVMLError):
            for name, setting in _NVML_SETTING.items():
                if name not in live:
                    continue
                if setting in self._unsupported:
                    raise self._unsupported_knob(setting)
                value = live[name]
                values: list[tuple[int, ...]]
                if name == "power_limit_W":
                    values = [(limit_mW,) for limit_mW in self._limits(value, ranks)]
                else:
                    clocks = self._clocks(name, value, ranks, notes)
                    values = [(clock, clock) for clock in clocks]
                    per_stage = ranks // len(stage_values(value))
                    settings[name] = clocks[::per_stage] if by_stage(value) else clocks[0]
                for of_gpu, each in zip(wanted, values, strict=True):
                    of_gpu[setting] = each
            notes += self._notes(live)
            self._change(wanted)
        return AppliedSettings(Settings(settings), tuple(notes))

    def _notes(self, live: Settings) -> list[str]:
        first = not any("Locked" in setting for _, setting in self._touched)
        if self._restored is not None:
            known = set(self._restored())
        else:
            known = set() if self._earlier_clocks_MHz is None else {"GpuLockedClocks"}
        set_now = {
            setting
            for name, setting in _NVML_SETTING.items()
            if name in live and "Locked" in setting
        }
        if not first or set_now <= known:
            return []
        return [
            "NVML cannot tell whether clocks were locked before; the lock will be released "
            "afterwards"
        ]

    def _stood(self, gpu: Gpu, setting: str) -> tuple[int, ...]:
        if self._restored is not None:  # it knows by itself, and believes nobody
            return ()
        if setting == "PowerManagementLimit":
            return (self._limits_mW[gpu.uuid] or 0,)
        return (self._earlier_clocks_MHz or ()) if setting == "GpuLockedClocks" else ()

    def _look(self) -> None:
        # A limit that is not this search's is what stood, from now on.
        for gpu in self.gpus:
            stood_mW = self._ours_mW.get(gpu.uuid, self._limits_mW[gpu.uuid])
            now_mW = _limit_mW(gpu)
            if stood_mW is None or now_mW in (None, stood_mW):
                continue
            assert now_mW is not None
            self._changed.append(
                f"the power limit of GPU {gpu.index} is {now_mW / 1000:g} W and not the "
                f"{stood_mW / 1000:g} W of this search: another process has set it"
            )
            self._limits_mW[gpu.uuid] = self._others_mW[gpu.uuid] = now_mW
            self._ours_mW.pop(gpu.uuid, None)
            if self._touched.pop((gpu.uuid, "PowerManagementLimit"), None) is not None:
                with contextlib.suppress(GuardError):  # which looks for itself, too
                    self._guard.expect(list(self._touched.values()))
            self.limit_range_W = self._limit_range_W() if self.can_set else (0.0, 0.0)

    def foreign(self) -> tuple[str, ...]:
        self._look()
        changed, self._changed = tuple(self._changed), []
        return changed

    def _change(self, wanted: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
        # GPUs that no rank uses are left alone: a lock raises their idle power.
        used = self.gpus[: len(wanted)]
        before, stay = set(self._touched), set[tuple[str, str]]()
        for gpu, of_gpu in zip(used, wanted, strict=True):
            for setting, values in of_gpu.items():
                stay.add((gpu.uuid, setting))
                earlier = EarlierValues(gpu.uuid, setting, self._stood(gpu, setting))
                if setting == "PowerManagementLimit":
                    held_mW = self._ours_mW.get(gpu.uuid, self._limits_mW[gpu.uuid] or 0)
                    earlier = replace(earlier, ours=(held_mW, *values))
                self._touched[gpu.uuid, setting] = earlier
        try:
            if self._touched:
                self._guard.expect(list(self._touched.values()))
        except GuardError:  # so what is new is not ours to put back
            self._touched = {key: self._touched[key] for key in before}
            raise
        back = [earlier for key, earlier in self._touched.items() if key not in stay]
        if problems := put_back(self._nvml, back):
            raise GovernorError("; ".join(problems))
        for old in back:
            if old.what == "PowerManagementLimit":
                self._ours_mW.pop(old.uuid, None)
        for gpu, of_gpu in zip(used, wanted, strict=True):
            for setting, values in of_gpu.items():
                self._set(gpu, setting, values, new=set(self._touched) - before)
            limit_mW = of_gpu.get("PowerManagementLimit")
            if limit_mW and (now_mW := _limit_mW(gpu)) != limit_mW[0]:
                self._take_as_ours(gpu, now_mW)
                raise GovernorError(
                    f"the power limit of GPU {gpu.index} is {now_mW} mW after {limit_mW[0]} mW "
                    "was set"
                )

    def _take_as_ours(self, gpu: Gpu, limit_mW: int | None) -> None:
        # A driver may round what is set, or ignore it.
        if limit_mW is not None:
            self._ours_mW[gpu.uuid] = limit_mW
            key = (gpu.uuid, "PowerManagementLimit")
            self._touched[key] = replace(self._touched[key], ours=(limit_mW,))

    def _set(
        self, gpu: Gpu, setting: str, values: Sequence[int], *, new: set[tuple[str, str]]
    ) -> None:
        # `new` are the settings that this change touches first.
        for attempt in range(guard.TRIES):
            try:
                getattr(self._nvml, f"nvmlDeviceSet{setting}")(gpu.handle, *values)
                self._worked.add(setting)
                if setting == "PowerManagementLimit":
                    self._ours_mW[gpu.uuid] = values[0]
                return
            except self._nvml.NVMLError as error:
                why = self._refusal(gpu, setting, error)
                if not why:
                    raise
                if error.value in self._lasting or attempt == guard.TRIES - 1:
                    break
                time.sleep(guard.WAIT_S)
        mine = {key for key in new if key[1] == setting}
        put_back(self._nvml, [self._touched[key] for key in mine], tries=1)  # as far as it can be
        for key in mine:
            del self._touched[key]
        self._unsupported[setting] = why
        self.restore()
        raise self._unsupported_knob(setting) from None

    @property
    def _lasting(self) -> tuple[int, int]:
        # Errors of a setter that a further attempt meets again.
        return self._nvml.NVML_ERROR_NOT_SUPPORTED, self._nvml.NVML_ERROR_NO_PERMISSION

    def _refusal(self, gpu: Gpu, setting: str, error: Any) -> str:
        """Return why the devices take no setting of a kind; "" if it is this GPU that fails.

        Only the attempt tells: CAP_SYS_ADMIN is there in containers, and with drivers of clouds,
        that permit nothing. Any other error refuses a setter that has never worked, too, as long
        as the GPU answers.
        """
        if error.value == self._nvml.NVML_ERROR_NOT_SUPPORTED:
            return self._takes_none(setting)
        failing = error.value in (
            self._nvml.NVML_ERROR_GPU_IS_LOST,
            self._nvml.NVML_ERROR_RESET_REQUIRED,
        )
        lasting = error.value in self._lasting or setting not in self._worked
        if failing or not lasting or gpu.query(None, "UUID") is None:
            return ""
        who = "the driver" if self.means == NVML_MEANS else self.means
        return (
            f"{who} refuses any {_NOUNS[setting]} of {gpu.name} here "
            f"({error.__cause__ or error}); --no-clocks leaves clocks and power limits alone"
        )

    def delivered(self) -> dict[str, float]:
        return over_devices([clock_state(gpu) for gpu in self.gpus])

    def restore(self) -> None:
        self._look()
        if problems := put_back(self._nvml, list(self._touched.values())):
            raise GovernorError("; ".join(problems))
        self._touched, self._ours_mW = {}, {}
        with contextlib.suppress(GuardError):  # there is nothing left to guard
            self._guard.idle()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.restore()
            self._guard.done()
            for sentence in self.foreign():
                print(f"{sentence}; it stays", file=sys.stderr)
        finally:
            self._guard.take_over()  # there is one if restoring failed: it tries once more
            query(self._nvml, None, self._nvml.nvmlShutdown)
