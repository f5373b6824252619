"""Building of a result from a problem and the records of its probes.

Step time and power of a measured configuration come from its launches, with errors that hold what
the windows state and how far launches of the study differ (`tuner.results.estimates`). Intervals
are 90 %. Joint draws of measured and of unmeasured configurations give the probability of being on
the front and the band of the front (`tuner.results.front_uncertainty`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tuner.models.surrogate.features import FeatureMap
from tuner.models.surrogate.leave_one_out import LeaveOneOut
from tuner.models.surrogate.surrogates import Surrogates
from tuner.pareto import (
    hypervolume,
    probability_nondominated,
    reference_point,
)
from tuner.problem.problem import Problem
from tuner.problem.stop_reason import no_verdict_phrase
from tuner.problem.study_file import parse_cluster, parse_job
from tuner.problem.study_spec import StudySpec
from tuner.results.calibration import last_calibration
from tuner.results.choice import decide, front_of
from tuner.results.estimates import Estimate, Windows, estimate
from tuner.results.front_uncertainty import attainment_of, draw, likely_unmeasured, predicted_points
from tuner.results.limit_probability import of_point, of_surrogates
from tuner.results.parts import Attainment, Point, ProgressPoint, Spent, Verification
from tuner.results.result import Result
from tuner.results.unmeasured import never_measured, with_unmeasured
from tuner.results.verification import choose_verified
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob
from tuner.workload.power_samples import read_power
from tuner.workload.probe import Measurement, ProbeRecord

__all__ = ["build_result", "measured_points", "spent_kJ"]


def _peak_W(windows: Windows, rows: Sequence[int], run_dir: Path | None) -> float | None:
    """Return the highest power sample within these windows; None if none was kept."""
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
    """Return the highest sample of a timeline in a window; None if there is none."""
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


def _points(
    windows: Windows,
    figures: Estimate,
    steps: int,
    probability: np.ndarray,
    run_dir: Path | None = None,
) -> tuple[Point, ...]:
    points = []
    for i, configuration in enumerate(figures.configurations):
        mine = [windows.measurements[row] for row in figures.rows[i]]
        time_se, power_se = float(figures.log_time_se[i]), float(figures.log_power_se[i])
        meter = windows.records[figures.rows[i][0]].meter
        peaks = [m.peak_memory_bytes for m in mine if m.peak_memory_bytes is not None]
        points.append(
            Point.from_logs(
                configuration,
                float(figures.log_time[i]),
                time_se,
                float(figures.log_power[i]),
                power_se,
                energy_se=math.hypot(time_se, power_se),
                steps=steps,
                source="predicted" if meter.name == "simulated" else "measured",
                windows=len(mine),
                p_nondominated=float(probability[i]),
                meter=meter,
                flags=tuple(dict.fromkeys(flag for m in mine for flag in m.flags)),
                peak_memory_bytes=max(peaks, default=None),
                peak_power_W=_peak_W(windows, figures.rows[i], run_dir),
            )
        )
    return tuple(points)


def measured_points(
    records: Sequence[ProbeRecord], steps: int, *, run_dir: Path | None = None
) -> tuple[Point, ...]:
    """Return the measured points as in the result, but with NaN as probability of the front.

    Args:
        records: every probe.
        steps: that make the solution.
        run_dir: where the power samples are, for `Point.peak_power_W`.
    """
    windows = Windows.of(records)
    if not windows.measurements:
        return ()
    figures = estimate(windows)
    return _points(windows, figures, steps, np.full(len(figures.rows), math.nan), run_dir)


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
        temperature_C=windows.temperature_C,
    )
    return surrogates


def spent_kJ(records: Sequence[ProbeRecord]) -> float:
    """Return the probes' energy from request to end, kilojoules."""
    return math.fsum(record.energy_J for record in records) / 1000


def _progress(records: Sequence[ProbeRecord]) -> tuple[ProgressPoint, ...]:
    """(probing kJ, hypervolume of the measured front in log energy and log time) a probe.

    One reference for all of them, that of the last front, so that the curve never falls for any
    reason but a re-measured point.
    """

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
    steps: int,
    best: Point | None,
    baseline: Point | None,
    verification: Verification | None,
) -> Spent:
    """Return what probing cost and when it is repaid; by a verified saving if there is one."""
    energy_kJ = spent_kJ(records)
    payback: float | None = None
    if best is not None and baseline is not None:
        saved_kJ = baseline.energy_to_solution_kJ - best.energy_to_solution_kJ
        for attempt in verification.attempts if verification else ():
            if attempt.survived and attempt.configuration == best.configuration and attempt.energy:
                # The search's own windows made the choice look better than it is.
                saved_kJ = -attempt.energy.relative * baseline.energy_to_solution_kJ
        if saved_kJ > 0:
            payback = energy_kJ / (saved_kJ / steps)
    return Spent(
        energy_kJ=energy_kJ,
        time_s=time_s,
        probes=len(records),
        failed=sum(not record.ok for record in records),
        measurements=sum(len(record.measurements) for record in records),
        payback_steps=payback,
        payback_share=payback / steps if payback is not None else None,
    )


def _baseline_point(records: Sequence[ProbeRecord], points: Sequence[Point]) -> Point | None:
    """Return the point of the baseline probe; None if it failed."""
    asked = [
        configuration
        for record in records
        if record.request.purpose == "baseline"
        for configuration in record.request.configurations()
    ]
    return next((point for point in points if point.configuration in asked), None)


def _unmeasured(
    problem: Problem, records: Sequence[ProbeRecord], figures: Estimate, surrogates: Surrogates
) -> list[Configuration]:
    """Return the unmeasured candidates that may be on the front."""
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
    """Return the job that was probed; a table may name one only for its predictions."""
    if "job" not in problem.identity:
        return None
    return problem.job or parse_job(problem.identity)


def build_result(spec: StudySpec, records: Sequence[ProbeRecord]) -> Result:
    """Return the result of a study.

    Args:
        spec: the study, and how its last session ended.
        records: every probe, in the order in which they ended.
    """
    problem, constraints = spec.problem, spec.constraints
    run_dir, seed, ended = spec.run_dir, spec.settings.seed, spec.ended
    windows = Windows.of(records)
    unmeasured = never_measured(problem.candidates.configurations, records)
    points: tuple[Point, ...] = ()
    predicted: tuple[Point, ...] = ()
    attainment: Attainment | None = None
    loo: LeaveOneOut | None = None
    surrogates: Surrogates | None = None
    about: dict[str, Any] = problem.about
    if windows.measurements:
        surrogates = _fitted(problem, windows, seed)
        figures = estimate(windows)
        others = _unmeasured(problem, records, figures, surrogates)
        energy, time = draw(figures, surrogates, others, seed=seed)
        probability = probability_nondominated(energy, time)
        points = _points(windows, figures, problem.steps, probability, run_dir)
        predicted = predicted_points(
            surrogates,
            others,
            probability[len(points) :],
            steps=problem.steps,
            meter=points[0].meter,
        )
        attainment = attainment_of(energy, time, problem.steps)
        if len(windows.measurements) >= 3:
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
    front = front_of(points)
    baseline = _baseline_point(records, points)
    constraints = constraints.relative_to(baseline.time_to_solution_s if baseline else None)
    verified = choose_verified(
        points,
        records,
        constraints,
        off=no_verdict_phrase(spec.unverified) if spec.unverified else "",
        unfinished=no_verdict_phrase(ended.no_verdict) if ended.no_verdict else "",
        prefer=ended.chosen,
        planned=ended.planned_pairs,
        steps=problem.steps,
        chance=of_surrogates(surrogates, problem.steps) if surrogates is not None else of_point,
    )
    best, choice = verified.best, verified.choice
    time_s = ended.time_s
    if time_s is None:
        time_s = math.fsum(record.wall_s for record in records)
    if baseline is not None:
        _, today = decide([baseline], [baseline], constraints)
        choice = replace(
            choice,
            baseline_met=today.met,
            baseline_value=today.objective_value,
            baseline_p_met=today.p_all_met,
        )
    return Result(
        name=spec.name,
        run_dir=run_dir,
        front_points=front,
        points=points,
        best=best,
        choice=with_unmeasured(choice, constraints, surrogates, unmeasured, problem.steps),
        baseline=baseline,
        spent=_spent(records, time_s, problem.steps, best, baseline, verified.verification),
        steps=problem.steps,
        constraints={**constraints.limits, **constraints.rates, **spec.settings.limits},
        failures=tuple(record for record in records if not record.ok),
        leave_one_out=loo,
        progress=_progress(records),
        stop=ended.stop,
        about=about,
        windows=windows.by_configuration(),
        unmeasured=unmeasured,
        launches={c: tuple(windows.launches[rows].tolist()) for c, rows in windows.rows.items()},
        verification=verified.verification,
        predicted=predicted,
        attainment=attainment,
        job=_job_of(problem),
        cluster=problem.cluster or parse_cluster(problem.identity),
        surrogates=surrogates,
    )
