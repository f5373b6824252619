"""Runners that answer from a recorded table or a trace instead of starting processes.

A visit's draw depends only on the seed, the configuration and the probe's name, so a resumed study
gets the same values.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from pathlib import Path
from typing import Protocol

import numpy as np

from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.workload.records.probe import Failure, Measurement, MeterInfo, ProbeRecord, ProbeRequest
from tuner.workload.records.runners import Runner
from tuner.workload.records.table import RecordedTable, TableGroup, TablePoint
from tuner.workload.records.trace import read_trace


def draws(seed: int, *names: str) -> np.random.Generator:
    """Return the generator of the draws that have these names."""
    text = "\n".join((str(seed), *names)).encode()
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text).digest()[:8], "big"))


def _never_recorded(missing: list[Settings], launch: Settings, where: str) -> Failure:
    return Failure(
        "refused",
        f"{where} never recorded {launch.short}"
        + (" at " + "; ".join(live.short for live in missing) if any(missing) else ""),
    )


class RecordingRunner(Runner, Protocol):
    """Runner that answers from a recording."""

    @property
    def probes(self) -> tuple[tuple[Configuration, ...], ...]:
        """The configurations of each recorded probe, in the recorded order."""
        ...


class TableRunner(RecordingRunner):
    """Runner that answers from one group of a recorded table.

    A visit draws from the point's repeats where there are several, else from its standard
    deviations, else from the table's [noise].
    """

    def __init__(self, table: RecordedTable, group: str | None = None, *, seed: int = 0) -> None:
        self.table = table
        self.group: TableGroup = table.group(group)
        self.seed = seed
        self.meter = MeterInfo(
            "table", table.scope, f"recorded table {table.name}", estimated=table.estimated
        )
        self._points = {point.configuration: point for point in self.group.points}

    @property
    def probes(self) -> tuple[tuple[Configuration, ...], ...]:
        """The configurations of each row, in the order of the file."""
        return tuple((point.configuration,) for point in self.group.points)

    def run(self, request: ProbeRequest) -> ProbeRecord:
        cost = self.table.cost
        visited: list[TablePoint] = []
        missing: list[Settings] = []
        measurements: list[Measurement] = []
        for configuration in request.configurations():
            point = self._points.get(configuration)
            if point is None:
                missing.append(configuration.live)
                continue
            # Its window opens after the launch, the settings before it and its own settling.
            opened_s = cost.wall_s(len(visited)) + cost.settle_s
            visited.append(point)
            measurements.append(self._measure(point, request.probe_id, opened_s))
        where = f"table {self.table.name!r}, {self.group.name},"
        return ProbeRecord(
            request=request,
            measurements=tuple(measurements),
            meter=self.meter,
            failure=_never_recorded(missing, request.launch, where) if missing else None,
            launch_s=cost.launch_s if visited else 0.0,
            wall_s=cost.wall_s(len(visited)) if visited else 0.0,
            energy_J=cost.energy_J(point.power_W for point in visited),
            host="replay",
            environment={"table": self.table.name, "group": self.group.name},
        )

    def _measure(self, point: TablePoint, probe_id: str, started_s: float) -> Measurement:
        draw = draws(self.seed, point.configuration.key, probe_id)
        time_s, power_W = point.time_s, point.power_W
        if len(point.repeats) > 1:
            time_s, power_W = point.repeats[int(draw.integers(len(point.repeats)))]
            time_sd = statistics.stdev(time for time, _ in point.repeats)
            power_sd = statistics.stdev(power for _, power in point.repeats)
        else:
            noise = self.table.noise
            time_sd = noise.time_cv * time_s if point.time_sd_s is None else point.time_sd_s
            power_sd = noise.power_cv * power_W if point.power_sd_W is None else point.power_sd_W
            # A spread beyond the mean itself would draw a negative time; half the mean is a floor.
            time_s = max(time_s + time_sd * draw.standard_normal(), time_s / 2)
            power_W = max(power_W + power_sd * draw.standard_normal(), power_W / 2)
        window_s = self.table.cost.window_s
        return Measurement(
            live=point.configuration.live,
            steps=max(1, int(window_s / time_s)),
            window_s=window_s,
            step_time_s=time_s,
            step_time_se_s=time_sd or math.nan,  # a table that tells no spread is not exact
            energy_J=power_W * window_s,
            power_W=power_W,
            power_se_W=power_sd or math.nan,
            started_s=started_s,
        )


class TraceRunner(RecordingRunner):
    """Runner that answers from a trace, or the run folder that holds one.

    One of a configuration's measurements is drawn. A launch that only ever failed fails again in
    the same way. InputError if the trace cannot be read, is empty, or mixes two scopes of energy.
    """

    def __init__(self, path: str | Path, *, seed: int = 0) -> None:
        path = Path(path)
        self.path = path / "trace" / "probes.jsonl" if path.is_dir() else path
        contents = read_trace(self.path)
        self.records, self.notes, self.seed = contents.records, contents.notes, seed
        if not self.records:
            raise InputError(f"the trace {self.path} holds no whole record; nothing to replay")
        scopes = sorted({record.meter.scope for record in self.records})
        if len(scopes) > 1:
            raise InputError(
                f"the trace {self.path} mixes the scopes {', '.join(scopes)}; "
                "a front charges one scope, so replay one of them"
            )
        self.meter = self.records[0].meter
        self._windows: dict[Configuration, list[tuple[Measurement, ProbeRecord]]] = {}
        self._failed: dict[Settings, ProbeRecord] = {}
        for record in self.records:
            launch = record.request.launch
            for measurement in record.measurements:
                key = Configuration(launch, measurement.live)
                self._windows.setdefault(key, []).append((measurement, record))
            if record.failure is not None and not record.failure.was_cancelled:
                self._failed.setdefault(launch, record)

    @property
    def probes(self) -> tuple[tuple[Configuration, ...], ...]:
        """The configurations of each recorded probe, in the order of the trace."""
        return tuple(tuple(record.request.configurations()) for record in self.records)

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        """Every requested configuration, measured or not, in the order of the trace."""
        requested = (c for record in self.records for c in record.request.configurations())
        return tuple(dict.fromkeys(requested))

    def run(self, request: ProbeRequest) -> ProbeRecord:
        drawn: list[tuple[Measurement, ProbeRecord]] = []
        missing: list[Settings] = []
        for configuration in request.configurations():
            windows = self._windows.get(configuration)
            if not windows:
                missing.append(configuration.live)
                continue
            draw = draws(self.seed, configuration.key, request.probe_id)
            drawn.append(windows[int(draw.integers(len(windows)))])
        failed, failure = self._failed.get(request.launch), None
        if missing:
            failure = (failed and failed.failure) or _never_recorded(
                missing, request.launch, f"the trace {self.path}"
            )
        origin = drawn[0][1] if drawn else failed
        if origin is None:
            return ProbeRecord(request, (), self.meter, failure, host="replay")
        if drawn:
            windows_J = math.fsum(m.energy_J for m in origin.measurements)
            launch_J = max(origin.energy_J - windows_J, 0.0)
            energy_J = launch_J + math.fsum(measurement.energy_J for measurement, _ in drawn)
            wall_s = origin.launch_s + math.fsum(
                max(record.wall_s - record.launch_s, 0.0) / len(record.measurements)
                for _, record in drawn
            )
        else:
            energy_J, wall_s = origin.energy_J, origin.wall_s
        return ProbeRecord(
            request=request,
            measurements=tuple(measurement for measurement, _ in drawn),
            meter=origin.meter,
            failure=failure,
            launch_s=origin.launch_s,
            wall_s=wall_s,
            energy_J=energy_J,
            host="replay",
            environment=origin.environment,
        )
