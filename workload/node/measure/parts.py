"""Mean power of the parts of a superchip beside each other, over a window and in each phase.

The module holds its parts, so they are never added to it, nor to each other: "grace" holds "cpu"
and "sysio". Sensors tell means of 0.1 s: a phase that is shorter shares its samples with others.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence

from tuner.workload.node.measure.statistics import BOUNDARY, Mark
from tuner.workload.records.probe import PowerSample

#: Parts in the order in which they are shown, by their names in samples without "_W".
PARTS = {"gpu": "GPU", "grace": "Grace", "cpu": "CPU cores", "sysio": "SysIO"}
#: What stands between the name of a phase and that of a part.
OF = ": "


def power_by_part(samples: Iterable[PowerSample], marks: Sequence[Mark]) -> dict[str, float]:
    """Return mean powers by part ("gpu"), and by phase and part ("forward: gpu"), watts.

    Empty where the meter tells no parts, such as that of ordinary GPUs.
    """
    found: dict[str, list[float]] = {}
    times_s = [at_s for at_s, _ in marks]
    for sample in samples:
        number = bisect.bisect_right(times_s, sample.time_s)
        phase = marks[number - 1][1] if number else BOUNDARY
        for part in PARTS:
            if (power_W := sample.extra.get(f"{part}_W")) is not None:
                found.setdefault(part, []).append(power_W)
                if phase != BOUNDARY:
                    found.setdefault(f"{phase}{OF}{part}", []).append(power_W)
    return {name: math.fsum(values) / len(values) for name, values in found.items()}


def part_rows(parts_W: Mapping[str, float]) -> list[list[str]]:
    """Return the mean powers as cells: a row for the window and for each phase, a column a part.

    Parts that no row has are left out; a row begins with the name of its phase.
    """
    phases = dict.fromkeys(name.rpartition(OF)[0] for name in parts_W)
    rows = []
    for phase in sorted(phases, key=bool):
        prefix = f"{phase}{OF}" if phase else ""
        powers_W = [parts_W.get(prefix + part) for part in named_parts(parts_W)]
        texts = ["" if power_W is None else f"{power_W:.0f} W" for power_W in powers_W]
        rows.append([phase or "window", *texts])
    return rows


def named_parts(parts_W: Mapping[str, float]) -> list[str]:
    """Return the parts with a known power, in the order in which they are shown."""
    names = {name.rpartition(OF)[2] for name in parts_W}
    return [part for part in PARTS if part in names]


def part_lines(parts_W: Mapping[str, float]) -> list[str]:
    """Return the mean powers as text, a line for the window and one for each phase."""
    words = [PARTS[part] for part in named_parts(parts_W)]
    return [
        f"{row[0]:<15} "
        + ", ".join(f"{word} {text}" for word, text in zip(words, row[1:], strict=True) if text)
        for row in part_rows(parts_W)
    ]
