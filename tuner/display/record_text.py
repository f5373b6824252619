"""A probe's record as text."""

from __future__ import annotations

import math

from tuner.formatting import label, number, percent
from tuner.workload.node.measure.measurement import part_lines
from tuner.workload.records.probe import ProbeRecord


def record_lines(record: ProbeRecord) -> list[str]:
    """Return a probe's record as text: its request, measurements and cost."""
    estimated = label(record.meter.mark)
    lines = [f"probe {record.request.launch.short}"]
    charged = record.meter.shown(
        f"meter {record.meter.name}: {record.meter.scope} scope, {record.meter.source}{estimated}"
    )
    for m in record.measurements:
        error = m.step_time_rse
        lines += [
            f"  live            {m.live.short if m.live else 'left to the device'}",
            f"  step time       {number(m.step_time_s)} s"
            + (f" +- {percent(error)}" if math.isfinite(error) else ""),
        ]
        if charged:
            lines.append(f"  power           {number(m.power_W)} W{estimated}")
            lines.append(f"  energy a step   {number(m.energy_per_step_J)} J{estimated}")
        lines.append(f"  window          {m.steps} steps in {number(m.window_s)} s")
        if m.delivered:
            pairs = ", ".join(f"{name} {number(value)}" for name, value in m.delivered.items())
            lines.append(f"  delivered       {pairs}")
        lines += [f"  by part         {line}" for line in part_lines(m.parts_W)]
        if m.peak_memory_bytes is not None:
            lines.append(f"  peak memory     {number(m.peak_memory_bytes / 1e9)} GB, fullest rank")
        lines += [f"  note            {flag}" for flag in m.flags]
    compilation = ""
    if record.compilation_s:
        compilation = f" (compilation {number(record.compilation_s)} s of it)"
    cost = record.meter.shown(f"{number(record.energy_J)} J{estimated} and ")
    lines += [
        charged or record.meter.sentence,
        f"cost {cost}{number(record.wall_s)} s, of which the launch {number(record.launch_s)} s"
        f"{compilation}",
    ]
    if record.built_s:
        lines.append(f"before that, a build took {number(record.built_s)} s; it is charged to none")
    if record.failure is not None:
        lines.append(f"failed: {record.failure.sentence}")
        lines += [f"  | {line}" for line in record.failure.log_tail.splitlines()]
    return lines
