"""A result for other tools, as CSV and as data frames: a row a point, units in the names."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.answer.answer import Answer
from tuner.answer.parts import Point
from tuner.display.view import View, file_columns
from tuner.formatting import ordered_knobs, settings_text
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knobs import by_stage, value_text
from tuner.search_spaces.plugins import install_command
from tuner.search_spaces.safe_files import require_own, write_text
from tuner.workload.node.measure.measurement import PARTS

if TYPE_CHECKING:
    import pandas


def _cell(value: Any) -> Any:
    return value_text(value) if by_stage(value) else value


def rows(result: Answer, points: Sequence[Point] | None = None) -> list[dict[str, Any]]:
    """Return a flat dict for each point, fastest first: its knobs, then the columns of a file.

    All have the same keys; a knob that a point leaves alone is None, and one value a stage is
    joined by commas. Where a meter told the parts of a superchip, their mean powers follow.
    """
    view = View(result)
    by_configuration = {p.configuration: p for p in (*result.points, *result.front_points)}
    if points is None:
        points = sorted(by_configuration.values(), key=lambda p: p.time_to_solution_s)
    names = ordered_knobs([*by_configuration, *(p.configuration for p in points)])
    parts_W = [result.parts_W(p.configuration) for p in points]
    parts = [part for part in PARTS if any(part in each for each in parts_W)]
    return [
        {name: _cell(p.configuration.get(name)) for name in names}
        | {name: value(p) for name, value in file_columns(view).items()}
        | {f"{part}_W": each.get(part) for part in parts}
        for p, each in zip(points, parts_W, strict=True)
    ]


def frame(result: Answer, points: Sequence[Point] | None = None) -> pandas.DataFrame:
    """Return `rows` as a pandas DataFrame; InputError if pandas is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise InputError(
            f"pandas is not installed; install it with {install_command('notebook')}"
        ) from error
    return pandas.DataFrame(rows(result, points))


def front_frame(result: Answer) -> pandas.DataFrame:
    """Return the front as a pandas DataFrame of time, energy, power and settings.

    It has few columns, so that pandas shows all of them in 80 columns; `frame` has the rest.
    """
    table = frame(result, result.front_points)
    table.index += 1
    today = result.today_configuration
    table["settings"] = [settings_text(p.configuration, today) for p in result.front_points]
    figures = ["time_to_solution_s"]
    if "power_W" in table:
        table["power_W"] = table["power_W"].round(1)
        figures += ["energy_to_solution_kJ", "power_W"]
    return table[[*figures, "settings"]]


def csv_cell(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula: such a text gets an apostrophe in
    front (OWASP, "CSV Injection"). Numbers stay as they are."""
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return value
    with contextlib.suppress(ValueError):
        float(value)
        return value
    return f"'{value}"


def write_csv(result: Answer, out: str | Path | None = None) -> Path:
    """Write the points as CSV and return the path: by default in the run's folder, or here.

    Raises:
        InputError: the file cannot be written, or would go to a run folder of another user.
    """
    folder = result.run_dir if result.run_dir is not None else Path()
    path = Path(out) if out is not None else folder / f"{result.name}.csv"
    if out is None and result.run_dir is not None:
        require_own(folder)
    table = rows(result)
    names = list(table[0]) if table else ["energy_to_solution_kJ"]
    text = io.StringIO()
    csv.writer(text).writerows(map(csv_cell, row) for row in (names, *map(dict.values, table)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text.getvalue())
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    return path
