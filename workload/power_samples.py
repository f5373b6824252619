"""Power timelines of probes as compressed CSV files of the run folder."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterable
from pathlib import Path

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import make_folder, write_bytes
from tuner.workload.meters.base import PowerSample


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
        with gzip.open(path, "rb") as packed:
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
