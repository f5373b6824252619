"""Outcome of a training that was tuned while it ran."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tuner.online.follow import Period
from tuner.online.promise import Balance
from tuner.online.windows import Change
from tuner.workload.measure.stragglers import RankState, Straggler
from tuner.workload.probe import MeterInfo

#: Why a training is not, or no longer, tuned.
Ended = Literal["", "unmetered", "fixed", "length", "refused", "meter", "fault"]


@dataclass(frozen=True)
class TuningOutcome:
    """Outcome of a training that was tuned while it ran.

    Attributes:
        settings: what could be chosen; the first, "", is the machine as it was.
        relative: step time and power of each setting over the first's, as estimated.
        problem: the sentence of the error behind `ended`.
        not_restored: what could not be put back.
        limits: name, value and what the whole command took, for each limit on it.
    """

    exit_code: int
    max_slowdown: float | None
    settings: tuple[str, ...] = ()
    meter: MeterInfo | None = None
    steps: int = 0
    seconds_at: tuple[float, ...] = ()
    relative: tuple[tuple[float, float], ...] = ()
    balance: Balance = field(default_factory=Balance)
    stalled_s: float = 0.0
    changes: tuple[Change, ...] = ()
    ended: Ended = ""
    problem: str = ""
    not_restored: str = ""
    periods: tuple[Period, ...] = ()
    record: Path | None = None
    limits: tuple[tuple[str, float, float], ...] = ()
    ranks: tuple[RankState, ...] = ()
    stragglers: tuple[Straggler, ...] = ()

    @property
    def kept(self) -> bool | None:
        """True if the slowdown is within the promise by its estimate; None if there is none."""
        if not self.steps or self.max_slowdown is None:
            return None
        return self.balance.slowdown[1] <= self.max_slowdown
