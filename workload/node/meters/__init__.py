"""Meters: energy sources of a node, each with its scope and its kind of reading.

NVML on GPUs, RAPL on a machine without, and an estimate, always labelled, where neither can be
read. A meter of the user's own (`user_meter`) replaces them. `Platform.open_meter` picks one;
callers use the protocol only.
"""

from __future__ import annotations

from tuner.workload.node.meters.base import Meter, MeterError, Reading

__all__ = ["Meter", "MeterError", "Reading"]
