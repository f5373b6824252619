"""Files of a run's probes: the trace, pending records, and the timelines of power.

The trace, an append-only file of a JSON line for each probe, is the state: resume, replay and
report all read it. A record is on disk (fsynced) before it is used. A broken line before the last
is an error: then the file was edited. Beside a probe's own files are its record until it is in the
trace, saved after every window so that a dead driver's is found (`recover_pending`), and its phase
while it runs, one short line for the live view: "measuring 2 of 4 at 1050MHz".
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

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import strict_json
from tuner.search_spaces.safe_files import (
    make_folder,
    open_plain,
    open_to_read,
    read_bytes,
    write_bytes,
    write_text,
)
from tuner.workload.records.probe import (
    Failure,
    Measurement,
    MeterInfo,
    PowerSample,
    ProbeRecord,
    ProbeRequest,
)

#: What is read of a trace, which may come from anybody: a line of so many brackets would take the
#: hundredfold of it in memory. A record of a thousand windows has a tenth of the line's limit.
MAX_BYTES, MAX_LINE_BYTES = 256 * 2**20, 8 * 2**20


@dataclass(frozen=True)
class TraceContents:
    """Probes of a trace, in the order in which they ended, and notes on recovery."""

    records: tuple[ProbeRecord, ...]
    notes: tuple[str, ...] = ()


def _torn_tail(data: bytes) -> int | None:
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
    """Repair a file of JSON lines after a crash; return sentences on the repairs.

    A torn last line is moved to `<path>.torn` (appended there, so nothing is lost); one that only
    lacks its newline gets it. A missing file is whole.
    """
    if not path.exists():
        return ()
    data = path.read_bytes()
    start = _torn_tail(data)
    notes: tuple[str, ...] = ()
    if start is None and (not data or data.endswith(b"\n")):
        return notes
    with open(open_plain(path, os.O_RDWR), "r+b") as file:
        if start is not None:
            torn = path.with_name(path.name + ".torn")
            with open(open_plain(torn, os.O_CREAT | os.O_APPEND), "ab") as aside:
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


class TraceWriter:
    """Writer that appends probe records to a trace; usable as a context manager.

    Opening repairs what a crash left (`repair_torn_tail`) and reserves a little disk for the last
    record. InputError if the file cannot be opened for writing, or the disk is full.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            make_folder(self.path.parent, inside=self.path.parent.parent)
            self.notes = repair_torn_tail(self.path)
            self._fd = open_plain(self.path, os.O_CREAT | os.O_APPEND)
            folder = os.open(self.path.parent, os.O_RDONLY)
            os.fsync(folder)  # the file's name must outlive a crash, too
            os.close(folder)
            self._reserve = self.path.with_name(".reserve")
            self._reserve.unlink(missing_ok=True)
            with open(open_plain(self._reserve, os.O_CREAT | os.O_EXCL), "wb") as file:
                os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
        except OSError as error:
            raise InputError(f"cannot write the trace {self.path}: {error.strerror}") from error

    def append(self, record: ProbeRecord) -> None:
        """Write one record as one line and wait until it is on disk; InputError if it refuses.

        If the reserve was enough, the record is in the trace nevertheless, and the error says so.
        """
        try:
            self._write(record)
            drop_pending(self.path.parent.parent, record)
        except OSError as error:
            sentence = f"cannot write the trace {self.path}: {error.strerror}"
            try:
                self._reserve.unlink()
                self._write(record)
                drop_pending(self.path.parent.parent, record)
            except OSError:
                raise InputError(sentence) from error
            raise InputError(
                f"{sentence}; every finished probe is in it, the last thanks to reserved disk, so "
                "the same command continues from here once there is room"
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
        """Close the file and release the reserve. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            with contextlib.suppress(OSError):
                self._reserve.unlink()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_trace(path: str | Path) -> TraceContents:
    """Read a trace without changing it. A truncated last line is left out and noted.

    InputError, which names the line, if the file cannot be read or is too large, a line before
    the last is broken, or a record's schema is newer than this release reads.
    """
    path = Path(path)
    try:
        data = read_bytes(path, MAX_BYTES)
    except OSError as error:
        raise InputError(f"cannot read the trace {path}: {error.strerror}") from error
    longest = max(map(len, data.split(b"\n")))
    if len(data) > MAX_BYTES or longest > MAX_LINE_BYTES:
        limits = f"{MAX_BYTES // 2**20} MiB and {MAX_LINE_BYTES // 2**20} MiB a line"
        raise InputError(f"the trace {path} is larger than any that tuner writes ({limits})")
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


def compact(record: ProbeRecord) -> ProbeRecord:
    """Drop values of a record that only the answer needs: step times alone take 16 KiB."""
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
            )
            for m in record.measurements
        ),
        environment={},
        failure=record.failure and replace(record.failure, log_tail=""),
    )


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
    """Call `save_pending` if there is a folder, unless it is an inspection; never fail."""
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
            record = ProbeRecord.from_json(json.loads(read_bytes(path, MAX_LINE_BYTES)))
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


def write_power_samples(
    run_dir: str | Path,
    probe_id: str,
    samples: Iterable[PowerSample],
    *,
    since_s: float = 0.0,
    phases: Iterable[tuple[float, str]] = (),
) -> Path | None:
    """Write a probe's power timeline as `<run_dir>/trace/power/<probe_id>.csv.gz`, if any.

    A phase mark of the training program is a row of its own: its time and its name.
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
    make_folder(path.parent, inside=run_dir)
    write_bytes(path, gzip.compress(text.getvalue().encode(), mtime=0))
    return path


#: The most that one probe's power timeline may hold, in bytes once unpacked and in values: hours of
#: ten samples a second of eight devices. A small gzip file may unpack to any size.
MAX_POWER_BYTES, MAX_POWER_VALUES = 64 * 2**20, 4_000_000


def read_power(path: str | Path) -> tuple[list[PowerSample], list[tuple[float, str]]]:
    """Read the samples and (seconds, phase) marks that `write_power_samples` wrote.

    InputError if the file is no such table, or exceeds `MAX_POWER_BYTES` or `MAX_POWER_VALUES`.
    """
    samples: list[PowerSample] = []
    marks: list[tuple[float, str]] = []
    try:
        with open(open_to_read(path), "rb") as file, gzip.open(file, "rb") as packed:
            data = packed.read(MAX_POWER_BYTES + 1)
        if (
            len(data) > MAX_POWER_BYTES
            or data.count(b",") + data.count(b"\n") + data.count(b"\r") > MAX_POWER_VALUES
        ):
            raise ValueError(
                f"it holds more than {MAX_POWER_BYTES // 2**20} MiB unpacked or "
                f"{MAX_POWER_VALUES:,} values, the most that is read"
            )
        table = csv.reader(io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", newline=""))
        header = next(table, [])
        time, power = header.index("time_s"), header.index("power_W")
        phase = header.index("phase") if "phase" in header else None
        more = [(i, name) for i, name in enumerate(header) if i not in (time, power, phase)]
        for row in table:
            if not row:
                continue
            if len(row) != len(header):
                raise ValueError(f"line {table.line_num} has {len(row)} of {len(header)} values")
            if phase is not None and row[phase]:
                marks.append((float(row[time]), row[phase]))
            else:
                extra = {name: float(row[i]) for i, name in more if row[i]}
                samples.append(PowerSample(float(row[time]), float(row[power]), extra))
    except (OSError, EOFError, ValueError, csv.Error, zlib.error) as error:
        raise InputError(f"cannot read the power samples {path}: {error}") from error
    return samples, marks
