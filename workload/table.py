"""Recorded tables: finite lists of configurations with measured time and power, from any source.

`table.toml` says what the columns of `table.csv` are, how its rows fall into groups (each one
search problem), how noisy a repeated window is and what probing would have cost.
"""

from __future__ import annotations

import csv
import math
import statistics
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.typed import plain_setting, plain_text
from tuner.workload.probe import Scope

#: Bounds of a plausible time (s), energy (J) or power (W).
LEAST, MOST = 1e-12, 1e15


@dataclass(frozen=True)
class TableCost:
    """Cost of probing one point: a launch at a share of the point's own power, and settling."""

    launch_s: float = 30.0
    launch_power: float = 0.5
    settle_s: float = 2.0
    window_s: float = 5.0

    def wall_s(self, settings: int) -> float:
        """Return the seconds of one launch that visits this number of live settings."""
        return self.launch_s + settings * (self.settle_s + self.window_s)

    def energy_J(self, powers_W: Iterable[float]) -> float:
        """Return the joules of one launch, at the first of these powers, that visits them all."""
        powers = list(powers_W)
        launch = self.launch_s * self.launch_power * powers[0] if powers else 0.0
        return launch + (self.settle_s + self.window_s) * math.fsum(powers)


@dataclass(frozen=True)
class TableNoise:
    """Relative standard deviation of a repeated window, where the table has no repeats."""

    time_cv: float = 0.0
    power_cv: float = 0.0


@dataclass(frozen=True)
class PredictedBy:
    """Job and cluster of a recording, for the analytic models (`[predicted_by]` of the toml)."""

    job: TrainingJob
    cluster: Cluster


@dataclass(frozen=True)
class TablePoint:
    """Configuration as recorded; repeats are (s, W), unknown standard deviations None."""

    configuration: Configuration
    time_s: float
    power_W: float
    repeats: tuple[tuple[float, float], ...] = ()
    time_sd_s: float | None = None
    power_sd_W: float | None = None
    lines: tuple[int, ...] = ()

    @property
    def energy_J(self) -> float:
        """Energy of one unit of work, joules."""
        return self.time_s * self.power_W


@dataclass(frozen=True)
class TableGroup:
    """Search problem of a table, named by its grouping columns; points in the order of the file."""

    name: str
    points: tuple[TablePoint, ...]


@dataclass(frozen=True)
class RecordedTable:
    """Table of recorded configurations; `unit_of_work` is what one "step" of it is."""

    name: str
    folder: Path
    groups: tuple[TableGroup, ...]
    launch_knobs: tuple[str, ...]
    live_knobs: tuple[str, ...]
    scope: Scope
    cost: TableCost
    noise: TableNoise
    unit_of_work: str = "step"
    estimated: bool = False
    baseline: Mapping[str, Any] = field(default_factory=dict)
    predicted_by: PredictedBy | None = None
    notes: tuple[str, ...] = ()

    def group(self, name: str | None = None) -> TableGroup:
        """Return a group by its name or a unique part of it; UnknownName if not one."""
        if name is None and len(self.groups) == 1:
            return self.groups[0]
        by_name = {group.name: group for group in self.groups}
        if name is None:
            many = f"table {self.name!r} holds {len(by_name)} groups; name one of: "
            raise InputError(many + "; ".join(by_name))
        hits = [group for told, group in by_name.items() if name in told]
        if name not in by_name and len(hits) != 1:
            raise UnknownName(f"group of table {self.name}", name, list(by_name))
        return by_name.get(name) or hits[0]


_LISTS = ("group_by", "launch_knobs", "live_knobs", "ignore")
_REPEATS = ("time_repeats_s", "energy_repeats_J", "power_repeats_W")
_COLUMNS = ("time_s", "power_W", "energy_J", "time_sd_s", "energy_sd_J", "power_sd_W")
_TEXTS = ("name", "source", "license", "what", "unit_of_work", "energy_scope")
_TABLES = ("cost", "noise", "baseline", "predicted_by")


@dataclass(frozen=True)
class _Columns:
    where: str
    lists: Mapping[str, tuple[str, ...]]
    single: Mapping[str, str]


def _read_columns(data: Mapping[str, Any], path: Path) -> _Columns:
    lists: dict[str, tuple[str, ...]] = {}
    for key in (*_LISTS, *_REPEATS):
        value = data.get(key, [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise InputError(f"{key} in {path} is {value!r}; it must be a list of column names")
        lists[key] = tuple(value)
    single = {key: data[key] for key in (*_COLUMNS, *_TEXTS) if key in data}
    for key, value in single.items():
        if not isinstance(value, str):
            raise InputError(f"{key} in {path} is {value!r}; it must be a text")
    knobs = lists["launch_knobs"] + lists["live_knobs"]
    if not knobs:
        raise InputError(f"{path} names no knob; it must give launch_knobs or live_knobs")
    if len(set(knobs)) != len(knobs):
        raise InputError(f"{path} names a knob twice; each column is launch or live, once")
    if "time_s" not in single or not {"power_W", "energy_J"} & set(single):
        raise InputError(f"{path} must name the columns time_s and power_W or energy_J")
    return _Columns(str(path), lists, {k: v for k, v in single.items() if k in _COLUMNS})


def _read_toml(path: Path) -> tuple[RecordedTable, _Columns]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from error
    columns = _read_columns(data, path)
    scope = data.get("energy_scope", "gpu")
    if scope not in get_args(Scope):
        raise InputError(
            f"energy_scope in {path} is {scope!r}; it must be one of {', '.join(get_args(Scope))}"
        )
    notes = [
        f"{path.name}: the key {key!r} is not read"
        for key in data
        if key not in {*_LISTS, *_REPEATS, *_COLUMNS, *_TEXTS, *_TABLES, "estimated"}
    ]
    plain_text(data.get("name", ""), f"name in {path}")
    estimated = data.get("estimated", False)
    if not isinstance(estimated, bool):
        raise InputError(f"estimated in {path} is {estimated!r}; it must be true or false")
    if "cost" not in data:
        notes.append(f"{path.name} has no [cost]; {TableCost()} is assumed")
    launch, live = columns.lists["launch_knobs"], columns.lists["live_knobs"]
    baseline = data.get("baseline", {})
    if not isinstance(baseline, dict) or not set(baseline) <= {*launch, *live}:
        known = ", ".join(launch + live)
        raise InputError(f"[baseline] in {path} must give values for knobs: {known}")
    plain_setting(baseline, f"[baseline] in {path}")
    table = RecordedTable(
        name=data.get("name", path.parent.name),
        folder=path.parent,
        groups=(),
        launch_knobs=launch,
        live_knobs=live,
        scope=scope,
        cost=_figures(TableCost, data.get("cost", {}), f"[cost] in {path}"),
        noise=_figures(TableNoise, data.get("noise", {}), f"[noise] in {path}"),
        unit_of_work=data.get("unit_of_work", "step"),
        estimated=estimated,
        baseline=baseline,
        predicted_by=_predicted_by(data["predicted_by"], path) if "predicted_by" in data else None,
        notes=tuple(notes),
    )
    return table, columns


def _predicted_by(data: Any, path: Path) -> PredictedBy:
    what = f"[predicted_by] in {path}"
    named = isinstance(data, dict) and set(data) == {"job", "cluster"}
    if not named or not all(isinstance(name, str) for name in data.values()):
        raise InputError(f"{what} must name a job and a cluster, and nothing else")
    try:
        return PredictedBy(load_job(data["job"]), load_cluster(data["cluster"]))
    except InputError as error:
        raise InputError(f"{what}: {error}") from error


def _figures(cls: type, data: Any, what: str) -> Any:
    fields = cls.__dataclass_fields__  # type: ignore[attr-defined]
    if not isinstance(data, dict):
        raise InputError(f"{what} is {data!r}; it must be a table of {', '.join(fields)}")
    for key, value in data.items():
        if key not in fields:
            raise UnknownName(f"key of {what}", key, fields)
        if type(value) not in (int, float) or not 0 <= value <= MOST:
            raise InputError(
                f"{key} of {what} is {value!r}; it must be at least 0, at most {MOST:g}"
            )
    return cls(**{key: float(value) for key, value in data.items()})


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError, OverflowError):
            if math.isfinite(number := kind(text)):
                return number
    return text


def _positive(row: Mapping[str, str], column: str, where: str, *, zero: bool = False) -> float:
    with suppress(ValueError):
        number = float(row[column])
        if LEAST <= number <= MOST or (number == 0 and zero):
            return number
    raise InputError(
        f"{where}: {column} is {row[column]!r}; it must be {'0 or ' if zero else ''}"
        f"a positive number from {LEAST:g} to {MOST:g}"
    )


def read_csv(path: Path) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """Return the columns of a CSV file, and (line number, column -> text) of each row; InputError
    if it is no table, or names a column twice."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            rows = [(reader.line_num, [*map(str.strip, row)]) for row in reader if row]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not a CSV table: {error}") from error
    if len(set(header)) != len(header):
        raise InputError(f"{path} names a column twice in its first line")
    for number, row in rows:
        if len(row) != len(header):
            raise InputError(
                f"{path} line {number} has {len(row)} values; its first line names {len(header)}"
            )
    return header, [(number, dict(zip(header, row, strict=True))) for number, row in rows]


def _read_rows(path: Path, layout: _Columns) -> list[tuple[int, dict[str, str]]]:
    header, rows = read_csv(path)
    wanted = [
        *(name for key in (*_LISTS[:3], *_REPEATS) for name in layout.lists[key]),
        *layout.single.values(),
    ]
    missing = [name for name in dict.fromkeys(wanted) if name not in header]
    if missing:
        raise InputError(
            f"{path} has no column {missing[0]!r}, which {layout.where} names; "
            f"it has {', '.join(header) or 'none'}"
        )
    for name in {name for key in _LISTS[:3] for name in layout.lists[key]}:
        plain_text(name, f"a column's name in {path}")
        for number, row in rows:
            plain_text(row[name], f"{name} in line {number} of {path}")
    if not rows:
        raise InputError(f"{path} has no rows; it must hold at least one configuration")
    return rows


def _point(row: Mapping[str, str], line: int, layout: _Columns, path: Path) -> TablePoint:
    where, columns = f"{path} line {line}", layout.single
    time_s = _positive(row, columns["time_s"], where)
    if "power_W" in columns:
        power_W = _positive(row, columns["power_W"], where)
    else:
        power_W = _positive(row, columns["energy_J"], where) / time_s

    def many(key: str) -> list[float]:
        return [_positive(row, name, where) for name in layout.lists[key]]

    times, energies, powers = (many(key) for key in _REPEATS)
    if energies and not powers and times and len(energies) == len(times):
        powers = [energy / time for energy, time in zip(energies, times, strict=True)]
    count = max(len(times), len(powers))
    if (times and len(times) != count) or (powers and len(powers) != count):
        raise InputError(f"{layout.where} must name as many time repeats as energy repeats")
    repeats = tuple(zip(times or [time_s] * count, powers or [power_W] * count, strict=True))

    def spread(key: str) -> float | None:
        # An empty cell: measured once, so nothing is known of the spread.
        if key not in columns or not row[columns[key]].strip():
            return None
        return _positive(row, columns[key], where, zero=True)

    time_sd_s, power_sd_W = spread("time_sd_s"), spread("power_sd_W")
    energy_sd_J = spread("energy_sd_J")
    if power_sd_W is None and energy_sd_J is not None:
        # E = P t: with t quiet beside E, the relative spreads of E and t bound that of P.
        energy_cv = energy_sd_J / (time_s * power_W)
        power_sd_W = power_W * math.sqrt(max(energy_cv**2 - ((time_sd_s or 0) / time_s) ** 2, 0))
    launch, live = (
        # An empty cell is a knob left alone, which is what an unnamed knob means.
        Settings(
            {name: _value(row[name].strip()) for name in layout.lists[key] if row[name].strip()}
        )
        for key in ("launch_knobs", "live_knobs")
    )
    return TablePoint(
        Configuration(launch, live), time_s, power_W, repeats, time_sd_s, power_sd_W, (line,)
    )


def _merged(points: list[TablePoint]) -> TablePoint:
    if len(points) == 1:
        return points[0]
    repeats = tuple(
        pair for point in points for pair in (point.repeats or ((point.time_s, point.power_W),))
    )
    return TablePoint(
        points[0].configuration,
        statistics.fmean(time for time, _ in repeats),
        statistics.fmean(power for _, power in repeats),
        repeats,
        lines=tuple(line for point in points for line in point.lines),
    )


def load_table(folder: str | Path) -> RecordedTable:
    """Read a recorded table by its folder or file; InputError names the line or the key."""
    folder = Path(folder)
    if folder.is_file():
        folder = folder.parent
    table, layout = _read_toml(folder / "table.toml")
    path = folder / "table.csv"
    grouped: dict[tuple[str, ...], dict[Configuration, list[TablePoint]]] = {}
    for line, row in _read_rows(path, layout):
        group = tuple(row[column] for column in layout.lists["group_by"])
        point = _point(row, line, layout, path)
        grouped.setdefault(group, {}).setdefault(point.configuration, []).append(point)
    groups = tuple(
        TableGroup(
            name=", ".join(values) or table.name,
            points=tuple(_merged(same) for same in by_configuration.values()),
        )
        for values, by_configuration in grouped.items()
    )
    return replace(table, groups=groups)
