"""Errors of a meter that cannot read. "No reading" is never zero joules."""

from __future__ import annotations


class MeterError(Exception):
    """Failure to open or read a meter; `grant` is the line that permits it, or empty."""

    def __init__(self, sentence: str, *, grant: str = "") -> None:
        super().__init__(sentence)
        self.grant = grant


class NoDriver(MeterError):
    """NVML does not start because this machine has no NVIDIA driver, and so no GPU to use."""
