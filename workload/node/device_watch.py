"""Watch of a node's devices during one probe: counted damage, and processes of others.

CUDA reports a damaged GPU by errors that programs cause, too ("illegal memory access"), so that its
sentence alone would blame the configuration: a probe that fails while a counter of damage moves has
failed by the node.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from tuner.search_spaces.errors import InputError
from tuner.workload.measure.window import ProbeFailed
from tuner.workload.meters.errors import MeterError
from tuner.workload.platforms.base import Counters, Platform
from tuner.workload.probe import Failure


def new_faults(before: Counters, after: Counters) -> str:
    """Return what has happened to devices between two answers of `Platform.faults`, or ""."""
    found = []
    for uuid, counters in before.items():
        if uuid not in after:
            found.append(f"{uuid} cannot be used any more")
            continue
        for name, count in after[uuid].items():
            if (more := count - counters.get(name, count)) > 0:  # not told before: not new
                found.append(f"{uuid} has {more} more {name}")
    return "; ".join(found)


class DeviceWatch:
    """Watch of a platform's devices from construction on."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._before = platform.faults()

    def require_free(self) -> None:
        """Check that no other process uses a device.

        Raises:
            ProbeFailed: one does, or the devices cannot be asked: the node's failure.
        """
        try:
            busy = "; ".join(self._platform.busy())
        except (InputError, MeterError) as error:
            busy = str(error)
        if busy:
            raise ProbeFailed(Failure("node", busy))

    def others(self, own: Collection[int]) -> str:
        """Return a note for a window in which other processes used a device, else ""."""
        try:
            busy = "; ".join(self._platform.busy({*own, os.getpid()}))
        except (InputError, MeterError):  # the meter reports it
            busy = ""
        return busy and f"at the end of the window, {busy}"

    def cause(self, failure: Failure) -> Failure:
        """Return the failure, as one of the node if a device was damaged meanwhile."""
        if not self._before or failure.kind not in ("crash", "hang", "time_limit"):
            return failure
        found = new_faults(self._before, self._platform.faults())
        return Failure("node", f"{found}: {failure.message}") if found else failure
