"""The user's question in the search: limits and objective instead of the whole front.

With a limit or an objective only the answer counts, one configuration. The loss of a configuration
is the log of the objective if it meets every limit; else it lies above that of all that do, by the
log of the largest overshoot, so that of two that exceed a limit the nearer one is better.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.problem.constraints import OBJECTIVES, Constraints, JobFigures

#: Joules of a kilowatt-hour, and seconds of an hour.
J_PER_KWH, S_PER_HOUR = 3.6e6, 3600.0


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
        energy, time = self.weights
        return energy * log_energy + time * log_time

    @property
    def weights(self) -> tuple[float, float]:
        """Exponents of energy and time in the objective; those of energy alone for a price."""
        return OBJECTIVES[self.constraints.goal] or (1.0, 0.0)

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
