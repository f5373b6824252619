"""Made-up searches whose truth is known, for rules that recommend (`benchmarks.verdicts`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tuner.search_spaces.configuration import Configuration
from tuner.workload.records.probe import Failure, Measurement, MeterInfo, ProbeRecord, ProbeRequest

METER = MeterInfo("drawn", "node", "a benchmark's draws")
CONFIGURATIONS = tuple(
    Configuration.of(data_parallel=2, micro_batch=2**power) for power in range(10)
)
#: Standard deviations of the logarithms of launches' times and powers.
SPREADS = {"1": (0.01, 0.02), "3": (0.03, 0.03), "5": (0.05, 0.05)}
#: Machines whose launches differ in another way than by a normal distribution of their own.
MACHINES = ("heavy tails", "bimodal", "slow node", "sticky", "autocorrelated", "cold first launch")
#: Error of a window.
WINDOW = 0.015
#: Name of the spread, and every error, of a machine whose launches and windows are exact.
EXACT, EXACT_SD = "exact", 0.0005
#: Slowdown from launch to launch where the machine drifts.
DRIFT = 0.005
STEPS = 1000


@dataclass(frozen=True)
class Row:
    """One kind of search.

    Attributes:
        truth: "flat", "worse" (the baseline is the best), or the per cent that one saves.
        spread: key of `SPREADS`, `EXACT`, or one of `MACHINES`.
        limit: number of probes.
        drift: whether the machine slows down.
        ended: "" (by its limit), "interrupted" (after the search) or "failed" (the baseline runs
            out of memory when it is launched again).
    """

    truth: str
    spread: str
    limit: int = 24
    drift: bool = False
    ended: str = ""

    @property
    def errors(self) -> tuple[float, float, float]:
        """Standard deviations of launches' times and powers, and of a window's."""
        if self.spread == EXACT:
            return (EXACT_SD,) * 3
        if self.spread in MACHINES:
            return (0.0, 0.0, WINDOW)  # `LaunchEffects` has the launches'
        return (*SPREADS[self.spread], WINDOW)


@dataclass(frozen=True)
class Outcome:
    """Answer of one search.

    Attributes:
        saved: what the recommended configuration truly saves, a logarithm; None if it is today.
        launches: launches after the search.
        stated, low, high: the saving as stated, with its 95 % interval; NaN without.
        off: mean difference of the times that are shown from the truth, a logarithm.
    """

    saved: float | None
    launches: int
    stated: float = math.nan
    low: float = math.nan
    high: float = math.nan
    off: float = math.nan


class LaunchEffects:
    """Errors of log time and log power that all windows of a launch share, launch by launch.

    Args:
        machine: one of `MACHINES`.
        seed: of the draws.
    """

    def __init__(self, machine: str, seed: int) -> None:
        self._machine, self._rng = machine, np.random.default_rng([seed, 77])
        self._launches, self._level, self._is_slow = 0, 0.0, False

    def draw(self) -> np.ndarray:
        """Return the errors of the next launch, (2,)."""
        rng, first = self._rng, not self._launches
        self._launches += 1
        if self._machine == "heavy tails":
            return 0.02 * rng.standard_t(3, 2)
        rest = rng.normal(0, 0.005, 2)
        if self._machine == "autocorrelated":
            self._level = 0.85 * self._level + math.sqrt(1 - 0.85**2) * rng.normal(0, 0.03)
            return np.array([self._level, -0.3 * self._level]) + rest
        if self._machine == "sticky":  # a state that lasts for about five launches
            self._is_slow ^= rng.random() < 0.2
            return np.array([0.06, -0.02]) * self._is_slow + rest
        if self._machine == "bimodal":
            return np.array([0.08, -0.04]) * (rng.random() < 0.3) + rest
        if self._machine == "slow node":
            return np.array([0.15, -0.05]) * (rng.random() < 0.1) + rest
        return np.array([0.08, 0.0]) * first + rest


class Machine:
    """A machine on which each launch draws its time and power.

    Args:
        row: kind of search.
        seed: of the draws.

    Attributes:
        logs: of each configuration's true time over the baseline's.
        records: probes so far, the first of which is the baseline's.
    """

    def __init__(self, row: Row, seed: int) -> None:
        self.row, self.rng = row, np.random.default_rng([seed, 9])
        self._order = np.random.default_rng([seed, 5])
        self._effects = LaunchEffects(row.spread, seed) if row.spread in MACHINES else None
        self.logs = np.zeros(len(CONFIGURATIONS))
        if row.truth != "flat":
            self.logs[1:] = np.abs(self._order.normal(0, 0.08, len(self.logs) - 1))
        self._others = [int(each) for each in self._order.permutation(np.arange(1, len(self.logs)))]
        if row.truth.isdigit():
            self.logs[self._others[0]] = math.log1p(-int(row.truth) / 100)
        self.records: list[ProbeRecord] = []
        self.launch(0, "baseline")

    def candidates(self, room: int) -> Iterator[int]:
        """Return what is searched in this number of probes, with what truly saves in it."""
        tried = self._others[: room - 1]
        while tried:
            yield tried.pop(int(self._order.integers(len(tried))))

    def launch(self, number: int, purpose: str) -> None:
        time_sd, power_sd, window_sd = self.row.errors
        made = len(self.records)
        request = ProbeRequest(f"p{made:04d}", CONFIGURATIONS[number].launch, purpose=purpose)
        if self.row.ended == "failed" and number == 0 and made:
            failure = Failure("out_of_memory", "the made-up baseline fails")
            self.records.append(ProbeRecord(request, (), METER, failure))
            return
        drawn = self.rng.normal(0, (time_sd, power_sd)) + self.rng.normal(0, window_sd, 2)
        if self._effects is not None:
            drawn += self._effects.draw()
        time_s = math.exp(self.logs[number] + drawn[0] + DRIFT * made * self.row.drift)
        power_W = 200 * math.exp(drawn[1])
        window = Measurement(
            CONFIGURATIONS[number].live,
            steps=10,
            window_s=10 * time_s,
            step_time_s=time_s,
            energy_J=10 * time_s * power_W,
            power_W=power_W,
            step_time_se_s=window_sd * time_s,
            power_se_W=window_sd * power_W,
        )
        self.records.append(ProbeRecord(request, (window,), METER))
