"""Building of a result from a problem and the records of its probes.

A measured configuration's step time and power are the means of its windows, weighted by their
errors, in logarithms. A window's error is what it states of itself, the fitted spread between
windows, and the observed difference between launches of one configuration beyond both: a machine
that others use too is noisier than any single window shows. Where the surrogates, which also use
the neighbours, put the error of that mean lower, theirs is taken, but never below the
seen difference of launches: sqrt(posterior variance + (posterior mean - measured mean)^2), which is
the mean-squared error of the measured figure if the surrogates are right. Intervals are 90 %.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student_t

from tuner.models.surrogate.features import FeatureMap
from tuner.models.surrogate.surrogates import POWER_NOISE, TIME_NOISE, Surrogates
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
from tuner.results.front_uncertainty import attainment_of, draw, likely_unmeasured, predicted_points
from tuner.results.result import Attainment, LeaveOneOut, Point, ProgressPoint, Result, Spent
from tuner.results.verification import choose_verified
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob
from tuner.workload.measure.statistics import Z90
from tuner.workload.power_samples import read_power
from tuner.workload.probe import Measurement, ProbeRecord

__all__ = ["build_result", "estimated_points", "front_of", "measured_points", "spent_kJ"]

#: Joint draws behind the probability of being non-dominated: its standard error is at most 0.011.
DRAWS = 2000


@dataclass(frozen=True)
class _Windows:
    """Every window of every measured configuration, row by row."""

    configurations: list[Configuration]
    measurements: list[Measurement]
    records: list[ProbeRecord]

    @classmethod
    def of(cls, records: Sequence[ProbeRecord]) -> _Windows:
        windows = cls([], [], [])
        for record in records:
            for measurement in record.measurements:
                launch = record.request.launch
                windows.configurations.append(Configuration(launch, measurement.live))
                windows.measurements.append(measurement)
                windows.records.append(record)
        scopes = sorted({record.meter.scope for record in windows.records})
        if len(scopes) > 1:
            raise InputError(
                f"the probes charge the energy of different scopes ({', '.join(scopes)}), which "
                "one front cannot hold; give the study another name for each scope"
            )
        return windows

    def by_configuration(self) -> dict[Configuration, tuple[Measurement, ...]]:
        grouped: dict[Configuration, tuple[Measurement, ...]] = {}
        for configuration, measurement in zip(self.configurations, self.measurements, strict=True):
            grouped[configuration] = (*grouped.get(configuration, ()), measurement)
        return grouped

    @property
    def as_delivered(self) -> list[Configuration]:
        """Delivered configurations, the models' input: a requested clock may not have held."""
        pairs = zip(self.configurations, self.measurements, strict=True)
        return [Configuration(asked.launch, m.as_delivered) for asked, m in pairs]

    @property
    def step_time_s(self) -> np.ndarray:
        return np.array([m.step_time_s for m in self.measurements], dtype=float)

    @property
    def power_W(self) -> np.ndarray:
        return np.array([m.power_W for m in self.measurements], dtype=float)

    @property
    def temperature_C(self) -> np.ndarray:
        """The hottest device's, NaN where unknown."""
        each = [math.nan if m.temperature_C is None else m.temperature_C for m in self.measurements]
        return np.array(each, dtype=float)

    @property
    def relative_errors(self) -> tuple[np.ndarray, np.ndarray]:
        """Stated relative standard errors of step time and power; NaN where unknown."""
        time = [m.step_time_rse for m in self.measurements]
        power = [m.power_rse for m in self.measurements]
        # A file may state any number; a thousandfold error says as little, and its square is one.
        return tuple(np.clip(np.array(rse, dtype=float), 0.0, 1e3) for rse in (time, power))


@dataclass(frozen=True)
class _Estimate:
    """Means and standard errors of log step time and log power, one row a configuration."""

    configurations: list[Configuration]
    rows: list[list[int]]
    log_time: np.ndarray
    log_time_se: np.ndarray
    log_power: np.ndarray
    log_power_se: np.ndarray
    log_time_floor: np.ndarray
    log_power_floor: np.ndarray


def _launch_spread(
    rows: Sequence[Sequence[int]], log: np.ndarray, variance: np.ndarray
) -> tuple[float, float]:
    """Pool the spread of repeated windows beyond their stated errors over all configurations.

    The excess of the pooled variance about each configuration's mean over the stated variance
    (the moment estimator of a random effect, DerSimonian and Laird 1986, with equal weights), and
    by how much a 90 % interval must be wider because few repeats tell it: Student's t with as many
    degrees of freedom as there are repeats, over the normal's.

    Args:
        rows: the windows of each configuration.
        log: (windows,), logarithms of the figure.
        variance: (windows,), what each window states.

    Returns:
        The excess variance, and the factor on standard errors that it enters; (0, 1) where nothing
        was repeated or nothing is in excess.
    """
    repeated = [list(mine) for mine in rows if len(mine) > 1]
    freedom = sum(len(mine) - 1 for mine in repeated)
    if not freedom:
        return 0.0, 1.0
    seen = sum(float(np.sum((log[mine] - log[mine].mean()) ** 2)) for mine in repeated) / freedom
    stated = float(np.mean(np.concatenate([variance[mine] for mine in repeated])))
    if seen <= stated:
        return 0.0, 1.0
    return seen - stated, float(student_t.ppf(0.95, freedom)) / Z90


def _weighted(log: np.ndarray, variance: np.ndarray) -> tuple[float, float]:
    weight = 1 / variance
    return float(np.sum(weight * log) / np.sum(weight)), float(1 / math.sqrt(np.sum(weight)))


def _estimate(windows: _Windows, noise: tuple[float, float]) -> _Estimate:
    rows: dict[Configuration, list[int]] = {}
    for row, configuration in enumerate(windows.configurations):
        rows.setdefault(configuration, []).append(row)
    figures = []
    stated = windows.relative_errors
    for values, errors, floor in zip(
        (windows.step_time_s, windows.power_W), stated, noise, strict=True
    ):
        log, variance = np.log(values), np.nan_to_num(errors) ** 2 + floor**2
        excess, wider = _launch_spread(list(rows.values()), log, variance)
        figures.append(
            np.array(
                [
                    (mean, wider * error, wider * math.sqrt(excess / len(mine)))
                    for mine in rows.values()
                    for mean, error in [_weighted(log[mine], variance[mine] + excess)]
                ]
            ).reshape(-1, 3)
        )
    time, power = figures
    return _Estimate(
        list(rows),
        list(rows.values()),
        log_time=time[:, 0],
        log_time_se=time[:, 1],
        log_power=power[:, 0],
        log_power_se=power[:, 1],
        log_time_floor=time[:, 2],
        log_power_floor=power[:, 2],
    )


def _sharpened(estimate: _Estimate, surrogates: Surrogates) -> _Estimate:
    """Lower standard errors where the surrogates know better (see the module's first lines).

    Only this project's Gaussian process lowers them: a fully grown tree, for one, repeats what was
    measured and has no spread there.
    """
    if not surrogates.sharpens:
        return estimate
    said = surrogates.with_intervals(estimate.configurations)
    time = np.hypot(said.log_time_std, said.log_time - estimate.log_time)
    power = np.hypot(said.log_power_std, said.log_power - estimate.log_power)
    return replace(
        estimate,
        log_time_se=np.minimum(estimate.log_time_se, np.maximum(time, estimate.log_time_floor)),
        log_power_se=np.minimum(estimate.log_power_se, np.maximum(power, estimate.log_power_floor)),
    )


def _probabilities(estimate: _Estimate, seed: int) -> np.ndarray:
    """Probability that each is non-dominated, their errors taken as independent normal."""
    normal = np.random.default_rng(seed).standard_normal((2, DRAWS, len(estimate.configurations)))
    log_time = estimate.log_time + normal[0] * estimate.log_time_se
    log_power = estimate.log_power + normal[1] * estimate.log_power_se
    return probability_nondominated(log_time + log_power, log_time)


def _peak_W(windows: _Windows, rows: Sequence[int], run_dir: Path | None) -> float | None:
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
    windows: _Windows,
    estimate: _Estimate,
    steps: int,
    probability: np.ndarray,
    run_dir: Path | None = None,
) -> tuple[Point, ...]:
    points = []
    for i, configuration in enumerate(estimate.configurations):
        mine = [windows.measurements[row] for row in estimate.rows[i]]
        time_se, power_se = float(estimate.log_time_se[i]), float(estimate.log_power_se[i])
        meter = windows.records[estimate.rows[i][0]].meter
        peaks = [m.peak_memory_bytes for m in mine if m.peak_memory_bytes is not None]
        points.append(
            Point.from_logs(
                configuration,
                float(estimate.log_time[i]),
                time_se,
                float(estimate.log_power[i]),
                power_se,
                energy_se=math.hypot(time_se, power_se),
                steps=steps,
                source="predicted" if meter.name == "simulated" else "measured",
                windows=len(mine),
                p_nondominated=float(probability[i]),
                meter=meter,
                flags=tuple(dict.fromkeys(flag for m in mine for flag in m.flags)),
                peak_memory_bytes=max(peaks, default=None),
                peak_power_W=_peak_W(windows, estimate.rows[i], run_dir),
            )
        )
    return tuple(points)


def measured_points(records: Sequence[ProbeRecord], steps: int) -> tuple[Point, ...]:
    """Return the measured points without the surrogates: cheap, for progress and re-measuring.

    Errors take the surrogates' prior noise; the probability of being non-dominated is NaN.
    """
    windows = _Windows.of(records)
    if not windows.measurements:
        return ()
    estimate = _estimate(windows, (TIME_NOISE, POWER_NOISE))
    return _points(windows, estimate, steps, np.full(len(estimate.configurations), math.nan))


def _fitted(problem: Problem, windows: _Windows, seed: int) -> tuple[Surrogates, _Estimate]:
    candidates = problem.candidates
    others = [c for c in dict.fromkeys(windows.configurations) if c not in candidates]
    if others:  # the baseline, where it may not be chosen, and what an earlier session might
        candidates = Candidates.from_configurations([*candidates, *others])
    features = FeatureMap(candidates, prior=problem.prior)
    surrogates = Surrogates(features, seed=seed, regressor=problem.surrogate)
    surrogates.fit(
        windows.as_delivered,
        windows.step_time_s,
        windows.power_W,
        *windows.relative_errors,
        temperature_C=windows.temperature_C,
    )
    return surrogates, _sharpened(_estimate(windows, surrogates.noise()), surrogates)


def estimated_points(
    problem: Problem,
    records: Sequence[ProbeRecord],
    *,
    seed: int = 0,
    run_dir: Path | None = None,
) -> tuple[Point, ...]:
    """Return the measured points as in the result, but without their probabilities (NaN).

    Args:
        problem: what was searched.
        records: every probe.
        seed: of the surrogates.
        run_dir: where the power samples are, for `Point.peak_power_W`.
    """
    windows = _Windows.of(records)
    if not windows.measurements:
        return ()
    _, estimate = _fitted(problem, windows, seed)
    unknown = np.full(len(estimate.configurations), math.nan)
    return _points(windows, estimate, problem.steps, unknown, run_dir)


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
) -> Spent:
    energy_kJ = spent_kJ(records)
    payback: float | None = None
    if best is not None and baseline is not None:
        saved_kJ = baseline.energy_to_solution_kJ - best.energy_to_solution_kJ
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


def _beyond(
    problem: Problem,
    records: Sequence[ProbeRecord],
    surrogates: Surrogates,
    estimate: _Estimate,
    points: Sequence[Point],
    seed: int,
) -> tuple[tuple[Point, ...], Attainment]:
    """Predict the unmeasured points likely on the front, and the band of the true front."""
    log_energy = estimate.log_time + estimate.log_power
    measured = estimate.configurations
    tried = [c for record in records if not record.ok for c in record.request.configurations()]
    unmeasured = likely_unmeasured(
        surrogates,
        problem.candidates.configurations,
        measured,
        log_energy,
        estimate.log_time,
        failed=[c for c in tried if c not in set(measured)],
    )
    energy, time = draw(
        surrogates,
        unmeasured,
        estimate.log_time,
        estimate.log_time_se,
        estimate.log_power,
        estimate.log_power_se,
        seed=seed,
    )
    predicted = predicted_points(
        surrogates, unmeasured, energy, time, steps=problem.steps, meter=points[0].meter
    )
    return predicted, attainment_of(energy, time, problem.steps)


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
    windows = _Windows.of(records)
    points: tuple[Point, ...] = ()
    predicted: tuple[Point, ...] = ()
    attainment: Attainment | None = None
    loo: LeaveOneOut | None = None
    surrogates: Surrogates | None = None
    about: dict[str, Any] = problem.about
    if windows.measurements:
        surrogates, estimate = _fitted(problem, windows, seed)
        points = _points(windows, estimate, problem.steps, _probabilities(estimate, seed), run_dir)
        predicted, attainment = _beyond(problem, records, surrogates, estimate, points, seed)
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
    )
    best, choice = verified.best, verified.choice
    time_s = ended.time_s
    if time_s is None:
        time_s = math.fsum(record.wall_s for record in records)
    if baseline is not None:
        _, today = decide([baseline], [baseline], constraints)
        choice = replace(choice, baseline_met=today.met, baseline_value=today.objective_value)
    return Result(
        name=spec.name,
        run_dir=run_dir,
        front_points=front,
        points=points,
        best=best,
        choice=choice,
        baseline=baseline,
        spent=_spent(records, time_s, problem.steps, best, baseline),
        steps=problem.steps,
        constraints={**constraints.limits, **spec.settings.limits},
        failures=tuple(record for record in records if not record.ok),
        leave_one_out=loo,
        progress=_progress(records),
        stop=ended.stop,
        about=about,
        windows=windows.by_configuration(),
        verification=verified.verification,
        predicted=predicted,
        attainment=attainment,
        job=_job_of(problem),
        cluster=problem.cluster or parse_cluster(problem.identity),
        surrogates=surrogates,
    )
