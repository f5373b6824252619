"""The trace: an append-only file of probe records, one JSON line a probe.

The log is the state: resume, replay and report all read it. A record is on disk (fsynced) before
anyone is told of it, so a crash can cost at most the probe that was running. A line that a crash
cut short is put aside on reopening, never overwritten; a line broken anywhere else is an error,
because then somebody edited the file and guessing would be worse than asking.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import math
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from search_spaces.errors import InputError
from workload.meters.base import PowerSample
from workload.probe import Failure, Measurement, MeterInfo, ProbeRecord, ProbeRequest

__all__ = [
    "TraceContents",
    "TraceWriter",
    "drop_kept",
    "keep_record",
    "kept_records",
    "lean",
    "put_by",
    "read_phases",
    "read_power_samples",
    "read_trace",
    "repair_torn_tail",
    "strict_json",
    "unfinished",
    "write_power_samples",
]


@dataclass(frozen=True)
class TraceContents:
    """What a trace holds.

    Attributes:
        records: the probes, in the order in which they ended.
        notes: what was recovered and how, one sentence each; empty for a sound file.
    """

    records: tuple[ProbeRecord, ...]
    notes: tuple[str, ...] = ()


def strict_json(value: Any) -> Any:
    """The same value with NaN and infinities as None, tuples as lists: what JSON can say."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): strict_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(part) for part in value]
    return value


def _torn_tail(data: bytes) -> int | None:
    """Offset at which a torn last line begins; None where the file ends soundly.

    A last line is torn when it is not a JSON object. One that only lacks its newline is whole.
    """
    end = len(data.rstrip(b"\n"))
    start = data.rfind(b"\n", 0, end) + 1
    if end <= start:
        return None
    try:
        whole = isinstance(json.loads(data[start:end]), dict)
    except (ValueError, RecursionError):
        whole = False
    return None if whole else start


def repair_torn_tail(path: Path) -> tuple[str, ...]:
    """Make a file of JSON lines whole again after a crash, before it is appended to.

    A torn last line is moved to `<path>.torn` (appended there, so nothing is lost); one that only
    lacks its newline gets it. Returns what was done, as sentences. A missing file is whole.

    Raises:
        OSError: the file cannot be read or written.
    """
    if not path.exists():
        return ()
    data = path.read_bytes()
    start = _torn_tail(data)
    notes: tuple[str, ...] = ()
    if start is None and (not data or data.endswith(b"\n")):
        return notes
    with path.open("r+b") as file:
        if start is not None:
            torn = path.with_name(path.name + ".torn")
            with torn.open("ab") as aside:
                aside.write(data[start:].rstrip(b"\n") + b"\n")
                aside.flush()
                os.fsync(aside.fileno())
            file.truncate(start)
            notes = (f"the torn last line of {path} was moved to {torn.name}",)
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())
    return notes


#: Disk that an open trace holds ready, so that a full disk does not cost the probe that just ended:
#: some hundred records of one window.
RESERVE_BYTES = 256 * 1024
#: The file of `keep_record`, by a name that no training script writes.
KEPT_NAME = ".joulefront-record.json"


class TraceWriter:
    """Appends probe records to a trace; usable as a context manager.

    Opening repairs what a crash left (`repair_torn_tail`) and puts a little disk by, which is given
    up when the disk is full: the record in hand is then still written before the writer refuses.

    Args:
        path: the trace, e.g. runs/NAME/trace/probes.jsonl; its folder is made.

    Attributes:
        notes: what was repaired, one sentence each.

    Raises:
        InputError: the file cannot be opened for writing, or the disk is full.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.notes = repair_torn_tail(self.path)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            folder = os.open(self.path.parent, os.O_RDONLY)
            os.fsync(folder)  # the file's name must outlive a crash, too
            os.close(folder)
            self._reserve = self.path.with_name(".reserve")
            with self._reserve.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
        except OSError as error:
            raise InputError(f"cannot write the trace {self.path}: {error.strerror}") from error

    def append(self, record: ProbeRecord) -> None:
        """Write one record as one line and wait until it is on disk.

        Raises:
            InputError: the disk refused. Where giving up the reserve helped, this record is in the
                trace all the same and the error says so; else the trace is left as it was before.
        """
        try:
            self._write(record)
            drop_kept(self.path.parent.parent, record)
        except OSError as error:
            said = f"cannot write the trace {self.path}: {error.strerror}"
            try:
                self._reserve.unlink()
                self._write(record)
                drop_kept(self.path.parent.parent, record)
            except OSError:
                raise InputError(said) from error
            raise InputError(
                f"{said}; every finished probe is in it, the last by the disk put by for it, so "
                "the same command goes on from here once there is room"
            ) from error

    def _write(self, record: ProbeRecord) -> None:
        line = json.dumps(strict_json(record.to_json()), default=str, separators=(",", ":"))
        data = memoryview((line + "\n").encode())
        size = os.fstat(self._fd).st_size
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            os.fsync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            with contextlib.suppress(OSError):
                self._reserve.unlink()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_trace(path: str | Path) -> TraceContents:
    """Read a trace without changing it. A truncated last line is dropped and said in the notes.

    Raises:
        InputError: the file cannot be read; a line before the last is broken; a record's schema is
            newer than this release reads. The sentence names the line.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the trace {path}: {error.strerror}") from error
    notes: list[str] = []
    start = _torn_tail(data)
    if start is not None:
        number = data.count(b"\n", 0, start) + 1
        notes.append(
            f"{path}: line {number}, the last, was truncated and is left out; "
            "the records before it are whole"
        )
        data = data[:start]
    records = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} line {number} is not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise InputError(f"{path} line {number} is not a probe record but {type(entry)}")
        try:
            records.append(ProbeRecord.from_json(entry))
        except InputError as error:
            raise InputError(f"{path} line {number}: {error}") from error
    return TraceContents(tuple(records), tuple(notes))


def lean(record: ProbeRecord) -> ProbeRecord:
    """What a driver keeps in memory of a record that is in the trace while it searches.

    Times of single steps, power of single blocks, phases, other scopes, the environment and the
    ranks' last words are for the answer and for people, and are read from the trace for them: a
    window of 512 steps holds 16 KiB of step times alone. What is kept once a probe shares the
    request's settings.
    """
    live = {setting: setting for setting in record.request.live}
    return replace(
        record,
        measurements=tuple(
            replace(
                m,
                live=live.get(m.live, m.live),
                step_times_s=(),
                power_blocks_W=(),
                phases_s={},
                beside_J={},
            )
            for m in record.measurements
        ),
        environment={},
        failure=record.failure and replace(record.failure, log_tail=""),
    )


def _kept(run_dir: str | Path, probe_id: str) -> Path:
    return Path(run_dir) / "probes" / probe_id / KEPT_NAME


def keep_record(run_dir: str | Path, record: ProbeRecord) -> None:
    """Put a record beside its probe's files until the driver has it in the trace.

    Written by whoever made it, before it is handed over: a driver that dies in between finds it
    again (`kept_records`).

    Raises:
        OSError: it cannot be written.
    """
    path = _kept(run_dir, record.request.probe_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{KEPT_NAME}.new")
    with draft.open("w", encoding="utf-8") as file:
        json.dump(strict_json(record.to_json()), file, default=str)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


#: Of a probe whose session ended first: nobody is to blame.
_ENDED_FIRST = Failure("cancelled", "the session ended before the probe did")


def unfinished(
    request: ProbeRequest,
    measurements: Iterable[Measurement],
    meter: MeterInfo,
    failure: Failure = _ENDED_FIRST,
) -> ProbeRecord:
    """The record of a probe that did not come to its end, with what is known to be measured.

    Its energy is that of the windows: the least that it has cost.

    Args:
        request: what was asked.
        measurements: what was measured.
        meter: by what.
        failure: how it ended; by default the session did.
    """
    windows = tuple(measurements)
    spent_J = math.fsum(window.energy_J for window in windows)
    return ProbeRecord(request, windows, meter, failure, energy_J=spent_J)


def put_by(run_dir: str | Path | None, record: ProbeRecord) -> None:
    """`keep_record` where there is a folder and room in it: a probe does not fail for its copy."""
    if run_dir is not None:
        with contextlib.suppress(OSError):
            keep_record(run_dir, record)


def drop_kept(run_dir: str | Path, record: ProbeRecord) -> None:
    """The record is in the trace: forget what `keep_record` put by."""
    with contextlib.suppress(OSError):
        _kept(run_dir, record.request.probe_id).unlink()


def kept_records(run_dir: str | Path) -> tuple[ProbeRecord, ...]:
    """The records that were made and never reached the trace, by the names of their probes.

    One that cannot be read is passed over: its driver was never told of it either.
    """
    found = []
    for path in sorted(Path(run_dir).glob(f"probes/*/{KEPT_NAME}")):
        with contextlib.suppress(OSError, ValueError, RecursionError):  # InputError is the second
            record = ProbeRecord.from_json(json.loads(path.read_text(encoding="utf-8")))
            if record.request.probe_id == path.parent.name:
                found.append(record)
    return tuple(found)


def write_power_samples(
    run_dir: str | Path,
    probe_id: str,
    samples: Iterable[PowerSample],
    *,
    since_s: float = 0.0,
    phases: Iterable[tuple[float, str]] = (),
) -> Path | None:
    """Write a probe's power timeline as `<run_dir>/trace/power/<probe_id>.csv.gz`.

    Columns: time_s, power_W, then whatever else the samples told, then phase. A phase mark of the
    training program is a row of its own: its time, its name and nothing else.

    Args:
        run_dir: the study's folder.
        probe_id: names the file.
        samples: the timeline.
        since_s: the probe's start on the samples' clock; times are written from there, seconds.
        phases: (time on the samples' clock, name of the part of the step that begins then).

    Returns:
        The path, or None where there was no sample.
    """
    rows = list(samples)
    if not rows:
        return None
    more = sorted({name for sample in rows for name in sample.extra})
    marks = list(phases)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["time_s", "power_W", *more, *["phase"] * bool(marks)])
    lines: list[tuple[float, list[str]]] = []
    for row in rows:
        extra = [f"{row.extra[name]:g}" if name in row.extra else "" for name in more]
        lines.append((row.time_s, [f"{row.power_W:.3f}", *extra, *[""] * bool(marks)]))
    lines += [(time_s, ["", *[""] * len(more), name]) for time_s, name in marks]
    for time_s, cells in sorted(lines, key=lambda line: line[0]):
        table.writerow([f"{time_s - since_s:.4f}", *cells])
    path = Path(run_dir) / "trace" / "power" / f"{probe_id}.csv.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    return path


def _power_rows(path: str | Path) -> list[dict[str, str]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, EOFError, ValueError, csv.Error, zlib.error) as error:
        raise InputError(f"cannot read the power samples {path}: {error}") from error


def read_power_samples(path: str | Path) -> list[PowerSample]:
    """Read what `write_power_samples` wrote, without the phase marks.

    Raises:
        InputError: the file is missing or is no such table.
    """
    try:
        return [
            PowerSample(
                time_s=float(row.pop("time_s")),
                power_W=float(row.pop("power_W")),
                extra={
                    name: float(value) for name, value in row.items() if value and name != "phase"
                },
            )
            for row in _power_rows(path)
            if not row.get("phase")
        ]
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"cannot read the power samples {path}: {error}") from error


def read_phases(path: str | Path) -> list[tuple[float, str]]:
    """The phase marks on a power timeline: (seconds since the probe's start, phase that begins).

    Raises:
        InputError: the file is missing or is no such table.
    """
    try:
        return [
            (float(row["time_s"]), row["phase"]) for row in _power_rows(path) if row.get("phase")
        ]
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"cannot read the power samples {path}: {error}") from error
