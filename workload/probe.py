"""What is asked of a probe, and what it answers: the protocol that joins all rooms.

A *runner* takes a `ProbeRequest` and returns a `ProbeRecord`. Three exist: the real one
(`workload.agent`), the replay (`workload.replay`) and the simulation (`models.simulated`); whoever
calls them cannot tell them apart. A record never lies about its origin: the meter's scope, its
source and whether it is an estimate travel with every measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

from search_spaces.configuration import Configuration, Settings
from search_spaces.errors import InputError

__all__ = [
    "SCHEMA_VERSION",
    "Failure",
    "FailureKind",
    "Measurement",
    "MeterInfo",
    "ProbeRecord",
    "ProbeRequest",
    "Runner",
    "Scope",
    "WindowPolicy",
]

#: Version of a record's JSON. A reader takes this one and older ones (`workload.trace`).
SCHEMA_VERSION = 1

#: What energy is charged: the GPU dies, the superchip modules, or whole nodes. Two scopes never
#: share a front.
Scope = Literal["gpu", "module", "node"]

FailureKind = Literal["refused", "out_of_memory", "crash", "hang", "time_limit", "cancelled"]


@dataclass(frozen=True)
class WindowPolicy:
    """How long to measure each live setting.

    Attributes:
        min_s: the least length; NVML counters update about every 100 ms and windows under 2 s read
            low, 5 s are stable (ML.ENERGY blog; see docs/architecture.md).
        min_steps: the least number of whole optimizer steps.
        max_s: the window ends here even if the target is missed.
        target_se: relative standard error of the step time that ends the window.
        settle_s: run at a new live setting before the window opens.
    """

    min_s: float = 5.0
    min_steps: int = 3
    max_s: float = 15.0
    target_se: float = 0.01
    settle_s: float = 1.0


@dataclass(frozen=True)
class ProbeRequest:
    """One launch to make and the live settings to visit in it.

    Attributes:
        probe_id: unique in the study, e.g. "p0007".
        launch: the launch knobs.
        live: the live settings to visit, in this order; one empty `Settings` means "as it stands".
        window: how long to measure each.
        time_limit_s: the whole probe is killed after this.
        purpose: why it runs: "baseline", "search", "remeasure", "probe".
    """

    probe_id: str
    launch: Settings
    live: tuple[Settings, ...] = (Settings(),)
    window: WindowPolicy = field(default_factory=WindowPolicy)
    time_limit_s: float = 300.0
    purpose: str = "search"

    def configurations(self) -> tuple[Configuration, ...]:
        return tuple(Configuration(self.launch, live) for live in self.live)

    def to_json(self) -> dict[str, Any]:
        return {
            "probe_id": self.probe_id,
            "launch": self.launch.to_json(),
            "live": [live.to_json() for live in self.live],
            "window": asdict(self.window),
            "time_limit_s": self.time_limit_s,
            "purpose": self.purpose,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProbeRequest:
        return cls(
            probe_id=data["probe_id"],
            launch=Settings(data["launch"]),
            live=tuple(Settings(live) for live in data["live"]),
            window=WindowPolicy(**data.get("window", {})),
            time_limit_s=data.get("time_limit_s", 300.0),
            purpose=data.get("purpose", "search"),
        )


@dataclass(frozen=True)
class MeterInfo:
    """Where a figure of energy comes from.

    Attributes:
        name: "nvml", "rapl", "estimated", "table", "simulated".
        scope: what is charged.
        source: one phrase for people: "NVML total-energy counter", "utilisation x envelope".
        estimated: True where nothing was metered. Such figures are labelled wherever shown.
    """

    name: str
    scope: Scope
    source: str
    estimated: bool = False


@dataclass(frozen=True)
class Measurement:
    """What one window recorded. All figures are of the whole job (all ranks, all nodes).

    Attributes:
        live: the live setting that was asked for.
        delivered: what the devices really did ({"clock_MHz": 1395}); empty where unknown.
        steps: whole optimizer steps in the window.
        window_s: the window's length, seconds.
        step_time_s: mean time of a step, seconds.
        step_time_se_s: its standard error, seconds.
        energy_J: energy between the window's boundaries, joules.
        power_W: energy_J / window_s, watts.
        power_se_W: its standard error, watts; NaN where one reading says nothing of the spread.
        peak_memory_bytes: the fullest rank's peak; None where unknown.
        temperature_C: the hottest device at the end; None where unknown.
        flags: what a reader must know ("throttled: thermal", "window shorter than 5 s").
        step_times_s: each step's time, seconds.
        started_s: seconds from the probe's start to the window's opening boundary.
    """

    live: Settings
    steps: int
    window_s: float
    step_time_s: float
    energy_J: float
    power_W: float
    step_time_se_s: float = math.nan
    power_se_W: float = math.nan
    delivered: Mapping[str, float] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    temperature_C: float | None = None
    flags: tuple[str, ...] = ()
    step_times_s: tuple[float, ...] = ()
    started_s: float = 0.0

    @property
    def energy_per_step_J(self) -> float:
        return self.power_W * self.step_time_s

    def to_json(self) -> dict[str, Any]:
        data = asdict(replace(self, live=Settings()))
        data["live"] = self.live.to_json()
        data["delivered"] = dict(self.delivered)
        for name, value in data.items():
            if isinstance(value, float) and not math.isfinite(value):
                data[name] = None  # JSON has no NaN
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        for name in ("step_time_se_s", "power_se_W"):
            if known.get(name) is None:
                known[name] = math.nan
        known["live"] = Settings(known["live"])
        known["flags"] = tuple(known.get("flags", ()))
        known["step_times_s"] = tuple(known.get("step_times_s", ()))
        return cls(**known)


@dataclass(frozen=True)
class Failure:
    """Why a probe gave less than was asked.

    Attributes:
        kind: "refused" (the framework or a rule said no), "out_of_memory", "crash", "hang" (no step
            within the limit), "time_limit", "cancelled".
        message: one sentence.
        log_tail: the last lines the ranks printed.
    """

    kind: FailureKind
    message: str
    log_tail: str = ""


@dataclass(frozen=True)
class ProbeRecord:
    """One probe as it went. A failed probe keeps what it had measured before it failed.

    Attributes:
        request: what was asked.
        measurements: one a live setting visited, in the order of visiting.
        meter: where the energy figures come from.
        failure: None when all went well.
        launch_s: from the request to the first step after warm-up, seconds.
        wall_s: from the request to the end, seconds.
        energy_J: everything the probe drew from the request to the end, joules: what probing cost.
        started_at: UTC, ISO 8601.
        host: the lead node's name.
        environment: versions, device names, what was rendered (DeepSpeed JSON, argv).
    """

    request: ProbeRequest
    measurements: tuple[Measurement, ...]
    meter: MeterInfo
    failure: Failure | None = None
    launch_s: float = 0.0
    wall_s: float = 0.0
    energy_J: float = 0.0
    started_at: str = ""
    host: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.failure is None

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA_VERSION,
            "request": self.request.to_json(),
            "measurements": [m.to_json() for m in self.measurements],
            "meter": asdict(self.meter),
            "failure": asdict(self.failure) if self.failure else None,
            "launch_s": self.launch_s,
            "wall_s": self.wall_s,
            "energy_J": self.energy_J,
            "started_at": self.started_at,
            "host": self.host,
            "environment": dict(self.environment),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProbeRecord:
        """Read one record.

        Raises:
            InputError: the schema is newer than this release reads, or a field is missing.
        """
        version = data.get("schema")
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise InputError(
                f"the record's schema is {version!r}; this release reads 1 to {SCHEMA_VERSION}"
            )
        try:
            return cls(
                request=ProbeRequest.from_json(data["request"]),
                measurements=tuple(Measurement.from_json(m) for m in data["measurements"]),
                meter=MeterInfo(**data["meter"]),
                failure=Failure(**data["failure"]) if data.get("failure") else None,
                launch_s=data.get("launch_s", 0.0),
                wall_s=data.get("wall_s", 0.0),
                energy_J=data.get("energy_J", 0.0),
                started_at=data.get("started_at", ""),
                host=data.get("host", ""),
                environment=data.get("environment", {}),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"the record is not a probe record: {error!r}") from error


@runtime_checkable
class Runner(Protocol):
    """Runs one probe and says what it cost.

    A runner never raises for a probe that fails; it returns a record with `failure` set. It raises
    `InputError` only for a request that makes no sense to it (a knob it does not know).
    """

    meter: MeterInfo

    def run(self, request: ProbeRequest) -> ProbeRecord: ...

    def close(self) -> None: ...
