"""Pareto front of energy and time: membership, hypervolume, improvement, regret, knee.

Both axes are minimised. Hypervolumes are taken in log energy and log time, so that a per cent
counts the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: The reference lies beyond the front's nadir by this share of its range, and at least by this.
REFERENCE_MARGIN, REFERENCE_LEAST = 0.10, 0.005


def nondominated(energy: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Return a mask of the points that no other dominates, (n,).

    A point dominates another if it is no worse on both axes and better on one. Points that are
    equal on both do not dominate each other: all of them stay.
    """
    energy, time = np.asarray(energy, dtype=float), np.asarray(time, dtype=float)
    mask = np.zeros(len(energy), dtype=bool)
    if not len(energy):
        return mask
    order = np.lexsort((time, energy))
    e, t = energy[order], time[order]
    # Sorted by energy, then time: the front is every point that is faster than all before it, and
    # those equal to the last such point.
    best_before = np.concatenate([[np.inf], np.minimum.accumulate(t)[:-1]])
    new = t < best_before
    group = np.maximum.accumulate(np.where(new, np.arange(len(e)), 0))
    mask[order] = new | ((e == e[group]) & (t == t[group]))
    return mask


def reference_point(points: np.ndarray) -> np.ndarray:
    """Return the reference point of hypervolume: beyond the nadir of these points' front, (2,).

    The nadir plus 10 % of the front's range on each axis, and at least 0.005 (in log units half a
    per cent), so that a front of one point still has a volume.
    """
    points = np.asarray(points, dtype=float)
    front = points[nondominated(points[:, 0], points[:, 1])]
    nadir = front.max(axis=0)
    return np.asarray(nadir + np.maximum(REFERENCE_MARGIN * np.ptp(front, axis=0), REFERENCE_LEAST))


def _staircase(points: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    points = np.asarray(points, dtype=float).reshape(-1, 2)
    points = points[(points < reference).all(axis=1)]
    points = np.unique(points[nondominated(points[:, 0], points[:, 1])], axis=0)
    return points[:, 0], points[:, 1]


def hypervolume(points: np.ndarray, reference: np.ndarray) -> float:
    """Return the area that the points (n, 2) dominate, up to the reference (2,)."""
    e, t = _staircase(points, reference)
    right = np.append(e[1:], reference[0])
    return float(np.sum((right - e) * (reference[1] - t)))


def front_regret(found: np.ndarray, points: np.ndarray) -> float:
    """Return what the found points lose of a front, a share; infinite if nothing is found.

    For each of `points` (n, 2), in logarithms, the least factor by which one of `found` (m, 2) is
    worse in energy and time; of these the largest, less one: the multiplicative epsilon indicator
    (Zitzler et al. 2003, "Performance assessment of multiobjective optimizers", IEEE Transactions
    on Evolutionary Computation 7(2)). Points off the front change nothing.
    """
    worse = (found[None, :, :] - points[:, None, :]).max(axis=2).min(axis=1, initial=np.inf)
    return float(np.expm1(max(float(worse.max()), 0.0)))


def improvement(
    front: np.ndarray, energy: np.ndarray, time: np.ndarray, reference: np.ndarray
) -> np.ndarray:
    """Return the hypervolume that each point, alone, would add to the front (n, 2); at least 0.

    With h(x) the staircase (the least time of the front up to energy x; the reference's before the
    first corner) the gain of (e, t) is the integral of h(x) - t from e to the energy at which the
    front first reaches t: H(end) - H(e) - t (end - e) with H the antiderivative of h, which is
    piecewise linear. O(log front) per point.
    """
    e, t = _staircase(front, reference)
    energy, time = np.asarray(energy, dtype=float), np.asarray(time, dtype=float)
    low = min(float(energy.min(initial=reference[0])), float(e.min(initial=reference[0]))) - 1.0
    edges = np.concatenate([[low], e, [reference[0]]])
    heights = np.concatenate([[reference[1]], t])
    area = np.concatenate([[0.0], np.cumsum(np.diff(edges) * heights)])
    begin = np.minimum(energy, reference[0])
    # The first corner no slower than `time`; times fall along the front.
    reached = len(t) - np.searchsorted(t[::-1], time, side="right")
    end = np.append(e, reference[0])[reached]
    gain = np.interp(end, edges, area) - np.interp(begin, edges, area) - time * (end - begin)
    return np.where((begin < end) & (time < reference[1]), np.maximum(gain, 0.0), 0.0)


def probability_nondominated(log_energy: np.ndarray, log_time: np.ndarray) -> np.ndarray:
    """Return the share of joint draws (draws, n) in which each point is on the front, (n,)."""
    log_energy, log_time = np.asarray(log_energy, float), np.asarray(log_time, float)
    hits = np.zeros(log_energy.shape[1])
    for energy, time in zip(log_energy, log_time, strict=True):
        hits += nondominated(energy, time)
    return hits / max(len(log_energy), 1)


def knee(points: Sequence[tuple[float, float]] | np.ndarray) -> int:
    """Return the index of the front's knee, the choice if there is no constraint.

    On logarithmic axes scaled to the front's range, the point farthest below the chord that joins
    the fastest point and the most frugal one (Das 1999, "On characterizing the knee of the Pareto
    curve"). A front of one or two points, or one that nowhere lies below its chord, has no bend:
    then the least product of energy and time.
    """
    log_e, log_t = np.log(np.asarray(points, dtype=float).reshape(-1, 2)).T
    front = np.flatnonzero(nondominated(log_e, log_t))
    e, t = log_e[front], log_t[front]
    below = np.zeros(len(front))
    if np.ptp(e) > 0 and np.ptp(t) > 0:
        below = 1.0 - (e - e.min()) / np.ptp(e) - (t - t.min()) / np.ptp(t)
    if below.max() > 1e-9:
        return int(front[np.argmax(below)])
    return int(front[np.argmin(e + t)])
