"""Live settings next to the measured front, which are measured before a search believes a curve.

A smooth surrogate draws a knee too high between two windows, and noise can hide a whole curve: the
front is then believed to end where it does not. So a launch is not left, nor a search ended, while
a live setting next to the measured front was never tried.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tuner.models.surrogate.features import FeatureMap
from tuner.models.surrogate.kernel import LIVE
from tuner.search.candidate_pool import LIKELY, CandidateView

#: Settings nearer than this share of a knob's range count as one: of a clock in steps of 15 MHz the
#: whole curve would be measured, step by step.
RESOLUTION = 0.1
ROUNDING = 1e-9


def beside_front(
    features: FeatureMap,
    members: Sequence[np.ndarray],
    launch_of: np.ndarray,
    front: Sequence[int] | np.ndarray,
    candidates: CandidateView,
) -> list[int]:
    """Return the open live settings next to those of the front, the lowest levels first.

    Args:
        members: candidates of each launch.
        launch_of: launch of each candidate.
        front: measured candidates that no other one dominates.
        candidates: that may be proposed; one that probably equals another or cannot run is left.
    """
    live = np.flatnonzero(features.kinds == LIVE)
    likely = set(candidates.members[candidates.chances >= LIKELY].tolist())
    found: dict[int, None] = {}
    for candidate in front:
        rows = members[launch_of[candidate]]
        if not likely.intersection(rows.tolist()):
            continue
        apart = features.matrix[rows][:, live] - features.matrix[candidate, live]
        for column in range(len(live)):
            others = np.delete(apart, column, axis=1)
            alone = (np.abs(others) < ROUNDING).all(axis=1)
            for side in (-1.0, 1.0):
                found |= dict.fromkeys(_next(rows, side * apart[:, column], alone, likely))
    return sorted(found, key=lambda row: (float(features.matrix[row, live].sum()), row))


def _next(rows: np.ndarray, ahead: np.ndarray, alone: np.ndarray, likely: set[int]) -> list[int]:
    # The farthest setting within reach; none if one of those within reach is not open.
    ahead = np.where(alone & (ahead > ROUNDING), ahead, np.inf)
    reach = max(float(ahead.min()), RESOLUTION) + ROUNDING
    within = np.flatnonzero(ahead <= reach)
    if not len(within) or not all(int(row) in likely for row in rows[within]):
        return []
    return [int(rows[within[ahead[within].argmax()]])]
