"""Waits for what another process does: for all of what a test asserts, for its parts come apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(holds: Callable[[], object], limit_s: float = 60.0, said: object = "") -> None:
    """Fail, with the text of the file `said` if it is one, unless `holds` within `limit_s`."""
    end_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() >= end_s:
            text = said.read_text()[-3000:] if isinstance(said, Path) else str(said)
            raise AssertionError(f"after {limit_s:g} s it had not happened: {text}")
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
