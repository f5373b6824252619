"""Posterior of log step time or of log power, by the model of `tuner.answer.posterior`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import ndtri

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.workload.records.probe import Measurement, ProbeRecord


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
