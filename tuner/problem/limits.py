"""Limits on the training job: their table, and the overshoot of each by a job's figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tuner.formatting import Units, number

if TYPE_CHECKING:
    import numpy as np


class JobFigures(NamedTuple):
    """Figures of the whole training that limits are on, one of each or an array; None if no limit
    can be compared with it."""

    energy_kJ: float | np.ndarray | None = None
    time_s: float | np.ndarray | None = None
    power_W: float | np.ndarray | None = None
    peak_power_W: float | np.ndarray | None = None
    gpus: int | np.ndarray | None = None


@dataclass(frozen=True)
class Limit:
    """Limit on the training job, a row of `LIMITS`; `name` is a field of `Limits` and of
    `Constraints`, `figure` one of `JobFigures`.

    Attributes:
        phrase: returns the limit as in "within 25 kJ".
        text: returns a value with a number of digits, as the object of a sentence.
        of_training: grows with the number of steps.
    """

    name: str
    figure: str
    noun: str
    label: str
    phrase: Callable[[float, Units], str]
    text: Callable[[float, Units, int], str]
    of_training: bool = False


#: Every limit on the training job.
LIMITS = (
    Limit(
        "budget_kJ",
        "energy_kJ",
        "energy budget",
        "energy budget of the job (kJ)",
        lambda value, units: f"within {units.energy_text(value)}",
        lambda value, units, digits: units.energy_text(value, digits),
        of_training=True,
    ),
    Limit(
        "deadline_s",
        "time_s",
        "deadline",
        "deadline (s)",
        lambda value, units: f"within {units.time_text(value)}",
        lambda value, units, digits: units.time_text(value, digits),
        of_training=True,
    ),
    Limit(
        "power_cap_W",
        "power_W",
        "power cap",
        "cap on the average power (W)",
        lambda value, _: f"at no more than {number(value)} W on average",
        lambda value, _, digits: f"{number(value, digits)} W on average",
    ),
    Limit(
        "peak_power_W",
        "peak_power_W",
        "cap on peak power",
        "cap on the peak power (W)",
        lambda value, _: f"at no more than {number(value)} W at any moment",
        lambda value, _, digits: f"a peak of {number(value, digits)} W",
    ),
    Limit(
        "max_gpus",
        "gpus",
        "number of GPUs",
        "most devices",
        lambda value, _: f"on at most {value:.0f} GPU{'s' * (value != 1)}",
        lambda value, *_: f"{value:.0f} GPU{'s' * (round(value) != 1)}",
    ),
)


@dataclass(frozen=True)
class Limits:
    """Absolute limits on the training job; None for each that was not given.

    Attributes:
        slowdown: limit on the slowdown against the baseline that `deadline_s` stands for; None if
            the deadline was given as such.
    """

    budget_kJ: float | None = None
    deadline_s: float | None = None
    power_cap_W: float | None = None
    peak_power_W: float | None = None
    max_gpus: int | None = None
    slowdown: float | None = None

    @property
    def given(self) -> list[tuple[Limit, float]]:
        """The limits that were given, each with its value."""
        values = [(row, getattr(self, row.name)) for row in LIMITS]
        return [(row, value) for row, value in values if value is not None]

    def __bool__(self) -> bool:
        """Return True if there is a limit."""
        return bool(self.given)

    def ratios(self, job: JobFigures) -> dict[str, Any]:
        """Return each known figure over its limit, by the limit's name: above 1, it exceeds it."""
        values = [(row.name, limit, getattr(job, row.figure)) for row, limit in self.given]
        return {name: value / limit for name, limit, value in values if value is not None}

    def worst_ratio(self, job: JobFigures) -> np.ndarray:
        """Return the largest of `ratios`; 0 without one."""
        import numpy as np

        worst: Any = 0.0
        for ratio in self.ratios(job).values():
            worst = np.maximum(worst, ratio)
        return np.asarray(worst)

    def phrase(self, units: Units) -> str:
        """Return the limits as in "within 25 kJ and on at most 2 GPUs"."""
        return " and ".join(row.phrase(value, units) for row, value in self.given)

    def to_json(self) -> dict[str, float]:
        """Return the given limits by name."""
        return {row.name: value for row, value in self.given}
