"""What ranks tell their agent, a line each (`workload.hook` describes them), and their parser.

A program may write to the agent's socket itself, so a line is a message if it has the declared
shape, and nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NotRequired, TypedDict, get_type_hints

from tuner.search_spaces.fields import has_shape
from tuner.workload.records.probe import shown_by

#: A line that is longer comes from no rank, bytes.
MAX_LINE_BYTES = 8 * 2**20
#: More ranks than a machine has.
_MOST_RANKS = 2**20
_Pid = Annotated[int, range(1, 2**22 + 1)]  # the largest that Linux gives
_Count = Annotated[int, range(1, 2**53)]
_Size = Annotated[int, range(2**53)]


class Hello(TypedDict):
    """A process that trains: its number, and its world if the agent did not start it, else 0."""

    pid: _Pid
    world: Annotated[int, range(_MOST_RANKS + 1)]


class Imports(TypedDict):
    """The words of a process that has imported torch."""

    pid: _Pid
    words: list[str]


class SetReply(TypedDict, total=False):
    """What live knobs read after they were set, or why one was refused."""

    read: dict[str, Any]
    refused: str


class Peak(TypedDict):
    """Peaks of memory."""

    host_bytes: NotRequired[_Size]
    device_bytes: NotRequired[_Size]


class Failed(TypedDict):
    """An error of a process, with its evidence (`workload.records.probe.FAILURES`)."""

    evidence: str
    message: str
    effect: NotRequired[bool]
    frames: NotRequired[list[str]]


class Phase(TypedDict):
    """A phase of the step that begins."""

    name: str


class ParsedArgument(TypedDict):
    """An integer argument of the program."""

    options: list[str]
    value: int


class ParentProgram(TypedDict, total=False):
    """The program that started a rank by Python's means; {} if none did."""

    words: list[str]
    arguments: dict[str, ParsedArgument]
    named: dict[str, _Count]


class Process(TypedDict):
    """How a process of a command was started."""

    words: list[str]
    prefix: str
    began_s: float
    cwd: str
    environment: dict[str, str]
    program: ParentProgram
    threads: _Count
    cores: _Count
    imports: list[str]


class Busy(TypedDict):
    """Seconds of a step's parts in which the program's own thread ran."""

    took: NotRequired[float]
    waited: NotRequired[float]
    updated: NotRequired[float]


class Group(TypedDict):
    """Counts of one step (`workload.hook.batch_counts.StepCounts`)."""

    drawn: list[tuple[_Size, _Size | None, bool]]
    passes: _Size
    shapes: list[list[_Size]]
    loss: NotRequired[float | None]
    scale: NotRequired[float]
    took: NotRequired[float]
    waited: NotRequired[float]
    updated: NotRequired[float]
    busy: NotRequired[Busy]
    indices: NotRequired[list[int]]
    batches: NotRequired[list[int | None]]


class Loader(TypedDict):
    """How batches are read (`workload.hook.torch_settings.of_loader`)."""

    num_workers: _Size
    prefetch_factor: _Size | None
    items: bool
    own_sampler: str
    batch_on_device: bool
    pin_memory: NotRequired[bool]


class Kernels(TypedDict, total=False):
    """How an optimizer updates its parameters; {} if that is not known."""

    kernel: str
    kernels: list[str]
    on_device: bool


class Backend(TypedDict):
    """What cuDNN is set to, and whether the model has convolutions, which it computes."""

    benchmark: bool
    deterministic: bool
    convolutions: bool


class Length(TypedDict):
    """The steps of the whole training, as a framework states them."""

    steps: _Count
    by: str
    done: NotRequired[_Count]


class Facts(TypedDict, total=False):
    """What a rank has seen of its program (`workload.hook.state.seen`)."""

    counts: str | None
    length: Length
    grouped: bool
    rates: list[list[float]]
    owner: str
    steps_of: str
    others: dict[str, str]
    loader: Loader
    optimizer: Kernels
    reads_by: str
    backend: Backend
    zeroes: bool
    compiles: bool
    batch: list[_Size]
    tokens: bool
    compiled: bool
    can_checkpoint: bool
    checkpoints: bool
    model: dict[str, Any]
    owned: dict[str, int | None]
    micro_batch: _Count
    accumulation: _Count
    global_batch: _Count
    pipeline: bool
    stages: _Count
    config: dict[str, Any]
    client_optimizer: str
    training_data: bool
    process: Process
    groups: list[Group]
    first_batch: int | None
    samples: list[_Size | None]
    batch_norm: bool
    named: dict[str, _Count]
    arguments: dict[str, ParsedArgument]
    own: dict[str, Any]
    reads: list[str]
    live: dict[str, Any]


#: Facts that DeepSpeed's engine tells together.
OF_ENGINE = ("micro_batch", "accumulation", "global_batch")
#: Messages that are one table of JSON, by their kind. Of "facts" each that has its shape is kept.
TABLES: Mapping[str, Any] = {"set": SetReply, "facts": Facts, "peak": Peak, "fail": Failed}


@dataclass(frozen=True)
class Event:
    """A message of a rank, or the end of its process.

    Attributes:
        kind: "hello", "imports", "ready", "step", "at", "phase", "set", "facts", "peak", "fail" or
            "end" from a process itself, or "exit" when it ended.
        rank: -1 of a process that has not said its own.
        step: steps done (of "step" and "at"); the current one of "ready".
        time_s: CLOCK_MONOTONIC at the rank.
        detail: the table of its kind; {"code": n} of "exit".
    """

    kind: str
    rank: int = -1
    step: int = 0
    time_s: float = 0.0
    detail: Mapping[str, Any] = field(default_factory=dict)


def parsed(line: bytes) -> Event | None:
    """Return the message that a line is, None if it is none; only "hello" says its rank."""
    try:
        return _parsed(line.decode())
    except (ValueError, RecursionError):
        return None


def _parsed(line: str) -> Event | None:
    kind, _, rest = line.partition(" ")
    if kind == "hello":
        rank, pid, *worlds = map(int, rest.split())
        hello = {"pid": pid, "world": worlds[0] if worlds else 0}
        sound = rank in range(hello["world"] or _MOST_RANKS) and has_shape(hello, Hello)
        return Event(kind, rank, detail=hello) if sound else None
    if kind == "imports":
        pid_text, _, words = rest.partition(" ")
        imports = {"pid": int(pid_text), "words": json.loads(words)}
        return Event(kind, detail=imports) if has_shape(imports, Imports) else None
    if kind in ("step", "at", "ready"):
        step, at = rest.split()
        return (
            Event(kind, step=int(step), time_s=_finite(at)) if int(step) in range(2**53) else None
        )
    if kind == "facts":
        table = json.loads(rest)
        if not isinstance(table, dict):
            return None
        shapes = get_type_hints(Facts, include_extras=True)
        kept = {n: table[n] for n in shapes if n in table and has_shape(table[n], shapes[n])}
        if not {*OF_ENGINE} <= {*kept}:
            kept = {name: value for name, value in kept.items() if name not in OF_ENGINE}
        return Event(kind, detail=kept)
    if kind in TABLES:
        table = json.loads(rest)
        sound = has_shape(table, TABLES[kind])
        known = sound and (kind != "fail" or shown_by(table["evidence"]))
        return Event(kind, detail=table) if known else None
    if kind == "phase":
        name, _, at = rest.rpartition(" ")
        return Event(kind, time_s=_finite(at), detail={"name": name})
    return Event(kind) if kind == "end" else None


def _finite(text: str) -> float:
    time_s = float(text)
    if not math.isfinite(time_s):
        raise ValueError(f"the time {text}")
    return time_s
