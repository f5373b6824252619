"""Recorded live settings of single launches: the problems of the benchmark.

Recorded tables are read where they are at hand (`--traces`); two laws of a GPU stand beside them.
Settings are ordered from the highest down.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.recordings.table import TablePoint, load_table
from tuner.search_spaces.configuration import Settings

#: Most settings of a problem; of more, evenly spaced ones are taken.
MOST = 12
#: Problems by which the constants of `tuner.online` were chosen, and those of which single runs
#: were looked at; all others are held out.
TUNED = ("law",)
SEEN = ("zeus-nsdi23", "kareus-attention-a100", "perseus-a100 t5-3b")


@dataclass(frozen=True)
class Problem:
    """Live settings of one launch.

    Attributes:
        split: "tuned", "seen" or "held_out".
        x: of each setting, the logarithm of the highest value over its own.
        step_time_s, power_W: of each setting, as recorded; step times are scaled to 0.5 s at the
            highest setting.
        noise: relative standard deviations of a few steps' time and power.
    """

    name: str
    split: str
    x: tuple[float, ...]
    step_time_s: tuple[float, ...]
    power_W: tuple[float, ...]
    noise: tuple[float, float] = (0.01, 0.015)


def problems(traces: Path | None) -> list[Problem]:
    """Return the problems: of the recorded tables in a folder, if there is one, and of two laws."""
    found = list(_laws())
    if traces is not None and traces.is_dir():
        found += [*_zeus(traces), *_perseus(traces), *_kareus(traces)]
    return found


def _split(name: str) -> str:
    return "tuned" if name.startswith(TUNED) else "seen" if name.startswith(SEEN) else "held_out"


def _problem(name: str, points: Sequence[TablePoint], x: Sequence[float]) -> Problem:
    scale = 0.5 / points[0].time_s
    times = tuple(point.time_s * scale for point in points)
    return Problem(name, _split(name), tuple(x), times, tuple(point.power_W for point in points))


def _thinned(points: list[TablePoint]) -> list[TablePoint]:
    if len(points) <= MOST:
        return points
    return [points[round(i * (len(points) - 1) / (MOST - 1))] for i in range(MOST)]


def _by_launch(points: Sequence[TablePoint]) -> dict[Settings, list[TablePoint]]:
    found: dict[Settings, list[TablePoint]] = {}
    for point in points:
        found.setdefault(point.configuration.launch, []).append(point)
    return found


def _number(point: TablePoint, knob: str) -> float:
    value = point.configuration.live[knob]
    assert isinstance(value, int | float)
    return float(value)


def _zeus(traces: Path) -> Iterator[Problem]:
    """Yield a problem for each workload, at its middle batch size: power limits."""
    for group in load_table(traces / "zeus-nsdi23").groups:
        launches = sorted(_by_launch(group.points).items(), key=lambda item: item[0].key)
        launches = [item for item in launches if len(item[1]) > 2]
        launch, points = launches[len(launches) // 2]
        points = sorted(points, key=lambda point: -_number(point, "power_limit_W"))
        top = _number(points[0], "power_limit_W")
        x = [math.log(top / _number(point, "power_limit_W")) for point in points]
        yield _problem(f"zeus-nsdi23 {group.name} {launch.short}", points, x)


def _perseus(traces: Path) -> Iterator[Problem]:
    """Yield a problem for each model: its plans of one clock an instruction, the fastest first."""
    for group in load_table(traces / "perseus-a100").groups:
        points = [p for p in group.points if p.configuration.live["method"] == "perseus"]
        # The solver knows in advance which of two plans is slower.
        points = _thinned(sorted(points, key=lambda point: point.time_s))
        if len(points) > 2:
            x = [0.5 * i / (len(points) - 1) for i in range(len(points))]
            yield _problem(f"perseus-a100 {group.name}", points, x)


def _kareus(traces: Path) -> Iterator[Problem]:
    """Yield three launches that were recorded at both clocks."""
    for group in load_table(traces / "kareus-attention-a100").groups:
        both = [points for points in _by_launch(group.points).values() if len(points) > 1]
        for number in (0, len(both) // 2, len(both) - 1):
            points = sorted(both[number], key=lambda point: -_number(point, "clock_MHz"))
            top = _number(points[0], "clock_MHz")
            x = [math.log(top / _number(point, "clock_MHz")) for point in points]
            yield _problem(f"kareus-attention-a100 launch {number}", points, x)


def _laws() -> Iterator[Problem]:
    """Yield GPUs whose time is bound partly by memory, and whose power is a power of the clock."""
    clocks = range(1410, 700, -105)
    for bound in (0.2, 0.6):
        times = [0.5 * (bound + (1 - bound) * 1410 / clock) for clock in clocks]
        powers = [80 + 300 * (clock / 1410) ** 2.4 for clock in clocks]
        x = [math.log(1410 / clock) for clock in clocks]
        name = f"law {100 * bound:.0f} % bound by memory"
        yield Problem(name, _split(name), tuple(x), tuple(times), tuple(powers))
