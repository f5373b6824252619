"""Plain facts about a script: its launcher, and the findings of one inspected launch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import Program
from tuner.search_spaces.knob_declarations import Knob
from tuner.search_spaces.knobs import KNOBS, Value

#: File of a probe's folder in which the lines of a job script are noted.
LINES = "lines.txt"
PLACEHOLDER = re.compile(r"\{(\w+)(?:=([^{}]*))?\}")
#: A script's global batch is the user's: the number of steps at another one is unknown.
LAUNCH = tuple(n for n, knob in KNOBS.items() if knob.kind == "launch" and n != "global_batch")
#: Knobs that say where a part of the training state lives, and their sections in DeepSpeed's JSON.
OFFLOADS = {"optimizer_offload": "offload_optimizer", "parameter_offload": "offload_param"}
#: The same in DeepSpeed's older spelling: a truth value for "cpu", and what belongs to it.
OLD_OFFLOADS = {
    "offload_optimizer": ("cpu_offload", "cpu_offload_use_pin_memory"),
    "offload_param": ("cpu_offload_param", "cpu_offload_use_pin_memory"),
}
#: Variable in front of a command.
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
#: Place of a value that is not kept; `${env:NAME}` is OmegaConf's own.
TAKEN = re.compile(r"(?<!\$)\{env:([A-Za-z_]\w*)\}")


def names_taken(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the variables that stand in texts for values that are not kept."""
    return tuple(dict.fromkeys(name for text in texts for name in TAKEN.findall(text)))


class Framework(Protocol):
    """Framework that is recognised in a command, in the installed version."""

    @property
    def driver(self) -> Any:
        """Its table, which only its own package reads."""
        ...

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str:
        """Name and version, for sentences."""
        ...

    @property
    def declared(self) -> Mapping[str, Knob]:
        """Knobs of its own, by name."""
        ...

    def applied(
        self,
        words: tuple[str, ...],
        cwd: Path,
        env: Mapping[str, str],
        *,
        devices: int,
        sequence_length: int,
        taken: Mapping[str, str],
    ) -> FrameworkKeys:
        """Return its keys in a command; `taken` knobs have placeholders of their own."""
        ...

    def to_json(self) -> str:
        """Convert to text for the study's file."""
        ...


class FrameworkKeys(Protocol):
    """Keys of a framework in one command, as today and under a configuration.

    `today` are the values of its knobs, and `batches` (micro-batch, accumulation), 0 where not
    known; `accumulates` says that the accumulation follows the global batch.
    """

    @property
    def today(self) -> Mapping[str, Value]: ...

    @property
    def against(self) -> Mapping[str, str]:
        """Why knobs cannot be set, a phrase each."""
        ...

    @property
    def batches(self) -> tuple[int, int]: ...

    @property
    def accumulates(self) -> bool: ...

    @property
    def length(self) -> int:
        """Tokens of a sample; 0 if not known."""
        ...

    @property
    def program(self) -> Program: ...

    def fact(self, name: str) -> Any:
        """Return what the keys state of the training; None if nothing."""
        ...

    def declared(self, knob: Knob) -> Any:
        """Return today's value of a declared knob, or None; InputError if its key is gone."""
        ...

    def refused(self, configuration: Configuration) -> list[str]:
        """Return a phrase for each rule of the framework that a configuration breaks."""
        ...


@dataclass(frozen=True)
class Launcher:
    """Launcher of a pasted command.

    Attributes:
        kind: name of its `Kind`, or "" for a command with nothing but variables in front of it.
        words: its own words as typed, up to the script, without variables in front.
        processes: ranks that it would start on a node; 0 for one on each device.
        env: what it sets for the ranks; `{rank}`, `{local_rank}`, `{node_rank}` and
            `{world_size}` stand for values that differ from rank to rank.
        assigned: the variables written in front of the command (`NAME=VALUE torchrun ...`); a
            value that is not kept is `{env:NAME}` (`tuner.workload.scripts.secrets`).
        notes: what joulefront leaves out, one sentence each.
        binding: how it binds ranks to cores (`tuner.workload.node.vendor_binding`), or "".
    """

    kind: str
    words: tuple[str, ...] = ()
    script: tuple[str, ...] = ()
    processes: int = 0
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    assigned: Mapping[str, str] = field(default_factory=dict, hash=False)
    notes: tuple[str, ...] = ()
    nodes: int = 1
    binding: str = ""

    @property
    def numbers_tasks(self) -> bool:
        """True if it sets Slurm's variables of a task for each rank."""
        return self.kind == "srun"

    def to_json(self) -> dict[str, Any]:
        usual = {"nodes": 1, "binding": ""}
        return {n: value for n, value in asdict(self).items() if usual.get(n, ...) != value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Launcher:
        """Read the output of `to_json`; InputError if invalid."""
        try:
            lists = {name: tuple(data.get(name, ())) for name in ("words", "script", "notes")}
            return cls(**{**data, **lists})
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"this is not the launcher of a script: {error}") from error


@dataclass(frozen=True)
class ScriptFacts:
    """Facts about a script's training from one inspected launch; unknown ones are 0 or "".

    Attributes:
        kind: "deepspeed", "pipeline" (DeepSpeed's), "torch" (a torch optimizer steps), "program"
            (it calls `step()`), or "" before inspection.
        owner: the framework ("transformers", "accelerate", "lightning") that owns batches and
            accumulation; "" where the script does.
        follows: its batches take their size from DeepSpeed's micro-batch.
        measured, counted: probes can check the micro-batch by the engine's first batch, and both
            parts by the counts of the first steps.
        sources: where today's ranks, micro-batch, accumulation and steps come from, a phrase each.
        can_checkpoint, checkpoints: the model has transformers' switch for it, which is on today.
        reads, own: knobs that it reads by `configuration()`, and its own values of them.
        live: live knobs that it registers, each with its present value, None if unknown.
        turns: what the hook can set in its framework: "micro_batch", "gradient_accumulation".
        given: the command's words, if those of the job hold placeholders for arguments.
        carries: what an argument carries beside its part of the batch, by that part: "ranks",
            "gradient_accumulation", or both ("" for neither).
        keeps: the part of the batch that keeps the global batch without an argument for the
            accumulation: "accumulation" (the script adapts it), "micro_batch" (x ranks it stays).
        micro_batch_stays, ranks_stay: why, a phrase; "" if they need not.
        unproven: why an argument that is named as its batch is left as today, a phrase.
        imports: packages that take long to import, which its ranks were seen to import.
        threads: of a rank, as observed.
        settings: today's values of what the hook can set in torch, by the knob's name.
        first_step_s: of the inspection, for the limits of probes; it is no part of the job.
    """

    kind: str = ""
    owner: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    micro_batch: int = 0
    accumulation: int = 0
    follows: bool = False
    measured: bool = False
    counted: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)
    client_optimizer: str = ""
    can_checkpoint: bool = False
    checkpoints: bool = False
    compiled: bool = False
    stages: int = 1
    reads: tuple[str, ...] = ()
    turns: tuple[str, ...] = ()
    live: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    carries: Mapping[str, str] = field(default_factory=dict)
    keeps: str = ""
    micro_batch_stays: str = ""
    ranks_stay: str = ""
    unproven: str = ""
    imports: tuple[str, ...] = ()
    threads: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    first_step_s: float = field(default=0.0, compare=False)

    @property
    def on_deepspeed(self) -> bool:
        """True if the script trains with DeepSpeed, in a pipeline or not."""
        return self.kind in ("deepspeed", "pipeline")

    @property
    def zero(self) -> Mapping[str, Any]:
        """The settings of ZeRO; a bare `true`, as in older files, means stage 1."""
        zero = self.config.get("zero_optimization") or {}
        return zero if isinstance(zero, Mapping) else {"stage": 1}

    def device(self, section: str) -> str:
        """Return today's place of "offload_optimizer" or "offload_param": none, cpu or nvme."""
        if self.zero.get(OLD_OFFLOADS[section][0]):
            return "cpu"
        return str((self.zero.get(section) or {}).get("device", "none"))

    def to_json(self) -> str:
        """Return the facts that differ from the defaults, as JSON text."""
        usual, data = asdict(ScriptFacts()), asdict(replace(self, first_step_s=0.0))
        stated = {name: value for name, value in data.items() if value != usual[name]}
        return json.dumps(stated, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ScriptFacts:
        """Read the output of `to_json`; TypeError or ValueError if invalid."""
        data = json.loads(text)
        listed = {
            name: tuple(data.get(name, ())) for name in ("reads", "turns", "given", "imports")
        }
        return cls(**{**data, **listed})
