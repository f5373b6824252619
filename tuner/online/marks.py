"""Step marks that the ranks of a watched training send to the agent, and the knobs that they set.

The lines are those of `tuner.workload.hook.watch`.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.workload.node.clocks.base import KnobRefused

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
