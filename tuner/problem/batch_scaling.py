"""Steps of other global batches as steps of the job's own, so that all are steps to one solution.

Where the global batch is a knob (`TrainingJob.steps_at`, or its noise scale), configurations need
different numbers of steps. Everything that searches and answers multiplies a step's time and energy
by one number, the job's steps: so a measurement at another batch enters the study as what one of
the job's own steps would cost there. The trace keeps the steps as they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.models.analytic.constants import Constants
from tuner.models.analytic.model import Correctable, Prediction
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.workload.probe import Measurement, ProbeRecord


def steps_a_job_step(configuration: Configuration, job: TrainingJob | None) -> float:
    """Return the steps at the configuration's global batch that replace one of the job's."""
    if job is None or not job.length_known:
        return 1.0
    return job.at(configuration).steps / job.steps


def in_job_steps(record: ProbeRecord, job: TrainingJob | None) -> ProbeRecord:
    """Return the record with step times, and so energies per step, of the job's own steps."""
    share = steps_a_job_step(Configuration(record.request.launch), job)
    if share == 1.0:
        return record

    def scaled(m: Measurement) -> Measurement:
        return replace(
            m,
            step_time_s=m.step_time_s * share,
            step_time_se_s=m.step_time_se_s * share,
            step_times_s=tuple(time * share for time in m.step_times_s),
        )

    return replace(record, measurements=tuple(map(scaled, record.measurements)))


@dataclass(frozen=True)
class JobStepsPrior:
    """Prediction in the job's own steps."""

    plain: Correctable
    job: TrainingJob

    @property
    def constants(self) -> Constants:
        """Constants of the plain prediction."""
        return self.plain.constants

    def with_constants(self, constants: Constants) -> JobStepsPrior:
        """Return the same prior by other constants."""
        return replace(self, plain=self.plain.with_constants(constants))

    def predict(self, configurations: Sequence[Configuration]) -> Prediction:
        """Predict as `Prior.predict`, with the time of the steps that replace one of the job's."""
        predicted = self.plain.predict(configurations)
        shares = np.array([steps_a_job_step(c, self.job) for c in configurations], dtype=float)
        return replace(predicted, step_time_s=predicted.step_time_s * shares)
