"""Conversion of CSV files of past runs to a recorded table in a run folder of its own.

Each row is one run (or one step) with its time, its energy or power, and the knobs that it ran
with. The user names these columns; a unit other than s, J or W is read from a cell or from the end
of a column's name. What was read as what, and which rows are left out, is always said. The report,
the export and `tuner replay` work on the folder as on any other run.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.answer.configuration_names import same_value
from tuner.problem.run_folder import RunFolder, new_name
from tuner.recordings.csv_files import (
    UNITS,
    CsvFile,
    Value,
    has_unit,
    left_out_sentence,
    no_measurement,
    read_csv,
    scale_of,
)
from tuner.recordings.table import TablePoint, load_table, positive
from tuner.search_spaces.data_files import write_toml
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.fields import Checked, option
from tuner.search_spaces.knobs import KNOBS, parse_words
from tuner.search_spaces.safe_files import make_folder, write_text
from tuner.workload.records.probe import Measurement, MeterInfo, ProbeRecord, ProbeRequest
from tuner.workload.records.trace import TraceWriter

if TYPE_CHECKING:
    from tuner.result import Result


@dataclass(frozen=True)
class Export:
    """Facts about the CSV files of one program that their columns do not state."""

    marks: frozenset[str]
    units: Mapping[str, str]
    #: Columns that name a run, of whose rows each holds the totals so far: the last one counts.
    running_totals_of: tuple[str, ...] = ()


#: Recognized by columns that only these programs write. CodeCarbon: docs.codecarbon.io, "Output".
EXPORTS = (
    Export(
        frozenset({"energy_consumed", "emissions_rate"}),
        dict.fromkeys(("energy_consumed", "cpu_energy", "gpu_energy", "ram_energy"), "kWh"),
        ("run_id", "task_name"),
    ),
)


@dataclass(frozen=True)
class CsvOptions(Checked):
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

    @property
    def measured(self) -> dict[str, str]:
        """The given column of each figure, by the name that it has in a table."""
        given = zip(UNITS, (self.time_column, self.energy_column, self.power_column), strict=True)
        return {figure: column for figure, column in given if column}

    @property
    def knob_columns(self) -> list[str]:
        """The given columns of the configuration."""
        return [name.strip() for name in (self.knobs or "").split(",") if name.strip()]


@dataclass(frozen=True)
class PastRun:
    """Row of a file: the settings that a run had, and its figures in s, J or W."""

    settings: Mapping[str, Value]
    figures: Mapping[str, float]


class _Reader:
    """Reader of files of past runs."""

    def __init__(self, options: CsvOptions) -> None:
        self.measured, self.knobs = options.measured, options.knob_columns
        self.runs: list[PastRun] = []
        self.read: dict[str, str] = {}
        self.left_out: list[str] = []

    def add(self, path: Path) -> None:
        """Read the rows of a file; InputError with its line where one cannot be read."""
        file = read_csv(path)
        self._check(file)
        cells = file.cells(self.measured.values())
        settings = file.settings(self.knobs, cells)
        export = next((e for e in EXPORTS if e.marks <= set(file.header)), None)
        scales = {figure: _scale(figure, c, export) for figure, c in self.measured.items()}
        left_out = []
        later = _later_totals(file, export)
        for row in file.rows:
            why = file.why_left_out(row, self.measured.values(), self.knobs)
            if row.line in later:
                why = f"a later row, line {later[row.line]}, has the totals of this run"
            if why:
                left_out.append(f"line {row.line} of {path} ({why})")
                continue
            figures = {}
            for figure, column in self.measured.items():
                where, text = file.where(row), row.cells[column]
                number = cells.figure(text, column, where, figure=figure, scale=scales[figure])
                figures[figure] = positive(number, text, column, where)
            values = {
                k: by_line[row.line] for k, by_line in settings.items() if row.line in by_line
            }
            self.runs.append(PastRun(values, figures))
        if len(left_out) == len(file.rows):
            raise InputError(
                no_measurement(path, [each.replace(f" of {path}", "") for each in left_out])
            )
        self.left_out += left_out
        for figure, column in self.measured.items():
            own = any(has_unit(row.cells[column]) for row in file.rows)
            unit = ", or the unit in the cell" if own else ""
            self.read.setdefault(figure, f"{figure} is {column!r} x {scales[figure]:g}{unit}")

    def _check(self, file: CsvFile) -> None:
        path, header = file.path, file.header
        if not file.rows:
            raise InputError(f"{path} has no rows; it must name its columns and hold past runs")
        if "time_s" not in self.measured or len(self.measured) != 2 or not self.knobs:
            raise InputError(
                f"name the columns of {path} with --time-column, --knobs, and either "
                f"--energy-column or --power-column; it has {', '.join(header)}"
            )
        for name in (*self.measured.values(), *self.knobs):
            if name not in header:
                raise UnknownName(f"column of {path}", name, header)
        if taken := {*self.measured, *self.measured.values()} & set(self.knobs):
            raise InputError(f"a knob cannot be the column {min(taken)!r}, which a measurement has")


def _scale(figure: str, column: str, export: Export | None) -> float:
    if export and column in export.units:
        return UNITS[figure].get(export.units[column], 1.0)
    return scale_of(figure, column)


def _later_totals(file: CsvFile, export: Export | None) -> Mapping[int, int]:
    """Return, by line of a row with the totals so far of a run, the line of the run's last row."""
    columns = [c for c in (export.running_totals_of if export else ()) if c in file.header]
    if not columns:
        return {}
    runs = {row.line: tuple(row.cells[column] for column in columns) for row in file.rows}
    last = {run: line for line, run in runs.items()}
    return {line: last[run] for line, run in runs.items() if any(run) and last[run] != line}


def _write_table(folder: Path, name: str, runs: Sequence[PastRun], options: CsvOptions) -> None:
    measured, knobs = options.measured, options.knob_columns
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*knobs, *measured])
    for run in runs:
        figures = (repr(run.figures[figure]) for figure in measured)
        writer.writerow([*(run.settings.get(knob, "") for knob in knobs), *figures])
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
    """Make a run folder of past runs; return it and a sentence on how columns were read.

    Arguments and errors are those of `front_of_csv`.
    """
    from tuner.problem.settings import SearchSettings, StopReason
    from tuner.problem.study_spec import SessionEnd, StudySpec
    from tuner.recordings.problem import table_problem

    files, today = [Path(path) for path in paths], parse_words(" ".join(baseline), standard=False)
    reader, stem = _Reader(options), files[0].stem
    for file in files:
        reader.add(file)
    run = RunFolder.named(runs_dir, name or new_name(stem, runs_dir))
    if run.study_file.exists():
        raise InputError(f"the run {run.name!r} exists already; give another name")
    _write_table(run.path / "table", stem, reader.runs, options)
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
    where = ", ".join(map(str, files))
    read = f"Read {len(reader.runs)} rows of {where}: {', '.join(reader.read.values())}."
    return run, " ".join([read, *([left_out_sentence(reader.left_out)] if reader.left_out else [])])


def front_of_csv(
    paths: Sequence[str | Path],
    options: CsvOptions,
    *,
    baseline: Sequence[str] = (),
    name: str | None = None,
    runs_dir: str | Path = "runs",
) -> tuple[Result, str]:
    """Return the front of past runs, with its report, and a sentence on how columns were read.

    `baseline` is KNOB=VALUE of the configuration in use today. An InputError says which file cannot
    be read, or which column is not there.
    """
    from tuner.api import result_of_answer, writer_in
    from tuner.study.load import answer_of_run

    run, read = import_runs(paths, options, baseline, name, runs_dir)
    show = writer_in(run)
    assert show is not None
    return result_of_answer(show(answer_of_run(run), run.records())), read
