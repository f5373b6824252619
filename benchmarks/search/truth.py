"""Noise-free means of a problem: what a search of it has to find, and what that costs at least."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from benchmarks.search.problems import Problem, load_problem
from tuner.pareto import hypervolume, nondominated, reference_point
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.records.table import TableCost, TablePoint

#: The front is found when this share of its hypervolume at most is missing.
WITHIN = 0.01
#: A point of the front is matched by a measured one that is worse by this share at most, on both
#: axes.
MATCHED = 0.02
#: Seconds after which the search for the cheapest set of measurements ends with a bound.
BOUND_S = 20.0


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

    def matched(self, measured: Iterable[Configuration]) -> bool:
        """Return True if each point of the front is matched within `MATCHED` on both axes."""
        points = np.array([self.logs[configuration] for configuration in measured]).reshape(-1, 2)
        worst = self.front[:, None, :] + math.log1p(MATCHED)
        return bool((points[None] <= worst + 1e-12).all(axis=2).any(axis=1).all())

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


@dataclass(frozen=True)
class Bound:
    """Cost of the cheapest set of measurements within `WITHIN` of the front's hypervolume.

    Attributes:
        kJ: kilojoules; a lower bound on them if not exact.
        exact: True if no set is cheaper and this one exists.
    """

    kJ: float
    exact: bool


def lower_bound(truth: Truth, limit_s: float = BOUND_S) -> Bound:
    """Return the cost of the cheapest set of measurements that finds the front.

    A mixed-integer program: the corners of a staircase are a path through the points by rising
    energy and falling time, and the area under it is a sum over the path's arcs. Each corner is
    visited, each launch of a visited point is paid at the power of the first point visited in it.
    Solved exactly by branch and bound (HiGHS), or to a lower bound within `limit_s`.
    """
    logs = np.array([truth.logs[p.configuration] for p in truth.points])
    inside = np.flatnonzero((logs < truth.reference).all(axis=1))
    # Of equal points, the one of least power; of a launch, the point that is cheapest to launch at.
    inside = np.array(_cheapest_of_equal(truth.points, logs, inside))
    launches = {truth.points[i].configuration.launch for i in inside}
    cheapest: dict[Settings, int] = {}
    for i in np.argsort([p.power_W for p in truth.points], kind="stable"):
        launch = truth.points[i].configuration.launch
        if launch in launches:
            cheapest.setdefault(launch, int(i))
    visited = list(dict.fromkeys([*map(int, inside), *cheapest.values()]))
    return _solve(truth, logs, [int(i) for i in inside], visited, limit_s)


def _cheapest_of_equal(
    points: Sequence[TablePoint], logs: np.ndarray, rows: np.ndarray
) -> list[int]:
    order = sorted(map(int, rows), key=lambda i: points[i].power_W)
    return list({(points[i].configuration.launch, *logs[i]): i for i in reversed(order)}.values())


def _solve(
    truth: Truth, logs: np.ndarray, corners: list[int], visited: list[int], limit_s: float
) -> Bound:
    """Solve the program of `lower_bound`.

    Its variables are the arcs, then whether each point of `visited` is visited, then whether it is
    the first of its launch. Arc (a, b) leads from corner a to b, None being both ends.
    """
    e, t = logs[:, 0], logs[:, 1]
    arcs: list[tuple[int | None, int | None]] = [(None, i) for i in corners]
    arcs += [(i, None) for i in corners]
    arcs += [(i, j) for i in corners for j in corners if e[i] < e[j] and t[i] > t[j]]
    ends = [truth.reference[0] if b is None else e[b] for _, b in arcs]
    areas = [
        0.0 if a is None else (end - e[a]) * (truth.reference[1] - t[a])
        for (a, _), end in zip(arcs, ends, strict=True)
    ]
    n, m = len(arcs), len(visited)
    visit_at = {i: n + k for k, i in enumerate(visited)}
    first_at = {i: n + m + k for k, i in enumerate(visited)}
    rows: list[tuple[dict[int, float], float, float]] = [
        ({k: area / truth.whole for k, area in enumerate(areas)}, 1 - WITHIN, np.inf),
        ({k: 1.0 for k, (a, _) in enumerate(arcs) if a is None}, 1.0, 1.0),
    ]
    into: dict[int, list[int]] = {i: [] for i in corners}
    out: dict[int, list[int]] = {i: [] for i in corners}
    for k, (a, b) in enumerate(arcs):
        if a is not None:
            out[a].append(k)
        if b is not None:
            into[b].append(k)
    for i in corners:
        flow = dict.fromkeys(into[i], 1.0) | dict.fromkeys(out[i], -1.0)
        rows.append((flow, 0.0, 0.0))
        rows.append((dict.fromkeys(into[i], 1.0) | {visit_at[i]: -1.0}, -np.inf, 0.0))
    for i in visited:
        launch = truth.points[i].configuration.launch
        firsts = [first_at[j] for j in visited if truth.points[j].configuration.launch == launch]
        rows.append(({visit_at[i]: 1.0} | dict.fromkeys(firsts, -1.0), -np.inf, 0.0))
        rows.append(({first_at[i]: 1.0, visit_at[i]: -1.0}, -np.inf, 0.0))
    cost = truth.cost
    power_W = np.array([truth.points[i].power_W for i in visited])
    joules = np.concatenate(
        [
            np.zeros(n),
            (cost.settle_s + cost.window_s) * power_W,
            cost.launch_s * cost.launch_power * power_W,
        ]
    )
    at = [(r, k, value) for r, (row, _, _) in enumerate(rows) for k, value in row.items()]
    r, k, value = (list(column) for column in zip(*at, strict=True))
    matrix = coo_array((value, (r, k)), shape=(len(rows), n + 2 * m)).tocsr()
    found = milp(
        joules,
        integrality=np.ones(n + 2 * m),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, [row[1] for row in rows], [row[2] for row in rows]),
        options={"time_limit": limit_s, "mip_rel_gap": 1e-6},
    )
    if found.status == 0:
        return Bound(float(found.fun) / 1000, exact=True)
    return Bound(float(found.mip_dual_bound or 0.0) / 1000, exact=False)
