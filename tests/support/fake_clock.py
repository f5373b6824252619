"""A clock of tests, which advances only when told."""

from __future__ import annotations


class FakeClock:
    """Seconds that pass only by `advance`."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Return the present time, seconds."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds

    sleep = advance
