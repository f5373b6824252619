"""Recorded tables and traces, and the runners that answer from them instead of starting processes.

`table.toml` says what the columns of `table.csv` are, how its rows fall into groups (each one
search problem), how noisy a repeated window is and what probing would have cost. A visit's draw
depends only on the seed, the configuration and the probe's name, so a resumed study gets the same
values.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from tuner.executors.simulated_time import draws
from tuner.recordings.csv_files import (
    CsvFile,
    CsvRow,
    is_missing,
    left_out_sentence,
    no_measurement,
    read_csv,
)
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.data_files import parse_toml
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.fields import plain_setting, plain_text
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.safe_files import read_text
from tuner.workload.records.probe import (
    ENERGY_SCOPES,
    Failure,
    Measurement,
    MeterInfo,
    ProbeRecord,
    ProbeRequest,
    Runner,
    Scope,
)
from tuner.workload.records.trace import read_trace

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
    """Table of recorded configurations; `unit_of_work` is the meaning of a "step"."""

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
        """Return a group by its name or a unique part of its name; UnknownName if not one."""
        if name is None and len(self.groups) == 1:
            return self.groups[0]
        by_name = {group.name: group for group in self.groups}
        if name is None:
            many = f"table {self.name!r} holds {len(by_name)} groups; name one of: "
            raise InputError(many + "; ".join(by_name))
        hits = [group for mentioned, group in by_name.items() if name in mentioned]
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
        data = parse_toml(read_text(path))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from error
    columns = _read_columns(data, path)
    scope = data.get("energy_scope", "gpu")
    if scope not in ENERGY_SCOPES:
        raise InputError(
            f"energy_scope in {path} is {scope!r}; it must be one of {', '.join(ENERGY_SCOPES)}"
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
        names = ", ".join(launch + live)
        raise InputError(f"[baseline] in {path} must give values for knobs: {names}")
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
    subject = f"[predicted_by] in {path}"
    named = isinstance(data, dict) and set(data) == {"job", "cluster"}
    if not named or not all(isinstance(name, str) for name in data.values()):
        raise InputError(f"{subject} must name a job and a cluster, and nothing else")
    try:
        return PredictedBy(load_job(data["job"]), load_cluster(data["cluster"]))
    except InputError as error:
        raise InputError(f"{subject}: {error}") from error


def _figures(cls: type, data: Any, subject: str) -> Any:
    fields = cls.__dataclass_fields__  # type: ignore[attr-defined]
    if not isinstance(data, dict):
        raise InputError(f"{subject} is {data!r}; it must be a table of {', '.join(fields)}")
    for key, value in data.items():
        if key not in fields:
            raise UnknownName(f"key of {subject}", key, fields)
        if type(value) not in (int, float) or not 0 <= value <= MOST:
            raise InputError(
                f"{key} of {subject} is {value!r}; it must be at least 0, at most {MOST:g}"
            )
    return cls(**{key: float(value) for key, value in data.items()})


def positive(number: float, text: str, column: str, where: str, *, zero: bool = False) -> float:
    """Return a time, energy or power; InputError if it is not plausible."""
    if LEAST <= number <= MOST or (number == 0 and zero):
        return number
    raise InputError(
        f"{where}: {column} is {text!r}; it must be {'0 or ' if zero else ''}"
        f"a positive number from {LEAST:g} to {MOST:g}"
    )


def _read_file(path: Path, layout: _Columns) -> CsvFile:
    file = read_csv(path)
    wanted = [
        *(name for key in (*_LISTS[:3], *_REPEATS) for name in layout.lists[key]),
        *layout.single.values(),
    ]
    missing = [name for name in dict.fromkeys(wanted) if name not in file.header]
    if missing:
        raise InputError(
            f"{path} has no column {missing[0]!r}, which {layout.where} names; "
            f"it has {', '.join(file.header) or 'none'}"
        )
    for name in {name for key in _LISTS[:3] for name in layout.lists[key]}:
        plain_text(name, f"a column's name in {path}")
        for row in file.rows:
            plain_text(row.cells[name], f"{name} in line {row.line} of {path}")
    if not file.rows:
        raise InputError(f"{path} has no rows; it must hold at least one configuration")
    return file


class _Points:
    """Reader of the points of a file's rows."""

    def __init__(self, file: CsvFile, layout: _Columns) -> None:
        self.file, self.layout = file, layout
        repeats = [name for key in _REPEATS for name in layout.lists[key]]
        #: Columns without which a row is not a measurement.
        self.needed = [
            *(layout.single[key] for key in ("time_s", "power_W") if key in layout.single),
            *([] if "power_W" in layout.single else [layout.single["energy_J"]]),
            *repeats,
        ]
        self.knobs = [name for key in _LISTS for name in layout.lists[key]]
        self._cells = file.cells(dict.fromkeys((*layout.single.values(), *repeats)))
        self._settings = file.settings(
            layout.lists["launch_knobs"] + layout.lists["live_knobs"], self._cells
        )

    def why_left_out(self, row: CsvRow) -> str:
        """Return why a row is not a measurement, or ""."""
        return self.file.why_left_out(row, self.needed, self.knobs)

    def _figure(self, row: CsvRow, column: str, figure: str, *, zero: bool = False) -> float:
        where, text = self.file.where(row), row.cells[column]
        number = self._cells.figure(text, column, where, figure=figure, scale=1.0)
        return positive(number, text, column, where, zero=zero)

    def point(self, row: CsvRow) -> TablePoint:
        """Return the point of a row; InputError with its line if a value cannot be right."""
        columns, lists = self.layout.single, self.layout.lists
        time_s = self._figure(row, columns["time_s"], "time_s")
        if "power_W" in columns:
            power_W = self._figure(row, columns["power_W"], "power_W")
        else:
            power_W = self._figure(row, columns["energy_J"], "energy_J") / time_s
        times, energies, powers = (
            [self._figure(row, name, figure) for name in lists[key]]
            for key, figure in zip(_REPEATS, ("time_s", "energy_J", "power_W"), strict=True)
        )
        if energies and not powers and times and len(energies) == len(times):
            powers = [energy / time for energy, time in zip(energies, times, strict=True)]
        count = max(len(times), len(powers))
        if (times and len(times) != count) or (powers and len(powers) != count):
            raise InputError(
                f"{self.layout.where} must name as many time repeats as energy repeats"
            )
        repeats = tuple(zip(times or [time_s] * count, powers or [power_W] * count, strict=True))
        time_sd_s, power_sd_W = self._deviations(row, time_s, power_W)
        launch, live = (
            # An empty cell is a knob left alone, which is what an unnamed knob means.
            Settings(
                {
                    name: values[row.line]
                    for name in lists[key]
                    if row.line in (values := self._settings[name])
                }
            )
            for key in ("launch_knobs", "live_knobs")
        )
        lines = (row.line,)
        return TablePoint(
            Configuration(launch, live), time_s, power_W, repeats, time_sd_s, power_sd_W, lines
        )

    def _deviations(
        self, row: CsvRow, time_s: float, power_W: float
    ) -> tuple[float | None, float | None]:
        columns = self.layout.single

        def spread(key: str, figure: str) -> float | None:
            # A cell without a value: measured once, so nothing is known of the spread.
            if key not in columns or is_missing(row.cells[columns[key]]):
                return None
            return self._figure(row, columns[key], figure, zero=True)

        time_sd_s, power_sd_W = spread("time_sd_s", "time_s"), spread("power_sd_W", "power_W")
        energy_sd_J = spread("energy_sd_J", "energy_J")
        if power_sd_W is None and energy_sd_J is not None:
            # E = P t: with t quiet beside E, the relative spreads of E and t bound that of P.
            energy_cv = energy_sd_J / (time_s * power_W)
            time_cv = (time_sd_s or 0) / time_s
            power_sd_W = power_W * math.sqrt(max(energy_cv**2 - time_cv**2, 0))
        return time_sd_s, power_sd_W


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
    points = _Points(_read_file(path, layout), layout)
    grouped: dict[tuple[str, ...], dict[Configuration, list[TablePoint]]] = {}
    left_out: list[str] = []
    for row in points.file.rows:
        if why := points.why_left_out(row):
            left_out.append(f"line {row.line} ({why})")
            continue
        group = tuple(row.cells[column] for column in layout.lists["group_by"])
        point = points.point(row)
        grouped.setdefault(group, {}).setdefault(point.configuration, []).append(point)
    if not grouped:
        raise InputError(no_measurement(path, left_out))
    groups = tuple(
        TableGroup(
            name=", ".join(values) or table.name,
            points=tuple(_merged(same) for same in by_configuration.values()),
        )
        for values, by_configuration in grouped.items()
    )
    notes = [f"{path.name}: {left_out_sentence(left_out)}"] if left_out else []
    return replace(table, groups=groups, notes=(*table.notes, *notes))


def _never_recorded(missing: list[Settings], launch: Settings, where: str) -> Failure:
    return Failure(
        "refused",
        f"{where} never recorded {launch.short}"
        + (" at " + "; ".join(live.short for live in missing) if any(missing) else ""),
    )


class RecordingRunner(Runner, Protocol):
    """Runner that answers from a recording."""

    @property
    def probes(self) -> tuple[tuple[Configuration, ...], ...]:
        """The configurations of each recorded probe, in the recorded order."""
        ...


class TableRunner(RecordingRunner):
    """Runner that answers from one group of a recorded table.

    A visit draws from the point's repeats where there are several, else from its standard
    deviations, else from the table's [noise].
    """

    def __init__(self, table: RecordedTable, group: str | None = None, *, seed: int = 0) -> None:
        self.table = table
        self.group: TableGroup = table.group(group)
        self.seed = seed
        self.meter = MeterInfo(
            "table", table.scope, f"recorded table {table.name}", estimated=table.estimated
        )
        self._points = {point.configuration: point for point in self.group.points}

    @property
    def probes(self) -> tuple[tuple[Configuration, ...], ...]:
        """The configurations of each row, in the order of the file."""
        return tuple((point.configuration,) for point in self.group.points)

    def run(self, request: ProbeRequest) -> ProbeRecord:
        cost = self.table.cost
        visited: list[TablePoint] = []
        missing: list[Settings] = []
        measurements: list[Measurement] = []
        for configuration in request.configurations():
            point = self._points.get(configuration)
            if point is None:
                missing.append(configuration.live)
                continue
            # Its window opens after the launch, the settings before it and its own settling.
            opened_s = cost.wall_s(len(visited)) + cost.settle_s
            visited.append(point)
            measurements.append(self._measure(point, request.probe_id, opened_s))
        where = f"table {self.table.name!r}, {self.group.name},"
        return ProbeRecord(
            request=request,
            measurements=tuple(measurements),
            meter=self.meter,
            failure=_never_recorded(missing, request.launch, where) if missing else None,
            launch_s=cost.launch_s if visited else 0.0,
            wall_s=cost.wall_s(len(visited)) if visited else 0.0,
            energy_J=cost.energy_J(point.power_W for point in visited),
            host="replay",
            environment={"table": self.table.name, "group": self.group.name},
        )

    def _measure(self, point: TablePoint, probe_id: str, started_s: float) -> Measurement:
        draw = draws(self.seed, point.configuration.key, probe_id)
        time_s, power_W = point.time_s, point.power_W
        if len(point.repeats) > 1:
            time_s, power_W = point.repeats[int(draw.integers(len(point.repeats)))]
            time_sd = statistics.stdev(time for time, _ in point.repeats)
            power_sd = statistics.stdev(power for _, power in point.repeats)
        else:
            noise = self.table.noise
            time_sd = noise.time_cv * time_s if point.time_sd_s is None else point.time_sd_s
            power_sd = noise.power_cv * power_W if point.power_sd_W is None else point.power_sd_W
            # A spread beyond the mean itself would draw a negative time; half the mean is a floor.
            time_s = max(time_s + time_sd * draw.standard_normal(), time_s / 2)
            power_W = max(power_W + power_sd * draw.standard_normal(), power_W / 2)
        window_s = self.table.cost.window_s
        return Measurement(
            live=point.configuration.live,
            steps=max(1, int(window_s / time_s)),
            window_s=window_s,
            step_time_s=time_s,
            step_time_se_s=time_sd or math.nan,  # a table that tells no spread is not exact
            energy_J=power_W * window_s,
            power_W=power_W,
            power_se_W=power_sd or math.nan,
            started_s=started_s,
        )


class TraceRunner(RecordingRunner):
    """Runner that answers from a trace, or the run folder that holds one.

    One of a configuration's measurements is drawn. A launch that only ever failed fails again in
    the same way. InputError if the trace cannot be read, is empty, or mixes two scopes of energy.
    """

    def __init__(self, path: str | Path, *, seed: int = 0) -> None:
        path = Path(path)
        self.path = path / "trace" / "probes.jsonl" if path.is_dir() else path
        contents = read_trace(self.path)
        self.records, self.notes, self.seed = contents.records, contents.notes, seed
        if not self.records:
            raise InputError(f"the trace {self.path} holds no whole record; nothing to replay")
        scopes = sorted({record.meter.scope for record in self.records})
        if len(scopes) > 1:
            raise InputError(
                f"the trace {self.path} mixes the scopes {', '.join(scopes)}; "
                "a front charges one scope, so replay one of them"
            )
        self.meter = self.records[0].meter
        self._windows: dict[Configuration, list[tuple[Measurement, ProbeRecord]]] = {}
        self._failed: dict[Settings, ProbeRecord] = {}
        for record in self.records:
            launch = record.request.launch
            for measurement in record.measurements:
                key = Configuration(launch, measurement.live)
                self._windows.setdefault(key, []).append((measurement, record))
            if record.failure is not None and not record.failure.was_cancelled:
                self._failed.setdefault(launch, record)

    @property
    def probes(self) -> tuple[tuple[Configuration, ...], ...]:
        """The configurations of each recorded probe, in the order of the trace."""
        return tuple(tuple(record.request.configurations()) for record in self.records)

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        """Every requested configuration, measured or not, in the order of the trace."""
        requested = (c for record in self.records for c in record.request.configurations())
        return tuple(dict.fromkeys(requested))

    def run(self, request: ProbeRequest) -> ProbeRecord:
        drawn: list[tuple[Measurement, ProbeRecord]] = []
        missing: list[Settings] = []
        for configuration in request.configurations():
            windows = self._windows.get(configuration)
            if not windows:
                missing.append(configuration.live)
                continue
            draw = draws(self.seed, configuration.key, request.probe_id)
            drawn.append(windows[int(draw.integers(len(windows)))])
        failed, failure = self._failed.get(request.launch), None
        if missing:
            failure = (failed and failed.failure) or _never_recorded(
                missing, request.launch, f"the trace {self.path}"
            )
        origin = drawn[0][1] if drawn else failed
        if origin is None:
            return ProbeRecord(request, (), self.meter, failure, host="replay")
        if drawn:
            windows_J = math.fsum(m.energy_J for m in origin.measurements)
            launch_J = max(origin.energy_J - windows_J, 0.0)
            energy_J = launch_J + math.fsum(measurement.energy_J for measurement, _ in drawn)
            wall_s = origin.launch_s + math.fsum(
                max(record.wall_s - record.launch_s, 0.0) / len(record.measurements)
                for _, record in drawn
            )
        else:
            energy_J, wall_s = origin.energy_J, origin.wall_s
        return ProbeRecord(
            request=request,
            measurements=tuple(measurement for measurement, _ in drawn),
            meter=origin.meter,
            failure=failure,
            launch_s=origin.launch_s,
            wall_s=wall_s,
            energy_J=energy_J,
            host="replay",
            environment=origin.environment,
        )
