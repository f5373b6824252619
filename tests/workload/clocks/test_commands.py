"""Live knobs that commands set: confirmed, put back after the probe, and by the guard."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.declared import Knob
from tuner.testing.commands import finished
from tuner.workload.clocks.base import FixedGovernor, GovernorError, KnobRefused
from tuner.workload.clocks.commands import CommandGovernor

SET = ("cp", "{value}.txt", "now")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("0", "1", "7"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n")
    (tmp_path / "now").write_text("7\n")
    return tmp_path


def governor(folder: Path, *, read: tuple[str, ...] = ("cat", "now")) -> CommandGovernor:
    knob = Knob("level", (0, 1), baseline=0, live=True, set=SET, read=read)
    return CommandGovernor(FixedGovernor("fixed here"), [knob], folder)


def test_a_value_is_set_confirmed_and_put_back(folder: Path) -> None:
    made = governor(folder)
    applied = made.apply(Settings(level=1))
    assert ((folder / "now").read_text(), applied.notes) == ("1\n", ())
    made.apply(Settings())  # a setting without it
    assert (folder / "now").read_text() == "7\n"
    made.apply(Settings(level=0))
    made.restore()
    assert (folder / "now").read_text() == "7\n"
    made.close()


def test_what_nothing_reads_back_is_said_and_returns_to_the_baseline(folder: Path) -> None:
    made = governor(folder, read=())
    applied = made.apply(Settings(level=1))
    assert applied.notes == ("level was set by its command, and nothing reads it back",)
    made.restore()
    assert (folder / "now").read_text() == "0\n"


def test_another_value_read_back_is_refused_and_put_back(folder: Path) -> None:
    (folder / "1.txt").write_text("3\n")
    made = governor(folder)
    with pytest.raises(KnobRefused, match="level was set to 1, and its command reads '3'"):
        made.apply(Settings(level=1))
    assert (folder / "now").read_text() == "7\n"


def test_a_command_that_fails_is_one_sentence(folder: Path) -> None:
    (folder / "1.txt").unlink()
    made = governor(folder)
    with pytest.raises(KnobRefused, match="the command that sets level to 1 failed: cp: cannot"):
        made.apply(Settings(level=1))
    made = governor(folder, read=("no-such-command-here",))
    with pytest.raises(KnobRefused, match="the command that reads level did not run"):
        made.apply(Settings(level=1))


def test_what_cannot_be_put_back_is_told(folder: Path) -> None:
    made = governor(folder)
    made.apply(Settings(level=1))
    (folder / "7.txt").unlink()
    with pytest.raises(GovernorError, match="did not put a knob back: cp: cannot"):
        made.restore()


def test_the_guard_puts_back_what_a_killed_agent_has_set(folder: Path) -> None:
    program = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from tests.workload.clocks.test_commands import governor, Settings\n"
        "governor(Path(sys.argv[1])).apply(Settings(level=1))\n"
        "print(Path(sys.argv[1], 'now').read_text(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[3]
    ended = finished(
        [sys.executable, "-c", program, str(folder), str(root)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert ended.stdout.strip() == "1", ended.stderr
    until_s = time.monotonic() + 10
    while (folder / "now").read_text() != "7\n":
        assert time.monotonic() < until_s
        time.sleep(0.02)
