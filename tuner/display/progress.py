"""Progress events of a study as plain lines, for a terminal and a log file alike."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from tuner.display.text import front_lines
from tuner.formatting import label, number, short
from tuner.search_spaces.configuration import Configuration
from tuner.study.callbacks import Progress
from tuner.workload.probe import ProbeRecord, ProbeRequest

__all__ = ["ProgressPrinter"]


class ProgressPrinter:
    """Prints events as plain lines.

    Args:
        stream: where to; standard error when not given.
        now: returns the time of day as text.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        now: Callable[[], str] = lambda: time.strftime("%H:%M:%S"),
    ) -> None:
        self._now = now
        self._stream: TextIO | None = stream or sys.stderr
        self._front: tuple[Configuration, ...] = ()

    def __call__(self, event: Progress) -> None:
        if self._stream is None:
            return
        try:
            stamp = self._now()
            for line in self._lines(event):
                # Continued lines belong to the one above.
                print(
                    line if line.startswith(" ") else f"{stamp} {line}",
                    file=self._stream,
                    flush=True,
                )
        except BrokenPipeError:  # the reader is gone (`tuner optimize 2>&1 | head`)
            self._stream = None

    def _lines(self, event: Progress) -> list[str]:
        if event.kind == "note":
            return [event.message]
        if event.kind == "started" and event.request is not None:
            return self._started(event, event.request)
        if event.record is not None:
            return self._finished(event, event.record)
        return []

    def _started(self, event: Progress, request: ProbeRequest) -> list[str]:
        names = [name for name in event.varying if name in request.launch]
        visits = [live.short for live in request.live if live]
        text = f"{request.probe_id} probing {short(Configuration(request.launch), names)}"
        if visits:
            text += f" at {'; '.join(visits)}"
        return [f"{text}  ({event.message or request.purpose})"]

    def _finished(self, event: Progress, record: ProbeRecord) -> list[str]:
        estimated = label(record.meter.mark)
        lines = []
        for m in record.measurements:
            live = f" at {m.live.short}" if m.live else ""
            found = "predicted" if record.meter.name == "simulated" else "measured"
            lines.append(
                f"{record.request.probe_id} {found}{live} {number(m.step_time_s)} s a step, "
                f"{number(m.power_W)} W, {number(m.energy_per_step_J)} J a step{estimated}"
                + (f"  [{'; '.join(m.flags)}]" if m.flags else "")
            )
        if record.failure is not None:
            lines.append(
                f"{record.request.probe_id} failed: {record.failure.kind.replace('_', ' ')}: "
                f"{record.failure.message}"
            )
        budget = (
            f" of {number(event.probe_budget_kJ)} kJ" if event.probe_budget_kJ is not None else ""
        )
        count = f" of at most {event.max_probes}" if event.max_probes is not None else ""
        spent = f"{number(event.spent_kJ)} kJ spent{budget}{estimated}"
        lines.append(
            f"  {event.probes} probes{count}, {spent}; "
            f"this one {number(record.wall_s)} s, its launch {number(record.launch_s)} s"
        )
        front = tuple(point.configuration for point in event.front)
        if front != self._front:
            self._front = front
            lines.append(f"  front so far, {len(front)} point{'s' * (len(front) != 1)}:")
            names = [n for n in event.varying if any(n in (*c.launch, *c.live) for c in front)]
            lines += ["    " + line for line in front_lines(event.front, names)]
        return lines
