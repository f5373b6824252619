"""What leaving one measurement out at a time says of the surrogates.

Kept apart from them, so that whoever only shows the figures needs no scikit-learn.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LeaveOneOut"]


@dataclass(frozen=True)
class LeaveOneOut:
    """How wrong the surrogates are on points they have not seen.

    Attributes:
        measurements: how many were left out, one at a time.
        time_error: median relative error of the step time.
        power_error: median relative error of the power.
        coverage: share of left-out values inside their 90 % interval (both outputs together).
        pairs: (measured step time s, predicted, measured power W, predicted) a left-out point.
    """

    measurements: int
    time_error: float
    power_error: float
    coverage: float
    pairs: tuple[tuple[float, float, float, float], ...] = ()
