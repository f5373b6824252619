"""`tuner demo`: paced, labelled as simulated wherever it is read, and with a report at its end."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fake_clock import FakeClock
from tests.support.studies import METER, record, request
from tuner.cli.main import main
from tuner.search_spaces.configuration import Settings
from tuner.simulated.demo import PROBES, Pace
from tuner.study.events import Progress


def test_probes_play_at_an_even_pace_however_long_they_take_to_plan() -> None:
    clock, began, seen = FakeClock(100.0), [], []
    pace = Pace(20.0, clock=clock, sleep=clock.sleep)
    pace.notify = seen.append
    started = Progress("started", METER, request=request())
    for number in range(PROBES):
        began.append(clock.now_s)
        pace(started)
        clock.now_s += 0.1 * number  # the next plan; slower than the pace from the fifteenth on
        pace(Progress("finished", METER, record=record(wall_s=80.0)))
    assert clock.now_s == pytest.approx(120.0, abs=1.4)
    assert pace.simulated_s() == PROBES * 80.0
    assert len(seen) == 2 * PROBES


def test_the_clock_of_the_view_is_the_simulated_one() -> None:
    clock = FakeClock()
    halves: list[float] = []

    def sleep(seconds: float) -> None:
        clock.now_s += seconds / 2
        halves.append(pace.simulated_s())
        clock.now_s += seconds / 2

    pace = Pace(14.0, clock=clock, sleep=sleep)
    live = replace(request(), live=(Settings(),))
    for _ in range(2):
        pace(Progress("started", METER, request=live))
        pace(Progress("finished", METER, record=record(wall_s=60.0)))
    assert halves == [pytest.approx(45.0), pytest.approx(60.0 + 30.0)]


def test_it_says_that_nothing_was_measured_and_ends_with_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.simulated.demo.PROBES", 3)
    assert main(["demo", "--runs-dir", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(
        "demo: opt-350m on 8 simulated A100, at most 15 % slower; nothing was measured.\n"
    )
    assert re.search(r"p0000 .*\(estimated\)", err)
    (report,) = tmp_path.glob("demo-*/report.html")
    assert str(report) in out
    assert "nothing was measured" in report.read_text("utf-8")
