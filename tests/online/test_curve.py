"""The power curve of a run: recorded runs, and results whose points are changed."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.golden import prepared
from tuner.cli.main import main
from tuner.display.curve import curve_notes, curve_rows
from tuner.online.curve import power_curve
from tuner.problem.run_folder import RunFolder
from tuner.results.result import Result
from tuner.search_spaces.errors import InputError
from tuner.study.load import result_of


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("curve")
    prepared(work)
    return work / "runs"


@pytest.fixture(scope="module")
def table(runs: Path) -> Result:
    return result_of(RunFolder(runs / "table"))


def test_no_point_that_is_left_out_is_faster_within_a_power_that_is_shown(table: Result) -> None:
    curve = power_curve(table, "recommended")
    launch = curve.start.configuration.launch
    for each in curve.points:
        assert each.live == (each.point.configuration.launch == launch)
        rivals = [p for p in table.points if not each.live or p.configuration.launch == launch]
        within = [p for p in rivals if p.power_W <= each.point.power_W]
        fastest = min(p.time_to_solution_s for p in within)
        assert each.for_average == (fastest == each.point.time_to_solution_s)
    shown = {each.point.configuration for each in curve.points}
    least = min(table.points, key=lambda p: p.power_W)
    assert least.configuration in shown  # how low the job can go


def test_a_slowdown_has_its_interval_and_a_restart_its_cost(runs: Path, table: Result) -> None:
    from tuner.workload.trace import read_trace

    records = read_trace(RunFolder(runs / "table").trace).records
    curve = power_curve(table, "recommended", records)
    assert any(not each.live for each in curve.points)
    for each in curve.points:
        if each.point is not curve.start:
            assert each.slowdown_interval is not None
            low, high = each.slowdown_interval
            assert low - 0.01 <= each.slowdown <= high + 0.01
        if each.live:
            assert each.restart_s == 0
            continue
        launches = [
            r.launch_s
            for r in records
            if r.request.launch == each.point.configuration.launch and r.measurements
        ]
        assert each.restart_s is not None
        assert min(launches) <= each.restart_s <= max(launches)
        assert each.restart_kJ == pytest.approx(each.restart_s * each.point.power_W / 1000)
    unknown = power_curve(table, "recommended").points[-1]
    assert (unknown.restart_s, unknown.restart_kJ) == (None, None)


def test_the_fastest_within_a_peak_may_be_another_than_within_the_average(table: Result) -> None:
    """A setting with a low average may have the highest peak: it serves no cap of the peak."""
    first, second, *rest = sorted(table.points, key=lambda p: p.time_to_solution_s)
    peaks = [replace(first, peak_power_W=300.0), replace(second, peak_power_W=400.0)]
    spiky = replace(table, points=(*peaks, *rest))
    curve = power_curve(spiky, second.configuration.short)
    found = {each.point.configuration: each for each in curve.points}
    assert first.configuration.launch == second.configuration.launch
    assert found[second.configuration].for_average
    assert not found[second.configuration].for_peak
    assert found[first.configuration].for_peak
    assert "no peak is known" not in " ".join(curve_notes(curve))
    assert [row[1] for row in curve_rows(curve)].count("-") == len(curve.points) - 2


def test_a_run_without_points_is_refused(table: Result) -> None:
    with pytest.raises(InputError, match="measured nothing"):
        power_curve(replace(table, points=()), "recommended")


def test_the_command_prints_and_writes_the_same_curve(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / name) for name in ("c.csv", "c.html")]
    words = ["curve", "plan", "--runs-dir", str(runs)]
    assert main([*words, "--csv", files[0], "--html", files[1]]) == 0
    text = capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"]
    with Path(files[0]).open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["power_W"]) for row in rows] == [p["power_W"] for p in data["points"]]
    assert all(p["short_name"] in text for p in data["points"])
    assert "predicted" in text
    assert "Average power" in Path(files[1]).read_text()
    assert main([*words, "--point", "nowhere"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    shutil.rmtree(tmp_path)


def test_slower_points_of_the_same_power_are_no_choice(runs: Path) -> None:
    """An estimate that hardly knows what a job draws would offer 259 times its time for nothing."""
    result = result_of(RunFolder(runs / "script"))
    powers = [point.power_W for point in result.points]
    assert len(powers) > 1
    assert max(powers) < 1.01 * min(powers)
    (only,) = power_curve(result, "recommended").points
    assert only.point.time_to_solution_s == min(p.time_to_solution_s for p in result.points)
