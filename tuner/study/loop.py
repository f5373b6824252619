"""The loop of a search: measure the baseline, then plan, submit, wait and record, until it ends.

Every finished record goes to the trace first, to the study second and then to the callbacks. A
probe that is expected to cost more than is left is not started, and a share of each limit is
reserved for launching the choice and the baseline again once the search is over. No failure of a
probe ends the loop; an interrupt ends it, and what was recorded stays recorded.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from threadpoolctl import threadpool_limits

from tuner.executors.base import Executor
from tuner.formatting import percent, varying_knobs
from tuner.problem.probe_cost import inspected_s, probe_limits
from tuner.problem.problem import in_job_steps, steps_a_job_step
from tuner.problem.run_folder import RunFolder
from tuner.problem.settings import LEAST_LAUNCHES
from tuner.problem.stop_reason import LIMITS, StopReason
from tuner.problem.study_spec import StudySpec
from tuner.results.state import StudyState
from tuner.search.planner import ProbePlan, ProbePlanner
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.storage import StorageError, storage_trouble
from tuner.study.budget import Budget, CostEstimate, SearchStatus
from tuner.study.callbacks import Callback, Notify, Progress
from tuner.study.recorder import StudyRecorder
from tuner.study.rules import (
    baseline_due,
    front_to_beat,
    further_launches,
    node_failures,
    not_repaid,
    peak_limit_of,
    question_of,
    reason_to_stop,
    with_next_probe,
)
from tuner.workload.limits import ProbeLimits
from tuner.workload.probe import Measurement, ProbeRecord, ProbeRequest
from tuner.workload.trace import TraceWriter, compact, read_phase

#: Numbers of launch settings after which the baseline is launched once more.
REPEAT_AFTER = (4, 7)


@dataclass(frozen=True)
class _Flight:
    request: ProbeRequest
    cost_kJ: float
    planned_kJ: float


class SearchLoop:
    """The search of one session; earlier ones took `spent_s` and made `records`, in job steps."""

    def __init__(
        self,
        *,
        spec: StudySpec,
        executor: Executor,
        sampler: ProbePlanner,
        recorder: StudyRecorder,
        records: Sequence[ProbeRecord],
        trace: TraceWriter | None = None,
        callbacks: Sequence[Callback] = (),
        notify: Notify = lambda event: None,
        first_number: int = 0,
        spent_s: float = 0.0,
    ) -> None:
        self.records, self._earlier = list(records), len(records)
        self._spec, self._problem, self._settings = spec, spec.problem, spec.settings
        self._executor, self._sampler, self._recorder = executor, sampler, recorder
        self._trace, self._callbacks, self._notify = trace, callbacks, notify
        self._number, self._spent_s = first_number, spent_s
        self._began_s = executor.now_s()
        self._flying: dict[str, _Flight] = {}
        self._budget, self._cost = Budget(spec.settings), CostEstimate(spec.problem)
        self._stopped: StopReason | None = None
        executor.next_settings = self._next_settings
        sampler.cost = spec.problem.cost.learned(self.records)
        self.state = StudyState(spec, self.records)
        self._ask()
        self._verifies = spec.settings.verify and spec.unverified is None
        self._varying = varying_knobs(spec.problem.candidates.configurations)

    # -- what is used and what is left -----------------------------------------------------------

    @property
    def elapsed_s(self) -> float:
        """Seconds of this session and the earlier ones, on the executor's clock."""
        return self._spent_s + self._executor.now_s() - self._began_s

    def _measured_launches(self, count: int) -> bool:
        measured = {r.request.launch for r in self.records if r.measurements}
        return len(measured) >= min(count, len(self._problem.candidates.launches))

    @property
    def _job_kJ(self) -> float | None:
        for record in self.records if self._problem.length else ():
            if record.request.purpose == "baseline" and record.measurements:
                return record.measurements[0].energy_per_step_J * self._problem.steps / 1000
        return None

    def _limit(
        self,
        cost_kJ: float,
        *,
        searching: bool = False,
        repeating: bool = False,
        count: int = 1,
        expected_s: float | None = None,
    ) -> StopReason | None:
        # Return the limit that forbids probes of this cost (`Budget.check`), or None. The search
        # leaves the reserve of a verification that would launch something now; repeats of today
        # leave it in any case. `tuner runs stop` forbids all of them.
        run_dir = self._spec.run_dir
        if run_dir is not None and RunFolder(run_dir).stop_file.exists():
            return StopReason("stopped")
        status = SearchStatus(
            records=self.records,
            in_flight=len(self._flying),
            in_flight_kJ=math.fsum(flight.cost_kJ for flight in self._flying.values()),
            elapsed_s=self.elapsed_s,
            enough_launches=self._measured_launches(LEAST_LAUNCHES),
            estimated=self._executor.meter.estimated,
            job_kJ=self._job_kJ,
            twin=self._executor.meter.twin,
        )
        check = partial(self._budget.check, status, cost_kJ, searching=searching, count=count)
        if searching and self._verifies:
            limit = check(reserve=True, expected_s=expected_s)
            if limit and (repeating or further_launches(self.state, self.expected_kJ)[1]):
                return limit
        return check(expected_s=expected_s)

    def expected_kJ(
        self, configurations: Sequence[Configuration], planned_kJ: float = math.nan
    ) -> float:
        """Return what a probe is expected to use (`CostEstimate.expected_kJ`)."""
        return self._cost.expected_kJ(self.records, configurations, planned_kJ)

    def _limits(self, configurations: Sequence[Configuration], extendable: bool) -> ProbeLimits:
        # Once two probes have ended well, the whole is at most five times the longest of them.
        settings, job = self._settings, self._problem.job
        visits = self._sampler.max_live if extendable else len(configurations)
        limits = probe_limits(
            job,
            self._problem.prior,
            configurations,
            settings.window,
            visits=visits,
            first_step_s=settings.first_step_limit_s,
            step_s=settings.step_limit_s,
            probe_s=settings.time_limit_s,
        )
        walls = [record.wall_s for record in self.records if record.ok]
        if len(walls) < 2:
            return limits
        sweep_s = extendable * visits * (settings.window.settle_s + settings.window.max_s)
        least_s = limits.first_step_s if inspected_s(job) else 60.0
        usual_s = max(least_s, 5 * max(walls)) + sweep_s
        return replace(limits, probe_s=min(limits.probe_s, usual_s))

    # -- what to run next ------------------------------------------------------------------------

    def _next(self) -> tuple[ProbeRequest, float, str] | None:
        flying = any(f.request.purpose == "baseline" for f in self._flying.values())
        baseline = None if flying else baseline_due(self._problem, self.records)
        if baseline is not None and not self._limit(self.expected_kJ([baseline])):
            lighter = baseline != self._problem.baseline
            why = "today" + ", because the default runs out of memory" * lighter
            return self._request([baseline], "baseline"), math.nan, why
        if self._repeats_baseline() and not flying:
            today = self.state.today
            assert today is not None
            return self._request([today], "verify"), math.nan, "today again"
        if not self._stopped:
            plan = self._planned()
            if plan is not None:
                request = self._request(plan.configurations, "search", extendable=plan.extendable)
                return request, plan.first_J / 1000, _why(plan)
        return None

    def _repeats_baseline(self) -> bool:
        # Another launch tells how far launches differ, and counts for the certainty of the choice.
        today = self.state.today
        launches = self._problem.candidates.launches
        if today is None or not self._verifies or len(launches) < 2:  # of one launch, one effect
            return False
        due = sum(map(self._measured_launches, REPEAT_AFTER))
        made = sum(r.request.purpose == "verify" for r in self.records)
        if made >= due or self._flying:
            return False
        both_kJ = 2 * self.expected_kJ([today])
        return not self._limit(both_kJ, searching=True, repeating=True, count=2)

    def _request(
        self, configurations: Sequence[Configuration], purpose: str, *, extendable: bool = False
    ) -> ProbeRequest:
        limits = self._limits(configurations, extendable)
        front: tuple[tuple[float, float], ...] = ()
        if purpose == "search":  # whatever else is measured is compared, or is the choice
            steps = self._problem.steps * steps_a_job_step(configurations[0], self._problem.job)
            front = front_to_beat(self._spec.constraints, self.state.front, steps)
        return ProbeRequest(
            probe_id=f"p{self._number:04d}",
            launch=configurations[0].launch,
            live=tuple(configuration.live for configuration in configurations),
            window=self._settings.window_of(purpose),
            time_limit_s=limits.probe_s,
            first_step_limit_s=limits.first_step_s,
            step_limit_s=limits.step_s,
            purpose=purpose,
            extendable=extendable,
            front=front,
        )

    def _planned(self) -> ProbePlan | None:
        # Return the sampler's next probe if it is worth its cost and affordable. If not, and no
        # result in flight can change that, `_stopped` is set.
        self._stopped = node_failures(self.records, self._earlier)
        self._stopped = self._stopped or self._limit(0.0, searching=True)
        sampler, study = self._sampler, self._recorder.study
        if limit := self._stopped:
            if limit.kind in LIMITS and sampler.estimates_gain:
                self._stopped = with_next_probe(
                    limit, self._plan(), self.expected_kJ, sampler.question
                )
            return None
        with storage_trouble(self._recorder.where):
            if self._flying and sampler.better_to_wait(study):
                return None
        plan = self._plan()
        if plan is None:
            if not self._flying:
                unsafe = sampler.peak_limit is not None
                self._stopped = StopReason("unsafe" if unsafe else "exhausted")
            return None
        cost_kJ = self.expected_kJ(plan.configurations, plan.cost_J / 1000)
        if reason := reason_to_stop(self.state, plan, cost_kJ):
            if not self._flying:
                self._stopped = reason
            return None
        if limit := self._limit(cost_kJ, searching=True):
            self._stopped = with_next_probe(limit, plan, self.expected_kJ, sampler.question)
        return None if self._stopped else plan

    def _plan(self) -> ProbePlan | None:
        with threadpool_limits(limits=1), storage_trouble(self._recorder.where):
            return self._sampler.plan(self._recorder.study)

    # -- probes of a later phase -----------------------------------------------------------------

    def affords(self, configuration: Configuration) -> bool:
        """Return whether the limits allow a further launch of this."""
        cost_s = self._cost.expected_s(self.records, [configuration])
        return not self._limit(self.expected_kJ([configuration]), expected_s=cost_s)

    def verify(self, configuration: Configuration, why: str) -> ProbeRecord:
        """Launch a configuration again, alone, and return its record. Raises as `run`."""
        with self._interruptible():
            self._start(self._request([configuration], "verify"), math.nan, why)
            while self._flying:
                record = self._executor.wait()
                if record is not None:
                    self._finish(record)
        return self.records[-1]

    # -- the loop --------------------------------------------------------------------------------

    def run(self) -> StopReason:
        """Search until the end, and return why it ended.

        A KeyboardInterrupt comes after what was in flight is marked interrupted. If the disk or the
        storage failed (InputError), the trace holds every finished probe.
        """
        with self._interruptible():
            while True:
                self._fill()
                if not self._flying:
                    return self._stopped or StopReason("exhausted")
                record = self._executor.wait()
                if record is not None:
                    self._finish(record)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._executor.close()
            with contextlib.suppress(InputError):  # nor can a storage that is gone record it
                self._recorder.interrupt("the driver was stopped")
            raise

    def _fill(self) -> None:
        while self._executor.in_flight < max(1, self._executor.capacity):
            step = self._next()
            if step is None:
                return
            self._start(*step)

    def _start(self, request: ProbeRequest, planned_kJ: float, why: str) -> None:
        cost_kJ = self.expected_kJ(request.configurations(), planned_kJ)
        self._number += 1
        self._flying[request.probe_id] = _Flight(request, cost_kJ, planned_kJ)
        event = replace(self._event(), kind="started", message=why, request=request)
        self._recorder.start(request)
        self._tell(event)
        self._executor.submit(request)

    def _ask(self) -> None:
        peak = peak_limit_of(self.state)
        self._sampler.peak_limit = peak
        self._sampler.question = question_of(self.state, peak)

    def _next_settings(
        self, request: ProbeRequest, measurements: Sequence[Measurement]
    ) -> tuple[Settings, ...]:
        flight = self._flying.get(request.probe_id)
        if flight is None or self._stopped or not measurements:
            return ()
        so_far = ProbeRecord(request, tuple(measurements), self._executor.meter)
        so_far = in_job_steps(so_far, self._problem.job)
        try:
            with threadpool_limits(limits=1):
                return self._plan_continuation(flight, so_far)
        except StorageError as error:  # the launch ends, and its record is kept in the trace
            self.note(f"{request.probe_id} is not continued: {error}")
            return ()

    def _plan_continuation(self, flight: _Flight, so_far: ProbeRecord) -> tuple[Settings, ...]:
        request, measurements = so_far.request, so_far.measurements
        sampler, study = self._sampler, self._recorder.study
        with storage_trouble(self._recorder.where):
            plan = sampler.plan_continuation(study, so_far)
        if plan is None:
            return ()
        used_kJ = self._cost.launch_kJ(self.records)
        used_kJ += math.fsum(m.energy_J for m in measurements) / 1000
        cost_kJ = self._cost.used_over_planned * plan.cost_J / 1000
        if not_repaid(self.state, plan, cost_kJ):
            return ()
        more_kJ = max(0.0, used_kJ - flight.cost_kJ) + cost_kJ
        if self._limit(more_kJ, searching=True, count=0):
            return ()
        self._recorder.start(request, plan.live)
        self._flying[request.probe_id] = replace(
            flight,
            request=replace(request, live=(*request.live, *plan.live)),
            cost_kJ=max(flight.cost_kJ, used_kJ) + cost_kJ,
            planned_kJ=flight.planned_kJ + plan.cost_J / 1000,
        )
        settings = ", ".join(live.short for live in plan.live)
        self.note(f"{request.probe_id} continues with {settings} ({_why(plan)})")
        return plan.live

    def _finish(self, record: ProbeRecord) -> None:
        flight = self._flying.get(record.request.probe_id)
        if flight is None:
            return
        if self._trace is not None:
            self._trace.append(record)
        record = in_job_steps(record, self._problem.job)
        # Of what later phases compare step by step, everything is kept.
        self.records.append(compact(record) if record.request.purpose == "search" else record)
        self._sampler.cost = self._problem.cost.learned(self.records)
        self.state = StudyState(self._spec, self.records)
        self._ask()
        del self._flying[record.request.probe_id]
        self._cost.learn(record, flight.planned_kJ)
        event = replace(self._event(), kind="finished", record=record, front=self.state.front)
        self._recorder.finish(record)
        self._tell(event)

    def note(self, sentence: str, *, detail: bool = False) -> None:
        """Pass a sentence for the user to the callbacks."""
        self._tell(Progress("note", self._executor.meter, message=sentence, detail=detail))

    def _tell(self, event: Progress) -> None:
        self._notify(event)
        for callback in self._callbacks:
            callback.happened(event)

    def _event(self) -> Progress:
        return Progress(
            "note",
            self._executor.meter,
            spent_kJ=self.state.spent_kJ,
            probe_budget_kJ=self._settings.probe_budget_kJ,
            probes=len(self.records),
            max_probes=self._settings.max_probes,
            search_s=self._settings.search_s,
            elapsed_s=self.elapsed_s,
            varying=self._varying,
            places=getattr(self._executor, "places", None),
            phase=partial(read_phase, run_dir) if (run_dir := self._spec.run_dir) else None,
        )


def _why(plan: ProbePlan) -> str:
    if math.isfinite(plan.expected_gain):
        return f"{plan.reason}: {percent(plan.expected_gain)} of the front's hypervolume"
    return plan.reason
