"""A run's metered power compared with a wall meter's or a BMC's series.

A wall meter has a clock of its own and averages over its own period, and it sees what the scope of
the run's meter leaves out: the host, fans, the losses of power supplies. The run's power timelines
are averaged over the wall meter's periods at every time offset; the offset at which the two move
together most is that of the clocks. A straight line through the pairs then says how many watts at
the wall come with each watt in the scope, and how many do not depend on it.

    python -m benchmarks.wall RUN FILE.csv
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure, arguments, publish
from tuner.formatting import common_mark
from tuner.problem.run_folder import RunFolder, find_run
from tuner.search_spaces.errors import InputError
from tuner.workload.trace import read_power, read_trace

#: Fewer pairs than this, or a lower correlation at the best offset, say nothing of the clocks. At
#: 0.8, the scope explains two thirds of the variance at the wall.
_MIN_PAIRS, _MIN_CORRELATION = 12, 0.8
#: Longest span between two power samples that is still one timeline, seconds.
_GAP_S = 2.0
#: Largest file that is read: a reading a second for about a month.
_MAX_BYTES = 128 * 2**20
_JOULES = {"w": 1.0, "watt": 1.0, "watts": 1.0, "kw": 1e3, "j": 1.0, "kj": 1e3, "wh": 3.6e3}
_JOULES |= {"kwh": 3.6e6}


@dataclass(frozen=True)
class WallSeries:
    """Mean power since the reading before; the first entry is not used."""

    time_s: np.ndarray
    power_W: np.ndarray
    column: str


@dataclass(frozen=True)
class WallCheck:
    """Comparison of a run's meter with the wall.

    `offset_s` is by how much the wall meter's clock is ahead; `gain` are the watts at the wall for
    each further watt in the scope, by least squares, its error widened by the autocorrelation of
    the residuals; `rest_W` are those that do not depend on the scope.
    """

    scope: str
    source: str
    offset_s: float
    offset_error_s: float
    correlation: float
    pairs: int
    period_s: float
    wall_W: float
    scope_W: float
    gain: float
    gain_se: float
    rest_W: float
    column: str

    @property
    def coverage(self) -> float:
        """Share of the wall's energy that the scope counted."""
        return self.scope_W / self.wall_W

    def lines(self) -> list[str]:
        """Return the comparison as lines in two columns."""
        low, high = self.gain - 2 * self.gain_se, self.gain + 2 * self.gain_se
        return [
            f"wall        column {self.column!r}: {self.pairs} periods of {self.period_s:.3g} s "
            "that the run covers",
            f"clocks      the wall meter's is {self.offset_s:+.2f} s ahead, to "
            f"{self.offset_error_s:.2g} s (correlation {self.correlation:.3f})",
            f"power       {self.wall_W:.1f} W at the wall, {self.scope_W:.1f} W in the scope "
            f"({self.scope}: {self.source})",
            f"coverage    the scope counted {100 * self.coverage:.1f} % of the wall's energy",
            f"gain        {self.gain:.3f} W at the wall for each W in the scope "
            f"[{low:.3f}, {high:.3f}]",
            f"rest        {self.rest_W:.1f} W at the wall do not depend on the scope",
        ]


def read_wall(path: str | Path) -> WallSeries:
    """Read a wall meter's CSV file.

    It needs one column of times (its name holds "time" or "date"): ISO 8601, or seconds since 1970;
    a time without a zone is this machine's. Of power or energy it needs one column with its unit in
    the name: W, kW (mean power or a reading), J, kJ, Wh, kWh (a counter, which only grows).

    Raises:
        InputError: the file cannot be read or is too large, a column is missing or ambiguous, or a
            cell is not what its column holds.
    """
    path = Path(path)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InputError(f"{path} is larger than {_MAX_BYTES // 2**20} MiB")
        rows = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from (
            error
        )
    if len(rows) < 2:
        raise InputError(f"{path} holds no readings below a header")
    header = [name.strip() for name in rows[0]]
    when = _only(path, header, "time", lambda name: bool(re.search(r"time|date", name, re.I)))
    what = _only(path, header, "power or energy with its unit (W, kW, J, Wh, kWh)", _unit)
    unit = _unit(header[what])
    times, values = [], []
    for number, row in enumerate(rows[1:], start=2):
        if not any(cell.strip() for cell in row):
            continue
        try:
            times.append(_seconds(row[when].strip()))
            values.append(float(row[what]) * _JOULES[unit])
        except (IndexError, ValueError) as error:
            raise InputError(f"{path} line {number}: {error}") from error
    time_s, value = np.array(times), np.array(values)
    order = np.argsort(time_s, kind="stable")
    time_s, value = time_s[order], value[order]
    keep = np.append(True, np.diff(time_s) > 0)
    time_s, value = time_s[keep], value[keep]
    if len(time_s) < _MIN_PAIRS or not (np.isfinite(time_s).all() and np.isfinite(value).all()):
        raise InputError(f"{path} holds fewer than {_MIN_PAIRS} readings at different times")
    if unit not in ("w", "watt", "watts", "kw"):
        joules = np.diff(value)
        if (joules < 0).any():
            raise InputError(f"{path}: the counter {header[what]!r} falls; cut the file there")
        value = np.append(math.nan, joules / np.diff(time_s))
    return WallSeries(time_s, value, header[what])


def _unit(name: str) -> str:
    """Return the unit in a column's name, in lower case; empty if there is none."""
    words = re.split(r"[^A-Za-z]+", name)
    return next((word.lower() for word in reversed(words) if word.lower() in _JOULES), "")


def _only(path: Path, header: Sequence[str], what: str, fits: Callable[[str], object]) -> int:
    found = [index for index, name in enumerate(header) if fits(name)]
    if len(found) != 1:
        names = ", ".join(header[index] for index in found) or "none"
        raise InputError(f"{path} must have one column of {what}; it has {names}")
    return found[0]


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).astimezone(UTC).timestamp()


def compare_with_wall(
    run: RunFolder, wall: str | Path, *, max_offset_s: float = 600.0
) -> WallCheck:
    """Compare the power timelines of a run with a wall meter's series.

    Raises:
        InputError: a file cannot be read, the run has no metered timeline, or the two series have
            too little in common.
    """
    series = read_wall(wall)
    records = [record for record in read_trace(run.trace).records if record.started_at]
    if mark := common_mark(record.meter for record in records):
        raise InputError(f"{run.name} was not metered: its power is marked {mark!r}")
    meter = records[0].meter
    return _aligned(_Timeline.of(run, records), series, max_offset_s, meter.scope, meter.source)


class _Timeline:
    """Energy over time of the scope, over all probes, which knows where it has gaps.

    Args:
        time_s: of the samples, ascending, (n,).
        power_W: (n,).
    """

    def __init__(self, time_s: np.ndarray, power_W: np.ndarray) -> None:
        steps = np.diff(time_s)
        gaps = steps > _GAP_S
        means = (power_W[1:] + power_W[:-1]) / 2
        self.time_s = time_s
        self._energy_J = np.append(0.0, np.cumsum(np.where(gaps, 0.0, steps * means)))
        self._missing_s = np.append(0.0, np.cumsum(np.where(gaps, steps, 0.0)))

    @classmethod
    def of(cls, run: RunFolder, records: Sequence[Any]) -> _Timeline:
        """Return the timeline of a run.

        Raises:
            InputError: no probe has power samples.
        """
        times: list[float] = []
        powers: list[float] = []
        for record in sorted(records, key=lambda record: record.started_at):
            path = run.path / "trace" / "power" / f"{record.request.probe_id}.csv.gz"
            if not path.is_file():
                continue
            began = datetime.fromisoformat(record.started_at).timestamp()
            samples, _ = read_power(path)
            for sample in samples:
                if not times or began + sample.time_s > times[-1]:
                    times.append(began + sample.time_s)
                    powers.append(sample.power_W)
        if len(times) < 2:
            raise InputError(f"{run.name} has no power samples, so nothing can be compared")
        return cls(np.array(times), np.array(powers))

    def means(self, time_s: np.ndarray) -> np.ndarray:
        """Return the mean power between consecutive times; NaN where samples are missing."""
        inside = (time_s >= self.time_s[0]) & (time_s <= self.time_s[-1])
        energy = np.diff(np.interp(time_s, self.time_s, self._energy_J))
        missing = np.diff(np.interp(time_s, self.time_s, self._missing_s))
        known = inside[1:] & inside[:-1] & (missing == 0)
        return np.where(known, energy / np.diff(time_s), math.nan)


def _aligned(
    timeline: _Timeline, series: WallSeries, max_offset_s: float, scope: str, source: str
) -> WallCheck:
    period_s = float(np.median(np.diff(series.time_s)))
    best, step = (-1.0, 0.0), max(period_s / 2, 0.5)
    offsets = np.arange(-max_offset_s, max_offset_s + step, step)
    for _ in range(4):
        for offset in offsets:
            best = max(best, (_correlation(timeline, series, float(offset)), float(offset)))
        offsets = best[1] + np.linspace(-step, step, 11)
        step /= 5
    correlation, offset_s = best
    if correlation < 0:
        raise InputError(
            f"the wall meter's readings and the run share fewer than {_MIN_PAIRS} periods within "
            f"{max_offset_s:g} s of each other's time; is it the same day and time zone?"
        )
    if correlation < _MIN_CORRELATION:
        raise InputError(
            f"the wall meter's readings do not follow the run's power: correlation "
            f"{correlation:.2f} at the best of all offsets up to {max_offset_s:g} s; is it this "
            "machine's meter, and was anything else running?"
        )
    scope_W, wall_W = _pairs(timeline, series, offset_s)
    gain, rest_W = np.polyfit(scope_W, wall_W, 1)
    return WallCheck(
        scope=scope,
        source=source,
        offset_s=offset_s,
        offset_error_s=step * 2.5,
        correlation=correlation,
        pairs=len(wall_W),
        period_s=period_s,
        wall_W=float(wall_W.mean()),
        scope_W=float(scope_W.mean()),
        gain=float(gain),
        gain_se=_slope_error(scope_W, wall_W - gain * scope_W - rest_W),
        rest_W=float(rest_W),
        column=series.column,
    )


def _pairs(
    timeline: _Timeline, series: WallSeries, offset_s: float
) -> tuple[np.ndarray, np.ndarray]:
    scope_W = timeline.means(series.time_s - offset_s)
    known = np.isfinite(scope_W) & np.isfinite(series.power_W[1:])
    return scope_W[known], series.power_W[1:][known]


def _correlation(timeline: _Timeline, series: WallSeries, offset_s: float) -> float:
    """Return the correlation at an offset; -1 where it is not defined."""
    scope_W, wall_W = _pairs(timeline, series, offset_s)
    if len(wall_W) < _MIN_PAIRS or scope_W.std() == 0 or wall_W.std() == 0:
        return -1.0
    return float(np.corrcoef(scope_W, wall_W)[0, 1])


def _slope_error(x: np.ndarray, residuals: np.ndarray) -> float:
    """Return the standard error of a slope under residuals of first-order autocorrelation.

    The variance is widened by (1 + r) / (1 - r), which is that of a mean of such residuals
    (Wilks, Statistical Methods in the Atmospheric Sciences, section 5.2.4).
    """
    n = len(x)
    variance = float(residuals @ residuals) / max(1, n - 2)
    spread = float(((x - x.mean()) ** 2).sum())
    total = float(residuals @ residuals)
    r = float(residuals[1:] @ residuals[:-1]) / total if total > 0 else 0.0
    r = min(max(r, 0.0), 0.95)
    return math.sqrt(variance / spread * (1 + r) / (1 - r))


def main() -> None:
    """Compare a run with a wall meter's file."""
    parser = arguments("a run's power against a wall meter's or a BMC's; nothing is started")
    parser.add_argument("run", help="name or folder of the run")
    parser.add_argument("file", help="CSV file: a column of times and one of power or energy")
    parser.add_argument("--runs-dir", default="runs", help="folder of the runs (default: runs)")
    parser.add_argument(
        "--max-offset-s",
        type=float,
        default=600.0,
        help="largest difference of the two clocks (default: 600)",
    )
    options = parser.parse_args()
    run = find_run(options.run, options.runs_dir)
    check = compare_with_wall(run, options.file, max_offset_s=options.max_offset_s)
    print("\n".join(check.lines()))
    publish(
        [
            Figure("wall_coverage", check.coverage, "ratio"),
            Figure("wall_gain", check.gain, "ratio"),
            Figure("wall_rest", check.rest_W, "W"),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
