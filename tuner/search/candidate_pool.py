"""Candidates that a plan considers: all of them, or of very many a sample.

Beyond what a posterior takes a moment for, launches are drawn at random, and those that differ from
one of the front in a single launch knob are added. The sample is renewed whenever the
hyperparameters are fitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.spatial.distance import cdist

from tuner.models.memory_margin import REFUSED_BELOW
from tuner.models.surrogate.features import FeatureMap
from tuner.models.surrogate.kernel import LIVE
from tuner.models.surrogate.surrogates import Posterior, Surrogates
from tuner.pareto import nondominated
from tuner.search.observations import Observations
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.space import Candidates

#: Number of candidates up to which all are taken.
ALL_CANDIDATES = 100_000
#: measurements^2 x candidates from which fewer are taken, what their posterior takes (0.1 s of a
#: core), and the number that is taken however many measurements there are.
MOST_WORK, LEAST_TAKEN = 400_000_000, 1000
#: Standard deviation of a knee's error over the distance to the next measured setting, a share of a
#: knob's range.
KNEE = 0.15
#: Chance from which a candidate is not left for last where nothing is worth anything.
LIKELY = 0.5


def launch_codes(launches: Sequence[Settings]) -> np.ndarray:
    """Return the numbers of the levels of each launch, one column a knob, (launches, knobs)."""
    named = [Configuration(launch) for launch in launches]
    columns = []
    for name in sorted({name for launch in launches for name in launch}):
        values = [launch.get(name) for launch in named]
        levels = {level: i for i, level in enumerate(dict.fromkeys(values))}
        columns.append([levels[value] for value in values])
    return np.array(columns, dtype=np.int32).reshape(len(columns), len(launches)).T


def neighbours(codes: np.ndarray, launches: Iterable[int]) -> np.ndarray:
    """Return these launches and those that differ from any of them in one knob."""
    near = np.zeros(len(codes), dtype=bool)
    for launch in launches:
        near |= (codes != codes[launch]).sum(axis=1) <= 1
    return np.flatnonzero(near)


@dataclass(frozen=True)
class CandidateView:
    """Candidates that may be proposed, or measured ones, with their expected figures."""

    members: np.ndarray  # numbers of the candidates, (n,)
    launch_of: np.ndarray
    posterior: Posterior
    # probability that each fits in memory and that no rule leaves it out rightly, (n,). None is
    # closed by it: it weighs what a candidate is worth.
    chances: np.ndarray
    gpus: np.ndarray
    # standard deviation of a further error of log time and log power, (n,) (`knee_sd`).
    rough: np.ndarray

    def __getitem__(self, rows: np.ndarray) -> CandidateView:
        """Return the view of these rows alone."""
        return CandidateView(*(value[rows] for value in vars(self).values()))

    @property
    def points(self) -> np.ndarray:
        """Expected log energy and log time of each, (n, 2)."""
        return np.column_stack([self.posterior.log_energy, self.posterior.log_time])

    @property
    def likely(self) -> np.ndarray:
        """Rows of those with an even chance, or, if none has, with the best one."""
        return np.flatnonzero(self.chances >= min(LIKELY, self.chances.max()))

    def counting(self, draws: int) -> np.ndarray:
        """Return a mask of the draws in which each counts, (draws, n)."""
        shares = (np.random.default_rng(0).permutation(draws) + 0.5) / draws
        return np.asarray(shares[:, None] < self.chances)


def knee_sd(features: FeatureMap, known: CandidateView, tried: CandidateView) -> np.ndarray:
    """Return the error of each open setting next to the measured front, a standard deviation, (n,).

    A smooth surrogate draws a knee too high between two windows, and noise can hide a whole curve:
    the front is then believed to end where it does not. So where the nearest measured setting of a
    launch is on the front, an open one may lie off the curve, the farther the more (`KNEE`).
    """
    live = features.kinds == LIVE
    on_front = nondominated(*known.points.T)
    sd = np.zeros(len(tried.members))
    for launch in np.unique(known.launch_of[on_front]):
        rows, own = np.flatnonzero(tried.launch_of == launch), known.launch_of == launch
        open_, measured = (
            features.matrix[each][:, live] for each in (tried.members[rows], known.members[own])
        )
        apart = cdist(open_, measured)
        nearest = apart.argmin(axis=1)
        sd[rows] = KNEE * apart.min(axis=1) * on_front[own][nearest]
    return sd


class CandidatePool:
    """Views of the candidates that a plan considers."""

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
        self._codes: np.ndarray | None = None
        self._gpus = np.array([Configuration(launch).world_size for launch in candidates.launches])
        # Numbers of the candidates that are looked at; None until they are chosen anew.
        self.tracked: np.ndarray | None = None

    def views(
        self, observations: Observations, closed: np.ndarray, chances: np.ndarray
    ) -> tuple[CandidateView, CandidateView]:
        """Return what is measured or in flight, and what may be proposed, at least one, with those
        in flight believed."""
        if self.tracked is None or closed[self.tracked].all():
            poor = closed | (chances < REFUSED_BELOW)
            self.tracked = self._sample(observations, closed if poor.all() else poor)
        self._surrogates.believe(np.array(observations.pending, dtype=int))
        measured = dict.fromkeys(m.candidate for m in observations.measured)
        believed = np.array([*measured, *observations.pending])
        open_ = self.tracked[~closed[self.tracked]]
        known, tried = self._view(believed, chances), self._view(open_, chances)
        return known, replace(tried, rough=knee_sd(self._surrogates.features, known, tried))

    def _view(self, members: np.ndarray, chances: np.ndarray) -> CandidateView:
        launch_of, posterior = self._launch_of[members], self._surrogates.predict(members)
        gpus, smooth = self._gpus[launch_of], np.zeros(len(members))
        return CandidateView(members, launch_of, posterior, chances[members], gpus, smooth)

    def _sample(self, observations: Observations, closed: np.ndarray) -> np.ndarray:
        measured, n = observations.measured, len(closed)
        most = min(ALL_CANDIDATES, max(MOST_WORK // len(measured) ** 2, LEAST_TAKEN))
        if n <= most:
            return np.arange(n)
        if self._codes is None:
            self._codes = launch_codes(self._candidates.launches)
        energy = np.array([m.step_time_s * m.power_W for m in measured])
        best = nondominated(energy, np.array([m.step_time_s for m in measured]))
        front = {int(self._launch_of[measured[i].candidate]) for i in np.flatnonzero(best)}
        still_open = np.unique(self._launch_of[~closed])
        near = np.intersect1d(neighbours(self._codes, front), still_open)
        count = min(max(1, most * len(self._members) // n), len(still_open))
        drawn = self._rng.choice(still_open, count, replace=False)
        return np.concatenate([self._members[i] for i in np.union1d(near, drawn)])
