"""Errors of a meter that cannot read. "No reading" is never zero joules."""

from __future__ import annotations


class MeterError(Exception):
    """Failure to open or read a meter; `str(error)` is a sentence with meter and reason.

    Attributes:
        grant: the line by which an administrator permits it; empty without one.
    """

    def __init__(self, sentence: str, *, grant: str = "") -> None:
        super().__init__(sentence)
        self.grant = grant


class NoDriver(MeterError):
    """NVML does not start because this machine has no NVIDIA driver, and so no GPU to use."""
