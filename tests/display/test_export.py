"""A result for other tools: each written for real and read back by the tool's own reader."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tuner.cli.main import main
from tuner.display.export import FORMATS, export_result, rows, t4_results
from tuner.results.result import Result
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.testing.results import failed, large_result, point, result_of, small_result
from tuner.workload.probe import Measurement

#: What the TuningSchema project's T4 results schema 1.0.0 requires of a file (the one that Kernel
#: Tuner ships): types, the words of "invalidity", and the keys that must be there.
T4 = {
    "type": "object",
    "required": ["schema_version", "results"],
    "properties": {
        "schema_version": {"type": "string", "pattern": r"^[0-9]{1,}.[0-9]{1,}.[0-9]{1,}$"},
        "results": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["configuration", "times", "invalidity", "correctness"],
                "properties": {
                    "timestamp": {"type": "string"},
                    "configuration": {"type": "object"},
                    "objectives": {"type": "array"},
                    "times": {
                        "type": "object",
                        "properties": {
                            "compilation_time": {"type": "number"},
                            "runtimes": {"type": "array"},
                            "framework": {"type": "number"},
                            "search_algorithm": {"type": "number"},
                            "validation": {"type": "number"},
                        },
                    },
                    "invalidity": {
                        "enum": [
                            "timeout",
                            "compile",
                            "runtime",
                            "correctness",
                            "constraints",
                            "correct",
                        ]
                    },
                    "correctness": {"type": "number"},
                    "measurements": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {
                                "name": {"type": "string"},
                                "value": {"type": ["number", "string", "array"]},
                                "unit": {"type": "string"},
                            },
                        },
                    },
                },
            },
        },
    },
}


@pytest.fixture
def result(tmp_path: Path) -> Result:
    return replace(small_result(), run_dir=tmp_path / "run")


def test_rows_are_points_with_a_column_a_knob(result: Result) -> None:
    table = rows(result)
    assert len(table) == len(result.points)
    assert [row["time_to_solution_s"] for row in table] == sorted(
        p.time_to_solution_s for p in result.points
    )
    first = table[0]
    assert (first["data_parallel"], first["micro_batch"]) == (2, 4)
    assert first["energy_low_kJ"] < first["energy_to_solution_kJ"] < first["energy_high_kJ"]
    assert sum(row["chosen"] for row in table) == 1
    assert sum(row["baseline"] for row in table) == 1
    assert sum(row["on_front"] for row in table) == len(result.front_points)
    assert all(row["energy_estimated"] for row in table)
    assert len({tuple(row) for row in table}) == 1


def test_the_front_is_a_data_frame() -> None:
    pandas = pytest.importorskip("pandas")
    result = replace(large_result(), run_dir=None)
    front, table = result.front, result.table
    assert isinstance(front, pandas.DataFrame)
    assert list(front["clock_MHz"]) == [
        p.configuration.get("clock_MHz") for p in result.front_points
    ]
    assert front["energy_to_solution_kJ"].is_monotonic_decreasing
    assert len(table) == len(result.points)
    assert list(front.columns)[:3] == ["time_to_solution_s", "energy_to_solution_kJ", "power_W"]
    assert set(front.columns[3:]) == {"micro_batch", "clock_MHz"}  # the knobs that vary
    assert set(front.columns) < set(table.columns)
    for number, time_s in front["time_to_solution_s"].items():
        assert result.point(str(number)).time_to_solution_s == time_s


def test_without_pandas_the_extra_is_named(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match=r"joulefront\[notebook\]"):
        _ = result.front


def test_csv(result: Result) -> None:
    path = result.export("csv")
    assert path.parent == result.run_dir
    with path.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [float(row["time_to_solution_s"]) for row in read] == sorted(
        p.time_to_solution_s for p in result.points
    )


def test_parquet_keeps_types_and_knobs_of_each_stage(result: Result, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    staged = point(
        Configuration.of(pipeline_parallel=2, clock_MHz=(1200, 1400)),
        100.0,
        30.0,
        result.points[0].meter,
    )
    one = point(Configuration.of(clock_MHz=1300), 120.0, 30.0, result.points[0].meter)
    mixed = result_of("staged", [staged, one], None, 0)
    path = export_result(mixed, "parquet", tmp_path / "points.parquet")
    read = pandas.read_parquet(path)
    assert sorted(read["clock_MHz"]) == ["1200,1400", "1300"]
    assert read["windows"].dtype.kind == "i"
    assert list(read["time_to_solution_s"]) == [100.0, 120.0]


def test_t4_is_what_its_schema_says(result: Result) -> None:
    steps = Measurement(result.points[0].configuration.live, 2, 1.0, 0.5, 10.0, 10.0)
    steps = replace(steps, step_times_s=(0.4, 0.6))
    result = replace(result, windows={result.points[0].configuration: (steps,)})
    data = json.loads(result.export("t4").read_text())
    jsonschema.validate(data, T4)
    correct = [entry for entry in data["results"] if entry["invalidity"] == "correct"]
    assert len(correct) == len(result.points)
    timed = [entry["times"]["runtimes"] for entry in correct if entry["times"]["runtimes"]]
    assert timed == [[400.0, 600.0]]
    assert {m["name"] for m in correct[0]["measurements"]} >= set(correct[0]["objectives"])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("out_of_memory", "runtime"),
        ("refused", "constraints"),
        ("hang", "timeout"),
        ("node", "runtime"),
        ("kind_of_a_later_release", "runtime"),
    ],
)
def test_t4_tells_failed_probes_apart(kind: str, said: str) -> None:
    bad = failed("p0009", kind, "it went wrong", "", micro_batch=64)
    data = t4_results(replace(small_result(), failures=(bad,)))
    jsonschema.validate(data, T4)
    (entry,) = [entry for entry in data["results"] if entry["correctness"] == 0]
    assert entry["invalidity"] == said
    assert entry["configuration"] == {"micro_batch": 64}


def test_an_unknown_format_lists_those_there_are(result: Result) -> None:
    with pytest.raises(InputError) as caught:
        result.export("xlsx")
    assert all(name in str(caught.value) for name in FORMATS)


def test_the_command_exports_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    past = tmp_path / "past.csv"
    past.write_text("gpus,time_s,energy_J\n1,10,100\n2,6,110\n4,4,130\n")
    runs = ["--runs-dir", str(tmp_path)]
    columns = ["--time-column", "time_s", "--energy-column", "energy_J", "--knobs", "gpus"]
    assert main(["import", str(past), "--name", "one", *columns, *runs]) == 0
    assert main(["export", "one", "--to", "csv", *runs, "--json"]) == 0
    out = capsys.readouterr().out
    said = json.loads(out[out.rindex("{") :])
    assert Path(said["out"]).read_text().count("\n") > 2
    assert main(["export", "one", "--to", "xlsx", *runs]) == 2


def test_no_text_in_a_csv_is_a_formula(tmp_path: Path) -> None:
    hostile = ["=HYPERLINK(1)", "+1+1", "-1+1", "@SUM(1)", "\t=1", "\r=1"]
    settings: list[dict[str, Any]] = [{"note": text, "=knob": -3} for text in hostile]
    settings += [{"note": "a=b", "=knob": -3.5}, {"note": "-4", "=knob": 2}]
    base = small_result()
    points = [replace(base.points[0], configuration=Configuration(Settings(s))) for s in settings]
    result = replace(base, points=tuple(points), front_points=())
    path = export_result(result, "csv", tmp_path / "out.csv")
    with path.open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    assert {row["note"] for row in table} == {*(f"'{text}" for text in hostile), "a=b", "-4"}
    assert {row["'=knob"] for row in table} == {"-3", "-3.5", "2"}
