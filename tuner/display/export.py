"""A result for other tools: CSV, Parquet and Kernel Tuner's T4.

Every format is written from the same rows: one a point, one column a knob, units in the names. The
rows are plain dicts, so CSV and T4 need nothing installed.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.display.columns import FIGURES, FILE
from tuner.display.view import View
from tuner.formatting import ordered_knobs, varying_knobs
from tuner.results.parts import Point
from tuner.results.result import Result
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.safe_files import require_own, write_bytes, write_text

if TYPE_CHECKING:
    import pandas


def _needs(name: str) -> Any:
    """Import an optional package, or raise an error that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"{name} is not installed; install it with pip install 'joulefront[notebook]'"
        ) from error


def _cell(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def rows(result: Result, points: Sequence[Point] | None = None) -> list[dict[str, Any]]:
    """Return a flat dict for each point, fastest first: its knobs, then the columns of `FILE`.

    All have the same keys; a knob that a point leaves alone is None, and one value a stage is
    joined by commas.
    """
    view = View(result)
    known = {p.configuration: p for p in (*result.points, *result.front_points)}
    if points is None:
        points = sorted(known.values(), key=lambda p: p.time_to_solution_s)
    names = ordered_knobs([*known, *(p.configuration for p in points)])
    return [
        {name: _cell(p.configuration.get(name)) for name in names}
        | {name: value(view, p) for name, value in FILE.items()}
        for p in points
    ]


def frame(result: Result, points: Sequence[Point] | None = None) -> pandas.DataFrame:
    """`rows` as a pandas DataFrame."""
    return _needs("pandas").DataFrame(rows(result, points))


def front_frame(result: Result) -> pandas.DataFrame:
    """Return the front as a pandas DataFrame of time, energy, power and the knobs that vary."""
    table = frame(result, result.front_points)
    table.index += 1
    names = varying_knobs(p.configuration for p in (*result.points, *result.front_points))
    figures = ["time_to_solution_s", "energy_to_solution_kJ", "power_W"]
    return table[[name for name in (*figures, *names) if name in table.columns]]


def csv_cell(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula: such a text gets an apostrophe in
    front (OWASP, "CSV Injection"). Numbers stay as they are."""
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return value
    with contextlib.suppress(ValueError):
        float(value)
        return value
    return f"'{value}"


def csv_text(names: Iterable[str], table: Iterable[Iterable[Any]]) -> str:
    """Return a table as CSV."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerows(map(csv_cell, row) for row in (names, *table))
    return text.getvalue()


def _to_csv(result: Result, out: Path) -> None:
    table = rows(result)
    names = list(table[0]) if table else ["energy_to_solution_kJ"]
    write_text(out, csv_text(names, (row.values() for row in table)))


def _to_parquet(result: Result, out: Path) -> None:
    _needs("pyarrow")
    table = frame(result)
    for name in table.columns:
        if table[name].map(type).nunique() > 1 and table[name].dtype == object:
            # One column, one type: a knob that is a number here and one value a stage there.
            table[name] = table[name].map(lambda value: None if value is None else str(value))
    write_bytes(out, table.to_parquet(index=False))


def t4_results(result: Result) -> dict[str, Any]:
    """Return the result in Kernel Tuner's T4 auto-tuning results format, schema version 1.0.0.

    `runtimes` holds every step that was timed, in milliseconds, as Kernel Tuner's own files do;
    `compilation_time` is 0, because a launch is paid once a probe and not a configuration. Failed
    probes are results too, with their `invalidity`.
    """
    view, entries = View(result), []
    for p in sorted(result.points, key=lambda p: p.time_to_solution_s):
        windows = result.windows.get(p.configuration, ())
        runtimes = [1000 * s for window in windows for s in window.step_times_s]
        figures = [(name, FILE[name](view, p), unit) for name, unit in FIGURES.items()]
        measured = [
            {"name": name, "value": value, "unit": unit}
            for name, value, unit in figures
            if math.isfinite(value)
        ]
        entries.append(_t4_entry(p.configuration, measured, runtimes))
    known = {p.configuration for p in result.points}
    for record in result.failures:
        assert record.failure is not None
        said = {"name": "failure", "value": record.failure.message, "unit": ""}
        kind = record.failure.type.t4
        entries += [
            {"timestamp": record.started_at, **_t4_entry(configuration, [said], invalidity=kind)}
            for configuration in record.request.configurations()
            if configuration not in known
        ]
    return {"schema_version": "1.0.0", "results": entries}


def _t4_entry(
    configuration: Configuration,
    measurements: Sequence[Any],
    runtimes: Sequence[float] = (),
    invalidity: str = "correct",
) -> dict[str, Any]:
    knobs = {**configuration.launch, **configuration.live}
    zero = dict.fromkeys(("compilation_time", "framework", "search_algorithm", "validation"), 0.0)
    return {
        "configuration": {n: list(v) if isinstance(v, tuple) else v for n, v in knobs.items()},
        "objectives": ["energy_to_solution_kJ", "time_to_solution_s"],
        "times": {**zero, "runtimes": list(runtimes)},
        "invalidity": invalidity,
        "correctness": int(invalidity == "correct"),
        "measurements": measurements,
    }


def _to_t4(result: Result, out: Path) -> None:
    write_text(out, json.dumps(t4_results(result), indent=1, allow_nan=False) + "\n")


@dataclass(frozen=True)
class _Format:
    write: Callable[[Result, Path], None]
    ending: str


FORMATS = {
    "csv": _Format(_to_csv, ".csv"),
    "parquet": _Format(_to_parquet, ".parquet"),
    "t4": _Format(_to_t4, ".t4.json"),
}


def export_result(result: Result, to: str, out: str | Path | None = None) -> Path:
    """Write a result in one of `FORMATS` and return the path of the file.

    It goes to the run's folder, or here where there is none, when `out` is not given.

    Raises:
        InputError: there is no such format, a package that it needs is not installed, the file
            cannot be written, or it would go to a run folder of another user.
    """
    if to not in FORMATS:
        raise UnknownName("format", to, list(FORMATS))
    chosen = FORMATS[to]
    folder = result.run_dir if result.run_dir is not None else Path()
    path = Path(out) if out is not None else folder / f"{result.name}{chosen.ending}"
    if out is None and result.run_dir is not None:
        require_own(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        chosen.write(result, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    return path
