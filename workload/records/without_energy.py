"""Figures of time alone: values to keep and show without a source of energy or power.

A search then counts `STAND_IN_W` at all times, so that least energy is least time. That power is no
figure: `known_figures` leaves it and whatever rests on it out of everything that is written, and
`with_stand_in` puts it back into a stored record that is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: Power that stands for an unknown one, watts.
STAND_IN_W = 1.0
_OF_ENERGY = re.compile(r"(?i:energy|power|carbon|hypervolume)|(^|_)[kM]?(J|W|Wh)(_|$)|^progress$")
#: What was chosen or asked, whose names may be knobs of power, and the meter itself.
_CHOSEN = ("launch", "live", "configuration", "request", "meter")


def of_energy(name: str) -> bool:
    """Return True if a name is that of a figure of energy or power."""
    return _OF_ENERGY.search(name) is not None


def known_figures(data: dict[str, Any], *, energy: bool) -> dict[str, Any]:
    """Return JSON values, with every figure of energy or power null unless `energy`."""
    return data if energy else dict(_without_energy(data))


def _without_energy(data: Any) -> Any:
    if isinstance(data, list):
        return [_without_energy(each) for each in data]
    if not isinstance(data, Mapping):
        return data

    def kept(name: str, value: Any) -> Any:
        if name in _CHOSEN:
            return value
        return None if of_energy(name) else _without_energy(value)

    return {name: kept(name, value) for name, value in data.items()}


def with_stand_in(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a stored record of time alone with the figures that a search counts with."""
    if record["meter"].get("scope") != "none":
        return record
    windows = []
    for window in record["measurements"]:
        kept = {name: value for name, value in window.items() if not of_energy(name)}
        counted_J = STAND_IN_W * window["window_s"]
        windows.append({**kept, "energy_J": counted_J, "power_W": STAND_IN_W})
    return {**record, "measurements": windows, "energy_J": STAND_IN_W * record["wall_s"]}
