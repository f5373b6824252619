"""Step marks that the ranks of a watched training send to the agent."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Mark:
    """End of a step of one rank; time on CLOCK_MONOTONIC, seconds.

    Attributes:
        ready: True if it is the end of the rank's own share of the step, before it waits.
        busy_s: time that the rank computed stages of a pipeline in the step; 0 if it has none.
    """

    rank: int
    step: int
    time_s: float
    ready: bool = False
    busy_s: float = 0.0


class Marks:
    """Receiver of marks on a listening Unix socket, which it shuts down at the end.

    Attributes:
        length: number of steps that the training takes, if its framework says it.
        pids: process of each rank.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.length: int | None = None
        self.pids: dict[int, int] = {}
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
        """Read what a rank sends, until it ends."""
        rank, busy_s = -1, dict[int, float]()
        with contextlib.suppress(OSError), link, link.makefile("rb") as lines:
            for line in lines:
                words = line.split() if line.endswith(b"\n") else []
                with contextlib.suppress(ValueError, IndexError):  # a program may write here itself
                    if words[0] == b"hello":
                        rank = int(words[1])
                        self.pids[rank] = int(words[2])
                    elif rank >= 0 and words[0] == b"length":
                        self.length = int(words[1])
                    elif rank >= 0 and words[0] in (b"in", b"out", b"step", b"ready"):
                        kind, step, time_s = words[0], int(words[1]), float(words[2])
                        if sign := {b"in": -1, b"out": 1}.get(kind, 0):
                            busy_s[step] = busy_s.get(step, 0.0) + sign * time_s
                        elif kind == b"ready":
                            self._marks.put(Mark(rank, step, time_s, ready=True))
                        else:
                            self._marks.put(Mark(rank, step, time_s, busy_s=busy_s.pop(step, 0.0)))
