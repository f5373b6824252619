"""Which of very many candidates are looked at, and whose posterior is kept up to date.

Up to `MOST` candidates all are looked at. Beyond, whole launches are drawn: those that are open are
put in the order of their knobs and cut into equal stretches, and one of each stretch is drawn, so
that the levels of the first knobs are there as often as among all, and the others' about as often.
What differs from a launch of the front in one launch knob is looked at as well. Where measurements
x candidates are many, the most hopeful launches of these are watched. Both are renewed whenever the
hyperparameters are fitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from models.surrogate import Posterior, Surrogates
from search_spaces.candidates import Candidates
from search_spaces.configuration import Configuration
from tuner.acquisition import search_reference
from tuner.pareto import improvement, nondominated
from tuner.told import Seen

__all__ = ["MOST", "LaunchCodes", "Watch", "one_of_each_stretch"]

#: Candidates that are all looked at.
MOST = 100_000
#: measurements x candidates that are kept up to date at once (32 MB an output); beyond that only
#: the launches that look best are.
WATCHED_ENTRIES = 4_000_000
#: At least so many candidates are watched, however many measurements there are.
LEAST_WATCHED = 1000
#: Measurements that the coarse look at all of them is conditioned on.
COARSE_ROWS = 128


class LaunchCodes:
    """The launches as numbers: one column a launch knob that varies, its levels counted.

    Args:
        candidates: the candidates.
    """

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
        self._place = np.empty(len(launches), dtype=int)  # in the order of the knobs
        order = np.lexsort(self._codes.T[::-1]) if columns else np.arange(len(launches))
        self._place[order] = np.arange(len(launches))

    def in_order(self, launches: np.ndarray) -> np.ndarray:
        """These launches, by their first knob, then the second and so on."""
        return np.asarray(launches[np.argsort(self._place[launches], kind="stable")])

    def neighbours(self, launches: Sequence[int]) -> np.ndarray:
        """The launches that differ from any of these in one knob, and these."""
        near = np.zeros(len(self._codes), dtype=bool)
        for launch in launches:
            near |= (self._codes != self._codes[launch]).sum(axis=1) <= 1
        return np.flatnonzero(near)


def one_of_each_stretch(ordered: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """One drawn of each of `count` equal stretches; all where there are no more."""
    if len(ordered) <= count:
        return ordered
    step = len(ordered) / count
    places = (rng.random(count) + np.arange(count)) * step
    return np.asarray(ordered[np.unique(places.astype(int))])


class Watch:
    """The candidates whose posterior is kept up to date from measurement to measurement.

    Args:
        surrogates: told which they are.
        candidates: all of them.
        members: the candidates of each launch, as numbers.
        launch_of: each candidate's launch, as a number.
        rng: of the draws.

    Attributes:
        watching: the candidates, as numbers; None until they are chosen anew.
    """

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
        self.watching: np.ndarray | None = None

    def renew(self) -> None:
        """Choose anew at the next look: the hyperparameters have changed."""
        self.watching = None

    def posterior(self, seen: Seen, closed: np.ndarray) -> tuple[Posterior, np.ndarray]:
        """The posterior of what is watched (pending believed), and which candidates those are, at
        least one of them open."""
        if self.watching is None or closed[self.watching].all():
            self.watching = self._chosen(seen, closed)
            self._surrogates.watch(self._named(self.watching))
        self._surrogates.believe(self._named(seen.pending))
        return self._surrogates.watched(), self.watching

    def _named(self, candidates: Iterable[int]) -> list[Configuration]:
        return [self._candidates.configurations[i] for i in candidates]

    def _chosen(self, seen: Seen, closed: np.ndarray) -> np.ndarray:
        room = max(WATCHED_ENTRIES // max(len(seen.told), 1), LEAST_WATCHED)
        every = self._considered(seen, closed)
        return every if len(every) <= room else self._promising(seen, every, room // 2, closed)

    def _considered(self, seen: Seen, closed: np.ndarray) -> np.ndarray:
        """The candidates that are looked at, launch by launch."""
        n = len(closed)
        if n <= MOST:
            return np.arange(n)
        if self._codes is None:
            self._codes = LaunchCodes(self._candidates)
        energy = np.array([t.step_time_s * t.power_W for t in seen.told])
        best = nondominated(energy, np.array([t.step_time_s for t in seen.told]))
        front = {int(self._launch_of[seen.told[i].candidate]) for i in np.flatnonzero(best)}
        still_open = np.unique(self._launch_of[~closed])
        near = np.intersect1d(self._codes.neighbours(sorted(front)), still_open)
        count = max(1, MOST * len(self._members) // n)
        drawn = one_of_each_stretch(self._codes.in_order(still_open), count, self._rng)
        return np.concatenate([self._members[i] for i in np.union1d(near, drawn)])

    def _promising(
        self, seen: Seen, every: np.ndarray, room: int, closed: np.ndarray
    ) -> np.ndarray:
        """Of `every`, the launches with the most hopeful open settings, about `room` candidates.

        Hope is the improvement at optimistic figures (two standard deviations) of a posterior that
        is conditioned on the first `COARSE_ROWS` measurements only; its standard deviations are too
        large, never too small, so nothing good is lost for being unknown.
        """
        told = np.unique([t.candidate for t in seen.told])
        measured = self._surrogates.predict(self._named(told), first=COARSE_ROWS)
        coarse = self._surrogates.predict(self._named(every), first=COARSE_ROWS)
        front = np.column_stack([measured.log_energy, measured.log_time])
        hope = np.full(len(closed), -1.0)
        hope[every] = improvement(
            front,
            coarse.log_energy - 2 * coarse.log_energy_std,
            coarse.log_time - 2 * coarse.log_time_std,
            search_reference(front, coarse),
        )
        hope[closed] = -1.0
        launches = np.unique(self._launch_of[every])
        best = np.array([hope[self._members[launch]].max() for launch in launches])
        chosen: list[np.ndarray] = []
        count = 0
        for launch in launches[np.argsort(-best, kind="stable")]:
            if count and count + len(self._members[launch]) > room:
                break
            chosen.append(self._members[launch])
            count += len(self._members[launch])
        return np.concatenate(chosen)
