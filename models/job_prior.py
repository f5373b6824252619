"""The analytic model as the prior of a study: its figures in the job's own steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.models.analytic.constants import UNMODELLED, Constants, origin_of
from tuner.models.analytic.model import (
    AnalyticModel,
    ByConstants,
    Correctable,
    ModelError,
    known_error_lines,
)
from tuner.models.prior import Prediction
from tuner.models.scale_out import ScaleOut
from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob, steps_a_job_step

__all__ = ["AnalyticPrior", "error_lines", "origin_of", "prior_of", "ratio_sd"]


def prior_of(job: TrainingJob, cluster: Cluster) -> AnalyticPrior | None:
    """Return the prior of a job whose model is known; None for another one."""
    return AnalyticPrior(AnalyticModel(job, cluster), job) if job.is_modelled else None


def error_lines(device: Device) -> list[str]:
    """Return sentences on the models' error on this kind of device."""
    return known_error_lines(device)


def ratio_sd(configurations: Sequence[Configuration], row: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the errors of all configurations over one's (`ModelError.ratio_sd`)."""
    return ModelError(configurations).ratio_sd(row)


@dataclass(frozen=True)
class AnalyticPrior:
    """Prediction of a job by its analytic model."""

    model: Correctable
    job: TrainingJob

    @property
    def unpredicted_knobs(self) -> Mapping[str, str]:
        """Knobs whose effect the model does not predict, each with the reason."""
        return UNMODELLED

    @property
    def constants(self) -> Constants:
        """Constants of the model."""
        return self.model.constants

    def with_constants(self, constants: Constants) -> AnalyticPrior:
        """Return the same prior by other constants."""
        return replace(self, model=self.model.with_constants(constants))

    def corrected(self, configurations: Sequence[Configuration], logs: np.ndarray) -> AnalyticPrior:
        """Return the prior whose constants are fitted to the logs of step time and power."""
        return self.with_constants(ScaleOut.of_prior(self, configurations, logs).constants)

    def predict(self, configurations: Sequence[Configuration]) -> Prediction:
        """Predict as `Prior.predict`, with the time of the steps that replace one of the job's."""
        predicted = self.model.predict(configurations)
        shares = self._shares(configurations)
        return replace(predicted, step_time_s=predicted.step_time_s * shares)

    def memory_bytes(self, configurations: Sequence[Configuration]) -> np.ndarray:
        """Return the peak memory of the fullest device, shape (n,)."""
        return self.model.memory_bytes(configurations)

    def time_and_power(self, configurations: Sequence[Configuration]) -> ByConstants:
        """Return a function of the constants: step time and power, shape (n, 2)."""
        by_constants, shares = (
            self.model.time_and_power(configurations),
            self._shares(configurations),
        )

        def figures(constants: Constants) -> np.ndarray:
            both = by_constants(constants)
            both[:, 0] *= shares
            return both

        return figures

    def _shares(self, configurations: Sequence[Configuration]) -> np.ndarray:
        return np.array([steps_a_job_step(c, self.job) for c in configurations], dtype=float)
