"""Surrogates: posterior of step time and power given the measurements.

Two regressors, on log step time and on log power; energy is their product. Their mean is the
analytic prediction, only while it helps: at every fit of the hyperparameters the leave-one-out
likelihoods with it and without are compared. Noise is what each window states and a fitted part
beside it (time is quiet, power is not).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.models.surrogate import LeaveOneOut
from tuner.models.surrogate.features import FeatureMap, Rows
from tuner.models.surrogate.gaussian_process import TOLERANCE, GaussianProcess
from tuner.search_spaces.configuration import Configuration
from tuner.workload.node.measure.statistics import Z90

#: Relative standard deviation of a repeated window: time 0.02 to 0.2 %, power or energy 1 to 3 %
#: (3 x 1,000 identical GEMMs on an A4000; three repeats on two A100).
TIME_NOISE, POWER_NOISE = 0.002, 0.02
#: Largest fitted noise of log step time and log power. Of power it is twice the expected one: with
#: more, a whole power curve can read as noise. A knee at another limit in each launch reads as
#: noise of time, and a search that cannot take it for noise measures every setting.
MOST_NOISE = (0.3, 2 * POWER_NOISE)
#: Expected spread of log step time and log power about the mean, before there are data: with an
#: analytic prior, and without.
AMPLITUDE_PRIOR, AMPLITUDE_BLIND = (0.3, 0.2), (0.7, 0.3)
#: The same of what launches have of their own: a few per cent between neighbours, and more of a
#: model's errors.
OWN_PRIOR, OWN_BLIND = 0.1, 0.02
#: The prior is judged from so many measurements on. None takes over where it predicts them better
#: by so much in log (odds of exp(2) to 1).
JUDGE_FROM, MARGIN = 6, 2.0
#: Standard deviations that are shown are widened by 1 + FEW / measurements, for time and for power.
#: Set on three recorded tables and simulated clusters together. A problem's own cross-validation
#: does not predict its factor: over these problems the two were uncorrelated.
FEW = (10.0, 4.0)
#: Measurements' worth of belief that errors of time and power are unrelated.
SHRINK = 4.0


@dataclass(frozen=True)
class Posterior:
    """Posterior at configurations; arrays of one figure per configuration.

    Standard deviations are of the configuration's true value: a window's noise comes on top.
    `correlation` is that of the errors of log time and log power.
    """

    log_time: np.ndarray
    log_time_std: np.ndarray
    log_power: np.ndarray
    log_power_std: np.ndarray
    correlation: float = 0.0

    @property
    def log_energy(self) -> np.ndarray:
        """Log of the joules per step: log t + log P."""
        return self.log_time + self.log_power

    @property
    def log_energy_std(self) -> np.ndarray:
        """Standard deviation of `log_energy`."""
        together = 2 * self.correlation * self.log_time_std * self.log_power_std
        return np.sqrt(self.log_time_std**2 + self.log_power_std**2 + together)

    @property
    def step_time_s(self) -> np.ndarray:
        """Median step time, seconds."""
        return np.exp(self.log_time)

    @property
    def power_W(self) -> np.ndarray:
        """Median power of the whole job, watts."""
        return np.exp(self.log_power)

    def __getitem__(self, rows: np.ndarray | Sequence[int] | slice) -> Posterior:
        arrays = (self.log_time, self.log_time_std, self.log_power, self.log_power_std)
        time, time_std, power, power_std = (array[rows] for array in arrays)
        return Posterior(time, time_std, power, power_std, self.correlation)


def _joined(
    found: Sequence[tuple[np.ndarray, np.ndarray]],
    bases: Sequence[np.ndarray],
    widening: Sequence[float] = (1.0, 1.0),
    correlation: float = 0.0,
) -> Posterior:
    time, time_std, power, power_std = (
        part
        for (mean, variance), base, factor in zip(found, bases, widening, strict=True)
        for part in (mean + base, factor * np.sqrt(variance))
    )
    return Posterior(time, time_std, power, power_std, correlation)


class _Output:
    def __init__(self, features: FeatureMap, output: int, noise: float) -> None:
        self._features, self._output = features, output
        self._apart = np.empty(0)
        # By whether the prior is the mean.
        self._variants = {
            with_prior: GaussianProcess(
                features.kinds,
                noise=noise,
                most_noise=MOST_NOISE[output],
                amplitude=(AMPLITUDE_PRIOR if with_prior else AMPLITUDE_BLIND)[output],
                own=OWN_PRIOR if with_prior else OWN_BLIND,
            )
            for with_prior in ((True, False) if features.has_prior else (False,))
        }
        self.uses_prior = features.has_prior

    @property
    def regressor(self) -> GaussianProcess:
        return self._variants[self.uses_prior]

    def base(self, configurations: Rows) -> np.ndarray:
        return self._mean(self.uses_prior, configurations)

    def _mean(self, with_prior: bool, configurations: Rows) -> np.ndarray:
        if not with_prior:
            return np.zeros(len(configurations))
        return self._features.prior_log(configurations)[:, self._output]

    def fit(
        self, configurations: Sequence[Configuration], x: np.ndarray, y: np.ndarray, variance: Any
    ) -> bool:
        before = self.uses_prior
        self._apart = y - self.base(configurations)
        refit = self.regressor.update(x, self._apart, variance)
        if refit and len(self._variants) > 1 and len(y) >= JUDGE_FROM:
            scores = {}
            for with_prior, regressor in self._variants.items():
                apart = y - self._mean(with_prior, configurations)
                if with_prior != before:
                    regressor.update(x, apart, variance)
                scores[with_prior] = _log_density(apart, regressor)
            self.uses_prior = scores[True] + MARGIN + TOLERANCE >= scores[False]
            self._apart = y - self.base(configurations)
        return refit or self.uses_prior != before

    def left_out(self) -> tuple[np.ndarray, np.ndarray]:
        mean, variance = self.regressor.leave_one_out()
        return self._apart - mean, variance


def _log_density(y: np.ndarray, regressor: GaussianProcess) -> float:
    # Leave-one-out log predictive density (Rasmussen & Williams 2006, equation 5.11).
    mean, variance = regressor.leave_one_out()
    return float(-0.5 * np.sum((y - mean) ** 2 / variance + np.log(variance)))


class Surrogates:
    """Step time and power of every candidate, learned from measurements."""

    def __init__(self, features: FeatureMap) -> None:
        self.features = features
        self._time = _Output(features, 0, TIME_NOISE)
        self._power = _Output(features, 1, POWER_NOISE)
        self._outputs = (self._time, self._power)
        self._y = np.empty((0, 2))

    def fit(
        self,
        configurations: Sequence[Configuration],
        step_time_s: Sequence[float] | np.ndarray,
        power_W: Sequence[float] | np.ndarray,
        step_time_rse: Sequence[float] | np.ndarray | None = None,
        power_rse: Sequence[float] | np.ndarray | None = None,
    ) -> bool:
        """Learn from these measurements, one row each; True if hyperparameters were fitted anew.

        Figures are finite and positive (else ValueError), relative standard errors None or NaN
        where unknown.
        """
        figures = np.column_stack([np.asarray(step_time_s, float), np.asarray(power_W, float)])
        if not (np.isfinite(figures).all() and (figures > 0).all()):
            raise ValueError("step times and powers must be finite and positive")
        self._y = np.log(figures)
        x = self.features.transform(configurations)
        changed = self.features.correct(configurations, self._y)
        errors = zip(self._outputs, (step_time_rse, power_rse), self._y.T, strict=True)
        for output, rse, y in errors:
            stated = np.zeros(len(x)) if rse is None else np.asarray(rse, dtype=float)
            changed |= output.fit(configurations, x, y, np.nan_to_num(stated, nan=0.0) ** 2)
        return changed

    def predict(self, configurations: Rows) -> Posterior:
        """Return the posterior at these configurations."""
        x, bases = self.features.transform(configurations), self._bases(configurations)
        return _joined([output.regressor.posterior(x) for output in self._outputs], bases)

    def _bases(self, configurations: Rows) -> list[np.ndarray]:
        return [output.base(configurations) for output in self._outputs]

    def with_intervals(self, configurations: Rows) -> Posterior:
        """Predict as `predict` does, with standard deviations for intervals.

        They hold the doubt about the hyperparameters (`GaussianProcess.marginal`) and a factor for
        how little a few measurements tell (`FEW`); the energy's also holds how the errors of time
        and power go together. The search keeps to `predict`, which is cheaper.
        """
        x, bases = self.features.transform(configurations), self._bases(configurations)
        found = [output.regressor.marginal(x) for output in self._outputs]
        return _joined(found, bases, self.widening, self._correlation())

    def _correlation(self) -> float:
        n = len(self._y)
        if n < 4:
            return 0.0
        left_out = [output.left_out() for output in self._outputs]
        time, power = (residual / np.sqrt(variance) for residual, variance in left_out)
        together = float(time @ power) / max(float(np.sqrt((time @ time) * (power @ power))), 1e-12)
        return together * n / (n + SHRINK)

    def sample(
        self, configurations: Rows, normals: np.ndarray, *, widened: float = 1.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return draws of log step time and log power, (draws, len(configurations)) each.

        Args:
            normals: standard normal draws, (draws, 2, at least len(configurations)).
            widened: share of the widening of `with_intervals`.
        """
        x = self.features.transform(configurations)
        drawn = []
        for i, output in enumerate(self._outputs):
            here = output.regressor.draw(x, normals[:, i])
            centre = here.mean(axis=0)
            wide = centre + (1 + widened * (self.widening[i] - 1)) * (here - centre)
            drawn.append(wide + output.base(configurations))
        return drawn[0], drawn[1]

    @property
    def widening(self) -> tuple[float, float]:
        """Factors by which few measurements widen the deviations of time and power (`FEW`)."""
        n = max(len(self._y), 1)
        return 1 + FEW[0] / n, 1 + FEW[1] / n

    def noise(self) -> tuple[float, float]:
        """Fitted relative standard deviation of one window's step time and of its power."""
        return self._time.regressor.noise_, self._power.regressor.noise_

    def leave_one_out(self) -> LeaveOneOut:
        """Predict each measurement from all the others; there are at least two."""
        n = len(self._y)
        if n < 2:
            raise ValueError("leave-one-out needs at least two measurements")
        predicted, inside = np.empty((n, 2)), np.empty((n, 2), dtype=bool)
        for i, output in enumerate(self._outputs):
            residual, variance = output.left_out()
            predicted[:, i] = self._y[:, i] - residual
            inside[:, i] = np.abs(residual) <= Z90 * np.sqrt(variance)
        error = np.median(np.abs(np.expm1(predicted - self._y)), axis=0)
        pairs = np.stack([np.exp(self._y), np.exp(predicted)], axis=2).reshape(n, 4)
        return LeaveOneOut(
            measurements=n,
            time_error=float(error[0]),
            power_error=float(error[1]),
            coverage=float(inside.mean()),
            pairs=tuple(map(tuple, pairs.tolist())),
        )
