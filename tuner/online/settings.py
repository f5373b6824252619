"""Live settings to choose from: clocks, or power limits where no clock can be set, and declared
live knobs.

Stages of a pipeline with slack run slower, in proportion to their work. A stage that computes for a
share s of the slowest one's time runs at s of its clock: if its time grows as its clock falls, at
most, it takes as long as the slowest. Perseus (arXiv 2312.06902) sets a clock for each computation,
which takes clocks that switch within a micro-batch, as NVML's do not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any

from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.knob_declarations import Knob
from tuner.search_spaces.knobs import Value, stage_values
from tuner.workload.node.clocks.base import Governor

#: Values to choose from: so many, down to this share of the highest.
VALUES, LOWEST = 8, 0.5
#: Value of the machine as it is, and what may be chosen: the machine as it is, then falling values.
Offer = tuple[float, list[Settings]]
#: Power limits to choose from where a power is followed.
FINE = 48
#: Share of the slowest stage's time above which a stage has no slack: steps vary as much.
FULL = 0.95


def offers(governor: Governor, *, every: bool, measured_MHz: Collection[float]) -> list[Offer]:
    """Return the live settings to choose from, the better first, each with the machine's own
    value."""
    clocks = clock_settings(governor, every=every, measured_MHz=measured_MHz)
    limits = limit_settings(*governor.limit_range_W, every=every)
    tops = max(governor.supported_clocks_MHz, default=0), governor.limit_range_W[1]
    return [(top, each) for top, each in zip(tops, (clocks, limits), strict=True) if len(each) > 1]


def with_declared(
    settings: Sequence[Settings], knobs: Sequence[Knob], present: Mapping[str, Any]
) -> list[Settings]:
    """Return the settings with each combination of values of declared knobs, today's first.

    `present` are the values of the declared knobs, as the program reads them.
    """
    choices = []
    for knob in knobs:
        today, read = knob.baseline, present.get(knob.name)
        if today is None:
            read = read if isinstance(read, int | float | str) else knob.values[0]
            today = next((each for each in knob.values if knob.reads_as(read, each)), read)
        others = [{knob.name: each} for each in knob.values if each != today]
        choices.append([{knob.name: today}, *others])
    return [
        Settings({key: value for part in (setting, *own) for key, value in part.items()})
        for own in product(*choices)
        for setting in settings
    ]


def limit_settings(low_W: float, high_W: float, *, every: bool = False) -> list[Settings]:
    """Return the machine as it is, then falling power limits in whole watts: some, or many."""
    least, count = (low_W, FINE) if every else (max(low_W, LOWEST * high_W), VALUES)
    spread = [high_W - (high_W - least) * (i + 1) / count for i in range(count)]
    watts = sorted({math.ceil(each) for each in spread} - {math.ceil(high_W)}, reverse=True)
    return [Settings(), *(Settings(power_limit_W=each) for each in watts)]


def clock_settings(
    governor: Governor, *, every: bool = False, measured_MHz: Collection[float] = ()
) -> list[Settings]:
    """Return the machine as it is, then falling clocks: some, with those measured, or every one."""
    clocks = governor.supported_clocks_MHz if governor.can_set else ()
    least = 0 if every else LOWEST * max(clocks, default=0)
    below = [each for each in clocks[:-1] if each >= least]
    count = len(below) if every else min(VALUES, len(below))
    offered = {below[-round((i + 1) * len(below) / count)] for i in range(count)}
    offered |= {each for each in below for clock in measured_MHz if abs(each - clock) <= 1}
    return [Settings(), *(Settings(clock_MHz=clock) for clock in sorted(offered, reverse=True))]


def mean_value(value: Value) -> float:
    """Return a setting's value, or the mean of the stages' values."""
    return statistics.fmean(map(float, stage_values(value)))


def log_slowest(value: Value, top: float) -> float:
    """Return the logarithm of the slowdown that a value causes at most: 0 for the highest.

    A path through the schedule holds each stage's work once at most, and is no shorter than the
    slowest stage's before: stages slowed by 1/s lengthen it by their work, s (1/s - 1) each.
    """
    values = [float(each) for each in stage_values(value)]
    high = max(values)
    return math.log(top / high) + math.log1p(sum(1 - each / high for each in values))


def stage_shares(busy_s: Mapping[int, Sequence[float]]) -> tuple[float, ...]:
    """Return the work of each rank as a share of the slowest one's; () if none has slack."""
    work_s = [statistics.median(busy_s[rank]) for rank in sorted(busy_s)]
    most_s = max(work_s, default=0.0)
    shares = tuple(1.0 if each > FULL * most_s else each / most_s for each in work_s)
    return shares if len(shares) > 1 and min(shares) < 1 else ()


def stage_settings(
    settings: Sequence[Settings], shares: Sequence[float], clocks_MHz: Sequence[int]
) -> list[Settings]:
    """Return settings with the clocks of stages by their shares; the machine's own stays first.

    Each is rounded up to one of `clocks_MHz`, which ascend.
    """
    top = clocks_MHz[-1]
    found = [settings[0]]
    for high in (top, *(setting["clock_MHz"] for setting in settings[1:])):
        least = [share * float(str(high)) for share in shares]
        found.append(
            Settings(clock_MHz=tuple(next(c for c in clocks_MHz if c >= low) for low in least))
        )
    return found
