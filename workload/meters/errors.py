"""What a meter says when it cannot read. "No reading" is never zero joules."""

from __future__ import annotations

__all__ = ["MeterError"]


class MeterError(Exception):
    """A meter cannot be opened or read; `str(error)` is one sentence that says which and why."""
