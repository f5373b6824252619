"""A training that follows a target of power in watts, which a file or a web server tells."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.online.bandit import STEP, Decision, OnlineTuner
from tuner.online.response import UNLIMITED, Views
from tuner.online.windows import Chunk
from tuner.search_spaces.errors import InputError

#: Distance that is kept below the target, and the least gain for which a faster setting is entered,
#: in log power.
MARGIN, WORTH = 0.006, 0.004
#: Standard deviations by which a setting is taken to draw more than is expected.
CAUTION = 1.0
#: Windows that the budget must allow for before the highest setting is left.
ENTER = 4

#: What is said of a target that is not met.
LOW = "is less than the job can draw: it runs at the lowest setting"
HIGH = "is more than the job draws: it runs at the highest setting"
SPENT = "is not followed until the budget of slowdown allows it again"
#: Seconds between two readings, and those that a server may take.
EVERY_S, TIMEOUT_S = 1.0, 5.0
#: A target that changes by more than this factor counts when it is read a second time: a file may
#: be read while it is written.
JUMP = 2.0
#: Most bytes of a reading.
MOST = 4096


def watts_of(text: str) -> float | None:
    """Return the target of a text: a number of watts, or None for "none"; else raise InputError."""
    word = text.strip().removesuffix("W").strip()
    if word.lower() == "none":
        return None
    with contextlib.suppress(ValueError):
        watts = float(word)
        if 0 < watts < math.inf:
            return watts
    raise InputError(f"{text.strip()[:40]!r} is no target: write a number of watts, or none")


class Signal:
    """Latest target of a file, or of an address that begins with http:// or https://; or watts."""

    def __init__(self, source: str | float) -> None:
        # Why the source cannot be read, or that its target jumped.
        self._source, self.problem = source, ""
        try:
            self.target_W = watts_of(self._text())  # the last good one; None: no limit
        except OSError as error:
            why = error.strerror or error
            raise InputError(f"--follow-power: {source} cannot be read: {why}") from error
        self._jumped: float | None = None

    def start(self) -> None:
        """Begin to follow the source, until the process ends."""
        if isinstance(self._source, str):
            threading.Thread(target=self._follow, daemon=True).start()

    def _text(self) -> str:
        if not isinstance(self._source, str):
            return str(self._source)
        if self._source.startswith(("http://", "https://")):
            with urllib.request.urlopen(self._source, timeout=TIMEOUT_S) as answer:
                return str(answer.read(MOST).decode(errors="replace"))
        with Path(self._source).open("rb") as file:
            return file.read(MOST).decode(errors="replace")

    def read(self) -> None:
        """Take in what the source tells now."""
        try:
            watts = watts_of(self._text())
        except Exception as error:  # whatever a server answers, the training goes on
            why = getattr(error, "strerror", None) or error
            self.problem = f"the power signal stopped: {why}; its last target stays"
            return
        before = self.target_W
        far = watts is not None and before is not None and not 1 / JUMP <= watts / before <= JUMP
        if far and watts != self._jumped:
            self._jumped = watts
            self.problem = f"the power signal jumped from {before:g} W to {watts:g} W, which is "
            self.problem += "followed once it is read again"
            return
        self._jumped, self.target_W = None, watts
        self.problem = self.problem if far else ""

    def _follow(self) -> None:
        while True:
            time.sleep(EVERY_S)
            self.read()


@dataclass
class Period:
    """Time under one target (None: no limit), `beyond_s` of it in chunks that drew more."""

    target_W: float | None
    seconds: float = 0.0
    energy_J: float = 0.0
    beyond_s: float = 0.0


class PowerFollower(OnlineTuner):
    """Choice of the fastest live setting within a target of power, by the meter's scope, with any
    slowdown of the whole run if `max_slowdown` is None."""

    def __init__(self, x: Sequence[float], *, max_slowdown: float | None, **given: Any) -> None:
        most = UNLIMITED if max_slowdown is None else max_slowdown
        super().__init__(x, max_slowdown=most, **given)
        self.target_W: float | None = None
        self.periods: list[Period] = []
        self.unmet = ""
        self._limited = max_slowdown is not None

    def add(self, chunk: Chunk) -> Decision:
        """Add whole steps that ran at the decided setting; return the decision for the next."""
        last = self.periods[-1] if self.periods else Period(None)
        changed = last.target_W != self.target_W
        if changed or not self.periods:
            self.periods.append(last := Period(self.target_W))
        last.seconds += chunk.seconds
        last.energy_J += chunk.energy_J
        if self.target_W is not None and chunk.energy_J > self.target_W * chunk.seconds:
            last.beyond_s += chunk.seconds
        super().add(chunk)
        if changed:
            self._go(self._decide())
        return self.decision

    def _decide(self) -> Decision:
        usable = sorted({*self._settings} - self._barred)
        if self.target_W is None or not self._measured:
            self.unmet = ""
            return Decision(0, "choice")
        here, most, views = self.decision.setting, math.log(self.target_W) - MARGIN, self._views()
        drawn, more = {}, max(0.0, self._power.lately(here))
        for each in usable:
            mean, sd = views.power.value(each)
            drawn[each] = mean + CAUTION * sd + more + (WORTH if each < here else 0.0)
        reach = [each for each in usable if self._in_reach(each, self._depth(views, most))]
        fits = [each for each in reach if drawn[each] <= most]
        wanted = min(fits) if fits else reach[-1]
        low = not fits and usable[-1] in self._measured
        high = wanted == 0 and drawn[0] < most - 5 * MARGIN
        self.unmet = LOW if low else HIGH if high else ""
        # From the highest setting it is entered only for some time, and not for a moment.
        cost_s = self._loss_s(views, wanted, ENTER if here == 0 else 1)
        if wanted and self._limited and cost_s > max(0.0, self._left_s(views)[0]):
            self.unmet, wanted = SPENT, 0
        return Decision(wanted, "choice")

    def _depth(self, views: Views, most: float) -> float:
        # How far below the lowest measured setting one may be entered, in x.
        if self._limited:
            return STEP
        lowest = max(self._measured, key=self._x.__getitem__)
        drawn, top = views.power.value(lowest)[0], views.power.value(0)[0]
        # A limit that does not bind tells nothing of those below it, else power falls by the limit.
        idle = self._x[lowest] if top - drawn < MARGIN else 0.0
        return max(STEP, idle, drawn - most)
