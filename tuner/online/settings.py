"""Live settings to choose from: clocks, or power limits where no clock can be set, and declared
live knobs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any

from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.declared import Knob
from tuner.workload.clocks.base import Governor

#: Values to choose from: so many, down to this share of the highest.
VALUES, LOWEST = 8, 0.5


def offers(
    governor: Governor, *, every: bool, measured_MHz: Collection[float]
) -> list[tuple[float, list[Settings]]]:
    """Return what may be chosen from, the better first: each with the machine's own value."""
    found: list[tuple[float, list[Settings]]] = []
    if len(clocks := clock_settings(governor, every=every, measured_MHz=measured_MHz)) > 1:
        found.append((governor.supported_clocks_MHz[-1], clocks))
    if len(limits := limit_settings(*governor.limit_range_W)) > 1:
        found.append((governor.limit_range_W[1], limits))
    return found


def with_declared(
    settings: Sequence[Settings], knobs: Sequence[Knob], present: Mapping[str, Any]
) -> list[Settings]:
    """Return the settings with each combination of values of declared knobs, today's first.

    A knob that a command sets is named only by other values: else it goes back to what it was.

    Args:
        present: values of those that the program sets, as it reads them.
    """
    choices = []
    for knob in knobs:
        today, read = knob.baseline, present.get(knob.name)
        if today is None:
            read = read if isinstance(read, int | float | str) else knob.values[0]
            today = next((each for each in knob.values if knob.reads_as(read, each)), read)
        others = [{knob.name: each} for each in knob.values if each != today]
        choices.append([{knob.name: today} if knob.by_script else {}, *others])
    return [
        Settings({key: value for part in (setting, *own) for key, value in part.items()})
        for own in product(*choices)
        for setting in settings
    ]


def limit_settings(low_W: float, high_W: float) -> list[Settings]:
    """Return the machine as it is, then falling power limits in whole watts."""
    least = max(low_W, LOWEST * high_W)
    spread = [high_W - (high_W - least) * (i + 1) / VALUES for i in range(VALUES)]
    watts = sorted({math.ceil(each) for each in spread} - {math.ceil(high_W)}, reverse=True)
    return [Settings(), *(Settings(power_limit_W=each) for each in watts)]


def clock_settings(
    governor: Governor, *, every: bool = False, measured_MHz: Collection[float] = ()
) -> list[Settings]:
    """Return the live settings to choose from, the machine's own first, then falling clocks.

    Args:
        every: all clocks below the highest, not only a few of the upper half.
        measured_MHz: clocks that were measured earlier, which are added.
    """
    clocks = governor.supported_clocks_MHz if governor.can_set else ()
    if not clocks:
        return [Settings()]
    top = clocks[-1]
    least = 0 if every else LOWEST * top
    offered = sorted((each for each in clocks if least <= each < top), reverse=True)
    if len(offered) > VALUES and not every:
        offered = [offered[round((i + 1) * len(offered) / VALUES) - 1] for i in range(VALUES)]
        near = {each for each in clocks for clock in measured_MHz if abs(each - clock) <= 1}
        offered = sorted({*offered, *(each for each in near if least <= each < top)}, reverse=True)
    return [Settings(), *(Settings(clock_MHz=clock) for clock in offered)]
