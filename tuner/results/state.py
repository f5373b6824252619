"""State of a study: what its probes measured, computed once for each set of records."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path

from tuner.models.analytic.model_error import ModelError
from tuner.problem.constraints import Constraints
from tuner.problem.study_spec import StudySpec
from tuner.results.choice import front_of
from tuner.results.judge import Judge, failed_again
from tuner.results.parts import Point
from tuner.results.posterior import Posterior
from tuner.results.windows import Windows
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.workload.power_samples import read_power
from tuner.workload.probe import ProbeRecord


def baseline_of(records: Sequence[ProbeRecord]) -> Configuration | None:
    """Return the baseline's configuration; None if its probe measured nothing."""
    for record in records:
        if record.request.purpose == "baseline" and record.measurements:
            return record.request.configurations()[0]
    return None


class StudyState:
    """What the probes of a study measured so far."""

    def __init__(self, spec: StudySpec, records: Sequence[ProbeRecord]) -> None:
        self.spec, self.records = spec, tuple(records)

    @cached_property
    def windows(self) -> Windows:
        """Every window."""
        return Windows.of(self.records)

    @cached_property
    def posterior(self) -> Posterior | None:
        """Posterior of the measured configurations; None if nothing was measured."""
        if not self.windows.measurements:
            return None
        unverified = self.spec.unverified
        recorded = unverified is not None and unverified.kind == "no_spread"
        return Posterior.of(self.windows, recorded=recorded)

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """The measured points, with NaN as probability of the front."""
        problem, run_dir = self.spec.problem, self.spec.run_dir
        if self.posterior is None:
            return ()
        points = points_of(self.posterior, problem.steps, run_dir)
        return tuple(replace(point, of_step=not problem.length_known) for point in points)

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
        """Energy of every probe from request to end, in the meter's scope."""
        return math.fsum(record.energy_J for record in self.records) / 1000

    @cached_property
    def today(self) -> Configuration | None:
        """The baseline's configuration; None if its probe measured nothing."""
        return baseline_of(self.records)

    @cached_property
    def constraints(self) -> Constraints:
        """The study's constraints, those relative to the baseline as absolute limits."""
        today = self.baseline
        return self.spec.constraints.relative_to(today.time_to_solution_s if today else None)

    @cached_property
    def judge(self) -> Judge:
        """Judge of the points; of predicted ones by the known error of the models."""
        judge = Judge(self.points, self.baseline, self.constraints, self.spec.problem.steps)
        if self.points and self.points[0].source == "predicted":
            return replace(judge, ratio_sd=self._ratio_sd())
        fresh = [i for i, r in enumerate(self.records) if r.request.purpose == "verify"]
        return replace(
            judge,
            posterior=self.posterior,
            fresh=frozenset(fresh),
            failed=failed_again(self.records),
        )

    def _ratio_sd(self) -> dict[Configuration, tuple[float, float]] | None:
        every = [point.configuration for point in self.points]
        today = self.baseline
        if today is None:
            return None
        time, energy = ModelError(every).ratio_sd(every.index(today.configuration))
        return {c: (float(t), float(e)) for c, t, e in zip(every, time, energy, strict=True)}


def points_of(posterior: Posterior, steps: int, run_dir: Path | None = None) -> tuple[Point, ...]:
    """Return the points of a posterior, with NaN as probability of the front."""
    points = []
    windows, rows = posterior.windows, posterior.windows.rows
    for i, configuration in enumerate(posterior.configurations):
        mine = [windows.measurements[row] for row in rows[configuration]]
        meter = windows.records[rows[configuration][0]].meter
        peaks = [m.peak_memory_bytes for m in mine if m.peak_memory_bytes is not None]
        points.append(
            Point.from_logs(
                configuration,
                float(posterior.log_time[i]),
                float(posterior.log_time_se[i]),
                float(posterior.log_power[i]),
                float(posterior.log_power_se[i]),
                energy_se=float(posterior.log_energy_se[i]),
                steps=steps,
                source="predicted" if meter.is_simulated else "measured",
                windows=len(mine),
                meter=meter,
                flags=tuple(dict.fromkeys(flag for m in mine for flag in m.flags)),
                peak_memory_bytes=max(peaks, default=None),
                peak_power_W=_peak_W(windows, rows[configuration], run_dir),
            )
        )
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
