"""Where the time, energy and memory of one configuration are predicted to go."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InvalidConfiguration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.rules import broken_rules

if TYPE_CHECKING:
    from tuner.models.analytic.model import Breakdown


@dataclass(frozen=True)
class Forecast:
    """A prediction with its breakdown and what is known of its error."""

    job: TrainingJob
    cluster: Cluster
    breakdown: Breakdown
    known_error: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return what `tuner.planning.fit.Fit` does not tell, as JSON values."""
        steps = self.job.steps
        return {
            **asdict(self.breakdown),
            "power_W": self.breakdown.power_W,
            "time_to_solution_s": steps * self.breakdown.step_time_s,
            "energy_to_solution_J": steps * self.breakdown.energy_J,
        }


def forecast(job: TrainingJob, cluster: Cluster, configuration: Configuration) -> Forecast:
    """Predict one configuration; InvalidConfiguration if it cannot train this job here."""
    from tuner.models.analytic.model import AnalyticModel
    from tuner.models.analytic.model_error import known_error_lines

    if phrases := broken_rules(configuration, job, cluster):
        raise InvalidConfiguration(configuration.short, phrases)
    breakdown = AnalyticModel(job, cluster).breakdown(configuration)
    return Forecast(job, cluster, breakdown, tuple(known_error_lines(cluster.device)))
