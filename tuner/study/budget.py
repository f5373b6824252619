"""Limits of a search, and what a probe is expected to cost them.

`Budget` says which limit a further probe would reach. `CostEstimate` is the planner's guess of a
probe's energy (`tuner.problem.problem.ProbeCost`), corrected by what probes used.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.answer.state import spent_kJ
from tuner.problem.problem import Problem
from tuner.problem.settings import LEAST_LAUNCHES, SearchSettings, StopReason
from tuner.search_spaces.configuration import Configuration
from tuner.workload.records.probe import ProbeRecord


@dataclass(frozen=True)
class SearchStatus:
    """State of a search as far as its limits need it.

    Attributes:
        marks: of the meter of these joules (`MeterInfo.marks`).
        enough_launches: `LEAST_LAUNCHES` distinct launches are measured, or all.
    """

    records: Sequence[ProbeRecord]
    in_flight: int
    in_flight_kJ: float
    elapsed_s: float
    enough_launches: bool
    marks: Mapping[str, bool]
    job_kJ: float | None = None

    @property
    def probes(self) -> int:
        """Number of probes made and in flight; cancelled ones do not count."""
        made = sum(r.failure is None or not r.failure.was_cancelled for r in self.records)
        return made + self.in_flight

    @property
    def verifying(self) -> list[ProbeRecord]:
        """Probes that launched the choice or the baseline again."""
        return [record for record in self.records if record.request.purpose == "verify"]


class Budget:
    """The limits of a search."""

    def __init__(self, settings: SearchSettings) -> None:
        self._settings = settings

    def check(
        self,
        status: SearchStatus,
        cost_kJ: float,
        *,
        searching: bool = False,
        reserve: bool = False,
        count: int = 1,
        expected_s: float | None = None,
    ) -> StopReason | None:
        """Return the limit that forbids probes of this cost, or None.

        Args:
            searching: they are probes of the search, which a share of the training's energy limits.
            reserve: leave the share of the limits untouched that is kept for verification.
            expected_s: time of the probes together; None for the median of those made.
        """
        return (
            self._probes(status, reserve, count)
            or self._energy(status, cost_kJ, reserve)
            or (self._share(status, cost_kJ) if searching else None)
            or self._time(status, reserve, count, expected_s)
        )

    def probes_left(self, status: SearchStatus, reserve: bool) -> float:
        """Return how many further probes like those so far the limits allow, about; infinite
        without a limit. Arguments as `check`."""
        launches = len({record.request.launch for record in status.records if record.measurements})
        each_kJ = _median([record.energy_J / 1000 for record in status.records if record.ok])
        each_s = _median([record.wall_s for record in status.records if record.ok])
        left = [
            self._count_left(status, reserve),
            self._kJ_left(status, reserve) / each_kJ if each_kJ else math.inf,
            self._s_left(status, reserve) / each_s if each_s else math.inf,
            max(self._share_left_kJ(status) / each_kJ, LEAST_LAUNCHES - launches)
            if each_kJ
            else math.inf,
        ]
        return max(min(left), 0.0)

    def _count_left(self, status: SearchStatus, reserve: bool) -> float:
        limit = self._settings.max_probes
        due = max(0, self._settings.reserved_probes - len(status.verifying)) if reserve else 0
        return math.inf if limit is None else limit - due - status.probes

    def _probes(self, status: SearchStatus, reserve: bool, count: int) -> StopReason | None:
        limit = self._settings.max_probes
        if limit is None or count <= self._count_left(status, reserve):
            return None
        spare = limit - status.probes
        reserved = spare if spare >= count else 0
        return StopReason("max_probes", {"max_probes": limit, "reserved": reserved})

    def _kJ_left(self, status: SearchStatus, reserve: bool) -> float:
        limit_kJ = self._settings.probe_budget_kJ
        if limit_kJ is None:
            return math.inf
        reserved_kJ = 0.0
        if reserve:
            kept_kJ = self._settings.kept_share * limit_kJ
            reserved_kJ = max(0.0, kept_kJ - spent_kJ(status.verifying))
        return limit_kJ - spent_kJ(status.records) - status.in_flight_kJ - reserved_kJ

    def _energy(self, status: SearchStatus, cost_kJ: float, reserve: bool) -> StopReason | None:
        limit_kJ = self._settings.probe_budget_kJ
        left_kJ = self._kJ_left(status, reserve=False)
        free_kJ = self._kJ_left(status, reserve)
        if limit_kJ is None or (left_kJ > 0 and cost_kJ <= free_kJ):
            return None
        figures = {
            "needed_kJ": cost_kJ,
            "left_kJ": left_kJ,
            "probe_budget_kJ": limit_kJ,
            "reserved_kJ": min(left_kJ - free_kJ, max(left_kJ, 0.0)),
            **{name: int(mark) for name, mark in status.marks.items()},
        }
        return StopReason("probe_budget", figures)

    def _share_left_kJ(self, status: SearchStatus) -> float:
        share, job_kJ = self._settings.search_share, status.job_kJ
        if share is None or job_kJ is None:
            return math.inf
        return share * job_kJ - spent_kJ(status.records) - status.in_flight_kJ

    def _share(self, status: SearchStatus, cost_kJ: float) -> StopReason | None:
        share, job_kJ = self._settings.search_share, status.job_kJ
        if share is None or job_kJ is None or not status.enough_launches:
            return None
        if cost_kJ <= self._share_left_kJ(status):
            return None
        figures = {
            "share": share,
            "job_kJ": job_kJ,
            "spent_kJ": spent_kJ(status.records) + status.in_flight_kJ,
            "needed_kJ": cost_kJ,
            **{name: int(mark) for name, mark in status.marks.items()},
        }
        return StopReason("search_share", figures)

    def _s_left(self, status: SearchStatus, reserve: bool) -> float:
        limit_s = self._settings.search_s
        if limit_s is None:
            return math.inf
        reserved_s = 0.0
        if reserve:
            used_s = math.fsum(record.wall_s for record in status.verifying)
            reserved_s = max(0.0, self._settings.kept_share * limit_s - used_s)
        return limit_s - reserved_s - status.elapsed_s

    def _time(
        self, status: SearchStatus, reserve: bool, count: int, expected_s: float | None
    ) -> StopReason | None:
        limit_s = self._settings.search_s
        if expected_s is None:
            expected_s = count * _median([record.wall_s for record in status.records if record.ok])
        if limit_s is None or expected_s <= self._s_left(status, reserve):
            return None
        return StopReason("time", {"search_s": limit_s})


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


class CostEstimate:
    """Expected energy of probes, learned from those that were made."""

    def __init__(self, problem: Problem, records: Sequence[ProbeRecord]) -> None:
        self._problem, self._records = problem, records
        self._ratios: list[float] = []
        self._built_s: dict[str, float] = {}  # by host

    def learn(self, record: ProbeRecord, planned_kJ: float) -> None:
        """Compare the consumption of a probe with the planner's prediction, and add up builds."""
        self._built_s[record.host] = self._built_s.get(record.host, 0.0) + record.built_s
        if record.ok and planned_kJ > 0:
            self._ratios.append(record.energy_J / 1000 / planned_kJ)

    @property
    def built_s(self) -> float:
        """Seconds of builds that probes waited for, of the host that took longest.

        Hosts build at the same time, so that the sum would leave out more than was waited.
        """
        return max(self._built_s.values(), default=0.0)

    @property
    def used_over_planned(self) -> float:
        """Median ratio of the energy that probes used to the planner's prediction."""
        return statistics.median(self._ratios) if self._ratios else 1.0

    def further_kJ(self, planned_kJ: float) -> float:
        """Return the expected energy of further settings of a running launch."""
        return self.used_over_planned * planned_kJ

    @property
    def launch_kJ(self) -> float:
        """Energy of a probe outside its windows: the median so far, 0 before any."""
        each_J = [_beside_windows(record)[0] for record in self._records if record.measurements]
        return max(statistics.median(each_J), 0.0) / 1000 if each_J else 0.0

    def expected_kJ(
        self, configurations: Sequence[Configuration], planned_kJ: float = math.nan
    ) -> float:
        """Return the expected energy of a probe, kilojoules.

        It is taken from an earlier probe of the same launch; else from the planner's prediction
        times how far such predictions were off; else from what probes used per setting visited;
        before any probe, from the analytic model; 0 if there is none. `planned_kJ` may be NaN.
        """
        count = len(configurations)
        same = [
            record
            for record in self._records
            if record.request.launch == configurations[0].launch and record.measurements
        ]
        measured = same or [record for record in self._records if record.measurements]
        if not same and math.isfinite(planned_kJ):
            return planned_kJ * self.used_over_planned
        if measured:
            each_J = [
                _beside_windows(record)[0]
                + count * statistics.fmean(m.energy_J for m in record.measurements)
                for record in measured
            ]
            return statistics.median(each_J) / 1000
        if self._problem.prior is None:
            return 0.0
        predicted = self._problem.prior.predict(list(configurations))
        cost = self._problem.cost
        visits_J = cost.visit_J(predicted.power_W, predicted.step_time_s)
        return float(cost.launch_J(predicted.power_W)[0] + visits_J.sum()) / 1000

    def expected_s(self, configurations: Sequence[Configuration]) -> float:
        """Return the seconds of a probe, from earlier ones of its launch, else of any; 0 before."""
        measured = [record for record in self._records if record.measurements]
        launch = configurations[0].launch
        same = [record for record in measured if record.request.launch == launch] or measured
        if not same:
            return 0.0
        each_s = [
            _beside_windows(record)[1]
            + len(configurations) * statistics.fmean(m.window_s for m in record.measurements)
            for record in same
        ]
        return statistics.median(each_s)


def _beside_windows(record: ProbeRecord) -> tuple[float, float]:
    windows = record.measurements
    used_J = math.fsum(m.energy_J for m in windows)
    taken_s = math.fsum(m.window_s for m in windows)
    return record.energy_J - used_J, record.wall_s - taken_s
