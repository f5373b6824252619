"""Conversion of CSV files of past runs to a recorded table in a run folder of its own.

Each row is one run (or one step) with its time, its energy or power, and the knobs that it ran
with. What a column is, is read from its name and unit; where that leaves a doubt, one sentence asks
for the option that settles it, and what was read as what is always said. The report, the export and
`tuner dev replay` work on the folder as on any other run.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from tuner.problem.configuration_names import same_value
from tuner.problem.constraints import Constraints
from tuner.problem.run_folder import RunFolder, new_name
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.data_files import write_toml
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.knobs import KNOBS, parse_words
from tuner.search_spaces.options import check_options, option
from tuner.search_spaces.safe_files import make_folder, write_text
from tuner.workload.probe import Measurement, MeterInfo, ProbeRecord, ProbeRequest
from tuner.workload.table import TablePoint, load_table, read_csv
from tuner.workload.trace import TraceWriter

#: By kind of measurement: the unit that it is stored in, words that name a column of it, and what
#: one of each unit that the name may end with is in the stored one.
_KINDS: Mapping[str, tuple[str, set[str], dict[str, float]]] = {
    "time": (
        "s",
        {"time", "runtime", "duration", "seconds", "hours"},
        {"s": 1.0, "seconds": 1.0, "ms": 1e-3, "min": 60.0, "h": 3600.0, "hours": 3600.0},
    ),
    "energy": (
        "J",
        {"energy", "joules"},
        {"j": 1.0, "joules": 1.0, "kj": 1e3, "mj": 1e6, "wh": 3.6e3, "kwh": 3.6e6},
    ),
    "power": ("W", {"power", "watts"}, {"w": 1.0, "watts": 1.0, "kw": 1e3}),
}
#: Words of columns that describe a run and are no knob of it, and of settings that are in watts.
_NOT_KNOBS = {"id", "run", "name", "date", "timestamp", "host", "user", "seed", "loss", "accuracy"}
_NOT_KNOBS |= {"throughput", "tokens", "temperature", "utilization", "comment"}
_SETTINGS = {"limit", "cap", "budget", "target"}

Row = Mapping[str, str]


@dataclass(frozen=True)
class CsvOptions:
    """Meaning of the columns of CSV files, as the user gives it."""

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
        None, "columns of the configuration (default: the others that vary)", metavar="A,B"
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


class Columns(NamedTuple):
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
    return re.findall(r"[a-z0-9]+", column.lower())


def _measures(column: str, kind: str) -> bool:
    words = _words(column)
    setting = column in KNOBS or not _SETTINGS.isdisjoint(words)
    return not setting and not _KINDS[kind][1].isdisjoint(words)


def read_columns(
    header: Sequence[str], rows: Sequence[Row], options: CsvOptions, *, where: str = "the CSV"
) -> Columns:
    """Tell time, energy or power, and knobs apart by the columns' names and values.

    Raises:
        InputError: a column is ambiguous; one sentence with the option that tells it.
    """
    given = {kind: getattr(options, f"{kind}_column") for kind in _KINDS}
    knobs = tuple(name.strip() for name in (options.knobs or "").split(",") if name.strip())
    for name in (*filter(None, given.values()), *knobs):
        if name not in header:
            raise UnknownName(f"column of {where}", name, header)
    measured: dict[str, tuple[str, float]] = {}
    for kinds in (("time",), ("power",) if given["power"] else ("energy", "power")):
        found = {
            k: [given[k]] if given[k] else [c for c in header if _measures(c, k)] for k in kinds
        }
        kind = next((kind for kind in kinds if found[kind]), "")
        if not kind:
            raise InputError(
                f"which column of {where} is the {' or the '.join(kinds)}? it has "
                f"{', '.join(header)}; name one with "
                f"{' or '.join(f'--{kind}-column' for kind in kinds)}"
            )
        name, *more = found[kind]
        if more:
            raise InputError(
                f"{where} has {len(found[kind])} columns of {kind} "
                f"({', '.join(map(repr, found[kind]))}); name the one to use with --{kind}-column"
            )
        measured[kind] = name, _KINDS[kind][2].get((_words(name) or [""])[-1], 1.0)
    names = {name for name, _ in measured.values()}
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
    if any(_measures(name, kind) for kind in _KINDS) or not _NOT_KNOBS.isdisjoint(_words(name)):
        return False
    return name in KNOBS or len({row[name] for row in rows}) > 1


def _read(paths: Sequence[Path]) -> tuple[list[str], list[Row]]:
    headers, rows = [], list[Row]()
    for path in paths:
        columns, mine = read_csv(path, ragged=True)
        if not mine:
            raise InputError(f"{path} has no rows; it must name its columns and hold past runs")
        headers.append(columns)
        rows += [row for _, row in mine]
    header = [name for name in headers[0] if all(name in columns for columns in headers)]
    if not header:
        raise InputError(f"{', '.join(map(str, paths))} have no column in common")
    return header, rows


def _write_table(
    folder: Path, name: str, columns: Columns, rows: Sequence[Row], options: CsvOptions
) -> tuple[TablePoint, ...]:
    figures = {f"{kind}_{_KINDS[kind][0]}": column for kind, column in columns.measured.items()}
    if clash := figures.keys() & set(columns.knobs):
        raise InputError(f"a knob cannot be called {min(clash)!r}; rename that column")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns.knobs, *figures])
    for row in rows:
        measured = [_scaled(row[column], unit) for column, unit in figures.values()]
        writer.writerow([*(row[k] for k in columns.knobs), *measured])
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
    make_folder(folder, inside=folder.parent)
    write_text(folder / "table.csv", text.getvalue())
    write_text(folder / "table.toml", write_toml(layout))
    return load_table(folder).group().points


def _scaled(text: str, unit: float) -> str:
    try:
        return repr(float(text) * unit)
    except ValueError:
        return text  # the table's reader says which line it is


def _record(
    number: int, point: TablePoint, meter: MeterInfo, baseline: Configuration | None
) -> ProbeRecord:
    c = point.configuration
    windows = [
        Measurement(live=c.live, steps=1, window_s=t, step_time_s=t, energy_J=t * w, power_W=w)
        for t, w in point.repeats or ((point.time_s, point.power_W),)
    ]
    purpose = "baseline" if c == baseline else "search"
    request = ProbeRequest(f"p{number:04d}", c.launch, (c.live,), purpose=purpose)
    return ProbeRecord(request, tuple(windows), meter, host="past runs")


def _baseline(words: Sequence[str], candidates: Iterable[Configuration]) -> Configuration | None:
    given = parse_words(" ".join(words), standard=False)
    found = [c for c in candidates if all(same_value(c.get(n), v) for n, v in given.items())]
    if words and len(found) != 1:
        raise InputError(
            f"{len(found)} configurations of the past runs have {' '.join(words)}; "
            "--today must name exactly one"
        )
    return found[0] if words else None


def import_runs(
    paths: Sequence[str | Path],
    options: CsvOptions,
    constraints: Constraints,
    baseline: Sequence[str],
    name: str | None,
    runs_dir: str | Path,
) -> tuple[RunFolder, str]:
    """Make a run folder of past runs; return it and a sentence on what was read as what.

    Arguments and errors are those of `tuner.api.front_of_csv`.
    """
    from tuner.problem.problem import Problem, space_section
    from tuner.problem.settings import SearchSettings
    from tuner.problem.stop_reason import StopReason
    from tuner.problem.study_spec import SessionEnd, StudySpec
    from tuner.search_spaces.candidates import Candidates

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
    candidates = Candidates.from_configurations(point.configuration for point in points)
    today = _baseline(baseline, candidates)
    read = f"{len(rows)} rows of {where}: {columns.sentence}; energy charged to: {scope}"
    recorded = {
        "table": stem,
        "path": str((run.path / "table").resolve()),
        "files": [str(path.resolve()) for path in files],
        "read": read,
        "steps": options.steps,
        "unit_of_work": "row",
    }
    identity = {"recorded": recorded, "space": space_section("past runs", candidates)}
    spec = StudySpec(
        name=run.name,
        run_dir=run.path,
        problem=Problem(stem, candidates, options.steps, None, identity),
        constraints=constraints,
        settings=SearchSettings(verify=False),
        created=datetime.now().isoformat(timespec="seconds"),
        ended=SessionEnd(StopReason("past_runs"), time_s=0.0),
    )
    run.write_study(spec.to_toml())
    with closing(TraceWriter(run.trace)) as trace:
        for number, point in enumerate(points):
            trace.append(_record(number, point, meter, today))
    return run, f"Read {read}."
