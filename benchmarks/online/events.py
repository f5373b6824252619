"""Demand response replayed: a training is asked to draw 25 % less for three hours.

Between the recorded live settings, time and power are interpolated (line in the logarithms), as the
clocks of a device are closer than those of the tables. Noise, checkpoints and evaluations are those
of `benchmarks.online.training`. Tables whose lowest setting draws more than the target are left
out: there the target cannot be met. What is judged is what the training drew and lost.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.figures import Figure
from benchmarks.online.tables import Problem
from benchmarks.online.training import CORRELATION, STALLS, SWITCH_S, WANDER
from tuner.online.follow import PowerFollower
from tuner.online.windows import Chunk

CHUNK = 4
#: What is asked, and when: an event begins after a while at the highest setting.
SHARE, BEFORE_S, EVENT_S = 0.75, 600.0, 3 * 3600.0
#: Settings of a device between the recorded ones, in x.
APART = 0.0107  # 15 MHz of 1,410
#: The target is met from the first chunk on that draws at most it and at least this share of it.
MET = 0.95
#: Span over which an overshoot is judged, and its start after the event's, seconds.
MINUTE_S, RESPONSE_S = 60.0, 30.0


@dataclass(frozen=True)
class Event:
    """Truth of an event.

    Attributes:
        met_s: time from its start until the target is met; infinite if never.
        tracking_error: mean distance of a minute's power from the target, as its share.
        steps_error: the same without the time of checkpoints and evaluations.
        overshoots: minutes that drew more than the target.
        covered: whether the stated interval holds the slowdown.
    """

    met_s: float
    tracking_error: float
    steps_error: float
    overshoots: int
    covered: bool


def fine(problem: Problem) -> Problem | None:
    """Return a problem with settings in between; None if it cannot draw so little."""
    if min(problem.power_W) > SHARE * problem.power_W[0] * 0.98:
        return None
    x = np.linspace(0.0, problem.x[-1], max(2, math.ceil(problem.x[-1] / APART) + 1))
    times, powers = (
        np.exp(np.interp(x, problem.x, np.log(values)))
        for values in (problem.step_time_s, problem.power_W)
    )
    return Problem(problem.name, problem.split, *(tuple(a.tolist()) for a in (x, times, powers)))


class _Job:
    """Training that is run chunk by chunk, under noise of a seed."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem, self.step = problem, 0
        self._random = np.random.default_rng([seed, 77])
        self._slow = 0.0

    def chunk(self, setting: int, earlier: int, fresh_s: float) -> tuple[float, float, float]:
        """Return (seconds, joules, seconds at the highest setting) of a few steps."""
        times, powers = self.problem.step_time_s, self.problem.power_W
        a, b, c = self._random.standard_normal(3)
        self._slow = CORRELATION * self._slow + WANDER * math.sqrt(1 - CORRELATION**2) * a
        time_s, power_W = times[setting], powers[setting]
        share = min(1.0, max(0.0, fresh_s) / (CHUNK * times[earlier]))
        time_s += share * (times[earlier] - time_s)
        power_W += share * (powers[earlier] - power_W)
        factor = math.exp(self.problem.noise[0] * b + self._slow)
        seconds = CHUNK * time_s * factor
        energy_J = seconds * power_W * math.exp(self.problem.noise[1] * c)
        highest_s = CHUNK * times[0] * factor
        for every, steps, part in STALLS:
            if self.step and self.step % every < CHUNK:
                stall_s = steps * times[0]
                seconds, highest_s = seconds + stall_s, highest_s + stall_s
                energy_J += stall_s * part * power_W
        self.step += CHUNK
        return seconds, energy_J, highest_s


def event(problem: Problem, seed: int) -> Event:
    """Replay one event of a problem of `fine`."""
    job, follower = (
        _Job(problem, seed),
        PowerFollower(problem.x, max_slowdown=None),
    )
    target_W = SHARE * problem.power_W[0]
    setting, earlier, fresh_s = 0, 0, 0.0
    seconds = highest_s = 0.0
    met_s, drawn = math.inf, []
    while seconds < BEFORE_S + EVENT_S:
        follower.follow(target_W if seconds >= BEFORE_S else None)
        begun_s, stalled_s = seconds - BEFORE_S, follower.stalled_s
        chunk_s, energy_J, least_s = job.chunk(setting, earlier, fresh_s)
        seconds, highest_s, fresh_s = seconds + chunk_s, highest_s + least_s, fresh_s - chunk_s
        wanted = follower.add(Chunk(CHUNK, chunk_s, energy_J)).setting
        if begun_s >= 0:
            if math.isinf(met_s) and MET * target_W <= energy_J / chunk_s <= target_W:
                met_s = begun_s + chunk_s
            if begun_s >= RESPONSE_S:
                drawn.append((chunk_s, energy_J, follower.stalled_s > stalled_s))
        if wanted != setting:
            earlier, setting, fresh_s = setting, wanted, SWITCH_S
    low, _, high = follower.balance.slowdown
    minutes, steps = _minutes(drawn), _minutes([each for each in drawn if not each[2]])
    return Event(
        met_s,
        statistics.fmean(abs(power_W / target_W - 1) for power_W in minutes),
        statistics.fmean(abs(power_W / target_W - 1) for power_W in steps),
        sum(power_W > target_W for power_W in minutes),
        low <= seconds / highest_s - 1 <= high,
    )


def _minutes(drawn: Sequence[tuple[float, float, bool]]) -> list[float]:
    """Return the mean power of each minute, watts."""
    found, seconds, energy_J = [], 0.0, 0.0
    for chunk_s, chunk_J, _ in drawn:
        seconds, energy_J = seconds + chunk_s, energy_J + chunk_J
        if seconds >= MINUTE_S:
            found.append(energy_J / seconds)
            seconds = energy_J = 0.0
    return found


def event_figures(problems: Sequence[Problem], events: int) -> list[Figure]:
    """Replay events over the problems in turn; return the figures."""
    able = [each for each in map(fine, problems) if each is not None]
    done = [event(able[number % len(able)], number) for number in range(events)]
    met = sorted(each.met_s for each in done)
    values = {
        "target_met_s": (statistics.median(met), "s"),
        "target_met_s_95": (met[math.ceil(0.95 * len(met)) - 1], "s"),
        "tracking_error": (statistics.fmean(each.tracking_error for each in done), "share"),
        "tracking_error_of_steps": (statistics.fmean(each.steps_error for each in done), "share"),
        "cap_overshoots": (sum(each.overshoots for each in done), "count"),
        "slowdown_in_interval_following": (
            statistics.fmean(each.covered for each in done),
            "share",
        ),
        "events_replayed": (len(done), "count"),
        "tables_that_cannot_follow": (len(problems) - len(able), "count"),
    }
    return [Figure(name, value, unit) for name, (value, unit) in values.items()]
