"""A front from CSV files alone: what each column is, what is asked when that is in doubt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tuner.api import front_of_csv, load_result
from tuner.cli.main import main
from tuner.problem.constraints import Constraints
from tuner.search_spaces.errors import InputError
from tuner.study.csv_import import CsvOptions, read_columns
from tuner.testing.studies import run_replay as replay

PAST = """run,batch_size,gpus,clock_MHz,runtime_h,energy_kWh,final_loss
a1,32,4,1200,10.5,9.1,2.31
a2,32,4,1500,9.1,9.8,2.33
a3,64,4,1200,8.9,8.7,2.30
a4,64,4,1500,7.7,9.6,2.31
a5,64,8,1200,4.9,9.9,2.32
a6,64,8,1500,4.1,11.2,2.30
a7,64,8,1500,4.2,11.1,2.31
"""


@pytest.fixture
def past(tmp_path: Path) -> Path:
    path = tmp_path / "past.csv"
    path.write_text(PAST)
    return path


def test_the_front_of_past_runs(past: Path, tmp_path: Path) -> None:
    result, read = front_of_csv(
        [past], runs_dir=tmp_path / "runs", constraints=Constraints(deadline_s=5 * 3600)
    )
    assert "'runtime_h' (x 3600 s)" in read
    assert "not read: 'run', 'final_loss'" in read
    front = {p.configuration.key: p for p in result.front_points}
    assert {p.configuration.get("gpus") for p in front.values()} == {4, 8}
    assert all(p.configuration.get("batch_size") == 64 for p in front.values())
    assert result.best is not None
    assert result.best.configuration.get("clock_MHz") == 1200
    assert result.best.time_to_solution_s == pytest.approx(4.9 * 3600, rel=0.02)
    assert result.best.energy_to_solution_kJ == pytest.approx(9.9 * 3600, rel=0.02)
    # Two rows of one configuration are two windows of it.
    assert sorted(p.windows for p in result.points) == [1, 1, 1, 1, 1, 2]
    assert result.baseline is None
    assert result.spent.energy_kJ == 0
    assert result.report_path is not None
    assert "past runs in" in result.report_path.read_text()


def test_its_run_folder_is_a_run_like_any_other(past: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    result, _ = front_of_csv([past], runs_dir=runs, baseline=["batch_size=32", "clock_MHz=1500"])
    again = load_result(result.name, runs_dir=runs)
    assert again.front_points == result.front_points
    assert again.baseline is not None
    assert again.baseline.configuration.get("batch_size") == 32
    assert result.run_dir is not None
    searched = replay(result.run_dir / "table", runs_dir=runs, report=False, max_probes=3)
    assert 3 <= len(searched.points) <= 6


def test_several_files_share_their_columns(past: Path, tmp_path: Path) -> None:
    more = tmp_path / "more.csv"
    more.write_text("gpus,clock_MHz,batch_size,runtime_h,energy_kWh\n16,1200,64,2.9,11.5\n")
    result, read = front_of_csv([past, more], runs_dir=tmp_path / "runs")
    assert len(result.points) == 7
    assert "8 rows of the 2 files" in read


def test_rows_of_other_lengths_are_read_as_far_as_their_columns_go(tmp_path: Path) -> None:
    ragged = tmp_path / "ragged.csv"
    ragged.write_text("gpus,time_s,energy_J,comment\n1,9,30\n\n2,5,40,fast,twice\n")
    result, read = front_of_csv([ragged], runs_dir=tmp_path / "runs")
    times = sorted(point.time_to_solution_s for point in result.points)
    assert times == pytest.approx([5, 9], rel=0.1)
    assert "2 rows of" in read


def columns_of(header: str, *lines: str, **given: object) -> tuple:
    names = header.split(",")
    rows = [dict(zip(names, line.split(","), strict=True)) for line in lines]
    found = read_columns(names, rows, CsvOptions(**given))  # type: ignore[arg-type]
    return *found.measured.values(), found.knobs


@pytest.mark.parametrize(
    ("header", "lines", "told"),
    [
        (
            "zero_stage,step_time_ms,avg_power_W",
            ("0,120,300", "1,130,280"),
            (("step_time_ms", 1e-3), ("avg_power_W", 1.0), ("zero_stage",)),
        ),
        (  # a limit is a knob, though it is in watts; energy wins over power
            "power_limit_W,time,energy,power",
            ("200,9,1700,190", "250,8,1900,240"),
            (("time", 1.0), ("energy", 1.0), ("power_limit_W",)),
        ),
        (
            "seconds,joules,workers,host",
            ("10,100,2,a", "6,120,4,b"),
            (("seconds", 1.0), ("joules", 1.0), ("workers",)),
        ),
    ],
)
def test_columns_are_told_by_their_names(header: str, lines: tuple[str, ...], told: tuple) -> None:
    assert columns_of(header, *lines) == told


@pytest.mark.parametrize(
    ("header", "line", "given", "said"),
    [
        ("knob,t,energy_J", "1,2,3", {}, "--time-column"),
        ("knob,time_s,e", "1,2,3", {}, "--energy-column or --power-column"),
        ("knob,time_s,total_time_s,energy_J", "1,2,3,4", {}, "--time-column"),
        ("knob,time_s,energy_J", "1,2,3", {}, "--knobs"),  # one row: nothing varies
        ("knob,time_s,energy_J", "1,2,3", {"time_column": "clock"}, "knob, time_s"),
        ("knob,time_s,energy_J", "1,2,3", {"knobs": "time_s"}, "cannot be a knob"),
    ],
)
def test_what_is_in_doubt_is_asked_in_one_sentence(
    header: str, line: str, given: dict, said: str
) -> None:
    with pytest.raises(InputError) as caught:
        columns_of(header, line, **given)
    text = str(caught.value)
    assert "\n" not in text
    assert said in text or all(part in text for part in said.split(", "))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no rows"),
        ("a,time_s,energy_J\n", "no rows"),
        ("a,a,time_s,energy_J\n1,2,3,4\n", "twice"),
        ("a,time_s,energy_J\n1,fast,3\n2,4,5\n", "line 2"),
        ("a,time_s,energy_J\n1,0,3\n2,4,5\n", "positive"),
    ],
)
def test_bad_files_are_one_sentence_and_leave_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    runs = tmp_path / "runs"
    assert main(["import", str(path), "--runs-dir", str(runs)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert not list(runs.glob("*/study.toml"))


def test_the_command_answers_and_says_what_it_read(
    past: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["import", str(past), "--runs-dir", str(tmp_path / "runs"), "--json"]
    assert main([*words, "--knobs", "gpus,clock_MHz"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert "knobs from 'gpus', 'clock_MHz'" in said["read"]
    assert len(said["points"]) == 4
    assert main(["import", "--time-column", "t", "--runs-dir", str(tmp_path / "runs")]) == 2
    assert "name the CSV files" in capsys.readouterr().err
    past.write_text("gpus,time_s,energy_J\n1,100,5000\n2,60,5500\n4,40,7000\n")
    assert main(["import", str(past), "--today", "gpus=1", *words[2:4]]) == 0
    assert "no more were made" not in capsys.readouterr().out  # no search could make any
