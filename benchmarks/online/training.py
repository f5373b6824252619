"""A training of 10,000 steps whose live setting a policy chooses, with noise, stalls and drift.

The noise is drawn before the run, so that all policies train under the same; the truth of a run is
its own time and energy. Nothing here is shared with `tuner.online`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from benchmarks.online.tables import Problem

STEPS, CHUNK = 10_000, 4
#: A new setting is in force after this time, seconds.
SWITCH_S = 1.0
#: Slow common noise: its standard deviation, and its correlation from chunk to chunk.
WANDER, CORRELATION = 0.003, 0.98
#: (every so many steps, usual steps' time, share of the power): a checkpoint and an evaluation.
STALLS = ((500, 10, 0.5), (1000, 20, 0.8))

Drift = Literal["", "longer steps", "heat", "slow rank"]
DRIFTS: tuple[Drift, ...] = ("longer steps", "heat", "slow rank")
#: Step at which each drift begins.
BEGINS = {"longer steps": STEPS // 3, "heat": STEPS // 2, "slow rank": 2 * STEPS // 3}


class Policy(Protocol):
    """Choice of the live setting."""

    def add(self, steps: int, seconds: float, energy_J: float) -> int:
        """Take a few steps at the present setting; return the setting for the next."""
        ...


class Fixed:
    """One setting for the whole run."""

    def __init__(self, setting: int) -> None:
        self._setting = setting

    def add(self, steps: int, seconds: float, energy_J: float) -> int:
        return self._setting


@dataclass(frozen=True)
class Run:
    """Truth of a run.

    Attributes:
        used: number of steps at each setting.
    """

    seconds: float
    energy_J: float
    used: tuple[int, ...]


class Training:
    """One training of a problem, under noise of a seed."""

    def __init__(self, problem: Problem, drift: Drift, seed: int) -> None:
        self.problem, self.drift = problem, drift
        random = np.random.default_rng([seed, len(problem.name), sum(problem.name.encode())])
        chunks = STEPS // CHUNK
        time_noise, power_noise = problem.noise
        slow = np.zeros(chunks)
        kicks = random.normal(0, WANDER * math.sqrt(1 - CORRELATION**2), chunks)
        for at in range(1, chunks):
            slow[at] = CORRELATION * slow[at - 1] + kicks[at]
        self._time = np.exp(random.normal(0, time_noise, chunks) + slow)
        self._power = np.exp(random.normal(0, power_noise, chunks))

    def at(self, setting: int, step: int) -> tuple[float, float]:
        """Return the true step time in s and power in W of a setting at a step."""
        times, powers = self.problem.step_time_s, self.problem.power_W
        time_s, power_W = times[setting], powers[setting]
        if not self.drift or step < BEGINS[self.drift]:
            return time_s, power_W
        if self.drift == "longer steps":
            return 1.2 * time_s, 1.03 * power_W
        if self.drift == "slow rank":  # the others wait for it
            return 1.1 * time_s, 0.95 * power_W
        # Heat: no setting is faster than this any more, which it reaches over 500 steps.
        ramp = min(1.0, (step - BEGINS["heat"]) / 500)
        slowest = max(time_s, times[0] * (1 + 0.06 * ramp))
        return slowest, power_W * (time_s / slowest) ** 1.5

    def run(self, make: Callable[[], Policy]) -> Run:
        """Train to the end under a policy; it begins at the highest setting."""
        policy, setting, earlier, fresh_s = make(), 0, 0, 0.0
        seconds = energy_J = 0.0
        used = [0] * len(self.problem.x)
        for number in range(STEPS // CHUNK):
            step = number * CHUNK
            time_s, power_W = self.at(setting, step)
            if fresh_s > 0:
                old_s, old_W = self.at(earlier, step)
                share = min(1.0, fresh_s / (CHUNK * old_s))
                time_s, power_W = (
                    time_s + share * (old_s - time_s),
                    power_W + share * (old_W - power_W),
                )
            chunk_s = CHUNK * time_s * self._time[number]
            chunk_J = chunk_s * power_W * self._power[number]
            fresh_s -= chunk_s
            for every, steps, share in STALLS:
                if step and step % every < CHUNK:
                    stall_s = steps * self.at(0, 0)[0]
                    chunk_s, chunk_J = chunk_s + stall_s, chunk_J + stall_s * share * power_W
            seconds, energy_J = seconds + chunk_s, energy_J + chunk_J
            used[setting] += CHUNK
            wanted = policy.add(CHUNK, chunk_s, chunk_J)
            if wanted != setting:
                earlier, setting, fresh_s = setting, wanted, SWITCH_S
        return Run(seconds, energy_J, tuple(used))
