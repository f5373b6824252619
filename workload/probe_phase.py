"""Phase of a running probe, for a live view: "launching", "measuring 2 of 4 at 1050MHz".

The runner writes one short line beside the probe's files whenever the phase changes, and the driver
reads it when it draws. On nodes without a folder in common with the driver the phase is unknown.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tuner.search_spaces.safe_files import open_plain, write_text

#: The file's name, which no training script writes.
PHASE_NAME = ".joulefront-phase"
#: A longer line is not ours.
_MOST_BYTES = 100


def write_phase(run_dir: str | Path, probe_id: str, phase: str) -> None:
    """Write the phase of a probe, or remove it if it is empty; without effect if it cannot be."""
    path = _path(run_dir, probe_id)
    with contextlib.suppress(OSError):
        if phase:
            write_text(path, phase)
        else:
            path.unlink()


def read_phase(run_dir: str | Path, probe_id: str) -> str:
    """Return the phase of a probe; "" if it is unknown."""
    try:
        fd = open_plain(_path(run_dir, probe_id), 0)
    except OSError:
        return ""
    with os.fdopen(fd, "rb") as file:
        return file.read(_MOST_BYTES).decode(errors="replace")


def _path(run_dir: str | Path, probe_id: str) -> Path:
    return Path(run_dir) / "probes" / probe_id / PHASE_NAME
