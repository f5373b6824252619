"""The user's question in the search: limits and objective instead of the whole front.

With a limit or an objective only the answer counts, one configuration. The loss of a configuration
is the log of the objective if it meets every limit; else it lies above that of all that do, by the
log of the largest overshoot, so that of two that exceed a limit the nearer one is better.

**Peak power.** The highest power sample of a window is its mean power times a factor, learned from
the study's windows. Candidates that probably exceed a cap on peak power are left out, so the search
goes from the safe side inwards (Sui et al. 2015, "Safe exploration for optimization with Gaussian
processes", ICML). Before there is enough to fit the surrogates the safest one may be probed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from tuner.models.surrogate.gaussian_process import TOLERANCE
from tuner.models.surrogate.surrogates import Posterior
from tuner.problem.constraints import OBJECTIVES, Constraints, JobFigures
from tuner.search_spaces.configuration import Configuration

#: Joules of a kilowatt-hour, and seconds of an hour.
J_PER_KWH, S_PER_HOUR = 3.6e6, 3600.0
#: Probability of exceeding a cap on peak power above which a candidate is not probed; if every one
#: is above it, as after the first windows, the safest is probed up to the second figure.
MOST_PROBABLE, SAFEST_PROBABLE = 0.1, 0.5
#: Prior of the log of peak over mean power, which counts as this number of windows: its mean and
#: standard deviation. An assumption, which a few windows outweigh.
PRIOR_MEAN, PRIOR_SD, PRIOR_WINDOWS = 0.12, 0.06, 2.0


POWER_LIMIT = "power_limit_W"


@dataclass(frozen=True)
class Question:
    """Limits and objective of the training job, of one step of each configuration."""

    constraints: Constraints  # of the whole job
    steps: int

    @classmethod
    def of(cls, constraints: Constraints, steps: int) -> Question | None:
        """Return the question; None if these constraints ask for the front or its knee."""
        return None if constraints.goal == "knee" else cls(constraints, steps)

    def objective(
        self, log_energy: np.ndarray, log_time: np.ndarray, gpus: np.ndarray
    ) -> np.ndarray:
        """Return the log of what is to be least, of one step."""
        if self.constraints.goal == "cost":
            per_kWh, per_hour = self.constraints.prices
            price = per_kWh / J_PER_KWH * np.exp(log_energy)
            return np.asarray(np.log(price + per_hour / S_PER_HOUR * gpus * np.exp(log_time)))
        energy, time = OBJECTIVES[self.constraints.goal] or (1.0, 0.0)
        return energy * log_energy + time * log_time

    def excess(self, log_energy: np.ndarray, log_time: np.ndarray) -> np.ndarray:
        """Return the log of the largest overshoot of a limit; 0 if all are met."""
        if not self.constraints.limits:
            return np.zeros(np.shape(log_energy))
        energy_J, time_s = np.exp(log_energy), np.exp(log_time)
        job = JobFigures(energy_J * self.steps / 1000, time_s * self.steps, energy_J / time_s)
        worst = self.constraints.limits.worst_ratio(job)
        return np.broadcast_to(np.log(np.maximum(worst, 1.0)), np.shape(log_energy))

    def loss(self, log_energy: np.ndarray, log_time: np.ndarray, gpus: np.ndarray) -> np.ndarray:
        """Return the log of the objective of each, (..., n), or if a limit is not met that of the
        worst of them and `excess`."""
        objective = self.objective(log_energy, log_time, gpus)
        excess = self.excess(log_energy, log_time)
        return np.where(excess > 0, objective.max(axis=-1, keepdims=True) + excess, objective)


def most_power_W(configuration: Configuration) -> float:
    """Return the mean power that the devices' power limit permits; infinite without a limit."""
    limit = configuration.get(POWER_LIMIT)
    # One limit for each stage bounds it, too, and is left to the surrogates.
    return float(limit) * configuration.world_size if isinstance(limit, int | float) else math.inf


@dataclass(frozen=True)
class PeakLimit:
    """Cap on peak power, and the expected peaks."""

    cap_W: float
    log_ratio: float  # mean of the log of peak over mean power
    log_ratio_sd: float  # its standard deviation from configuration to configuration
    # whether `most_power_W` bounds the power: that of the devices alone is metered.
    limits_hold: bool = False

    @classmethod
    def of(cls, cap_W: float, peaks_W: Sequence[float], means_W: Sequence[float]) -> PeakLimit:
        """Return the limit with the ratio of these windows, shrunk towards the prior."""
        ratios = np.log(np.asarray(peaks_W, float) / np.asarray(means_W, float))
        whole = PRIOR_WINDOWS + len(ratios)
        mean = (PRIOR_WINDOWS * PRIOR_MEAN + ratios.sum()) / whole
        squares = PRIOR_WINDOWS * (PRIOR_SD**2 + (PRIOR_MEAN - mean) ** 2)
        squares += float(((ratios - mean) ** 2).sum())
        return cls(cap_W, float(mean), math.sqrt(squares / whole))

    @property
    def mean_power_W(self) -> float:
        """Mean power at which the peak is expected to be the cap."""
        return self.cap_W / math.exp(self.log_ratio)

    def safe(
        self,
        posterior: Posterior,
        widening: float,
        configurations: Sequence[Configuration],
        levels: np.ndarray | None = None,
    ) -> np.ndarray | None:
        """Return the rows of the candidates that may be probed; None if there are none.

        Args:
            levels: how high the settings of each are, (n,), to choose by while too little is
                measured to fit the surrogates; None once it is enough.
        """
        sd = np.hypot(widening * posterior.log_power_std, self.log_ratio_sd)
        risk = ndtr((posterior.log_power + self.log_ratio - math.log(self.cap_W)) / sd)
        most_W = np.full(len(risk), math.inf)
        if self.limits_hold:
            most_W = np.array([most_power_W(each) for each in configurations])
            above = np.log(most_W) + self.log_ratio - math.log(self.cap_W)
            risk = np.minimum(risk, ndtr(above / self.log_ratio_sd))
        kept = np.flatnonzero(risk <= max(MOST_PROBABLE, float(risk.min())) + TOLERANCE)
        if risk.min() > SAFEST_PROBABLE:
            if levels is None:
                return None
            kept = np.lexsort((levels, most_W))[:1]
        return kept
