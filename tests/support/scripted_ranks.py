"""Ranks and a meter that follow a script on a clock of their own, for tests of a window."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

from tuner.workload.node.meters.base import Reading
from tuner.workload.node.rank_messages import Event
from tuner.workload.records.probe import MeterInfo, PowerSample


class ScriptedClock:
    """A clock that the ranks and the meter advance."""

    def __init__(self, now_s: float = 50.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class ScriptedRanks:
    """A RankGroup whose steps take as long as the script says.

    Args:
        clock: shared with the conductor and the meter.
        step_s: seconds of step number n (from 1).
        size: ranks; a later rank ends each step `lag_s` after the one before it.
        marks: phases told at the start of each step.
        compiles: seconds for which a step compiles first, by its number.
        steps: after which the ranks end by themselves.
    """

    def __init__(
        self,
        clock: ScriptedClock,
        step_s: Callable[[int], float],
        *,
        size: int = 2,
        lag_s: float = 0.0,
        marks: tuple[str, ...] = (),
        compiles: Mapping[int, float] | None = None,
        steps: float = math.inf,
    ) -> None:
        self._compiles, self._steps = compiles or {}, steps
        self.size, self._clock, self._step_s = size, clock, step_s
        self.patience_s = 1.0
        self._lag_s, self._marks = lag_s, marks
        self._events: deque[tuple[float, Event]] = deque()
        self.done = 0
        self.boundaries: list[int] = []
        self._run(1)

    def _run(self, target: int) -> None:
        now_s = self._clock()
        while self.done < min(target, self._steps):
            self.done += 1
            for name in self._marks:
                mark = Event("phase", 0, time_s=now_s, detail={"name": name})
                self._events.append((now_s, mark))
            if self.done in self._compiles:
                ends_s = now_s + self._compiles[self.done]
                for at_s, name in ((now_s, "compilation"), (ends_s, "boundary")):
                    self._events.append(
                        (at_s, Event("phase", 0, time_s=at_s, detail={"name": name}))
                    )
                now_s = ends_s
            now_s += self._step_s(self.done)
            kind = "at" if self.done == target else "step"
            for rank in range(self.size):
                end_s = now_s + rank * self._lag_s
                self._events.append((end_s, Event(kind, rank, self.done, end_s)))
        self.boundaries.append(target)
        if self.done < target:
            for rank in range(self.size):
                self._events.append((now_s, Event("exit", rank, detail={"code": 0})))

    def second_training(self, limit_s: float) -> str:
        """Return nothing: there is no other."""
        return ""

    def describe(self) -> str:
        """Return "": there are no others."""
        return ""

    def expects_more(self) -> bool:
        """Return False: there are no others."""
        return False

    def send(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "set":
            for rank in range(self.size):
                self._events.append((self._clock(), Event("set", rank, detail={"read": {}})))
        if word == "run":
            self._run(int(rest))

    def next_event(self, timeout_s: float) -> Event | None:
        if not self._events or self._events[0][0] > self._clock() + timeout_s:
            self._clock.now_s += timeout_s
            return None
        at_s, event = self._events.popleft()
        self._clock.now_s = max(self._clock.now_s, at_s)
        return event


class ScriptedMeter:
    """A meter whose power is a function of time; its samples lie on a grid of 100 ms."""

    def __init__(
        self,
        clock: ScriptedClock,
        power_W: Callable[[float], float],
        *,
        extra: Callable[[float], dict[str, float]] = lambda now_s: {},
        counter: float = 1.0,
    ) -> None:
        self.info = MeterInfo("scripted", "gpu", "a script of the test", independent=True)
        self.resolution_s = 0.02
        self._clock, self._power_W, self._extra, self._counter = clock, power_W, extra, counter
        self.start_s = clock()
        self.edges: list[bool] = []

    def read(self) -> Reading:
        """Return the integral from the start, by the midpoints of milliseconds."""
        now_s = self._clock()
        steps = max(1, round((now_s - self.start_s) * 1000))
        width_s = (now_s - self.start_s) / steps
        energy_J = sum(
            self._power_W(self.start_s + (k + 0.5) * width_s) * width_s for k in range(steps)
        )
        return Reading(now_s, energy_J * self._counter)

    def boundary(self, *, opens: bool) -> Reading:
        self.edges.append(opens)
        return self.read()

    def sample(self) -> PowerSample:
        now_s = self._clock()
        return PowerSample(now_s, self._power_W(now_s), self._extra(now_s))

    def samples(self) -> tuple[PowerSample, ...]:
        """Return the timeline that a thread would have sampled until now."""
        count = int((self._clock() - self.start_s) / 0.1)
        times = [self.start_s + 0.1 * k for k in range(count + 1)]
        return tuple(PowerSample(t, self._power_W(t), self._extra(t)) for t in times)

    def close(self) -> None:
        pass
