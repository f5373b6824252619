"""Candidates that share a possible cause of a crash with crashed launches.

Each crash has a place, the kind of its failure with the error's type and innermost frame. What may
have caused the crashes of one place is a value of a launch knob that all of them had and no launch
trained with; where every single value has trained, it is a pair of values that no launch trained
with together. The probability is shared out over these suspects, so a launch with few of them comes
first, and if it trains, they are cleared. Nothing is closed: a crash may have been an accident.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.workload.records.probe import Failure, ProbeRecord

#: Probability that a crash is an accident, which another launch of its kind need not meet. An
#: assumption: nothing was fitted.
ACCIDENT = 0.1
#: Chance below which a launch comes behind all others: it shares what two crashes had in common.
LAST = 0.02
#: Knobs that share the ranks out, and change together.
_OF_RANKS = tuple(name for name in KNOBS if name.endswith("_parallel"))
#: One or two launch values, each with the index of its knob.
_Cause = frozenset[tuple[int, Value | None]]


class CrashCauses:
    """Possible causes of the crashes of a study, and the launches that share them."""

    def __init__(self, launches: Sequence[Settings]) -> None:
        self._names = sorted({name for launch in launches for name in launch})
        self._launches = [self._values(launch) for launch in launches]

    def chances(self, records: Sequence[ProbeRecord]) -> np.ndarray:
        """Return the probability that each launch trains, by the crashes so far, (launches,)."""
        chances = np.ones(len(self._launches))
        for alike, suspects in self._causes(records):
            guilty = 1 - ACCIDENT ** len(alike)
            shared = [sum(cause <= values for cause in suspects) for values in self._launches]
            chances *= 1 - guilty * np.array(shared) / max(len(suspects), 1)
        return chances

    def sentences(self, records: Sequence[ProbeRecord]) -> tuple[str, ...]:
        """Return which launches come first because others crashed, a sentence for each cause."""
        made = []
        for alike, suspects in self._causes(records):
            if suspects:
                values = " or ".join(sorted(self._shown(cause) for cause in suspects))
                crashed = " and ".join(each.request.probe_id for each in alike)
                made.append(
                    f"launches without {values} come first from now on: {crashed} crashed with it, "
                    "and no launch with it has trained"
                )
        return tuple(made)

    def _shown(self, cause: _Cause) -> str:
        return " and ".join(sorted(f"{self._names[at]} {value}" for at, value in cause))

    def _causes(
        self, records: Sequence[ProbeRecord]
    ) -> Iterator[tuple[Sequence[ProbeRecord], Sequence[_Cause]]]:
        # The crashes of each place, with what may have caused them.
        trained = {self._values(each.request.launch) for each in records if each.measurements}
        crashes: dict[str, list[ProbeRecord]] = {}
        for record in records:
            if (
                record.failure is not None
                and not record.measurements
                and _blames_launch(record.failure)
            ):
                crashes.setdefault(record.failure.place, []).append(record)
        for alike in crashes.values():
            yield alike, self._suspects(alike, trained)

    def new_values(
        self, records: Sequence[ProbeRecord], in_flight: Sequence[Configuration]
    ) -> np.ndarray:
        """Return how many values of each launch no launch trained with, (launches,).

        Those of the knobs that share the ranks out count as one. A launch with new values that are
        being tried has one more.
        """
        trained: set[Any] = set()
        for record in records:
            if record.measurements:
                trained |= self._apart(self._values(record.request.launch))
        new = [self._apart(values) - trained for values in self._launches]
        tried = [self._apart(self._values(each.launch)) - trained for each in in_flight]
        return np.array([len(own) + any(own & other for other in tried) for own in new])

    def _apart(self, values: _Cause) -> set[Any]:
        # The values that a launch may crash by, each or, of the ranks, all together.
        named = {self._names[number]: value for number, value in values}
        ranks = tuple(named.get(name) for name in _OF_RANKS)
        others = {*named} - {*_OF_RANKS}
        return {("ranks", ranks), *((name, named[name]) for name in others)}

    def _suspects(
        self, crashes: Sequence[ProbeRecord], trained: Collection[_Cause]
    ) -> list[_Cause]:
        shared = frozenset.intersection(*(self._values(each.request.launch) for each in crashes))
        for size in (1, 2):
            causes = (frozenset(each) for each in combinations(shared, size))
            if left := [cause for cause in causes if not any(cause <= each for each in trained)]:
                return left
        return []

    def _values(self, launch: Settings) -> _Cause:
        # A knob that a launch does not name is at its default.
        configuration = Configuration(launch)
        return frozenset((i, configuration.get(name)) for i, name in enumerate(self._names))


def _blames_launch(failure: Failure) -> bool:
    return failure.type.blames == "launch" and failure.kind not in ("out_of_memory", "disk_full")
