"""Predictions for other sizes: the models' constants corrected by probes, with intervals.

Every constant has an uncertainty (`UNCERTAIN`). Probes correct those that they exercise, by damped
Gauss-Newton on log step time and log power; the others keep it, so a prediction over a network that
no probe crossed is as uncertain as the network's constants. Deviations that no constant explains
are added: a level, a share per doubling of the GPUs away from the probed sizes, and one of each
launch. Beyond the largest probed size an oversubscribed network and the slowest of many devices can
only slow a step down, so the upper limits of time and energy alone allow for both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.models.analytic.constants import Constants
from tuner.models.analytic.model import AnalyticModel, Correctable
from tuner.models.analytic.step import OUTSIDE_PARTS
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.workload.node.measure.statistics import Z90

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
    "recompute_operators": 1.0,
    "compiled_operator_s": 1.0,
    "dispatch_hidden": 0.3,
    "unit_s": 0.7,
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
#: Scale of the slowdown per doubling beyond the largest probed size, in log, which is the absolute
#: value of a normal variable: its median is then 1.7 % a doubling and its 95 % quantile 4.9 %, as
#: in MosaicML's published throughput at growing numbers of GPUs (`benchmarks/data/mpt_throughput`:
#: 17 series of 2 to 4 sizes from 8 to 512 GPUs, median 1.7 %, one above 4.9 %).
SLOWDOWN = 0.025
#: 95 % quantile of the absolute value of a standard normal variable.
ABSOLUTE_95 = 1.96
#: Bandwidth per device that the upper limits assume between nodes from one doubling beyond the
#: largest probed size on, as a share of that of the probes: trees of switches are commonly
#: oversubscribed two to one above a rack or pod.
OVERSUBSCRIBED = 0.5
#: Constants that are proportional to it.
OF_NETWORK = ("network_efficiency", "reduce_over_network")
#: Step of the derivatives by a constant's log.
STEP = 0.02
#: Rounds of the fit at most.
ROUNDS = 8
#: The fit ends with the first round that lowers the misfit by less. Near an optimum the misfit
#: exceeds its minimum by at least the square of the distance in prior standard deviations: 0.01.
GAIN = 1e-4
#: A step that moves no constant by more, in prior standard deviations, is none.
STILL = 0.1
#: Shares of a step that are tried until one lowers the misfit.
SHARES = (1.0, 0.5, 0.25, 0.125)
#: Misfits per figure (a correct model's is 1 on average) up to which one start is enough: in any
#: case, and if the first start's optimum hides dispatch in some window.
EXPLAINED, EXPLAINED_IF_HIDDEN = 1.0, 0.5
#: A fit that comes this near to another's optimum, in prior standard deviations, ends there too.
NEAR = 0.25
#: Constants that are shares: at most this.
AT_MOST = {"lowest_voltage": 0.97, "voltage_knee": 0.97, "dispatch_hidden": 1.0}
#: Constants that have no effect below a bound: dispatch that the device's work hides moves no
#: predicted time. The fit approaches them from these logs above the prior, too, if the first start
#: leaves room for another mode, and keeps the likelier one: a slow host, or a slow device.
FROM = {"operator_s": 2.0, "compiled_operator_s": 2.0}

#: Constants of what a launch may lack, by the change of their log that slows it down: without an
#: effect at `A_MILLION` times the time, they have none at any value.
A_MILLION = float(np.log(1e6))
OF_SOME = {
    **dict.fromkeys(("compiled_operator_s", "recompute_operators", "unit_s"), A_MILLION),
    "stage_s": A_MILLION,
    **dict.fromkeys(("link_efficiency", "network_efficiency", "transfer_efficiency"), -A_MILLION),
    **dict.fromkeys(("reduce_efficiency", "reduce_over_network"), -A_MILLION),
}

#: Constants -> logs of the figures, shape (n, outputs): step time, and power where it was measured.
Predict = Callable[[Constants], np.ndarray]


@dataclass(frozen=True)
class CorrectedFigure:
    """A corrected figure with its 90 % interval; arrays of one shape."""

    median: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(
        cls,
        log: np.ndarray,
        spread: np.ndarray,
        *,
        slowest: np.ndarray | float = 0.0,
        network: np.ndarray | float = 0.0,
    ) -> CorrectedFigure:
        """Return the figure of a normal log with this standard deviation.

        Args:
            slowest: 95 % quantile of what the slowest device may add to the log.
            network: what an oversubscribed network would add.
        """
        above = network + np.hypot(Z90 * spread, slowest)
        return cls(np.exp(log), np.exp(log - Z90 * spread), np.exp(log + above))


@dataclass(frozen=True)
class ScaledLogs:
    """Corrected logs at another size, jointly."""

    log: np.ndarray  # (n, outputs): log step time, log power
    rows: np.ndarray  # (n, outputs, parameters): their derivatives by the uncertain parameters
    # (parameters, parameters): a square root of the parameters' posterior covariance.
    root: np.ndarray
    doublings: np.ndarray  # (n,): of the GPUs beyond the largest probed size; 0 up to it
    network: np.ndarray  # (n, outputs): what an oversubscribed network there adds to the logs

    def _spread(self, rows: np.ndarray, owns: int) -> np.ndarray:
        return np.sqrt(((rows @ self.root) ** 2).sum(axis=-1) + owns * OWN**2)

    @property
    def step_time_s(self) -> CorrectedFigure:
        network = np.maximum(0.0, self.network[:, 0])
        spread = self._spread(self.rows[:, 0], 1)
        return CorrectedFigure.of(self.log[:, 0], spread, slowest=self._slowest, network=network)

    @property
    def power_W(self) -> CorrectedFigure:
        """Average power of the job."""
        return CorrectedFigure.of(self.log[:, 1], self._spread(self.rows[:, 1], 1))

    @property
    def energy_J(self) -> CorrectedFigure:
        """Joules of one step, from the joint posterior of time and power."""
        network = np.maximum(0.0, self.network.sum(axis=1))
        spread = self._spread(self.rows.sum(axis=1), 2)
        # Devices that wait for a collective poll, and draw most of their power.
        return CorrectedFigure.of(
            self.log.sum(axis=1), spread, slowest=self._slowest, network=network
        )

    @property
    def _slowest(self) -> np.ndarray:
        return ABSOLUTE_95 * SLOWDOWN * self.doublings


@dataclass(frozen=True)
class _Optimum:
    """End of a fit from one start: misfit, mean and covariance of the parameters, derivatives."""

    misfit: float
    mean: np.ndarray
    covariance: np.ndarray
    rows: np.ndarray
    converged: bool


def predictor(
    job: TrainingJob, cluster: Cluster, configurations: Sequence[Configuration]
) -> Predict:
    """Return a function of the constants: log step time and log power, shape (n, 2)."""
    return _predictor(AnalyticModel(job, cluster), configurations)


def _predictor(prior: Correctable, configurations: Sequence[Configuration]) -> Predict:
    figures = prior.time_and_power(configurations)

    def predict(constants: Constants) -> np.ndarray:
        return np.log(figures(constants))

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
        self._largest = float(doublings.max()) if len(doublings) else 0.0
        k = self._outputs
        self._prior = np.array(
            [*(UNCERTAIN[n] for n in self._names), *[LEVEL] * k, *[PER_DOUBLING] * k]
        )
        self._mean = np.zeros(len(self._prior))
        self._root = np.diag(self._prior)
        if len(measured):
            _, number = np.unique([str(each) for each in launches], return_inverse=True)
            alike = number[:, None] == number[None, :]
            self._noise = np.linalg.inv(OWN**2 * alike + WITHIN**2 * np.eye(len(measured)))
            self._idle = self._without_effect(predict)
            best = self._optimum(self._mean, predict, gpus, measured)
            if self._other_mode_possible(best, measured.size):
                start = np.zeros(len(self._prior))
                start[: len(self._names)] = [FROM.get(name, 0.0) for name in self._names]
                other = self._optimum(start, predict, gpus, measured, best.mean)
                best = min(best, other, key=lambda each: each.misfit)
            self._mean, covariance = best.mean, best.covariance
            self._root = np.linalg.cholesky(covariance + 1e-14 * np.eye(len(covariance)))

    def _without_effect(self, predict: Predict) -> set[str]:
        # Names of the constants that change no figure of these configurations, whatever the others.
        here, idle = predict(self._base), set()
        for name in OF_SOME.keys() & {*self._names}:
            slower = getattr(self._base, name) * float(np.exp(OF_SOME[name]))
            if np.array_equal(predict(replace(self._base, **{name: slower})), here):
                idle.add(name)
        return idle

    def _other_mode_possible(self, best: _Optimum, figures: int) -> bool:
        places = [place for place, name in enumerate(self._names) if name in FROM]
        shows = (best.rows[:, 0, places] != 0).any(axis=1)
        most = EXPLAINED if shows.all() else EXPLAINED_IF_HIDDEN
        return not best.converged or best.misfit > most * figures

    def _misfit(
        self, theta: np.ndarray, predict: Predict, gpus: Sequence[int], measured: np.ndarray
    ) -> float:
        # Twice the negative log density of the posterior, but for a constant.
        off = measured - self._medians(theta, predict, gpus)
        misfit = np.einsum("no,nm,mo->", off, self._noise, off)
        return float(misfit + ((theta / self._prior) ** 2).sum())

    def _optimum(
        self,
        theta: np.ndarray,
        predict: Predict,
        gpus: Sequence[int],
        measured: np.ndarray,
        other: np.ndarray | None = None,
    ) -> _Optimum:
        # The misfit never rises: a figure bends where one part of a step begins to hide behind
        # another, and undamped steps jump to and fro across such a bend.
        misfit, converged = self._misfit(theta, predict, gpus, measured), False
        for _ in range(ROUNDS):
            log, rows = self._linear(theta, predict, gpus, self._idle)
            step, covariance = self._step(theta, log, rows, measured)
            # The derivatives do not hold for a step of more than a prior deviation.
            step /= max(1.0, float(np.abs(step / self._prior).max()))
            before = misfit
            for share in SHARES:
                lower = self._misfit(theta + share * step, predict, gpus, measured)
                if lower < misfit:
                    theta, misfit = theta + share * step, lower
                    break
            if before - misfit < GAIN:
                # Where no share of a long step helps, a bend is in the way.
                converged = misfit < before or bool((np.abs(step) < STILL * self._prior).all())
                break
            if other is not None and (np.abs(theta - other) < NEAR * self._prior).all():
                break
        return _Optimum(misfit, theta, covariance, rows, converged)

    def _step(
        self, theta: np.ndarray, log: np.ndarray, rows: np.ndarray, measured: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        # Returns the Gauss-Newton step, and the covariance of the linear model that it solves.
        off = measured - log + np.einsum("nop,p->no", rows, theta)
        precision = np.diag(self._prior**-2)
        pull = np.zeros(len(self._prior))
        for output in range(self._outputs):
            weighed = rows[:, output].T @ self._noise
            precision += weighed @ rows[:, output]
            pull += weighed @ off[:, output]
        covariance = np.linalg.inv(precision)
        return covariance @ pull - theta, covariance

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

    def _linear(
        self,
        theta: np.ndarray,
        predict: Predict,
        gpus: Sequence[int],
        idle: Collection[str] = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        count, k = len(self._names), self._outputs
        here = predict(self._constants(theta))[:, :k]
        n = len(here)
        rows = np.zeros((n, k, len(theta)))
        at_work = [i for i in range(count) if self._names[i] not in idle]
        # First those that leave the parts of a step as they are here: they are computed once.
        for i in sorted(at_work, key=lambda i: self._names[i] not in OUTSIDE_PARTS):
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

    def correct(self, predict: Predict, gpus: Sequence[int]) -> ScaledLogs:
        """Return the figures of other configurations, at any size."""
        log, rows = self._linear(self._mean, predict, gpus)
        beyond = np.maximum(0.0, np.log2(np.asarray(gpus, dtype=float)) - self._largest)
        slow = self._mean.copy()
        for place, name in enumerate(self._names):
            slow[place] += np.log(OVERSUBSCRIBED) * (name in OF_NETWORK)
        added = self._medians(slow, predict, gpus) - log
        return ScaledLogs(log, rows, self._root, beyond, np.minimum(beyond, 1.0)[:, None] * added)

    def medians(self, predict: Predict, gpus: Sequence[int]) -> np.ndarray:
        """Return the corrected logs alone, (n, outputs), for many configurations."""
        return self._medians(self._mean, predict, gpus)

    def _medians(self, theta: np.ndarray, predict: Predict, gpus: Sequence[int]) -> np.ndarray:
        count, k = len(self._names), self._outputs
        growth = np.log2(np.asarray(gpus, dtype=float)) - self.centre
        level, slope = theta[count : count + k], theta[count + k :]
        return np.asarray(predict(self._constants(theta))[:, :k] + level + growth[:, None] * slope)

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
