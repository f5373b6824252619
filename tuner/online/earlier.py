"""Earlier measurements of live settings, of a study's point.

Whether the job is the same is judged by what it takes and draws (`tuner.online.bandit`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.online.response import Studied
from tuner.online.settings import mean_value
from tuner.problem.problem import steps_a_job_step
from tuner.problem.run_folder import RunFolder
from tuner.results.result import Result
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.study.load import result_of
from tuner.workload.probe import SAME_CLOCK_MHZ, MeterInfo

#: Least relative standard error of an earlier figure.
LEAST_ERROR = 0.003


@dataclass(frozen=True)
class Setup:
    """Devices, meter (mark, name and scope) and number of ranks (0: unknown) of a measurement."""

    device: str
    meter: str
    ranks: int = 0

    @classmethod
    def of(cls, device: str, meter: MeterInfo, ranks: int = 0) -> Setup:
        """Return the setup of a device and the meter that charges it."""
        return cls(device, " ".join(filter(None, (meter.mark, meter.name, meter.scope))), ranks)


@dataclass(frozen=True)
class Earlier:
    """Earlier measurements of one launch, of the run that it is named after."""

    name: str
    setup: Setup
    points: Mapping[Settings, Studied]

    def why_not(self, now: Setup) -> str:
        """Return why these are of no use for a training of this setup, or ""."""
        then = self.setup
        if then.device != now.device:
            return f"it is of {then.device}, and this machine has {now.device}"
        if then.meter != now.meter:
            return f"it was metered by {then.meter}, and this training by {now.meter}"
        if now.ranks and then.ranks not in (0, now.ranks):
            return f"it is of {then.ranks} ranks, and this training has {now.ranks}"
        return ""

    @property
    def clocks_MHz(self) -> set[float]:
        """Clocks that were measured."""
        clocks = (live.get("clock_MHz") for live in self.points)
        return {each for each in clocks if isinstance(each, int | float)}

    def studied(self, settings: Sequence[Settings], top_MHz: float) -> dict[int, Studied]:
        """Return those measurements that are of one of these settings; of two, the surer.

        A setting that names no clock has `top_MHz`.
        """
        found: dict[int, Studied] = {}
        for live, studied in sorted(self.points.items(), key=lambda each: -each[1].error):
            same = (_same(each, live, settings[0], top_MHz) for each in settings)
            if (at := next((i for i, is_same in enumerate(same) if is_same), None)) is not None:
                found[at] = studied
        return found


def _same(one: Settings, other: Settings, first: Settings, top_MHz: float) -> bool:
    if any(isinstance(value, tuple) for value in (*one.values(), *other.values())):
        return one == other
    a, b = ({"clock_MHz": top_MHz, **first, **settings} for settings in (one, other))
    apart = abs(mean_value(a.pop("clock_MHz")) - mean_value(b.pop("clock_MHz")))
    return a == b and apart <= SAME_CLOCK_MHZ


def of_study(result: Result, point: str) -> Earlier:
    """Return what a study measured of a point's launch at each of its live settings; InputError if
    it measured none of them."""
    chosen = result.point(point)
    launch, cluster = chosen.configuration.launch, result.cluster
    points = {}
    for each in result.points:
        live, job = each.configuration.live, result.job
        stages = any(isinstance(value, tuple) for value in live.values())
        if each.configuration.launch != launch or each.source != "measured" or stages:
            continue
        steps = result.steps * steps_a_job_step(each.configuration, job)
        ends = (each.time_interval_s, each.power_interval_W or (each.power_W, each.power_W))
        error = max(math.log(high / low) / (2 * 1.645) for low, high in ends)
        step_time_s = each.time_to_solution_s / steps
        points[live] = Studied(step_time_s, each.power_W, max(error, LEAST_ERROR))
    sure = bool(points) and all(math.isfinite(each.error) for each in points.values())
    if not sure or cluster is None:
        raise InputError(
            f"run {result.name!r} measured nothing of {chosen.configuration.short} on a device, so "
            "there is nothing to begin with; leave it out"
        )
    setup = Setup.of(cluster.device.name, chosen.meter, chosen.configuration.world_size)
    return Earlier(f"run {result.name}", setup, points)


def earlier_of(folder: Path, point: str = "recommended") -> Earlier:
    """Return what the study in a folder tells of a point (`of_study`)."""
    return of_study(result_of(RunFolder(folder)), point)
