"""A front from CSV files alone: their columns are named, and a unit may be in a column's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.studies import run_replay as replay
from tuner.api import load_result
from tuner.cli.main import main
from tuner.exchange.csv_import import CsvOptions, front_of_csv
from tuner.search_spaces.errors import InputError

PAST = """run,batch_size,gpus,clock_MHz,runtime_h,energy_kWh,final_loss
a1,32,4,1200,10.5,9.1,2.31
a2,32,4,1500,9.1,9.8,2.33
a3,64,4,1200,8.9,8.7,2.30
a4,64,4,1500,7.7,9.6,2.31
a5,64,8,1200,4.9,9.9,2.32
a6,64,8,1500,4.1,11.2,2.30
a7,64,8,1500,4.2,11.1,2.31
"""


NAMED = CsvOptions(
    time_column="runtime_h", energy_column="energy_kWh", knobs="batch_size, gpus, clock_MHz"
)


@pytest.fixture
def past(tmp_path: Path) -> Path:
    path = tmp_path / "past.csv"
    path.write_text(PAST)
    return path


def test_the_front_of_past_runs(past: Path, tmp_path: Path) -> None:
    result, read = front_of_csv([past], NAMED, runs_dir=tmp_path / "runs")
    assert "time_s is 'runtime_h' x 3600, energy_J is 'energy_kWh' x 3.6e+06" in read
    front = {p.configuration.key: p for p in result.front_points}
    assert {p.configuration.get("gpus") for p in front.values()} == {4, 8}
    assert all(p.configuration.get("batch_size") == 64 for p in front.values())
    chosen = result.choose(deadline_s=5 * 3600).point
    assert chosen.configuration.get("clock_MHz") == 1200
    assert chosen.time_to_solution_s == pytest.approx(4.9 * 3600, rel=0.02)
    assert chosen.energy_to_solution_kJ == pytest.approx(9.9 * 3600, rel=0.02)
    # Two rows of one configuration are two windows of it.
    assert sorted(p.windows for p in result.points) == [1, 1, 1, 1, 1, 2]
    assert result.baseline is None
    assert result.spent.energy_kJ == 0
    assert "recorded table past" in result.report_path.read_text()


def test_its_run_folder_is_a_run_like_any_other(past: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    result, _ = front_of_csv(
        [past], NAMED, runs_dir=runs, baseline=["batch_size=32", "clock_MHz=1500"]
    )
    again = load_result(result.name, runs_dir=runs)
    assert again.front_points == result.front_points
    assert again.baseline.configuration.get("batch_size") == 32
    assert result.run_dir is not None
    searched = replay(result.run_dir / "table", runs_dir=runs, report=False, max_probes=3)
    assert 3 <= len(searched.points) <= 6


def test_several_files_share_their_columns(past: Path, tmp_path: Path) -> None:
    more = tmp_path / "more.csv"
    more.write_text("gpus,clock_MHz,batch_size,runtime_h,energy_kWh\n16,1200,64,2.9,11.5\n")
    result, read = front_of_csv([past, more], NAMED, runs_dir=tmp_path / "runs")
    assert len(result.points) == 7
    assert f"8 rows of {past}, {more}:" in read


@pytest.mark.parametrize(
    ("time", "power", "scales"),
    [
        ("step_time_ms", "avg power (kW)", (1e-3, 1e3)),
        ("time", "power", (1.0, 1.0)),
        ("minutes_min", "watts", (60.0, 1.0)),
    ],
)
def test_a_unit_is_read_from_the_name(
    tmp_path: Path, time: str, power: str, scales: tuple[float, float]
) -> None:
    path = tmp_path / "past.csv"
    path.write_text(f"workers,{time},{power}\n2,40,3\n")
    options = CsvOptions(time_column=time, power_column=power, knobs="workers")
    result, _ = front_of_csv([path], options, runs_dir=tmp_path / "runs")
    (point,) = result.points
    assert point.time_to_solution_s == pytest.approx(40 * scales[0])
    assert point.power_W == pytest.approx(3 * scales[1])


COLUMNS = {"time_column": "time_s", "energy_column": "energy_J", "knobs": "knob"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"time_column": None}, "--time-column"),
        ({"energy_column": None}, "--energy-column or --power-column"),
        ({"power_column": "energy_J"}, "either --energy-column or --power-column"),
        ({"knobs": None}, "--knobs"),
        ({"time_column": "clock"}, "knob, time_s"),
        ({"knobs": "time_s"}, "knob cannot be the column"),
    ],
)
def test_what_is_not_named_is_asked_in_one_sentence(tmp_path: Path, given: dict, said: str) -> None:
    path = tmp_path / "past.csv"
    path.write_text("knob,time_s,energy_J\n1,2,3\n")
    options = CsvOptions(**{**COLUMNS, **given})
    with pytest.raises(InputError) as caught:
        front_of_csv([path], options, runs_dir=tmp_path / "runs")
    text = str(caught.value)
    assert said in text or all(part in text for part in said.split(", "))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no rows"),
        ("a,time_s,energy_J\n", "no rows"),
        ("a,a,time_s,energy_J\n1,2,3,4\n", "twice"),
        ("a,time_s,energy_J\n1,fast,3\n2,4,5\n", "line 2"),
        ("a,time_s,energy_J\n1,0,3\n2,4,5\n", "positive"),
        ("a,time_s,energy_J\n1,2\n", "line 2 has 2 values"),
    ],
)
def test_bad_files_are_one_sentence_and_leave_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    runs = tmp_path / "runs"
    columns = ["--time-column", "time_s", "--energy-column", "energy_J", "--knobs", "a"]
    assert main(["import", str(path), *columns, "--runs-dir", str(runs)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert not list(runs.glob("*/study.toml"))


def test_the_command_answers_and_says_what_it_read(
    past: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ["--runs-dir", str(tmp_path / "runs"), "--json"]
    words = ["--time-column", "runtime_h", "--energy-column", "energy_kWh"]
    assert main(["import", str(past), *words, "--knobs", "gpus,clock_MHz", *runs]) == 0
    said = json.loads(capsys.readouterr().out)
    assert "time_s is 'runtime_h' x 3600" in said["read"]
    assert len(said["points"]) == 4
    assert main(["import", "--time-column", "t", *runs]) == 2
    assert "name the CSV files" in capsys.readouterr().err
    past.write_text("gpus,time_s,energy_J\n1,100,5000\n2,60,5500\n4,40,7000\n")
    words = ["--time-column", "time_s", "--energy-column", "energy_J", "--knobs", "gpus"]
    assert main(["import", str(past), "--today", "gpus=1", *words, *runs]) == 0
    assert "no more were made" not in capsys.readouterr().out  # no search could make any
    assert main(["import", str(past), "--today", "gpus=3", *words, *runs]) == 2
    assert "--today must name exactly one" in capsys.readouterr().err
