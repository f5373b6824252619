"""Posterior of step time and power of the measured configurations, from all windows of a study.

The logarithm of a window's figure (step time, power) is a sum of normal effects:

    y = m + knobs[launch knobs] + live[live setting] + own[configuration]
          + u[launch] + drift(order of the launch) + e[window]

The first four make the configuration's true figure; the launch, a slow drift of the machine (a
random walk over the launches) and the window are errors. The standard deviations of the effects are
unknown: values are drawn from their posterior, so every figure is a mixture of normal
distributions, of which the median counts: its mean follows the few that take the spread for large,
and draws every configuration that was launched once far towards the others. Configurations are
shrunk towards each other as far as those of this study differ, which corrects for the luck of the
best of many (Gelman et al., Bayesian Data Analysis, 3rd edition, section 5.4). Few repeats of a
launch leave its spread to the prior, which has a heavy tail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from tuner.answer.parts import Attainment, Point, with_probabilities
from tuner.models.surrogate.surrogates import Surrogates
from tuner.pareto import nondominated
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.workload.node.measure.statistics import Z90
from tuner.workload.records.probe import Basis, Measurement, MeterInfo, ProbeRecord

# Posterior of one figure, log step time or log power; `LaunchPosterior` below joins both.


@dataclass(frozen=True)
class Windows:
    """Every window of every measured configuration, row by row."""

    configurations: list[Configuration]
    measurements: list[Measurement]
    records: list[ProbeRecord]
    launches: np.ndarray  # number of that probe, which is one launch, (rows,)

    @classmethod
    def of(cls, records: Sequence[ProbeRecord]) -> Windows:
        """Return the windows of these probes."""
        rows = [(number, r, m) for number, r in enumerate(records) for m in r.measurements]
        scopes = sorted({record.meter.scope for _, record, _ in rows})
        if len(scopes) > 1:
            raise InputError(
                f"the probes charge the energy of different scopes ({', '.join(scopes)}), which "
                "one front cannot hold; give the study another name for each scope"
            )
        return cls(
            [Configuration(record.request.launch, m.live) for _, record, m in rows],
            [m for _, _, m in rows],
            [record for _, record, _ in rows],
            np.array([number for number, _, _ in rows], dtype=int),
        )

    @property
    def as_delivered(self) -> list[Configuration]:
        """Delivered configurations, the models' input: a requested clock may not have held."""
        pairs = zip(self.records, self.measurements, strict=True)
        return [Configuration(record.request.launch, m.as_delivered) for record, m in pairs]

    @property
    def step_time_s(self) -> np.ndarray:
        """Step times, (rows,)."""
        return np.array([m.step_time_s for m in self.measurements], dtype=float)

    @property
    def power_W(self) -> np.ndarray:
        """Powers of the whole job, (rows,)."""
        return np.array([m.power_W for m in self.measurements], dtype=float)

    @property
    def relative_errors(self) -> tuple[np.ndarray, np.ndarray]:
        """Stated relative standard errors of step time and power; NaN where unknown."""
        time = [m.step_time_rse for m in self.measurements]
        power = [m.power_rse for m in self.measurements]
        # A file may state any number; a thousandfold error says as little, and its square is one.
        return tuple(np.clip(np.array(rse, dtype=float), 0.0, 1e3) for rse in (time, power))

    @cached_property
    def rows(self) -> dict[Configuration, list[int]]:
        """Rows of each configuration, in the order in which they were first measured."""
        rows: dict[Configuration, list[int]] = {}
        for row, configuration in enumerate(self.configurations):
            rows.setdefault(configuration, []).append(row)
        return rows

    @property
    def logs(self) -> np.ndarray:
        """Logarithms of step time and power, (rows, 2)."""
        return np.log(np.column_stack([self.step_time_s, self.power_W]))


#: Prior median of each effect's standard deviation and the standard deviation of its logarithm.
#: Not fitted to any table: launch knobs and live settings differ by some per cent to some ten, a
#: configuration from what its two parts add up to by a per cent or two.
EFFECTS = {"knobs": (0.10, 1.5), "live": (0.15, 1.5), "own": (0.02, 1.0), "drift": (0.002, 0.8)}
#: Prior median of the launches' standard deviation, and the standard deviations of its logarithm
#: below and above. Launches of one configuration differ by 0.15 % in time and 1.3 % in power on two
#: A100 (kareus-attention-a100) and by up to 40 % on a shared two-core machine (`tests/data`). Wider
#: below, two repeats that agree by chance would count as exact; narrower above, a machine on which
#: launches differ by 20 % would be recommended changes by chance.
LAUNCH_SD, LAUNCH_LOG_SD = 0.03, (0.6, 0.9)
#: Errors of a recorded table that tells no spread, over these: its figures are to be its own.
RECORDED = 0.1
#: Standard deviation of the logarithm of the windows' spread about its prior median.
WINDOW_LOG_SD = 0.7
#: Proposals of each stage of the importance sampling, and values that stand for them in equal
#: shares where tails do not matter.
PROPOSALS, COMPONENTS = 128, 48
#: Proposals of a smaller share are left out, and above this number of cells all but the equal ones.
LEAST_WEIGHT, MOST_EXACT = 1e-5, 80
#: Variance of the common mean of the centred logarithms: flat.
MEAN_VARIANCE = 25.0
#: Cells (configuration x launch) behind the spreads at most; the cost grows with their cube.
MOST_CELLS = 120
#: Halvings of a range in which a quantile of a mixture lies: to 1e-12 of it.
BISECTIONS = 40


@dataclass(frozen=True)
class Cells:
    """Windows of one configuration in one launch, averaged."""

    # configuration, launch: numbers, (cells,).
    configuration: np.ndarray
    launch: np.ndarray
    y: np.ndarray  # logarithms of step time and power, (2, cells)
    stated: np.ndarray  # squared errors that the windows state, of their mean, (2, cells)
    count: np.ndarray
    squares: np.ndarray  # sums of squares of the windows' logarithms about their mean, (2, cells)

    @classmethod
    def of(cls, windows: Windows, configurations: Sequence[Configuration]) -> Cells:
        """Return the averages of these windows."""
        number = {each: i for i, each in enumerate(configurations)}
        labels = np.array([[number[c] for c in windows.configurations], windows.launches])
        pair, inverse = np.unique(labels, axis=1, return_inverse=True)
        inverse = inverse.reshape(-1)
        count = np.bincount(inverse)
        figures, errors = (windows.step_time_s, windows.power_W), windows.relative_errors
        logs = np.log(np.array(figures))
        y = np.array([np.bincount(inverse, each) / count for each in logs])
        apart = np.array([np.bincount(inverse, each) for each in (logs - y[:, inverse]) ** 2])
        squares = [np.nan_to_num(rse) ** 2 for rse in errors]
        stated = np.array([np.bincount(inverse, each) / count**2 for each in squares])
        return cls(pair[0], pair[1], y, stated, count, apart)

    @property
    def repeats(self) -> int:
        """Number of cells that repeat a configuration."""
        return len(self.configuration) - len(np.unique(self.configuration))


def effect_labels(configurations: Sequence[Configuration]) -> dict[str, np.ndarray]:
    """Return the labels of each identifiable effect, (configurations,) each."""
    launches: dict[object, int] = {}
    lives: dict[object, int] = {}
    knobs = np.array([launches.setdefault(c.launch, len(launches)) for c in configurations])
    live = np.array([lives.setdefault(c.live, len(lives)) for c in configurations])
    every = np.arange(len(knobs))
    return {"knobs": every} if len(lives) == 1 else {"knobs": knobs, "live": live, "own": every}


class FigurePosterior:
    """Posterior of one figure: a normal distribution for each value of the standard deviations.

    The values keep their weights, because few large ones make the tail that tells how sure a saving
    is. `sample` are `COMPONENTS` of them that stand for equal shares.

    Args:
        row: 0 for log time, 1 for log power.
        window_sd: prior median of the windows' spread beside what they state.
        errors: prior scale of the errors over the usual one.
    """

    def __init__(
        self,
        cells: Cells,
        row: int,
        effects: dict[str, np.ndarray],
        window_sd: float,
        seed: int,
        errors: float,
    ) -> None:
        self.cells, self.effects = cells, effects
        self.configurations = len(effects["knobs"])
        self.y, self.stated, self.squares = cells.y[row], cells.stated[row], cells.squares[row]
        self.centre = float(self.y.mean())
        self.names = [*self.effects, "drift", "launch", "window"]
        self.order = np.unique(cells.launch, return_inverse=True)[1].reshape(-1)
        self.theta, self.weights = self._spreads(window_sd, seed, errors)
        shares = (np.arange(COMPONENTS) + 0.5) / COMPONENTS
        found = np.searchsorted(np.cumsum(self.weights), shares)
        self.sample = found.clip(max=len(self.weights) - 1)
        if len(self.y) > MOST_EXACT:
            self.theta, self.sample = self.theta[self.sample], np.arange(COMPONENTS)
            self.weights = np.full(COMPONENTS, 1 / COMPONENTS)

    # -- covariances -----------------------------------------------------------------------------

    def _stack(self, rows: np.ndarray) -> np.ndarray:
        mine = self.cells.configuration[rows]
        parts = [label[mine][:, None] == label[mine][None, :] for label in self.effects.values()]
        order = self.order[rows]
        parts.append(np.minimum(order[:, None], order[None, :]) + 1.0)
        parts.append(order[:, None] == order[None, :])
        return np.array(parts, dtype=float)

    def _covariance(self, theta: np.ndarray, rows: np.ndarray, stack: np.ndarray) -> np.ndarray:
        squares = np.exp(2 * theta)
        found = np.einsum("te,eij->tij", squares[:, :-1], stack) + MEAN_VARIANCE
        return self._with_windows(found, squares[:, -1:], rows)

    def errors(self, rows: np.ndarray) -> np.ndarray:
        """Return the covariance of the errors alone (launch, drift, window), (components, n, n)."""
        squares = np.exp(2 * self.theta)
        found = np.einsum("te,eij->tij", squares[:, -3:-1], self._stack(rows)[-2:])
        return self._with_windows(np.asarray(found), squares[:, -1:], rows)

    def _with_windows(self, found: np.ndarray, window: np.ndarray, rows: np.ndarray) -> np.ndarray:
        diagonal = np.arange(len(rows))
        found[:, diagonal, diagonal] += self.stated[rows] + window / self.cells.count[rows]
        return found

    # -- standard deviations ---------------------------------------------------------------------

    def _spreads(self, window_sd: float, seed: int, errors: float) -> tuple[np.ndarray, np.ndarray]:
        # Two-stage importance sampling, the second about what the first found.
        below, above = LAUNCH_LOG_SD
        prior = {**EFFECTS, "launch": (LAUNCH_SD, above)}
        prior["window"] = (window_sd, WINDOW_LOG_SD)
        middle = np.array([math.log(prior[name][0]) for name in self.names])
        middle[-3:] += math.log(errors)
        width = np.array([prior[name][1] for name in self.names])
        rows = self._informative()
        stack, y = self._stack(rows), self.y[rows] - self.centre
        narrower = np.where(np.array(self.names) == "launch", above / below, 1.0)

        def posterior(theta: np.ndarray) -> np.ndarray:
            lower = np.linalg.cholesky(self._covariance(theta, rows, stack))
            white = np.linalg.solve(lower, np.broadcast_to(y[:, None], (len(theta), len(y), 1)))
            log = -np.log(np.diagonal(lower, axis1=1, axis2=2)).sum(axis=1)
            log -= 0.5 * (white[:, :, 0] ** 2).sum(axis=1)
            # Windows of one configuration in one launch tell their own spread, besides their mean.
            each = self.stated * self.cells.count + np.exp(2 * theta[:, -1:])
            log -= 0.5 * ((self.cells.count - 1) * np.log(each) + self.squares / each).sum(axis=1)
            apart = (theta - middle) / width
            apart = np.where(apart < 0, narrower * apart, apart)
            return np.asarray(log - 0.5 * (apart**2).sum(axis=1))

        normals = [_normals(PROPOSALS, len(self.names), seed + stage) for stage in (0, 1)]
        theta = middle + width * normals[0]
        log = posterior(theta) + 0.5 * (normals[0] ** 2).sum(axis=1)
        weights = np.exp((log - log.max()) / 2)  # tempered, so that few do not carry all
        weights /= weights.sum()
        mean = weights @ theta
        spread = 1.2 * np.sqrt(weights @ (theta - mean) ** 2 + (0.25 * width) ** 2)
        theta = mean + spread * normals[1]
        log = posterior(theta) + 0.5 * (normals[1] ** 2).sum(axis=1)
        weights = np.exp(log - log.max())
        weights /= weights.sum()
        kept = weights > LEAST_WEIGHT
        return theta[kept], weights[kept] / weights[kept].sum()

    def _informative(self) -> np.ndarray:
        # Repeats first, then the others, the first of each launch before the second of any.
        count = np.bincount(self.cells.configuration)[self.cells.configuration]
        visit = [int((self.order[:i] == own).sum()) for i, own in enumerate(self.order)]
        order = np.lexsort((visit, -np.minimum(count, 2)))
        return np.sort(order[:MOST_CELLS])

    # -- the figure ------------------------------------------------------------------------------

    @cached_property
    def _solved(self) -> tuple[np.ndarray, np.ndarray]:
        # Covariance of figures with cells (k, c, n), and weights of the cells in the figures' means
        # (k, n, c).
        rows = np.arange(len(self.y))
        covariance = self._covariance(self.theta, rows, self._stack(rows))
        squares = np.exp(2 * self.theta)
        cross = np.full((len(self.theta), self.configurations, len(rows)), MEAN_VARIANCE)
        for place, label in enumerate(self.effects.values()):
            same = label[:, None] == label[self.cells.configuration][None, :]
            cross += squares[:, place, None, None] * same
        return cross, np.linalg.solve(covariance, cross.transpose(0, 2, 1))

    @cached_property
    def means(self) -> np.ndarray:
        """Means of the logarithm, (components, configurations)."""
        weights = self._solved[1]
        return np.asarray(np.einsum("knc,n->kc", weights, self.y - self.centre) + self.centre)

    @cached_property
    def medians(self) -> np.ndarray:
        """Medians of the logarithm, (configurations,)."""
        sd = np.sqrt(self.variances)
        low, high = np.min(self.means - 9 * sd, axis=0), np.max(self.means + 9 * sd, axis=0)
        for _ in range(BISECTIONS):  # the share below grows with the value
            middle = (low + high) / 2
            below = self.weights @ ndtr((middle - self.means) / sd) < 0.5
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return np.asarray((low + high) / 2)

    @cached_property
    def variances(self) -> np.ndarray:
        """Variances of the logarithm, (components, configurations)."""
        cross, weights = self._solved
        squares = np.exp(2 * self.theta)
        own = MEAN_VARIANCE + squares[:, : len(self.effects)].sum(axis=1)[:, None]
        return np.asarray(np.maximum(own - np.einsum("kcn,knc->kc", cross, weights), 1e-14))

    @cached_property
    def own_variances(self) -> np.ndarray:
        """Variances of the logarithm by a configuration's own launches alone, (components,
        configurations)."""
        found = np.empty((len(self.theta), self.configurations))
        for place in range(self.configurations):
            errors = self.errors(np.flatnonzero(self.cells.configuration == place))
            ones = np.ones((len(errors), errors.shape[1], 1))
            found[:, place] = 1 / np.linalg.solve(errors, ones).sum(axis=(1, 2))
        return found

    def apart(self, place: int, against: int) -> np.ndarray:
        """Return the variances of one configuration's logarithm less another's, (components,)."""
        cross, weights = self._solved
        squares = np.exp(2 * self.theta)
        shared = np.full(len(self.theta), MEAN_VARIANCE)
        for number, label in enumerate(self.effects.values()):
            shared += squares[:, number] * (label[place] == label[against])
        shared -= np.einsum("kn,kn->k", cross[:, place], weights[:, :, against])
        both = self.variances
        return np.asarray(np.maximum(both[:, place] + both[:, against] - 2 * shared, 1e-14))

    def draw(self, component: np.ndarray, normals: dict[str, np.ndarray]) -> np.ndarray:
        """Return joint draws, (draws, configurations), by Matheron's rule.

        Args:
            normals: standard normals of each effect and error, (draws, labels).
        """
        deviations = np.exp(self.theta)[component]
        truth = math.sqrt(MEAN_VARIANCE) * normals["mean"]
        for place, (name, label) in enumerate(self.effects.items()):
            truth = truth + deviations[:, [place]] * normals[name][:, label]
        cells = truth[:, self.cells.configuration]
        cells = cells + deviations[:, [-3]] * np.cumsum(normals["drift"], axis=1)[:, self.order]
        cells += deviations[:, [-2]] * normals["launch"][:, self.order]
        own = np.sqrt(self.stated + deviations[:, [-1]] ** 2 / self.cells.count)
        cells += own * normals["window"]
        weights = self._solved[1]
        found = np.empty_like(truth)
        for number in np.unique(component):
            rows = component == number
            found[rows] = truth[rows] + (self.y - self.centre - cells[rows]) @ weights[number]
        return found + self.centre


def _normals(count: int, dimensions: int, seed: int) -> np.ndarray:
    from scipy.stats import qmc  # a second or more, which no first probe has to wait for

    uniform = qmc.Sobol(dimensions, scramble=True, seed=seed).random(count)
    return np.asarray(ndtri(np.clip(uniform, 1e-6, 1 - 1e-6)))


#: What log energy, log time and log power have of log time and of log power.
_ENERGY_TIME_POWER = ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0))
#: Joint draws behind the probability to meet the limits: its standard error is at most 0.01.
DRAWS = 2500
#: Repeats that count as evidence of no correlation between a launch's time and its power.
CORRELATION_PRIOR = 6.0


@dataclass(frozen=True)
class Gain:
    """Saving in the logarithm: a mixture of normal distributions, (components,) each."""

    means: np.ndarray
    sds: np.ndarray
    weights: np.ndarray

    @classmethod
    def normal(cls, mean: float, sd: float) -> Gain:
        """Return one normal distribution."""
        return cls(np.array([mean]), np.array([max(sd, 1e-9)]), np.ones(1))

    @property
    def mean(self) -> float:
        """Mean of the mixture."""
        return float(self.weights @ self.means)

    @property
    def median(self) -> float:
        """Median of the mixture."""
        return self._quantile(0.5)

    @property
    def sd(self) -> float:
        """Standard deviation of the mixture."""
        return math.sqrt(float(self.weights @ (self.sds**2 + (self.means - self.mean) ** 2)))

    def shifted(self, by: float) -> Gain:
        """Return the same saving with a constant added."""
        return Gain(self.means + by, self.sds, self.weights)

    def above(self, margin: float) -> float:
        """Return the probability that it is more than this."""
        found = float(self.weights @ ndtr((self.means - margin) / self.sds))
        return min(max(found, 0.0), 1.0)  # the weights sum to one but for rounding

    def interval(self, share: float) -> tuple[float, float]:
        """Return the central interval that holds this share."""
        tail = (1 - share) / 2
        return self._quantile(tail), self._quantile(1 - tail)

    def _quantile(self, p: float) -> float:
        from scipy.optimize import brentq  # which no first probe has to wait for

        low = float(np.min(self.means - 9 * self.sds))
        high = float(np.max(self.means + 9 * self.sds))
        return float(brentq(lambda margin: 1 - self.above(margin) - p, low, high, xtol=1e-13))


@dataclass(frozen=True)
class LaunchPosterior:
    """Posterior of log step time and log power of the measured configurations."""

    windows: Windows
    configurations: list[Configuration]
    _time: FigurePosterior = field(repr=False)
    _power: FigurePosterior = field(repr=False)

    @classmethod
    def of(cls, windows: Windows, *, recorded: bool = False) -> LaunchPosterior:
        """Return the posterior; `recorded` windows repeat a recorded table without a spread."""
        configurations = list(windows.rows)
        cells, effects = Cells.of(windows, configurations), effect_labels(configurations)
        from tuner.models.surrogate.surrogates import POWER_NOISE, TIME_NOISE  # SciPy

        time, power = (
            FigurePosterior(cells, row, effects, noise, 7 * row, RECORDED if recorded else 1.0)
            for row, noise in enumerate((TIME_NOISE, POWER_NOISE))
        )
        return cls(windows, configurations, time, power)

    @cached_property
    def _pairing(self) -> np.ndarray:
        return np.random.default_rng(0).permutation(COMPONENTS)

    @cached_property
    def correlation(self) -> float:
        """Correlation of the time and power of launches that repeat, shrunk towards 0."""
        cells = self._time.cells
        if not cells.repeats:
            return 0.0
        count = np.bincount(cells.configuration)
        means = np.array([np.bincount(cells.configuration, y) / count for y in cells.y])
        apart = cells.y - means[:, cells.configuration]
        squares = float(np.sqrt((apart[0] ** 2).sum() * (apart[1] ** 2).sum()))
        if not squares > 0:
            return 0.0
        raw = float((apart[0] * apart[1]).sum()) / squares
        return raw * cells.repeats / (cells.repeats + CORRELATION_PRIOR)

    @property
    def log_time(self) -> np.ndarray:
        """Median log step time (s), (configurations,)."""
        return self._time.medians

    @property
    def log_power(self) -> np.ndarray:
        """Median log power (W), (configurations,)."""
        return self._power.medians

    @cached_property
    def errors(self) -> np.ndarray:
        """Half the width of the 90 % interval of log energy, log time and log power over a standard
        normal's, (3, configurations)."""
        return np.array([self._error(*each) for each in _ENERGY_TIME_POWER])

    @cached_property
    def own_errors(self) -> np.ndarray:
        """The same by a configuration's own launches: nothing is shrunk."""
        time, power = self._time, self._power
        rows, others = time.sample, power.sample[self._pairing]
        own = time.own_variances[rows], power.own_variances[others]
        found = [self._sum(a, own[0], b, own[1]) for a, b in _ENERGY_TIME_POWER]
        return np.array([_half_width(np.zeros_like(each), each) for each in found])

    def _error(self, of_time: float, of_power: float) -> np.ndarray:
        time, power = self._time, self._power
        rows, others = time.sample, power.sample[self._pairing]
        apart = of_time * (time.means[rows] - time.medians)
        apart += of_power * (power.means[others] - power.medians)
        variances = self._sum(of_time, time.variances[rows], of_power, power.variances[others])
        return _half_width(apart, variances)

    def _sum(self, a: float, of_time: np.ndarray, b: float, of_power: np.ndarray) -> np.ndarray:
        both = 2 * a * b * self.correlation * np.sqrt(of_time * of_power)
        return np.asarray(np.maximum(a * a * of_time + b * b * of_power + both, 1e-14))

    def _gain(
        self, a: float, time: tuple[np.ndarray, np.ndarray], b: float, power: tuple[np.ndarray, ...]
    ) -> Gain:
        # Every component of the time with every one of the power, whose spreads are independent.
        means = a * time[0][:, None] + b * power[0][None, :]
        variances = self._sum(a, time[1][:, None], b, power[1][None, :])
        weights = self._time.weights[:, None] * self._power.weights[None, :]
        return Gain(-means.ravel(), np.sqrt(variances).ravel(), weights.ravel())

    def saving(
        self, of: Configuration, baseline: Configuration, energy: float, time: float
    ) -> Gain:
        """Return the posterior of a log saving, weighted of log energy and of log time."""
        place, against = self.configurations.index(of), self.configurations.index(baseline)
        pairs = [
            (figure.means[:, place] - figure.means[:, against], figure.apart(place, against))
            for figure in (self._time, self._power)
        ]
        return self._gain(energy + time, pairs[0], energy, pairs[1])

    def by_launches(
        self,
        of: Configuration,
        baseline: Configuration,
        energy: float,
        time: float,
        *,
        only: frozenset[int] | None = None,
    ) -> Gain | None:
        """Return the same by the launches of the two alone, with a flat prior of their difference.

        Nothing is shrunk: what is left of the luck of a choice is the caller's to bound. The
        spreads are those of the whole study.
        """
        cells = self._time.cells
        place, against = self.configurations.index(of), self.configurations.index(baseline)
        mine = cells.configuration == place
        if only is not None:
            mine &= np.isin(cells.launch, list(only))
        rows = np.flatnonzero(mine | (cells.configuration == against))
        if not mine.any() or len(rows) == mine.sum():
            return None
        design = np.stack([np.ones(len(rows)), mine[rows].astype(float)], axis=1)
        pairs = []
        for figure in (self._time, self._power):
            errors = figure.errors(rows)
            shape = (len(errors), *design.shape)
            weights = np.linalg.solve(errors, np.broadcast_to(design, shape))
            covariance = np.linalg.inv(design.T @ weights)
            found = covariance @ np.einsum("knd,n->kd", weights, figure.y[rows])[:, :, None]
            pairs.append((found[:, 1, 0], covariance[:, 1, 1]))
        return self._gain(energy + time, pairs[0], energy, pairs[1])

    def launches_of(self, configuration: Configuration) -> frozenset[int]:
        """Return the numbers of the launches that measured a configuration; none if none did."""
        rows = self.windows.rows.get(configuration, [])
        return frozenset(self.windows.launches[rows].tolist())

    def launch_sd(self, energy: float, time: float) -> float:
        """Return how far two launches differ: standard deviation of one, of a weighted sum."""
        squares = [
            np.array(math.exp(float(each.weights @ each.theta[:, each.names.index("launch")]))) ** 2
            for each in (self._time, self._power)
        ]
        return math.sqrt(float(self._sum(energy + time, squares[0], energy, squares[1])))

    @cached_property
    def draws(self) -> dict[Configuration, tuple[np.ndarray, np.ndarray]]:
        """Joint draws of log time and log power, (`DRAWS`,) each, of each configuration."""
        time, power = self.draw(np.random.default_rng(0), DRAWS)
        pairs = zip(self.configurations, time.T, power.T, strict=True)
        return {each: (t, p) for each, t, p in pairs}

    def draw(self, rng: np.random.Generator, draws: int) -> tuple[np.ndarray, np.ndarray]:
        """Return joint draws of log time and log power, (draws, configurations) each."""
        component = rng.integers(COMPONENTS, size=draws)
        time = self._drawn_normals(rng, draws)
        power = self._drawn_normals(rng, draws)
        together = self.correlation
        power["launch"] = together * time["launch"] + math.sqrt(1 - together**2) * power["launch"]
        return (
            self._time.draw(self._time.sample[component], time),
            self._power.draw(self._power.sample[self._pairing[component]], power),
        )

    def _drawn_normals(self, rng: np.random.Generator, draws: int) -> dict[str, np.ndarray]:
        figure = self._time
        launches = int(figure.order.max()) + 1
        sizes = {name: int(label.max()) + 1 for name, label in figure.effects.items()}
        sizes |= {"mean": 1, "launch": launches, "drift": launches, "window": len(figure.y)}
        return {name: rng.standard_normal((draws, size)) for name, size in sizes.items()}


def _half_width(apart: np.ndarray, variances: np.ndarray) -> np.ndarray:
    # Of the 90 % intervals about zero of mixtures of normals, (components, n), over a standard
    # normal's.
    sd = np.sqrt(variances)
    low = np.zeros(sd.shape[1])
    high = np.max(np.abs(apart) + 4 * sd, axis=0, initial=0.0)
    for _ in range(25):  # bisection: the share inside grows with the half-width
        half = (low + high) / 2
        inside = np.mean(ndtr((half - apart) / sd) - ndtr((-half - apart) / sd), axis=0)
        low, high = np.where(inside < 0.9, half, low), np.where(inside < 0.9, high, half)
    return np.asarray(high / Z90)


# Uncertainty of the front, by draws over measured and over merely predicted points.
#
# Measured points are drawn from their posterior, unmeasured ones jointly from the surrogates'. How
# often a point is on a draw's front is its probability; the quantiles of the fronts are the
# attainment surfaces (Fonseca and Fleming 1996, "On the performance assessment and comparison of
# stochastic multiobjective optimizers"). Predicted points are never chosen.


#: Joint draws: the standard error of a probability is at most 0.011.
FRONT_DRAWS = 2000
#: An unmeasured candidate is drawn where its hopeful corner (this many standard deviations better
#: on both axes) is beaten by no measured point, up to this number, the likeliest first.
HOPE, MOST_DRAWN = 2.0, 150
#: Least probability of being non-dominated at which it is shown, and limit on the number shown.
LEAST_PROBABILITY, MOST_SHOWN = 0.3, 20
#: Number of times at which the surfaces are given.
GRID = 120


def likely_unmeasured(
    surrogates: Surrogates, unmeasured: Sequence[Configuration], figures: LaunchPosterior
) -> list[Configuration]:
    """Return those unmeasured candidates that may be on the front, the hopeful ones first."""
    if not unmeasured:
        return []
    log_energy = figures.log_time + figures.log_power
    predicted = surrogates.predict(unmeasured)
    energy = predicted.log_energy - HOPE * predicted.log_energy_std
    time = predicted.log_time - HOPE * predicted.log_time_std
    behind = _behind(energy, time, log_energy, figures.log_time)
    order = np.argsort(behind)
    return [unmeasured[i] for i in order[:MOST_DRAWN] if behind[i] < 0]


def _behind(
    energy: np.ndarray, time: np.ndarray, front_energy: np.ndarray, front_time: np.ndarray
) -> np.ndarray:
    on = nondominated(front_energy, front_time)
    e, t = front_energy[on], front_time[on]
    gap = np.minimum(energy[:, None] - e[None, :], time[:, None] - t[None, :])
    return np.asarray(gap.max(axis=1))


def draw(
    figures: LaunchPosterior,
    surrogates: Surrogates,
    unmeasured: Sequence[Configuration],
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return joint draws of log energy and log time, (`FRONT_DRAWS`, measured + unmeasured).

    Settings that were measured in one launch share the error of its effect, and so do unmeasured
    settings of the same launch knobs, whose predictions follow the measured ones.
    """
    rng = np.random.default_rng(seed)
    time, power = figures.draw(rng, FRONT_DRAWS)
    if unmeasured:
        more_time, more_power = surrogates.sample(
            unmeasured, rng.standard_normal((FRONT_DRAWS, 2, len(unmeasured)))
        )
        same = np.array(
            [[m.launch == u.launch for u in unmeasured] for m in figures.configurations],
            dtype=float,
        )
        follows = same / np.maximum(same.sum(axis=0), 1.0)
        more_time = more_time + (time - figures.log_time) @ follows
        more_power = more_power + (power - figures.log_power) @ follows
        time, power = np.hstack([time, more_time]), np.hstack([power, more_power])
    return time + power, time


def predicted_points(
    surrogates: Surrogates,
    unmeasured: Sequence[Configuration],
    probability: np.ndarray,
    steps: int,
    meter: MeterInfo,
) -> tuple[Point, ...]:
    """Return the unmeasured points that are likely on the front, fastest first."""
    likely = [i for i in np.argsort(-probability) if probability[i] >= LEAST_PROBABILITY]
    chosen = likely[:MOST_SHOWN]
    if not chosen:
        return ()
    predicted = surrogates.with_intervals([unmeasured[i] for i in chosen])
    time, power = (
        (predicted.log_time, predicted.log_time_std),
        (predicted.log_power, predicted.log_power_std),
    )
    logs = zip(*time, *power, predicted.log_energy_std, strict=True)
    given: dict[str, Any] = {"source": Basis.PREDICTED, "windows": 0, "meter": meter}
    points = [
        Point.from_logs(unmeasured[i], row, steps=steps, **given)
        for i, row in zip(chosen, logs, strict=True)
    ]
    points = with_probabilities(points, probability[chosen])
    return tuple(sorted(points, key=lambda point: point.time_to_solution_s))


def attainment_of(log_energy: np.ndarray, log_time: np.ndarray, steps: int) -> Attainment:
    """Return the attainment surfaces of these draws of a step's figures, (draws, points)."""
    order = np.argsort(log_time, axis=1)
    time = np.take_along_axis(log_time, order, axis=1)
    least = np.minimum.accumulate(np.take_along_axis(log_energy, order, axis=1), axis=1)
    # Where the fronts are: from the fastest point of any draw to where the last one has its least.
    ends = np.take_along_axis(time, np.argmin(least, axis=1)[:, None], axis=1)
    grid = np.linspace(np.quantile(time[:, 0], 0.05), float(np.quantile(ends, 0.95)), GRID)
    attained = np.empty((len(time), GRID))
    for row in range(len(time)):
        reached = np.searchsorted(time[row], grid, side="right") - 1
        attained[row] = np.where(reached >= 0, least[row][np.maximum(reached, 0)], math.inf)
    # The nearest draw instead of an average between two: an infinite one must stay so.
    quantiles = np.quantile(attained, [0.1, 0.5, 0.9], axis=0, method="inverted_cdf")
    energy_kJ = np.exp(quantiles) * steps / 1000
    low, middle, high = (tuple(float(value) for value in row) for row in energy_kJ)
    return Attainment(
        time_s=tuple(float(value) for value in np.exp(grid) * steps),
        energy_kJ_10=low,
        energy_kJ_50=middle,
        energy_kJ_90=high,
        draws=len(time),
    )
