"""Step marks that the ranks of a watched training send to the agent."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
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
    """Receiver of marks on a listening Unix socket.

    Attributes:
        length: number of steps that the training takes, if its framework says it.
        pids: process of each rank.
    """

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self.length: int | None = None
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._buffers: dict[socket.socket, bytes] = {}
        self._ranks: dict[socket.socket, int] = {}
        self.pids: dict[int, int] = {}
        self._busy_s: dict[tuple[int, int], float] = {}

    def wait(self, timeout_s: float) -> list[Mark]:
        """Return the marks that arrive within this time, in the order of their arrival."""
        marks: list[Mark] = []
        until = time.monotonic() + timeout_s
        while not marks and (left_s := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                if key.fileobj is self._listener:
                    with contextlib.suppress(OSError):
                        link, _ = self._listener.accept()
                        link.setblocking(False)
                        self._buffers[link] = b""
                        self._selector.register(link, selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket):
                    marks += self._read(key.fileobj)
        return marks

    def close(self) -> None:
        """Close all connections."""
        for link in self._buffers:
            link.close()
        self._selector.close()

    def _read(self, link: socket.socket) -> list[Mark]:
        try:
            text = link.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            text = b""
        if not text:
            self._selector.unregister(link)
            del self._buffers[link]
            link.close()
            return []
        *lines, self._buffers[link] = (self._buffers[link] + text).split(b"\n")
        marks = []
        for line in lines:
            words = line.split()
            with contextlib.suppress(ValueError, IndexError):  # a program may write here itself
                if words[0] == b"hello":
                    self._ranks[link] = int(words[1])
                    self.pids[int(words[1])] = int(words[2])
                elif words[0] == b"length" and link in self._ranks:
                    self.length = int(words[1])
                elif words[0] in (b"in", b"out") and link in self._ranks:
                    at, time_s = (self._ranks[link], int(words[1])), float(words[2])
                    sign = 1 if words[0] == b"out" else -1
                    self._busy_s[at] = self._busy_s.get(at, 0.0) + sign * time_s
                elif words[0] in (b"step", b"ready") and link in self._ranks:
                    rank, step, ready = self._ranks[link], int(words[1]), words[0] == b"ready"
                    busy_s = 0.0 if ready else self._busy_s.pop((rank, step), 0.0)
                    marks.append(Mark(rank, step, float(words[2]), ready, busy_s))
        return marks
