"""Noise-free means of a problem: the front that a search has to find, and its oracle's cost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from benchmarks.search.problems import Problem, load_problem
from tuner.pareto import front_regret, hypervolume, nondominated, reference_point
from tuner.recordings.table import TableCost, TablePoint
from tuner.search_spaces.configuration import Configuration, Settings

#: The front is found when this share of its hypervolume at most is missing.
WITHIN = 0.01


@dataclass(frozen=True)
class Truth:
    """Noise-free means of one problem and what they bound.

    Attributes:
        points: as recorded.
        cost: of probing them.
        logs: configuration -> (log energy, log time).
        reference: where hypervolume is counted from.
        whole: the true front's hypervolume.
        whole_kJ: kilojoules of launching every point by itself.
        oracle_kJ, oracle_launches, oracle_measurements: what the oracle pays, which launches
            exactly the front's launches and visits exactly its settings (one of equal points).
    """

    points: tuple[TablePoint, ...]
    cost: TableCost
    logs: dict[Configuration, tuple[float, float]]
    reference: np.ndarray
    whole: float
    whole_kJ: float
    oracle_kJ: float
    oracle_launches: int
    oracle_measurements: int

    def missing(self, measured: Iterable[Configuration]) -> float:
        """Return the share of the hypervolume that the measured configurations leave out."""
        points = [self.logs[configuration] for configuration in measured]
        if not points:
            return 1.0
        return max(1 - hypervolume(np.array(points), self.reference) / self.whole, 0.0)

    def front_regret(self, measured: Iterable[Configuration]) -> float:
        """Return the least share by which every point of the front is matched (`tuner.pareto`)."""
        found = [self.logs[configuration] for configuration in measured]
        return front_regret(np.array(found).reshape(-1, 2), self.front)

    @property
    def front(self) -> np.ndarray:
        """Log energy and log time of the front, (points, 2)."""
        array = np.array(list(self.logs.values()))
        return array[nondominated(array[:, 0], array[:, 1])]


@lru_cache(maxsize=512)
def truth_of(problem: Problem) -> Truth:
    """Return the noise-free means of a problem and its oracle's costs."""
    table = load_problem(problem)
    points = table.groups[0].points
    logs = {p.configuration: (math.log(p.energy_J), math.log(p.time_s)) for p in points}
    array = np.array(list(logs.values()))
    reference = reference_point(array)
    on_front = nondominated(array[:, 0], array[:, 1])
    visits: dict[Settings, list[float]] = {}
    seen: set[tuple[float, float]] = set()
    for point, front in zip(points, on_front, strict=True):
        if front and logs[point.configuration] not in seen:
            seen.add(logs[point.configuration])
            visits.setdefault(point.configuration.launch, []).append(point.power_W)
    return Truth(
        points=points,
        cost=table.cost,
        logs=logs,
        reference=reference,
        whole=hypervolume(array, reference),
        whole_kJ=sum(table.cost.energy_J([p.power_W]) for p in points) / 1000,
        oracle_kJ=sum(table.cost.energy_J(powers) for powers in visits.values()) / 1000,
        oracle_launches=len(visits),
        oracle_measurements=sum(map(len, visits.values())),
    )
