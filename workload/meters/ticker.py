"""A thread that calls a function periodically and counts the missed calls.

Shared by the timeline, the meter that integrates power and the one whose counter wraps. It keeps to
the grid start + k x period, so that a late tick does not shift those after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Ticker:
    """Thread that calls `action` every `period_s` seconds; `lost` counts the missed calls."""

    def __init__(self, action: Callable[[], None], *, period_s: float, name: str) -> None:
        self.ticks = 0
        self.lost = 0
        self._action = action
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stop.wait(max(0.0, due_s - time.monotonic())):
            self._action()
            self.ticks += 1
            due_s += self._period_s
            late = int((time.monotonic() - due_s) / self._period_s)
            if late > 0:
                self.lost += late
                due_s += late * self._period_s

    def stop(self) -> None:
        """End the thread and wait for the call in progress. May be called twice."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
