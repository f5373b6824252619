"""Error of a meter that cannot read. "No reading" is never zero joules."""

from __future__ import annotations

__all__ = ["MeterError"]


class MeterError(Exception):
    """Failure to open or read a meter; `str(error)` is a sentence with meter and reason."""
