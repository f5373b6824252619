"""What a job would do at each power that it may draw, from the measured points of a run.

The points of the configuration's own launch are reached while the job trains, by live settings; all
others need a restart from a checkpoint. Under each cap the fastest measured point counts; nothing
is interpolated between points.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.results.parts import Interval, Point
from tuner.results.result import Result
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.workload.probe import ProbeRecord

#: Powers that differ by less are the same: no limit tells them apart.
SAME_POWER = 0.01


@dataclass(frozen=True)
class CurvePoint:
    """Fastest measured point within a power."""

    point: Point
    slowdown: float  # against the start of the curve, with a 90 % interval by joint draws
    slowdown_interval: Interval | None
    live: bool  # reached without a restart
    # the fastest within its average and its peak power, of the points of its kind (live, or all).
    for_average: bool
    for_peak: bool
    restart_s: float | None  # median time of a launch until warm; None if unknown

    @property
    def restart_kJ(self) -> float | None:
        """Energy of the restart if it draws the power of the point; None if unknown."""
        return None if self.restart_s is None else self.restart_s * self.point.power_W / 1000

    def to_json(self) -> dict[str, Any]:
        """Return the point as JSON values."""
        own = {**vars(self), "restart_kJ": self.restart_kJ}
        point = own.pop("point").to_json()
        names = "short_name power_W power_interval_W peak_power_W time_to_solution_s"
        names += " time_interval_s energy_to_solution_kJ energy_interval_kJ"
        own["configuration"] = point["configuration"]
        return {**{name: point[name] for name in names.split()}, **own}


@dataclass(frozen=True)
class Curve:
    """Points of a job by falling average power; `start` is what it would train with."""

    run: str
    start: Point
    points: tuple[CurvePoint, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the curve as JSON values."""
        return {
            "run": self.run,
            "start": self.start.configuration.short,
            "of_step": self.start.of_step,
            "meter": dict(vars(self.start.meter)),
            "points": [each.to_json() for each in self.points],
        }


def _fastest(points: Iterable[Point], figure: str) -> set[Configuration]:
    kept, best_s, lowest_W = list[Configuration](), math.inf, 0.0
    known = [(W, p) for p in points if math.isfinite(W := getattr(p, figure) or math.inf)]
    for power_W, point in sorted(known, key=lambda each: (each[0], each[1].time_to_solution_s)):
        if point.time_to_solution_s < best_s:
            if power_W > lowest_W * (1 + SAME_POWER):
                lowest_W = power_W
            else:
                kept.pop()
            kept.append(point.configuration)
            best_s = point.time_to_solution_s
    return set(kept)


def _slowdown_interval(result: Result, start: Point, point: Point) -> Interval | None:
    posterior = result.judged.posterior
    draws = {} if posterior is None else posterior.draws
    if point is start or not {start.configuration, point.configuration} <= draws.keys():
        return None
    apart = sorted((draws[point.configuration][0] - draws[start.configuration][0]).tolist())
    count = len(apart) - 1
    low, high = (math.expm1(apart[round(share * count)]) for share in (0.05, 0.95))
    return Interval(low, high)


def _restarts(records: Sequence[ProbeRecord]) -> dict[Settings, float]:
    found: dict[Settings, list[float]] = {}
    for record in records:
        if record.measurements and record.launch_s > 0:
            found.setdefault(record.request.launch, []).append(record.launch_s)
    return {launch: statistics.median(seconds) for launch, seconds in found.items()}


def power_curve(result: Result, start: str, records: Sequence[ProbeRecord] = ()) -> Curve:
    """Return what the job would do at each power, if it trains with the point named `start`."""
    if not result.points:
        raise InputError(f"run {result.name!r} measured nothing, so it has no power curve")
    first = result.point(start)
    measured = [each for each in result.points if each.meter.scope == first.meter.scope]
    own = [each for each in measured if each.configuration.launch == first.configuration.launch]
    live, every = (
        [_fastest(points, figure) for figure in ("power_W", "peak_power_W")]
        for points in (own, measured)
    )
    restarts, points = _restarts(records), []
    for point in sorted(measured, key=lambda each: (-each.power_W, each.time_to_solution_s)):
        here = point in own
        average, peak = (point.configuration in kept for kept in (live if here else every))
        slowdown = point.time_to_solution_s / first.time_to_solution_s - 1
        restart_s = 0.0 if here else restarts.get(point.configuration.launch)
        if average or peak or point is first:
            interval = _slowdown_interval(result, first, point)
            points.append(CurvePoint(point, slowdown, interval, here, average, peak, restart_s))
    return Curve(result.name, first, tuple(points))
