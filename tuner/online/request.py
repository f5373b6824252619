"""Target that a training is tuned to, checked in one place, and the outcome of its tuning."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tuner.online.follow import Period, Signal, run_limits
from tuner.online.response import Balance
from tuner.online.settings import EarlierMeasurements, earlier_of
from tuner.online.windows import Change
from tuner.problem.constraints import Constraints, LimitOptions
from tuner.search_spaces.errors import InputError, InvalidValue, check_integer
from tuner.search_spaces.knob_declarations import Knob, check_knobs
from tuner.workload.node.measure.stragglers import RankState, Straggler
from tuner.workload.records.probe import MeterInfo

#: Most combinations of values of declared knobs that one training tries.
MOST_DECLARED = 12
#: Promise of a tuned training that was given none.
DEFAULT_SLOWDOWN = 0.05
#: Why a training is not, or no longer, tuned.
Ended = Literal["", "unmetered", "fixed", "length", "refused", "meter", "fault"]


class TuningOptions(LimitOptions, total=False):
    """Options of `tuner.tuning`: limits and those of `TuningRequest`; `transfer` is a folder."""

    steps: int | None
    follow_power: str | float | None
    transfer: str | Path | None
    keep: str | Path | None


@dataclass(frozen=True)
class TuningRequest:
    """Target of a tuning; InputError if it contradicts itself or is not allowed."""

    # on the slowdown of the whole run, by default 5 %, or any if a power is kept; or its deadline
    # and energy budget, or its power cap.
    limits: Constraints = field(default_factory=Constraints)
    steps: int | None = None  # that it takes, if its framework does not say so
    follow_power: str | float | None = None  # file or address of a target in watts, or the watts
    earlier: EarlierMeasurements | None = (
        None  # to begin with, unless it is of another device or job
    )
    keep: Path | None = None  # folder for what is learned, to whose name a number is added
    knobs: tuple[Knob, ...] = ()

    @classmethod
    def of(cls, options: TuningOptions) -> TuningRequest:
        """Return the request of these options of Python."""
        limits: dict[str, Any] = {**options}
        own = {name: limits.pop(name, None) for name in ("steps", "follow_power")}
        transfer, keep = limits.pop("transfer", None), limits.pop("keep", None)
        return cls(
            Constraints().limited(**limits),
            earlier=None if transfer is None else earlier_of(Path(transfer)),
            keep=None if keep is None else Path(keep),
            **own,
        )

    def __post_init__(self) -> None:
        limits, of_run = self.limits, run_limits(self.limits) is not None
        if of_run and (limits.max_slowdown is not None or limits.power_cap_W is not None):
            raise InputError(
                "--deadline and --budget are kept without --max-slowdown and --power-cap; leave "
                "one out"
            )
        if limits.max_slowdown is not None and not limits.max_slowdown < 1:
            legal = "a share from 0 to below 1, e.g. 5%"
            raise InvalidValue("max_slowdown", limits.max_slowdown, legal)
        if self.steps is not None:
            check_integer("steps", self.steps)
            if not of_run:
                raise InputError("--steps is for --deadline and --budget of a tuned training")
        for knob in check_knobs(self.knobs):
            if not knob.live:
                raise InputError(
                    f"knob {knob.name!r} needs a new launch; a tuned training takes live knobs, "
                    f"such as --knob live:{knob.name}=..."
                )
        if (count := math.prod(len(knob.values) for knob in self.knobs)) > MOST_DECLARED:
            raise InputError(
                f"the declared knobs have {count} combinations of values, and one training tries "
                f"{MOST_DECLARED} at most; leave some out"
            )
        if self.knobs and not (self.follow_power is None and limits.power_cap_W is None):
            raise InputError("a power is kept by clocks alone; leave out --knob and --knobs")
        if self.follow_power is not None and limits.limits:
            raise InputError("--follow-power keeps its target alone; leave out limits of --tune")

    @property
    def max_slowdown(self) -> float | None:
        """Promised slowdown; None: any is allowed."""
        free = self.follow_power is not None or self.limits.limits
        given = self.limits.max_slowdown
        return DEFAULT_SLOWDOWN if given is None and not free else given

    def signal(self) -> Signal | None:
        """Return the target of power, None without one, or raise InputError."""
        cap_W = self.limits.power_cap_W
        source = self.follow_power if cap_W is None else cap_W
        return None if source is None else Signal(source)


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
