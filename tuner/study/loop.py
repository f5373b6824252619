"""The loop of a search: measure the baseline, then plan, submit, wait and record, until it ends.

Every finished record goes to the trace first and to the study second (`tuner.study.callbacks`). A
probe that is expected to cost more than is left is not started, and a share of each limit is
reserved for measuring the front again once the search is over. No failure of a probe ends the loop;
an interrupt ends it, and what was recorded stays recorded.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tuner.executors.base import Executor
from tuner.formatting import percent, varying_knobs
from tuner.problem.batch_scaling import in_job_steps, steps_a_job_step
from tuner.problem.probe_limits import inspected_s, probe_limits
from tuner.problem.run_folder import RunFolder
from tuner.problem.settings import LEAST_LAUNCHES
from tuner.problem.stop_reason import LIMITS, StopReason
from tuner.problem.study_spec import StudySpec
from tuner.results.build import measured_points, spent_kJ
from tuner.results.choice import front_of
from tuner.results.parts import Point
from tuner.results.verification import baseline_of
from tuner.search.planner import ProbePlan, ProbePlanner
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.storage import StorageError
from tuner.study.baseline_due import baseline_due
from tuner.study.blas_threads import one_thread
from tuner.study.budget import RESERVED, Budget, CostEstimate, SearchStatus, most_left_s
from tuner.study.callbacks import Callback, Progress
from tuner.study.recorder import StudyRecorder
from tuner.study.rules import (
    front_to_beat,
    node_failures,
    not_repaid,
    not_worth_it,
    peak_limit_of,
    question_of,
    settings_to_remeasure,
    with_next_probe,
)
from tuner.workload.limits import ProbeLimits
from tuner.workload.probe import Measurement, ProbeRecord, ProbeRequest
from tuner.workload.probe_phase import read_phase
from tuner.workload.trace import compact

__all__ = ["SearchLoop"]


@dataclass(frozen=True)
class _Flight:
    """A probe in flight.

    Attributes:
        request: the probe.
        cost_kJ: its expected energy; 0 if unknown.
        planned_kJ: the sampler's own prediction of it; NaN if it made none.
    """

    request: ProbeRequest
    cost_kJ: float
    planned_kJ: float


class SearchLoop:
    """The search of one session.

    Args:
        spec: the study.
        executor: runs the probes.
        sampler: plans them.
        recorder: the study's trials.
        callbacks: called with everything that happens, in this order.
        records: probes of earlier sessions, in steps of the job.
        first_number: number of the next probe.
        spent_s: seconds of earlier sessions.
    """

    def __init__(
        self,
        *,
        spec: StudySpec,
        executor: Executor,
        sampler: ProbePlanner,
        recorder: StudyRecorder,
        callbacks: Sequence[Callback],
        records: Sequence[ProbeRecord],
        first_number: int = 0,
        spent_s: float = 0.0,
    ) -> None:
        self.records, self._earlier = list(records), len(records)
        self._spec, self._problem, self._settings = spec, spec.problem, spec.settings
        self._executor, self._sampler, self._recorder = executor, sampler, recorder
        self._callbacks = callbacks
        self._number, self._spent_s = first_number, spent_s
        self._began_s = executor.now_s()
        self._flying: dict[str, _Flight] = {}
        self._budget, self._cost = Budget(spec.settings), CostEstimate(spec.problem)
        self._stopped: StopReason | None = None
        executor.next_settings = self._next_settings
        sampler.cost = spec.problem.cost.learned(self.records)
        self._ask()
        self._front = self._measured_front()
        self._varying = varying_knobs(spec.problem.candidates.configurations)

    # -- what is used and what is left -----------------------------------------------------------

    @property
    def elapsed_s(self) -> float:
        """Seconds of this session and the earlier ones, on the executor's clock."""
        return self._spent_s + self._executor.now_s() - self._began_s

    @property
    def _enough_launches(self) -> bool:
        """True if there are enough distinct launches to measure some of them again."""
        launches = {r.request.launch for r in self.records if r.measurements}
        every = len(self._problem.candidates.launches)
        return len(launches) >= min(LEAST_LAUNCHES, every)

    @property
    def _job_kJ(self) -> float | None:
        """Energy of the whole training with the baseline, as first measured; None before."""
        for record in self.records:
            if record.request.purpose == "baseline" and record.measurements:
                return record.measurements[0].energy_per_step_J * self._problem.steps / 1000
        return None

    @property
    def _reserve(self) -> tuple[str, ...]:
        """Purposes that may need what is left: measuring a front again takes more than the
        baseline, verification something on the front that is not the baseline."""
        baseline = baseline_of(self.records)
        measured = {c for r in self.records if r.measurements for c in r.request.configurations()}
        if not measured - {baseline}:
            return ()
        better = any(point.configuration != baseline for point in self._front)
        return RESERVED if better else ("remeasure",)

    def _limit(
        self, cost_kJ: float, reserve: Sequence[str] = (), count: int = 1
    ) -> StopReason | None:
        """Return the limit that forbids probes of this cost (`Budget.check`), or None.

        A user who asked the search to stop (`tuner runs stop`) forbids all of them.
        """
        run_dir = self._spec.run_dir
        if run_dir is not None and RunFolder(run_dir).stop_file.exists():
            return StopReason("stopped")
        status = SearchStatus(
            records=self.records,
            in_flight=len(self._flying),
            in_flight_kJ=math.fsum(flight.cost_kJ for flight in self._flying.values()),
            elapsed_s=self.elapsed_s,
            enough_launches=self._enough_launches,
            estimated=self._executor.meter.estimated,
            job_kJ=self._job_kJ,
            twin=self._executor.meter.twin,
        )
        return self._budget.check(status, cost_kJ, reserve=reserve, count=count)

    def _expected_kJ(
        self, configurations: Sequence[Configuration], planned_kJ: float = math.nan
    ) -> float:
        """Return what a probe is expected to use (`CostEstimate.expected_kJ`)."""
        return self._cost.expected_kJ(self.records, configurations, planned_kJ)

    def _limits(self, configurations: Sequence[Configuration], extendable: bool) -> ProbeLimits:
        """Return the limits of a probe, derived from the prediction and the script's inspection.

        Once two probes have ended well, the whole is at most five times the longest of them (a
        minute at least), and the time for the sweep of an extendable probe.
        """
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
        """Return the next probe, its planned kilojoules and why; None to wait or end."""
        flying = any(f.request.purpose == "baseline" for f in self._flying.values())
        baseline = None if flying else baseline_due(self._problem, self.records)
        if baseline is not None and not self._limit(self._expected_kJ([baseline])):
            why = "the baseline"
            if baseline != self._problem.baseline:
                why += ", because the default runs out of memory"
            return self._request([baseline], "baseline"), math.nan, why
        if not self._stopped:
            plan = self._planned()
            if plan is not None:
                request = self._request(plan.configurations, "search", extendable=plan.extendable)
                return request, plan.first_J / 1000, _why(plan)
        if self._flying or not self._stopped or self._node_failures():
            return None  # what is in flight may change the front
        again = settings_to_remeasure(self._spec, self.records, self._sampler.max_live)
        keep = tuple(purpose for purpose in self._reserve if purpose != "remeasure")
        if not again or self._limit(self._expected_kJ(again), reserve=keep):
            return None
        return self._request(again, "remeasure"), math.nan, "the front, measured again"

    def _node_failures(self) -> StopReason | None:
        return node_failures(self.records, self._earlier)

    def _request(
        self, configurations: Sequence[Configuration], purpose: str, *, extendable: bool = False
    ) -> ProbeRequest:
        limits = self._limits(configurations, extendable)
        front: tuple[tuple[float, float], ...] = ()
        if purpose == "search":  # whatever else is measured is compared, or is the choice
            steps = self._problem.steps * steps_a_job_step(configurations[0], self._problem.job)
            front = front_to_beat(self._spec.constraints, self._front, steps)
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
        """Return the sampler's next probe if it is worth its cost and affordable.

        If not, and no result in flight can change that, `_stopped` is set.
        """
        reserve = self._reserve
        self._stopped = self._node_failures() or self._limit(0.0, reserve)
        sampler, study = self._sampler, self._recorder.study
        if limit := self._stopped:
            if limit.kind in LIMITS and sampler.estimates_gain:
                self._stopped = with_next_probe(
                    limit, self._plan(), self._expected_kJ, sampler.question
                )
            return None
        waits = self._recorder.patiently(lambda: sampler.better_to_wait(study))
        if waits and self._flying:  # not for what another driver of this study has in flight
            return None
        plan = self._plan()
        for sentence in sampler.take_notes():
            self.note(sentence)
        if plan is None:
            if not self._flying:
                unsafe = sampler.peak_limit is not None
                self._stopped = StopReason("unsafe" if unsafe else "exhausted")
            return None
        cost_kJ = self._expected_kJ(plan.configurations, plan.cost_J / 1000)
        if reason := not_worth_it(self._spec, self.records, plan, cost_kJ):
            if not self._flying:
                self._stopped = reason
            return None
        if limit := self._limit(cost_kJ, reserve):
            self._stopped = with_next_probe(limit, plan, self._expected_kJ, sampler.question)
        return None if self._stopped else plan

    def _plan(self) -> ProbePlan | None:
        with one_thread():
            return self._recorder.patiently(lambda: self._sampler.plan(self._recorder.study))

    # -- probes of a later phase -----------------------------------------------------------------

    def room_for(self, configurations: Sequence[Configuration], most: int = 20) -> int:
        """Return how many further launches of these, alternately, the limits allow; at most
        `most`."""
        each = [self._expected_kJ([configuration]) for configuration in configurations]
        for count in range(1, most + 1):
            cost_kJ = math.fsum(each[i % len(each)] for i in range(count))
            if self._limit(cost_kJ, count=count):
                return count - 1
        return most

    def probe_now(self, configuration: Configuration, purpose: str, why: str) -> ProbeRecord | None:
        """Run one probe to its end, alone; return None if the limits forbid it.

        Raises:
            KeyboardInterrupt: after the probe is marked interrupted.
            InputError: the disk or the storage failed.
        """
        cost_kJ = self._expected_kJ([configuration])
        if self._limit(cost_kJ):
            return None
        with self._interruptible():
            self._start(self._request([configuration], purpose), math.nan, why)
            while self._flying:
                record = self._executor.wait()
                if record is not None:
                    self._finish(record)
        return self.records[-1]

    # -- the loop --------------------------------------------------------------------------------

    def run(self) -> StopReason:
        """Search until the end, and return why it ended.

        Raises:
            KeyboardInterrupt: after what was in flight is marked interrupted.
            InputError: the disk or the storage failed; the trace holds every finished probe.
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
        """End what is in flight, and mark it interrupted, on any exception."""
        try:
            yield
        except BaseException:
            self._executor.close()
            with contextlib.suppress(InputError):  # nor can a storage that is gone record it
                for callback in self._callbacks:
                    callback.interrupted()
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
        event = replace(self._event(), kind="started", message=why, request=request)
        for callback in self._callbacks:
            callback.started(event)
        self._executor.submit(request)

    def _ask(self) -> None:
        """Tell the sampler what is to be found, as far as it is known by now."""
        peak = peak_limit_of(self._spec, self.records)
        self._sampler.peak_limit = peak
        self._sampler.question = question_of(self._spec, self.records, peak)

    def _next_settings(
        self, request: ProbeRequest, measurements: Sequence[Measurement]
    ) -> tuple[Settings, ...]:
        """Return the further settings of a running launch that are worth it and affordable."""
        flight = self._flying.get(request.probe_id)
        if flight is None or self._stopped or not measurements:
            return ()
        so_far = ProbeRecord(request, tuple(measurements), self._executor.meter)
        so_far = in_job_steps(so_far, self._problem.job)
        try:
            with one_thread():
                return self._plan_continuation(flight, so_far)
        except StorageError as error:  # the launch is not kept up until it answers
            self.note(f"{request.probe_id} is not continued: {error}")
            return ()

    def _plan_continuation(self, flight: _Flight, so_far: ProbeRecord) -> tuple[Settings, ...]:
        request, measurements = so_far.request, so_far.measurements
        sampler, study = self._sampler, self._recorder.study
        plan = self._recorder.at_once(lambda: sampler.plan_continuation(study, so_far))
        if plan is None:
            return ()
        used_kJ = math.fsum(m.energy_J for m in measurements) / 1000
        cost_kJ = self._cost.used_over_planned * plan.cost_J / 1000
        if not_repaid(self._spec, self.records, plan, cost_kJ):
            return ()
        if self._limit(max(0.0, used_kJ - flight.cost_kJ) + cost_kJ, RESERVED, count=0):
            return ()
        for callback in self._callbacks:
            callback.extended(request, plan.live)
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
        for callback in self._callbacks:
            callback.measured(record)
        record = in_job_steps(record, self._problem.job)
        # Of what later phases compare step by step, everything is kept.
        self.records.append(compact(record) if record.request.purpose == "search" else record)
        self._sampler.cost = self._problem.cost.learned(self.records)
        self._ask()
        del self._flying[record.request.probe_id]
        self._cost.learn(record, flight.planned_kJ)
        self._front = self._measured_front()
        event = replace(self._event(), kind="finished", record=record, front=self._front)
        for callback in self._callbacks:
            callback.finished(event)

    def note(self, sentence: str) -> None:
        """Pass a sentence for the user to the callbacks."""
        event = Progress("note", self._executor.meter, message=sentence)
        for callback in self._callbacks:
            callback.note(event)

    def _measured_front(self) -> tuple[Point, ...]:
        return tuple(front_of(measured_points(self.records, self._problem.steps)))

    def _event(self) -> Progress:
        """Return an event with the state of the search; its kind is the caller's."""
        return Progress(
            "note",
            self._executor.meter,
            spent_kJ=spent_kJ(self.records),
            probe_budget_kJ=self._settings.probe_budget_kJ,
            probes=len(self.records),
            max_probes=self._settings.max_probes,
            search_s=self._settings.search_s,
            elapsed_s=self.elapsed_s,
            left_s=most_left_s(self._settings, self.records, self.elapsed_s),
            varying=self._varying,
            places=getattr(self._executor, "places", None),
            phase=partial(read_phase, run_dir) if (run_dir := self._spec.run_dir) else None,
        )


def _why(plan: ProbePlan) -> str:
    if math.isfinite(plan.expected_gain):
        return f"{plan.reason}: {percent(plan.expected_gain)} of the front's hypervolume"
    return plan.reason
