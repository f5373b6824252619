"""CSV files as other programs write them are read with the right values, or refused with the line.

The files are made after public ones: their columns, cells and separators, with figures of our own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.studies import write_table
from tuner.exchange.csv_import import CsvOptions, import_runs
from tuner.recordings.csv_files import Cells, read_csv, scale_of
from tuner.recordings.table import load_table
from tuner.search_spaces.errors import InputError

Runs = dict[tuple[object, ...], tuple[float, float]]


def imported(tmp_path: Path, data: bytes | str, *columns: str) -> tuple[Runs, str]:
    """Return (s, W) by the knobs' values, and what was said; columns: time, power, knobs."""
    path = tmp_path / "runs.csv"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    time, power, *knobs = columns
    kind = "power_column" if power.lower().startswith(("p", "w", "avg")) else "energy_column"
    options = CsvOptions(time_column=time, **{kind: power}, knobs=",".join(knobs))
    run, read = import_runs([path], options, (), None, tmp_path / "runs")
    found = {}
    for point in load_table(run.path / "table").group().points:
        values = tuple(point.configuration.get(knob) for knob in knobs)
        found[values] = (round(point.time_s, 6), round(point.power_W, 6))
    return found, read


PLAIN = {(4,): (0.501, 270.11), (8,): (0.43, 281.5)}


@pytest.mark.parametrize(
    "data",
    [
        pytest.param("mb,step_s,power_W\n4,0.501,270.11\n8,0.430,281.5\n", id="plain"),
        pytest.param("\ufeffmb,step_s,power_W\r\n4,0.501,270.11\r\n8,0.43,281.5\r\n", id="mark"),
        pytest.param("mb;step_s;power_W\n4;0,501;270,11\n8;0,43;281,5\n", id="German Excel"),
        pytest.param("sep=;\r\nmb;step_s;power_W\r\n4;0,501;270,11\r\n8;0,43;281,5\r\n", id="sep="),
        pytest.param(
            "mb\tstep_s\tpower_W\r\n4\t0,501\t270,11\r\n8\t0,43\t281,5\r\n".encode("utf-16"),
            id="Excel's Unicode text",
        ),
        pytest.param('mb,step_s,power_W\n4,"0,501","270,11"\n8,"0,43","281,5"\n', id="quoted"),
        pytest.param("mb;step_s;power_W\n4;0.501;270.11\n8;0.43;281.5\n", id="pandas sep=;"),
        pytest.param("mb;step_s;power_W;;\n4;0,501;270,11;;\n8;0,43;281,5;;\n;;;;\n", id="empty"),
        pytest.param(",mb,step_s,power_W\n0,4,0.501,270.11\n1,8,0.43,281.5\n", id="pandas index"),
        pytest.param(
            "mb,step_s,power_W\n4,0.501,270.11\nmb,step_s,power_W\n8,0.43,281.5\n", id="joined"
        ),
        pytest.param(
            "mb, step_s, power_W\n4, 501 ms, 270.11 W\n8, 0.43 s, 0.2815 kW\n", id="units"
        ),
        pytest.param(
            "mb,step_s,power_W\n4,0.501,270.11\n8,0.43,281.5\n16,nan,[N/A]\n2,0.7,[Not Supported]\n"
            "1,#DIV/0!,200\n32,OOM,0\n",
            id="failed",
        ),
        pytest.param(
            "State,mb,step_s,power_W\nfinished,4,0.501,270.11\ncrashed,16,0.001,90\n"
            "finished,8,0.43,281.5\nkilled,32,0.002,90\n",
            id="W&B",
        ),
        pytest.param("mb,step_s,power_W,\n4,0.501,270.11,\n8,0.43,281.5,\n", id="last comma"),
        pytest.param(
            'mb,step_s,power_W,note\n4,0.501,270.11,"a;b"\n8,0.43,281.5,"c;d"\n', id="; in"
        ),
    ],
)
def test_one_table_in_the_ways_that_programs_write_it(tmp_path: Path, data: bytes | str) -> None:
    assert imported(tmp_path, data, "step_s", "power_W", "mb")[0] == PLAIN


def test_commas_in_the_names_of_columns_that_semicolons_separate(tmp_path: Path) -> None:
    data = "time, s;power, W;mb\n0,501;270,11;4\n0,430;281,50;8\n"
    assert imported(tmp_path, data, "time, s", "power, W", "mb")[0] == PLAIN


def test_nvidia_smi_names_its_units_twice_and_knobs_have_them_too(tmp_path: Path) -> None:
    data = (
        "power_limit_W, micro_batch, step_s, power.draw.average [W], note\n"
        "300 W, 4, 0.501, 270.11 W, ok\n250 W, 4, 0.559, 212.90 W, ok\n"
        "300 W, 16, nan, [N/A], OOM\n250 W, 8, 0.475, [Not Supported], meter gone\n"
    )
    columns = ("step_s", "power.draw.average [W]", "power_limit_W", "micro_batch")
    runs, read = imported(tmp_path, data, *columns)
    assert runs == {(300, 4): (0.501, 270.11), (250, 4): (0.559, 212.9)}
    assert "2 rows are left out: line 4 of" in read
    assert "(step_s is 'nan'), line 5 of" in read
    assert "(power.draw.average [W] is '[Not Supported]')" in read
    assert "or the unit in the cell" in read


def test_codecarbon_writes_kwh_and_the_totals_so_far(tmp_path: Path) -> None:
    """emissions.csv: its energy is in kWh without saying so, and a run that flushes has a row for
    each flush, of which each holds the totals since its start."""
    data = (
        "timestamp,run_id,duration,emissions,emissions_rate,energy_consumed,gpu_model,batch\n"
        "2026-04-11T07:53:48,a,50.0,0.001,1e-05,0.002,,4\n"
        "2026-04-11T07:54:35,a,100.0,0.002,1e-05,0.004,,4\n"
        "2026-04-11T08:00:00,b,200.0,0.005,1e-05,0.010,,8\n"
    )
    runs, read = imported(tmp_path, data, "duration", "energy_consumed", "batch")
    assert runs == {(4,): (100.0, 144.0), (8,): (200.0, 180.0)}
    assert "line 2 of" in read
    assert "line 3, has the totals" in read


def test_optuna_writes_timedeltas_and_states(tmp_path: Path) -> None:
    data = (
        "number,value,duration,params_mb,user_attrs_energy_kJ,state\n"
        "0,0.4,0 days 00:21:52.500000,4,900,COMPLETE\n"
        "1,,0 days 00:00:03.100000,64,1,FAIL\n2,0.5,1 days 00:00:00,8,800,COMPLETE\n"
    )
    runs, _ = imported(tmp_path, data, "duration", "user_attrs_energy_kJ", "params_mb")
    assert runs[4,] == pytest.approx((1312.5, 900e3 / 1312.5))
    assert runs[8,][0] == 86400
    assert len(runs) == 2


def test_mlflow_writes_durations_with_units(tmp_path: Path) -> None:
    data = (
        "Start Time,Duration,Run ID,Name,Status,mb,energy\n"
        "2026-01-01,2.5min,r1,one,FINISHED,4,9000\n2026-01-01,900ms,r2,two,FAILED,8,10\n"
        "2026-01-01,1.0h,r3,three,FINISHED,8,7200\n2026-01-01,,r4,four,RUNNING,16,\n"
    )
    runs, read = imported(tmp_path, data, "Duration", "energy", "mb")
    assert runs == {(4,): (150.0, 60.0), (8,): (3600.0, 2.0)}
    assert "Status is 'FAILED'" in read


def test_slurm_writes_days_and_exit_codes(tmp_path: Path) -> None:
    data = (
        "JobID,Elapsed,ConsumedEnergy,ExitCode,State,NNodes\n7,1-02:03:04,93784000,0:0,COMPLETED,1\n"
        "8,00:10:00,6000,1:0,COMPLETED,2\n9,00:10:00,6000,0:0,CANCELLED by 1000,4\n"
    )
    assert imported(tmp_path, data, "Elapsed", "ConsumedEnergy", "NNodes")[0] == {
        (1,): (93784.0, 1000.0)
    }


@pytest.mark.parametrize(
    ("column", "scale"),
    [
        ("energy_mJ", 1e-3),  # NVML's total energy, read as MJ until a unit's case counted
        ("energy_MJ", 1e6),
        ("energy (kWh)", 3.6e6),
        ("energy [KWH]", 3.6e6),
        ("energy", 1.0),
        ("emissions_kg", 1.0),
    ],
)
def test_the_unit_of_a_columns_name(column: str, scale: float) -> None:
    assert scale_of("energy_J", column) == scale


@pytest.mark.parametrize(("figure", "column"), [("energy_J", "energy_mj"), ("power_W", "p_mw")])
def test_a_unit_that_only_its_case_tells_apart_is_refused(figure: str, column: str) -> None:
    with pytest.raises(InputError, match=r"may be in m. or M."):
        scale_of(figure, column)


@pytest.mark.parametrize(
    ("decimal", "text", "number"),
    [
        (".", "1,234.5", 1234.5),
        (".", "1,234", 1234),
        (".", "1 234.5", 1234.5),
        (".", "1'234.5", 1234.5),
        (",", "1.234,5", 1234.5),
        (",", "1\u202f234,5", 1234.5),
        (",", "1.234", 1234),
        (",", "-2,5e-3", -0.0025),
        (None, "1.234", 1.234),
        (None, "2.5e3", 2500),
    ],
)
def test_numbers_in_both_styles(decimal: object, text: str, number: float) -> None:
    cells = Cells(decimal)
    found = cells.figure(text, "t", "f line 2", figure="time_s", scale=1.0)
    assert found == pytest.approx(number)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ('mb,step_s,power_W\n4,"1,234","2,345"\n', "line 2: step_s is '1,234', which may be"),
        ("mb;step_s;power_W\n4;0,5;270.11\n", r"'270.11' in line 2, '0,5' in line 2"),
        ("mb,step_s,power_W\n4,0,5,270,1\n", "line 2 has 5 values; its first line names 3"),
        ("mb,step_s,power_W\n4,0.5,270 hp\n", "line 2: power_W is '270 hp'; its unit must be one"),
        ("mb,step_s,power_W\n4,fast,270\n", "line 2: step_s is 'fast'; it must be a number"),
        ("mb,step_s,power_W\n4,10:30,270\n", "line 2: step_s is '10:30'"),
        ("mb,step_s,power_W\n4,-1,270\n", "line 2: step_s is '-1'; it must be a positive"),
        ("mb,step_s,power_W\n4,1.2.3,270\n", "line 2: step_s is '1.2.3'; it must be a number"),
        ("mb,step_s,power_W\n4,nan,270\n8,1,N/A\n", "2 rows are left out: line 2 .step_s is 'nan'"),
        (b"mb,step_s,power_W\n4,1,2\n\xe4,1,2\n", "line 3 is not UTF-8 text; save the file as"),
        (b"PK\x03\x04\0\0\n", "binary"),
        ('\n[{"mb": 4, "step_s": 0.5}]', "line 2 is JSON, not a CSV table"),
        ('starting\n0: :::MLLOG {"key": "run_start"}\n', "line 2 is of an MLPerf log, not a CSV"),
        ("clock_MHz,step_s,power_W\n1.4 GHz,1,2\n", "line 2: clock_MHz is in GHz"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_users_file_and_line(
    tmp_path: Path, data: bytes | str, said: str
) -> None:
    knob = "clock_MHz" if "clock" in str(data) else "mb"
    with pytest.raises(InputError, match=said) as caught:
        imported(tmp_path, data, "step_s", "power_W", knob)
    assert str(tmp_path / "runs.csv") in str(caught.value)
    assert not list((tmp_path / "runs").glob("*/study.toml"))


def test_a_table_may_quote_a_log(tmp_path: Path) -> None:
    note = '":::MLLOG {""key"": 1} [JSON] {"'
    imported(tmp_path, f"mb,step_s,power_W,note\n4,0.5,270,{note}\n", "step_s", "power_W", "mb")


def test_a_recorded_table_is_read_in_the_same_way(tmp_path: Path) -> None:
    folder = write_table(tmp_path)
    (folder / "table.csv").write_text(
        "shape;speed;t;p\n1;1;0,5;10 W\n1;2;0,25;20 W\n2;1;nan;OOM\n", encoding="utf-8-sig"
    )
    table = load_table(folder)
    assert [(p.time_s, p.power_W) for p in table.groups[0].points] == [(0.5, 10), (0.25, 20)]
    assert any("1 row is left out: line 4 (t is 'nan')" in note for note in table.notes)


def test_lines_are_counted_as_an_editor_does(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('sep=,\nmb,note\n\n4,"two\nlines"\n8,x\n')
    assert [row.line for row in read_csv(path).rows] == [5, 6]
