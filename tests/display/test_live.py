"""The view at a terminal: what it shows, when it is used, and that it leaves the answer alone."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.results import ESTIMATED, failed, large_result
from tuner.cli.main import main
from tuner.display.progress import (
    EventLines,
    LiveView,
    ProgressPrinter,
    can_be_live,
    metrics_of,
    small_plot,
)
from tuner.search_spaces.configuration import Settings
from tuner.study.events import Progress
from tuner.workload.records.probe import Failure, ProbeRecord, ProbeRequest

pytest.importorskip("rich")

SHIPPED = Path(__file__).parents[1] / "data" / "cpu-tiny-gpt"


def events() -> list[Progress]:
    """A search of two ended probes, one of which failed, and two in flight."""
    launch = Settings(data_parallel=2, micro_batch=4)
    given = {"max_probes": 14, "probe_budget_kJ": 5.0, "varying": ("micro_batch",)}
    places = {"p0002": "node-a", "p0003": "node-b, node-c"}

    def started(name: str, probes: int = 0, spent_kJ: float = 0.0) -> Progress:
        done = {"probes": probes, "spent_kJ": spent_kJ}
        request = ProbeRequest(name, launch, (Settings(), Settings(clock_MHz=1200)))
        more = {**given, **done, "places": lambda: places}
        return Progress("started", ESTIMATED, request=request, **more)  # type: ignore[arg-type]

    good = ProbeRecord(started("p0000").request, (), ESTIMATED, wall_s=9.0, energy_J=400.0)  # type: ignore[arg-type]
    bad = failed("p0001", "out_of_memory", "a rank ran out of memory", "")
    front = large_result().front_points
    ended = [
        Progress("finished", ESTIMATED, record=r, front=front, spent_kJ=1.2, probes=n, **given)  # type: ignore[arg-type]
        for n, r in ((1, good), (2, bad))
    ]
    first = [Progress("note", None, "importing torch"), started("p0000"), started("p0001")]
    return [*first, *ended, started("p0002", 2, 1.2), started("p0003", 2, 1.2)]


def shown(view: LiveView) -> str:
    """The view's picture as plain text."""
    from rich.console import Console

    console = Console(width=110, file=io.StringIO(), force_terminal=False)
    console.print(view.picture())
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_view_shows_limits_flights_and_front_and_failures_above() -> None:
    from rich.console import Console

    now = [0.0]
    console = Console(file=io.StringIO(), force_terminal=True, width=110)
    view = LiveView(console, clock=lambda: now[0])
    assert "preparing" in shown(view)
    for event in events():
        view(event)
    now[0] = 12.0
    text = shown(view)
    assert "2 of 14" in text
    assert "1.20 kJ of 5.00 kJ (estimated)" in text
    assert re.search(r"p0002 +12 s +2 settings +node-a +mb4", text)
    assert "node-b, node-c" in text
    assert "p0000" not in text  # it ended
    assert text.count("o") > len(large_result().front_points)
    above = console.file.getvalue()  # type: ignore[attr-defined]
    assert "importing torch" in above
    assert "p0001  mb8  failed: out of memory" in above


def test_estimated_energies_are_marked_where_the_mark_changes() -> None:
    lines = EventLines(verbose=False)
    ended = next(event for event in events() if event.record is not None)
    record = ended.record
    marks = []
    for estimated in (True, True, False, True):
        meter = replace(record.meter, estimated=estimated)
        (line, *_) = lines(replace(ended, record=replace(record, meter=meter)))
        marks.append(line.endswith(" (estimated)"))
    assert marks == [True, False, False, True]


@pytest.mark.parametrize("verbose", [False, True])
def test_a_probe_of_a_training_that_is_over_did_not_fail(verbose: bool) -> None:
    ended = next(e for e in events() if e.record is not None and e.record.failure is not None)
    assert ended.record is not None
    short = Failure("ended", "the program ended by itself after 500 optimizer steps")
    record = replace(ended.record, failure=short)
    text = "\n".join(EventLines(verbose)(replace(ended, record=record)))
    assert "too short" in text
    assert "failed" not in text
    assert short.message in text
    assert metrics_of(replace(ended, record=record))["failed"] == 0.0
    assert metrics_of(ended)["failed"] == 1.0


def test_at_80_columns_only_the_launch_setting_is_shortened() -> None:
    from rich.console import Console

    view = LiveView(Console(file=io.StringIO(), width=80), clock=lambda: 0.0, lines=False)
    for event in events():
        if event.request is not None:
            long = Settings({f"a_long_name_of_a_knob_{i}": "none" for i in range(6)})
            request = replace(event.request, launch=long)
            event = replace(event, request=request, varying=tuple(long))
        view(event)
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    console.print(view.picture())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    (row,) = [line for line in text.splitlines() if line.startswith("p0003")]
    assert re.match(r"p0003 +0 s +2 settings +node-b, node-c +a_long_name_of_a_knob_0=none.*…", row)
    assert max(map(len, text.splitlines())) <= 80


def test_the_phase_of_a_running_probe_is_shown_at_80_columns() -> None:
    from rich.console import Console

    phases = {"p0002": "measuring 2 of 4 at 1050MHz", "p0003": "launching"}
    view = LiveView(Console(file=io.StringIO(), width=80), clock=lambda: 0.0, lines=False)
    for event in events():
        view(replace(event, phase=lambda name: phases.get(name, ""), places=None))
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    for _ in range(2):
        console.print(view.picture())
        phases["p0003"] = "warming up"
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert len(re.findall(r"p0002 +0 s +measuring 2 of 4 at 1050MHz +this node +mb4", text)) == 2
    assert re.search(r"p0003 +0 s +launching +this node", text)
    assert re.search(r"p0003 +0 s +warming up +this node", text)
    assert max(map(len, text.splitlines())) <= 80


def test_a_front_of_two_points_takes_no_plot() -> None:
    from rich.console import Console

    view = LiveView(Console(file=io.StringIO(), width=110), clock=lambda: 0.0, lines=False)
    for event in events():
        view(replace(event, front=event.front[:2]))
    assert "front so far: 2 points" in shown(view)
    assert "+----" not in shown(view)


def test_each_plain_line_carries_the_time_of_day() -> None:
    stream = io.StringIO()
    printer = ProgressPrinter(stream, now=lambda: "12:31:07")
    for event in events():
        printer(event)
    lines = stream.getvalue().splitlines()
    assert not any("probing" in line for line in lines)
    stamped = [line for line in lines if not line.startswith(" ")]
    assert len(stamped) == 3  # a note and two ended probes
    assert stamped[1].startswith("12:31:07 p0000  mb4  9 s  1/14  front ")
    printer = ProgressPrinter(stream, now=lambda: "12:31:07", verbose=True)
    for event in events():
        printer(event)
    lines = stream.getvalue().splitlines()
    assert "12:31:07 importing torch" in lines
    assert any(line.startswith("12:31:07 p0002 probing mb4") for line in lines)
    assert all(line.startswith(("12:31:07 ", "  ")) for line in lines)


def test_words_of_others_move_no_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    hostile = "\x1b]0;title\x07\x1b[2J\x9b31m [/b] :x:"
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with LiveView(Console(file=screen, force_terminal=True, width=160)) as view:
        for event in events():
            if event.record is not None and event.record.failure is not None:
                failure = replace(event.record.failure, message=hostile)
                event = replace(event, record=replace(event.record, failure=failure))
            if event.request is not None:
                launch = Settings(micro_batch=hostile)
                request = replace(event.request, launch=launch)
                event = replace(event, request=request, places=lambda: {"p0002": hostile})
            view(event)
        print(hostile, file=sys.stderr)  # a warning, say
        shown(view)
    text = screen.getvalue()
    assert text.count(r"\x1b]0;title\x07\x1b[2J\x9b31m [/b] :x:") >= 3
    assert "\x1b]" not in text
    assert not set(text) & {"\x07", "\x9b"}
    assert "\x1b[2J" not in text
    assert "\x1b[" in text  # the view's own


def test_the_plot_spans_its_points() -> None:
    points = large_result().front_points
    lines = small_plot(points, 40, 8)
    assert len(lines) == 10
    assert lines[0].rstrip().partition("|")[2].startswith("o")  # the fastest costs most
    assert lines[7].rstrip().endswith("o")
    assert small_plot(()) == []
    assert len(small_plot(points[:1], 40, 8)) == 10


def test_only_a_terminal_that_moves_its_cursor_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    assert can_be_live(Terminal())
    assert not can_be_live(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not can_be_live(Terminal())


def at_terminal(tmp_path: Path, *more: str) -> tuple[str, str]:
    """(standard output, what the terminal got on standard error) of a replay."""
    master, slave = pty.openpty()
    words = ["replay", str(SHIPPED), "--runs-dir", str(tmp_path), "--max-probes", "3", *more]
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "110"}
    got: list[bytes] = []

    def read() -> None:
        try:
            while part := os.read(master, 4096):
                got.append(part)
        except OSError:
            pass  # the other end is closed

    reader = threading.Thread(target=read)
    with subprocess.Popen(
        [sys.executable, "-m", "tuner.cli.main", *words],
        stdout=subprocess.PIPE,
        stderr=slave,
        env=env,
        text=True,
    ) as process:
        os.close(slave)
        reader.start()
        out, _ = process.communicate(timeout=120)
    reader.join(timeout=60)
    os.close(master)
    assert process.returncode == 0
    return out, b"".join(got).decode(errors="replace")


@pytest.mark.extra("tuner.recordings.command")
def test_at_a_terminal_the_view_is_drawn_and_wiped(tmp_path: Path) -> None:
    out, screen = at_terminal(tmp_path)
    assert "\x1b[" in screen
    assert "in flight" in screen or "no probe in flight" in screen
    assert "/step  " in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
    assert "\x1b[" not in out
    assert "\nNext: " in out


@pytest.mark.slow
@pytest.mark.extra("tuner.recordings.command")
def test_plain_is_plain_at_a_terminal_too(tmp_path: Path) -> None:
    out, screen = at_terminal(tmp_path, "--plain", "--json")
    assert "\x1b[" not in screen
    assert "/step  " in screen
    assert out.startswith("{")


@pytest.mark.extra("tuner.doctor.catalog")
@pytest.mark.extra("tuner.recordings.command", "tuner.exchange", "tuner.dashboard")
@pytest.mark.parametrize(("shell", "word"), [("bash", "complete -"), ("zsh", "#compdef tuner")])
def test_shell_completion(shell: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert word in out
    for command in ("optimize", "replay", "export", "dashboard"):
        assert command in out
    assert "--max-probes" in out


@pytest.mark.extra("tuner.doctor.catalog")
@pytest.mark.extra("tuner.exchange")
def test_bash_completes_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "tuner.bash"
    script.write_text(capsys.readouterr().out)
    ask = f"""
    source {script}
    COMP_WORDS=(tuner exp); COMP_CWORD=1
    $(complete -p tuner | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
    echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert "export" in done.stdout.split()
    assert "optimize" not in done.stdout.split()


@pytest.mark.extra("tuner.doctor.catalog")
def test_completion_without_shtab_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "[terminal]'" in capsys.readouterr().err


def test_the_help_says_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for code in ("0 ", "1 ", "2 ", "130"):
        assert re.search(rf"^  {code}", out, re.MULTILINE)
