"""Gaussian processes at fixed hyperparameters: covariance, likelihood, and posterior given data.

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
from typing import Any

import numpy as np
from scipy.linalg import cho_solve, cholesky, solve_triangular
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
        """Columns that tell launches apart; all of them where nothing is split."""
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

    Args:
        often: they are evaluated many times: candidates are launches times live settings, so few
            of their halves differ, and it pays to find these first.

    Attributes:
        own: correlation of the launches' own levels, which has no hyperparameter, (n, m).
    """

    def __init__(
        self, kinds: np.ndarray, a: np.ndarray, b: np.ndarray, *, often: bool = False
    ) -> None:
        paired = _distinct if often else lambda *both: (*both, None)
        masks = {kind: kinds == kind for kind in KINDS if (kinds == kind).any()}
        self._halves = {kind: (of, *paired(a[:, of], b[:, of])) for kind, of in masks.items()}
        columns = AdditiveKernel.launch_columns(kinds)
        distance = cdist(a[:, columns], b[:, columns])
        self.own = np.exp(-distance / (OWN_LENGTH * np.sqrt(columns.sum())))

    def matern(self, lengths: np.ndarray, kind: int) -> np.ndarray | float:
        """Matern-5/2 of the columns of a kind, (n, m); 1 if there are none."""
        if kind not in self._halves:
            return 1.0
        columns, a, b, places = self._halves[kind]
        s = np.sqrt(5.0) * cdist(a / lengths[columns], b / lengths[columns])
        correlation = np.asarray((1.0 + s + s * s / 3.0) * np.exp(-s))
        return correlation if places is None else correlation.take(places)


def _distinct(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    (rows, i), (others, j) = (np.unique(x, axis=0, return_inverse=True) for x in (a, b))
    return rows, others, i.reshape(-1, 1) * len(others) + j.reshape(-1)


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


class ConditionedProcess:
    """Base of `tuner.models.surrogate.gaussian_process.GaussianProcess`: f given rows of data.

    Rows are appended to the Cholesky factor instead of refactoring it, rows may be only believed
    (pending measurements), and a list of watched points has its posterior kept up to date at
    O(rows x watched) a new row. The subclass sets the kernel, the noise variance `_white`, the data
    `_y` and their centre.
    """

    _dimension: int
    _kernel: AdditiveKernel
    _white: float
    _y: np.ndarray
    _watched: np.ndarray

    def _covariance(self, a: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
        return self._kernel(a, b) + self._offset2

    @property
    def _prior_variance(self) -> float:
        return self._kernel.variance + self._offset2

    def _factor_all(self, x: Any, y: Any, variance: Any, offset_variance: float) -> None:
        self._lower = np.empty((0, 0))
        self._rows = np.empty((0, self._dimension))
        self._projected: np.ndarray | None = None  # L^-1 K(rows, watched), built when asked for
        self._watched_variance = np.empty(0)
        self._centre = float(np.mean(y)) if len(y) else 0.0
        self._offset2 = offset_variance
        self._weights = np.empty(0)
        if len(y):
            self._append(np.asarray(x), np.asarray(variance))
        self._data_rows = len(y)
        self._weigh()

    def _append(self, x: np.ndarray, variance: np.ndarray) -> None:
        if not len(x):
            return
        n, k = len(self._rows), len(x)
        corner = self._covariance(x)
        corner[np.diag_indices(k)] += variance + self._white + 1e-12
        lower = np.zeros((n + k, n + k))
        below = np.empty((k, 0))
        if n:
            cross = self._covariance(self._rows, x)
            below = solve_triangular(self._lower, cross, lower=True, check_finite=False).T
            corner -= below @ below.T
            lower[:n, :n], lower[n:, :n] = self._lower, below
        try:
            block = cholesky(corner, lower=True, check_finite=False)
        except np.linalg.LinAlgError:  # rounding beside a tiny noise: a little more on the diagonal
            jitter = 1e-8 * self._prior_variance
            block = cholesky(corner + jitter * np.eye(k), lower=True, check_finite=False)
        lower[n:, n:] = block
        if self._projected is not None:
            self._project(x, below, block)
        self._lower, self._rows = lower, np.vstack([self._rows, x])

    def _weigh(self) -> None:
        n = self._data_rows
        lower = self._lower[:n, :n]
        self._weights = np.zeros(len(self._rows))
        if n:
            self._weights[:n] = solve_triangular(
                lower, self._y - self._centre, lower=True, check_finite=False
            )

    def believe(self, x: np.ndarray) -> None:
        """Take these rows as measured at their posterior mean (kriging believer): the mean stays as
        it is, the variance shrinks. The next call, or `update`, takes them out again."""
        self._truncate(self._data_rows)
        self._append(x, np.zeros(len(x)))
        self._weights = np.append(self._weights, np.zeros(len(x)))

    def _truncate(self, n: int) -> None:
        if len(self._rows) > n:
            if self._projected is not None:
                self._watched_variance += np.einsum("ij,ij->j", *2 * [self._projected[n:]])
                self._projected = self._projected[:n]
            self._lower, self._rows = self._lower[:n, :n], self._rows[:n]
            self._weights = self._weights[:n]

    def posterior(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance of offset + f (no noise) at rows `x`, each of shape (m,)."""
        mean, variance = np.empty(len(x)), np.empty(len(x))
        for start in range(0, len(x), 4096):
            part = slice(start, start + 4096)
            mean[part], variance[part] = self._centre, self._prior_variance
            if len(self._rows):
                projected = solve_triangular(
                    self._lower,
                    self._covariance(self._rows, x[part]),
                    lower=True,
                    check_finite=False,
                    overwrite_b=True,
                )
                mean[part] += self._weights @ projected
                variance[part] -= np.einsum("ij,ij->j", projected, projected)
        return mean, np.maximum(variance, 1e-12)

    def mean(self, x: np.ndarray) -> np.ndarray:
        """Return the posterior mean alone at rows `x`: much cheaper than `posterior`."""
        n = self._data_rows
        if not n:
            return np.full(len(x), self._centre)
        dual = solve_triangular(
            self._lower[:n, :n], self._weights[:n], lower=True, trans=1, check_finite=False
        )
        return np.asarray(self._centre + self._covariance(x, self._rows[:n]) @ dual)

    def draw(self, x: np.ndarray, normals: np.ndarray) -> np.ndarray:
        """Return joint draws of offset + f at rows `x`, (draws, m), from standard normal ones."""
        return draw_normal(*self.joint(x), normals)

    def joint(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return mean (m,) and covariance (m, m) of offset + f at rows `x`."""
        covariance = self._covariance(x)
        mean = np.full(len(x), self._centre)
        if len(self._rows):
            projected = solve_triangular(
                self._lower, self._covariance(self._rows, x), lower=True, check_finite=False
            )
            mean += self._weights @ projected
            covariance -= projected.T @ projected
        covariance[np.diag_indices(len(x))] += 1e-10
        return mean, covariance

    def watch(self, x: np.ndarray) -> None:
        """Keep the posterior at these rows up to date from now on."""
        self._watched, self._projected = x, None

    def _project(self, x: np.ndarray, below: np.ndarray, block: np.ndarray) -> None:
        assert self._projected is not None
        cross = self._covariance(x, self._watched)
        if len(self._projected):
            cross -= below @ self._projected
        added = solve_triangular(block, cross, lower=True, check_finite=False, overwrite_b=True)
        self._projected = np.vstack([self._projected, added])
        self._watched_variance -= np.einsum("ij,ij->j", added, added)

    def watched(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance (no noise) at the watched rows."""
        if self._projected is None:
            self._projected = np.empty((0, len(self._watched)))
            self._watched_variance = np.full(len(self._watched), self._prior_variance)
            if len(self._rows):
                self._project(self._rows, np.empty((len(self._rows), 0)), self._lower)
        mean = self._centre + self._weights @ self._projected
        return mean, np.maximum(self._watched_variance, 1e-12)

    def leave_one_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance (noise included) of each datum given all the others.

        Closed form from K^-1, no refit: mean_i = y_i - [K^-1 y]_i / [K^-1]_ii and variance_i =
        1 / [K^-1]_ii (Rasmussen & Williams 2006, equations 5.10 to 5.12; Sundararajan & Keerthi
        2001). The hyperparameters and the centre are those of all the data.
        """
        n = self._data_rows
        inverse = cho_solve((self._lower[:n, :n], True), np.eye(n), check_finite=False)
        diagonal = np.diag(inverse)
        residual = (inverse @ (self._y - self._centre)) / diagonal
        return self._y - residual, 1.0 / diagonal
