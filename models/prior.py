"""Socket of priors: predictions of time, power and memory of configurations before a probe.

The search works without any. The analytic models are one (`tuner.models.job_prior`); another
distribution brings its own by an entry point of the group `joulefront.priors`, which is asked
before them. A provider has `prior_of(job, cluster)`, which returns a `Prior` or None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.plugins import Socket

SOCKET = Socket(
    *("joulefront.priors", "prior", 1, ("prior_of",)), {"analytic": "tuner.models.job_prior"}
)


@dataclass(frozen=True)
class Prediction:
    """Predicted figures of configurations; arrays of one figure per configuration."""

    step_time_s: np.ndarray
    power_W: np.ndarray
    memory_bytes: np.ndarray
    # peak that the job's ranks use on one node's host, and mean clock of the devices after any
    # limit; empty if the prior does not predict them.
    host_memory_bytes: np.ndarray = field(default_factory=lambda: np.empty(0))
    clock_MHz: np.ndarray = field(default_factory=lambda: np.empty(0))


@runtime_checkable
class Prior(Protocol):
    """Prediction before a measurement, used as the surrogates' mean."""

    def predict(self, configurations: Sequence[Configuration]) -> Prediction:
        """Return the figures of these configurations."""
        ...


@runtime_checkable
class MemoryPrior(Prior, Protocol):
    """Prior that predicts the memory of very many configurations without their time."""

    def memory_bytes(self, configurations: Sequence[Configuration]) -> np.ndarray:
        """Return the peak memory of the fullest device, shape (n,)."""
        ...


@runtime_checkable
class CorrectablePrior(Prior, Protocol):
    """Prior that measured windows correct."""

    def corrected(self, configurations: Sequence[Configuration], logs: np.ndarray) -> Prior:
        """Return the prior corrected by windows: logs of step time and power, shape (n, 2)."""
        ...


def prior_of(job: TrainingJob, cluster: Cluster) -> Prior | None:
    """Return the prior of this job on this cluster; None if no provider has one."""
    providers: list[Any] = [*SOCKET.plugins.found.values(), *SOCKET.parts]
    return next((p for each in providers if (p := each.prior_of(job, cluster)) is not None), None)


def error_lines(device: Device) -> list[str]:
    """Return sentences on the known error of the analytic models on a kind of device."""
    models: Any = SOCKET.part("analytic")
    return models.error_lines(device) if models is not None else []


def ratio_sd(
    configurations: Sequence[Configuration], row: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the standard deviations of the analytic models' error in log time and log energy over
    those of one configuration, shape (n,) each; None without the models."""
    models: Any = SOCKET.part("analytic")
    return models.ratio_sd(configurations, row) if models is not None else None


def peak_memory_bytes(prior: Prior, configurations: Sequence[Configuration]) -> np.ndarray:
    """Return the predicted peak memory of the fullest device, shape (n,)."""
    if isinstance(prior, MemoryPrior):
        return prior.memory_bytes(configurations)
    return np.asarray(prior.predict(configurations).memory_bytes)


def unpredicted_knobs(prior: Prior | None) -> Mapping[str, str]:
    """Return the reason for each knob whose effect a prior does not predict."""
    return getattr(prior, "unpredicted_knobs", {})
