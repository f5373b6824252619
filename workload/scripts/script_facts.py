"""Plain facts about a script: its launcher, and the findings of one inspected launch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, check_integer
from tuner.search_spaces.job import Program, TrainingJob
from tuner.search_spaces.knob_declarations import Knob, read_knobs
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.workload.scripts import SOCKET
from tuner.workload.scripts.key_files import is_deepspeed_file, read_deepspeed

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
        first_steps: what is needed to compare the first steps of a launch with today's, if a knob
            is proven only when a probe first sets it.
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
    first_steps: Mapping[str, Any] = field(default_factory=dict, compare=False)
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


@dataclass(frozen=True)
class ScriptTraining(TrainingJob):
    """Facts about a job that a user's script trains.

    `model` may be empty, and `sequence_length` and `global_batch` 0, if unknown. What
    needs them is then left out: the analytic prediction and parallelism inside the model, the knobs
    that split the batch, and figures of the whole training.

    Attributes:
        devices: ranks that it starts on today.
        assumed: what was not told and is taken, one sentence each.
        line: the whole command, as typed for the shell; "" if it was not observed.
        folder: that the line was typed in; "" if it is `cwd`.
        as_it_stands: each probe starts the line so, and its ranks report by themselves;
            otherwise ranks are started one by one from `words`.
        secrets: values that words and launcher name as `{env:NAME}`; they are not written down.
    """

    words: tuple[str, ...] = ()
    cwd: str = "."
    devices: int = 1
    frame: ScriptFacts = field(default_factory=ScriptFacts, hash=False)
    assumed: tuple[str, ...] = ()
    launcher: Launcher | None = None
    driver: Framework | None = None
    line: str = ""
    folder: str = ""
    as_it_stands: bool = False
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, least in (("global_batch", 0), ("devices", 1)):
            check_integer(f"{name} of script {self.name!r}", getattr(self, name), least=least)
        if self.steps is not None:
            check_integer(f"steps of script {self.name!r}", self.steps)

    # ---- what is written down

    def to_json(self) -> dict[str, Any]:
        listed = {"words": list(self.words), "assumed": list(self.assumed)}
        data = {**super().to_json(), **listed, "frame": self.frame.to_json()}
        del data["launcher"], data["driver"], data["secrets"]
        data["whole"] = data.pop("as_it_stands")
        if not self.line:  # it was not observed
            del data["line"], data["folder"], data["whole"]
        if self.launcher is not None:
            data["launcher"] = json.dumps(self.launcher.to_json(), sort_keys=True)
        return data | ({"driver": self.driver.to_json()} if self.driver else {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read the output of `to_json`; InputError if invalid."""
        if "driver" in data:
            frameworks = SOCKET.needed("framework", "a run of a recognised framework")
        try:
            frame = ScriptFacts.from_json(data["frame"])
            listed = {name: tuple(data.get(name, ())) for name in ("words", "assumed")}
            names = ({item.name for item in fields(cls)} - {"secrets"}) & set(data)
            given = {name: data[name] for name in names} | {**listed, "frame": frame}
            if "whole" in data:
                given["as_it_stands"] = data["whole"]
            if "launcher" in data:
                given["launcher"] = Launcher.from_json(json.loads(data["launcher"]))
            if "driver" in data:
                given["driver"] = frameworks.Bound.from_json(data["driver"])
            if "knobs" in data:
                given["knobs"] = read_knobs(data["knobs"], "the job")
            if "program" in data:
                given["program"] = Program.from_table(data["program"], "the job")
            return cls(**given)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"this is not the job of a script: {error}") from error

    # ---- what can be turned

    @cached_property
    def placeholders(self) -> Mapping[str, str]:
        """The names of the command's placeholders, each with today's value or ""."""
        return {name: value for word in self.words for name, value in PLACEHOLDER.findall(word)}

    @cached_property
    def driven(self) -> FrameworkKeys | None:
        """The driver of the recognised framework, applied to this command."""
        if self.driver is None:
            return None
        env = {**os.environ, **(self.launcher.env if self.launcher else {})}
        return self.driver.applied(
            *(self.words, Path(self.cwd), env),
            devices=self.devices,
            sequence_length=self.sequence_length,
            taken=self.placeholders,
        )

    @cached_property
    def stated_values(self) -> Mapping[str, str]:
        """Knobs that the command takes by a placeholder or its framework, with today's value."""
        framework = self.driven.today if self.driven else {}
        return {**{name: str(value) for name, value in framework.items()}, **self.placeholders}

    @cached_property
    def config_word(self) -> tuple[int, Path] | None:
        """Index of the word that names a DeepSpeed configuration, and the file, or None."""
        for position, word in enumerate(self.words):
            path = Path(self.cwd) / word.rpartition("=")[2]
            if path.suffix == ".json" and path.is_file() and is_deepspeed_file(path):
                return position, path
        return None

    @cached_property
    def file_config(self) -> Mapping[str, Any]:
        """The DeepSpeed configuration that the command names; empty if it names none."""
        named = self.placeholders.get("deepspeed_config")
        path = Path(self.cwd) / named if named else self.config_word and self.config_word[1]
        return read_deepspeed(path) if path else {}

    @property
    def under_deepspeed(self) -> bool:
        """True if DeepSpeed trains the script, or the command gives it a configuration."""
        return self.frame.on_deepspeed or "deepspeed_config" in self.placeholders

    @property
    def taken(self) -> tuple[str, ...]:
        """The variables whose values are not written down, but needed where ranks start."""
        return names_taken(
            [*self.words, self.line, *(self.launcher.env.values() if self.launcher else ())]
        )

    @property
    def compiled(self) -> bool:
        """True if the inspected launch showed a compiled model."""
        return self.frame.compiled

    @property
    def on_deepspeed(self) -> bool:
        """False if the script has another framework, whose driver names the refused knobs."""
        return self.driver is None or self.frame.on_deepspeed
