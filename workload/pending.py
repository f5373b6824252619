"""Files beside a probe's own: its record until it is in the trace, and its phase while it runs.

The record is saved after every window, so that a dead driver's is found (`recover_pending`). The
phase is one short line, "measuring 2 of 4 at 1050MHz", for the live view.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

from tuner.search_spaces.safe_files import make_folder, open_plain, write_text
from tuner.search_spaces.typed import strict_json
from tuner.workload.probe import Failure, Measurement, MeterInfo, ProbeRecord, ProbeRequest

#: The files' names, which no training script writes.
PENDING_NAME, PHASE_NAME = ".joulefront-record.json", ".joulefront-phase"
#: A longer phase is not ours.
_MOST_PHASE_BYTES = 100


def _path(run_dir: str | Path, probe_id: str, name: str = PENDING_NAME) -> Path:
    return Path(run_dir) / "probes" / probe_id / name


def save_pending(run_dir: str | Path, record: ProbeRecord) -> None:
    """Save a record beside its probe's files until the driver has it in the trace."""
    path = _path(run_dir, record.request.probe_id)
    make_folder(path.parent, inside=run_dir)
    write_text(path, json.dumps(strict_json(record.to_json()), default=str), durable=True)


_ENDED_FIRST = Failure("cancelled", "the session ended before the probe did")


def partial_record(
    request: ProbeRequest,
    measurements: Iterable[Measurement],
    meter: MeterInfo,
    failure: Failure = _ENDED_FIRST,
) -> ProbeRecord:
    """Make the record of a probe that did not end, with its windows' energy: the least it cost."""
    windows = tuple(measurements)
    spent_J = math.fsum(window.energy_J for window in windows)
    return ProbeRecord(request, windows, meter, failure, energy_J=spent_J)


def save_partial(run_dir: str | Path | None, record: ProbeRecord) -> None:
    """Call `save_pending` if there is a folder, for what is no inspection; never fail."""
    if run_dir is not None and not record.request.inspects:
        with contextlib.suppress(OSError):
            save_pending(run_dir, record)


def drop_pending(run_dir: str | Path, record: ProbeRecord) -> None:
    """Remove the file of `save_pending`, for the record is in the trace."""
    with contextlib.suppress(OSError):
        _path(run_dir, record.request.probe_id).unlink()


def recover_pending(run_dir: str | Path) -> tuple[ProbeRecord, ...]:
    """Return the records that never reached the trace, by the names of their probes."""
    found = []
    for path in sorted(Path(run_dir).glob(f"probes/*/{PENDING_NAME}")):
        with contextlib.suppress(OSError, ValueError, RecursionError):  # InputError is the second
            record = ProbeRecord.from_json(json.loads(path.read_text(encoding="utf-8")))
            if record.request.probe_id == path.parent.name:
                found.append(record)
    return tuple(found)


def write_phase(run_dir: str | Path, probe_id: str, phase: str) -> None:
    """Write the phase of a probe, or remove it if it is empty; without effect if it cannot be."""
    path = _path(run_dir, probe_id, PHASE_NAME)
    with contextlib.suppress(OSError):
        if phase:
            write_text(path, phase)
        else:
            path.unlink()


def read_phase(run_dir: str | Path, probe_id: str) -> str:
    """Return the phase of a probe; "" if it is unknown."""
    try:
        fd = open_plain(_path(run_dir, probe_id, PHASE_NAME), 0)
    except OSError:
        return ""
    with os.fdopen(fd, "rb") as file:
        return file.read(_MOST_PHASE_BYTES).decode(errors="replace")
