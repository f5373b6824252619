"""Values in the cells of CSV files: numbers in either decimal style, units, and missing ones.

Programs write one value in many ways: `270.11 W` (nvidia-smi), `0,501` (a German or French Excel),
`0 days 00:21:52.3` (pandas, so Optuna), `2.5min` (MLflow), `1-02:03:04` (Slurm), `[N/A]`, `nan`.
A value that could be read in two ways is refused, never guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from tuner.search_spaces.errors import InputError

#: Marks of a decimal fraction: 1.5 or 1,5.
Decimal = Literal[".", ","]

#: Seconds, joules or watts in each unit. An upper-case M is mega, a lower-case m is milli.
UNITS: Mapping[str, Mapping[str, float]] = {
    "time_s": {
        **{"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "msec": 1e-3},
        **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
        **dict.fromkeys(("min", "mins", "minute", "minutes"), 60.0),
        **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600.0),
        **dict.fromkeys(("d", "day", "days"), 86400.0),
    },
    "energy_J": {
        **{"mJ": 1e-3, "J": 1.0, "joule": 1.0, "joules": 1.0, "kJ": 1e3, "MJ": 1e6, "GJ": 1e9},
        **{"mWh": 3.6, "Wh": 3.6e3, "kWh": 3.6e6, "MWh": 3.6e9},
    },
    "power_W": {"mW": 1e-3, "W": 1.0, "watt": 1.0, "watts": 1.0, "kW": 1e3, "MW": 1e6},
}
#: Units of a knob's values. They are dropped where every value of the column has the same one.
_KNOB_UNITS = {"W", "kW", "Hz", "kHz", "MHz", "GHz", "B", "kB", "KB", "MB", "GB", "KiB", "MiB"}
_KNOB_UNITS |= {"GiB", "TiB", "s", "ms", "%", "C"}

#: Cells without a value, lower case: missing, not finite, or of a run that failed.
MISSING = frozenset(
    [
        *("", "nan", "-nan", "inf", "-inf", "+inf", "infinity", "-infinity", "na", "n/a", "null"),
        *("none", "nil", "-", "--", "—", "?", "err!", "not supported", "unknown error"),
        *("oom", "fail", "failed", "error", "crashed", "timeout", "killed", "missing", "<na>"),
    ]
)
_BRACKETED = re.compile(r"\[.*\]|#\S+[!?]?")  # [Not Supported], [Unknown Error]; #N/A, #DIV/0!
_NUMBER = re.compile(r"([-+]?[\d.,]+(?:e[-+]?\d+)?)\s*(.*)", re.I)
_GROUPS = re.compile(r"(?<=\d)[ \u00a0\u202f'’](?=\d{3}(?!\d))")  # 1 234,5 and 1'234.5
_CLOCK = re.compile(r"(?:(\d+)(?:-|\s*days?,?\s*))?(\d{1,3}):(\d\d):(\d\d(?:[.,]\d+)?)", re.I)


def is_missing(text: str) -> bool:
    """Return whether a cell has no value."""
    return text.lower() in MISSING or bool(_BRACKETED.fullmatch(text))


def _thousands(digits: str, mark: str) -> bool:
    return bool(re.fullmatch(rf"[-+]?[1-9]\d{{0,2}}(\{mark}\d{{3}})+", digits))


def decimal_of(text: str) -> Decimal | None:
    """Return the decimal mark that a cell shows beyond doubt, or None.

    `0,501`, `12,5` and `1.234,5` show a comma; `270.11`, `1,234.5` and `1,234,567` a point. `1,234`
    and `1.234` show nothing.
    """
    found = _NUMBER.fullmatch(_GROUPS.sub("", text))
    if not found or _CLOCK.fullmatch(text):
        return None
    digits = re.split("e", found[1], flags=re.I)[0]
    points, commas = digits.count("."), digits.count(",")
    if points and commas:
        return "," if digits.rindex(",") > digits.rindex(".") else "."
    for mark, other, count in ((",", ".", commas), (".", ",", points)):
        if count == 1 and not _thousands(digits, mark):
            return mark  # type: ignore[return-value]
        if count > 1:
            return other  # type: ignore[return-value]
    return None


def _digits(text: str, decimal: Decimal | None) -> float | None:
    """Return the number that digits and marks stand for; None if they are not one.

    Without a known style, a comma alone could be either mark: ValueError.
    """
    mantissa, *exponent = re.split("e", text, maxsplit=1, flags=re.I)
    if decimal is None:
        if "," in mantissa:
            raise ValueError
        decimal = "."
    other = "," if decimal == "." else "."
    whole, _, fraction = mantissa.partition(decimal)
    if (
        other in fraction
        or decimal in fraction
        or (other in whole and not _thousands(whole, other))
    ):
        return None
    with suppress(ValueError):
        number = f"{whole.replace(other, '')}.{fraction}" if fraction else whole.replace(other, "")
        return float("e".join([number, *exponent]))
    return None


def _clock_s(text: str) -> float | None:
    """Return the seconds of [DAYS] HH:MM:SS, as Slurm and pandas write durations."""
    found = _CLOCK.fullmatch(text)
    if not found:
        return None
    days, hours, minutes, seconds = found.groups()
    whole = (int(days or 0) * 24 + int(hours)) * 3600 + int(minutes) * 60
    return whole + float(seconds.replace(",", "."))


@dataclass(frozen=True)
class Cells:
    """Reader of a file's cells: numbers are written with one decimal mark, or None if unknown."""

    decimal: Decimal | None = "."

    def figure(self, text: str, column: str, where: str, *, figure: str, scale: float) -> float:
        """Return a time, energy or power in s, J or W; InputError if the cell holds another thing.

        `scale` converts a number alone; a unit in the cell has precedence over the column's.
        """
        units = UNITS[figure]
        if figure == "time_s" and (seconds := _clock_s(text)) is not None:
            return seconds
        found = _NUMBER.fullmatch(_GROUPS.sub("", text))
        number = self._number(found[1], text, column, where) if found else None
        if found is None or number is None:
            raise InputError(f"{where}: {column} is {text!r}; it must be a number")
        unit = found[2]
        if unit and unit not in units:
            unit_name = ", ".join(units)
            raise InputError(f"{where}: {column} is {text!r}; its unit must be one of {unit_name}")
        return number * (units[unit] if unit else scale)

    def _number(self, digits: str, text: str, column: str, where: str) -> float | None:
        try:
            return _digits(digits, self.decimal)
        except ValueError:
            point, comma = digits.replace(",", ""), digits.replace(",", ".")
            raise InputError(
                f"{where}: {column} is {text!r}, which may be {point} or {comma}; "
                "write it with a decimal point"
            ) from None

    def setting(self, text: str) -> int | float | str:
        """Return a knob's value: a number where the cell is one, else its text."""
        if self.decimal == "," and text.count(",") == 1 and _NUMBER.fullmatch(text):
            number = _digits(text, ",")
            return text if number is None else number
        for kind in (int, float):
            with suppress(ValueError, OverflowError):
                if math.isfinite(number := kind(text)):
                    return number
        return text


def has_unit(text: str) -> bool:
    """Return whether a cell holds a number and a unit."""
    found = _NUMBER.fullmatch(text)
    return bool(found and found[2]) or bool(_CLOCK.fullmatch(text))


def common_unit(column: str, texts: Iterable[str], where: str) -> str:
    """Return the unit that follows the number of every cell of a knob's column, or "".

    InputError if the column's name ends with another unit.
    """
    found = {match[2] if (match := _NUMBER.fullmatch(text)) else "" for text in texts}
    if len(found) != 1 or not found <= _KNOB_UNITS:
        return ""
    unit = found.pop()
    named = re.split(r"[^A-Za-z%]+", column.rstrip(")] "))[-1].lower()
    if named in map(str.lower, _KNOB_UNITS) and named != unit.lower():
        raise InputError(f"{where}: {column} is in {unit}, but its name says {named}")
    return unit


def scale_of(figure: str, column: str) -> float:
    """Return the factor of the unit at the end of a column's name, else 1.

    Units are found in any case, except those that the case tells apart: `_mj` is refused.
    """
    unit = re.split(r"[^A-Za-zµμ]+", column.rstrip(")] "))[-1]
    units = UNITS[figure]
    if unit in units:
        return units[unit]
    alike = [unit_name for unit_name in units if unit_name.lower() == unit.lower()]
    if len(alike) > 1:
        raise InputError(
            f"the column {column!r} may be in {' or '.join(alike)}; write the unit so in its name"
        )
    return units[alike[0]] if alike else 1.0
