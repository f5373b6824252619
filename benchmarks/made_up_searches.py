"""Made-up searches whose truth is known, for rules that recommend (`benchmarks.verdicts`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tuner.search_spaces.configuration import Configuration
from tuner.workload.probe import Failure, Measurement, MeterInfo, ProbeRecord, ProbeRequest

METER = MeterInfo("drawn", "node", "a benchmark's draws")
CONFIGURATIONS = tuple(
    Configuration.of(data_parallel=2, micro_batch=2**power) for power in range(10)
)
#: Standard deviations of the logarithms of launches' times and powers.
SPREADS = {"1": (0.01, 0.02), "3": (0.03, 0.03), "5": (0.05, 0.05)}
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
        spread: key of `SPREADS`, or `EXACT`.
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
        """Launch a configuration."""
        time_sd, power_sd, window_sd = self.row.errors
        made = len(self.records)
        request = ProbeRequest(f"p{made:04d}", CONFIGURATIONS[number].launch, purpose=purpose)
        if self.row.ended == "failed" and number == 0 and made:
            failure = Failure("out_of_memory", "the made-up baseline fails")
            self.records.append(ProbeRecord(request, (), METER, failure))
            return
        drawn = self.rng.normal(0, (time_sd, power_sd)) + self.rng.normal(0, window_sd, 2)
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
