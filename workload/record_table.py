"""The recorder: measures a space, or a random part of it, and writes a recorded table.

Every record goes to a trace, from which an interrupted recording continues.
"""

from __future__ import annotations

import csv
import io
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.search_spaces.safe_files import write_text
from tuner.workload.probe import ProbeRecord, ProbeRequest
from tuner.workload.runners import Runner
from tuner.workload.trace import TraceWriter, read_trace

#: A probe of a recording is killed after this.
PROBE_LIMIT_S = 600.0


def record_space(
    runner: Runner,
    candidates: Candidates,
    folder: str | Path,
    *,
    workload: str,
    hardware: str,
    sample: int | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda sentence: None,
) -> tuple[tuple[ProbeRecord, ...], int]:
    """Measure candidates, or a random `sample` of launches, into a new or continued table.

    Return the probes and the number of rows. The folder then holds table.csv, table.toml and
    trace/. Workload and hardware are the table's grouping columns.
    """
    folder = Path(folder)
    launches = list(candidates.launches)
    if sample is not None and (isinstance(sample, bool) or sample < 1):
        raise InvalidValue("sample", sample, f"an integer from 1 to {len(launches)}")
    random.Random(seed).shuffle(launches)  # drift must not be mistaken for a knob's effect
    launches = launches[:sample]
    trace = folder / "trace" / "probes.jsonl"
    records = list(read_trace(trace).records) if trace.exists() else []
    done = {record.request.launch for record in records}
    with TraceWriter(trace) as writer:
        for note in writer.notes:
            say(note)
        for number, launch in enumerate(launches, start=1):
            if launch in done:
                continue
            live = tuple(candidates[i].live for i in candidates.indices_of_launch(launch))
            request = ProbeRequest(
                probe_id=f"r{len(records):04d}",
                launch=launch,
                live=live,
                time_limit_s=PROBE_LIMIT_S,
                purpose="record",
            )
            say(f"{number} of {len(launches)}: {launch.short}")
            record = runner.run(request)
            writer.append(record)
            records.append(record)
            say(_outcome(record))
    return tuple(records), write_table(folder, records, workload=workload, hardware=hardware)


def _outcome(record: ProbeRecord) -> str:
    if record.failure is not None and not record.measurements:
        return f"   failed: {record.failure.kind}: {record.failure.message}"
    label = f" ({record.meter.mark})" if record.meter.mark else ""
    steps = ", ".join(
        f"{m.step_time_s:.4g} s a step at {m.power_W:.4g} W{label}" for m in record.measurements
    )
    return f"   {steps}; {record.wall_s:.1f} s, its launch {record.launch_s:.2f} s"


def write_table(
    folder: Path, records: Iterable[ProbeRecord], *, workload: str, hardware: str
) -> int:
    """Write the measurements as table.csv and table.toml; return the number of rows.

    A row holds mean and deviation of a configuration's windows. InputError if nothing was measured,
    or two meters or scopes are mixed.
    """
    measured = [record for record in records if record.measurements]
    if not measured:
        raise InputError(f"nothing was measured, so {folder} gets no table")
    meters = {(record.meter.name, record.meter.scope) for record in measured}
    if len(meters) > 1:
        raise InputError(
            f"the records of {folder} come from {len(meters)} meters; two never share a table"
        )
    points: dict[Configuration, list[tuple[float, float]]] = {}
    for record in measured:
        for m in record.measurements:
            key = Configuration(record.request.launch, m.live)
            points.setdefault(key, []).append((m.step_time_s, m.power_W))
    launch_knobs = sorted({name for configuration in points for name in configuration.launch})
    live_knobs = sorted({name for configuration in points for name in configuration.live})
    columns = ["workload", "hardware", *launch_knobs, *live_knobs]
    columns += ["windows", "step_time_s", "time_sd_s", "avg_power_W", "energy_J", "energy_sd_J"]
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    for configuration, windows in sorted(points.items(), key=lambda item: item[0].key):
        knobs = [_cell(configuration.get(name)) for name in (*launch_knobs, *live_knobs)]
        table.writerow([workload, hardware, *knobs, *_figures(windows)])
    write_text(folder / "table.csv", text.getvalue())
    write_text(folder / "table.toml", _toml(measured, launch_knobs, live_knobs, folder.name))
    return len(points)


def _cell(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _figures(windows: Sequence[tuple[float, float]]) -> list[str]:
    times = [time_s for time_s, _ in windows]
    energies = [time_s * power_W for time_s, power_W in windows]
    time_s, energy_J = statistics.fmean(times), statistics.fmean(energies)
    spreads = ["", ""]
    if len(windows) > 1:
        spreads = [f"{statistics.stdev(values):.6g}" for values in (times, energies)]
    power_W = energy_J / time_s
    return [
        str(len(windows)),
        *(f"{time_s:.6g}", spreads[0], f"{power_W:.6g}", f"{energy_J:.6g}", spreads[1]),
    ]


def _toml(
    measured: Sequence[ProbeRecord],
    launch_knobs: Sequence[str],
    live_knobs: Sequence[str],
    name: str,
) -> str:
    meter = measured[0].meter
    launch_s = statistics.median(record.launch_s for record in measured)
    settle_s = measured[0].request.window.settle_s if live_knobs else 0.0
    shares = []
    for record in measured:
        inside = sum(m.energy_J for m in record.measurements)
        outside_s = record.wall_s - sum(m.window_s for m in record.measurements)
        power_W = statistics.fmean(m.power_W for m in record.measurements)
        shares.append(max(0.0, (record.energy_J - inside) / (outside_s * power_W)))
    windows = [m for record in measured for m in record.measurements]
    errors = [m.step_time_rse for m in windows if m.step_time_se_s >= 0] or [0.0]
    power_errors = [m.power_rse for m in windows if m.power_se_W >= 0] or [0.0]
    quoted = ", ".join(f'"{name}"' for name in launch_knobs)
    live = ", ".join(f'"{name}"' for name in live_knobs)
    label = f"{meter.mark}, not metered: " if meter.mark else ""
    return f"""name = "{name}"
source = "recorded by joulefront's own recorder on {measured[0].host}, {measured[0].started_at}"
what = "energy {label}{meter.source}"
group_by = ["workload", "hardware"]
launch_knobs = [{quoted}]
live_knobs = [{live}]
unit_of_work = "optimizer step"
time_s = "step_time_s"
power_W = "avg_power_W"
energy_J = "energy_J"
time_sd_s = "time_sd_s"
energy_sd_J = "energy_sd_J"
energy_scope = "{meter.scope}"
estimated = {str(bool(meter.mark)).lower()}

[noise]                               # median relative standard error of the windows
time_cv = {statistics.median(errors):.4g}
power_cv = {statistics.median(power_errors):.4g}

[cost]                                # medians of these probes
launch_s = {launch_s:.4g}
launch_power = {statistics.median(shares):.4g}
settle_s = {settle_s:.4g}
window_s = {statistics.median(m.window_s for m in windows):.4g}
"""
