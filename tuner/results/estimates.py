"""Estimates of step time and power of the measured configurations, from the windows of a study.

Windows of one launch share its effect (`tuner.results.launch_spread`), so a second visit in the
same launch makes the launch's mean more precise and says nothing about other launches. A
configuration is estimated from its own windows alone, and the errors of settings that were measured
in one launch go together. The surrogates do not sharpen it. Their joint posterior with the
launches' variance was tried on 64 studies of `benchmarks.coverage`: the error of the time was 6 to
10 % smaller at launches that differ by 2 and 5 % and 9 % larger at 1 %, and the intervals of the
time covered 76 to 85 % there, probably because hyperparameters that were fitted without launches
take part of their spread for noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from tuner.models.surrogate.surrogates import POWER_NOISE, TIME_NOISE
from tuner.results.launch_spread import LaunchSpread, launch_spread
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.workload.measure.statistics import Z90
from tuner.workload.probe import Measurement, ProbeRecord

__all__ = ["Estimate", "Windows", "estimate", "spreads_of"]

#: Values that stand for the posterior of the launches' and the windows' spread.
COMPONENTS = 24


@dataclass(frozen=True)
class Windows:
    """Every window of every measured configuration, row by row.

    Attributes:
        configurations: as requested.
        measurements: one for each row.
        records: the probe of each row.
        launches: number of that probe, which is one launch, (rows,).
    """

    configurations: list[Configuration]
    measurements: list[Measurement]
    records: list[ProbeRecord]
    launches: np.ndarray

    @classmethod
    def of(cls, records: Sequence[ProbeRecord]) -> Windows:
        """Return the windows of these probes.

        Raises:
            InputError: they charge the energy of different scopes.
        """
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

    def by_configuration(self) -> dict[Configuration, tuple[Measurement, ...]]:
        """Return the windows of each configuration."""
        grouped: dict[Configuration, tuple[Measurement, ...]] = {}
        for configuration, measurement in zip(self.configurations, self.measurements, strict=True):
            grouped[configuration] = (*grouped.get(configuration, ()), measurement)
        return grouped

    @property
    def as_delivered(self) -> list[Configuration]:
        """Delivered configurations, the models' input: a requested clock may not have held."""
        pairs = zip(self.configurations, self.measurements, strict=True)
        return [Configuration(asked.launch, m.as_delivered) for asked, m in pairs]

    @property
    def step_time_s(self) -> np.ndarray:
        """Step times, (rows,)."""
        return np.array([m.step_time_s for m in self.measurements], dtype=float)

    @property
    def power_W(self) -> np.ndarray:
        """Powers of the whole job, (rows,)."""
        return np.array([m.power_W for m in self.measurements], dtype=float)

    @property
    def temperature_C(self) -> np.ndarray:
        """The hottest device's, NaN where unknown."""
        each = [math.nan if m.temperature_C is None else m.temperature_C for m in self.measurements]
        return np.array(each, dtype=float)

    @property
    def relative_errors(self) -> tuple[np.ndarray, np.ndarray]:
        """Stated relative standard errors of step time and power; NaN where unknown."""
        time = [m.step_time_rse for m in self.measurements]
        power = [m.power_rse for m in self.measurements]
        # A file may state any number; a thousandfold error says as little, and its square is one.
        return tuple(np.clip(np.array(rse, dtype=float), 0.0, 1e3) for rse in (time, power))

    @property
    def rows(self) -> dict[Configuration, list[int]]:
        """Rows of each configuration, in the order in which they were first measured."""
        rows: dict[Configuration, list[int]] = {}
        for row, configuration in enumerate(self.configurations):
            rows.setdefault(configuration, []).append(row)
        return rows

    @property
    def logs_and_stated(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Logarithm and stated squared error, (rows,) each, of step time and of power."""
        pairs = zip((self.step_time_s, self.power_W), self.relative_errors, strict=True)
        return [(np.log(values), np.nan_to_num(rse) ** 2) for values, rse in pairs]


@dataclass(frozen=True)
class _Cells:
    """Pairs of a configuration and a launch that measured it, sorted by configuration.

    Attributes:
        order: windows sorted by pair, (windows,).
        windows: place in `order` of the first window of each pair, (pairs,).
        launch: number of each pair's launch, from 0, (pairs,).
        first: place of the first pair of each configuration, (configurations,).
    """

    order: np.ndarray
    windows: np.ndarray
    launch: np.ndarray
    first: np.ndarray

    @classmethod
    def of(cls, configurations: np.ndarray, launches: np.ndarray) -> _Cells:
        """Return the pairs of windows whose configurations and launches have these numbers."""
        launch = np.unique(launches, return_inverse=True)[1]
        order = np.lexsort((launch, configurations))
        here, there = configurations[order], launch[order]
        starts = np.flatnonzero(
            np.r_[True, np.diff(here).astype(bool) | np.diff(there).astype(bool)]
        )
        first = np.flatnonzero(np.r_[True, np.diff(here[starts]).astype(bool)])
        return cls(order, starts, there[starts], first)

    def of_windows(self, values: np.ndarray) -> np.ndarray:
        """Return the sums over each pair's windows, (..., pairs), of values (..., windows)."""
        return np.asarray(np.add.reduceat(values[..., self.order], self.windows, axis=-1))

    def of_pairs(self, values: np.ndarray) -> np.ndarray:
        """Return the sums over each configuration's pairs, (..., configurations)."""
        return np.asarray(np.add.reduceat(values, self.first, axis=-1))

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Return each configuration's value at its pairs, (..., pairs)."""
        return np.repeat(values, np.diff(np.r_[self.first, len(self.launch)]), axis=-1)


@dataclass(frozen=True)
class _Figure:
    """Logarithm of one figure of several configurations: a mixture of normal distributions, one for
    each value of the launches' spread.

    Attributes:
        cells: which launches measured which configuration.
        means: (components, configurations).
        of_launches: what an effect of the launch adds at each pair, (components, pairs).
        own: (components, configurations), standard deviation of the windows' own errors.
    """

    cells: _Cells
    means: np.ndarray
    of_launches: np.ndarray
    own: np.ndarray

    @classmethod
    def weighted(
        cls, cells: _Cells, log: np.ndarray, variance: np.ndarray, tau: np.ndarray
    ) -> _Figure:
        """Weigh the launches of each configuration by 1 / (tau^2 + their own squared error).

        Args:
            cells: of the windows.
            log: (windows,).
            variance: squared error of each window, (components, windows).
            tau: standard deviation of the launches, (components,).
        """
        precision = cells.of_windows(1 / variance)
        mean = cells.of_windows(log / variance) / precision
        weights = 1 / (tau[:, None] ** 2 + 1 / precision)
        weights /= cells.spread(cells.of_pairs(weights))
        own = np.sqrt(cells.of_pairs(weights**2 / precision))
        return cls(cells, cells.of_pairs(weights * mean), tau[:, None] * weights, own)

    @property
    def mean(self) -> np.ndarray:
        return np.asarray(self.means.mean(axis=0))

    def error(self) -> np.ndarray:
        """Half the width of the 90 % interval about the mean, over a standard normal's."""
        std = np.sqrt(self.cells.of_pairs(self.of_launches**2) + self.own**2)
        apart = self.means - self.mean
        low = np.zeros(std.shape[1])
        high = np.max(np.abs(apart) + 4 * std, axis=0, initial=0.0)
        for _ in range(25):  # bisection: the share inside grows with the half-width
            half = (low + high) / 2
            inside = np.mean(ndtr((half - apart) / std) - ndtr((-half - apart) / std), axis=0)
            low, high = np.where(inside < 0.9, half, low), np.where(inside < 0.9, high, half)
        return np.asarray(high / Z90)

    def draw(self, rng: np.random.Generator, draws: int) -> np.ndarray:
        """Return joint draws, (draws, configurations)."""
        component = rng.integers(len(self.means), size=draws)
        launches = rng.standard_normal((draws, int(self.cells.launch.max()) + 1))
        own = rng.standard_normal((draws, self.means.shape[1]))
        found = np.empty_like(own)
        for number in range(len(self.means)):
            rows = component == number
            effects = launches[rows][:, self.cells.launch] * self.of_launches[number]
            found[rows] = self.means[number] + self.cells.of_pairs(effects)
            found[rows] += own[rows] * self.own[number]
        return found


@dataclass(frozen=True)
class Estimate:
    """Estimates of log step time and log power of the measured configurations.

    Attributes:
        configurations: in the order in which they were first measured.
        rows: windows of each.
        log_time, log_power: means, (configurations,).
        log_time_se, log_power_se: errors: 1.645 times as much on either side is a 90 % interval,
            widened like Student's t where few repeats tell how far launches differ.
    """

    configurations: list[Configuration]
    rows: list[list[int]]
    log_time: np.ndarray
    log_time_se: np.ndarray
    log_power: np.ndarray
    log_power_se: np.ndarray
    _figures: tuple[_Figure, _Figure]

    def draw(self, rng: np.random.Generator, draws: int) -> tuple[np.ndarray, np.ndarray]:
        """Return joint draws of log time and log power, (draws, configurations) each."""
        time, power = (figure.draw(rng, draws) for figure in self._figures)
        return time, power


def spreads_of(windows: Windows) -> list[LaunchSpread]:
    """Return how far launches and windows differ, in step time and in power."""
    number = {configuration: i for i, configuration in enumerate(windows.rows)}
    configurations = [number[each] for each in windows.configurations]
    return [
        launch_spread(log, stated, configurations, windows.launches, noise)
        for (log, stated), noise in zip(
            windows.logs_and_stated, (TIME_NOISE, POWER_NOISE), strict=True
        )
    ]


def estimate(windows: Windows) -> Estimate:
    """Estimate step time and power of the measured configurations.

    A configuration's mean is that of its launches, each weighed by 1 / (tau^2 + its own squared
    error), and settings of one launch share its effect.

    Args:
        windows: at least one.
    """
    rows = windows.rows
    number = {configuration: i for i, configuration in enumerate(rows)}
    numbers = np.array([number[each] for each in windows.configurations])
    cells = _Cells.of(numbers, windows.launches)
    found = []
    for (log, stated), spread in zip(windows.logs_and_stated, spreads_of(windows), strict=True):
        launch, window = spread.sample(COMPONENTS)
        found.append(_Figure.weighted(cells, log, stated + window[:, None] ** 2, launch))
    time, power = found
    return Estimate(
        list(rows),
        list(rows.values()),
        time.mean,
        time.error(),
        power.mean,
        power.error(),
        (time, power),
    )
