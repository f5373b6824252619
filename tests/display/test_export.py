"""A result for other tools: each written for real and read back by the tool's own reader."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.results import large_result, small_result
from tuner.cli.main import main
from tuner.display.export import rows, write_csv
from tuner.formatting import settings_text
from tuner.result import Result
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError


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
    assert list(front["settings"]) == [
        settings_text(p.configuration, result.baseline.configuration) for p in result.front_points
    ]
    assert front["energy_to_solution_kJ"].is_monotonic_decreasing
    assert len(table) == len(result.points)
    assert list(front.columns)[:3] == ["time_to_solution_s", "energy_to_solution_kJ", "power_W"]
    assert list(front.columns[3:]) == ["settings"]
    assert set(front.columns[:3]) < set(table.columns)
    assert {"micro_batch", "clock_MHz"} < set(table.columns)
    with pandas.option_context("display.width", 80):
        shown = str(front).splitlines()
    assert "energy_to_solution_kJ" in shown[0]
    assert "..." not in shown[0]
    assert max(map(len, shown)) <= 80
    for number, time_s in front["time_to_solution_s"].items():
        assert result.point(str(number)).time_to_solution_s == time_s


def test_without_pandas_the_extra_is_named(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match=r"\[notebook\]"):
        _ = result.front


def test_csv(result: Result) -> None:
    path = result.to_csv()
    assert path.parent == result.run_dir
    with path.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [float(row["time_to_solution_s"]) for row in read] == sorted(
        p.time_to_solution_s for p in result.points
    )


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
    path = write_csv(result, tmp_path / "out.csv")
    with path.open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    assert {row["note"] for row in table} == {*(f"'{text}" for text in hostile), "a=b", "-4"}
    assert {row["'=knob"] for row in table} == {"-3", "-3.5", "2"}
