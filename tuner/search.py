"""The loop of a study: measure the baseline, then plan, submit, wait, record, tell, until enough.

Every finished record goes to the trace first and to the study second. A probe that is expected to
cost more than is left is not started, and a share of each limit is kept to measure the front again
once the search is over. Nothing that goes wrong with a probe ends the loop; an interrupt ends it,
and what was told stays told.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from search_spaces.configuration import Configuration, Settings
from search_spaces.errors import InputError
from tuner.answer import measured_points, spent_kJ
from tuner.decide import Constraints, decide, front_of
from tuner.executors import Executor
from tuner.job_steps import in_job_steps
from tuner.problem import Problem
from tuner.progress import Progress
from tuner.result import Point
from tuner.sampler import CandidateSampler, ProbePlan
from tuner.settings import SearchSettings
from tuner.storage import StorageError
from tuner.study import StudyBook
from tuner.told import NO_BLAME
from tuner.wording import label, number, percent, varying_knobs
from workload.probe import Measurement, ProbeRecord, ProbeRequest
from workload.trace import TraceWriter, lean

__all__ = ["Search"]

#: Windows after which a configuration of the front has been measured often enough.
ENOUGH_WINDOWS = 3
#: Purposes that a share of every limit is kept for (`SearchSettings.kept_share`).
KEPT = ("remeasure", "verify")
#: A baseline that was cancelled is tried so often.
BASELINE_TRIES = 2
#: So many probes in a row that fail for the node's sake end the search: the next would, too.
NODE_TRIES = 3


@dataclass(frozen=True)
class _Flight:
    """A probe that runs.

    Attributes:
        request: what was asked.
        cost_kJ: what it is expected to use; 0 where nothing is known yet.
        planned_kJ: the sampler's own prediction of what it was told to visit; NaN where it made
            none.
    """

    request: ProbeRequest
    cost_kJ: float
    planned_kJ: float


class Search:
    """One session of a study.

    Args:
        problem: what is searched.
        executor: runs the probes.
        sampler: plans them.
        book: the study.
        writer: the trace.
        settings: what may be spent.
        constraints: what the user asked; the choice under them is measured again first.
        records: probes of earlier sessions; the list is appended to.
        first_number: number of the next probe.
        spent_s: seconds of earlier sessions.
        notify: told of everything that happens.
    """

    def __init__(
        self,
        *,
        problem: Problem,
        executor: Executor,
        sampler: CandidateSampler,
        book: StudyBook,
        writer: TraceWriter,
        settings: SearchSettings,
        constraints: Constraints,
        records: list[ProbeRecord],
        first_number: int = 0,
        spent_s: float = 0.0,
        notify: Callable[[Progress], None] = lambda event: None,
    ) -> None:
        self.records, self._earlier = records, len(records)
        self._problem, self._executor, self._sampler = problem, executor, sampler
        self._book, self._writer = book, writer
        self._settings, self._constraints, self._notify = settings, constraints, notify
        self._number, self._spent_s = first_number, spent_s
        self._began_s = executor.now_s()
        self._flying: dict[str, _Flight] = {}
        self._ratios: list[float] = []  # what probes used over what the sampler predicted
        self._stopped = ""
        executor.go_on = self._go_on
        sampler.cost = problem.cost.learned(records)
        self._varying = varying_knobs(problem.candidates.configurations)

    # -- what is used and what is left -----------------------------------------------------------

    @property
    def elapsed_s(self) -> float:
        """Seconds of this session and the earlier ones, on the executor's clock."""
        return self._spent_s + self._executor.now_s() - self._began_s

    @property
    def _probes(self) -> int:
        """Probes made and in flight. What was cancelled was no probe."""
        done = sum(r.failure is None or r.failure.kind != "cancelled" for r in self.records)
        return done + len(self._flying)

    @property
    def _enough_launches(self) -> bool:
        """Whether the least number of distinct launches is measured."""
        launches = {r.request.launch for r in self.records if r.measurements}
        every = len(self._problem.candidates.launches)
        return len(launches) >= min(self._settings.min_probes, every)

    def _limit(self, cost_kJ: float, keep: Sequence[str], count: int = 1) -> str:
        """Why a probe of this expected cost may not start; empty where it may.

        Args:
            cost_kJ: expected joules; 0 where unknown.
            keep: leave the shares that are kept for probes of these purposes (`KEPT`).
            count: ask for so many probes, of this cost together.
        """
        settings = self._settings
        made = {name: [r for r in self.records if r.request.purpose == name] for name in keep}
        if settings.max_probes is not None:
            due = sum(
                max(0, settings.reserved_probes(name) - len(again)) for name, again in made.items()
            )
            if self._probes + count > settings.max_probes - due:
                spare = settings.max_probes - self._probes
                if spare >= count:
                    kept = "one is" if spare == 1 else f"{spare} are"
                    return (
                        f"of the {settings.max_probes} probes that it may make the last {kept} "
                        "kept to measure the front and the choice again"
                    )
                return f"the {settings.max_probes} probes that it may make are made"
        if settings.probe_budget_kJ is not None:
            reserved = math.fsum(flight.cost_kJ for flight in self._flying.values())
            left = settings.probe_budget_kJ - spent_kJ(self.records) - reserved
            kept_kJ = math.fsum(
                max(0.0, settings.kept_share(name) * settings.probe_budget_kJ - spent_kJ(again))
                for name, again in made.items()
            )
            if left <= 0 or cost_kJ > left - kept_kJ:
                estimated = label(self._executor.meter.estimated)
                return (
                    f"the next probe would take about {number(cost_kJ)} kJ and {number(left)} kJ "
                    f"of the probe budget of {number(settings.probe_budget_kJ)} kJ are left"
                    f"{estimated}"
                )
        if settings.search_s is not None:
            last = [record.wall_s for record in self.records if record.ok]
            expected = statistics.median(last) if last else 0.0
            # The least number of launches comes before measuring any of them again.
            kept_s = 0.0
            if self._enough_launches:
                kept_s = math.fsum(
                    max(
                        0.0,
                        settings.kept_share(name) * settings.search_s
                        - math.fsum(record.wall_s for record in again),
                    )
                    for name, again in made.items()
                )
            if self.elapsed_s + count * expected > settings.search_s - kept_s:
                return f"its {settings.search_s:g} s are over"
        return ""

    def _expected_kJ(self, configurations: Sequence[Configuration], planned_kJ: float) -> float:
        """What a probe is expected to use, kilojoules.

        From an earlier probe of the same launch where there is one; else the sampler's prediction
        times what such predictions were off so far; else what probes used so far a setting
        visited; before any probe, the analytic model; 0 where there is none.
        """
        count = len(configurations)
        same = [
            record
            for record in self.records
            if record.request.launch == configurations[0].launch and record.measurements
        ]
        known = same or [record for record in self.records if record.measurements]
        if not same and math.isfinite(planned_kJ):
            return planned_kJ * self._used_over_planned
        if known:
            each = [
                (record.energy_J - sum(m.energy_J for m in record.measurements))
                + count * statistics.fmean(m.energy_J for m in record.measurements)
                for record in known
            ]
            return statistics.median(each) / 1000
        if self._problem.prior is None:
            return 0.0
        said = self._problem.prior.predict(list(configurations))
        cost = self._problem.cost
        visits = cost.visit_J(said.power_W, said.step_time_s)
        return float(cost.launch_J(said.power_W)[0] + visits.sum()) / 1000

    @property
    def _used_over_planned(self) -> float:
        """What probes used over what the sampler predicted, so far."""
        return statistics.median(self._ratios) if self._ratios else 1.0

    def _time_limit_s(self, open: bool) -> float:
        """Five times the longest good probe, at least a minute, at most what the settings say; and
        room for a sweep where the probe may go on."""
        walls = [record.wall_s for record in self.records if record.ok]
        if len(walls) < 2:
            return self._settings.time_limit_s
        window = self._settings.window
        sweep_s = open * self._sampler.max_live * (window.settle_s + window.max_s)
        return min(self._settings.time_limit_s, max(60.0, 5 * max(walls)) + sweep_s)

    # -- what to run next ------------------------------------------------------------------------

    def _next(self) -> tuple[ProbeRequest, float, str] | None:
        """The next probe, its planned kilojoules and why; None to wait, or to end when idle."""
        if self._baseline_due():
            baseline = self._problem.baseline
            assert baseline is not None
            if not self._limit(self._expected_kJ([baseline], math.nan), keep=()):
                return self._request([baseline], "baseline"), math.nan, "the baseline"
        if not self._stopped:
            plan = self._planned()
            if plan is not None:
                request = self._request(plan.configurations, "search", open=plan.open)
                return request, plan.first_J / 1000, _why(plan)
        if self._flying or not self._stopped or self._node_trouble():
            return None  # what is in flight may change the front
        again = self._again()
        if again:
            return self._request(again, "remeasure"), math.nan, "the front, measured again"
        return None

    def _request(
        self, configurations: Sequence[Configuration], purpose: str, *, open: bool = False
    ) -> ProbeRequest:
        return ProbeRequest(
            probe_id=f"p{self._number:04d}",
            launch=configurations[0].launch,
            live=tuple(configuration.live for configuration in configurations),
            window=self._settings.window,
            time_limit_s=self._time_limit_s(open),
            purpose=purpose,
            open=open,
        )

    def _baseline_due(self) -> bool:
        if self._problem.baseline is None:
            return False
        tried = [record for record in self.records if record.request.purpose == "baseline"]
        flying = any(f.request.purpose == "baseline" for f in self._flying.values())
        settled = any(
            record.measurements or (record.failure and record.failure.kind not in NO_BLAME)
            for record in tried
        )
        return not (flying or settled or len(tried) >= BASELINE_TRIES)

    def _node_trouble(self) -> str:
        """Why nothing can be measured here any more; empty where the node is well enough."""
        failures = [record.failure for record in self.records[-NODE_TRIES:]]
        last = failures[-1] if failures else None
        if last is None or len(self.records) - self._earlier < NODE_TRIES:
            return ""
        if any(failure is None or failure.kind != "node" for failure in failures):
            return ""
        return f"{NODE_TRIES} probes in a row failed for the node's sake: {last.message}"

    def _planned(self) -> ProbePlan | None:
        """The sampler's next probe, if it is worth it and affordable; sets `_stopped` if not."""
        if why := self._node_trouble():
            self._stopped = f"The search ended because {why}."
            return None
        measured = any(record.measurements for record in self.records)
        keep = KEPT if measured else ()
        reason = self._limit(0.0, keep=keep)
        if reason:
            self._stopped = f"The search ended because {reason}."
            return None
        sampler, study = self._sampler, self._book.study
        waits = self._book.patiently(lambda: sampler.better_to_wait(study))
        if waits and self._flying:  # not for what another driver of this study has in flight
            return None
        plan = self._book.patiently(lambda: sampler.plan(study))
        if plan is None:
            if not self._flying:
                self._stopped = "The search ended because every candidate was tried."
            return None
        cost_kJ = self._expected_kJ(plan.configurations, plan.cost_J / 1000)
        if self._enough_launches and (why := self._not_worth(plan, cost_kJ)):
            if not self._flying:
                reason = f"nothing left is worth its joules: the best probe {why}"
                self._stopped = f"The search ended because {reason}."
            return None
        reason = self._limit(cost_kJ, keep=keep)
        if reason:
            self._stopped = f"The search ended because {reason}."
            return None
        return plan

    def _not_worth(self, plan: ProbePlan, cost_kJ: float) -> str:
        """Why a probe is not worth its joules, of the probe; empty where it is.

        With a job, what it is expected to take off the front's energy, times what the whole
        training would use as it would be recommended now, has to repay it; a recording says nothing
        of a training to come, and there the front's hypervolume tells.
        """
        if self._problem.job is None or not math.isfinite(plan.expected_saving):
            if plan.expected_gain >= self._settings.least_gain:
                return ""
            return f"is expected to add {percent(plan.expected_gain)} to the front's hypervolume"
        points = measured_points(self.records, self._problem.steps)
        front = front_of(points)
        if not front:
            return ""
        best, _ = decide(points, front, self._constraints)
        whole_kJ = (best or front[-1]).energy_to_solution_kJ
        # A fall of log energy by s leaves exp(-s) of it.
        saved_kJ = -math.expm1(-plan.expected_saving) * whole_kJ
        if saved_kJ >= cost_kJ:
            return ""
        return (
            f"is expected to take {number(cost_kJ)} kJ and to save {number(saved_kJ)} kJ of the "
            "training"
        )

    def _again(self) -> list[Configuration]:
        """Settings of one launch to measure again: the choice first, then the least measured."""
        made = [record for record in self.records if record.request.purpose == "remeasure"]
        settings = self._settings
        allowed = settings.reserved_probes("remeasure")
        allowed = allowed or max(1, round(settings.remeasure_share * len(self.records)))
        if len(made) >= allowed:
            return []
        points = measured_points(self.records, self._problem.steps)
        front = front_of(points)
        best, _ = decide(points, front, self._constraints)
        failed = {record.request.launch for record in made if not record.ok}
        wanted = [p for p in front if p.windows < ENOUGH_WINDOWS]
        if best is not None and best.windows < ENOUGH_WINDOWS and best not in wanted:
            wanted.append(best)
        wanted = [p for p in wanted if p.configuration.launch not in failed]
        if not wanted:
            return []
        first = min(wanted, key=lambda p: (p.windows, p is not best))
        launch = first.configuration.launch
        together = [p.configuration for p in wanted if p.configuration.launch == launch]
        together = together[: self._sampler.max_live]
        if first.configuration not in together:
            together[-1] = first.configuration
        if self._limit(self._expected_kJ(together, math.nan), keep=("verify",)):
            return []
        return together

    # -- probes of a later phase -----------------------------------------------------------------

    def room_for(self, configurations: Sequence[Configuration], most: int = 20) -> int:
        """How many further launches of these, one of each in turn, the limits allow; `most` at
        most."""
        each = [self._expected_kJ([configuration], math.nan) for configuration in configurations]
        for count in range(1, most + 1):
            cost_kJ = math.fsum(each[i % len(each)] for i in range(count))
            if self._limit(cost_kJ, keep=(), count=count):
                return count - 1
        return most

    def probe_now(self, configuration: Configuration, purpose: str, why: str) -> ProbeRecord | None:
        """Run one probe to its end, alone; None where the limits forbid it.

        Raises:
            KeyboardInterrupt: after the probe is marked interrupted.
            InputError: as `run`.
        """
        cost_kJ = self._expected_kJ([configuration], math.nan)
        if self._limit(cost_kJ, keep=()):
            return None
        with self._interruptible():
            self._start(self._request([configuration], purpose), math.nan, why)
            while self._flying:
                record = self._executor.wait()
                if record is not None:
                    self._finish(record)
        return self.records[-1]

    # -- the loop --------------------------------------------------------------------------------

    def run(self) -> str:
        """Run to the end; returns why it ended, as a sentence.

        Raises:
            KeyboardInterrupt: after what was in flight is marked interrupted.
            InputError: the disk or the storage failed; the trace holds every finished probe.
        """
        with self._interruptible():
            while True:
                self._fill()
                if not self._flying:
                    return self._stopped
                record = self._executor.wait()
                if record is not None:
                    self._finish(record)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """What is in flight is ended and marked interrupted, whatever stops the driver."""
        try:
            yield
        except BaseException:
            self._executor.close()
            with contextlib.suppress(InputError):  # a storage that is gone cannot be told either
                self._book.interrupt("the driver was stopped")
            raise

    def _fill(self) -> None:
        while self._executor.in_flight < max(1, self._executor.capacity):
            step = self._next()
            if step is None:
                return
            self._start(*step)

    def _start(self, request: ProbeRequest, planned_kJ: float, why: str) -> None:
        cost_kJ = self._expected_kJ(request.configurations(), planned_kJ)
        self._number += 1
        self._flying[request.probe_id] = _Flight(request, cost_kJ, planned_kJ)
        self._say("started", why, request=request)
        self._book.ask(request)
        self._executor.submit(request)

    def _go_on(
        self, request: ProbeRequest, measurements: Sequence[Measurement]
    ) -> tuple[Settings, ...]:
        """What else to visit in a launch that is up: what is worth its windows and affordable."""
        flight = self._flying.get(request.probe_id)
        if flight is None or self._stopped or not measurements:
            return ()
        so_far = ProbeRecord(request, tuple(measurements), self._executor.meter)
        so_far = in_job_steps(so_far, self._problem.job)
        try:
            return self._planned_on(flight, so_far)
        except StorageError as error:  # the launch is not kept up until it answers
            self.note(f"{request.probe_id} is not gone on with: {error}")
            return ()

    def _planned_on(self, flight: _Flight, so_far: ProbeRecord) -> tuple[Settings, ...]:
        request, measurements = so_far.request, so_far.measurements
        sampler, study = self._sampler, self._book.study
        plan = self._book.at_once(lambda: sampler.plan_on(study, so_far))
        if plan is None:
            return ()
        used_kJ = math.fsum(m.energy_J for m in measurements) / 1000
        cost_kJ = self._used_over_planned * plan.cost_J / 1000
        if self._enough_launches and self._not_worth(plan, cost_kJ):
            return ()
        if self._limit(max(0.0, used_kJ - flight.cost_kJ) + cost_kJ, keep=KEPT, count=0):
            return ()
        self._book.ask_more(request, plan.live)
        self._flying[request.probe_id] = replace(
            flight,
            request=replace(request, live=(*request.live, *plan.live)),
            cost_kJ=max(flight.cost_kJ, used_kJ) + cost_kJ,
            planned_kJ=flight.planned_kJ + plan.cost_J / 1000,
        )
        settings = ", ".join(live.key for live in plan.live)
        self.note(f"{request.probe_id} goes on with {settings} ({_why(plan)})")
        return plan.live

    def _finish(self, record: ProbeRecord) -> None:
        flight = self._flying.get(record.request.probe_id)
        if flight is None:
            return
        self._writer.append(record)
        record = in_job_steps(record, self._problem.job)
        # Of what later phases compare step by step, everything is kept.
        self.records.append(lean(record) if record.request.purpose == "search" else record)
        self._book.tell(record)
        self._sampler.cost = self._problem.cost.learned(self.records)
        del self._flying[record.request.probe_id]
        if record.ok and flight.planned_kJ > 0:
            self._ratios.append(record.energy_J / 1000 / flight.planned_kJ)
        front = front_of(measured_points(self.records, self._problem.steps))
        self._say("finished", record=record, front=front)

    def note(self, sentence: str) -> None:
        """Tell whoever listens."""
        self._notify(Progress("note", self._executor.meter, message=sentence))

    def _say(
        self,
        kind: str,
        message: str = "",
        *,
        request: ProbeRequest | None = None,
        record: ProbeRecord | None = None,
        front: tuple[Point, ...] = (),
    ) -> None:
        self._notify(
            Progress(
                kind,  # type: ignore[arg-type]
                self._executor.meter,
                message=message,
                request=request,
                record=record,
                front=front,
                spent_kJ=spent_kJ(self.records),
                probe_budget_kJ=self._settings.probe_budget_kJ,
                probes=len(self.records),
                max_probes=self._settings.max_probes,
                varying=self._varying,
                places=getattr(self._executor, "places", None),
            )
        )


def _why(plan: ProbePlan) -> str:
    if math.isfinite(plan.expected_gain):
        return f"{plan.reason}: {percent(plan.expected_gain)} of the front's hypervolume"
    return plan.reason
