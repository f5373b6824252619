"""Launches on fewer replicas first: a cheap probe that tells most of what the full launch would.

A launch that differs from another one only in its data-parallel replicas does the same work on each
GPU. On a quarter of the GPUs it costs a quarter of the joules. Both train the job at its global
batch, so both are candidates, and the smaller one may be the answer itself. What is measured at
fewer replicas foretells the full launch by the models' ratio of the two. The error of the ratio is
learned from launches that were measured at both numbers of replicas: a mean for each number of
replicas, and a standard deviation about it, which is the error of the row that the surrogates get
until the full launch is measured. Without a measured pair no launch is foretold, so the first pair
is made on purpose, from a launch that is measured already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tuner.search.observations import Observation
from tuner.search_spaces.configuration import Configuration, Settings

__all__ = ["FewerReplicas"]

REPLICAS = "data_parallel"
#: The replicas are divided by this number, down to the least one: over one replica ZeRO has nothing
#: to shard, so it is another launch.
DIVISOR, LEAST_REPLICAS = 4, 2
#: Log-sd expected of the ratio's error: common to the launches of a number of replicas, and of each
#: launch besides. The latter counts as much as this number of pairs. On simulated clusters whose
#: constants are off by 20 % (`benchmarks.search.fidelity`) they are 0.05 to 0.25, and 0.03 to 0.06.
COMMON_SD, LAUNCH_SD, BELIEF = 0.15, 0.05, 3.0


class FewerReplicas:
    """Smaller launches of the candidates, and what they foretell.

    Args:
        configurations: the candidates.
        members: the candidates of each launch, by number.
        launch_of: number of each candidate's launch.
        predicted_log: log step time and log power of each candidate by the models, (n, 2).
    """

    def __init__(
        self,
        configurations: Sequence[Configuration],
        members: Sequence[np.ndarray],
        launch_of: np.ndarray,
        predicted_log: np.ndarray,
    ) -> None:
        self._configurations, self._members, self._launch_of = configurations, members, launch_of
        self._predicted = predicted_log
        self._place = {(int(launch_of[i]), c.live): i for i, c in enumerate(configurations)}
        launches = [configurations[rows[0]].launch for rows in members]
        self._replicas = [_replicas(launch) for launch in launches]
        numbers = {launch: number for number, launch in enumerate(launches)}
        self._smaller: dict[int, int] = {}
        for number, launch in enumerate(launches):
            fewer = max(LEAST_REPLICAS, self._replicas[number] // DIVISOR)
            same = numbers.get(Settings({**launch, REPLICAS: fewer}))
            if same is not None and fewer < self._replicas[number]:
                self._smaller[number] = same
        self._preferred: set[int] = set()  # full launches, to which a smaller one was preferred

    def first(
        self,
        candidate: int,
        measured: Sequence[Observation],
        pending: Iterable[int],
        closed: np.ndarray,
    ) -> int | None:
        """Return the candidate to probe before the launch of this one; None for this one itself.

        A probe on fewer replicas is expected to save joules if its share of the full launch's and
        the probability that the full one is chosen again, by the choices so far, are less than 1
        together.

        Args:
            candidate: chosen by the search.
            measured: what is measured.
            pending: candidates in flight.
            closed: mask of the candidates that may not be proposed.
        """
        full = int(self._launch_of[candidate])
        smaller = self._smaller.get(full)
        launched = self._launches(measured) | {int(self._launch_of[i]) for i in pending}
        if smaller is None or full in launched or full in self._preferred:
            return None
        again = (len(self._preferred & launched) + 1) / (len(self._preferred) + 2)
        if self._replicas[smaller] / self._replicas[full] + again >= 1:
            return None
        if not self._errors_of_pairs(measured).get(self._replicas[full]):
            return self._to_calibrate(self._replicas[full], measured, closed)
        chosen = self._open_at(smaller, self._configurations[candidate].live, closed)
        if chosen is not None:
            self._preferred.add(full)
        return chosen

    def held(self, pending: Iterable[int]) -> list[int]:
        """Return the candidates of the launches whose smaller launch is in flight."""
        flying = {int(self._launch_of[i]) for i in pending}
        launches = [full for full in self._preferred if self._smaller[full] in flying]
        return [int(i) for full in launches for i in self._members[full]]

    def prefer_measured(self, candidate: int, measured: Sequence[Observation]) -> bool:
        """Return True if the launch of this candidate is foretold from now on.

        Its smaller launch is measured for another reason, so that no probe is needed.
        """
        full = int(self._launch_of[candidate])
        launched = self._launches(measured)
        if full in launched | self._preferred or self._smaller.get(full) not in launched:
            return False
        if not self._errors_of_pairs(measured).get(self._replicas[full]):
            return False
        self._preferred.add(full)
        return True

    def foretold(self, measured: Sequence[Observation]) -> list[Observation]:
        """Return what the smaller launches tell of the launches that they were preferred to.

        Each is at the setting that was measured, with the error of the ratio beside the window's.
        Launches that are measured themselves are left out.
        """
        waiting = self._preferred - self._launches(measured)
        if not waiting:
            return []
        pairs = self._errors_of_pairs(measured)
        full_of: dict[int, list[int]] = {}
        for full in sorted(waiting):
            full_of.setdefault(self._smaller[full], []).append(full)
        rows = []
        for one in measured:
            for full in full_of.get(int(self._launch_of[one.candidate]), ()):
                place = self._place.get((full, self._configurations[one.candidate].live))
                if place is not None and self._replicas[full] in pairs:
                    rows.append(self._row(one, place, *_error(pairs, self._replicas[full])))
        return rows

    def _row(self, one: Observation, place: int, mean: np.ndarray, sd: np.ndarray) -> Observation:
        log = np.log([one.step_time_s, one.power_W]) + self._ratio(place, one.candidate) + mean
        rse = np.hypot(sd, np.nan_to_num([one.step_time_rse, one.power_rse]))
        step_time_s, power_W = (float(figure) for figure in np.exp(log))
        return Observation(
            place, self._configurations[place], step_time_s, power_W, float(rse[0]), float(rse[1])
        )

    def _launches(self, measured: Sequence[Observation]) -> set[int]:
        return {int(self._launch_of[one.candidate]) for one in measured}

    def _ratio(self, full: int, smaller: int) -> np.ndarray:
        """Return the logs of the models' ratios of time and power, (2,)."""
        return np.asarray(self._predicted[full] - self._predicted[smaller])

    def _errors_of_pairs(self, measured: Sequence[Observation]) -> dict[int, list[np.ndarray]]:
        """Return the log errors of the models' ratio in measured pairs, by number of replicas."""
        at = {one.candidate: one for one in measured}
        errors: dict[int, list[np.ndarray]] = {}
        for candidate, one in at.items():
            full = int(self._launch_of[candidate])
            live = self._configurations[candidate].live
            other = at.get(self._place.get((self._smaller.get(full, -1), live), -1))
            if other is not None:
                log = np.log([one.step_time_s / other.step_time_s, one.power_W / other.power_W])
                error = log - self._ratio(candidate, other.candidate)
                errors.setdefault(self._replicas[full], []).append(error)
        return errors

    def _to_calibrate(
        self, replicas: int, measured: Sequence[Observation], closed: np.ndarray
    ) -> int | None:
        """Return the smaller counterpart of a measured candidate with this number of replicas."""
        for one in measured:
            full = int(self._launch_of[one.candidate])
            if self._replicas[full] == replicas and full in self._smaller:
                live = self._configurations[one.candidate].live
                found = self._open_at(self._smaller[full], live, closed)
                if found is not None:
                    return found
        return None

    def _open_at(self, launch: int, live: Settings, closed: np.ndarray) -> int | None:
        place = self._place.get((launch, live))
        return None if place is None or closed[place] else place


def _replicas(launch: Settings) -> int:
    value = launch.get(REPLICAS)
    return value if isinstance(value, int) else 1


def _error(pairs: dict[int, list[np.ndarray]], replicas: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of the ratio's log error at a number of replicas, (2,).

    The means of the numbers of replicas are N(0, `COMMON_SD`^2); the variance about them is pooled
    over all of them with `LAUNCH_SD`^2, which counts as `BELIEF` pairs. What is not known of the
    mean is in the standard deviation.
    """
    known = [np.array(of) for of in pairs.values()]
    squares = np.sum([((of - of.mean(axis=0)) ** 2).sum(axis=0) for of in known], axis=0)
    freedom = BELIEF + sum(len(of) - 1 for of in known)
    variance = (BELIEF * LAUNCH_SD**2 + squares) / freedom
    here = np.array(pairs[replicas])
    common = len(here) * COMMON_SD**2
    weight = common / (common + variance)
    return weight * here.mean(axis=0), np.sqrt(variance + (1 - weight) * COMMON_SD**2)
