"""Reader of CSV files as programs write them, for every command that reads a table.

It takes UTF-8 with or without a byte order mark and Excel's UTF-16, columns separated by commas,
semicolons or tabs (and Excel's line `sep=;`), either decimal mark, empty columns and rows at the
end, and a repeated header, where files were joined. What a row means is up to the caller.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import open_to_read
from tuner.workload.records.csv_cells import Cells, Decimal, common_unit, decimal_of, is_missing

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
