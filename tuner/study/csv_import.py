"""Conversion of CSV files of past runs to a recorded table in a run folder of its own.

Each row is one run (or one step) with its time, its energy or power, and the knobs that it ran
with. The user names these columns; a unit other than s, J or W is read from the end of a column's
name, and what was read as what is always said. The report, the export and `tuner dev replay` work
on the folder as on any other run.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from tuner.problem.configuration_names import same_value
from tuner.problem.run_folder import RunFolder, new_name
from tuner.search_spaces.data_files import write_toml
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.knobs import KNOBS, parse_words
from tuner.search_spaces.options import check_options, option
from tuner.search_spaces.safe_files import make_folder, write_text
from tuner.workload.probe import Measurement, MeterInfo, ProbeRecord, ProbeRequest
from tuner.workload.table import TablePoint, load_table, read_csv
from tuner.workload.trace import TraceWriter

#: By column of the table that is written: the units that a column's name may end with, in its own.
_UNITS: Mapping[str, Mapping[str, float]] = {
    "time_s": {"ms": 1e-3, "min": 60.0, "h": 3600.0, "hours": 3600.0},
    "energy_J": {"kj": 1e3, "mj": 1e6, "wh": 3.6e3, "kwh": 3.6e6},
    "power_W": {"kw": 1e3},
}


@dataclass(frozen=True)
class CsvOptions:
    """Meaning of the columns of CSV files, as the user gives it."""

    time_column: str | None = option(None, "column of the time, in s or the unit in its name")
    energy_column: str | None = option(None, "column of the energy, in J or the unit in its name")
    power_column: str | None = option(
        None, "column of the average power, in W or the unit in its name, instead of the energy"
    )
    knobs: str | None = option(None, "columns of the configuration", metavar="A,B")
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
    def measured(self) -> dict[str, str]:
        """The given column of each figure, by the name that it has in a table."""
        given = zip(_UNITS, (self.time_column, self.energy_column, self.power_column), strict=True)
        return {figure: column for figure, column in given if column}

    @property
    def knob_columns(self) -> list[str]:
        """The given columns of the configuration."""
        return [name.strip() for name in (self.knobs or "").split(",") if name.strip()]


def _scale(figure: str, column: str) -> float:
    unit = re.split(r"[^a-z0-9]+", column.lower().rstrip(")]"))[-1]
    return _UNITS[figure].get(unit, 1.0)


def _rows(paths: Sequence[Path], options: CsvOptions) -> list[Mapping[str, str]]:
    rows: list[Mapping[str, str]] = []
    measured, knobs = options.measured, options.knob_columns
    for path in paths:
        header, mine = read_csv(path)
        if not mine:
            raise InputError(f"{path} has no rows; it must name its columns and hold past runs")
        if "time_s" not in measured or len(measured) != 2 or not knobs:
            raise InputError(
                f"name the columns of {path} with --time-column, --knobs, and either "
                f"--energy-column or --power-column; it has {', '.join(header)}"
            )
        for name in (*measured.values(), *knobs):
            if name not in header:
                raise UnknownName(f"column of {path}", name, header)
        rows += [row for _, row in mine]
    if taken := {*measured, *measured.values()} & set(knobs):
        raise InputError(f"a knob cannot be the column {min(taken)!r}, which a measurement has")
    return rows


def _write_table(
    folder: Path, name: str, rows: Sequence[Mapping[str, str]], options: CsvOptions
) -> None:
    measured, knobs = options.measured, options.knob_columns
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*knobs, *measured])
    for row in rows:
        figures = [_scaled(row[column], _scale(name, column)) for name, column in measured.items()]
        writer.writerow([*(row[knob] for knob in knobs), *figures])
    live = [knob for knob in knobs if knob in KNOBS and KNOBS[knob].kind == "live"]
    layout = {
        "name": name,
        "launch_knobs": [knob for knob in knobs if knob not in live],
        "live_knobs": live,
        **{figure: figure for figure in measured},
        "energy_scope": options.energy_scope,
        "estimated": options.estimated,
        "unit_of_work": "row",
    }
    make_folder(folder, inside=folder.parent)
    write_text(folder / "table.csv", text.getvalue())
    write_text(folder / "table.toml", write_toml(layout))


def _scaled(text: str, unit: float) -> str:
    try:
        return repr(float(text) * unit)
    except ValueError:
        return text  # the table's reader says which line it is


def _record(number: int, point: TablePoint, meter: MeterInfo, purpose: str) -> ProbeRecord:
    c = point.configuration
    windows = [
        Measurement(live=c.live, steps=1, window_s=t, step_time_s=t, energy_J=t * w, power_W=w)
        for t, w in point.repeats or ((point.time_s, point.power_W),)
    ]
    request = ProbeRequest(f"p{number:04d}", c.launch, (c.live,), purpose=purpose)
    return ProbeRecord(request, tuple(windows), meter, host="past runs")


def import_runs(
    paths: Sequence[str | Path],
    options: CsvOptions,
    baseline: Sequence[str],
    name: str | None,
    runs_dir: str | Path,
) -> tuple[RunFolder, str]:
    """Make a run folder of past runs; return it and a sentence on what was read as what.

    Arguments and errors are those of `tuner.api.front_of_csv`.
    """
    from tuner.problem.from_recording import table_problem
    from tuner.problem.settings import SearchSettings
    from tuner.problem.stop_reason import StopReason
    from tuner.problem.study_spec import SessionEnd, StudySpec

    files, today = [Path(path) for path in paths], parse_words(" ".join(baseline), standard=False)
    rows, stem = _rows(files, options), files[0].stem
    run = RunFolder.named(runs_dir, name or new_name(stem, runs_dir))
    if run.study_file.exists():
        raise InputError(f"the run {run.name!r} exists already; give another name")
    _write_table(run.path / "table", stem, rows, options)
    problem, runner = table_problem(run.path / "table", None, options.steps)
    # Runs vary, though a table of one row each does not tell how much.
    assert problem.recording is not None
    recording = replace(problem.recording, varies=True)
    spec = StudySpec(
        name=run.name,
        run_dir=run.path,
        problem=replace(
            problem,
            identity={"recorded": recording.to_json(), "space": problem.identity["space"]},
            recording=recording,
        ),
        settings=SearchSettings(verify=False),
        created=datetime.now().isoformat(timespec="seconds"),
        ended=SessionEnd(StopReason("past_runs"), time_s=0.0),
    )
    in_use = [c for c in problem.candidates if all(same_value(c.get(n), today[n]) for n in today)]
    if today and len(in_use) != 1:
        raise InputError(
            f"{len(in_use)} configurations of the past runs have {' '.join(baseline)}; "
            "--today must name exactly one"
        )
    run.write_study(spec.to_toml())
    with closing(TraceWriter(run.trace)) as trace:
        for number, point in enumerate(load_table(run.path / "table").group().points):
            purpose = "baseline" if today and point.configuration in in_use else "search"
            trace.append(_record(number, point, runner.meter, purpose))
    read = [f"{f} is {c!r} x {_scale(f, c):g}" for f, c in options.measured.items()]
    where = ", ".join(map(str, files))
    return run, f"Read {len(rows)} rows of {where}: {', '.join(read)}."
