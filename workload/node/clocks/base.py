"""The interface of governors, and the governor of a node whose clocks cannot be set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError, InvalidValue, UnknownName
from tuner.search_spaces.knobs import Value, stage_values
from tuner.search_spaces.plugins import Socket
from tuner.workload.node.clocks.own_guard import GuardError

#: Ways to set clocks: those of GPUs (`clock_backends`), and the governor of cores.
SOCKET = Socket(
    "joulefront.clocks",
    "way to set clocks",
    1,
    ("backend",),
    {
        "nvml": "tuner.workload.node.clocks.clock_backends",
        "zeusd": "tuner.workload.node.clocks.zeusd",
        "guard": "tuner.workload.node.clocks.root_guard",
        "cores": "tuner.workload.node.clocks.cpu:CpuGovernor",
    },
)
#: Name of the fastest used core's clock in power samples.
FASTEST = "fastest_core_MHz"
#: The knobs that governors set.
LIVE = ("clock_MHz", "memory_clock_MHz", "power_limit_W")


class GovernorError(Exception):
    """Failure of a device to accept or restore a setting; one sentence names it."""


class KnobRefused(GovernorError):
    """Refusal of a value by a knob that the user declares; the node itself is as it should be."""


class UnsupportedKnob(InputError):
    """Refusal of every value of a knob by devices that cannot be set so; nothing else is wrong."""

    def __init__(self, knob: str, why: str) -> None:
        super().__init__(f"{knob} cannot be set: {why}")
        self.knob = knob


class SetByOthers(InputError):
    """Refusal of a value that would undo a later setting by another process."""


@dataclass(frozen=True)
class AppliedSettings:
    """Settings as set, at the nearest supported values, and notes, a phrase each."""

    settings: Settings
    notes: tuple[str, ...] = ()


@runtime_checkable
class Governor(Protocol):
    """Control of the live knobs of one node's devices.

    `why_not` is a sentence with what an administrator would run, else empty; the supported clocks
    are ascending, empty where none may be asked for; the limit's range is the lowest that may be
    asked for and the highest, that of the machine as it is, or (0, 0).
    """

    can_set: bool
    why_not: str
    supported_clocks_MHz: tuple[int, ...]
    limit_range_W: tuple[float, float]

    def apply(self, live: Settings, *, ranks: int | None = None) -> AppliedSettings:
        """Make `live` the whole live setting: a knob that it does not name returns to its original
        value.

        A value is one for all devices, or a tuple with one a pipeline stage, which share the
        devices of `ranks` (None: all).

        Raises:
            UnsupportedKnob: the devices take no setting of a knob.
            SetByOthers: the setting would undo what another process has set meanwhile.
            InputError: the setting is not one that these devices take, or none may be set.
            GovernorError: a device refused; the earlier settings were put back.
        """
        ...

    def delivered(self) -> dict[str, float]:
        """Return the present state of the devices: "clock_MHz", "throttle_power" (0 or 1), ...

        Means over the devices, the hottest temperature and any throttle; empty where unknown.
        """
        ...

    def foreign(self) -> tuple[str, ...]:
        """Return a sentence for each setting that another process has changed since the last call.

        Such a setting stays: from then on it is the one that `restore` leaves in force.
        """
        ...

    def restore(self) -> None:
        """Restore the settings from before the first `apply`, but for those that another process
        has changed since; GovernorError names those that failed.
        """
        ...

    def close(self) -> None:
        """Restore and release the devices. May be called twice."""
        ...


@runtime_checkable
class CoreGovernor(Governor, Protocol):
    """Governor of a processor's cores.

    `clock_grant` and `limit_grant` are the lines by which an administrator permits clocks and power
    limits, else empty. `limit_range_W` is a package's, `cores_per_package` the number of cores that
    share a limit, 0 if there is none; `default_clock_MHz` is the highest that the cores may take
    now, 0 if unknown.
    """

    clock_grant: str
    limit_grant: str
    cores_per_package: int
    default_clock_MHz: int


def require_settable(governor: Governor, live: Settings) -> None:
    """Raise UnknownName for a name that is not a live knob, InputError if a governor may not set
    one.
    """
    for name in live:
        if name not in LIVE:
            raise UnknownName("live knob", name, LIVE)
    if live and not governor.can_set:
        raise InputError(f"cannot set {live.short} here: {governor.why_not}")


def per_device(name: str, value: Value, devices: int, kind: str) -> tuple[Value, ...]:
    """Return one value for each device of a value, or tuple of one a stage that divide them."""
    stages = stage_values(value)
    if devices % len(stages):
        legal = f"one value, or one for each of stages that divide the {devices} {kind}"
        raise InvalidValue(name, value, legal)
    return tuple(part for part in stages for _ in range(devices // len(stages)))


def snapped(
    name: str, clock_MHz: int, offered: Sequence[int], notes: list[str], where: str = ""
) -> int:
    """Return the nearest of the offered clocks, ascending; add a note if it is another.

    InvalidValue if the clock is below or above all of them; `where` ends the sentence.
    """
    if not offered[0] <= clock_MHz <= offered[-1]:
        raise InvalidValue(name, clock_MHz, f"from {offered[0]} to {offered[-1]}{where}")
    nearest = min(offered, key=lambda clock: (abs(clock - clock_MHz), clock))
    note = f"{name} {clock_MHz} snapped to {nearest}"
    if nearest != clock_MHz and note not in notes:
        notes.append(note)
    return nearest


@contextmanager
def all_or_nothing(
    governor: Governor, live: Settings, devices: str, refusal: type[Exception]
) -> Iterator[None]:
    """Put the earlier settings back, and raise GovernorError, if the devices refuse."""
    try:
        yield
    except (refusal, GovernorError, GuardError) as error:
        sentence = f"{devices} did not take {live.short}: {error}"
        try:
            governor.restore()
        except GovernorError as worse:
            sentence += f"; and {worse}"
        raise GovernorError(sentence) from error


class FixedGovernor:
    """Governor for a node that cannot control clocks: the live knobs are a fixed dimension."""

    can_set = False
    supported_clocks_MHz: tuple[int, ...] = ()
    limit_range_W = (0.0, 0.0)

    def __init__(self, why_not: str) -> None:
        self.why_not = why_not

    def apply(self, live: Settings, *, ranks: int | None = None) -> AppliedSettings:
        if live:
            raise InputError(f"cannot set {live.short} here: {self.why_not}")
        return AppliedSettings(live)

    def delivered(self) -> dict[str, float]:
        return {}

    def foreign(self) -> tuple[str, ...]:
        return ()

    def restore(self) -> None:
        pass

    def close(self) -> None:
        pass
