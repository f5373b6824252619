"""Where the time, energy and memory of one configuration are predicted to go.

Nothing is measured and nothing is started: the answer is the analytic models', with the error they
had wherever they could be checked beside it. The probes of an earlier run correct it and give it an
interval, on the same cluster or on a larger one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tuner.formatting import energy_text
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, InvalidConfiguration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.rules import broken_rules

if TYPE_CHECKING:
    from tuner.models.analytic.breakdown import Breakdown
    from tuner.models.scale_out import ScaleOut
    from tuner.workload.probe import MeterInfo, ProbeRecord

#: One letter a part; a bar is as wide as this many characters.
_LETTERS = "#=+*o~:.x%@&"
_WIDTH = 60


@dataclass(frozen=True)
class Forecast:
    """A prediction with its breakdown and what is known of its error.

    Attributes:
        known_error: what is known of the models' error here, a sentence each.
        corrected: step time (s), power (W) and energy of a step (J) as probes correct them: median
            and 90 % interval; empty where no run was named.
    """

    job: TrainingJob
    cluster: Cluster
    configuration: Configuration
    breakdown: Breakdown
    known_error: tuple[str, ...]
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
    """Step time, power and energy of a step corrected by probes, and by how many windows."""
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
    """Correct the analytic models by every window of these probes.

    Raises:
        InputError: they measured nothing.
    """
    from tuner.models.scale_out import ScaleOut

    windows = [
        (record.request.launch, m.as_delivered, m.step_time_s, m.power_W)
        for record in records
        for m in record.measurements
    ]
    if not windows:
        raise InputError("the run that is to correct the prediction has measured nothing")
    meter = next(record.meter for record in records if record.measurements)
    return ScaleOut.of_windows(job, charged(cluster, meter), windows)


def forecast(
    job: TrainingJob,
    cluster: Cluster,
    configuration: Configuration,
    *,
    records: Sequence[ProbeRecord] = (),
    probed_on: Cluster | None = None,
) -> Forecast:
    """Predict one configuration.

    Args:
        records: probes of the same job that correct the prediction.
        probed_on: the cluster that they ran on; `cluster` when not given.

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


def stacked_bar(parts: Mapping[str, float], width: int = _WIDTH) -> tuple[str, dict[str, str]]:
    """One line of letters whose lengths are the parts' shares, and each part's letter.

    Shares are rounded so that the bar is exactly `width` long (largest remainders); a part too
    small for one character has its letter in the legend only.
    """
    total = sum(parts.values())
    if not 0 < total < math.inf:  # a device without bandwidth or speed: nothing to share out
        return "", {name: _LETTERS[i % len(_LETTERS)] for i, name in enumerate(parts)}
    letters = {name: _LETTERS[i % len(_LETTERS)] for i, name in enumerate(parts)}
    exact = {name: width * (value / total) for name, value in parts.items()}
    cells = {name: int(value) for name, value in exact.items()}
    left = sorted(exact, key=lambda name: cells[name] - exact[name])
    for name in left[: width - sum(cells.values())]:
        cells[name] += 1
    return "".join(letters[name] * cells[name] for name in parts), letters


def _section(title: str, parts: Mapping[str, float], unit: str) -> list[str]:
    if not parts:  # a device whose file says that it draws nothing
        return [title, f"  0 {unit}"]
    bar, letters = stacked_bar(parts)
    total = sum(parts.values())
    wide = max(len(name) for name in parts)
    return [
        title,
        f"  [{bar}]",
        *(
            f"  {letters[name]} {name:<{wide}} {value:>10.4g} {unit}  {value / total:>6.1%}"
            for name, value in parts.items()
        ),
    ]


def _corrected_lines(said: Forecast) -> list[str]:
    if not said.corrected:
        return []
    (t, t_low, t_high), (w, w_low, w_high), (j, j_low, j_high) = (
        said.corrected[name] for name in ("step_time_s", "power_W", "energy_J")
    )
    return [
        f"  corrected by {said.probes} windows: {t:.4g} s a step (90 %: {t_low:.4g} to "
        f"{t_high:.4g}), {w:,.0f} W ({w_low:,.0f} to {w_high:,.0f}), {j:,.4g} J a step "
        f"({j_low:,.4g} to {j_high:,.4g})"
    ]


def devices_of(cluster: Cluster, configuration: Configuration) -> str:
    """Return a cluster's name with how many of its devices a configuration uses."""
    kind = "cores" if cluster.device.type == "cpu" else "GPUs"
    return f"{cluster.name}, {configuration.world_size} of {cluster.devices} {kind}"


def cost_lines(said: Forecast) -> list[str]:
    """Return what a step and the whole training take, as lines."""
    b, cluster, steps = said.breakdown, said.cluster, said.job.steps
    charged = (
        "whole packages"
        if cluster.device.type == "cpu"
        else "the modules"
        if cluster.host_W or cluster.supply_loss
        else "the GPUs alone"
    )
    return [
        f"  {b.step_time_s:.4g} s a step, {b.power_W:,.0f} W ({charged}), "
        f"{energy_text(b.energy_J / 1e3)} a step"
        + (f", devices at {b.clock_MHz:.0f} MHz" if cluster.device.type == "cuda" else ""),
        f"  the whole training, {steps:,} steps: {steps * b.step_time_s / 3600:,.3g} h and "
        f"{energy_text(steps * b.energy_J / 1e3)}",
        *_corrected_lines(said),
    ]


def breakdown_lines(said: Forecast) -> list[str]:
    """Return where the time and the energy of a step go, as lines."""
    return [
        *_section("Where the time of a step goes (the busiest stage)", said.breakdown.time_s, "s"),
        "",
        *_section("Where the energy of a step goes (the whole job)", said.breakdown.joules, "J"),
    ]
