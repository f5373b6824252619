"""Interrupts: one request that is sent twice cleans up once; a later one ends the process."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until
from tuner.cli.main import SAME_REQUEST_S, SIGNALS, Interrupts

ROOT = Path(__file__).resolve().parents[2]
INT, TERM = signal.SIGINT, signal.SIGTERM


class Exited(BaseException):
    """The process has ended at once."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def exits(code: int) -> None:
        assert code == 130
        raise Exited

    monkeypatch.setattr(os, "_exit", exits)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


SEQUENCES = {
    "timeout signals its child and then its group": ([(0, TERM), (1e-4, TERM)], "same"),
    "nested timeouts": ([(0, TERM), (1e-4, TERM), (2e-4, TERM), (3e-4, TERM)], "same"),
    "a wrapper passes Ctrl-C on": ([(0, INT), (0.05, INT)], "same"),
    "a scheduler signals all processes, and the job script passes it on": (
        [(0, TERM), (0.5, INT)],
        "same",
    ),
    "the other way round": ([(0, INT), (1.5, TERM)], "same"),
    "an impatient person, twice": ([(0, INT), (0.3, INT)], "same"),
    "a person who holds the keys": ([(0, INT), *((n / 30, INT) for n in range(1, 50))], "same"),
    "a person's second one, later": ([(0, INT), (2.5, INT)], "at once"),
    "a person who goes on": ([(0, INT), (0.8, INT), (1.6, INT), (2.4, INT)], "at once"),
    "three, all later": ([(0, INT), (5, INT)], "at once"),
    "a second kill": ([(0, TERM), (30, TERM)], "at once"),
    "a CI server that gives up": ([(0, INT), (7.5, TERM)], "at once"),
    "a kill after Ctrl-C": ([(0, INT), (600, TERM)], "at once"),
}


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize(("sent", "outcome"), SEQUENCES.values(), ids=SEQUENCES.keys())
def test_a_request_is_one_however_often_it_is_sent(
    sent: list[tuple[float, signal.Signals]], outcome: str, capfd: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    with Interrupts(lambda: now_s):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(sent[0][1])
        for after_s, number in sent[1:-1]:
            now_s = 100.0 + after_s
            signal.raise_signal(number)
        now_s = 100.0 + sent[-1][0]
        with pytest.raises(Exited) if outcome == "at once" else contextlib.nullcontext():
            signal.raise_signal(sent[-1][1])
    said = capfd.readouterr().err
    assert ("ended at once, without cleaning up" in said) == (outcome == "at once")
    # Who may be a person learns what a further Ctrl-C does, and a scheduler's log stays clean.
    repeated = any(n == INT and 0 < after_s < SAME_REQUEST_S for after_s, n in sent)
    assert said.count("Ctrl-C once more ends at once") == repeated


@pytest.mark.usefixtures("ends")
def test_after_the_command_the_same_request_is_still_the_same_one() -> None:
    now_s, got = 100.0, []
    for number in SIGNALS:
        signal.signal(number, lambda number, _: got.append(number))
    with pytest.raises(KeyboardInterrupt), Interrupts(lambda: now_s):
        signal.raise_signal(TERM)
    signal.raise_signal(TERM)
    assert got == []
    now_s += 5
    signal.raise_signal(TERM)  # the process is another program's by now
    assert got == [TERM]
    signal.raise_signal(INT)
    assert got == [TERM, INT]


@pytest.mark.usefixtures("ends")
def test_without_an_interrupt_the_handlers_are_those_of_before() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupts():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.usefixtures("ends")
def test_the_second_one_ends_the_process_where_nobody_reads_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", gone)
    now_s = 0.0
    with Interrupts(lambda: now_s):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(INT)
        now_s = 60.0
        with pytest.raises(Exited):
            signal.raise_signal(INT)


# ---- what really sends them

#: A command that takes SECONDS to clean up.
COMMAND = """
import pathlib, sys, time
from tuner.cli.main import Interrupts

def wait(seconds):
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        time.sleep(0.01)

with Interrupts():
    try:
        pathlib.Path("ready").touch()
        wait(60)
    except KeyboardInterrupt:
        pathlib.Path("cleaning").touch()
        wait(float(sys.argv[1]))
        pathlib.Path("cleaned").touch()
sys.exit(130)
"""


def words_of(seconds: float) -> list[str]:
    return [sys.executable, "-c", COMMAND, str(seconds)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(
    "options", [("10",), ("-k", "30", "10"), ("--signal=INT", "10")], ids=" ".join
)
def test_timeout_lets_a_command_clean_up(options: tuple[str, ...], tmp_path: Path) -> None:
    # timeout makes a group of its own, and sends its signal to it when it gets one itself.
    process = subprocess.Popen(
        ["timeout", *options, *words_of(0.5)],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until((tmp_path / "ready").exists)
    process.send_signal(signal.SIGALRM)  # that of its clock
    _, said = process.communicate(timeout=60)
    assert process.returncode == 124
    assert (tmp_path / "cleaned").exists()
    assert "at once, without cleaning up" not in said


def test_a_group_that_is_signalled_twice_cleans_up(tmp_path: Path) -> None:
    process = subprocess.Popen(
        words_of(0.5), cwd=tmp_path, env=environment(), start_new_session=True
    )
    wait_until((tmp_path / "ready").exists)
    process.send_signal(TERM)
    wait_until((tmp_path / "cleaning").exists)
    os.killpg(process.pid, TERM)
    os.killpg(process.pid, INT)
    assert process.wait(60) == 130
    assert (tmp_path / "cleaned").exists()


def test_a_second_ctrl_c_at_a_terminal_ends_it_at_once(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(sys.executable, words_of(60), environment())
    wait_until((tmp_path / "ready").exists)
    os.write(terminal, b"\x03")
    wait_until((tmp_path / "cleaning").exists)
    os.write(terminal, b"\x03")  # quickly
    output = b""
    while b"once more" not in output:
        output += os.read(terminal, 4096)
    time.sleep(SAME_REQUEST_S)
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(terminal, 4096):
            output += part
    os.close(terminal)
    assert b"ended at once, without cleaning up" in output
    assert not (tmp_path / "cleaned").exists()
