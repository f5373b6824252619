"""Steps before the first window, and when their time has settled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tuner.workload.window_policy import WindowPolicy

#: Warm-up is judged by blocks of whole steps this long (a step where steps are longer), ...
WARM_BLOCK_S = 0.2
#: ... of which neighbours must agree so far. Recorded runs lie within 2 % of their mean after two
#: steps (p95 of 13,303 iterations of the Perseus artifact); see docs/measuring.md.
WARM_SPREAD = 0.03
#: It ends here, stable or not: blocks, and seconds.
WARM_BLOCKS_MAX, WARM_MAX_S = 20, 60.0


@dataclass(frozen=True)
class WarmUp:
    """Steps before the first window; `step_time_s` is the mean of the last block."""

    step_times_s: tuple[float, ...]
    step_time_s: float
    stable: bool


def settled(blocks: Sequence[float]) -> bool:
    """Return True if the step time of the blocks has settled (see `Conductor.warm_up`)."""
    if len(blocks) < 2:
        return False
    if abs(blocks[-1] - blocks[-2]) <= WARM_SPREAD * min(blocks[-2:]):
        return True
    steps = [b - a for a, b in pairwise(blocks[-4:])]
    return len(steps) == 3 and all(a * b < 0 for a, b in pairwise(steps))


def longest_s(policy: WindowPolicy, settings: int) -> float:
    """Return how long ranks train after their first step at most, seconds."""
    visits = settings + (policy.check_drift and settings > 1)
    return WARM_BLOCKS_MAX * WARM_BLOCK_S + visits * (policy.settle_s + policy.max_s)
