"""Surrogates of step time and power fitted to measurements, and their error in cross-validation.

The error stands here so that showing it does not import SciPy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LeaveOneOut:
    """Error of the surrogates on left-out measurements.

    Attributes:
        coverage: share of left-out values inside their 90 % interval (both outputs together).
        pairs: (measured step time s, predicted, measured power W, predicted) of each left-out
            point.
    """

    measurements: int
    time_error: float
    power_error: float
    coverage: float
    pairs: tuple[tuple[float, float, float, float], ...] = ()
