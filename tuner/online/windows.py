"""Windows of whole optimizer steps at one live setting, and changes that they reveal.

The training is observed in chunks: a few whole steps between two readings of the energy counter. A
chunk in which something other than steps took time (evaluation, a checkpoint, a stall) is no
measurement of the setting; its time and energy still count towards the totals of the run.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import socket
import statistics
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tuner.workload.node.clocks.base import KnobRefused

#: A chunk is stalled if its mean step takes this many times the usual one, or is further above it
#: than this many median deviations, whichever is more.
STALL, DEVIATIONS = 1.25, 8.0
#: From this number of consecutive chunks on, a longer step is the new usual one and no stall.
NEW_USUAL = 6
#: Number of chunks whose median is the usual step time.
MEMORY = 15
#: Page's test (1954), in standard deviations: its reference value and limit, and what a residual
#: counts at most, so that one odd window is no change and two clear ones are.
REFERENCE, LIMIT, MOST = 1.0, 4.0, 3.0
#: Relative change that is not worth a restart, added to the standard deviation of a residual.
TOLERANCE = 0.003
#: A change is reported from this mean relative size on.
LEAST = 0.01

Quantity = Literal["step time", "power"]


@dataclass(frozen=True)
class Chunk:
    """A few whole optimizer steps in a row at one setting."""

    steps: int
    seconds: float
    energy_J: float

    @property
    def step_time_s(self) -> float:
        """Mean time of a step, seconds."""
        return self.seconds / self.steps


@dataclass(frozen=True)
class Window:
    """Mean step time and power of whole steps at one setting, by its index."""

    setting: int
    steps: int
    step_time_s: float
    power_W: float


class WindowCollector:
    """Collection of the chunks of one setting into windows of at least `window_s`, seconds, from
    `settle_s` after a switch on."""

    def __init__(self, window_s: float, settle_s: float) -> None:
        self._window_s, self._settle_s = window_s, settle_s
        self.stalled_s = 0.0  # time of stalled chunks beyond their usual steps
        self.switch(0, math.inf)

    def switch(self, setting: int, longest_s: float, patience: int = NEW_USUAL) -> None:
        """Begin anew under a setting whose steps are expected to take `longest_s` at most; after
        `patience` longer chunks in a row they are not a stall.
        """
        self._patience = patience
        self._setting, self._left_s, self._longest_s = setting, self._settle_s, longest_s
        self._usual: deque[float] = deque(maxlen=MEMORY)
        self._long: list[Chunk] = []
        self._chunks: list[Chunk] = []

    def add(self, chunk: Chunk) -> Window | None:
        """Add a chunk; return the window that it completes, or None."""
        if self._left_s > 0:
            self._left_s -= chunk.seconds
            return None
        if self._stalls(chunk):
            self._long.append(chunk)
            if len(self._long) < self._patience:
                usual_s = statistics.median(self._usual) if self._usual else self._longest_s
                self.stalled_s += chunk.seconds - chunk.steps * usual_s
                return None
            # Not a stall: steps take longer from here on.
            self._usual.clear()
            self._longest_s = max(each.step_time_s for each in self._long)
            self._chunks = self._long[:]
        else:
            self._chunks.append(chunk)
        self._long = []
        self._usual.append(chunk.step_time_s)
        seconds = sum(each.seconds for each in self._chunks)
        if seconds < self._window_s:
            return None
        steps = sum(each.steps for each in self._chunks)
        energy_J = sum(each.energy_J for each in self._chunks)
        self._chunks = []
        if energy_J <= 0:  # the counter stood still
            return None
        return Window(self._setting, steps, seconds / steps, energy_J / seconds)

    def _stalls(self, chunk: Chunk) -> bool:
        if len(self._usual) < 3:
            return chunk.step_time_s > STALL * self._longest_s
        usual_s = statistics.median(self._usual)
        deviation_s = statistics.median(abs(each - usual_s) for each in self._usual)
        return chunk.step_time_s > max(STALL * usual_s, usual_s + DEVIATIONS * deviation_s)


@dataclass(frozen=True)
class Change:
    """Change of the job or the machine at a constant setting, from window number `since` on."""

    quantity: Quantity
    since: int
    relative: float  # its estimated size; 0.2 is 20 % more
    step: int = 0  # number of steps done when it was noticed


class ChangeDetector:
    """Detector of changes in one quantity: two-sided cumulative sums of standardised residuals."""

    def __init__(self, quantity: Quantity) -> None:
        self._quantity = quantity
        self.reset()

    def reset(self) -> None:
        """Forget the residuals so far."""
        # Of each side, the windows of its present sum: number, summand, residual.
        self._sides: dict[int, list[tuple[int, float, float]]] = {1: [], -1: []}

    def add(self, number: int, residual: float, deviation: float) -> Change | None:
        """Add log(measured / predicted) of a window; return the change that it reveals, or None.

        `deviation` is its standard deviation, prediction and noise together.
        """
        standard = residual / math.hypot(deviation, TOLERANCE)
        for sign, side in self._sides.items():
            side.append((number, min(sign * standard, MOST) - REFERENCE, sign * residual))
            (since, *_), total = side[0], sum(summand for _, summand, _ in side)
            mean = statistics.fmean(each for _, _, each in side)
            if total <= 0:
                side.clear()
            elif total >= LIMIT and mean >= LEAST:
                return Change(self._quantity, since, math.expm1(sign * mean))
        return None


# Step marks that the ranks of a watched training send to the agent, and the knobs that they set.
#
# The lines are those of `tuner.workload.hook.online_marks`.


#: Steps from the latest known one to a boundary where all ranks can stop: they may be further.
AHEAD = (2, 8, 32)
#: Longest wait for a rank's answer, which may take some steps, seconds.
REPLY_S = 20.0
#: Errors of lines that a program may write itself.
UNREADABLE = ValueError, LookupError, TypeError


@dataclass(frozen=True)
class Mark:
    """End of a step of one rank, on CLOCK_MONOTONIC, or (ready) of its own share before it waits.

    `busy_s` is the time that it computed stages of a pipeline in the step; 0 if it has none.
    """

    rank: int
    step: int
    time_s: float
    ready: bool = False
    busy_s: float = 0.0


class Marks:
    """Receiver of marks on a listening Unix socket, which it shuts down at the end."""

    def __init__(self, listener: socket.socket) -> None:
        self.length: int | None = None  # steps that the training takes, if its framework says it
        self.pids: dict[int, int] = {}
        # Values of the live knobs that the program registered; None of one it cannot read.
        self.present: dict[str, Any] = {}
        self._steps: dict[int, int] = {}
        self._links: dict[int, socket.socket] = {}
        self._replies: queue.SimpleQueue[tuple[bytes, Any]] = queue.SimpleQueue()
        self._listener = listener
        self._marks: queue.SimpleQueue[Mark] = queue.SimpleQueue()
        threading.Thread(target=self._accept, daemon=True).start()

    def wait(self, timeout_s: float) -> list[Mark]:
        """Return the marks that arrive within this time, in the order of their arrival."""
        marks = []
        with contextlib.suppress(queue.Empty):
            marks.append(self._marks.get(timeout=timeout_s))
            while True:
                marks.append(self._marks.get_nowait())
        return marks

    def set_live(self, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Set live knobs on every rank after the same step, and return each rank's answer;
        KnobRefused if the ranks do not reach one boundary.
        """
        if not self._links:
            return []
        for ahead in AHEAD:
            stop = max(self._steps.values()) + ahead
            self._send(f"stop {stop}")
            replies = self._replies_of_all(b"at", stop)
            if replies:
                self._send("set " + json.dumps(dict(values)))
                replies = self._replies_of_all(b"set", stop)
            self._send("go")
            if replies:
                return replies
        raise KnobRefused("the ranks did not stop after one step to set a knob")

    def _send(self, line: str) -> None:
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.sendall(line.encode() + b"\n")

    def _replies_of_all(self, command: bytes, stop: int) -> list[Any]:
        # What each rank answers; [] if one is late, or answers nothing.
        replies = list[Any]()
        with contextlib.suppress(queue.Empty):
            while len(replies) < len(self._links):
                kind, reply = self._replies.get(timeout=REPLY_S)
                if (kind, reply) == (b"late", stop):
                    return []
                if kind == command and (command == b"set" or reply == stop):
                    replies.append(reply)
        return replies if len(replies) == len(self._links) else []

    def close(self) -> None:
        """Accept no rank any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                threading.Thread(target=self._read, args=(link,), daemon=True).start()

    def _read(self, link: socket.socket) -> None:
        rank, busy_s = -1, dict[int, float]()
        with contextlib.suppress(OSError), link, link.makefile("rb") as lines:
            for line in lines:
                words = line.split() if line.endswith(b"\n") else []
                with contextlib.suppress(*UNREADABLE):
                    kind, rest = words[0], line.partition(b" ")[2]
                    if kind == b"hello":
                        rank = int(words[1])
                        self.pids[rank] = int(words[2])
                        self._links[rank] = link
                    elif rank < 0:
                        continue
                    elif kind == b"length":
                        self.length = int(rest)
                    elif kind == b"knobs":
                        self.present = dict(json.loads(rest))
                    elif kind in (b"at", b"late", b"set"):
                        self._replies.put((kind, json.loads(rest)))
                    elif kind in (b"in", b"out", b"step", b"ready"):
                        step, time_s = int(words[1]), float(words[2])
                        if sign := {b"in": -1, b"out": 1}.get(kind, 0):
                            busy_s[step] = busy_s.get(step, 0.0) + sign * time_s
                        elif kind == b"ready":
                            self._marks.put(Mark(rank, step, time_s, ready=True))
                        else:
                            self._steps[rank] = step
                            self._marks.put(Mark(rank, step, time_s, busy_s=busy_s.pop(step, 0.0)))
        self._links.pop(rank, None)
