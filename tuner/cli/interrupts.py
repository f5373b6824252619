"""Interrupts of a command: Ctrl-C, and a polite kill by `kill`, `timeout`, or a scheduler.

The first one raises KeyboardInterrupt, after which the command cleans up. What sends it often sends
it twice: `timeout` to its child and then to its child's group, Slurm to the processes of a job and
to the job script, which passes it on. So one that comes soon after the first is the same request. A
later one ends the process at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from tuner.cli.options import INTERRUPTED

#: Signals that interrupt a command.
SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Time after the first interrupt in which any other is the same request, seconds.
SAME_REQUEST_S = 2.0

_ONCE_MORE = b"tuner: cleaning up; Ctrl-C once more ends at once, without that\n"
_AT_ONCE = b"tuner: ended at once, without cleaning up; the same command continues\n"


class Interrupts:
    """Handling of the interrupts of one command, a context manager of the main thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_s: float | None = None
        self._before: dict[int, Any] = {}
        self._ended = self._has_warned = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        if self._first_s is None:
            self._put_back()

    def _handle(self, number: int, _: FrameType | None) -> None:
        now_s = self._clock()
        if self._first_s is None:
            self._first_s = now_s
            raise KeyboardInterrupt
        if now_s - self._first_s < SAME_REQUEST_S:
            if number == signal.SIGINT and not (self._ended or self._has_warned):
                self._has_warned = True
                _print_line(_ONCE_MORE)  # an impatient person may have typed it
            return
        if self._ended:  # the process does something else, or is about to end
            self._put_back()
            signal.raise_signal(number)
            return
        # Nothing depends on this process's own clean-up: ranks and agents end when it is gone, the
        # guard puts clocks back, and every finished probe is on disk.
        _print_line(_AT_ONCE)
        os._exit(INTERRUPTED)

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _print_line(line: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(2, line)
