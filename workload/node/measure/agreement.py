"""Windows whose energy counter and sampled power differ: measured again, then decided by levels.

A device at work draws more than it does idle, and no more than its limit; over a window it draws no
more on average than its samples show at work. Of two figures that still differ in a longer window,
the one that contradicts these levels is not used. Where both fit, the counter's is used, and its
error says how far the other one is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tuner.workload.node.measure.statistics import Window, standard_error
from tuner.workload.node.meters.base import Reading
from tuner.workload.records.probe import WindowPolicy

#: Share from which counter and sampled power differ, if the samples are fine enough to show it.
DIFFERS = 0.02
#: Standard errors of the sampled power that a difference must exceed as well.
STANDARD_ERRORS = 2.0
#: The second window is this many times as long: what is wrong at its edges has a smaller share.
LONGER = 2.0
#: A difference in joules that grows by less with a window of twice the length is one of its edges.
GROWTH = 1.4
#: Sensors are right to this share (NVML API, nvmlDeviceGetPowerUsage).
SENSOR_ERROR = 0.05

Source = Literal["", "counter", "samples"]


@dataclass(frozen=True)
class Levels:
    """Power of all devices of the lease together, watts.

    Attributes:
        counted_idle_W, sampled_idle_W: while idle, by the counter and by samples; None if unknown.
        most_W: the devices' limits together; infinite if unknown.
    """

    counted_idle_W: float | None = None
    sampled_idle_W: float | None = None
    most_W: float = math.inf


@dataclass(frozen=True)
class AgreedWindow:
    """The window to use, and notes on it.

    `compared` is False if the samples are no check of the window's energy.
    """

    window: Window
    notes: tuple[str, ...] = ()
    compared: bool = True


def sampling_error(window: Window) -> float:
    """Return the relative error of the energy by samples, from their spread and their gaps."""
    powers = [sample.power_W for sample in window.samples]
    if len(powers) < 3 or not window.energy_J > 0:
        return math.inf
    low, high = np.quantile(powers, (0.1, 0.9))
    times = [window.opened.time_s, *(s.time_s for s in window.samples), window.closed.time_s]
    gap_s = float(np.diff(times).max())
    by_spread_J, by_gap_J = standard_error(powers) * window.length_s, (high - low) * gap_s
    return math.hypot(by_spread_J, by_gap_J) / window.energy_J


def difference(window: Window) -> float:
    """Return the relative difference of sampled power from the counter; 0 within the samples'
    error.
    """
    if not window.energy_J > 0 or math.isnan(window.sampled_energy_J):
        return 0.0
    found = window.sampled_energy_J / window.energy_J - 1
    least = max(DIFFERS, STANDARD_ERRORS * sampling_error(window))
    return found if abs(found) > least else 0.0


def contradicted(first: Window, second: Window, levels: Levels) -> tuple[Source, str]:
    """Return the source that the levels contradict and the reason; "" if neither or both."""
    reasons = {
        "counter": _why_not(second.energy_J, levels.counted_idle_W, second, levels)
        or _why_not_edges(first, second, levels),
        "samples": _why_not(second.sampled_energy_J, levels.sampled_idle_W, second, levels),
    }
    match reasons["counter"], reasons["samples"]:
        case (why, "") if why:
            return "counter", why
        case ("", why) if why:
            return "samples", why
        case _:
            return "", ""


def _why_not(energy_J: float, idle_W: float | None, window: Window, levels: Levels) -> str:
    power_W = energy_J / window.length_s
    if power_W > (1 + SENSOR_ERROR) * levels.most_W:
        return f"{power_W:.0f} W is above the limit of {levels.most_W:.0f} W"
    # Work that hardly draws power: both sources then say so, and do not differ by as much.
    if idle_W is not None and power_W < (1 + DIFFERS) * idle_W:
        return f"{power_W:.0f} W at work is not above its {idle_W:.0f} W when idle"
    return ""


def _why_not_edges(first: Window, second: Window, levels: Levels) -> str:
    """Return the reason against a counter that is wrong at the edges of windows, or ""."""
    idle_W, sampled_W = levels.counted_idle_W, levels.sampled_idle_W
    if not idle_W or not sampled_W or abs(idle_W / sampled_W - 1) > SENSOR_ERROR:
        return ""  # the sources have different scales
    before_J = first.energy_J - first.sampled_energy_J
    after_J = second.energy_J - second.sampled_energy_J
    if not 0 < after_J < GROWTH * before_J:
        return ""
    highest_W = float(np.quantile([sample.power_W for sample in second.samples], 0.95))
    power_W = second.energy_J / second.length_s
    if power_W <= (1 + DIFFERS) * highest_W:
        return ""  # such as an average that follows the work late
    return f"{power_W:.0f} W on average is above the {highest_W:.0f} W that was drawn at work"


def by_samples(window: Window) -> Window:
    """Return the window with the energy of its samples in place of the counter's."""
    opened, closed = window.opened, window.closed
    return replace(
        window,
        opened=replace(opened, doubt_J=0.0),
        closed=Reading(closed.time_s, opened.energy_J + window.sampled_energy_J),
    )


class Agreement:
    """Comparison of the two sources over the windows of one probe.

    A window is measured again once at most, and not if an earlier one differed by the same share.
    """

    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        self._earlier: list[tuple[float, Source, str]] = []  # difference, and what was found then

    def settle(
        self,
        first: Window,
        policy: WindowPolicy,
        again: Callable[[WindowPolicy], Window] | None,
    ) -> AgreedWindow:
        """Return the window to use in place of one whose figures may differ.

        `again` measures the same setting once more; None if there is no time for it.
        """
        found = difference(first)
        if not found or first.beaten_by is not None:
            return AgreedWindow(first)
        for share, source, why in self._earlier:
            if abs(share - found) <= DIFFERS:
                return _used(first, source, why)
        if again is None:
            return _used(first, *contradicted(first, first, self.levels))
        length_s = LONGER * first.length_s
        second = again(replace(policy, min_s=length_s, max_s=max(policy.max_s, length_s)))
        if not difference(second):
            return AgreedWindow(second)
        source, why = contradicted(first, second, self.levels)
        self._earlier.append((found, source, why))
        return _used(second, source, why)


def _used(window: Window, source: Source, why: str) -> AgreedWindow:
    if not source:
        return AgreedWindow(window)
    differ = f"energy counter and integrated power differ by {100 * difference(window):+.1f} %"
    if source == "counter":
        used = by_samples(window)
        return AgreedWindow(
            used, (f"{differ}: integrated power is used, for by the counter {why}",)
        )
    note = f"{differ}: the counter is used, for by integrated power {why}"
    return AgreedWindow(window, (note,), compared=False)
