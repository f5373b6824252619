"""Windows of half a second, for tests of what happens around that which is measured.

A test that tunes in its own process takes the fixture `short_windows`. One that starts `tuner` puts
the folder of `program` first on its PATH.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import astuple
from pathlib import Path

from tests.support.commands import write_program
from tuner.workload.records.probe import WindowPolicy

SHORT = WindowPolicy(min_s=0.3, max_s=0.5, settle_s=0.2, idle_s=0.1)


def shorten() -> None:
    """Let the windows of this process be short where nobody says how long."""
    WindowPolicy.__init__.__defaults__ = astuple(SHORT)


def program(folder: Path) -> Path:
    """Write `tuner` with short windows into a folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "short.py").write_text(
        "import sys\n"
        "from tests.support.windows import shorten\n"
        "shorten()\n"
        "from tuner.cli.main import main\n"
        "sys.exit(main())\n"
    )
    words = shlex.join([sys.executable, str(folder / "short.py")])
    write_program(folder / "tuner", f'#!/bin/sh\nexec {words} "$@"\n')
    return folder
