"""Priors made of a recorded table: its own means, and means that are wrong in a known way.

A wrong prior is what the models are for a job that they misjudge: a
ranking of the launches that is upside down, and means that are right for half of the launches and
off by a factor for the other half.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.search.problems import Problem, load_problem
from benchmarks.search.truth import truth_of
from tuner.models.analytic.model import Prediction, Prior
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.knobs import Value

#: Factor by which the step times of one half of the launches are off where a prior is wrong there.
HALF_FACTOR = 2.0


@dataclass(frozen=True)
class _Means:
    """Prior that knows a mean for each configuration of a table.

    Attributes:
        logs: configuration -> (log step time, log power).
    """

    logs: Mapping[Configuration, tuple[float, float]]

    def predict(self, configurations: Sequence[Configuration]) -> Prediction:
        """Return the means, with no memory."""
        logs = np.array([self.logs[each] for each in configurations]).reshape(-1, 2)
        time_s, power_W = np.exp(logs).T
        return Prediction(time_s, power_W, np.zeros(len(logs)))


def _means(problem: Problem) -> tuple[list[Configuration], np.ndarray]:
    """Return the configurations and their log step times and powers, (n, 2)."""
    points = load_problem(problem).groups[0].points
    return (
        [point.configuration for point in points],
        np.log([(point.time_s, point.power_W) for point in points]),
    )


def _as_prior(configurations: Sequence[Configuration], logs: np.ndarray) -> Prior:
    return _Means({c: (t, p) for c, (t, p) in zip(configurations, logs.tolist(), strict=True)})


def _mirrored(problem: Problem) -> Prior:
    """Return the means with each launch's level mirrored about the mean of the launches.

    In log: the best launch becomes the worst, while the curve over the live settings is the truth.
    """
    configurations, logs = _means(problem)
    launches = list(dict.fromkeys(c.launch for c in configurations))
    of = np.array([launches.index(c.launch) for c in configurations])
    levels = np.array([logs[of == i].mean(axis=0) for i in range(len(launches))])
    return _as_prior(configurations, logs + 2 * (levels.mean(axis=0) - levels[of]))


def _half_wrong(problem: Problem) -> Prior:
    """Return the means with the step times of half of the launches off by `HALF_FACTOR`.

    The half is the lower or the upper one by the first launch knob, and its times are too long or
    too short. Four jackknifed tables in a row have each of the four once; which is first depends on
    the group.
    """
    configurations, logs = _means(problem)
    launches = list(dict.fromkeys(c.launch for c in configurations))
    case = (zlib.crc32(problem.group.encode()) + (problem.jackknife or 0)) % 4
    knobs = (n for n in launches[0] if len({launch.get(n) for launch in launches}) > 1)
    knob = next(knobs, "")
    order = sorted(launches, key=lambda launch: _sorted_as(launch.get(knob)))
    half = len(order) // 2
    wrong = set(order[half:] if case % 2 else order[:half])
    off = np.log(HALF_FACTOR) * (1 if case < 2 else -1)
    in_half = np.array([c.launch in wrong for c in configurations])
    return _as_prior(configurations, logs + np.outer(in_half, [off, 0.0]))


def _sorted_as(value: Value | None) -> tuple[float, str]:
    """Return what sorts numbers by size, and anything else by its text."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return (float(value), "") if number else (0.0, str(value))  # type: ignore[arg-type]


#: Kinds of priors that are wrong -> what makes one; None where the table has none.
WRONG: dict[str, Callable[[Problem], Prior | None]] = {
    "mirrored": _mirrored,
    "half-wrong": _half_wrong,
}
#: These, and the exact one.
RECORDED_PRIORS: dict[str, Callable[[Problem], Prior | None]] = {"truth": truth_of, **WRONG}
