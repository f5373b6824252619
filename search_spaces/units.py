"""Quantities with units as a user types them: "2h", "11kWh", "2kW", "5%".

Each table maps a spelling of a unit to its size in the unit of the declaration
(`tuner.search_spaces.options.Option.unit`). Case matters, because "MJ" is not "mJ".
"""

from __future__ import annotations

import re

from tuner.search_spaces.errors import InputError

#: Sizes of the accepted units by the declared one. 1 kWh is 3,600 kJ.
UNITS: dict[str, dict[str, float]] = {
    "s": {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0},
    "kJ": {
        "J": 1e-3,
        "kJ": 1.0,
        "MJ": 1e3,
        "GJ": 1e6,
        "Wh": 3.6,
        "kWh": 3600.0,
        "MWh": 3.6e6,
        "GWh": 3.6e9,
    },
    "W": {"W": 1.0, "kW": 1e3, "MW": 1e6},
    "share": {"%": 0.01},
}
#: Values to show in help texts and errors.
EXAMPLES = {
    "s": "2h, 90m or 7200s",
    "kJ": "11kWh or 40MJ",
    "W": "2kW or 800W",
    "share": "5%",
}


def parse_quantity(text: str, unit: str, *, bare: bool = True) -> float:
    """Return a quantity in `unit`; if `bare`, a number without a unit is one in it."""
    sizes = UNITS[unit]
    found = re.fullmatch(r"\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?|[-+]?nan|[-+]?inf)\s*(\S*)\s*", text)
    try:
        number = float(found[1]) if found else None
    except ValueError:
        number = None
    given = found[2] if found else ""
    if number is None or (given not in sizes and not (bare and not given)):
        known = ", ".join(sizes)
        raise InputError(
            f"{text!r} must be a number with a unit ({known}), such as {EXAMPLES[unit]}"
        )
    return number * sizes.get(given, 1.0)
