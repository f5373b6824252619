"""Reader of CSV files as programs write them, for every command that reads a table.

It takes UTF-8 with or without a byte order mark and Excel's UTF-16, columns separated by commas,
semicolons or tabs (and Excel's line `sep=;`), either decimal mark, empty columns and rows at the
end, and a repeated header, where files were joined. What a row means is up to the caller.

Programs write one value in many ways: `270.11 W` (nvidia-smi), `0,501` (a German or French Excel),
`0 days 00:21:52.3` (pandas, so Optuna), `2.5min` (MLflow), `1-02:03:04` (Slurm), `[N/A]`, `nan`.
A value that could be read in two ways is refused, never guessed.
"""

from __future__ import annotations

import codecs
import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import open_to_read

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


#: Value of a knob.
Value: TypeAlias = int | float | str

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
#: Separators in the order in which they are tried.
_SEPARATORS = ("\t", ";", ",")
#: Beginnings of other files of figures: DeepSpeed's autotuner writes JSON, MLPerf's logger lines
#: with a mark, which a launcher may put the rank before.
_NO_TABLES = {"JSON": r"\A\s*[\[{]", "of an MLPerf log": r"(?m)^(?:\d+: ?)?:::MLL"}
#: Rows left out that are named one by one.
MOST_NAMED = 3
#: Words in a column of states or exit codes that say that the run of the row did not end well.
_STATES = ("state", "status", "run_state", "exit_code", "exitcode", "exit code", "returncode")
_FAILED = frozenset(
    [
        *("fail", "failed", "failure", "crashed", "crash", "killed", "error", "errored", "oom"),
        *("pruned", "timeout", "timed_out", "cancelled", "canceled", "out_of_memory", "node_fail"),
        *("preempted", "aborted", "stopped", "running", "pending", "waiting", "queued"),
        *("scheduled", "deadline", "boot_fail"),
    ]
)


@dataclass(frozen=True)
class CsvRow:
    """Row of a file: its number as an editor counts lines, and its cells by column."""

    line: int
    cells: Mapping[str, str]


@dataclass(frozen=True)
class CsvFile:
    """Columns and rows of a CSV file."""

    path: Path
    separator: str
    header: Sequence[str]
    rows: Sequence[CsvRow]

    def where(self, row: CsvRow) -> str:
        """Return the file and line of a row, for messages."""
        return f"{self.path} line {row.line}"

    def cells(self, numbers: Iterable[str]) -> Cells:
        """Return the reader of this file's cells; InputError if `numbers` have both decimal marks.

        Where these columns leave it open, semicolons stand for decimal commas: Excel separates
        columns so where the comma is the decimal mark.
        """
        seen: dict[Decimal, str] = {}
        texts = [(row.line, row.cells[column]) for column in numbers for row in self.rows]
        for line, text in texts:
            if mark := decimal_of(text):
                seen.setdefault(mark, f"{text!r} in line {line}")
        if len(seen) > 1:
            raise InputError(
                f"{self.path} has decimal points and decimal commas ({seen['.']}, {seen[',']}); "
                "write all numbers with a decimal point"
            )
        if seen:
            return Cells(next(iter(seen)))
        comma = self.separator == ";" and not any("." in text for _, text in texts)
        return Cells("," if comma else None)

    def why_left_out(self, row: CsvRow, needed: Iterable[str], knobs: Iterable[str]) -> str:
        """Return why a row is not a measurement ("step_s is 'nan'"), or ""."""
        for column in needed:
            if is_missing(row.cells[column]):
                return f"{column} is {row.cells[column]!r}"
        for column in self.header:
            if column.lower() in _STATES and column not in knobs:
                text = row.cells[column]
                word = re.split(r"[\s_]by\b", text.lower())[0].strip().replace(" ", "_")
                if word in _FAILED or ("exit" in column.lower() and re.search("[1-9]", text)):
                    return f"{column} is {text!r}"
        return ""

    def settings(self, columns: Iterable[str], cells: Cells) -> Mapping[str, Mapping[int, Value]]:
        """Return the values of knobs by column and line; an empty cell has none.

        The unit of a column in which each value has the same one is dropped.
        """
        found: dict[str, Mapping[int, Value]] = {}
        for column in columns:
            texts = {row.line: row.cells[column] for row in self.rows if row.cells[column]}
            where = f"{self.path} line {min(texts, default=1)}"
            unit = common_unit(column, texts.values(), where)
            found[column] = {
                line: cells.setting(text.removesuffix(unit).rstrip())
                for line, text in texts.items()
            }
        return found


def _text(path: Path) -> str:
    try:
        with open(open_to_read(path), "rb") as file:
            data = file.read()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError(
            f"{path} line {line} is not UTF-8 text; save the file as 'CSV UTF-8'"
        ) from error
    if "\0" in text:
        raise InputError(f"{path} is not a CSV table: it holds binary data")
    for form, start in _NO_TABLES.items():
        if found := re.search(start, text):
            line = text.count("\n", 0, found.end()) + 1
            raise InputError(
                f"{path} line {line} is {form}, not a CSV table; write one line a run and one of "
                "columns"
            )
    return text


def left_out_sentence(rows: Sequence[str]) -> str:
    """Return a sentence on rows that are left out: "line 6 (step_s is 'nan')" of each."""
    more = f" and {len(rows) - MOST_NAMED} more" if len(rows) > MOST_NAMED else ""
    count = "1 row is" if len(rows) == 1 else f"{len(rows)} rows are"
    return f"{count} left out: {', '.join(rows[:MOST_NAMED])}{more}."


def no_measurement(path: Path, rows: Sequence[str]) -> str:
    """Return the error of a file whose rows are all left out."""
    return (
        f"{path} has no row of a run that ended well with its time and energy or power; "
        + left_out_sentence(rows).removesuffix(".")
    )


class _Records:
    """Records of a text under one separator, with their lines; `error` if it cannot be read so."""

    def __init__(self, text: str, separator: str, first: int) -> None:
        self.rows: list[tuple[int, list[str]]] = []
        self.error = ""
        reader = csv.reader(
            io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True
        )
        try:
            for row in reader:
                if any(cells := [cell.strip() for cell in row]):
                    self.rows.append((reader.line_num + first, cells))
        except csv.Error as error:
            self.error = f"line {reader.line_num + first} is not a CSV line: {error}"
        self.width = len(self.rows[0][1]) if self.rows else 0

    def fit(self) -> tuple[bool, int]:
        """Return whether each row has as many values as the first, else how many that names."""
        even = all(len(_trimmed(row, self.width)) == self.width for _, row in self.rows)
        if even and self.width > 1 and not self.error:
            return True, 0
        return False, self.width


def _trimmed(row: list[str], width: int) -> list[str]:
    while len(row) > width and not row[-1]:
        row = row[:-1]
    return row


def read_csv(path: Path) -> CsvFile:
    """Read a CSV file; InputError with its line if it is not a table, or names a column twice."""
    text, first = _text(path), 0
    separators: tuple[str, ...] = _SEPARATORS
    head, _, rest = text.partition("\n")
    if re.fullmatch(r"sep=.\r?", head, re.I):
        text, first, separators = rest, 1, (head[4],)
    tried = {mark: _Records(text, mark, first) for mark in separators}
    separator = max(tried, key=lambda mark: tried[mark].fit())  # the first of equals
    found = tried[separator]
    if found.error:
        raise InputError(f"{path} {found.error}")
    header = found.rows[0][1] if found.rows else []
    named = [name for name in header if name]
    if len(set(named)) != len(named):
        raise InputError(f"{path} names a column twice in its first line")
    kept: list[CsvRow] = []
    for line, row in found.rows[1:]:
        cells = _trimmed(row, len(header))
        if cells == header:
            continue  # files joined by `cat`
        if len(cells) != len(header):
            raise InputError(
                f"{path} line {line} has {len(cells)} values; its first line names {len(header)}"
            )
        kept.append(CsvRow(line, {n: c for n, c in zip(header, cells, strict=True) if n}))
    return CsvFile(path, separator, named, kept)
