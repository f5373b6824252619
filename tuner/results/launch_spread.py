"""Spread of the launches of one study: how far two launches of one configuration differ.

A window's figure is taken as the sum of the configuration's, an effect of the launch that all
windows of the launch share, and the window's own error (a one-way random-effects model):

    y = mu[configuration] + u[launch] + e,   u ~ N(0, tau^2),   e ~ N(0, stated by the window)

What windows of the same configuration say, in one launch (the check of drift) and in several, is
the restricted likelihood of tau and of the windows' spread w beside what they state (Patterson and
Thompson 1971), free of mu. A second visit in one launch tells of w alone. Few repeats shrink
towards a prior: a scaled inverse chi-square on tau^2 (Gelman et al., Bayesian Data Analysis, 3rd
edition, section 2.6) and a log-normal on w. Without any repeat the prior is the posterior, so an
interval never leaves the launches out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["LAUNCH_SD", "PRIOR_LAUNCHES", "LaunchSpread", "launch_spread"]

#: Prior scale of tau, of step time and of power. Recorded repeats on two A100 differ by 0.15 % in
#: time and 1.3 % in power (876 points of three, kareus-attention-a100; printed by
#: `python -m benchmarks.coverage TABLE`), and launches of one configuration on a shared two-core
#: machine by up to 40 % (`tests/data`): a per cent, with a heavy tail.
LAUNCH_SD = 0.01
#: Degrees of freedom of the prior: it counts as much as this number of repeats. so few
#: leave a probability of 7 % for a tau of more than 5 %. Of 1, 1.5, 2 and 3, all tried on the
#: made-up problems of `benchmarks.coverage`; its recorded tables were not used for the choice.
PRIOR_LAUNCHES = 1.5
#: Standard deviation of the logarithm of w about its prior median.
WINDOW_LOG_SD = 0.7
#: Values of tau, and of w over its median, at which the posterior is computed.
LAUNCH_GRID, WINDOW_GRID = np.geomspace(2e-4, 0.6, 25), np.geomspace(1 / 8, 16, 10)
#: Windows behind the likelihood at most, which costs O(windows^3): the first.
MOST_WINDOWS = 120


@dataclass(frozen=True)
class LaunchSpread:
    """Posterior of the standard deviations of launches and of windows.

    Attributes:
        launch, window: values of both at the points of a grid, (points,).
        weights: of the points, which sum to one.
        repeats: number of windows that repeated a configuration: degrees of freedom behind it.
    """

    launch: np.ndarray
    window: np.ndarray
    weights: np.ndarray
    repeats: int

    def sample(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (launch, window) at points that stand for equal shares of the posterior.

        Systematic sampling in the order of `launch`; (count,) each.
        """
        shares = (np.arange(count) + 0.5) / count
        rows = np.searchsorted(np.cumsum(self.weights), shares).clip(max=len(self.weights) - 1)
        return self.launch[rows], self.window[rows]


def launch_spread(
    values: np.ndarray,
    stated: np.ndarray,
    configurations: Sequence[int] | np.ndarray,
    launches: Sequence[int] | np.ndarray,
    window_sd: float,
) -> LaunchSpread:
    """Return the posterior of the launches' and the windows' standard deviations.

    Args:
        values: (windows,), logarithms of the figure.
        stated: (windows,), squared error that each window states.
        configurations: (windows,), number of each window's configuration.
        launches: (windows,), number of each window's launch.
        window_sd: prior median of w.
    """
    launch, window = (grid.ravel() for grid in np.meshgrid(LAUNCH_GRID, window_sd * WINDOW_GRID))
    order = np.lexsort((window, launch))
    launch, window = launch[order], window[order]
    log = -PRIOR_LAUNCHES * (np.log(launch) + 0.5 * (LAUNCH_SD / launch) ** 2)
    log = log - 0.5 * (np.log(window / window_sd) / WINDOW_LOG_SD) ** 2
    configurations, launches = np.asarray(configurations), np.asarray(launches)
    counts = np.bincount(configurations, minlength=1)
    rows = np.flatnonzero(counts[configurations] > 1)[:MOST_WINDOWS]
    repeats = len(rows) - len(np.unique(configurations[rows]))
    if repeats:
        log = log + _restricted(
            values[rows],
            _indicators(configurations[rows]),
            _indicators(launches[rows]),
            stated[rows],
            launch,
            window,
        )
    weights = np.exp(log - log.max())
    return LaunchSpread(launch, window, weights / weights.sum(), repeats)


def _indicators(labels: np.ndarray) -> np.ndarray:
    """Return a column for each label, 1 in its rows, (n, labels)."""
    each, number = np.unique(labels, return_inverse=True)
    return np.asarray(np.eye(len(each))[number.reshape(-1)])


def _restricted(
    y: np.ndarray,
    fixed: np.ndarray,
    random: np.ndarray,
    stated: np.ndarray,
    launch: np.ndarray,
    window: np.ndarray,
) -> np.ndarray:
    """Return the restricted log likelihood at each point of the grid, up to a constant."""
    covariance = launch[:, None, None] ** 2 * (random @ random.T)
    covariance = covariance + (stated + window[:, None] ** 2)[:, :, None] * np.eye(len(y))
    lower = np.linalg.cholesky(covariance)
    white = np.linalg.solve(
        lower,
        np.broadcast_to(np.column_stack([y, fixed]), (len(launch), len(y), 1 + fixed.shape[1])),
    )
    white_y, white_x = white[:, :, :1], white[:, :, 1:]
    inner = np.linalg.cholesky(white_x.transpose(0, 2, 1) @ white_x)
    explained = np.linalg.solve(inner, white_x.transpose(0, 2, 1) @ white_y)
    squares = np.sum(white_y**2, axis=(1, 2)) - np.sum(explained**2, axis=(1, 2))
    logs = sum(np.log(np.diagonal(each, axis1=1, axis2=2)).sum(axis=1) for each in (lower, inner))
    return np.asarray(-logs - 0.5 * squares)
