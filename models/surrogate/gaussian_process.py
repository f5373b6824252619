"""A Gaussian process, exact in its data.

    y(x) = offset + f(x) + noise,   f ~ GP(0, k) with the kernel of `tuner.models.surrogate.kernel`

The hyperparameters are fitted by maximum a posteriori, and anew only when the data have grown by a
fifth, on at most `FIT_ROWS` rows. They are in doubt, and a few draws of them stand for it: the same
quasi-random ones in every search, because random ones leave to chance when a search ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize
from scipy.stats import norm, qmc

from tuner.models.surrogate.kernel import (
    KINDS,
    OWN,
    AdditiveKernel,
    Likelihood,
    Pairs,
    draw_normal,
)

#: Hyperparameters are fitted on at most this many rows: a likelihood costs O(rows^3).
FIT_ROWS = 128
#: With fewer rows than this the hyperparameters stay at the medians of their priors.
LEAST_ROWS = 4
#: The hyperparameters are fitted anew when the rows have grown by this factor.
REFIT_GROWTH = 1.2
#: Length scales are log-normal with median exp(sqrt(2)) sqrt(d): smooth unless the data say
#: otherwise, whatever the dimension d (Hvarfner et al. 2024, "Vanilla Bayesian optimization
#: performs great in high dimensions", arXiv 2402.02229, section 4). Their log-sd is sqrt(3); here
#: it is 0.7, because a search fits from four rows on, to which a wide prior leaves any length.
LENGTH_LOG_MEDIAN, LENGTH_LOG_SD = np.sqrt(2.0), 0.7
#: Log-sd of the priors of the amplitude and of the noise (as standard deviations).
AMPLITUDE_LOG_SD, NOISE_LOG_SD = 1.0, 0.7
#: The fitted noise is at least this share of the expected one; more would overstate the noise of
#: quiet recordings.
NOISE_FLOOR = 0.1
#: Draws of the hyperparameters behind `marginal` and `draw_marginal`, and rows up to which they are
#: in doubt: beyond, a factor per draw is too slow for a proposal (0.4 s at 400 rows, for time and
#: again for power).
MARGINAL_DRAWS, MARGINAL_ROWS = 32, 400


@lru_cache(maxsize=8)
def quasi_normal(count: int, width: int, seed: int = 0) -> np.ndarray:
    """Return quasi-random standard normal draws (scrambled Sobol), (count, width)."""
    engine = qmc.Sobol(width, scramble=True, seed=seed)
    return np.asarray(norm.ppf(np.clip(engine.random(count), 1e-9, 1 - 1e-9)))


class HyperPosterior:
    """Posterior of the hyperparameters' logs about its mode, to draw from.

    Normal about the mode with the curvature there (Laplace), and in no direction wider than the
    prior. Where the mode is at a bound, the slope there limits the width, too.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        prior_mean: np.ndarray,
        prior_sd: np.ndarray,
        bounds: np.ndarray,
        start: np.ndarray,
    ) -> None:
        self._likelihood, self._bounds = likelihood, bounds
        self._prior_mean, self._prior_sd = prior_mean, prior_sd
        self.mode = minimize(
            self._penalised,
            np.clip(start, bounds[:, 0], bounds[:, 1]),
            jac=True,
            bounds=bounds,
            method="L-BFGS-B",
            # Until it converges: where it stops before is up to the last bits. On two kinds of CPU
            # the logs differ by less than 1e-6 in 9 of 10 fits, at most by 4e-5 (232 fits).
            options={"maxiter": 100, "maxcor": 20, "ftol": 1e-12, "gtol": 1e-6},
        ).x

    def _penalised(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        # Negative log posterior of the hyperparameters' logs, and its gradient.
        value, gradient = self._likelihood(theta)
        pull = (theta - self._prior_mean) / self._prior_sd
        return value + 0.5 * float(pull @ pull), gradient + pull / self._prior_sd

    def unpack(self, theta: np.ndarray) -> tuple[AdditiveKernel, float]:
        """Return the kernel and the noise variance of these logs."""
        present = self._likelihood.present
        amplitudes = np.zeros(4)
        amplitudes[present] = np.exp(0.5 * theta[: len(present)])
        lengths = np.exp(theta[len(present) : -1])
        kernel = replace(self._likelihood.kernel, amplitudes=amplitudes, lengths=lengths)
        return kernel, float(np.exp(theta[-1]))

    def draws(self, count: int, step: float = 0.05) -> np.ndarray:
        """Return draws, (count, d), from the same quasi-random numbers every time."""
        d = len(self.mode)
        base = self._penalised(self.mode)[1]
        curvature = np.array(
            [(self._penalised(self.mode + step * e)[1] - base) / step for e in np.eye(d)]
        )
        scaled = self._prior_sd * (curvature + curvature.T) / 2 * self._prior_sd[:, None]
        # Of a density that falls as exp(-s x) from a bound the standard deviation is 1 / s.
        slope = self._prior_sd * base
        values, vectors = np.linalg.eigh(scaled + np.outer(slope, slope))
        # The symmetric root: the signs of eigenvectors, and those of equal eigenvalues, are any.
        root = self._prior_sd[:, None] * ((vectors / np.sqrt(np.maximum(values, 1.0))) @ vectors.T)
        thetas = self.mode + quasi_normal(count, d) @ root.T
        return np.clip(thetas, self._bounds[:, 0], self._bounds[:, 1])


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
        self.noise, self.most_noise, self.amplitude = noise, most_noise, amplitude
        self._drawn: tuple[HyperPosterior, np.ndarray] | None = None
        self._x, self._y, self._variance = np.empty((0, len(self._kinds))), *2 * [np.empty(0)]
        self._centre = 0.0
        self._forget_hyperparameters()
        self.believe(self._x)

    # -- hyperparameters ---------------------------------------------------------------------

    def _scale_of_lengths(self) -> np.ndarray:
        counts = np.array([(self._kinds == kind).sum() for kind in KINDS])
        if not AdditiveKernel.splits(self._kinds):
            counts[:] = len(self._kinds)
        return np.asarray(np.sqrt(counts[self._kinds]))

    def _kernel_of(self, amplitude: float) -> AdditiveKernel:
        # The median of the prior is long (nearly linear functions); start from a shorter one.
        return AdditiveKernel.of(self._kinds, amplitude, self._scale_of_lengths())

    @property
    def noise_(self) -> float:
        """Fitted standard deviation of the noise beside that of the rows."""
        return float(np.sqrt(self._white))

    def _forget_hyperparameters(self) -> None:
        self._kernel, self._white = self._kernel_of(self.amplitude), self.noise**2
        self._fitted_at = 0
        self._posterior: HyperPosterior | None = None

    def _offset_variance(self, kernel: AdditiveKernel) -> float:
        # Of the constant: broad beside the function, so that the data set it.
        return float(9.0 * max(kernel.variance, self.amplitude**2))

    def _optimise(self) -> None:
        n = len(self._y)
        rows = np.arange(n)
        if n > FIT_ROWS:
            rows = np.random.default_rng(0).choice(n, FIT_ROWS, replace=False)
        x, y, variance = self._x[rows], self._y[rows] - self._centre, self._variance[rows]
        spread = max(float(np.std(y)), 2 * self.noise, 1e-4)
        fresh = self._kernel_of(spread)
        likelihood = Likelihood(fresh, x, y, variance, constant=9.0 * spread**2)
        here = likelihood.present
        count, d = len(here), len(self._kinds)
        prior_mean = np.concatenate(
            [
                2 * np.log(fresh.amplitudes[here]),
                LENGTH_LOG_MEDIAN + np.log(self._scale_of_lengths()),
                [2 * np.log(self.noise)],
            ]
        )
        prior_sd = np.concatenate(
            [np.full(count, 2 * AMPLITUDE_LOG_SD), np.full(d, LENGTH_LOG_SD), [2 * NOISE_LOG_SD]]
        )
        spread_bounds = np.log([1e-4, 1e2]) + 2 * np.log(max(spread, OWN))
        bounds = np.vstack(
            [
                np.tile(spread_bounds, (count, 1)),
                np.tile(np.log([0.03, 300.0]), (d, 1)),
                [2 * np.log([NOISE_FLOOR * self.noise, max(self.most_noise, self.noise)])],
            ]
        )
        warm = fresh if self._fitted_at == 0 else self._kernel
        start = np.concatenate(
            [2 * np.log(warm.amplitudes[here]), np.log(warm.lengths), [np.log(self._white)]]
        )
        self._posterior = HyperPosterior(likelihood, prior_mean, prior_sd, bounds, start)
        self._kernel, self._white = self._posterior.unpack(self._posterior.mode)
        self._fitted_at = n

    # -- data --------------------------------------------------------------------------------

    def update(self, x: np.ndarray, y: np.ndarray, variance: np.ndarray) -> bool:
        """Take these rows as the data; return True if the hyperparameters were fitted anew.

        They stay if the rows continue the greater part of the last call's, else they start afresh.
        `variance` (n,) is each row's own noise variance, beside the fitted one; 0 where unknown.
        """
        before, common = len(self._y), self._common(x, y, variance)
        # What was known for a while only (a probe that goes on) is taken out at its end, unless the
        # hyperparameters were fitted to it.
        if 2 * common < before or common < self._fitted_at:
            self._forget_hyperparameters()
        self._x, self._y, self._variance = x.copy(), y.copy(), variance.copy()
        n = len(y)
        self._centre = float(np.mean(y)) if n else 0.0
        refit = n >= LEAST_ROWS and n >= REFIT_GROWTH * self._fitted_at
        if refit:
            self._optimise()
        self.believe(self._x[:0])
        return refit

    def believe(self, x: np.ndarray) -> None:
        """Take these rows as measured at their posterior mean (kriging believer): the mean stays as
        it is, the variance shrinks. The next call, or `update`, takes them out again."""
        self._rows = np.vstack([self._x, x])
        self._offset2 = self._offset_variance(self._kernel)
        n, every = len(self._y), len(self._rows)
        self._lower, self._weights = np.empty((every, every)), np.zeros(every)
        if not every:
            return
        covariance = self._covariance(self._rows)
        covariance[np.diag_indices(every)] += self._white + 1e-12
        covariance[np.diag_indices(n)] += self._variance
        try:
            self._lower = cholesky(covariance, lower=True, check_finite=False)
        except np.linalg.LinAlgError:  # rounding beside a tiny noise: a little more on the diagonal
            jitter = 1e-8 * self._prior_variance
            self._lower = cholesky(
                covariance + jitter * np.eye(every), lower=True, check_finite=False
            )
        if n:
            y = self._y - self._centre
            self._weights[:n] = solve_triangular(
                self._lower[:n, :n], y, lower=True, check_finite=False
            )

    def _covariance(self, a: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
        return self._kernel(a, b) + self._offset2

    @property
    def _prior_variance(self) -> float:
        return self._kernel.variance + self._offset2

    def _given_rows(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # The mean at x, and L^-1 K(rows, x).
        mean, projected = np.full(len(x), self._centre), np.empty((0, len(x)))
        if len(self._rows) and len(x):
            projected = solve_triangular(
                self._lower,
                self._covariance(self._rows, x),
                lower=True,
                check_finite=False,
                overwrite_b=True,
            )
            mean += self._weights @ projected
        return mean, projected

    def posterior(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance of offset + f (no noise) at rows `x`, each of shape (m,)."""
        mean, variance = np.empty(len(x)), np.full(len(x), self._prior_variance)
        for start in range(0, len(x), 4096):
            part = slice(start, start + 4096)
            mean[part], projected = self._given_rows(x[part])
            variance[part] -= np.einsum("ij,ij->j", projected, projected)
        return mean, np.maximum(variance, 1e-12)

    def mean(self, x: np.ndarray) -> np.ndarray:
        """Return the posterior mean alone at rows `x`: much cheaper than `posterior`."""
        n = len(self._y)
        if not n:
            return np.full(len(x), self._centre)
        dual = solve_triangular(
            self._lower[:n, :n], self._weights[:n], lower=True, trans=1, check_finite=False
        )
        return np.asarray(self._centre + self._covariance(x, self._x) @ dual)

    def joint(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return mean (m,) and covariance (m, m) of offset + f at rows `x`."""
        mean, projected = self._given_rows(x)
        covariance = self._covariance(x) - projected.T @ projected
        covariance[np.diag_indices(len(x))] += 1e-10
        return mean, covariance

    def draw(self, x: np.ndarray, normals: np.ndarray) -> np.ndarray:
        """Return joint draws of offset + f at rows `x`, (draws, m), from standard normal ones."""
        return draw_normal(*self.joint(x), normals)

    def leave_one_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance (noise included) of each datum given all the others.

        Closed form from K^-1, no refit: mean_i = y_i - [K^-1 y]_i / [K^-1]_ii and variance_i =
        1 / [K^-1]_ii (Rasmussen & Williams 2006, equations 5.10 to 5.12; Sundararajan & Keerthi
        2001). The hyperparameters and the centre are those of all the data.
        """
        n = len(self._y)
        inverse = cho_solve((self._lower[:n, :n], True), np.eye(n), check_finite=False)
        diagonal = np.diag(inverse)
        residual = (inverse @ (self._y - self._centre)) / diagonal
        return self._y - residual, 1.0 / diagonal

    def _common(self, x: np.ndarray, y: np.ndarray, variance: np.ndarray) -> int:
        n = min(len(self._y), len(y))
        same = (
            (self._x[:n] == x[:n]).all(axis=1)
            & (self._y[:n] == y[:n])
            & (self._variance[:n] == variance[:n])
        )
        return n if same.all() else int(np.argmin(same))

    # -- with the doubt about the hyperparameters -----------------------------------------------

    def marginal(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `posterior` with the uncertainty of the hyperparameters in the variance.

        Few rows leave the lengths open, and the most likely ones are long, so that the plain
        variance is too small where the function turns out rougher. Mean and variance are those of
        the mixture over draws from the hyperparameters' posterior, up to `MARGINAL_ROWS` rows.
        """
        if self._posterior is None or not LEAST_ROWS <= len(self._y) <= MARGINAL_ROWS:
            return self.posterior(x)
        means, variances = [], []
        pairs = Pairs(self._kinds, self._x, np.vstack([self._x, x]))
        for theta in self._hyper_draws(self._posterior):
            prior, mean, cross, _ = self._given_data(self._posterior, theta, pairs)
            means.append(mean)
            variances.append(prior - np.einsum("ij,ij->j", cross, cross))
        mean, variance = np.mean(means, axis=0), np.maximum(variances, 0.0).mean(axis=0)
        return self._centre + mean, np.maximum(variance + np.var(means, axis=0), 1e-12)

    def draw_marginal(self, x: np.ndarray, normals: np.ndarray) -> np.ndarray:
        """Return joint draws as `draw` does, each at hyperparameters drawn from their posterior."""
        if self._posterior is None or not LEAST_ROWS <= len(self._y) <= MARGINAL_ROWS:
            return self.draw(x, normals)
        both = np.vstack([self._x, x])
        pairs = Pairs(self._kinds, both, both)
        drawn = []
        parts = np.array_split(normals, MARGINAL_DRAWS)
        for theta, part in zip(self._hyper_draws(self._posterior), parts, strict=True):
            _, mean, cross, covariance = self._given_data(self._posterior, theta, pairs)
            drawn.append(draw_normal(self._centre + mean, covariance - cross.T @ cross, part))
        return np.vstack(drawn)

    def _hyper_draws(self, posterior: HyperPosterior) -> np.ndarray:
        if self._drawn is None or self._drawn[0] is not posterior:
            self._drawn = (posterior, posterior.draws(MARGINAL_DRAWS))
        return self._drawn[1]

    def _given_data(
        self, posterior: HyperPosterior, theta: np.ndarray, pairs: Pairs
    ) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
        # Returns the prior variance; at x the mean apart from the centre, and L^-1 K(data, x); and
        # the prior covariance among the rows x of `pairs`.
        kernel, white = posterior.unpack(theta)
        offset2 = self._offset_variance(kernel)
        n = len(self._y)
        covariance = kernel.between(pairs) + offset2
        data, y = covariance[:n, :n].copy(), self._y - self._centre
        data[np.diag_indices(n)] += self._variance + white + 1e-10
        lower = cholesky(data, lower=True, check_finite=False)
        both = np.column_stack([y, covariance[:n, n:]])
        solved = solve_triangular(lower, both, lower=True, check_finite=False, overwrite_b=True)
        cross = solved[:, 1:]
        return kernel.variance + offset2, solved[:, 0] @ cross, cross, covariance[n:, n:]
