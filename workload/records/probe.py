"""Requests and records of probes: the protocol between a search and its runners.

A record says on what basis its figures rest (`Basis`), and which failure ended it. Where only time
is measured, a search counts `STAND_IN_W` at all times, so that least energy is least time. That
power is no figure: `without_energy` leaves it and whatever rests on it out of everything that is
written, and `with_stand_in` puts it back into a stored record that is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import Checked, dump_fields, option, read_fields
from tuner.search_spaces.knobs import by_stage, delivered_names


class Basis(StrEnum):
    """What figures rest on.

    Energy has a mark of its own besides (`MeterInfo.mark`): it may be estimated, or of a twin.
    """

    MEASURED = "measured"  #: probes that ran
    RECORDED = "recorded"  #: probes that ran before, from a trace, a table or past runs
    PREDICTED = "predicted"  #: the analytic models; nothing ran


#: A step that takes longer than this is a hang, unless longer steps are predicted.
STEP_LIMIT_S = 120.0
#: Time to the first step in an inspection, and at least in every probe: it may import, compile and
#: load a checkpoint.
FIRST_STEP_LIMIT_S = 300.0
#: A look at a script ends after a further step that takes as long as this, seconds.
LONG_STEP_S = 60.0
#: A probe as a whole, if no more is predicted.
PROBE_LIMIT_S = 300.0
#: A step may take so many times what is predicted, a launch what the inspection took.
STEP_MARGIN, LAUNCH_MARGIN = 10.0, 3.0
#: Steps of a launch before its first window: warm-up, settling.
STEPS_BEFORE = 5
#: A window that is measured to `WindowPolicy.search_se` may be this short, seconds; NVML counters
#: update about every 100 ms and read low in windows under 2 s (docs/measuring.md).
SEARCH_MIN_S = 3.0


@dataclass(frozen=True)
class WindowPolicy(Checked):
    """Length and precision of the measurement of a live setting."""

    #: 5 s are stable on NVML (ML.ENERGY blog; see docs/measuring.md).
    min_s: float = option(5.0, "shortest window", unit="s", least=0)
    min_steps: int = option(3, "smallest number of whole optimizer steps in a window", least=0)
    max_s: float = option(
        15.0, "end the window after this even if the target is missed", unit="s", least=0
    )
    target_se: float = option(
        0.01, "relative standard error of step time and of power that ends the window", least=0
    )
    settle_s: float = option(
        1.0, "run at a new live setting before the window opens", unit="s", least=0
    )
    idle_s: float = option(
        0.3, "measure the idle power before the ranks start; 0 for not at all", unit="s", least=0
    )
    check_drift: bool = option(
        True, "with several live settings, visit the first one again at the end"
    )
    search_se: float = option(
        0.05,
        "relative standard error that ends a window of the search",
        least=0,
    )

    @property
    def rough(self) -> WindowPolicy:
        """The policy of a measurement to `search_se`; this one where that is no less precise."""
        if self.search_se <= self.target_se:
            return self
        return replace(self, min_s=min(self.min_s, SEARCH_MIN_S), target_se=self.search_se)


@dataclass(frozen=True)
class ProbeLimits:
    """Time limits of one probe, seconds; of the first step from the start of the ranks."""

    first_step_s: float = FIRST_STEP_LIMIT_S
    step_s: float = STEP_LIMIT_S
    probe_s: float = PROBE_LIMIT_S


def limits_of(
    window: WindowPolicy,
    *,
    visits: int = 1,
    predicted_step_s: float = math.nan,
    inspected_s: float = 0.0,
    first_step_s: float | None = None,
    step_s: float | None = None,
    probe_s: float | None = None,
) -> ProbeLimits:
    """Return a probe's limits; those that the user set are taken as they are."""
    step = 0.0 if math.isnan(predicted_step_s) else predicted_step_s
    longest_step_s = max(STEP_LIMIT_S, STEP_MARGIN * step) if step_s is None else step_s
    if first_step_s is None:
        longer_s = max(0.0, longest_step_s - STEP_LIMIT_S)
        first_step_s = max(FIRST_STEP_LIMIT_S + longer_s, LAUNCH_MARGIN * inspected_s)
    if probe_s is None:
        # Windows may take three times what is predicted.
        each_s = window.settle_s + max(window.max_s, 3 * (window.min_steps + 1) * step)
        probe_s = first_step_s + 3 * STEPS_BEFORE * step + (visits + 1) * each_s
    return ProbeLimits(first_step_s, longest_step_s, probe_s)


#: Power that stands for an unknown one, watts.
STAND_IN_W = 1.0
_OF_ENERGY = re.compile(r"(?i:energy|power|carbon|hypervolume)|(^|_)[kM]?(J|W|Wh)(_|$)|^progress$")
#: What was chosen or asked, whose names may be knobs of power, and the meter itself.
_CHOSEN = ("launch", "live", "configuration", "request", "meter")


def of_energy(name: str) -> bool:
    """Return True if a name is that of a figure of energy or power."""
    return _OF_ENERGY.search(name) is not None


def without_energy(data: Any) -> Any:
    """Return JSON values, with every figure of energy or power null."""
    if isinstance(data, list):
        return [without_energy(each) for each in data]
    if not isinstance(data, Mapping):
        return data

    def kept(name: str, value: Any) -> Any:
        if name in _CHOSEN:
            return value
        return None if of_energy(name) else without_energy(value)

    return {name: kept(name, value) for name, value in data.items()}


def with_stand_in(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a stored record of time alone with the figures that a search counts with."""
    if record["meter"].get("scope") != "none":
        return record
    windows = []
    for window in record["measurements"]:
        kept = {name: value for name, value in window.items() if not of_energy(name)}
        counted_J = STAND_IN_W * window["window_s"]
        windows.append({**kept, "energy_J": counted_J, "power_W": STAND_IN_W})
    return {**record, "measurements": windows, "energy_J": STAND_IN_W * record["wall_s"]}


#: Version of a record's JSON. A reader takes this one and older ones
#: (`tuner.workload.records.trace`).
SCHEMA_VERSION = 1

#: What energy is charged: the GPU dies, the superchip modules, or whole nodes; "none" where nothing
#: tells it. Two scopes never share a front.
Scope = Literal["gpu", "module", "node", "none"]
ENERGY_SCOPES = ("gpu", "module", "node")


@dataclass(frozen=True)
class FailureClass:
    """Meaning of a kind of failure, and its evidence."""

    phrase: str
    #: What may not be tried again: every launch, as long as none was measured; every launch on more
    #: than one rank, every setting of the launch, or this setting; None: nothing.
    blames: Literal["program", "ranks", "launch", "setting"] | None
    evidence: str = ""  # by which `shown_by` finds it
    lacks_memory: bool = False  # a launch that needs less may run
    split: bool = False  # the batch may be split in a way that the script cannot train
    of_device: bool = False  # a damaged device may have caused it
    too_short: bool = False  # the training was over, and nothing failed


#: Of several causes that ranks report, the first here is the likeliest.
FAILURES: Mapping[str, FailureClass] = {
    # it could not meter, set or write, its GPUs are damaged, or others use them
    "node": FailureClass("node", None, evidence="hardware"),
    "out_of_memory": FailureClass(
        "out of memory", "launch", evidence="no memory", lacks_memory=True, split=True
    ),
    # on a file system, by a quota or in /dev/shm, which another launch may not fill
    "disk_full": FailureClass("no space left", "launch", evidence="no space"),
    # the script makes no process group, whatever the number of ranks
    "alone": FailureClass("no process group", "ranks", evidence="no group"),
    # a process that no launcher has started looks for its rank
    "no_rank": FailureClass("needs a launcher", "program", evidence="no rank"),
    # by the framework or a rule
    "refused": FailureClass("refused", "launch", evidence="refusal", split=True),
    # an error of joulefront's own in the program's process, which alone would have trained
    "hook": FailureClass("fault of joulefront's own hook", "launch", evidence="hook", split=True),
    "crash": FailureClass("crash", "launch", evidence="error", split=True, of_device=True),
    # the script trains fewer steps than a measurement takes
    "ended": FailureClass("too short", "program", split=True, too_short=True),
    # it ends without an error, and without a step
    "no_steps": FailureClass("no optimizer step", "program", split=True),
    # no step within the limit
    "hang": FailureClass("hang", "launch", of_device=True),
    "time_limit": FailureClass("time limit", "launch", of_device=True),
    "cancelled": FailureClass("cancelled", None),
    # the devices did not run as they were set, at any setting
    "not_taken": FailureClass("not taken", "setting"),
}


def failure_class(kind: str) -> FailureClass:
    """Return the entry of `FAILURES`; of an unknown kind, one that blames the setting alone."""
    return FAILURES.get(kind) or FailureClass(kind.replace("_", " "), "setting")


def shown_by(evidence: str) -> str:
    """Return the kind of failure for evidence that a rank's hook, or the kernel, reports."""
    return next((kind for kind, each in FAILURES.items() if each.evidence == evidence != ""), "")


#: Purposes of a launch that shows how a user's script trains: with the batch split differently
#: where that is possible, and as it is.
INSPECTIONS = ("inspection", "plain inspection")

#: A delivered clock this close to the one asked for, in MHz, is the one asked for: GPUs change
#: theirs in steps of 15 (NVIDIA) and the mean over a window is not a whole step.
SAME_CLOCK_MHZ = 7.5


@dataclass(frozen=True)
class ProbeRequest:
    """One launch to make and the live settings to visit in it; no settings change nothing.

    `purpose` is "baseline", "search", "verify", "probe", "training" or one of
    `INSPECTIONS`; limits of None are the defaults of `tuner.workload.records.probe`. If
    `extendable`, further settings may follow in the same launch
    (`NextSettings`). `front` is what measured configurations reach
    at the upper ends of their intervals, (s, J) of a step: a window that is shown to be beaten by
    one of them ends early.
    """

    probe_id: str
    launch: Settings
    live: tuple[Settings, ...] = (Settings(),)
    window: WindowPolicy = field(default_factory=WindowPolicy)
    time_limit_s: float = 300.0
    first_step_limit_s: float | None = None
    step_limit_s: float | None = None
    purpose: str = "search"
    extendable: bool = False
    front: tuple[tuple[float, float], ...] = ()

    @property
    def inspects(self) -> bool:
        """True if the launch ends after its first steps, to show how a user's script trains."""
        return self.purpose in INSPECTIONS

    def configurations(self) -> tuple[Configuration, ...]:
        """Return the configurations to visit, one for each live setting."""
        return tuple(Configuration(self.launch, live) for live in self.live)

    def limits(self, step_limit_s: float | None = None) -> ProbeLimits:
        """Return its time limits; `step_limit_s` replaces those of the steps."""
        return ProbeLimits(
            step_limit_s or self.first_step_limit_s or FIRST_STEP_LIMIT_S,
            step_limit_s or self.step_limit_s or STEP_LIMIT_S,
            self.time_limit_s,
        )

    def to_json(self) -> dict[str, Any]:
        data = dump_fields(self)
        if not data["front"]:
            del data["front"]
        return {**data, "open": True} if data.pop("extendable") else data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProbeRequest:
        """Read the output of `to_json`; InputError, KeyError, TypeError, ValueError if invalid."""
        name = data["probe_id"]
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name):
            # It names files of the run folder, and must not lead out of it.
            raise InputError(f"{name!r:.120} is not a valid probe name")
        return read_fields(
            cls,
            {**data, "extendable": data.get("open", False)},
            "request",
            launch=_settings,
            live=lambda live: tuple(map(_settings, live)),
            window=lambda window: read_fields(WindowPolicy, window, "window"),
            front=lambda pairs: tuple((float(time_s), float(joules)) for time_s, joules in pairs),
        )


def _settings(data: Any) -> Settings:
    return Settings.from_json(data, "a probe's settings")


@dataclass(frozen=True)
class MeterInfo:
    """Source of an energy figure; one that is estimated or of a twin is labelled wherever shown.

    `host` is what of the node besides the GPUs is charged to the job; empty if unknown. Sampled
    power checks the energy only if it is `independent`, another source. No figure of a twin
    (`tests.twin`) is a measurement. The samples hold the devices' clocks if it
    `tells_clocks`.
    """

    name: str
    scope: Scope
    source: str
    estimated: bool = False
    host: str = ""
    independent: bool = False
    twin: bool = False
    tells_clocks: bool = False

    @property
    def has_energy(self) -> bool:
        """False where nothing does: then no figure of energy or power is shown or kept."""
        return self.scope in ENERGY_SCOPES

    @property
    def sentence(self) -> str:
        """Description such as "energy: node scope, estimated (utilisation x envelope)"."""
        energy = self.shown(f"energy: {self.scope} scope, {self.label} ({self.source})")
        return energy or f"time alone ({self.source})"

    def shown(self, energy: str) -> str:
        """Return a text about energy or power, or "" where this meter has no such figure.

        With `known`, this decides which figures are left out of what is shown and written.
        """
        return energy if self.has_energy else ""

    def known(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return JSON values, with figures of energy and power null where there are none."""
        return data if self.has_energy else dict(without_energy(data))

    @property
    def basis(self) -> Basis:
        """Predicted if the analytic models answered: nothing ran."""
        return Basis.PREDICTED if self.name == "simulated" else Basis.MEASURED

    @property
    def mark(self) -> str:
        """The word beside every such figure, "estimated" or "twin"; empty if it was metered."""
        return "twin" if self.twin else "estimated" if self.estimated else ""

    @property
    def label(self) -> str:
        return self.mark or "metered"

    @property
    def marks(self) -> dict[str, bool]:
        """Marks by name, as records and reasons keep them: that of a twin only where it is one."""
        return {"estimated": self.estimated, **({"twin": True} if self.twin else {})}


@dataclass(frozen=True, slots=True)
class PowerSample:
    """Point of the power timeline: the power of all devices together, watts.

    `extra` holds means over them of "clock_MHz", "utilisation", ..., the hottest "temperature_C".
    """

    time_s: float
    power_W: float
    extra: Mapping[str, float] = field(default_factory=dict)


def _values(measurement: Measurement) -> tuple[Any, ...]:
    return tuple(getattr(measurement, each.name) for each in fields(measurement))


@dataclass(frozen=True)
class Measurement:
    """Figures of one window, of the whole job (all ranks, all nodes); NaN or None if unknown."""

    live: Settings
    steps: int  # whole optimizer steps
    window_s: float
    step_time_s: float
    energy_J: float  # between the window's boundaries
    power_W: float
    step_time_se_s: float = math.nan
    power_se_W: float = math.nan  # by blocks of whole steps, corrected for their correlation
    #: What the devices did, means over window and devices ({"clock_MHz": 1395}), and of each stage
    #: that was set by itself ("clock_MHz.0"). Models learn from this (`as_delivered`).
    delivered: Mapping[str, float] = field(default_factory=dict)
    peak_memory_bytes: int | None = None  # of the fullest rank
    temperature_C: float | None = None  # of the hottest device at the end
    flags: tuple[str, ...] = ()
    step_times_s: tuple[float, ...] = ()  # of more than 512 steps, means of runs of neighbours
    started_s: float = 0.0  # from the probe's start to the opening boundary
    sampled_energy_J: float = math.nan  # by integrated power samples: the check on `energy_J`
    power_blocks_W: tuple[float, ...] = ()  # by which energies of two windows are compared
    phases_s: Mapping[str, float] = field(default_factory=dict)  # mean of a step, as rank 0 marked
    #: Mean power of a superchip's parts ("gpu"), and in each phase ("forward: gpu"), which lies
    #: within `power_W` (`tuner.workload.node.measure.measurement`); empty if the meter tells none.
    parts_W: Mapping[str, float] = field(default_factory=dict)
    foreign_share: float = 0.0  # of the cores' time that other processes used meanwhile
    foreign_device: bool = False  # another process used a device meanwhile

    def __eq__(self, other: object) -> bool:
        # By tuples, in which an unknown figure equals itself, as generated methods compared up to
        # Python 3.12; from 3.13 on they compare the fields, and NaN equals nothing.
        if not isinstance(other, Measurement):
            return NotImplemented
        return _values(self) == _values(other)

    @property
    def energy_per_step_J(self) -> float:
        """Mean energy of a step, joules."""
        return self.power_W * self.step_time_s

    @property
    def step_time_rse(self) -> float:
        """The step time's relative standard error; NaN if unknown."""
        return self.step_time_se_s / self.step_time_s

    @property
    def power_rse(self) -> float:
        """The power's relative standard error; NaN if unknown."""
        return self.power_se_W / self.power_W

    @property
    def as_delivered(self) -> Settings:
        """The live setting with the clocks that ran; those that were not read back stay."""

        def ran_at(key: str, value: Any) -> Any:
            ran = self.delivered.get(key, value)
            differs = isinstance(value, int | float) and abs(ran - value) > SAME_CLOCK_MHZ
            return ran if differs else value

        live = dict(self.live)
        for name in ("clock_MHz", "memory_clock_MHz"):
            value = live.get(name)
            ran = tuple(ran_at(key, clock) for key, clock in delivered_names(name, value).items())
            if ran:
                live[name] = ran if by_stage(value) else ran[0]
        return Settings(live)

    def to_json(self) -> dict[str, Any]:
        return dump_fields(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        """Read the output of `to_json`; InputError or TypeError if invalid."""
        return read_fields(
            cls,
            data,
            "measurement",
            positive=("window_s", "step_time_s", "power_W"),
            live=_settings,
        )


#: Control sequences of ECMA-48: CSI, such as a colour; strings with their end, such as a hyperlink
#: (OSC 8); and short ones, such as a character set. An end that is missing hides no text.
_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\n\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
)


def without_styles(text: str) -> str:
    """Return the text that a terminal shows, without the sequences that style it."""
    return _SEQUENCES.sub("", text)


@dataclass(frozen=True)
class Failure:
    """Reason for which a probe ended early; `kind` is a key of `FAILURES`, or a later release's.

    Its words are plain text, without a terminal's styles. `frames` are those of an error, innermost
    first, each "torch/utils/checkpoint.py:backward"; of a file outside the packages only its own
    name.
    """

    kind: str
    message: str
    log_tail: str = ""
    frames: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("message", "log_tail"):
            object.__setattr__(self, name, without_styles(getattr(self, name)))

    @property
    def type(self) -> FailureClass:
        """Meaning of its kind."""
        return failure_class(self.kind)

    @property
    def place(self) -> str:
        """Signature of crashes with one cause: kind, type of the error, innermost frame."""
        raised = self.message.partition(":")[0] if self.frames else ""
        return " ".join([self.kind, raised, *self.frames[:1]])

    @property
    def sentence(self) -> str:
        """Kind and message in words."""
        return f"{self.type.phrase}: {self.message}"

    @property
    def outcome(self) -> str:
        """Kind in words, as what became of a probe."""
        return self.type.phrase if self.type.too_short else f"failed: {self.type.phrase}"

    @property
    def blames_configuration(self) -> bool:
        """True if the configuration may be the cause."""
        return self.type.blames is not None

    @property
    def of_node(self) -> bool:
        """True if it may not arise on another node."""
        return not self.blames_configuration and not self.was_cancelled

    @property
    def was_cancelled(self) -> bool:
        """True if the probe was ended from outside."""
        return self.kind == "cancelled"


#: Message of a failure of the kind "no_steps". Records of an earlier release, which had one kind
#: for this and for a training that is too short, are told apart by it.
WITHOUT_A_STEP = "the program ended by itself without an optimizer step"


def _failure_from_json(data: Any) -> Failure | None:
    if not data:
        return None
    failure = read_fields(Failure, data, "failure", frames=tuple)
    if failure.kind == "ended" and failure.message.startswith(WITHOUT_A_STEP):
        return replace(failure, kind="no_steps")
    return failure


@dataclass(frozen=True)
class UnappliedSetting:
    """Live setting that was visited and is not a data point, for the devices ran otherwise.

    `unsupported` are its knobs of which the devices take no value at all.
    """

    live: Settings
    message: str
    delivered: Mapping[str, float] = field(default_factory=dict)
    unsupported: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drift:
    """Difference of one live setting's two visits in one probe, an effect of warming up.

    Changes are relative (0.01 is 1 %), `apart_s` is seconds between openings; errors are NaN and
    `temperature_C`, of the hottest device, None if unknown.
    """

    live: Settings
    apart_s: float
    step_time: float
    step_time_se: float
    power: float = math.nan
    power_se: float = math.nan
    temperature_C: float | None = None

    @property
    def notable(self) -> bool:
        """More than 1 % and more than twice its error, in step time or in power."""
        pairs = ((self.step_time, self.step_time_se), (self.power, self.power_se))
        return any(abs(change) > max(0.01, 2 * se) for change, se in pairs if se == se)

    @property
    def sentence(self) -> str:
        """The drift as a phrase for people."""
        heat = f" and {self.temperature_C:+.0f} C" if self.temperature_C is not None else ""
        power = "" if math.isnan(self.power) else f", power {100 * self.power:+.1f} %"
        return (
            f"{self.live.short} visited again after {self.apart_s:.0f} s{heat}: step time "
            f"{100 * self.step_time:+.1f} %{power}"
        )


@dataclass(frozen=True)
class ProbeRecord:
    """Outcome of one probe. A failed probe keeps its measurements from before the failure.

    The request holds the settings that an extendable one visited besides; each visit has a
    measurement, in their order. The lease is the whole node, so energies hold its waiting devices.
    """

    request: ProbeRequest
    measurements: tuple[Measurement, ...]
    meter: MeterInfo
    failure: Failure | None = None
    launch_s: float = 0.0  # from the request to the first step after warm-up
    wall_s: float = 0.0
    energy_J: float = 0.0  # everything from the request to the end: what probing cost
    started_at: str = ""  # UTC, ISO 8601
    host: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)  # versions, what was rendered
    idle_W: float | None = None  # before the ranks started
    waiting_devices: int = 0  # that no rank used
    drift: Drift | None = None
    missed: tuple[UnappliedSetting, ...] = ()

    @property
    def ok(self) -> bool:
        """True if the probe is complete."""
        return self.failure is None

    @property
    def failed(self) -> bool:
        """True if something failed; a training that was over too soon did not."""
        return self.failure is not None and not self.failure.type.too_short

    @property
    def built_s(self) -> float:
        """Seconds for which the probe waited for a build, before its own time; 0 without one."""
        seconds = self.environment.get("built_s", 0.0)
        return float(seconds) if isinstance(seconds, int | float) else 0.0

    @property
    def compilation_s(self) -> float:
        """Seconds of the launch in which torch.compile compiled; 0.0 if it did not."""
        seconds = self.environment.get("compilation_s", 0.0)
        return float(seconds) if isinstance(seconds, int | float) else 0.0

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON, with the schema's version."""
        data = {"schema": SCHEMA_VERSION, **dump_fields(self)}
        return self.meter.known(data)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProbeRecord:
        """Read the output of `to_json`; InputError if invalid, or of a newer schema."""
        version = data.get("schema")
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise InputError(
                f"the record's schema is {version!r}; this release reads 1 to {SCHEMA_VERSION}"
            )
        try:
            return read_fields(
                cls,
                with_stand_in(data),
                "record",
                finite=("launch_s", "wall_s", "energy_J"),
                request=ProbeRequest.from_json,
                measurements=lambda parts: tuple(map(Measurement.from_json, parts)),
                meter=lambda part: read_fields(MeterInfo, part, "meter"),
                failure=_failure_from_json,
                drift=lambda part: (
                    read_fields(Drift, part, "drift", live=_settings) if part else None
                ),
                missed=lambda parts: tuple(
                    read_fields(UnappliedSetting, part, "missed setting", live=_settings)
                    for part in parts
                ),
            )
        except InputError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise InputError(f"the record is not a probe record: {error!r}") from error


#: Told a sentence for the user while something is under way.
Announce = Callable[[str], None]
#: Called when all settings of an extendable request are visited, with the request so far and its
#: measurements; returns further settings to visit in the same launch, none to end it.
NextSettings = Callable[[ProbeRequest, Sequence[Measurement]], Sequence[Settings]]


def extended(record: ProbeRecord, next_settings: NextSettings) -> ProbeRequest | None:
    """Return the record's request with its next settings added, or None if there are none."""
    more = next_settings(record.request, record.measurements) if record.ok else ()
    request = record.request
    return replace(request, live=(*request.live, *more)) if more else None


@runtime_checkable
class Runner(Protocol):
    """Measurer of probes: real, replayed or simulated."""

    meter: MeterInfo

    def run(self, request: ProbeRequest) -> ProbeRecord:
        """Run one probe; a failure is in its record. InputError if it names an unknown knob."""
        ...

    def run_interactive(self, request: ProbeRequest, next_settings: NextSettings) -> ProbeRecord:
        """Run one probe, which visits the settings that `next_settings` returns besides.

        A runner whose launches cost nothing runs the longer probe anew.
        """
        record = self.run(request)
        while (longer := extended(record, next_settings)) is not None:
            record = self.run(longer)
        return record

    def close(self) -> None:
        return None
