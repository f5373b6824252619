"""Uncertainty of the front, by draws over measured and over merely predicted points.

Measured points are drawn from their posterior, unmeasured ones jointly from the surrogates'. How
often a point is on a draw's front is its probability; the quantiles of the fronts are the
attainment surfaces (Fonseca and Fleming 1996, "On the performance assessment and comparison of
stochastic multiobjective optimizers"). Predicted points are never chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tuner.answer.parts import Attainment, Point, with_probabilities
from tuner.answer.posterior import Posterior
from tuner.models.surrogate.surrogates import Surrogates
from tuner.pareto import nondominated
from tuner.search_spaces.configuration import Configuration
from tuner.workload.records.probe import Basis, MeterInfo

#: Joint draws: the standard error of a probability is at most 0.011.
DRAWS = 2000
#: An unmeasured candidate is drawn where its hopeful corner (this many standard deviations better
#: on both axes) is beaten by no measured point, up to this number, the likeliest first.
HOPE, MOST_DRAWN = 2.0, 150
#: Least probability of being non-dominated at which it is shown, and limit on the number shown.
LEAST_PROBABILITY, MOST_SHOWN = 0.3, 20
#: Number of times at which the surfaces are given.
GRID = 120


def likely_unmeasured(
    surrogates: Surrogates, unmeasured: Sequence[Configuration], figures: Posterior
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
    figures: Posterior,
    surrogates: Surrogates,
    unmeasured: Sequence[Configuration],
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return joint draws of log energy and log time, (`DRAWS`, measured + unmeasured).

    Settings that were measured in one launch share the error of its effect, and so do unmeasured
    settings of the same launch knobs, whose predictions follow the measured ones.
    """
    rng = np.random.default_rng(seed)
    time, power = figures.draw(rng, DRAWS)
    if unmeasured:
        more_time, more_power = surrogates.sample(
            unmeasured, rng.standard_normal((DRAWS, 2, len(unmeasured)))
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
