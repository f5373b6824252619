"""A front from nothing but CSV files of past runs.

Each row is one run (or one step) with its time, its energy or power, and the knobs that it ran
with. What a column is, is read from its name and unit; where that leaves a doubt, one sentence asks
for the option that settles it, and what was read as what is always said. The rows become a recorded
table in a run folder of their own, so the report, the export and `tuner replay` work on it as on
any other run. Nothing was probed, so the search cost nothing and no setting is measured again.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tuner.problem.constraints import Constraints
from tuner.problem.run_folder import STUDY_SCHEMA, RunFolder, new_name, plain, write_toml
from tuner.problem.stop_reason import StopReason, stop_sentence
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.options import check_options, option
from tuner.search_spaces.safe_files import make_folder, write_text
from tuner.search_spaces.short_names import word_knob
from tuner.workload.probe import Measurement, MeterInfo, ProbeRecord, ProbeRequest
from tuner.workload.table import RecordedTable, TablePoint, load_table
from tuner.workload.trace import TraceWriter

__all__ = ["Columns", "import_runs", "read_columns"]

#: Units that a column's name may end with, and what one of them is in s, J or W.
_UNITS = {
    "time": {"s": 1.0, "sec": 1.0, "secs": 1.0, "seconds": 1.0, "ms": 1e-3, "min": 60.0}
    | {"minutes": 60.0, "h": 3600.0, "hours": 3600.0},
    "energy": {"j": 1.0, "joule": 1.0, "joules": 1.0, "kj": 1e3, "mj": 1e6}
    | {"wh": 3.6e3, "kwh": 3.6e6},
    "power": {"w": 1.0, "watt": 1.0, "watts": 1.0, "kw": 1e3, "mw": 1e-3},
}
#: Words that say what a column is when it names no unit: then it is in s, J or W.
_WORDS = {
    "time": {"time", "runtime", "duration", "elapsed", "walltime"},
    "energy": {"energy"},
    "power": {"power"},
}
#: Words of columns that describe a run and are no knob of it.
_NOT_KNOBS = {"id", "run", "name", "date", "timestamp", "host", "hostname", "user", "seed"}
_NOT_KNOBS |= {"loss", "accuracy", "throughput", "perplexity", "samples", "tokens", "file", "job"}
_NOT_KNOBS |= {"temperature", "utilization", "utilisation", "repeat", "index", "comment", "std"}


@dataclass(frozen=True)
class CsvOptions:
    """Meaning of the columns of CSV files, as the user gives it.

    Raises:
        InvalidValue: a value has another type or lies outside its limits.
        UnknownName: there is no such scope.
    """

    time_column: str | None = option(
        None, "column of the time, in s or the unit in its name (default: found by its name)"
    )
    energy_column: str | None = option(
        None, "column of the energy, in J or the unit in its name (default: found by its name)"
    )
    power_column: str | None = option(
        None, "column of the average power, in W or the unit in its name, instead of the energy"
    )
    knobs: str | None = option(
        None,
        "columns of the configuration (default: the others that vary)",
        metavar="A,B",
    )
    energy_scope: str = option(
        "gpu",
        "what the energy is charged to: gpu, module or node",
        choices=("gpu", "module", "node"),
    )
    estimated: bool = option(False, "the energy is an estimate, not metered")
    steps: int = option(1, "rows of work that make the solution", least=1)

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def knob_columns(self) -> tuple[str, ...]:
        """The columns named in `knobs`."""
        return tuple(name.strip() for name in (self.knobs or "").split(",") if name.strip())


@dataclass(frozen=True)
class Columns:
    """Meaning of each column.

    Attributes:
        time: its name and the seconds in one unit of it.
        energy: its name and the joules in one unit of it; None where power is given instead.
        power: its name and the watts in one unit of it; None where energy is given.
        knobs: the columns that say how a run was configured.
        left_out: the columns that nothing is made of.
    """

    time: tuple[str, float]
    energy: tuple[str, float] | None
    power: tuple[str, float] | None
    knobs: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """Sentence on what was read as what."""

        def one(kind: str, column: tuple[str, float] | None, unit: str) -> str:
            if column is None:
                return ""
            scale = f" (x {column[1]:g} {unit})" if column[1] != 1 else f" ({unit})"
            return f"{kind} from {column[0]!r}{scale}"

        parts = [
            one("time", self.time, "s"),
            one("energy", self.energy, "J"),
            one("power", self.power, "W"),
            f"knobs from {', '.join(map(repr, self.knobs))}",
        ]
        text = ", ".join(part for part in parts if part)
        out = f"; not read: {', '.join(map(repr, self.left_out))}" if self.left_out else ""
        return f"{text}{out}"


def _words(column: str) -> list[str]:
    return [word for word in re.split(r"[^A-Za-z0-9]+", column.lower()) if word]


def _unit(column: str, kind: str) -> float | None:
    """Return the unit of a column in s, J or W by its name; None if it is another column."""
    words = _words(column)
    if not words:
        return None
    units, named = _UNITS[kind], bool(_WORDS[kind] & set(words))
    if len(words) > 1 and words[-1] in units:
        # "power_limit_W" is a knob; a unit of one letter alone ("batch_s") is no proof either.
        other = any(_WORDS[k] & set(words) for k in _WORDS if k != kind)
        if named or (not other and words[-1] not in {"h", "min", "mj", "mw"}):
            return units[words[-1]]
        return None
    if words[-1] in units and len(words[-1]) > 3:  # "joules", "seconds", "watts"
        return units[words[-1]]
    return 1.0 if named and not _NOT_KNOBS & set(words) else None


def _is_setting(column: str) -> bool:
    """Return True for a limit or a cap, which is a setting and not a measurement."""
    return column in KNOBS or bool({"limit", "cap", "budget", "target"} & set(_words(column)))


def _column(
    kind: str, given: str | None, header: Sequence[str], where: str
) -> tuple[str, float] | None:
    """Return the column of this kind: the one given, else the only one named like it."""
    if given is not None:
        if given not in header:
            raise UnknownName(f"column of {where}", given, header)
        return given, _unit(given, kind) or 1.0
    found = [(c, u) for c in header if not _is_setting(c) and (u := _unit(c, kind)) is not None]
    if len(found) > 1:
        names = ", ".join(repr(column) for column, _ in found)
        raise InputError(
            f"{where} has {len(found)} columns of {kind} ({names}); "
            f"name the one to use with --{kind}-column"
        )
    return found[0] if found else None


def read_columns(
    header: Sequence[str],
    rows: Sequence[dict[str, str]],
    options: CsvOptions | None = None,
    *,
    where: str = "the CSV",
) -> Columns:
    """Tell time, energy or power, and knobs apart by the columns' names and values.

    Args:
        header: the columns.
        rows: column -> text, one dict per row.
        options: columns named by the user; these win.
        where: the file, for errors.

    Raises:
        InputError: a column is ambiguous; one sentence with the option that tells it.
    """
    options = options or CsvOptions()
    knobs = options.knob_columns
    time = _column("time", options.time_column, header, where)
    if time is None:
        raise InputError(
            f"which column of {where} is the time? it has {', '.join(header)}; "
            "name one with --time-column"
        )
    energy = power = None
    if options.power_column is None:
        energy = _column("energy", options.energy_column, header, where)
    if energy is None:
        power = _column("power", options.power_column, header, where)
    if energy is None and power is None:
        raise InputError(
            f"which column of {where} is the energy or the power? it has {', '.join(header)}; "
            "name one with --energy-column or --power-column"
        )
    for name in knobs:
        if name not in header:
            raise UnknownName(f"column of {where}", name, header)
    measured = {column[0] for column in (time, energy, power) if column}
    chosen = knobs or tuple(
        name for name in header if name not in measured and _could_be_knob(name, rows)
    )
    if not chosen:
        raise InputError(
            f"which columns of {where} are knobs? none that varies is left of "
            f"{', '.join(header)}; name them with --knobs"
        )
    if taken := measured & set(chosen):
        raise InputError(f"the column {min(taken)!r} of {where} cannot be a knob and a measurement")
    rest = tuple(name for name in header if name not in measured and name not in chosen)
    return Columns(time, energy, power, chosen, rest)


def _could_be_knob(name: str, rows: Sequence[dict[str, str]]) -> bool:
    """Varies, is no description of a run, and is not another number in every single row."""
    if name in KNOBS:
        return True
    if _NOT_KNOBS & set(_words(name)):
        return False
    if not _is_setting(name) and any(_unit(name, kind) is not None for kind in _UNITS):
        return False  # another measurement beside the one that was named
    values = [row[name] for row in rows]
    fractions = sum("." in value for value in values) > len(values) / 2
    return len(set(values)) > 1 and not (fractions and len(set(values)) == len(values) > 3)


def _read(paths: Sequence[Path]) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns that all files share, and the rows of all."""
    header: list[str] = []
    rows: list[dict[str, str]] = []
    for path in paths:
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file, strict=True, restkey="", restval="")
                mine = [dict(row) for row in reader]
                columns = [name.strip() for name in reader.fieldnames or []]
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        except (UnicodeDecodeError, csv.Error) as error:
            raise InputError(f"{path} is not a CSV table: {error}") from error
        if not columns or not mine:
            raise InputError(f"{path} has no rows; it must name its columns and hold past runs")
        if len(set(columns)) != len(columns):
            raise InputError(f"{path} names a column twice in its first line")
        header = [name for name in header if name in columns] if header else columns
        rows += [{str(k).strip(): (v or "").strip() for k, v in row.items()} for row in mine]
    if not header:
        raise InputError(f"{', '.join(map(str, paths))} have no column in common")
    return header, rows


def _write_table(
    folder: Path, name: str, columns: Columns, rows: Sequence[dict[str, str]], more: dict
) -> RecordedTable:
    """Write the rows as a recorded table in s and J or W, and return it as read back."""
    make_folder(folder, inside=folder.parent)
    second = ("energy_J", columns.energy) if columns.energy else ("power_W", columns.power)
    assert second[1] is not None
    live = [k for k in columns.knobs if k in KNOBS and KNOBS[k].kind == "live"]
    measured = (("time_s", columns.time), (second[0], second[1]))
    clash = {key for key, _ in measured} & set(columns.knobs)
    if clash:
        raise InputError(f"a knob cannot be called {min(clash)!r}; rename that column")

    def scaled(text: str, unit: float) -> str:
        try:
            return repr(float(text) * unit)
        except ValueError:
            return text  # the table's reader says which line it is

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns.knobs, *(key for key, _ in measured)])
    for row in rows:
        figures = [scaled(row[column], unit) for _, (column, unit) in measured]
        writer.writerow([*(row[k] for k in columns.knobs), *figures])
    write_text(folder / "table.csv", text.getvalue())
    layout = {
        "name": name,
        "launch_knobs": [k for k in columns.knobs if k not in live],
        "live_knobs": live,
        **{key: key for key, _ in measured},
        **more,
    }
    write_text(folder / "table.toml", write_toml(layout))
    return load_table(folder)


def _records(
    points: Sequence[TablePoint], meter: MeterInfo, baseline: Configuration | None
) -> list[ProbeRecord]:
    """Return one record per configuration, as of a probe that cost nothing."""
    records = []
    for number, point in enumerate(points):
        c = point.configuration
        windows = [
            Measurement(live=c.live, steps=1, window_s=t, step_time_s=t, energy_J=t * w, power_W=w)
            for t, w in point.repeats or ((point.time_s, point.power_W),)
        ]
        purpose = "baseline" if c == baseline else "search"
        request = ProbeRequest(f"p{number:04d}", c.launch, (c.live,), purpose=purpose)
        records.append(ProbeRecord(request, tuple(windows), meter, host="past runs"))
    return records


def _baseline(words: Sequence[str], points: Sequence[TablePoint]) -> Configuration | None:
    """Return the one configuration that has these KNOB=VALUE."""
    if not words:
        return None
    pairs = []
    for word in words:
        name, equals, value = word.partition("=")
        short = None if equals else word_knob(word)
        if not equals and short is None:
            raise InputError(f"--baseline takes KNOB=VALUE, not {word!r}")
        pairs.append((name, value) if short is None else (short[0], str(short[1])))
    found = [
        p.configuration
        for p in points
        if all(str(p.configuration.get(name)) == value for name, value in pairs)
    ]
    if len(found) != 1:
        raise InputError(
            f"{len(found)} configurations of the past runs have {' '.join(words)}; "
            "--baseline must name exactly one"
        )
    return found[0]


def import_runs(
    paths: Sequence[str | Path],
    options: CsvOptions | None = None,
    *,
    constraints: Constraints | None = None,
    baseline: Sequence[str] = (),
    name: str | None = None,
    runs_dir: str | Path = "runs",
) -> tuple[RunFolder, str]:
    """Make a run folder of past runs.

    Args:
        paths: CSV files; columns that all of them have are read.
        options: meaning of the columns.
        constraints: limits that choose on the front.
        baseline: KNOB=VALUE of the configuration in use today, if there is one.
        name: name of the run folder.
        runs_dir: folder of the run folders.

    Returns:
        The run folder, and a sentence on what was read as what.

    Raises:
        InputError: a file cannot be read, or its columns are ambiguous; one sentence.
    """
    options, constraints = options or CsvOptions(), constraints or Constraints()
    files = [Path(path) for path in paths]
    header, rows = _read(files)
    where = str(files[0]) if len(files) == 1 else f"the {len(files)} files"
    columns = read_columns(header, rows, options, where=where)
    stem = files[0].stem
    run = RunFolder.named(runs_dir, name or new_name(stem, runs_dir))
    if run.study_file.exists():
        raise InputError(f"the run {run.name!r} exists already; give another name")
    more = {
        "energy_scope": options.energy_scope,
        "estimated": options.estimated,
        "unit_of_work": "row",
    }
    table = _write_table(run.path / "table", stem, columns, rows, more)
    points = table.group().points
    meter = MeterInfo("table", table.scope, f"past runs in {where}", estimated=options.estimated)
    records = _records(points, meter, _baseline(baseline, points))
    read = f"{len(rows)} rows of {where}: {columns.sentence}; "
    read += f"energy charged to: {options.energy_scope}"
    identity = {
        "recorded": {
            "table": stem,
            "path": str((run.path / "table").resolve()),
            "files": [str(path.resolve()) for path in files],
            "read": read,
            "steps": options.steps,
            "unit_of_work": "row",
        },
        "space": {"name": "past runs", "configurations": len(points)},
    }
    stop = StopReason("past_runs")
    ended = {"stopped": stop_sentence(stop), "stop_reason": stop.to_json(), "time_s": 0.0}
    run.write_study(
        plain(
            {
                "schema": STUDY_SCHEMA,
                "name": run.name,
                "created": datetime.now().isoformat(timespec="seconds"),
                "constraints": constraints.given,
                "settings": {"seed": 0},
                **identity,
                "ended": ended,
            }
        )
    )
    with closing(TraceWriter(run.trace)) as trace:
        for record in records:
            trace.append(record)
    return run, f"Read {read}."
