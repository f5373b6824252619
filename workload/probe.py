"""What is asked of a probe, and what it answers: the protocol that joins all rooms.

A *runner* takes a `ProbeRequest` and returns a `ProbeRecord`. Three exist: the real one
(`workload.agent`), the replay (`workload.replay`) and the simulation (`models.simulated`); whoever
calls them cannot tell them apart. A record never lies about its origin: the meter's scope, its
source and whether it is an estimate travel with every measurement.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

from search_spaces.configuration import Configuration, Settings
from search_spaces.errors import InputError
from search_spaces.typed import check_fields, plain_setting

__all__ = [
    "SCHEMA_VERSION",
    "Drift",
    "Failure",
    "FailureKind",
    "GoOn",
    "Measurement",
    "MeterInfo",
    "Missed",
    "OpenRunner",
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

FailureKind = Literal[
    "refused", "out_of_memory", "crash", "hang", "time_limit", "cancelled", "not_taken", "node"
]

#: A delivered clock this close to the one asked for, in MHz, is the one asked for: GPUs change
#: theirs in steps of 15 (NVIDIA) and the mean over a window is not a whole step.
SAME_CLOCK_MHZ = 7.5


@dataclass(frozen=True)
class WindowPolicy:
    """How long to measure each live setting.

    Attributes:
        min_s: the least length; NVML counters update about every 100 ms and windows under 2 s read
            low, 5 s are stable (ML.ENERGY blog; see docs/architecture.md).
        min_steps: the least number of whole optimizer steps.
        max_s: the window ends here even if the target is missed.
        target_se: relative standard error, of the step time and of the power, that ends the window.
        settle_s: run at a new live setting before the window opens.
        idle_s: how long the idle power is measured before the ranks start; 0: it is not.
        check_drift: where several live settings are visited, visit the first once more at the end.
    """

    min_s: float = 5.0
    min_steps: int = 3
    max_s: float = 15.0
    target_se: float = 0.01
    settle_s: float = 1.0
    idle_s: float = 0.3
    check_drift: bool = True


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
        open: once these are visited, whoever asked is asked what else to visit in the same launch
            (`GoOn`), until that is nothing.
    """

    probe_id: str
    launch: Settings
    live: tuple[Settings, ...] = (Settings(),)
    window: WindowPolicy = field(default_factory=WindowPolicy)
    time_limit_s: float = 300.0
    purpose: str = "search"
    open: bool = False

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
            **({"open": True} if self.open else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProbeRequest:
        name = data["probe_id"]
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name):
            # It names files of the run folder, and must not lead out of it.
            raise InputError(f"{name!r:.120} is no name of a probe")
        made = cls(
            probe_id=name,
            launch=_settings(data["launch"]),
            live=tuple(_settings(live) for live in data["live"]),
            window=check_fields(WindowPolicy(**data.get("window", {})), "window policy"),
            time_limit_s=data.get("time_limit_s", 300.0),
            purpose=data.get("purpose", "search"),
            open=data.get("open", False),
        )
        return check_fields(made, "request")


def _settings(data: Any) -> Settings:
    """The knobs that a file holds."""
    return Settings(plain_setting(data, "a probe's settings"))


@dataclass(frozen=True)
class MeterInfo:
    """Where a figure of energy comes from.

    Attributes:
        name: "nvml", "rapl", "estimated", "table", "simulated".
        scope: what is charged.
        source: one phrase for people: "NVML total-energy counter", "utilisation x envelope".
        estimated: True where nothing was metered. Such figures are labelled wherever shown.
        host: the host's share: what of the node besides the GPUs is charged to the job, and what
            is not; empty where nobody said.
        independent: True where sampled power is another source than the energy, so that the two
            check each other; False where one is computed from the other.
    """

    name: str
    scope: Scope
    source: str
    estimated: bool = False
    host: str = ""
    independent: bool = False


@dataclass(frozen=True)
class Measurement:
    """What one window recorded. All figures are of the whole job (all ranks, all nodes).

    Attributes:
        live: the live setting that was asked for.
        delivered: what the devices really did, means over the window and the devices
            ({"clock_MHz": 1395}), and of each stage where it was set by stage ("clock_MHz.0");
            empty where unknown. Models learn from this (`as_delivered`).
        steps: whole optimizer steps in the window.
        window_s: the window's length, seconds.
        step_time_s: mean time of a step, seconds.
        step_time_se_s: its standard error, seconds.
        energy_J: energy between the window's boundaries, joules.
        power_W: energy_J / window_s, watts.
        power_se_W: its standard error, watts, by blocks of whole steps and corrected for their
            correlation; NaN where one reading says nothing of the spread.
        peak_memory_bytes: the fullest rank's peak; None where unknown.
        temperature_C: the hottest device at the end; None where unknown.
        flags: what a reader must know ("throttled: thermal", "window shorter than 5 s").
        step_times_s: each step's time, seconds; of a window with more than 512 steps, the means of
            equal runs of neighbours.
        started_s: seconds from the probe's start to the window's opening boundary.
        sampled_energy_J: the same window by integrated power samples, joules: the check on
            `energy_J`; NaN where there were none.
        beside_J: the same window in other scopes, by meter name ({"hwmon": 5120.0}), joules. Shown
            beside `energy_J` and never added to it.
        power_blocks_W: mean power of blocks of whole steps, watts, in their order: what two
            windows' energies are compared by.
        phases_s: mean seconds that a step spent in each phase (`workload.phases` names them), as
            rank 0 marked them and, on CUDA, its device ran them; empty where nothing was marked.
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
    sampled_energy_J: float = math.nan
    beside_J: Mapping[str, float] = field(default_factory=dict)
    power_blocks_W: tuple[float, ...] = ()
    phases_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def energy_per_step_J(self) -> float:
        return self.power_W * self.step_time_s

    @property
    def step_time_rse(self) -> float:
        """The step time's relative standard error; NaN where it is not known."""
        return self.step_time_se_s / self.step_time_s

    @property
    def power_rse(self) -> float:
        """The power's relative standard error; NaN where it is not known."""
        return self.power_se_W / self.power_W

    @property
    def as_delivered(self) -> Settings:
        """The live setting as the devices delivered it: what a model is to learn from.

        A clock that was asked for is replaced by the one that ran; a knob that was left to the
        device, or of which nothing was read back, stays as it was asked for.
        """
        live = dict(self.live)
        for name in ("clock_MHz", "memory_clock_MHz"):
            asked = live.get(name)
            if isinstance(asked, tuple):
                stages = [self.delivered.get(f"{name}.{stage}") for stage in range(len(asked))]
                live[name] = tuple(
                    _ran_at(clock, ran) for clock, ran in zip(asked, stages, strict=True)
                )
            elif isinstance(asked, int | float):
                live[name] = _ran_at(asked, self.delivered.get(name))
        return Settings(live)

    def to_json(self) -> dict[str, Any]:
        data = asdict(replace(self, live=Settings()))
        data["live"] = self.live.to_json()
        for name in ("delivered", "beside_J", "phases_s"):
            data[name] = dict(getattr(self, name))
        for name, value in data.items():
            if isinstance(value, float) and not math.isfinite(value):
                data[name] = None  # JSON has no NaN
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        for name in ("step_time_se_s", "power_se_W", "sampled_energy_J"):
            if known.get(name) is None:
                known[name] = math.nan
        known["live"] = _settings(known["live"])
        for name in ("flags", "step_times_s", "power_blocks_W"):
            known[name] = tuple(known.get(name, ()))
        return check_fields(
            cls(**known), "measurement", positive=("window_s", "step_time_s", "power_W")
        )


def _ran_at(asked: Any, ran: float | None) -> Any:
    return asked if ran is None or abs(ran - asked) <= SAME_CLOCK_MHZ else ran


@dataclass(frozen=True)
class Failure:
    """Why a probe gave less than was asked.

    Attributes:
        kind: "refused" (the framework or a rule said no), "out_of_memory", "crash", "hang" (no step
            within the limit), "time_limit", "cancelled", "not_taken" (the devices did not run as
            they were set, at any setting), "node" (the node could not meter, set or write: nothing
            that the configuration is to blame for).
        message: one sentence.
        log_tail: the last lines the ranks printed.
    """

    kind: FailureKind
    message: str
    log_tail: str = ""


@dataclass(frozen=True)
class Missed:
    """A live setting that was visited and gave no measurement: no data point, and no secret.

    Attributes:
        live: the setting that was asked for.
        message: one sentence: why not.
        delivered: what the devices did instead.
    """

    live: Settings
    message: str
    delivered: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "live": self.live.to_json(),
            "message": self.message,
            "delivered": dict(self.delivered),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Missed:
        made = cls(_settings(data["live"]), data["message"], data.get("delivered", {}))
        return check_fields(made, "missed setting")


@dataclass(frozen=True)
class Drift:
    """How one live setting's two visits in one probe differ: what warming up did meanwhile.

    Attributes:
        live: the setting that was visited twice.
        apart_s: from the first window's opening to the second's, seconds.
        step_time: relative change of the step time from the first to the second (0.01 is 1 %).
        step_time_se: its standard error.
        power: relative change of the power.
        power_se: its standard error; NaN where a window's is unknown.
        temperature_C: change of the hottest device's temperature; None where unknown.
    """

    live: Settings
    apart_s: float
    step_time: float
    step_time_se: float
    power: float
    power_se: float
    temperature_C: float | None = None

    @classmethod
    def between(cls, first: Measurement, second: Measurement) -> Drift:
        """The drift from one visit of a setting to a later one."""

        def relative(a: float, a_se: float, b: float, b_se: float) -> tuple[float, float]:
            return b / a - 1, b / a * math.hypot(a_se / a, b_se / b)

        warmer = None
        if first.temperature_C is not None and second.temperature_C is not None:
            warmer = second.temperature_C - first.temperature_C
        return cls(
            first.live,
            second.started_s - first.started_s,
            *relative(
                first.step_time_s,
                first.step_time_se_s,
                second.step_time_s,
                second.step_time_se_s,
            ),
            *relative(first.power_W, first.power_se_W, second.power_W, second.power_se_W),
            temperature_C=warmer,
        )

    @property
    def notable(self) -> bool:
        """More than 1 % and more than twice its error, in step time or in power."""
        pairs = ((self.step_time, self.step_time_se), (self.power, self.power_se))
        return any(abs(change) > max(0.01, 2 * se) for change, se in pairs if se == se)

    @property
    def sentence(self) -> str:
        heat = f" and {self.temperature_C:+.0f} C" if self.temperature_C is not None else ""
        return (
            f"{self.live.key} visited again after {self.apart_s:.0f} s{heat}: step time "
            f"{100 * self.step_time:+.1f} %, power {100 * self.power:+.1f} %"
        )

    def to_json(self) -> dict[str, Any]:
        power_se = self.power_se if math.isfinite(self.power_se) else None
        return {**vars(self), "live": self.live.to_json(), "power_se": power_se}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Drift:
        power_se = data.get("power_se")
        made = cls(
            **{
                **data,
                "live": _settings(data["live"]),
                "power_se": math.nan if power_se is None else power_se,
            }
        )
        return check_fields(made, "drift")


@dataclass(frozen=True)
class ProbeRecord:
    """One probe as it went. A failed probe keeps what it had measured before it failed.

    Attributes:
        request: what was asked, with what an open request was told to visit besides.
        measurements: one a visit of a live setting, in the order of visiting; the setting that was
            visited twice has two.
        meter: where the energy figures come from.
        failure: None when all went well.
        launch_s: from the request to the first step after warm-up, seconds.
        wall_s: from the request to the end, seconds.
        energy_J: everything the probe drew from the request to the end, joules: what probing cost.
        started_at: UTC, ISO 8601.
        host: the lead node's name.
        environment: versions, device names, what was rendered (DeepSpeed JSON, argv).
        idle_W: what the meter's scope drew before the ranks started, watts; None where unknown.
        waiting_devices: devices of the lease that no rank used. The lease is the whole node, so
            what they drew is in every figure of energy here.
        drift: what the second visit of a setting showed; None where none was visited twice.
        missed: settings that were visited and are no data point.
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
    idle_W: float | None = None
    waiting_devices: int = 0
    drift: Drift | None = None
    missed: tuple[Missed, ...] = ()

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
            "idle_W": self.idle_W,
            "waiting_devices": self.waiting_devices,
            "drift": self.drift.to_json() if self.drift else None,
            "missed": [missed.to_json() for missed in self.missed],
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
            failure = Failure(**data["failure"]) if data.get("failure") else None
            made = cls(
                request=ProbeRequest.from_json(data["request"]),
                measurements=tuple(Measurement.from_json(m) for m in data["measurements"]),
                meter=check_fields(MeterInfo(**data["meter"]), "meter"),
                failure=failure and check_fields(failure, "failure"),
                launch_s=data.get("launch_s", 0.0),
                wall_s=data.get("wall_s", 0.0),
                energy_J=data.get("energy_J", 0.0),
                started_at=data.get("started_at", ""),
                host=data.get("host", ""),
                environment=data.get("environment", {}),
                idle_W=data.get("idle_W"),
                waiting_devices=data.get("waiting_devices", 0),
                drift=Drift.from_json(data["drift"]) if data.get("drift") else None,
                missed=tuple(Missed.from_json(missed) for missed in data.get("missed", ())),
            )
            return check_fields(made, "record", finite=("launch_s", "wall_s", "energy_J"))
        except InputError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
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


#: Asked when all settings of an open request are visited: the request as it stands and what was
#: measured; the answer is what else to visit in the same launch, nothing to end it.
GoOn = Callable[[ProbeRequest, Sequence[Measurement]], Sequence[Settings]]


@runtime_checkable
class OpenRunner(Runner, Protocol):
    """A runner whose launches stay up while it asks.

    One that computes its answers need not be one: it is run again with the longer list, and says of
    what it had visited the same.
    """

    def run_open(self, request: ProbeRequest, go_on: GoOn) -> ProbeRecord: ...
