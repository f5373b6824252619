"""The models corrected by the windows of a run, for a plan on other numbers of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.models.analytic.constants import Constants
from tuner.models.analytic.model import AnalyticModel
from tuner.models.scale_out import ScaleOut, predictor
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob


@dataclass(frozen=True)
class Correction:
    """Models corrected by measured launches.

    Attributes:
        log_time, log_power: what the launches are above the corrected models, as logs.
    """

    constants: Constants
    log_time: float
    log_power: float
    launches: int

    @property
    def sentence(self) -> str:
        """Description of the correction for the user."""
        plural = "" if self.launches == 1 else "es"
        return (
            f"the models are corrected by the step time and power of {self.launches} measured "
            f"launch{plural}; the intervals are still those of models that nothing corrects"
        )


def correction(
    job: TrainingJob, cluster: Cluster, configurations: Sequence[Configuration], logs: np.ndarray
) -> Correction:
    """Correct the models by the logs of step time and power of windows, (n, 2)."""
    line = ScaleOut.of_prior(AnalyticModel(job, cluster), configurations, logs)
    predict = predictor(job, cluster, configurations)
    gpus = [each.world_size for each in configurations]
    above = (line.medians(predict, gpus) - predict(line.constants)).mean(axis=0)
    launches = {each.launch.key for each in configurations}
    return Correction(line.constants, float(above[0]), float(above[1]), len(launches))
