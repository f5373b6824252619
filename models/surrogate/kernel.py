"""Covariance of a Gaussian process over launches and live settings, and its likelihood.

    k(x, x') = a_launch^2 kL + a_live^2 kV + a_mix^2 kL kV kB + a_own^2 kO + a constant

with kL, kV and kB Matern-5/2 kernels, one length a column, over the launch columns, the live ones
and those of both (an analytic prediction). How a clock or a limit bends step time and power is much
the same under every launch, so one well-visited launch tells most of every other's curve, and a
single window fixes its level; what differs is left to the mix (additive kernels: Duvenaud,
Nickisch & Rasmussen 2011, arXiv 1112.4394). kO is a rough (Matern-1/2) kernel of the launch columns
with a short fixed length: each launch has a few per cent of its own (which kernels its shapes
select, where one bound takes over from another), which would else read as noise, or as a function
without length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_solve, cholesky
from scipy.spatial.distance import cdist

#: Kinds of columns.
KINDS = LAUNCH, LIVE, MIXED = 0, 1, 2
#: Prior shares of the standard deviations of the first three parts. One without a column is a
#: further constant.
SHARES = (0.9, 0.3, 0.2)
#: Prior median of a launch's own level, in log: a few per cent between neighbours.
OWN = 0.02
#: Length of that level's kernel: a fifth of a column's range, times sqrt(columns).
OWN_LENGTH = 0.2
#: Length scales are log-normal with median exp(sqrt(2)) sqrt(d): smooth unless the data say
#: otherwise, whatever the dimension d (Hvarfner et al. 2024, "Vanilla Bayesian optimization
#: performs great in high dimensions", arXiv 2402.02229, section 4). Their log-sd is sqrt(3); here
#: it is 0.7, because a search fits from four rows on, to which a wide prior leaves any length.
LENGTH_LOG_MEDIAN, LENGTH_LOG_SD = np.sqrt(2.0), 0.7
#: Log-sd of the priors of the amplitude and of the noise (as standard deviations).
AMPLITUDE_LOG_SD, NOISE_LOG_SD = 1.0, 0.7
#: Variance of the constant over the expected one of the function, so that the data set it.
CONSTANT = 9.0
#: Added to the diagonal of a covariance, a share of the variance: rounding may make it singular.
JITTER = 1e-11


@dataclass(frozen=True)
class Kernel:
    """Covariance at one set of hyperparameters.

    Attributes:
        amplitudes: standard deviations of the launch part, the live part, the mix and the launches'
            own levels.
        lengths: one a column.
        noise: standard deviation of a row, beside what is stated of it.
        constant: variance of the constant.
    """

    amplitudes: np.ndarray
    lengths: np.ndarray
    noise: float
    constant: float

    @classmethod
    def of_logs(cls, logs: np.ndarray, constant: float) -> Kernel:
        """Return the kernel of the logs of its amplitudes, lengths and noise, in this order."""
        return cls(np.exp(logs[:4]), np.exp(logs[4:-1]), float(np.exp(logs[-1])), constant)

    @property
    def variance(self) -> float:
        """k(x, x)."""
        return float(np.sum(self.amplitudes**2)) + self.constant

    def __call__(self, pairs: Pairs) -> np.ndarray:
        """Covariance of each pair, (n, m)."""
        launch, live, mixed = (pairs.matern(self.lengths, kind) for kind in KINDS)
        weight = self.amplitudes**2
        total = launch * (weight[0] + weight[2] * (live * mixed)) + weight[1] * live
        return np.asarray(total + weight[3] * pairs.own + self.constant)


def lower_root(covariance: np.ndarray, variance: float) -> np.ndarray:
    """Return the lower Cholesky factor of a covariance, of which `variance` is the largest."""
    eye = JITTER * variance * np.eye(len(covariance))
    try:
        return np.asarray(cholesky(covariance + eye, lower=True, check_finite=False))
    except np.linalg.LinAlgError:  # rounding left a negative direction
        return np.asarray(cholesky(covariance + 1e4 * eye, lower=True, check_finite=False))


def prior_of_logs(
    kinds: np.ndarray, amplitude: float, noise: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of the logs of the hyperparameters.

    Args:
        amplitude: expected standard deviation of the function.
    """
    amplitudes = np.append(amplitude * np.array(SHARES) / np.linalg.norm(SHARES), OWN)
    counts = np.array([(kinds == kind).sum() for kind in KINDS])
    lengths = LENGTH_LOG_MEDIAN + 0.5 * np.log(counts[kinds])
    sd = [[AMPLITUDE_LOG_SD] * 4, [LENGTH_LOG_SD] * len(kinds), [NOISE_LOG_SD]]
    return np.concatenate([np.log(amplitudes), lengths, [np.log(noise)]]), np.concatenate(sd)


class Pairs:
    """Rows `a` (n, d) against rows `b` (m, d), to be evaluated at any hyperparameters.

    Candidates are launches times live settings, so few of their halves differ: these are found
    once.

    Attributes:
        own: correlation of the launches' own levels, which has no hyperparameter, (n, m).
    """

    def __init__(self, kinds: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
        masks = {kind: kinds == kind for kind in KINDS if (kinds == kind).any()}
        self._halves = {kind: (of, *_distinct(a[:, of], b[:, of])) for kind, of in masks.items()}
        # Columns that tell launches apart; all of them where there is only one.
        columns = kinds == LAUNCH if LAUNCH in kinds else np.ones(len(kinds), dtype=bool)
        whole = None if columns.all() else self._halves[LAUNCH]
        _, rows, others, places = whole or (columns, *_distinct(a, b))
        own = np.exp(-cdist(rows, others) / (OWN_LENGTH * np.sqrt(columns.sum())))
        self.own = own.take(places)

    def matern(self, lengths: np.ndarray, kind: int) -> np.ndarray | float:
        """Matern-5/2 of the columns of a kind, (n, m); 1 if there are none."""
        if kind not in self._halves:
            return 1.0
        columns, a, b, places = self._halves[kind]
        s = np.sqrt(5.0) * cdist(a / lengths[columns], b / lengths[columns])
        return np.asarray((1.0 + s + s * s / 3.0) * np.exp(-s)).take(places)


def _distinct(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # Rows are told apart by their projection on a line, which sorts much faster than whole rows.
    line = np.random.default_rng(0).random(a.shape[1])
    (_, rows, i), (_, others, j) = (
        np.unique(x @ line, return_index=True, return_inverse=True) for x in (a, b)
    )
    return a[rows], b[others], i[:, None] * len(others) + j


class Likelihood:
    """Negative log likelihood of rows (n, d), with its gradient.

    Args:
        variance: each row's own noise variance, (n,).
        constant: variance of the constant.
    """

    def __init__(
        self, kinds: np.ndarray, x: np.ndarray, y: np.ndarray, variance: np.ndarray, constant: float
    ) -> None:
        self._kinds, self._y, self._variance, self._constant = kinds, y, variance, constant
        self._own = Pairs(kinds, x, x).own
        # Squared differences a column: (d, n, n).
        self._squares = (x.T[:, :, None] - x.T[:, None, :]) ** 2

    def __call__(self, logs: np.ndarray) -> tuple[float, np.ndarray]:
        """Return value and gradient at the logs of a `Kernel`."""
        kernel, n = Kernel.of_logs(logs, self._constant), len(self._y)
        weight, inverse2 = kernel.amplitudes**2, kernel.lengths**-2
        value = [np.ones((n, n))] * 3
        slope = [np.zeros((n, n))] * 3  # of each Matern by the log of a length, over its square
        for kind in set(self._kinds.tolist()):
            of = self._kinds == kind
            s = np.sqrt(5.0 * np.tensordot(inverse2[of], self._squares[of], axes=1))
            decay = np.exp(-s)
            value[kind] = (1.0 + s + s * s / 3.0) * decay
            slope[kind] = (5.0 / 3.0) * (1.0 + s) * decay
        launch, live, mixed = value
        parts = np.array([launch, live, launch * live * mixed, self._own])
        covariance = np.tensordot(weight, parts, axes=1) + kernel.constant
        covariance[np.diag_indices(n)] += (
            self._variance + kernel.noise**2 + JITTER * kernel.variance
        )
        lower = cholesky(covariance, lower=True, check_finite=False)
        alpha = cho_solve((lower, True), self._y, check_finite=False)
        loss = 0.5 * float(self._y @ alpha) + float(np.log(np.diag(lower)).sum())
        outer = cho_solve((lower, True), np.eye(n), check_finite=False) - np.outer(alpha, alpha)
        by_amplitude = weight * np.tensordot(parts, outer, axes=2)
        by_kind = (
            weight[0] + weight[2] * live * mixed,
            weight[1] + weight[2] * launch * mixed,
            weight[2] * launch * live,
        )
        by_length = np.zeros(len(self._kinds))
        for kind in set(self._kinds.tolist()):
            of = self._kinds == kind
            sums = np.tensordot(self._squares[of], outer * slope[kind] * by_kind[kind], axes=2)
            by_length[of] = 0.5 * inverse2[of] * sums
        by_noise = kernel.noise**2 * float(np.trace(outer))
        return loss, np.concatenate([by_amplitude, by_length, [by_noise]])
