"""A Gaussian process, exact in its data, and in doubt about its hyperparameters.

    y(x) = offset + f(x) + noise,   f ~ GP(0, k) with the kernel below

The hyperparameters are fitted by maximum a posteriori, and anew only when the data have grown by a
fifth, on at most `FIT_ROWS` rows. They are in doubt, and a few draws of them stand for it: the same
quasi-random ones in every search, because random ones leave to chance when a search ends. Most
figures are at the mode; intervals and joint draws are mixtures over the draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from scipy.optimize import minimize

# Decisions that the last bits of a figure do not change.
#
# The last bits of a product of matrices or of an exponential depend on the CPU. Figures that differ
# by less than `TOLERANCE` are therefore equal to a decision, and of equal ones the first counts, so
# that the same seed makes the same search on every CPU.


#: Relative to the largest magnitude that is compared: far above rounding where values are equal by
#: symmetry, and a difference of 1e-6 in what a probe is worth has no consequence.
TOLERANCE = 1e-6


def _over_largest(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    largest = np.abs(values, where=np.isfinite(values), out=np.zeros(len(values))).max(initial=0.0)
    return values / (largest or 1.0)


def first_best(values: np.ndarray) -> int:
    """Return the index of the largest value, the first of equal ones; at least one is given."""
    scaled = _over_largest(values)
    return int(np.argmax(scaled >= scaled.max() - TOLERANCE))


def ranked(values: np.ndarray) -> np.ndarray:
    """Return the indices by falling value, equal ones in their order."""
    return np.argsort(-np.round(_over_largest(values) / TOLERANCE), kind="stable")


# Covariance of a Gaussian process over launches and live settings.
#
#     k(x, x') = a_launch^2 kL + a_live^2 kV + a_mix^2 kL kV + a_own^2 kO + a constant
#
# with kL and kV Matern-5/2 kernels, one length a column, over the launch columns and the live ones.
# How a clock or a limit bends step time and power is much the same under every launch, so one
# well-visited launch tells most of every other's curve, and a single window fixes its level; what
# differs is left to the mix (additive kernels: Duvenaud, Nickisch & Rasmussen 2011, arXiv
# 1112.4394). kO is a rough (Matern-1/2) kernel of the launch columns with a short fixed length:
# each launch has a few per cent of its own (which kernels its shapes select, where one bound takes
# over from another), which would else read as noise, or as a function without length. Most of it
# belongs to values of knobs, wherever they are set: a sum over the launch columns (`BY_COLUMN`), so
# that a few launches tell of many.


#: Kinds of columns.
KINDS = LAUNCH, LIVE = 0, 1
#: Prior shares of the standard deviations of the first three parts. One without a column is a
#: further constant.
SHARES = (0.9, 0.3, 0.2)
#: Length of kO: a fifth of a column's range, times sqrt(columns) of all together.
OWN_LENGTH = 0.2
#: Share of kO that is a sum over the launch columns.
BY_COLUMN = 0.9
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
    """Covariances at k sets of hyperparameters.

    Attributes:
        amplitudes: standard deviations of the launch part, the live part, the mix and the launches'
            own levels, (k, 4).
        lengths: one a column, (k, d).
        noise: standard deviations of a row, beside what is stated of it, (k,).
        constant: variance of the constant.
    """

    amplitudes: np.ndarray
    lengths: np.ndarray
    noise: np.ndarray
    constant: float

    @property
    def variance(self) -> np.ndarray:
        """k(x, x), (k,)."""
        return np.asarray(np.sum(self.amplitudes**2, axis=1) + self.constant)

    def __call__(self, pairs: Pairs) -> np.ndarray:
        """Covariance of each pair, (k, n, m)."""
        launch, live = (pairs.matern(self.lengths, kind) for kind in KINDS)
        weight = self.amplitudes.T[:, :, None, None] ** 2
        total = launch * (weight[0] + weight[2] * live) + weight[1] * live
        return np.asarray(total + weight[3] * pairs.own + self.constant)


def lower_root(covariance: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Return the lower Cholesky factors of covariances, (k, n, n), of which `variance`, (k,), is
    the largest."""
    eye = JITTER * variance[:, None, None] * np.eye(covariance.shape[-1])
    try:
        return np.linalg.cholesky(covariance + eye)
    except np.linalg.LinAlgError:  # rounding left a negative direction
        if len(covariance) == 1:
            return np.linalg.cholesky(covariance + 1e4 * eye)
        each = np.arange(len(covariance))[:, None]
        return np.concatenate([lower_root(covariance[i], variance[i]) for i in each])


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
        # Of the columns that tell launches apart; of all of them where there is only one.
        _, squares, places = self._halves.get(LAUNCH) or self._halves[LIVE]
        whole = np.exp(-np.sqrt(squares.mean(axis=0)) / OWN_LENGTH)
        each = np.exp(-np.sqrt(squares) / OWN_LENGTH).mean(axis=0)
        self.own = (BY_COLUMN * each + (1 - BY_COLUMN) * whole).take(places)

    def matern(self, lengths: np.ndarray, kind: int) -> np.ndarray | float:
        """Matern-5/2 of the columns of a kind at lengths (k, d), (k, n, m); 1 if there are none."""
        if kind not in self._halves:
            return 1.0
        columns, squares, places = self._halves[kind]
        s = np.sqrt(5.0 * np.tensordot(lengths[:, columns] ** -2, squares, axes=1))
        matern = (1.0 + s + s * s / 3.0) * np.exp(-s)
        return matern.reshape(len(lengths), -1).take(places, axis=1)


def _distinct(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # Returns the squared distances of the distinct rows, (columns, rows of a, rows of b), and the
    # place of each pair among them, (n, m). Rows are told apart by their projection on a line,
    # which sorts much faster than whole rows.
    line = np.random.default_rng(0).random(a.shape[1])
    (_, rows, i), (_, others, j) = (
        np.unique(x @ line, return_index=True, return_inverse=True) for x in (a, b)
    )
    squares = (a[rows].T[:, :, None] - b[others].T[:, None, :]) ** 2
    return squares, i[:, None] * len(others) + j


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
#: moved to find slopes and, at the most likely ones, the curvature.
MOST_SD, STEP, CURVATURE_STEP = 6.0, 1e-3, 0.05
#: Draws of the hyperparameters, and rows up to which they are in doubt: beyond, a factor per draw
#: is too slow for a proposal (0.4 s at 400 rows, for time and again for power).
DRAWS, DOUBT_ROWS = 32, 400


@lru_cache(maxsize=8)
def quasi_normal(count: int, width: int, seed: int = 0) -> np.ndarray:
    """Return quasi-random standard normal draws (scrambled Sobol), (count, width)."""
    from scipy.stats import norm, qmc  # a second or more, which no first probe has to wait for

    engine = qmc.Sobol(width, scramble=True, seed=seed)
    return np.asarray(norm.ppf(np.clip(engine.random(count), 1e-9, 1 - 1e-9)))


class ConditionalProcess:
    """The process at k sets of hyperparameters, given the figures of rows.

    Args:
        pairs: of the rows.
        variance: each row's own noise variance, (n,).
    """

    def __init__(self, kernel: Kernel, pairs: Pairs, y: np.ndarray, variance: np.ndarray) -> None:
        self.kernel, self._y = kernel, y
        covariance, diagonal = kernel(pairs), np.arange(len(y))
        covariance[:, diagonal, diagonal] += kernel.noise[:, None] ** 2 + variance
        self._lower = lower_root(covariance, kernel.variance)
        self._weights = np.linalg.solve(self._lower, np.tile(y[:, None], (len(covariance), 1, 1)))

    @property
    def loss(self) -> np.ndarray:
        """Negative log likelihood of the rows, but for a constant, (k,)."""
        logs = np.log(np.diagonal(self._lower, axis1=1, axis2=2))
        return np.asarray(0.5 * (self._weights[:, :, 0] ** 2).sum(axis=1) + logs.sum(axis=1))

    def _projected(self, across: Pairs) -> tuple[np.ndarray, np.ndarray]:
        # Means of the columns of `across`, whose rows are given, (k, m), and roots of what the rows
        # tell of their covariance, (k, n, m).
        projected = np.linalg.solve(self._lower, self.kernel(across))
        return (self._weights.swapaxes(1, 2) @ projected)[:, 0], projected

    def posterior(self, across: Pairs) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance (no noise) of the columns of `across`, (k, m) each."""
        mean, projected = self._projected(across)
        variance = self.kernel.variance[:, None] - (projected**2).sum(axis=1)
        return mean, np.maximum(variance, 1e-12)

    def draw(self, across: Pairs, among: Pairs, normals: np.ndarray) -> np.ndarray:
        """Return joint draws, (draws, columns of `across`), from standard normal ones: at each set
        of hyperparameters as many, or one fewer.

        Args:
            among: pairs of the columns.
        """
        mean, projected = self._projected(across)
        covariance = self.kernel(among) - projected.swapaxes(1, 2) @ projected
        # Not by eigenvectors: of equal eigenvalues they are any, as the last bits have it.
        root = lower_root(covariance, self.kernel.variance)
        parts = zip(mean, root, np.array_split(normals, len(mean)), strict=True)
        return np.vstack([mean + part[:, : len(root)] @ root.T for mean, root, part in parts])

    def leave_one_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance (noise included) of each datum given all the others, (k, n) each.

        Closed form from K^-1, no refit: mean_i = y_i - [K^-1 y]_i / [K^-1]_ii and variance_i =
        1 / [K^-1]_ii (Rasmussen & Williams 2006, equations 5.10 to 5.12; Sundararajan & Keerthi
        2001).
        """
        root = np.linalg.inv(self._lower)
        inverse = root.swapaxes(1, 2) @ root
        diagonal = np.diagonal(inverse, axis1=1, axis2=2)
        return self._y - inverse @ self._y / diagonal, 1.0 / diagonal


class GaussianProcess:
    """A Gaussian process over rows of features, exact in its data.

    Args:
        kinds: the kind of each column (`LAUNCH`, `LIVE`).
        noise: expected standard deviation of the noise, in units of y (median of its prior;
            `NOISE_FLOOR` of it is the floor).
        most_noise: largest fitted standard deviation of the noise beside what rows state.
        amplitude: expected standard deviation of f, in units of y, until there are data to judge
            by.
        own: expected standard deviation of launches' own levels.
    """

    def __init__(
        self,
        kinds: Sequence[int] | np.ndarray,
        *,
        noise: float = 0.1,
        most_noise: float = 0.3,
        amplitude: float = 1.0,
        own: float = 0.02,
    ) -> None:
        self._kinds, self._own = np.asarray(kinds, dtype=int), own
        self.noise, self.most_noise, self.amplitude = noise, max(most_noise, noise), amplitude
        self._x, self._y, self._variance = np.empty((0, len(self._kinds))), *2 * [np.empty(0)]
        self._centre = 0.0
        self._forget_hyperparameters()
        self.update(self._x, self._y, self._variance)

    @property
    def noise_(self) -> float:
        """Fitted standard deviation of the noise beside that of the rows."""
        return float(self._kernel.noise[0])

    # -- hyperparameters ---------------------------------------------------------------------

    def _forget_hyperparameters(self) -> None:
        self._logs = self._start(self._prior_of_logs(self.amplitude)[0])
        self._kernel = self._kernel_of(self._logs[None])
        self._drawn: Kernel | None = None
        self._fitted_at = 0

    def _prior_of_logs(self, amplitude: float) -> tuple[np.ndarray, np.ndarray]:
        # Returns mean and standard deviation of the logs of a function of this amplitude.
        counts = np.array([(self._kinds == kind).sum() for kind in KINDS])
        amplitudes = np.append(amplitude * np.array(SHARES) / np.linalg.norm(SHARES), self._own)
        lengths = LENGTH_LOG_MEDIAN + 0.5 * np.log(counts[self._kinds])
        mean = np.concatenate([np.log(amplitudes), lengths, [np.log(self.noise)]])
        sd = [[AMPLITUDE_LOG_SD] * 4, [LENGTH_LOG_SD] * len(lengths), [NOISE_LOG_SD]]
        return mean, np.concatenate(sd)

    def _kernel_of(self, logs: np.ndarray) -> Kernel:
        # Of the logs of amplitudes, lengths and noise, (k, h). The constant is broad beside the
        # function, so that the data set it.
        amplitudes, lengths, noise = np.split(np.exp(logs), [4, -1], axis=1)
        return Kernel(amplitudes, lengths, noise[:, 0], CONSTANT * self.amplitude**2)

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
        y, variance = self._y[rows] - self._centre, self._variance[rows]
        pairs = Pairs(self._kinds, self._x[rows], self._x[rows])
        mean, sd = self._prior_of_logs(max(float(np.std(y)), 2 * self.noise))
        noise = (np.log([NOISE_FLOOR * self.noise, self.most_noise]) - mean[-1]) / sd[-1]
        bounds = np.vstack([np.tile([-MOST_SD, MOST_SD], (len(mean) - 1, 1)), noise])

        def losses(scaled: np.ndarray) -> np.ndarray:
            kernel = self._kernel_of(mean + sd * scaled)
            likelihood = ConditionalProcess(kernel, pairs, y, variance).loss
            return np.asarray(likelihood + 0.5 * (scaled**2).sum(axis=1))

        def loss(scaled: np.ndarray) -> float:
            return float(losses(scaled[None])[0])

        start = self._logs if self._fitted_at else self._start(mean)
        start = np.clip((start - mean) / sd, *bounds.T)
        slope = partial(slopes, losses)
        options = {"maxiter": 100, "maxcor": 20, "ftol": 1e-9, "gtol": 1e-4}
        mode = minimize(loss, start, jac=slope, method="L-BFGS-B", bounds=bounds, options=options).x
        self._logs = mean + sd * mode
        self._kernel = self._kernel_of(self._logs[None])
        self._drawn = self._kernel_of(mean + sd * laplace_draws(mode, bounds, slope))
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
        self._middle = self._given(self._kernel)
        self._mixture: ConditionalProcess | None = None
        return refit

    def _given(self, kernel: Kernel) -> ConditionalProcess:
        pairs = Pairs(self._kinds, self._x, self._x)
        return ConditionalProcess(kernel, pairs, self._y - self._centre, self._variance)

    # -- predictions -------------------------------------------------------------------------

    def posterior(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance of offset + f (no noise) at rows `x`, each of shape (m,)."""
        return self._mixed(self._middle, x)

    def leave_one_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance (noise included) of each datum given all the others."""
        mean, variance = self._middle.leave_one_out()
        return self._centre + mean[0], variance[0]

    def marginal(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `posterior` with the uncertainty of the hyperparameters in the variance.

        Few rows leave the lengths open, and the most likely ones are long, so that the plain
        variance is too small where the function turns out rougher. Mean and variance are those of
        the mixture over the draws, up to `DOUBT_ROWS` rows.
        """
        return self._mixed(self._doubtful(), x)

    def draw(self, x: np.ndarray, normals: np.ndarray) -> np.ndarray:
        """Return joint draws of offset + f at rows `x`, (draws, m), from standard normal ones, each
        at hyperparameters drawn from their posterior."""
        across, among = Pairs(self._kinds, self._x, x), Pairs(self._kinds, x, x)
        return self._centre + self._doubtful().draw(across, among, normals)

    def _doubtful(self) -> ConditionalProcess:
        if self._drawn is None or len(self._y) > DOUBT_ROWS:
            return self._middle
        self._mixture = self._mixture or self._given(self._drawn)
        return self._mixture

    def _mixed(self, process: ConditionalProcess, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean, variance = np.empty(len(x)), np.empty(len(x))
        size = 4096 // len(process.kernel.noise)
        for start in range(0, len(x), size):
            part = slice(start, start + size)
            means, variances = process.posterior(Pairs(self._kinds, self._x, x[part]))
            mean[part] = means.mean(axis=0)
            variance[part] = variances.mean(axis=0) + means.var(axis=0)
        return self._centre + mean, variance


def slopes(of: Callable[[np.ndarray], np.ndarray], at: np.ndarray) -> np.ndarray:
    """Return the gradient of a function of rows, (d,), by central differences."""
    steps = STEP * np.eye(len(at))
    return np.asarray((of(at + steps) - of(at - steps)) / (2 * STEP))


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
