"""Correction of the models by the measured launches of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.models.analytic.constants import Constants, constants_of
from tuner.models.scale_out import ScaleOut, predictor
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob


@dataclass(frozen=True)
class Correction:
    """Models corrected by measured launches.

    Attributes:
        log_time, log_power: mean distance of the launches from the corrected models, as logs.
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
    job: TrainingJob,
    cluster: Cluster,
    configurations: Sequence[Configuration],
    logs: np.ndarray,
    launches: Sequence[object],
) -> Correction:
    """Correct the models by windows: their log step times and powers (n, 2), and their launches."""
    predict = predictor(job, cluster, configurations)
    gpus = [each.world_size for each in configurations]
    model = ScaleOut(
        constants_of(cluster.device), predict, gpus=gpus, launches=launches, measured=logs
    )
    above = (model.medians(predict, gpus) - predict(model.constants)).mean(axis=0)
    return Correction(model.constants, float(above[0]), float(above[1]), len(set(launches)))
