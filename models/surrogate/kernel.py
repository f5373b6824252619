"""Covariance of a Gaussian process, its likelihood, and draws of a normal distribution.

The covariance has effects of the launch, of the live setting, and of their mix:

    k(x, x') = a_launch^2 kL + a_live^2 kV + a_mix^2 kL kV kB + a_own^2 kO

with kL, kV and kB Matern-5/2 kernels, one length a column, over the launch columns, the live ones
and those of both (an analytic prediction). How a clock or a limit bends step time and power is much
the same under every launch, so one well-visited launch tells most of every other's curve, and a
single window fixes its level; what differs is left to the mix (additive kernels: Duvenaud,
Nickisch & Rasmussen 2011, arXiv 1112.4394). Where one of the two halves has no column the mix
stands for both. kO is a rough (Matern-1/2) kernel of the launch columns with a short fixed length:
each launch has a few per cent of its own (which kernels its shapes select, where one bound takes
over from another), which would else read as noise, or as a function without length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_solve, cholesky
from scipy.spatial.distance import cdist

#: Kinds of columns.
KINDS = LAUNCH, LIVE, MIXED = 0, 1, 2
#: Prior shares of the first three parts' standard deviations.
SHARES = np.array([0.9, 0.3, 0.2])
#: Prior median of a launch's own level, in log: a few per cent between neighbours.
OWN = 0.02
#: Length of that level's kernel: a fifth of a column's range, times sqrt(columns).
OWN_LENGTH = 0.2


@dataclass(frozen=True)
class AdditiveKernel:
    """Covariance at one set of hyperparameters."""

    kinds: np.ndarray
    # standard deviations of the launch part, the live part, the mix and the launches' own levels; 0
    # is absent.
    amplitudes: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(
        cls, kinds: Sequence[int] | np.ndarray, amplitude: float, lengths: np.ndarray
    ) -> AdditiveKernel:
        """Return a kernel of this total standard deviation, in the prior's shares."""
        kinds = np.asarray(kinds, dtype=int)
        shares = SHARES if cls.splits(kinds) else np.array([0.0, 0.0, 1.0])
        return cls(kinds, np.append(amplitude * shares / np.linalg.norm(shares), OWN), lengths)

    @staticmethod
    def splits(kinds: np.ndarray) -> bool:
        """Return True if there are both launch columns and live columns."""
        return bool((kinds == LAUNCH).any() and (kinds == LIVE).any())

    @staticmethod
    def launch_columns(kinds: np.ndarray) -> np.ndarray:
        """Columns that distinguish launches; all of them where nothing is split."""
        if AdditiveKernel.splits(kinds):
            return kinds == LAUNCH
        return np.ones(len(kinds), dtype=bool)

    @property
    def variance(self) -> float:
        """k(x, x)."""
        return float(np.sum(self.amplitudes**2))

    def __call__(self, a: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
        """Covariance of rows `a` (n, d) with rows `b` (m, d), or among themselves; (n, m)."""
        return self.between(Pairs(self.kinds, a, a if b is None else b))

    def between(self, pairs: Pairs) -> np.ndarray:
        """Covariance of each pair, (n, m)."""
        launch, live, mixed = (pairs.matern(self.lengths, kind) for kind in KINDS)
        weight = self.amplitudes**2
        total = launch * (weight[0] + weight[2] * (live * mixed)) + weight[1] * live
        return np.asarray(total + weight[3] * pairs.own)


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
        columns = AdditiveKernel.launch_columns(kinds)
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
    """Negative log marginal likelihood of rows (n, d) under the kernel, with its exact gradient.

    `variance` (n,) is each row's own noise, `constant` the variance of what the kernel is added to.
    """

    def __init__(
        self,
        kernel: AdditiveKernel,
        x: np.ndarray,
        y: np.ndarray,
        variance: np.ndarray,
        constant: float,
    ) -> None:
        self.kernel, self._y, self._variance, self._constant = kernel, y, variance, constant
        self.present = np.flatnonzero(kernel.amplitudes > 0)
        # Squared differences a column: (d, n, n).
        self._squares = (x.T[:, :, None] - x.T[:, None, :]) ** 2
        own = self._squares[kernel.launch_columns(kernel.kinds)]
        self._own = np.exp(-np.sqrt(own.sum(axis=0) / len(own)) / OWN_LENGTH)

    def __call__(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        """Return value and gradient at the logs of the present a^2, the lengths and the noise."""
        kernel, n = self.kernel, len(self._y)
        count = len(self.present)
        weight = np.zeros(4)
        weight[self.present] = np.exp(theta[:count])
        lengths, white = np.exp(theta[count:-1]), float(np.exp(theta[-1]))
        inverse2 = lengths**-2
        value = [np.ones((n, n))] * 3
        slope = [np.zeros((n, n))] * 3  # of each Matern by the log of a length, over its square
        for kind in KINDS:
            columns = np.flatnonzero(kernel.kinds == kind)
            if len(columns):
                s = np.sqrt(5.0 * np.tensordot(inverse2[columns], self._squares[columns], axes=1))
                decay = np.exp(-s)
                value[kind] = (1.0 + s + s * s / 3.0) * decay
                slope[kind] = (5.0 / 3.0) * (1.0 + s) * decay
        launch, live, mixed = value
        parts = [launch, live, launch * live * mixed, self._own]
        covariance = sum(weight[i] * parts[i] for i in self.present) + self._constant
        covariance[np.diag_indices(n)] += self._variance + white + 1e-12
        try:
            lower = cholesky(covariance, lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            return 1e25, np.zeros_like(theta)
        alpha = cho_solve((lower, True), self._y, check_finite=False)
        loss = 0.5 * float(self._y @ alpha) + float(np.log(np.diag(lower)).sum())
        loss += 0.5 * n * np.log(2 * np.pi)
        outer = cho_solve((lower, True), np.eye(n), check_finite=False) - np.outer(alpha, alpha)
        gradient = np.empty_like(theta)
        for place, i in enumerate(self.present):
            gradient[place] = 0.5 * weight[i] * np.sum(outer * parts[i])
        by_kind = (
            weight[0] + weight[2] * live * mixed,
            weight[1] + weight[2] * launch * mixed,
            weight[2] * launch * live,
        )
        for kind in KINDS:
            columns = np.flatnonzero(kernel.kinds == kind)
            if len(columns):
                through = outer * slope[kind] * by_kind[kind]
                sums = np.tensordot(self._squares[columns], through, axes=([1, 2], [0, 1]))
                gradient[count + columns] = 0.5 * inverse2[columns] * sums
        gradient[-1] = 0.5 * white * float(np.trace(outer))
        return loss, gradient


def draw_normal(mean: np.ndarray, covariance: np.ndarray, normals: np.ndarray) -> np.ndarray:
    """Return draws of N(mean, covariance), (draws, m), from standard normal ones."""
    jitter = 1e-10 + 1e-9 * float(covariance.diagonal().max(initial=0.0))
    try:
        # Not by eigenvectors: of equal eigenvalues they are any, as the last bits have it.
        root = np.linalg.cholesky(covariance + jitter * np.eye(len(mean)))
    except np.linalg.LinAlgError:  # rounding left a negative direction
        root = np.linalg.cholesky(covariance + 1e4 * jitter * np.eye(len(mean)))
    return np.asarray(mean + normals[:, : len(mean)] @ root.T)
