"""What a study says while it runs: one event a thing that happened, and plain lines for people.

Whoever calls `tuner.optimize` may take the events (`on_progress`); the command prints them as lines
that read well in a terminal and in a log file alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TextIO

from search_spaces.configuration import Configuration
from tuner.result import Point
from tuner.summary import front_lines
from tuner.wording import knobs, label, number
from workload.probe import MeterInfo, ProbeRecord, ProbeRequest

__all__ = ["Progress", "ProgressPrinter"]


@dataclass(frozen=True)
class Progress:
    """One thing that happened in a study.

    Attributes:
        kind: "note" (a sentence), "started" (a probe), "finished" (a probe).
        message: the sentence of a note, or why a probe was chosen.
        request: the probe that started.
        record: the probe that ended.
        front: the measured front so far, fastest first.
        spent_kJ: joules of all probes so far, in the meter's scope.
        probe_budget_kJ: what they may use; None for no limit.
        probes: how many have ended.
        max_probes: how many may run; None for no limit.
        meter: where the energy figures come from; None before the executor stands.
        varying: the knobs that the search varies; the others need no mention.
        places: says which nodes the probes in flight are on, by probe; None where there is one
            node.
    """

    kind: Literal["note", "started", "finished"]
    meter: MeterInfo | None
    message: str = ""
    request: ProbeRequest | None = None
    record: ProbeRecord | None = None
    front: tuple[Point, ...] = ()
    spent_kJ: float = 0.0
    probe_budget_kJ: float | None = None
    probes: int = 0
    max_probes: int | None = None
    varying: tuple[str, ...] = field(default=())
    places: Callable[[], Mapping[str, str]] | None = None


class ProgressPrinter:
    """Prints events as plain lines.

    Args:
        stream: where to; standard error when not given.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream: TextIO | None = stream or sys.stderr
        self._front: tuple[Configuration, ...] = ()

    def __call__(self, event: Progress) -> None:
        if self._stream is None:
            return
        try:
            for line in self._lines(event):
                print(line, file=self._stream, flush=True)
        except BrokenPipeError:  # who read has gone (`tuner optimize 2>&1 | head`): probes go on
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
        launch = " ".join(
            knobs(Configuration(request.launch), [n for n in event.varying if n in request.launch])
        )
        visits = [live.key for live in request.live if live]
        text = f"{request.probe_id} probing {launch or request.launch.key}"
        if visits:
            text += f" at {'; '.join(visits)}"
        return [f"{text}  ({event.message or request.purpose})"]

    def _finished(self, event: Progress, record: ProbeRecord) -> list[str]:
        estimated = label(record.meter.estimated)
        lines = []
        for m in record.measurements:
            live = f" at {m.live.key}" if m.live else ""
            lines.append(
                f"{record.request.probe_id} measured{live} {number(m.step_time_s)} s a step, "
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
