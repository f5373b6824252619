"""A meter that reads the watts of a power distribution unit from a file.

A site's telemetry appends a line of "SECONDS WATTS" (time since 1970) to the file in WATTS_FILE
about once a second. The meter integrates the latest power, so its energy is exact up to what
happens between two lines:

    WATTS_FILE=/run/pdu/node7 tuner optimize --meter watts_file:WattsFile -- torchrun train.py
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from tuner.workload.node.meters.base import CounterMeter, MeterError, Reading
from tuner.workload.records.probe import MeterInfo

#: Seconds after which the latest line is too old to be the present power.
STALE_S = 10.0
#: Seconds between two lines.
PERIOD_S = 1.0


class WattsFile(CounterMeter):
    """Counter of joules: the latest power of the file, integrated by a thread."""

    resolution_s = PERIOD_S

    def __init__(self) -> None:
        self._file = Path(os.environ.get("WATTS_FILE", "watts.txt"))
        self._energy_J, self._at_s = 0.0, time.monotonic()
        self._power_W = self._latest_W()
        self.info = MeterInfo(
            name="watts-file",
            scope="node",
            source=f"power distribution unit, by {self._file}",
            host="the whole node at the wall, fans and power supplies included",
        )
        super().__init__("watts-file", min_s=PERIOD_S, clock=time.monotonic, sleep=time.sleep)
        self._ended = threading.Event()
        threading.Thread(target=self._follow, daemon=True).start()

    def _latest_W(self) -> float:
        try:
            at_s, power_W = map(float, self._file.read_text().splitlines()[-1].split())
        except (OSError, ValueError, IndexError) as error:
            raise MeterError(f"no power can be read from {self._file}: {error}") from error
        if time.time() - at_s > STALE_S:
            raise MeterError(f"the last line of {self._file} is older than {STALE_S:g} s")
        return power_W

    def _follow(self) -> None:
        while not self._ended.wait(PERIOD_S / 4):
            try:
                self.read()
            except MeterError:
                continue  # the next reader meets the same error

    def _count(self) -> Reading:
        # Called under the lock of `CounterMeter.read`.
        latest_W, now_s = self._latest_W(), time.monotonic()
        self._energy_J += self._power_W * (now_s - self._at_s)
        self._power_W, self._at_s = latest_W, now_s
        return Reading(now_s, self._energy_J)

    def close(self) -> None:
        super().close()
        if hasattr(self, "_ended"):
            self._ended.set()
