"""Subsampling of very large candidate sets, and the posterior of the sample.

Beyond `ALL_CANDIDATES`, launches are drawn, one from each of many equal stretches in the order of
their knobs, and those that differ from one of the front in a single launch knob are added. If
their posterior takes long, only the most promising of them are tracked. Both choices are renewed
whenever the hyperparameters are fitted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tuner.models.memory_margin import REFUSED_BELOW
from tuner.models.surrogate.surrogates import Surrogates
from tuner.models.surrogate.ties import ranked
from tuner.pareto import improvement, nondominated
from tuner.search.acquisition import CandidateView, search_reference
from tuner.search.observations import Observations
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.configuration import Configuration

#: Number of candidates up to which all are taken.
ALL_CANDIDATES = 100_000
#: measurements^2 x candidates that are tracked at once, what their posterior takes (0.1 s of a
#: core); beyond that only the launches that look best are.
TRACKED_WORK = 400_000_000
#: Number of candidates that are tracked at least, however many measurements there are.
MIN_TRACKED = 1000


class LaunchCodes:
    """Launches as integer codes: one column per launch knob that varies, its levels numbered."""

    def __init__(self, candidates: Candidates) -> None:
        launches = [Configuration(launch) for launch in candidates.launches]
        names = sorted({name for launch in candidates.launches for name in launch})
        columns = []
        for name in names:
            values = [launch.get(name) for launch in launches]
            levels = {level: i for i, level in enumerate(dict.fromkeys(values))}
            if len(levels) > 1:
                columns.append([levels[value] for value in values])
        self._codes = np.array(columns, dtype=np.int32).T.reshape(len(launches), len(columns))
        self._rank = np.empty(len(launches), dtype=int)  # in the order of the knobs
        order = np.lexsort(self._codes.T[::-1]) if columns else np.arange(len(launches))
        self._rank[order] = np.arange(len(launches))

    def in_order(self, launches: np.ndarray) -> np.ndarray:
        """Return these launches sorted by their first knob, then the second and so on."""
        return np.asarray(launches[np.argsort(self._rank[launches], kind="stable")])

    def neighbours(self, launches: Sequence[int]) -> np.ndarray:
        """Return these launches and those that differ from any of them in one knob."""
        near = np.zeros(len(self._codes), dtype=bool)
        for launch in launches:
            near |= (self._codes != self._codes[launch]).sum(axis=1) <= 1
        return np.flatnonzero(near)


def one_of_each_stretch(ordered: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw one of each of `count` equal stretches; return all if there are no more than that."""
    if len(ordered) <= count:
        return ordered
    step = len(ordered) / count
    places = (rng.random(count) + np.arange(count)) * step
    return np.asarray(ordered[np.unique(places.astype(int))])


class CandidatePool:
    """Candidates whose posterior is kept up to date from measurement to measurement."""

    def __init__(
        self,
        surrogates: Surrogates,
        candidates: Candidates,
        members: Sequence[np.ndarray],
        launch_of: np.ndarray,
        rng: np.random.Generator,
    ) -> None:
        self._surrogates, self._candidates = surrogates, candidates
        self._members, self._launch_of, self._rng = members, launch_of, rng
        self._codes: LaunchCodes | None = None
        self._gpus = np.array([Configuration(launch).world_size for launch in candidates.launches])
        # Numbers of the candidates that are tracked; None until they are chosen anew.
        self.tracked: np.ndarray | None = None

    def views(
        self, observations: Observations, closed: np.ndarray, chances: np.ndarray
    ) -> tuple[CandidateView, CandidateView]:
        """Return what is measured or in flight, and the tracked candidates that are open, at least
        one, with those in flight believed."""
        if self.tracked is None or closed[self.tracked].all():
            poor = closed | (chances < REFUSED_BELOW)
            self.tracked = self._choose(observations, closed if poor.all() else poor)
        self._surrogates.believe(np.array(observations.pending, dtype=int))
        measured = dict.fromkeys(m.candidate for m in observations.measured)
        known = np.array([*measured, *observations.pending])
        open_ = self.tracked[~closed[self.tracked]]
        return self._view(known, chances), self._view(open_, chances)

    def _view(self, members: np.ndarray, chances: np.ndarray) -> CandidateView:
        launch_of, posterior = self._launch_of[members], self._surrogates.predict(members)
        return CandidateView(members, launch_of, posterior, chances[members], self._gpus[launch_of])

    def _choose(self, observations: Observations, closed: np.ndarray) -> np.ndarray:
        limit = max(TRACKED_WORK // max(len(observations.measured), 1) ** 2, MIN_TRACKED)
        sample = self._sample(observations, closed)
        if len(sample) <= limit:
            return sample
        return self._promising(observations, sample, limit // 2, closed)

    def _sample(self, observations: Observations, closed: np.ndarray) -> np.ndarray:
        n = len(closed)
        if n <= ALL_CANDIDATES:
            return np.arange(n)
        if self._codes is None:
            self._codes = LaunchCodes(self._candidates)
        measured = observations.measured
        energy = np.array([m.step_time_s * m.power_W for m in measured])
        best = nondominated(energy, np.array([m.step_time_s for m in measured]))
        front = {int(self._launch_of[measured[i].candidate]) for i in np.flatnonzero(best)}
        still_open = np.unique(self._launch_of[~closed])
        near = np.intersect1d(self._codes.neighbours(sorted(front)), still_open)
        count = max(1, ALL_CANDIDATES * len(self._members) // n)
        drawn = one_of_each_stretch(self._codes.in_order(still_open), count, self._rng)
        return np.concatenate([self._members[i] for i in np.union1d(near, drawn)])

    def _promising(
        self, observations: Observations, sample: np.ndarray, limit: int, closed: np.ndarray
    ) -> np.ndarray:
        # At optimistic figures, two standard deviations from the mean, no launch is lost for being
        # unexplored.
        measured, found = (
            self._surrogates.predict(numbers)
            for numbers in (np.unique([m.candidate for m in observations.measured]), sample)
        )
        front = np.column_stack([measured.log_energy, measured.log_time])
        promise = np.full(len(closed), -1.0)
        promise[sample] = improvement(
            front,
            found.log_energy - 2 * found.log_energy_std,
            found.log_time - 2 * found.log_time_std,
            search_reference(front, found),
        )
        promise[closed] = -1.0
        launches = np.unique(self._launch_of[sample])
        best = np.array([promise[self._members[launch]].max() for launch in launches])
        chosen: list[np.ndarray] = []
        count = 0
        for launch in launches[ranked(best)]:
            if count and count + len(self._members[launch]) > limit:
                break
            chosen.append(self._members[launch])
            count += len(self._members[launch])
        return np.concatenate(chosen)
