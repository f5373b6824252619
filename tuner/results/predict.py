"""Where the time, energy and memory of one configuration are predicted to go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tuner.results.windows import Windows
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, InvalidConfiguration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.rules import broken_rules

if TYPE_CHECKING:
    from tuner.models.analytic.breakdown import Breakdown
    from tuner.models.scale_out import ScaleOut
    from tuner.workload.probe import MeterInfo, ProbeRecord


@dataclass(frozen=True)
class Forecast:
    """A prediction with its breakdown and what is known of its error."""

    job: TrainingJob
    cluster: Cluster
    configuration: Configuration
    breakdown: Breakdown
    known_error: tuple[str, ...]
    # step time (s), power (W) and energy of a step (J) as probes correct them: median and 90 %
    # interval; empty where no run was named.
    corrected: Mapping[str, tuple[float, float, float]]
    probes: int = 0

    @property
    def fits(self) -> bool:
        """True if the predicted peaks fit the device and its host."""
        host = self.cluster.host_memory_bytes
        return self.breakdown.memory_bytes <= self.cluster.device.memory_bytes and (
            not host or self.breakdown.host_memory_bytes <= host
        )

    def to_json(self) -> dict[str, Any]:
        """Return the forecast as JSON values."""
        steps, parts = self.job.steps, asdict(self.breakdown)
        return {
            "predicted": True,
            "job": self.job.name,
            "cluster": self.cluster.name,
            "configuration": self.configuration.to_json(),
            **parts,
            "power_W": self.breakdown.power_W,
            "time_to_solution_s": steps * self.breakdown.step_time_s,
            "energy_to_solution_J": steps * self.breakdown.energy_J,
            "fits": self.fits,
            "known_error": list(self.known_error),
            "corrected": {name: list(values) for name, values in self.corrected.items()},
            "probes": self.probes,
        }


def _corrected(
    job: TrainingJob,
    probed_on: Cluster,
    records: Sequence[ProbeRecord],
    cluster: Cluster,
    configuration: Configuration,
) -> tuple[dict[str, tuple[float, float, float]], int]:
    from tuner.models.scale_out import predictor

    line = corrected_models(job, probed_on, records)
    meter = next(record.meter for record in records if record.measurements)
    said = line.correct(
        predictor(job, charged(cluster, meter), [configuration]), [configuration.world_size]
    )
    found = {
        name: (float(figure.median[0]), float(figure.low[0]), float(figure.high[0]))
        for name, figure in (
            ("step_time_s", said.step_time_s),
            ("power_W", said.power_W),
            ("energy_J", said.energy_J),
        )
    }
    return found, sum(len(record.measurements) for record in records)


def charged(cluster: Cluster, meter: MeterInfo) -> Cluster:
    """Return the cluster as a meter charges it: a meter of GPUs alone has no host or supply."""
    return replace(cluster, host_W=0.0, supply_loss=0.0) if meter.scope == "gpu" else cluster


def corrected_models(
    job: TrainingJob, cluster: Cluster, records: Sequence[ProbeRecord]
) -> ScaleOut:
    """Correct the analytic models by every window of these probes."""
    from tuner.models.analytic.model import AnalyticModel
    from tuner.models.scale_out import ScaleOut

    windows = measured_windows(records)
    model = AnalyticModel(job, charged(cluster, windows.records[0].meter))
    return ScaleOut.of_prior(model, windows.as_delivered, windows.logs)


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
    """Predict one configuration.

    Raises:
        InvalidConfiguration: it cannot train this job on this cluster; the error says why.
        InputError: `records` hold no measurement.
    """
    from tuner.models.analytic.known_error import known_error_lines
    from tuner.models.analytic.model import AnalyticModel

    if phrases := broken_rules(configuration, job, cluster):
        raise InvalidConfiguration(configuration.short, phrases)
    breakdown = AnalyticModel(job, cluster).breakdown(configuration)
    corrected: dict[str, tuple[float, float, float]] = {}
    windows = 0
    if records:
        corrected, windows = _corrected(job, probed_on or cluster, records, cluster, configuration)
    return Forecast(
        job=job,
        cluster=cluster,
        configuration=configuration,
        breakdown=breakdown,
        known_error=tuple(known_error_lines(cluster.device)),
        corrected=corrected,
        probes=windows,
    )
