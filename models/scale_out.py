"""Predictions for other sizes: the models' constants corrected by probes, with intervals.

Every constant has an uncertainty (`UNCERTAIN`). Probes correct those that they exercise, by
Gauss-Newton on log step time and log power; the others keep it, so a prediction over a network that
no probe crossed is as uncertain as the network's constants. Deviations that no constant explains
are added: a level, a share per doubling of the GPUs beyond the probed sizes, and one of each
launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.models.analytic.constants import Constants
from tuner.models.analytic.model import AnalyticModel, Correctable
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.workload.measure.statistics import Z90

#: Standard deviations of the constants' logs before any probe. The efficiency of arithmetic varies
#: by a fifth between programs on one GPU kind; that of memory holds traffic that is not counted: up
#: to twice the count in a program whose kernels are not fused (transformers' eager attention moves
#: 24 bytes a score where 13 are counted, its GELU is eight kernels). Constants fitted to Sailor's
#: plans on GH200 differ from the defaults by factors of 1.5 in the links, 4 in the reduction and 5
#: in dispatch (`models/data/constants`); shares of power are estimates.
UNCERTAIN = {
    "matrix_efficiency": 0.2,
    "memory_efficiency": 0.5,
    "operator_s": 0.7,
    "compiled_operator_s": 1.0,
    "dispatch_hidden": 0.3,
    "step_s": 0.7,
    "link_efficiency": 0.4,
    "network_efficiency": 0.4,
    "reduce_efficiency": 0.7,
    "reduce_over_network": 0.4,
    "transfer_efficiency": 0.7,
    "stage_s": 0.7,
    "compute_W": 0.2,
    "memory_W": 0.4,
    "awake_W": 0.4,
    "wait_W": 0.7,
    "lowest_voltage": 0.07,
    "voltage_knee": 0.07,
}
#: Standard deviations of the unexplained deviations, in log: of all figures together, per doubling
#: of the GPUs away from the probed sizes, of a launch, and of a window within its launch. Sailor's
#: plans, each predicted without itself, are off by 3 % in the median and 6 % at worst.
LEVEL, PER_DOUBLING, OWN, WITHIN = 0.05, 0.02, 0.035, 0.01
#: Step of the derivatives by a constant's log, and rounds of the fit.
STEP, ROUNDS = 0.02, 8
#: Constants that are shares: at most this.
AT_MOST = {"lowest_voltage": 0.97, "voltage_knee": 0.97, "dispatch_hidden": 1.0}
#: Constants that have no effect below a bound: dispatch that the device's work hides moves no
#: predicted time. The fit approaches them from these logs above the prior, too, and keeps whichever
#: mode is the likelier: a slow host, or a slow device.
FROM = {"operator_s": 2.0, "compiled_operator_s": 2.0}

#: Constants -> logs of the figures, shape (n, outputs): step time, and power where it was measured.
Predict = Callable[[Constants], np.ndarray]


@dataclass(frozen=True)
class Corrected:
    """A corrected figure with its 90 % interval; arrays of one shape."""

    median: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, log: np.ndarray, spread: np.ndarray) -> Corrected:
        """Return the figure of a normal log with this standard deviation."""
        return cls(np.exp(log), np.exp(log - Z90 * spread), np.exp(log + Z90 * spread))


@dataclass(frozen=True)
class Scaled:
    """Corrected logs at another size, jointly."""

    log: np.ndarray  # (n, outputs): log step time, log power
    rows: np.ndarray  # (n, outputs, parameters): their derivatives by the uncertain parameters
    # (parameters, parameters): a square root of the parameters' posterior covariance.
    root: np.ndarray

    def _spread(self, rows: np.ndarray, owns: int) -> np.ndarray:
        return np.sqrt(((rows @ self.root) ** 2).sum(axis=-1) + owns * OWN**2)

    @property
    def step_time_s(self) -> Corrected:
        """Seconds of one step."""
        return Corrected.of(self.log[:, 0], self._spread(self.rows[:, 0], 1))

    @property
    def power_W(self) -> Corrected:
        """Average power of the job."""
        return Corrected.of(self.log[:, 1], self._spread(self.rows[:, 1], 1))

    @property
    def energy_J(self) -> Corrected:
        """Joules of one step, from the joint posterior of time and power."""
        return Corrected.of(self.log.sum(axis=1), self._spread(self.rows.sum(axis=1), 2))


def predictor(
    job: TrainingJob, cluster: Cluster, configurations: Sequence[Configuration]
) -> Predict:
    """Return a function of the constants: log step time and log power, shape (n, 2)."""
    return _predictor(AnalyticModel(job, cluster), configurations)


def _predictor(prior: Correctable, configurations: Sequence[Configuration]) -> Predict:
    def predict(constants: Constants) -> np.ndarray:
        figures = prior.with_constants(constants).predict(configurations)
        return np.log(np.column_stack([figures.step_time_s, figures.power_W]))

    return predict


class ScaleOut:
    """Analytic models corrected by probes.

    Args:
        gpus: number of GPUs of each window, shape (n,).
        launches: launch of each window; the windows of a launch share its deviation.
        measured: logs of the figures, shape (n, outputs).
    """

    def __init__(
        self,
        constants: Constants,
        predict: Predict,
        *,
        gpus: Sequence[int],
        launches: Sequence[object],
        measured: np.ndarray,
    ) -> None:
        measured = np.asarray(measured, dtype=float)
        self._base, self._outputs = constants, measured.shape[1]
        self._names = [n for n in UNCERTAIN if getattr(constants, n) > 0]
        # Growth counts from the mean of the probed sizes, where the level is most certain.
        doublings = np.log2(np.asarray(gpus, dtype=float))
        self.centre = float(doublings.mean()) if len(doublings) else 0.0
        k = self._outputs
        self._prior = np.array(
            [*(UNCERTAIN[n] for n in self._names), *[LEVEL] * k, *[PER_DOUBLING] * k]
        )
        self._mean = np.zeros(len(self._prior))
        self._root = np.diag(self._prior)
        if len(measured):
            starts = [np.zeros(len(self._prior)), self._mean.copy()]
            starts[1][: len(self._names)] = [FROM.get(name, 0.0) for name in self._names]
            fits = [self._fitted(start, predict, gpus, launches, measured) for start in starts]
            _, self._mean, covariance = min(fits, key=lambda fit: fit[0])
            self._root = np.linalg.cholesky(covariance + 1e-14 * np.eye(len(covariance)))

    def _fitted(
        self,
        start: np.ndarray,
        predict: Predict,
        gpus: Sequence[int],
        launches: Sequence[object],
        measured: np.ndarray,
    ) -> tuple[float, np.ndarray, np.ndarray]:
        # Returns (misfit: twice the negative log posterior density, mean, covariance).
        _, number = np.unique([str(each) for each in launches], return_inverse=True)
        alike = number[:, None] == number[None, :]
        noise = np.linalg.inv(OWN**2 * alike + WITHIN**2 * np.eye(len(measured)))
        self._mean = start
        for _ in range(ROUNDS):
            log, rows = self._linear(predict, gpus)
            off = measured - log + np.einsum("nop,p->no", rows, self._mean)
            precision = np.diag(self._prior**-2)
            pull = np.zeros(len(self._prior))
            for output in range(self._outputs):
                weighed = rows[:, output].T @ noise
                precision += weighed @ rows[:, output]
                pull += weighed @ off[:, output]
            covariance = np.linalg.inv(precision)
            # The derivatives do not hold for a step of more than a prior deviation.
            step = covariance @ pull - self._mean
            self._mean = self._mean + step / max(1.0, float(np.abs(step / self._prior).max()))
        off = measured - self.medians(predict, gpus)
        misfit = np.einsum("no,nm,mo->", off, noise, off) + ((self._mean / self._prior) ** 2).sum()
        return float(misfit), self._mean, covariance

    def _constants(self, theta: np.ndarray) -> Constants:
        values = {
            name: getattr(self._base, name) * float(np.exp(shift))
            for name, shift in zip(self._names, theta[: len(self._names)], strict=True)
        }
        for name in AT_MOST.keys() & values.keys():
            values[name] = min(values[name], AT_MOST[name])
        return replace(self._base, **values)

    @property
    def constants(self) -> Constants:
        """Constants corrected by the probes."""
        return self._constants(self._mean)

    def _linear(self, predict: Predict, gpus: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        theta, count, k = self._mean, len(self._names), self._outputs
        here = predict(self._constants(theta))[:, :k]
        n = len(here)
        rows = np.zeros((n, k, len(theta)))
        for i in range(count):
            # Downwards, where a share may be at its bound.
            step = -STEP if self._names[i] in AT_MOST else STEP
            moved = theta.copy()
            moved[i] += step
            rows[:, :, i] = (predict(self._constants(moved))[:, :k] - here) / step
        growth = np.log2(np.asarray(gpus, dtype=float)) - self.centre
        for output in range(k):
            rows[:, output, count + output] = 1.0
            rows[:, output, count + k + output] = growth
        log = here + rows[:, :, count:] @ theta[count:]
        return log, rows

    def correct(self, predict: Predict, gpus: Sequence[int]) -> Scaled:
        """Return the figures of other configurations, at any size."""
        return Scaled(*self._linear(predict, gpus), self._root)

    def medians(self, predict: Predict, gpus: Sequence[int]) -> np.ndarray:
        """Return the corrected logs alone, (n, outputs), for many configurations."""
        count, k = len(self._names), self._outputs
        growth = np.log2(np.asarray(gpus, dtype=float)) - self.centre
        level, slope = self._mean[count : count + k], self._mean[count + k :]
        return np.asarray(predict(self.constants)[:, :k] + level + growth[:, None] * slope)

    @classmethod
    def of_prior(
        cls, prior: Correctable, configurations: Sequence[Configuration], measured: np.ndarray
    ) -> ScaleOut:
        """Fit a prior's constants to the logs of step time and power of windows, (n, 2)."""
        return cls(
            prior.constants,
            _predictor(prior, configurations),
            gpus=[each.world_size for each in configurations],
            launches=[each.launch.key for each in configurations],
            measured=measured,
        )
