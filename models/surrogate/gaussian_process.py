"""A Gaussian process, exact in its data, and in doubt about its hyperparameters.

    y(x) = offset + f(x) + noise,   f ~ GP(0, k) with the kernel of `tuner.models.surrogate.kernel`

The hyperparameters are fitted by maximum a posteriori, and anew only when the data have grown by a
fifth, on at most `FIT_ROWS` rows. They are in doubt, and a few draws of them stand for it: the same
quasi-random ones in every search, because random ones leave to chance when a search ends. Most
figures are at the mode; intervals and joint draws are mixtures over the draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from scipy.linalg import cho_solve, solve_triangular
from scipy.optimize import minimize
from scipy.stats import norm, qmc

from tuner.models.surrogate.kernel import (
    CONSTANT,
    LENGTH_LOG_MEDIAN,
    Kernel,
    Likelihood,
    Pairs,
    lower_root,
    prior_of_logs,
)

#: Hyperparameters are fitted on at most this many rows: a likelihood costs O(rows^3).
FIT_ROWS = 128
#: With fewer rows than this the hyperparameters stay at the medians of their priors.
LEAST_ROWS = 4
#: The hyperparameters are fitted anew when the rows have grown by this factor.
REFIT_GROWTH = 1.2
#: The fitted noise is at least this share of the expected one; more would overstate the noise of
#: quiet recordings.
NOISE_FLOOR = 0.1
#: Prior standard deviations within which the hyperparameters are sought, and by which they are
#: moved to find the curvature at the most likely ones.
MOST_SD, CURVATURE_STEP = 6.0, 0.05
#: Draws of the hyperparameters, and rows up to which they are in doubt: beyond, a factor per draw
#: is too slow for a proposal (0.4 s at 400 rows, for time and again for power).
DRAWS, DOUBT_ROWS = 32, 400


@lru_cache(maxsize=8)
def quasi_normal(count: int, width: int, seed: int = 0) -> np.ndarray:
    """Return quasi-random standard normal draws (scrambled Sobol), (count, width)."""
    engine = qmc.Sobol(width, scramble=True, seed=seed)
    return np.asarray(norm.ppf(np.clip(engine.random(count), 1e-9, 1 - 1e-9)))


class ConditionalProcess:
    """The process at one set of hyperparameters, given the figures of rows.

    Args:
        pairs: of the rows.
        variance: each row's own noise variance, (n,).
    """

    def __init__(self, kernel: Kernel, pairs: Pairs, y: np.ndarray, variance: np.ndarray) -> None:
        self.kernel, self._y = kernel, y
        covariance = kernel(pairs)
        covariance[np.diag_indices(len(y))] += kernel.noise**2 + variance
        self._lower = lower_root(covariance, kernel.variance)
        self._weights = _solved(self._lower, y)

    def posterior(self, across: Pairs) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance (no noise) of the columns of `across`, whose rows are given."""
        projected = _solved(self._lower, self.kernel(across))
        variance = self.kernel.variance - np.einsum("ij,ij->j", projected, projected)
        return self._weights @ projected, np.maximum(variance, 1e-12)

    def draw(self, across: Pairs, among: Pairs, normals: np.ndarray) -> np.ndarray:
        """Return joint draws, (draws, columns of `across`), from standard normal ones.

        Args:
            among: pairs of the columns.
        """
        projected = _solved(self._lower, self.kernel(across))
        covariance = self.kernel(among) - projected.T @ projected
        # Not by eigenvectors: of equal eigenvalues they are any, as the last bits have it.
        root = lower_root(covariance, self.kernel.variance)
        return np.asarray(self._weights @ projected + normals[:, : len(root)] @ root.T)

    def leave_one_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance (noise included) of each datum given all the others.

        Closed form from K^-1, no refit: mean_i = y_i - [K^-1 y]_i / [K^-1]_ii and variance_i =
        1 / [K^-1]_ii (Rasmussen & Williams 2006, equations 5.10 to 5.12; Sundararajan & Keerthi
        2001).
        """
        inverse = cho_solve((self._lower, True), np.eye(len(self._y)), check_finite=False)
        diagonal = np.diag(inverse)
        return self._y - inverse @ self._y / diagonal, 1.0 / diagonal


class GaussianProcess:
    """A Gaussian process over rows of features, exact in its data.

    Args:
        kinds: the kind of each column (`tuner.models.surrogate.kernel`).
        noise: expected standard deviation of the noise, in units of y (median of its prior;
            `NOISE_FLOOR` of it is the floor).
        most_noise: largest fitted standard deviation of the noise beside what rows state.
        amplitude: expected standard deviation of f, in units of y, until there are data to judge
            by.
    """

    def __init__(
        self,
        kinds: Sequence[int] | np.ndarray,
        *,
        noise: float = 0.1,
        most_noise: float = 0.3,
        amplitude: float = 1.0,
    ) -> None:
        self._kinds = np.asarray(kinds, dtype=int)
        self.noise, self.most_noise, self.amplitude = noise, max(most_noise, noise), amplitude
        self._x, self._y, self._variance = np.empty((0, len(self._kinds))), *2 * [np.empty(0)]
        self._centre = 0.0
        self._forget_hyperparameters()
        self.update(self._x, self._y, self._variance)

    @property
    def noise_(self) -> float:
        """Fitted standard deviation of the noise beside that of the rows."""
        return self._kernel.noise

    # -- hyperparameters ---------------------------------------------------------------------

    def _forget_hyperparameters(self) -> None:
        self._logs = self._start(prior_of_logs(self._kinds, self.amplitude, self.noise)[0])
        self._kernel = self._kernel_of(self._logs)
        self._drawn = list[Kernel]()
        self._fitted_at = 0

    def _kernel_of(self, logs: np.ndarray) -> Kernel:
        # The constant is broad beside the function, so that the data set it.
        variance = max(float(np.exp(2 * logs[:4]).sum()), self.amplitude**2)
        return Kernel.of_logs(logs, CONSTANT * variance)

    @staticmethod
    def _start(logs: np.ndarray) -> np.ndarray:
        # The medians of the lengths are long (nearly linear functions); start from shorter ones.
        start = logs.copy()
        start[4:-1] -= LENGTH_LOG_MEDIAN
        return start

    def _fit_hyperparameters(self) -> None:
        n = len(self._y)
        rows = np.arange(n)
        if n > FIT_ROWS:
            rows = np.random.default_rng(0).choice(n, FIT_ROWS, replace=False)
        y = self._y[rows] - self._centre
        spread = max(float(np.std(y)), 2 * self.noise)
        constant = CONSTANT * spread**2
        likelihood = Likelihood(self._kinds, self._x[rows], y, self._variance[rows], constant)
        mean, sd = prior_of_logs(self._kinds, spread, self.noise)
        noise = (np.log([NOISE_FLOOR * self.noise, self.most_noise]) - mean[-1]) / sd[-1]
        bounds = np.vstack([np.tile([-MOST_SD, MOST_SD], (len(mean) - 1, 1)), noise])

        def loss(scaled: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = likelihood(mean + sd * scaled)
            return value + 0.5 * float(scaled @ scaled), sd * gradient + scaled

        start = self._logs if self._fitted_at else self._start(mean)
        start = np.clip((start - mean) / sd, *bounds.T)
        options = {"maxiter": 100, "maxcor": 20, "ftol": 1e-12, "gtol": 1e-6}
        mode = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
        draws = laplace_draws(mode, bounds, lambda scaled: loss(scaled)[1])
        self._logs = mean + sd * mode
        self._kernel = self._kernel_of(self._logs)
        self._drawn = [self._kernel_of(mean + sd * each) for each in draws]
        self._fitted_at = n

    # -- data --------------------------------------------------------------------------------

    def update(self, x: np.ndarray, y: np.ndarray, variance: np.ndarray) -> bool:
        """Take these rows as the data; return True if the hyperparameters were drawn anew.

        They start afresh where there are fewer rows than they were fitted to. `variance` (n,) is
        each row's own noise variance, beside the fitted one; 0 where unknown.
        """
        if len(y) < self._fitted_at:
            self._forget_hyperparameters()
        self._x, self._y, self._variance = x.copy(), y.copy(), variance.copy()
        n = len(y)
        self._centre = float(np.mean(y)) if n else 0.0
        refit = n >= LEAST_ROWS and n >= REFIT_GROWTH * self._fitted_at
        if refit:
            self._fit_hyperparameters()
        self._middle = self._given([self._kernel])
        self._mixture: list[ConditionalProcess] = []
        return refit

    def _given(self, kernels: Sequence[Kernel]) -> list[ConditionalProcess]:
        pairs, y = Pairs(self._kinds, self._x, self._x), self._y - self._centre
        return [ConditionalProcess(kernel, pairs, y, self._variance) for kernel in kernels]

    # -- predictions -------------------------------------------------------------------------

    def posterior(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance of offset + f (no noise) at rows `x`, each of shape (m,)."""
        return self._mixed(self._middle, x)

    def leave_one_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance (noise included) of each datum given all the others."""
        mean, variance = self._middle[0].leave_one_out()
        return self._centre + mean, variance

    def marginal(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `posterior` with the uncertainty of the hyperparameters in the variance.

        Few rows leave the lengths open, and the most likely ones are long, so that the plain
        variance is too small where the function turns out rougher. Mean and variance are those of
        the mixture over the draws, up to `DOUBT_ROWS` rows.
        """
        return self._mixed(self._members(), x)

    def draw(self, x: np.ndarray, normals: np.ndarray) -> np.ndarray:
        """Return joint draws of offset + f at rows `x`, (draws, m), from standard normal ones, each
        at hyperparameters drawn from their posterior."""
        members = self._members()
        across, among = Pairs(self._kinds, self._x, x), Pairs(self._kinds, x, x)
        parts = zip(members, np.array_split(normals, len(members)), strict=True)
        drawn = [member.draw(across, among, part) for member, part in parts if len(part)]
        return self._centre + np.vstack(drawn)

    def _members(self) -> list[ConditionalProcess]:
        if not self._drawn or len(self._y) > DOUBT_ROWS:
            return self._middle
        self._mixture = self._mixture or self._given(self._drawn)
        return self._mixture

    def _mixed(
        self, members: Sequence[ConditionalProcess], x: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        mean, variance = np.empty(len(x)), np.empty(len(x))
        for start in range(0, len(x), 4096):
            part = slice(start, start + 4096)
            across = Pairs(self._kinds, self._x, x[part])
            found = [member.posterior(across) for member in members]
            means, variances = map(np.array, zip(*found, strict=True))
            mean[part] = means.mean(axis=0)
            variance[part] = variances.mean(axis=0) + means.var(axis=0)
        return self._centre + mean, variance


def _solved(lower: np.ndarray, b: np.ndarray) -> np.ndarray:
    if not len(lower):
        return np.empty(b.shape)
    return np.asarray(solve_triangular(lower, b, lower=True, check_finite=False))


def laplace_draws(
    mode: np.ndarray, bounds: np.ndarray, gradient: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return draws about the mode of a density, (`DRAWS`, d), from the gradient of its -log.

    Normal with the curvature at the mode (Laplace), and in no direction wider than the prior, which
    is standard normal. Where the mode is at a bound, the slope there limits the width, too.
    """
    slope = gradient(mode)
    steps = CURVATURE_STEP * np.eye(len(mode))
    curvature = np.array([gradient(mode + step) - slope for step in steps]) / CURVATURE_STEP
    # Of a density that falls as exp(-s x) from a bound the standard deviation is 1 / s.
    precision = (curvature + curvature.T) / 2 + np.outer(slope, slope)
    values, vectors = np.linalg.eigh(precision)
    # The symmetric root: the signs of eigenvectors, and those of equal eigenvalues, are any.
    root = (vectors / np.sqrt(np.maximum(values, 1.0))) @ vectors.T
    return np.clip(mode + quasi_normal(DRAWS, len(mode)) @ root.T, *bounds.T)
