"""Errors of a meter that cannot read. "No reading" is never zero joules."""

from __future__ import annotations


class MeterError(Exception):
    """Failure to open or read a meter; `str(error)` is a sentence with meter and reason."""


class NoDriver(MeterError):
    """NVML does not start because this machine has no NVIDIA driver, and so no GPU to use."""
