"""Which of very many candidates are looked at: a stratified sample, and the front's neighbours.

Up to `MOST` candidates all are. Beyond, whole launches are drawn: those that are open are put in
the order of their knobs and cut into equal stretches, and one of each stretch is drawn, so that the
levels of the first knobs are there as often as among all, and the others' about as often. What
differs from a launch of the front in one launch knob is looked at as well. The draw is renewed
whenever the hyperparameters are fitted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from search_spaces.candidates import Candidates
from search_spaces.configuration import Configuration

__all__ = ["MOST", "LaunchCodes", "one_of_each_stretch"]

#: Candidates that are all looked at.
MOST = 100_000


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
