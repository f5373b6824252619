"""Breakdown of the predicted time, energy and memory of one configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tuner.answer.windows import Windows
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, InvalidConfiguration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.rules import why_it_cannot_run

if TYPE_CHECKING:
    from tuner.models.analytic.model import Breakdown
    from tuner.workload.records.probe import MeterInfo, ProbeRecord


@dataclass(frozen=True)
class Forecast:
    """Prediction with its breakdown and its known error."""

    job: TrainingJob
    cluster: Cluster
    breakdown: Breakdown
    known_error: tuple[str, ...]
    # step time (s), power (W) and energy of a step (J) as probes correct them: median and 90 %
    # interval; empty where no run was named.
    corrected: Mapping[str, tuple[float, float, float]]
    probes: int = 0
    # of the number of GPUs beyond the largest that was probed; 0 up to it
    doublings: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the figures that `tuner.planner.fit.Fit` lacks, as JSON values."""
        steps = self.job.steps
        return {
            **asdict(self.breakdown),
            "power_W": self.breakdown.power_W,
            "time_to_solution_s": steps * self.breakdown.step_time_s if steps else None,
            "energy_to_solution_J": steps * self.breakdown.energy_J if steps else None,
            "corrected": {name: list(values) for name, values in self.corrected.items()},
            "probes": self.probes,
            "doublings": self.doublings,
        }


def charged(cluster: Cluster, meter: MeterInfo) -> Cluster:
    """Return the cluster as a meter charges it: a meter of GPUs alone has no host or supply."""
    return replace(cluster, host_W=0.0, supply_loss=0.0) if meter.scope == "gpu" else cluster


def measured_windows(records: Sequence[ProbeRecord]) -> Windows:
    """Return the windows of these probes, at least one; InputError if there is none."""
    windows = Windows.of(records)
    if not windows.records:
        raise InputError("the run that is to correct the prediction has measured nothing")
    return windows


def forecast(
    job: TrainingJob,
    cluster: Cluster,
    configuration: Configuration,
    *,
    records: Sequence[ProbeRecord] = (),
    probed_on: Cluster | None = None,
) -> Forecast:
    """Predict one configuration, corrected by the probes of `records`; InvalidConfiguration if it
    cannot train this job on this cluster, InputError if they hold no measurement."""
    from tuner.models.analytic.model import AnalyticModel
    from tuner.models.analytic.model_error import known_error_lines
    from tuner.models.scale_out import ScaleOut, predictor

    if phrases := why_it_cannot_run(configuration, job, cluster):
        raise InvalidConfiguration(configuration.short, phrases)
    breakdown = AnalyticModel(job, cluster).breakdown(configuration)
    corrected: dict[str, tuple[float, float, float]] = {}
    doublings = 0.0
    if records:
        # By every window of these probes.
        windows, before = measured_windows(records), probed_on or cluster
        meter = windows.records[0].meter
        model = AnalyticModel(job, charged(before, meter))
        line = ScaleOut.of_prior(model, windows.as_delivered, windows.logs)
        one = predictor(job, charged(cluster, meter), [configuration])
        predicted = line.correct(one, [configuration.world_size])
        largest = max(each.world_size for each in windows.as_delivered)
        doublings = max(0.0, math.log2(configuration.world_size / largest))
        for name in ("step_time_s", "power_W", "energy_J"):
            figure = getattr(predicted, name)
            ends = figure.median, figure.low, figure.high
            corrected[name] = float(ends[0][0]), float(ends[1][0]), float(ends[2][0])
    return Forecast(
        job=job,
        cluster=cluster,
        breakdown=breakdown,
        known_error=tuple(known_error_lines(cluster.device)),
        corrected=corrected,
        probes=sum(len(record.measurements) for record in records),
        doublings=doublings,
    )
