"""Building of a result from a problem and the records of its probes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tuner.models.surrogate.features import FeatureMap
from tuner.models.surrogate.leave_one_out import LeaveOneOut
from tuner.models.surrogate.surrogates import Surrogates
from tuner.pareto import hypervolume, probability_nondominated, reference_point
from tuner.problem.problem import Problem
from tuner.problem.study_file import parse_cluster, parse_job
from tuner.problem.study_spec import StudySpec
from tuner.results.calibration import last_calibration
from tuner.results.choice import front_of
from tuner.results.front_uncertainty import attainment_of, draw, likely_unmeasured, predicted_points
from tuner.results.parts import (
    Attainment,
    Point,
    ProgressPoint,
    Spent,
    Verification,
    with_probabilities,
)
from tuner.results.posterior import Posterior
from tuner.results.result import Result
from tuner.results.state import StudyState
from tuner.results.unmeasured import never_measured, with_unmeasured
from tuner.results.windows import Windows
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.workload.measure.stragglers import of_environment
from tuner.workload.probe import Measurement, ProbeRecord


def _fitted(problem: Problem, windows: Windows, seed: int) -> Surrogates:
    candidates = problem.candidates
    others = [c for c in dict.fromkeys(windows.configurations) if c not in candidates]
    if others:  # the baseline, where it may not be chosen, and what an earlier session might
        every = Candidates.from_configurations([*candidates, *others])
        candidates = replace(every, knobs=candidates.knobs)
    features = FeatureMap(candidates, prior=problem.prior)
    surrogates = Surrogates(features, seed=seed, regressor=problem.surrogate)
    surrogates.fit(
        windows.as_delivered,
        windows.step_time_s,
        windows.power_W,
        *windows.relative_errors,
    )
    return surrogates


def spent_kJ(records: Sequence[ProbeRecord]) -> float:
    """Return the probes' energy from request to end, kilojoules."""
    return math.fsum(record.energy_J for record in records) / 1000


def _progress(records: Sequence[ProbeRecord]) -> tuple[ProgressPoint, ...]:
    # One reference for all, that of the last front, so that the curve falls for no reason but a
    # re-measured point.

    def logs(measurements: Sequence[Measurement]) -> np.ndarray:
        return np.array(
            [[math.log(m.power_W * m.step_time_s), math.log(m.step_time_s)] for m in measurements]
        ).reshape(-1, 2)

    every = logs([m for record in records for m in record.measurements])
    if not len(every):
        return ()
    reference = reference_point(every)
    energy_kJ, seen = 0.0, np.empty((0, 2))
    curve: list[ProgressPoint] = []
    for record in records:
        energy_kJ += record.energy_J / 1000
        seen = np.vstack([seen, logs(record.measurements)])
        volume = hypervolume(seen, reference) if len(seen) else 0.0
        curve.append(ProgressPoint(energy_kJ, volume))
    return tuple(curve)


def _spent(
    records: Sequence[ProbeRecord],
    time_s: float,
    problem: Problem,
    best: Point | None,
    baseline: Point | None,
) -> Spent:
    energy_kJ = spent_kJ(records)
    payback: float | None = None
    if best is not None and baseline is not None:
        saved_kJ = baseline.energy_to_solution_kJ - best.energy_to_solution_kJ
        if saved_kJ > 0:
            payback = energy_kJ / (saved_kJ / problem.steps)
    return Spent(
        energy_kJ=energy_kJ,
        time_s=time_s,
        probes=len(records),
        failed=sum(not record.ok for record in records),
        measurements=sum(len(record.measurements) for record in records),
        payback_steps=payback,
        payback_share=payback / problem.steps if payback and problem.length_known else None,
    )


def _unmeasured(
    problem: Problem, records: Sequence[ProbeRecord], figures: Posterior, surrogates: Surrogates
) -> list[Configuration]:
    measured = set(figures.configurations)
    tried = [c for record in records if not record.ok for c in record.request.configurations()]
    return likely_unmeasured(
        surrogates,
        problem.candidates.configurations,
        figures.configurations,
        figures.log_time + figures.log_power,
        figures.log_time,
        failed=[c for c in tried if c not in measured],
    )


def _job_of(problem: Problem) -> TrainingJob | None:
    if "job" not in problem.identity:
        return None
    return problem.job or parse_job(problem.identity)


def build_result(spec: StudySpec, records: Sequence[ProbeRecord]) -> Result:
    """Return the result of a study."""
    problem, ended = spec.problem, spec.ended
    run_dir, seed = spec.run_dir, spec.settings.seed
    state = StudyState(spec, records)
    windows, posterior = state.windows, state.posterior
    unmeasured = never_measured(problem.candidates.configurations, records)
    points: tuple[Point, ...] = ()
    predicted: tuple[Point, ...] = ()
    attainment: Attainment | None = None
    loo: LeaveOneOut | None = None
    surrogates: Surrogates | None = None
    about: dict[str, Any] = problem.about
    if posterior is not None:
        surrogates = _fitted(problem, windows, seed)
        others = _unmeasured(problem, records, posterior, surrogates)
        energy, time = draw(posterior, surrogates, others, seed=seed)
        probability = probability_nondominated(energy, time)
        points = tuple(with_probabilities(state.points, probability))
        predicted = predicted_points(
            surrogates,
            others,
            probability[len(points) :],
            steps=problem.steps,
            meter=points[0].meter,
        )
        attainment = attainment_of(energy, time, problem.steps)
        if len(windows.measurements) >= 3 and not points[0].meter.is_simulated:
            loo = surrogates.leave_one_out()
        about["meter"] = dict(vars(windows.records[0].meter))
        about["window_spread"] = dict(
            zip(("step_time", "power"), map(float, surrogates.noise()), strict=True)
        )
        if run_dir is not None:
            calibration = last_calibration(run_dir.parent, host=windows.records[0].host)
            about |= {"calibration": calibration} if calibration else {}
    if problem.notes:
        about["notes"] = list(problem.notes)
    today = state.baseline.configuration if state.baseline else None
    baseline = next((point for point in points if point.configuration == today), None)
    judge = replace(state.judge, points=points, baseline=baseline)
    best, choice = judge.choose()
    time_s = ended.time_s
    if time_s is None:
        time_s = math.fsum(record.wall_s for record in records)
    return Result(
        name=spec.name,
        run_dir=run_dir,
        front_points=front_of(points),
        points=points,
        best=best,
        choice=with_unmeasured(choice, judge.constraints, surrogates, unmeasured, problem.steps),
        baseline=baseline,
        spent=_spent(records, time_s, problem, best, baseline),
        steps=problem.steps,
        constraints={
            **judge.constraints.limits,
            **judge.constraints.rates,
            **spec.settings.limits,
        },
        failures=tuple(record for record in records if not record.ok),
        stragglers=tuple(
            (record.request.probe_id, straggler)
            for record in records
            for straggler in of_environment(record.environment)
        ),
        leave_one_out=loo,
        progress=_progress(records),
        stop=ended.stop,
        about=about,
        windows=windows.by_configuration(),
        unmeasured=unmeasured,
        launches={c: tuple(windows.launches[rows].tolist()) for c, rows in windows.rows.items()},
        verification=_verification(spec, records),
        predicted=predicted,
        attainment=attainment,
        job=_job_of(problem),
        cluster=problem.cluster or parse_cluster(problem.identity),
        surrogates=surrogates,
        judge=judge,
    )


def _verification(spec: StudySpec, records: Sequence[ProbeRecord]) -> Verification:
    made = [record for record in records if record.request.purpose == "verify"]
    return Verification(len(made), spent_kJ(made), spec.unverified or spec.ended.no_verdict)
