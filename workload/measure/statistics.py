"""Uncertainty of a window's means: errors of correlated series, and energy from sampled power.

Neighbouring steps and neighbouring power samples are alike, so the plain standard error of their
mean promises too much; every error here is widened by their autocorrelation. Power also follows
each step's phases, up and down; its blocks are therefore whole steps, over which the phases cancel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tuner.workload.accumulation import AccumulationFit
from tuner.workload.meters.base import PowerSample, Reading

#: Half the width of a 90 % interval in standard errors (normal distribution).
Z90 = 1.6448536269514722

#: A block holds at least this much time: five samples of the timeline's 100 ms.
BLOCK_S = 0.5


def log_interval(log: float, se: float, per: float = 1.0) -> tuple[float, float]:
    """Return the 90 % interval of `per` times a quantity, given mean and error of its logarithm."""
    return per * math.exp(log - Z90 * se), per * math.exp(log + Z90 * se)


def log_error(interval: tuple[float, float]) -> float:
    """Return the standard error of the logarithm behind a 90 % interval; 0 if undetermined."""
    low, high = interval
    return math.log(high / low) / (2 * Z90) if low > 0 and math.isfinite(high) else 0.0


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    """Return the standard error of the mean of a series with correlated neighbours.

    The variance of the mean is widened by (1 + r) / (1 - r), r the lag-1 autocorrelation where it
    is positive (the effective sample size of an AR(1) series; Zieba 2010, "Effective number of
    observations and unbiased estimators of variance for autocorrelated data"). NaN below 2 values.
    """
    series = np.asarray(values, dtype=float)
    if series.size < 2:
        return math.nan
    centred = series - series.mean()
    squares = float(centred @ centred)
    if squares <= 1e-24 * float(series @ series):  # equal but for rounding
        return 0.0
    lag1 = min(max(float(centred[1:] @ centred[:-1]) / squares, 0.0), 0.95)
    variance = squares / (series.size - 1)
    return math.sqrt(variance / series.size * (1 + lag1) / (1 - lag1))


def block_edges(opened_s: float, ends_s: Sequence[float]) -> tuple[float, ...]:
    """Return the edges of blocks of whole steps, each of at least `BLOCK_S`; the last is longer."""
    edges = [opened_s]
    for end_s in ends_s:
        if end_s - edges[-1] >= BLOCK_S:
            edges.append(end_s)
    if ends_s and edges[-1] < ends_s[-1]:
        if len(edges) > 1:
            edges[-1] = ends_s[-1]
        else:
            edges.append(ends_s[-1])
    return tuple(edges)


def _energies(samples: Sequence[PowerSample], edges_s: Sequence[float]) -> np.ndarray:
    """Return the joules between edges, (len(edges_s) - 1,): power linear between samples."""
    times = np.array([sample.time_s for sample in samples])
    power = np.array([sample.power_W for sample in samples])
    edges = np.asarray(edges_s, dtype=float)
    inside = (times > edges[0]) & (times < edges[-1])
    grid = np.union1d(times[inside], edges)
    drawn = np.interp(grid, times, power)
    total = np.concatenate([[0.0], np.cumsum(np.diff(grid) * (drawn[1:] + drawn[:-1]) / 2)])
    return np.diff(total[np.searchsorted(grid, edges)])


def integrate(samples: Sequence[PowerSample], start_s: float, end_s: float) -> float:
    """Return the joules of sampled power between two times; NaN with fewer than 3 samples."""
    if sum(start_s <= sample.time_s <= end_s for sample in samples) < 3:
        return math.nan
    return float(_energies(samples, (start_s, end_s))[0])


def block_powers(samples: Sequence[PowerSample], edges_s: Sequence[float]) -> np.ndarray:
    """Return the mean power between edges, watts; empty with fewer than 3 samples."""
    if len(edges_s) < 2 or math.isnan(integrate(samples, edges_s[0], edges_s[-1])):
        return np.empty(0)
    return _energies(samples, edges_s) / np.diff(edges_s)


@dataclass(frozen=True)
class StepEstimate:
    """Step of the job's own accumulation; weights of the windows, of a line, sum to 1."""

    fit: AccumulationFit
    step_time_s: float
    step_time_se_s: float
    power_W: float
    power_se_W: float
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Window:
    """Measurements between two boundaries, or of several windows of smaller accumulation.

    Of several, the `parts`, length and energy are sums, and step time and power are the estimate's.
    """

    opened: Reading
    closed: Reading
    step_times_s: tuple[float, ...]  # wall time of each step, as the last rank finished it
    ends_s: tuple[float, ...] = ()  # of each step, on CLOCK_MONOTONIC; none with parts
    samples: tuple[PowerSample, ...] = ()
    phases_s: Mapping[str, float] = field(default_factory=dict)
    #: The known configuration that beats this one and ended the window.
    beaten_by: tuple[float, float] | None = None
    parts: tuple[Window, ...] = ()
    estimate: StepEstimate | None = None

    @property
    def length_s(self) -> float:
        """Length of the window, seconds."""
        return self.closed.time_s - self.opened.time_s

    @property
    def energy_J(self) -> float:
        """Energy of the window by the meter, joules."""
        return self.closed.energy_J - self.opened.energy_J

    @property
    def power_W(self) -> float:
        """Mean power of the window, watts."""
        return self.estimate.power_W if self.estimate else self.energy_J / self.length_s

    @property
    def step_time_s(self) -> float:
        """Mean time of a step, seconds."""
        if self.estimate:
            return self.estimate.step_time_s
        return self.length_s / len(self.step_times_s)

    @property
    def step_time_se_s(self) -> float:
        """Standard error of the mean step time, seconds; NaN with a single step."""
        if self.estimate:
            return self.estimate.step_time_se_s
        return standard_error(self.step_times_s)

    @property
    def power_blocks_W(self) -> tuple[float, ...]:
        """Mean power of blocks of whole steps, watts; their mean is `power_W`.

        The samples tell how power was spread over the window, the counter how much it was.
        """
        edges = block_edges(self.opened.time_s, self.ends_s)
        blocks = block_powers(self.samples, edges)
        if not blocks.size:
            return ()
        sampled_W = float(blocks @ np.diff(edges)) / (edges[-1] - edges[0])
        scale = self.power_W / sampled_W if sampled_W > 0 else 1.0
        return tuple(float(block) * scale for block in blocks)

    @property
    def power_se_W(self) -> float:
        """Standard error of the mean power, watts; NaN with fewer than two blocks."""
        return self.estimate.power_se_W if self.estimate else standard_error(self.power_blocks_W)

    @property
    def sampled_energy_J(self) -> float:
        """Energy of the window by integrated samples, joules; NaN with too few samples."""
        if self.parts:
            return math.fsum(part.sampled_energy_J for part in self.parts)
        return integrate(self.samples, self.opened.time_s, self.closed.time_s)
