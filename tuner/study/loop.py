"""The loop of a search: measure the baseline, then plan, submit, wait and record, until it ends.

Every finished record goes to the trace first, to the study second and then to whoever follows. A
probe that is expected to cost more than is left is not started, and a share of each limit is
reserved for launching the choice and the baseline again once the search is over. No failure of a
probe ends the loop; an interrupt ends it, and what was recorded stays recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from threadpoolctl import threadpool_limits

from tuner.answer.state import StudyState
from tuner.executors.base import Executor
from tuner.formatting import percent, varying_knobs
from tuner.problem.problem import (
    Problem,
    fixed_knobs,
    in_job_steps,
    probe_limits,
    without_unsupported,
)
from tuner.problem.run_folder import RunFolder
from tuner.problem.settings import (
    LEAST_LAUNCHES,
    LIMITS,
    QUIET_LIMIT_S,
    StopReason,
)
from tuner.problem.study_spec import StudySpec
from tuner.search.planner import PlanningState, ProbePlan, ProbePlanner
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.job import steps_a_job_step
from tuner.study.budget import Budget, CostEstimate, SearchStatus
from tuner.study.events import Notify, Progress
from tuner.study.recorder import StudyRecorder
from tuner.study.rules import (
    baseline_due,
    front_to_beat,
    idle_share,
    launches_to_verify,
    measured_job_kJ,
    measured_launches,
    node_failures,
    peak_limit_of,
    question_of,
    reason_to_stop,
    repeat_due,
    with_next_probe,
)
from tuner.workload.records.probe import Measurement, ProbeLimits, ProbeRecord, ProbeRequest
from tuner.workload.records.trace import TraceWriter, compact, read_phase

#: Number of successful probes from which their time limits a further probe, the factor by which it
#: may take longer than the longest of them, and the least limit in seconds.
LEAST_PROBES, LONGEST_FACTOR, LEAST_LIMIT_S = 2, 5.0, 60.0


def probe_request(
    state: StudyState,
    name: str,
    configurations: Sequence[Configuration],
    purpose: str,
    *,
    visits: int,
    extendable: bool = False,
) -> ProbeRequest:
    """Return the request of a probe of one launch.

    Args:
        state: of the study by now.
        visits: largest number of settings that the probe may visit, further ones included.
    """
    spec = state.spec
    limits = _time_limits(state, configurations, visits, extendable)
    front: tuple[tuple[float, float], ...] = ()
    if purpose == "search":  # whatever else is measured is compared, or is the choice
        steps = spec.problem.steps * steps_a_job_step(configurations[0], spec.problem.job)
        front = front_to_beat(spec.constraints, state.front, steps)
    return ProbeRequest(
        probe_id=name,
        launch=configurations[0].launch,
        live=tuple(configuration.live for configuration in configurations),
        window=spec.settings.window_of(purpose),
        time_limit_s=limits.probe_s,
        first_step_limit_s=limits.first_step_s,
        step_limit_s=limits.step_s,
        purpose=purpose,
        extendable=extendable,
        front=front,
    )


def _time_limits(
    state: StudyState, configurations: Sequence[Configuration], visits: int, extendable: bool
) -> ProbeLimits:
    settings, problem = state.spec.settings, state.spec.problem
    limits = probe_limits(
        problem.job,
        problem.prior,
        configurations,
        settings.window,
        visits=visits,
        first_step_s=settings.first_step_limit_s,
        step_s=settings.step_limit_s,
        probe_s=settings.time_limit_s,
    )
    walls_s = [record.wall_s for record in state.records if record.ok]
    if len(walls_s) < LEAST_PROBES:
        return limits
    further_s = extendable * visits * (settings.window.settle_s + settings.window.max_s)
    least_s = limits.first_step_s if problem.job and problem.job.first_step_s else LEAST_LIMIT_S
    usual_s = max(least_s, LONGEST_FACTOR * max(walls_s)) + further_s
    return replace(limits, probe_s=min(limits.probe_s, usual_s))


@dataclass(frozen=True)
class _Flight:
    """A running probe: its purpose, the configurations that it is to visit, and its cost."""

    purpose: str
    configurations: tuple[Configuration, ...]
    cost_kJ: float
    planned_kJ: float


class SearchLoop:
    """The search of one session.

    Args:
        records: of earlier sessions, in job steps; those sessions took `spent_s`.
        trace, recorder: get each finished record; None to keep it nowhere.
    """

    def __init__(
        self,
        *,
        spec: StudySpec,
        executor: Executor,
        planner_of: Callable[[Problem], ProbePlanner],
        records: Sequence[ProbeRecord],
        recorder: StudyRecorder | None = None,
        trace: TraceWriter | None = None,
        notify: Notify = lambda event: None,
        first_number: int = 0,
        spent_s: float = 0.0,
    ) -> None:
        self.records, self._earlier = list(records), len(records)
        self._spec, self._problem, self._settings = spec, spec.problem, spec.settings
        self._executor, self._recorder = executor, recorder
        self._planner_of, self._planner = planner_of, planner_of(spec.problem)
        self._trace, self._notify = trace, notify
        self._number, self._spent_s = first_number, spent_s
        self._began_s = executor.now_s()
        self._flying: dict[str, _Flight] = {}
        self._budget = Budget(spec.settings)
        self.cost = CostEstimate(spec.problem, self.records)
        self._stopped: StopReason | None = None
        self._quiet_left_s = QUIET_LIMIT_S
        self.state = StudyState(spec, self.records)
        self._planning = self._current_planning(self.state)
        self._verifies = spec.settings.verify and spec.unverified is None
        self._varying = varying_knobs(spec.problem.candidates.configurations)

    # -- what is used and what is left -----------------------------------------------------------

    @property
    def elapsed_s(self) -> float:
        """Seconds of all sessions on the executor's clock, less builds, which serve later ones."""
        return self._spent_s + self._executor.now_s() - self._began_s - self.cost.built_s

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
        if self._is_stopped():
            return StopReason("stopped")
        status = self._status()
        check = partial(self._budget.check, status, cost_kJ, searching=searching, count=count)
        if searching and self._verifies:
            limit = check(reserve=True, expected_s=expected_s)
            if limit and (repeating or launches_to_verify(self.state, self.cost.expected_kJ)[1]):
                return limit
        return check(expected_s=expected_s)

    def _status(self) -> SearchStatus:
        return SearchStatus(
            records=tuple(self.records),
            in_flight=len(self._flying),
            in_flight_kJ=math.fsum(flight.cost_kJ for flight in self._flying.values()),
            elapsed_s=self.elapsed_s,
            enough_launches=measured_launches(self._problem, self.records, LEAST_LAUNCHES),
            marks=self._executor.meter.marks,
            job_kJ=measured_job_kJ(self._problem, self.records),
        )

    # -- what to run next ------------------------------------------------------------------------

    def _next(self) -> tuple[ProbeRequest, float, str] | None:
        flying = any(flight.purpose == "baseline" for flight in self._flying.values())
        baseline = None if flying else baseline_due(self._problem, self.records)
        if baseline is not None and not self._limit(self.cost.expected_kJ([baseline])):
            lighter = baseline != self._problem.baseline
            why = "today" + ", because the default runs out of memory" * lighter
            request = self._request([baseline], "baseline", extendable=self._goes_on(baseline))
            return request, math.nan, why
        step = self._repeat()
        if step is None and not self._stopped:
            plan = self._planned()
            if plan is not None:
                request = self._request(plan.configurations, "search", extendable=plan.extendable)
                return request, plan.first_J / 1000, _why(plan)
            step = self._repeat(early=True) if self._flying and not self._stopped else None
        return step

    def _goes_on(self, baseline: Configuration) -> bool:
        # True if the launch of today has other settings of its live knobs.
        candidates = self._problem.candidates
        known = candidates.find(baseline) is not None
        return known and len(candidates.indices_of_launch(baseline.launch)) > 1

    def _repeat(self, *, early: bool = False) -> tuple[ProbeRequest, float, str] | None:
        # Today's launches tell how far launches and nodes differ; `early` if a node would wait.
        today, purposes = self.state.today, {each.purpose for each in self._flying.values()}
        if today is None or not self._verifies or purposes & {"baseline", "verify"}:
            return None
        due = repeat_due(self._problem, self.records, early=early)
        both_kJ = 2 * self.cost.expected_kJ([today]) if due else 0.0
        if not due or self._limit(both_kJ, searching=True, repeating=True, count=2):
            return None
        return self._request([today], "verify"), math.nan, "today again"

    def _request(
        self, configurations: Sequence[Configuration], purpose: str, *, extendable: bool = False
    ) -> ProbeRequest:
        visits = self._planner.max_live if extendable else len(configurations)
        name = f"p{self._number:04d}"
        return probe_request(
            self.state, name, configurations, purpose, visits=visits, extendable=extendable
        )

    def _planned(self) -> ProbePlan | None:
        # Return the planner's next probe if it is worth its cost and affordable. If not, and no
        # result in flight can change that, `_stopped` is set.
        self._stopped = node_failures(self.records, self._earlier) or self._limit(0, searching=True)
        planner, question = self._planner, self._planning.question
        if limit := self._stopped:
            if limit.kind in LIMITS and planner.estimates_gain:
                self._stopped = with_next_probe(
                    limit, self._plan(), self.cost.expected_kJ, question
                )
            return None
        if self._flying and planner.better_to_wait(self._planning_state()):
            return None
        plan = self._plan()
        if plan is None:
            if not self._flying:
                unsafe = self._planning.peak_limit is not None
                self._stopped = StopReason("unsafe" if unsafe else "exhausted")
            return None
        cost_kJ = self.cost.expected_kJ(plan.configurations, plan.cost_J / 1000)
        if reason := reason_to_stop(self.state, plan, cost_kJ):
            if not self._flying:
                self._stopped = reason
            return None
        if limit := self._limit(cost_kJ, searching=True):
            self._stopped = with_next_probe(limit, plan, self.cost.expected_kJ, question)
        return None if self._stopped else plan

    def _plan(self) -> ProbePlan | None:
        with threadpool_limits(limits=1):
            return self._planner.plan(self._planning_state())

    def _current_planning(self, state: StudyState) -> PlanningState:
        # What is planned from without what is in flight, made once for each finished probe.
        peak_limit = peak_limit_of(state)
        return PlanningState(
            records=tuple(self.records),
            question=question_of(state, peak_limit),
            peak_limit=peak_limit,
            cost=self._problem.cost.learned(self.records),
            idle_share=idle_share(self._problem, self.records),
        )

    def _planning_state(
        self, without: str = "", planning: PlanningState | None = None
    ) -> PlanningState:
        others = [flight for name, flight in self._flying.items() if name != without]
        in_flight = tuple(c for flight in others for c in flight.configurations)
        left = self._budget.probes_left(self._status(), reserve=self._verifies)
        return replace(planning or self._planning, in_flight=in_flight, probes_left=left)

    # -- probes of a later phase -----------------------------------------------------------------

    def limit_on(self, configuration: Configuration) -> StopReason | None:
        """Return the limit that forbids a further launch; None if it is allowed."""
        cost_s = self.cost.expected_s([configuration])
        return self._limit(self.cost.expected_kJ([configuration]), expected_s=cost_s)

    def verify(self, configuration: Configuration, why: str) -> ProbeRecord:
        """Launch a configuration again, alone, and return its record. Raises as `run`."""
        self._start(self._request([configuration], "verify"), math.nan, why)
        while self._flying:
            record = self._executor.wait()
            if record is not None:
                self._finish(record)
        return self.records[-1]

    # -- the loop --------------------------------------------------------------------------------

    def run(self) -> StopReason:
        """Search until the end, and return why it ended.

        If the disk or the storage failed (InputError), the trace holds every finished probe.
        """
        while True:
            self._fill()
            if not self._flying:
                return self._stopped or StopReason("exhausted")
            record = self._executor.wait()
            if record is not None:
                self._finish(record)

    def _fill(self) -> None:
        while self._executor.in_flight < max(1, self._executor.capacity):
            step = self._next()
            if step is None:
                return
            self._start(*step)

    def _start(self, request: ProbeRequest, planned_kJ: float, why: str) -> None:
        configurations = request.configurations()
        self._wait_until_quiet()
        if self._settings.wait_until_quiet and self._is_stopped():
            return  # while it waited
        cost_kJ = self.cost.expected_kJ(configurations, planned_kJ)
        self._number += 1
        flight = _Flight(request.purpose, configurations, cost_kJ, planned_kJ)
        self._flying[request.probe_id] = flight
        self._notify(replace(self._event(), kind="started", message=why, request=request))
        self._executor.submit(request, self._next_settings)

    def _wait_until_quiet(self) -> None:
        # On this node, where one probe runs at a time, none does now.
        if not self._settings.wait_until_quiet or self._quiet_left_s <= 0:
            return
        wait = getattr(self._executor, "wait_until_quiet", None)
        if wait is None:
            self._quiet_left_s = 0.0
            self.note(
                "--wait-until-quiet looks at one node only: here probes are made without waiting"
            )
            return
        self._quiet_left_s -= wait(self._quiet_left_s, self.note, self._is_stopped)

    def _is_stopped(self) -> bool:
        run_dir = self._spec.run_dir
        return run_dir is not None and RunFolder(run_dir).stop_file.exists()

    def _next_settings(
        self, request: ProbeRequest, measurements: Sequence[Measurement]
    ) -> tuple[Settings, ...]:
        flight = self._flying.get(request.probe_id)
        if flight is None or self._stopped or not measurements:
            return ()
        so_far = ProbeRecord(request, tuple(measurements), self._executor.meter)
        so_far = in_job_steps(so_far, self._problem.job)
        with threadpool_limits(limits=1):
            return self._plan_continuation(flight, so_far)

    def _plan_continuation(self, flight: _Flight, so_far: ProbeRecord) -> tuple[Settings, ...]:
        name, state, planning = so_far.request.probe_id, self.state, self._planning
        if flight.purpose == "baseline":  # which limits and savings refer to
            state = StudyState(self._spec, [*self.records, so_far])
            planning = self._current_planning(state)
        plan = self._planner.plan_continuation(self._planning_state(name, planning), so_far)
        if plan is None:
            return ()
        used_kJ = self.cost.launch_kJ
        used_kJ += math.fsum(m.energy_J for m in so_far.measurements) / 1000
        cost_kJ = self.cost.further_kJ(plan.cost_J / 1000)
        if reason_to_stop(state, plan, cost_kJ):
            return ()
        more_kJ = max(0.0, used_kJ - flight.cost_kJ) + cost_kJ
        if self._limit(more_kJ, searching=True, count=0):
            return ()
        self._flying[name] = replace(
            flight,
            configurations=(*so_far.request.configurations(), *plan.configurations),
            cost_kJ=max(flight.cost_kJ, used_kJ) + cost_kJ,
            planned_kJ=flight.planned_kJ + plan.cost_J / 1000,
        )
        settings = ", ".join(live.short for live in plan.live)
        self.note(f"{name} continues with {settings} ({_why(plan)})")
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
        fixed = self._leave_out_unsupported(record)
        self.state = StudyState(self._spec, self.records)
        self._planning = self._current_planning(self.state)
        del self._flying[record.request.probe_id]
        self.cost.learn(record, flight.planned_kJ)
        event = replace(self._event(), kind="finished", record=record, front=self.state.front)
        if self._recorder is not None:
            self._recorder.add(record)
        self._notify(event)
        for sentence in (*fixed, *_new_lessons(self._planner, self.state.records)):
            self.note(sentence)

    def _leave_out_unsupported(self, record: ProbeRecord) -> list[str]:
        problem = without_unsupported(self._problem, [record])
        if problem is self._problem:
            return []
        self._problem, self._spec = problem, replace(self._spec, problem=problem)
        self._planner = self._planner_of(problem)
        self._varying = varying_knobs(problem.candidates.configurations)
        return fixed_knobs(record)

    def note(self, sentence: str, *, detail: bool = False) -> None:
        """Pass on a sentence for the user."""
        self._notify(Progress("note", self._executor.meter, message=sentence, detail=detail))

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


def _new_lessons(planner: ProbePlanner, records: Sequence[ProbeRecord]) -> list[str]:
    """Return the planner's lessons from the failure of the last probe, a sentence each."""
    if not records or records[-1].failure is None:
        return []
    lessons = planner.lessons(records[:-1])
    return [sentence for sentence in planner.lessons(records) if sentence not in lessons]


def _why(plan: ProbePlan) -> str:
    if math.isfinite(plan.expected_gain):
        return f"{plan.reason}: {percent(plan.expected_gain)}"
    return plan.reason
