"""Posterior of a Gaussian process at fixed hyperparameters, cheap to extend and to evaluate again.

Rows are appended to the Cholesky factor instead of refactoring it, rows may be only believed
(pending measurements), and a list of watched points has its posterior kept up to date at
O(rows x watched) a new row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.linalg import cho_solve, cholesky, solve_triangular

from tuner.models.surrogate.kernel import AdditiveKernel


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

    The subclass sets the kernel, the noise variance `_white`, the data `_y` and their centre, and
    `offset_variance`.
    """

    n_features_in_: int
    _kernel: AdditiveKernel
    _white: float
    _y: np.ndarray
    _watched: np.ndarray

    @property
    def offset_variance(self) -> float:
        """Variance of the constant."""
        raise NotImplementedError

    def _covariance(self, a: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
        return self._kernel(a, b) + self._offset2

    @property
    def _prior_variance(self) -> float:
        return self._kernel.variance + self._offset2

    def _factor_all(self, x: Any, y: Any, variance: Any) -> None:
        self._lower = np.empty((0, 0))
        self._rows = np.empty((0, self.n_features_in_))
        self._projected: np.ndarray | None = None  # L^-1 K(rows, watched), built when asked for
        self._watched_variance = np.empty(0)
        self._centre = float(np.mean(y)) if len(y) else 0.0
        self._offset2 = self.offset_variance
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
        self._forget()
        self._append(x, np.zeros(len(x)))
        self._weights = np.append(self._weights, np.zeros(len(x)))

    def _forget(self) -> None:
        self._truncate(self._data_rows)

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
        """Mean (m,) and covariance (m, m) of offset + f at rows `x`."""
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
        """Mean and variance (no noise) at the watched rows."""
        self._build_watched()
        assert self._projected is not None
        mean = self._centre + self._weights @ self._projected
        return mean, np.maximum(self._watched_variance, 1e-12)

    def _build_watched(self) -> None:
        if self._projected is None:
            self._projected = np.empty((0, len(self._watched)))
            self._watched_variance = np.full(len(self._watched), self._prior_variance)
            if len(self._rows):
                self._project(self._rows, np.empty((len(self._rows), 0)), self._lower)

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
