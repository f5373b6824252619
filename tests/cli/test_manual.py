"""Manual pages: one for each command, with every option, in roff that groff reads silently."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tuner.cli.main import command_parser
from tuner.cli.manual import manual_pages, write_manual
from tuner.cli.reference import commands_of


def test_every_command_has_a_page_with_every_option() -> None:
    pages = manual_pages()
    commands = list(commands_of(command_parser()))
    assert len(pages) == len(commands) + 1
    for command in commands:
        page = pages[f"{command.prog.replace(' ', '-')}.1"].replace("\\-", "-")
        for action in command._actions:
            assert not [flag for flag in action.option_strings if flag not in page], command.prog
        assert command.prog.replace(" ", "-") in pages["tuner.1"].replace("\\-", "-")


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_finds_nothing_wrong(tmp_path: Path) -> None:
    paths = write_manual(tmp_path)
    for path in paths:
        done = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww", "-rLL=100n", str(path)],
            capture_output=True,
            text=True,
            check=True,
        )
        serious = [line for line in done.stderr.splitlines() if "can't break line" not in line]
        assert not serious, serious[:3]
        shown = re.sub(r"\x1b\[[0-9;]*m|.\x08", "", done.stdout)
        assert "NAME" in shown
        assert "\\" not in shown.replace("\\n", "")
