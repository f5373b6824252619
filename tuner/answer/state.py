"""State of a study, computed once for each set of records, and its answer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tuner.answer.answer import Answer
from tuner.answer.choice import front_of, never_measured
from tuner.answer.judge import Judge, failed_again
from tuner.answer.parts import (
    Attainment,
    Point,
    ProgressPoint,
    ResolvedRequest,
    SearchCost,
    Verification,
    with_probabilities,
)
from tuner.answer.posterior import (
    LaunchPosterior,
    Windows,
    attainment_of,
    draw,
    likely_unmeasured,
    predicted_points,
)
from tuner.models.prior import ratio_sd
from tuner.models.surrogate import LeaveOneOut
from tuner.models.surrogate.features import FeatureMap
from tuner.models.surrogate.surrogates import Surrogates
from tuner.pareto import hypervolume, probability_nondominated, reference_point
from tuner.problem.constraints import Constraints
from tuner.problem.problem import in_job_steps, without_unsupported
from tuner.problem.study_spec import StudySpec, parse_cluster, parse_job
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.space import Candidates
from tuner.workload.node.measure.stragglers import of_environment
from tuner.workload.records.probe import ProbeRecord
from tuner.workload.records.trace import read_power


def spent_kJ(records: Sequence[ProbeRecord]) -> float:
    """Return the probes' energy from request to end, kilojoules, in the meter's scope."""
    return math.fsum(record.energy_J for record in records) / 1000


class StudyState:
    """Measurements of a study so far, with the points, limits and choice derived from them."""

    def __init__(self, spec: StudySpec, records: Sequence[ProbeRecord]) -> None:
        self.spec, self.records = spec, tuple(records)

    @cached_property
    def windows(self) -> Windows:
        return Windows.of(self.records)

    @cached_property
    def posterior(self) -> LaunchPosterior | None:
        """Posterior of the measured configurations; None if nothing was measured."""
        if not self.windows.measurements:
            return None
        unverified = self.spec.unverified
        # Figures that no launch would tell otherwise are their own, and are not shrunk.
        recorded = unverified is not None and unverified.kind in ("no_spread", "prediction")
        return LaunchPosterior.of(self.windows, recorded=recorded)

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """The measured points, with NaN as probability of the front."""
        problem, run_dir = self.spec.problem, self.spec.run_dir
        if self.posterior is None:
            return ()
        points = points_of(self.posterior, problem.steps, run_dir)
        return tuple(replace(point, of_step=problem.length is None) for point in points)

    @cached_property
    def front(self) -> tuple[Point, ...]:
        """The non-dominated points, fastest first."""
        return front_of(self.points)

    @cached_property
    def baseline(self) -> Point | None:
        """The baseline's point; None if it was not measured."""
        return next((point for point in self.points if point.configuration == self.today), None)

    @cached_property
    def spent_kJ(self) -> float:
        """Energy of every probe (`spent_kJ`)."""
        return spent_kJ(self.records)

    @cached_property
    def today(self) -> Configuration | None:
        """Configuration of the baseline as it was measured, a lighter one than the problem's where
        the default ran out of memory; None if nothing was measured."""
        for record in self.records:
            if record.request.purpose == "baseline" and record.measurements:
                return record.request.configurations()[0]
        return None

    @cached_property
    def constraints(self) -> Constraints:
        """The study's constraints, those relative to the baseline as absolute limits."""
        today = self.baseline
        baseline_time_s = today.inferred.time_to_solution_s if today else None
        return replace(self.spec.constraints, baseline_time_s=baseline_time_s)

    @cached_property
    def judge(self) -> Judge:
        """Judge of the points; of predicted ones by the known error of the models."""
        judge = Judge(self.points, self.baseline, self.constraints, self.spec.problem.steps)
        if self.points and self.points[0].source == "predicted":
            return replace(judge, ratio_sd=self._ratio_sd())
        verifying = [i for i, r in enumerate(self.records) if r.request.purpose == "verify"]
        return replace(
            judge,
            posterior=self.posterior,
            verifying=frozenset(verifying),
            failed=failed_again(self.records),
        )

    def _ratio_sd(self) -> dict[Configuration, tuple[float, float]] | None:
        if self.baseline is None:
            return None
        every = [point.configuration for point in self.points]
        today = every.index(self.baseline.configuration)
        if (errors := ratio_sd(every, today)) is None:
            return None
        time, energy = errors
        return {c: (float(t), float(e)) for c, t, e in zip(every, time, energy, strict=True)}


def points_of(
    posterior: LaunchPosterior, steps: int, run_dir: Path | None = None
) -> tuple[Point, ...]:
    """Return the points of a posterior, with NaN as probability of the front."""
    points, windows, rows = [], posterior.windows, posterior.windows.rows
    time, power = posterior.log_time, posterior.log_power
    energy_se, time_se, power_se = posterior.errors
    logs = zip(time, time_se, power, power_se, energy_se, strict=True)
    every = zip(posterior.configurations, logs, posterior.own_errors.T, strict=True)
    for configuration, row, own in every:
        mine = [windows.measurements[row] for row in rows[configuration]]
        meter = windows.records[rows[configuration][0]].meter
        peaks = [m.peak_memory_bytes for m in mine if m.peak_memory_bytes is not None]
        estimate = Point.from_logs(
            configuration,
            row,
            steps=steps,
            source=meter.basis,
            windows=len(mine),
            meter=meter,
            flags=tuple(dict.fromkeys(flag for m in mine for flag in m.flags)),
            peak_memory_bytes=max(peaks, default=None),
            peak_power_W=_peak_W(windows, rows[configuration], run_dir),
        )
        medians = (
            median(m.step_time_s * m.power_W for m in mine) * steps / 1000,
            median(m.step_time_s for m in mine) * steps,
            median(m.power_W for m in mine),
        )
        points.append(estimate.measured(medians, own))
    return tuple(points)


def _peak_W(windows: Windows, rows: Sequence[int], run_dir: Path | None) -> float | None:
    if run_dir is None:
        return None
    peaks = []
    for row in rows:
        record, window = windows.records[row], windows.measurements[row]
        path = run_dir / "trace" / "power" / f"{record.request.probe_id}.csv.gz"
        if path.is_file():
            peaks.append(_peak_within(str(path), window.started_s, window.window_s))
    return max((peak for peak in peaks if peak is not None), default=None)


@lru_cache(maxsize=4096)  # a probe's timeline is written once, and an answer is built often
def _peak_within(path: str, start_s: float, length_s: float) -> float | None:
    with contextlib.suppress(InputError):  # a damaged timeline is no peak, and no failure
        return max(
            (
                sample.power_W
                for sample in read_power(path)[0]
                if start_s <= sample.time_s <= start_s + length_s
            ),
            default=None,
        )
    return None


def _fitted(state: StudyState) -> Surrogates:
    problem, windows = state.spec.problem, state.windows
    candidates = problem.candidates
    others = [c for c in dict.fromkeys(windows.configurations) if c not in candidates]
    if others:  # the baseline, where it may not be chosen, and what an earlier session might
        every = Candidates.from_configurations([*candidates, *others])
        candidates = replace(every, knobs=candidates.knobs)
    features = FeatureMap(candidates, prior=problem.prior)
    surrogates = Surrogates(features)
    figures = windows.step_time_s, windows.power_W, *windows.relative_errors
    surrogates.fit(windows.as_delivered, *figures)
    return surrogates


def _progress(records: Sequence[ProbeRecord]) -> tuple[ProgressPoint, ...]:
    # One reference for all, that of the last front, so that the curve falls for no reason but a
    # re-measured point.
    logs = [
        [[math.log(m.power_W * m.step_time_s), math.log(m.step_time_s)] for m in r.measurements]
        for r in records
    ]
    every = np.array([log for each in logs for log in each])
    if not len(every):
        return ()
    reference, energy_kJ, seen = reference_point(every), 0.0, 0
    curve: list[ProgressPoint] = []
    for record, own in zip(records, logs, strict=True):
        energy_kJ += record.energy_J / 1000
        seen += len(own)
        curve.append(
            ProgressPoint(energy_kJ, hypervolume(every[:seen], reference) if seen else 0.0)
        )
    return tuple(curve)


def _spent(
    state: StudyState, time_s: float, best: Point | None, baseline: Point | None
) -> SearchCost:
    problem, records, energy_kJ = state.spec.problem, state.records, state.spent_kJ
    payback: float | None = None
    if best is not None and baseline is not None:
        before, after = baseline.inferred, best.inferred
        saved_kJ = before.energy_to_solution_kJ - after.energy_to_solution_kJ
        if saved_kJ > 0:
            payback = energy_kJ / (saved_kJ / problem.steps)
    return SearchCost(
        energy_kJ=energy_kJ,
        time_s=time_s,
        probes=len(records),
        failed=sum(record.failed for record in records),
        measurements=sum(len(record.measurements) for record in records),
        payback_steps=payback,
        payback_share=payback / problem.length if payback and problem.length else None,
    )


@dataclass(frozen=True)
class _Estimates:
    """Estimates of a study that measured something, by its posterior and its surrogates."""

    points: tuple[Point, ...]
    predicted: tuple[Point, ...]
    attainment: Attainment
    surrogates: Surrogates
    leave_one_out: LeaveOneOut | None


def _estimates(state: StudyState, posterior: LaunchPosterior) -> _Estimates:
    problem, records, windows = state.spec.problem, state.records, state.windows
    surrogates = _fitted(state)
    tried = {c for record in records if not record.ok for c in record.request.configurations()}
    unmeasured = never_measured(problem.candidates.configurations, records)
    left = [configuration for configuration in unmeasured if configuration not in tried]
    others = likely_unmeasured(surrogates, left, posterior)
    energy, time = draw(posterior, surrogates, others, seed=state.spec.settings.seed)
    probability = probability_nondominated(energy, time)
    points = tuple(with_probabilities(state.points, probability))
    few = len(windows.measurements) < 3 or points[0].source == "predicted"
    return _Estimates(
        points,
        predicted_points(
            surrogates, others, probability[len(points) :], problem.steps, points[0].meter
        ),
        attainment_of(energy, time, problem.steps),
        surrogates,
        None if few else surrogates.leave_one_out(),
    )


def _about(state: StudyState, surrogates: Surrogates | None) -> dict[str, Any]:
    problem = state.spec.problem
    about: dict[str, Any] = problem.about
    if surrogates is not None:
        time, power = map(float, surrogates.noise())
        about["meter"] = dict(vars(state.windows.records[0].meter))
        about["window_spread"] = {"step_time": time, "power": power}
    if problem.notes:
        about["notes"] = list(problem.notes)
    return about


def answer_of_study(spec: StudySpec, records: Sequence[ProbeRecord]) -> Answer:
    """Return the answer of a study, from everything that its probes measured."""
    records = [in_job_steps(record, spec.problem.job) for record in records]
    spec = replace(spec, problem=without_unsupported(spec.problem, records))
    problem, ended = spec.problem, spec.ended
    state = StudyState(spec, records)
    windows, posterior = state.windows, state.posterior
    estimates = _estimates(state, posterior) if posterior is not None else None
    points = estimates.points if estimates else ()
    surrogates = estimates.surrogates if estimates else None
    baseline = next((point for point in points if point.configuration == state.today), None)
    judge = replace(state.judge, points=points, baseline=baseline)
    best, choice = judge.choose()
    time_s = ended.time_s
    if time_s is None:
        time_s = math.fsum(record.wall_s for record in records)
    verifying = [record for record in records if record.request.purpose == "verify"]
    return Answer(
        name=spec.name,
        run_dir=spec.run_dir,
        front_points=front_of(points),
        points=points,
        best=best,
        choice=choice,
        baseline=baseline,
        spent=_spent(state, time_s, best, baseline),
        steps=problem.steps,
        request=ResolvedRequest(judge.constraints, spec.settings),
        failures=tuple(record for record in records if not record.ok),
        stragglers=tuple(
            (record.request.probe_id, straggler)
            for record in records
            for straggler in of_environment(record.environment)
        ),
        leave_one_out=estimates.leave_one_out if estimates else None,
        progress=_progress(records),
        stop=ended.stop,
        about=_about(state, surrogates),
        windows={c: tuple(windows.measurements[i] for i in own) for c, own in windows.rows.items()},
        verification=Verification(
            len(verifying), spent_kJ(verifying), spec.unverified or ended.no_verdict
        ),
        predicted=estimates.predicted if estimates else (),
        attainment=estimates.attainment if estimates else None,
        job=(problem.job or parse_job(problem.identity)) if "job" in problem.identity else None,
        cluster=problem.cluster or parse_cluster(problem.identity),
        surrogates=surrogates,
        judge=judge,
    )
