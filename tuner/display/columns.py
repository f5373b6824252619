"""Columns of every table of points: each figure with its heading, unit and text.

A new column is a row here, and its place in the tables that are to show it. Files have columns of
their own (`_FILE`), and JSON has the fields of `Point`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tuner.answer.parts import Point
from tuner.display.view import View
from tuner.formatting import Units, number, percent
from tuner.workload.records.probe import of_energy

Text = Callable[[View, Point], str]


@dataclass(frozen=True)
class Column:
    """Column of tables that people read.

    Attributes:
        name: heading of a table in text.
        figure: without the unit.
        below: what a page shows below it: the 90 % interval, or the peak.
        metered: the mark of the meter follows it, e.g. "(estimated)".
    """

    name: str
    heading: str
    figure: Text
    unit: Callable[[Units], str] = lambda units: ""
    below: Text = lambda view, point: ""
    metered: bool = False

    def text(self, view: View, point: Point) -> str:
        """Return the figure with its unit."""
        return f"{self.figure(view, point)} {self.unit(view.units)}".rstrip()

    def title(self, units: Units) -> str:
        unit = self.unit(units)
        return f"{self.heading} ({unit})" if unit else self.heading


def _peak(view: View, point: Point) -> str:
    return "" if point.peak_power_W is None else f"peak {number(point.peak_power_W)}"


def _memory(view: View, point: Point) -> str:
    peak = point.peak_memory_bytes
    return f"{number(peak / 2**30)} GiB" if peak else "unknown"


TIME = Column(
    "time",
    "Time",
    lambda view, point: number(point.time_to_solution_s / view.units.s),
    lambda units: units.time,
    lambda view, point: view.units.interval_text(point.time_interval_s, view.units.s),
)
ENERGY = Column(
    "energy",
    "Energy",
    lambda view, point: number(point.energy_to_solution_kJ / view.units.kJ),
    lambda units: units.energy,
    lambda view, point: view.units.interval_text(point.energy_interval_kJ, view.units.kJ),
    metered=True,
)
POWER = Column(
    "power", "Power", lambda _, point: number(point.power_W), lambda _: "W", _peak, metered=True
)
ON_FRONT = Column("on front", "P(non-dominated)", lambda _, point: percent(point.p_nondominated))
MEMORY = Column("peak memory", "Peak memory", _memory)

#: Those of a table in text, of a page, of a notebook, of a hover label.
TEXT = (TIME, ENERGY, POWER, ON_FRONT)
PAGE, NOTEBOOK = (ENERGY, TIME, POWER, ON_FRONT, MEMORY), (ENERGY, TIME, POWER, ON_FRONT)
HOVER = (ENERGY, TIME, POWER, ON_FRONT)
#: Those whose intervals are columns of their own in a table in text.
WITH_INTERVAL = (TIME, ENERGY)


def energy_columns(table: Sequence[Column], view: View) -> list[Column]:
    """Return the columns of a table that have figures: of time alone, no metered ones."""
    return [column for column in table if view.has_energy or not column.metered]


#: Columns of a file by name, with its unit. By the name, too, those of energy are left out of a
#: study of time alone (`of_energy`).
_FILE: Mapping[str, Callable[[View, Point], Any]] = {
    "energy_to_solution_kJ": lambda view, p: p.energy_to_solution_kJ,
    "energy_low_kJ": lambda view, p: p.energy_interval_kJ.low,
    "energy_high_kJ": lambda view, p: p.energy_interval_kJ.high,
    "time_to_solution_s": lambda view, p: p.time_to_solution_s,
    "time_low_s": lambda view, p: p.time_interval_s.low,
    "time_high_s": lambda view, p: p.time_interval_s.high,
    "power_W": lambda view, p: p.power_W,
    "p_nondominated": lambda view, p: p.p_nondominated,
    "on_front": lambda view, p: p.configuration in view.front,
    "chosen": lambda view, p: (
        view.result.best is not None and p.configuration == view.result.best.configuration
    ),
    "baseline": lambda view, p: view.is_today(p),
    "source": lambda view, p: p.source,
    "windows": lambda view, p: p.windows,
    "peak_memory_GB": lambda view, p: (
        None if p.peak_memory_bytes is None else p.peak_memory_bytes / 1e9
    ),
    "energy_scope": lambda view, p: p.meter.scope,
    "energy_from": lambda view, p: p.meter.source,
    "energy_estimated": lambda view, p: p.meter.estimated,
    "energy_twin": lambda view, p: p.meter.twin,
    "flags": lambda view, p: "; ".join(p.flags),
}


def file_columns(view: View) -> dict[str, Callable[[Point], Any]]:
    """Return the columns of a file by name."""
    metered = view.has_energy
    names = (name for name in _FILE if metered or not of_energy(name))
    return {name: partial(_FILE[name], view) for name in names}
