"""Decisions that the last bits of a figure do not change.

The last bits of a product of matrices or of an exponential depend on the CPU. Figures that differ
by less than `TOLERANCE` are therefore equal to a decision, and of equal ones the first counts, so
that the same seed makes the same search on every CPU.
"""

from __future__ import annotations

import numpy as np

#: Relative to the largest magnitude that is compared: far above rounding where values are equal by
#: symmetry, and a difference of 1e-6 in what a probe is worth has no consequence.
TOLERANCE = 1e-6


def _over_largest(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    largest = np.abs(values, where=np.isfinite(values), out=np.zeros(len(values))).max(initial=0.0)
    return values / (largest or 1.0)


def first_best(values: np.ndarray) -> int:
    """Return the index of the largest value, the first of equal ones; at least one is given."""
    scaled = _over_largest(values)
    return int(np.argmax(scaled >= scaled.max() - TOLERANCE))


def ranked(values: np.ndarray) -> np.ndarray:
    """Return the indices by falling value, equal ones in their order."""
    return np.argsort(-np.round(_over_largest(values) / TOLERANCE), kind="stable")
