"""Conversion of CSV files of past runs to a recorded table in a run folder of its own.

Each row is one run (or one step) with its time, its energy or power, and the knobs that it ran
with. What a column is, is read from its name and unit; where that leaves a doubt, one sentence asks
for the option that settles it, and what was read as what is always said. The report, the export and
`tuner dev replay` work on the folder as on any other run. Nothing was probed, so the search cost
nothing and no setting is measured again.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

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
from tuner.workload.table import TablePoint, load_table, read_csv
from tuner.workload.trace import TraceWriter

#: By kind of measurement: the unit that it is stored in, words that name a column of it, and what
#: one of each unit that the name may end with is in the stored one.
_KINDS: Mapping[str, tuple[str, set[str], dict[str, float]]] = {
    "time": (
        "s",
        {"time", "runtime", "duration", "elapsed", "walltime"},
        {"s": 1.0, "sec": 1.0, "secs": 1.0, "seconds": 1.0, "ms": 1e-3, "min": 60.0}
        | {"minutes": 60.0, "h": 3600.0, "hours": 3600.0},
    ),
    "energy": (
        "J",
        {"energy"},
        {"j": 1.0, "joule": 1.0, "joules": 1.0, "kj": 1e3, "mj": 1e6, "wh": 3.6e3, "kwh": 3.6e6},
    ),
    "power": ("W", {"power"}, {"w": 1.0, "watt": 1.0, "watts": 1.0, "kw": 1e3, "mw": 1e-3}),
}
#: Words of columns that describe a run and are no knob of it.
_NOT_KNOBS = {"id", "run", "name", "date", "timestamp", "host", "hostname", "user", "seed"}
_NOT_KNOBS |= {"loss", "accuracy", "throughput", "perplexity", "samples", "tokens", "file", "job"}
_NOT_KNOBS |= {"temperature", "utilization", "utilisation", "repeat", "index", "comment", "std"}

Row = Mapping[str, str]


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


@dataclass(frozen=True)
class Columns:
    """Meaning of each column: by kind of measurement its name and unit in s, J or W; the others."""

    measured: Mapping[str, tuple[str, float]]
    knobs: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """Sentence on what was read as what."""
        parts = [
            f"{kind} from {name!r} ({f'x {scale:g} ' * (scale != 1)}{_KINDS[kind][0]})"
            for kind, (name, scale) in self.measured.items()
        ]
        text = ", ".join([*parts, f"knobs from {', '.join(map(repr, self.knobs))}"])
        return text + f"; not read: {', '.join(map(repr, self.left_out))}" * bool(self.left_out)


def _words(column: str) -> list[str]:
    return [word for word in re.split(r"[^A-Za-z0-9]+", column.lower()) if word]


def _unit(column: str, kind: str) -> float | None:
    """Return the unit of a column in s, J or W by its name; None if it is another column."""
    words = _words(column)
    if not words:
        return None
    _, names, units = _KINDS[kind]
    named, last = bool(names & set(words)), words[-1]
    if len(words) > 1 and last in units:
        # "power_limit_W" is a knob; a unit of one letter alone ("batch_s") is no proof either.
        other = any(others & set(words) for k, (_, others, _) in _KINDS.items() if k != kind)
        proof = not other and last not in {"h", "min", "mj", "mw"}
        return units[last] if named or proof else None
    if last in units and len(last) > 3:  # "joules", "seconds", "watts"
        return units[last]
    return 1.0 if named and not _NOT_KNOBS & set(words) else None


def _is_setting(column: str) -> bool:
    """Return True for a limit or a cap, which is a setting and not a measurement."""
    return column in KNOBS or bool({"limit", "cap", "budget", "target"} & set(_words(column)))


def _column(
    kind: str, options: CsvOptions, header: Sequence[str], where: str
) -> tuple[str, float] | None:
    """Return the column of this kind: the one given, else the only one named like it."""
    given = getattr(options, f"{kind}_column")
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
    rows: Sequence[Row],
    options: CsvOptions | None = None,
    *,
    where: str = "the CSV",
) -> Columns:
    """Tell time, energy or power, and knobs apart by the columns' names and values.

    Raises:
        InputError: a column is ambiguous; one sentence with the option that tells it.
    """
    options = options or CsvOptions()
    found = {"time": _column("time", options, header, where)}
    if options.power_column is None:
        found["energy"] = _column("energy", options, header, where)
    if not found.get("energy"):
        found["power"] = _column("power", options, header, where)
    measured = {kind: column for kind, column in found.items() if column}
    for kinds in (("time",), ("energy", "power")):
        if not measured.keys() & set(kinds):
            raise InputError(
                f"which column of {where} is the {' or the '.join(kinds)}? it has "
                f"{', '.join(header)}; name one with "
                f"{' or '.join(f'--{kind}-column' for kind in kinds)}"
            )
    names = {name for name, _ in measured.values()}
    knobs = tuple(name.strip() for name in (options.knobs or "").split(",") if name.strip())
    for name in knobs:
        if name not in header:
            raise UnknownName(f"column of {where}", name, header)
    knobs = knobs or tuple(c for c in header if c not in names and _could_be_knob(c, rows))
    if not knobs:
        raise InputError(
            f"which columns of {where} are knobs? none that varies is left of "
            f"{', '.join(header)}; name them with --knobs"
        )
    if taken := names & set(knobs):
        raise InputError(f"the column {min(taken)!r} of {where} cannot be a knob and a measurement")
    return Columns(measured, knobs, tuple(c for c in header if c not in {*names, *knobs}))


def _could_be_knob(name: str, rows: Sequence[Row]) -> bool:
    """Varies, is no description of a run, and is not another number in every single row."""
    if name in KNOBS:
        return True
    if _NOT_KNOBS & set(_words(name)):
        return False
    if not _is_setting(name) and any(_unit(name, kind) is not None for kind in _KINDS):
        return False  # another measurement beside the one that was named
    values = [row[name] for row in rows]
    fractions = sum("." in value for value in values) > len(values) / 2
    return len(set(values)) > 1 and not (fractions and len(set(values)) == len(values) > 3)


def _read(paths: Sequence[Path]) -> tuple[list[str], list[Row]]:
    """Return the columns that all files share, and the rows of all."""
    header: list[str] = []
    rows: list[Row] = []
    for number, path in enumerate(paths):
        columns, mine = read_csv(path, ragged=True)
        if not mine:
            raise InputError(f"{path} has no rows; it must name its columns and hold past runs")
        header = [name for name in header if name in columns] if number else columns
        rows += [row for _, row in mine]
    if not header:
        raise InputError(f"{', '.join(map(str, paths))} have no column in common")
    return header, rows


def _write_table(
    folder: Path, name: str, columns: Columns, rows: Sequence[Row], options: CsvOptions
) -> tuple[TablePoint, ...]:
    """Write the rows as a recorded table in s and J or W, and return its points as read back."""
    make_folder(folder, inside=folder.parent)
    figures = {f"{kind}_{_KINDS[kind][0]}": column for kind, column in columns.measured.items()}
    if clash := figures.keys() & set(columns.knobs):
        raise InputError(f"a knob cannot be called {min(clash)!r}; rename that column")

    def scaled(text: str, unit: float) -> str:
        try:
            return repr(float(text) * unit)
        except ValueError:
            return text  # the table's reader says which line it is

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns.knobs, *figures])
    for row in rows:
        measured = [scaled(row[column], unit) for column, unit in figures.values()]
        writer.writerow([*(row[k] for k in columns.knobs), *measured])
    write_text(folder / "table.csv", text.getvalue())
    live = [k for k in columns.knobs if k in KNOBS and KNOBS[k].kind == "live"]
    layout = {
        "name": name,
        "launch_knobs": [k for k in columns.knobs if k not in live],
        "live_knobs": live,
        **{key: key for key in figures},
        "energy_scope": options.energy_scope,
        "estimated": options.estimated,
        "unit_of_work": "row",
    }
    write_text(folder / "table.toml", write_toml(layout))
    return load_table(folder).group().points


def _record(
    number: int, point: TablePoint, meter: MeterInfo, baseline: Configuration | None
) -> ProbeRecord:
    """Return the record of one configuration, as of a probe that cost nothing."""
    c = point.configuration
    windows = [
        Measurement(live=c.live, steps=1, window_s=t, step_time_s=t, energy_J=t * w, power_W=w)
        for t, w in point.repeats or ((point.time_s, point.power_W),)
    ]
    purpose = "baseline" if c == baseline else "search"
    request = ProbeRequest(f"p{number:04d}", c.launch, (c.live,), purpose=purpose)
    return ProbeRecord(request, tuple(windows), meter, host="past runs")


def _baseline(words: Sequence[str], points: Sequence[TablePoint]) -> Configuration | None:
    """Return the one configuration that has these KNOB=VALUE."""
    if not words:
        return None
    pairs = []
    for word in words:
        name, equals, value = word.partition("=")
        short = None if equals else word_knob(word)
        if not equals and short is None:
            raise InputError(f"--today takes KNOB=VALUE, not {word!r}")
        pairs.append((name, value) if short is None else (short[0], str(short[1])))
    found = [
        p.configuration
        for p in points
        if all(str(p.configuration.get(name)) == value for name, value in pairs)
    ]
    if len(found) != 1:
        raise InputError(
            f"{len(found)} configurations of the past runs have {' '.join(words)}; "
            "--today must name exactly one"
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
    """Make a run folder of past runs; return it and a sentence on what was read as what.

    The arguments are those of `tuner.api.front_of_csv`.

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
    points = _write_table(run.path / "table", stem, columns, rows, options)
    scope: Any = options.energy_scope
    meter = MeterInfo("table", scope, f"past runs in {where}", estimated=options.estimated)
    today = _baseline(baseline, points)
    read = f"{len(rows)} rows of {where}: {columns.sentence}; energy charged to: {scope}"
    stop = StopReason("past_runs")
    run.write_study(
        plain(
            {
                "schema": STUDY_SCHEMA,
                "name": run.name,
                "created": datetime.now().isoformat(timespec="seconds"),
                "constraints": constraints.given,
                "settings": {"seed": 0},
                "recorded": {
                    "table": stem,
                    "path": str((run.path / "table").resolve()),
                    "files": [str(path.resolve()) for path in files],
                    "read": read,
                    "steps": options.steps,
                    "unit_of_work": "row",
                },
                "space": {"name": "past runs", "configurations": len(points)},
                "ended": {
                    "stopped": stop_sentence(stop),
                    "stop_reason": stop.to_json(),
                    "time_s": 0.0,
                },
            }
        )
    )
    with closing(TraceWriter(run.trace)) as trace:
        for number, point in enumerate(points):
            trace.append(_record(number, point, meter, today))
    return run, f"Read {read}."
