"""Clocks of a pipeline's stages: those with slack run slower, in proportion to their work.

A stage that computes for a share s of the slowest one's time runs at s of its clock: if its time
grows as its clock falls, at most, it takes as long as the slowest. A schedule that computes the
same micro-batches in every step needs one clock a stage; Perseus (arXiv 2312.06902) sets one for
each computation, which takes clocks that switch within a micro-batch, as NVML's do not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.knobs import Value

#: Share of the slowest stage's time above which a stage has no slack: steps vary as much.
FULL = 0.95


def mean_value(value: Value) -> float:
    """Return a setting's value, or the mean of the stages' values."""
    return statistics.fmean(map(float, value if isinstance(value, tuple) else [value]))


def log_slowest(value: Value, top: float) -> float:
    """Return the logarithm of the slowdown that a value causes at most: 0 for the highest.

    A path through the schedule holds each stage's work once at most, and is no shorter than the
    slowest stage's before: stages slowed by 1/s lengthen it by their work, s (1/s - 1) each.
    """
    values = [float(each) for each in (value if isinstance(value, tuple) else [value])]
    high = max(values)
    return math.log(top / high) + math.log1p(sum(1 - each / high for each in values))


def stage_shares(busy_s: Mapping[int, Sequence[float]]) -> tuple[float, ...]:
    """Return the work of each rank as a share of the slowest one's; () if none has slack.

    Args:
        busy_s: times that each rank computed, in a few steps each, seconds.
    """
    work_s = [statistics.median(busy_s[rank]) for rank in sorted(busy_s)]
    most_s = max(work_s, default=0.0)
    shares = tuple(1.0 if each > FULL * most_s else each / most_s for each in work_s)
    return shares if len(shares) > 1 and min(shares) < 1 else ()


def stage_settings(
    settings: Sequence[Settings], shares: Sequence[float], clocks_MHz: Sequence[int]
) -> list[Settings]:
    """Return settings with the clocks of stages by their shares; the machine's own stays first.

    Args:
        settings: of one clock for all.
        clocks_MHz: that the devices can run at, ascending; a stage's is rounded up.
    """
    top = clocks_MHz[-1]
    found = [settings[0]]
    for high in (top, *(setting["clock_MHz"] for setting in settings[1:])):
        least = [share * float(str(high)) for share in shares]
        found.append(
            Settings(clock_MHz=tuple(next(c for c in clocks_MHz if c >= low) for low in least))
        )
    return found
