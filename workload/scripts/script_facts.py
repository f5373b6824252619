"""Facts about a user's script: its command today, and what one inspected launch has shown."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tuner.search_spaces.declared import read_knobs
from tuner.search_spaces.errors import InputError, check_integer
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.program import Program
from tuner.workload.deepspeed_file import is_deepspeed_file, read_deepspeed
from tuner.workload.scripts.frameworks.driven import Bound, Driven
from tuner.workload.scripts.frameworks.settings import Settings

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
            value that is not kept is `{env:NAME}` (`tuner.workload.scripts.launchers.secrets`).
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

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON."""
        usual = {"nodes": 1, "binding": ""}
        return {n: value for n, value in asdict(self).items() if usual.get(n, ...) != value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Launcher:
        """Read what `to_json` wrote; InputError if it is no launcher."""
        try:
            lists = {name: tuple(data.get(name, ())) for name in ("words", "script", "notes")}
            return cls(**{**data, **lists})
        except (TypeError, ValueError) as error:
            raise InputError(f"this is not the launcher of a script: {error}") from error


@dataclass(frozen=True)
class Framework:
    """Facts about a script's training from one inspected launch; what is not known is 0 or "".

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


#: Fields of `Framework` that are written down only where they say something.
_LATER_FACTS = (
    *("compiled", "counted", "sources", "own", "given", "carries", "keeps"),
    *("micro_batch_stays", "ranks_stay"),
)


@dataclass(frozen=True)
class ScriptFacts(TrainingJob):
    """Facts about a job that a user's script trains.

    `model` may be empty, and `sequence_length` and `global_batch` 0, if unknown. What
    needs them is then left out: the analytic prediction and parallelism inside the model, the knobs
    that split the batch, and figures of the whole training.

    Attributes:
        devices: ranks that it starts on today.
        assumed: what was not told and is taken, one sentence each.
        secrets: values that words and launcher name as `{env:NAME}`; they are not written down.
    """

    words: tuple[str, ...] = ()
    cwd: str = "."
    devices: int = 1
    frame: Framework = field(default_factory=Framework, hash=False)
    assumed: tuple[str, ...] = ()
    launcher: Launcher | None = None
    driver: Bound | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, least in (("global_batch", 0), ("devices", 1)):
            check_integer(f"{name} of script {self.name!r}", getattr(self, name), least=least)
        if self.steps is not None:
            check_integer(f"steps of script {self.name!r}", self.steps)

    # ---- what is written down

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON."""
        facts = asdict(self.frame)
        del facts["first_step_s"]
        for name in _LATER_FACTS:
            if not facts[name]:
                del facts[name]
        frame = json.dumps(facts, sort_keys=True)
        listed = {"words": list(self.words), "assumed": list(self.assumed)}
        data = {**super().to_json(), **listed, "frame": frame}
        del data["launcher"], data["driver"], data["secrets"]
        if self.launcher is not None:
            data["launcher"] = json.dumps(self.launcher.to_json(), sort_keys=True)
        return data | ({"driver": self.driver.to_json()} if self.driver else {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote; InputError if it is no such job."""
        try:
            told = json.loads(data["frame"])
            sequences = ("reads", "turns", "given")
            frame = Framework(**told | {name: tuple(told.get(name, ())) for name in sequences})
            listed = {name: tuple(data.get(name, ())) for name in ("words", "assumed")}
            names = ({item.name for item in fields(cls)} - {"secrets"}) & set(data)
            given = {name: data[name] for name in names} | {**listed, "frame": frame}
            if "launcher" in data:
                given["launcher"] = Launcher.from_json(json.loads(data["launcher"]))
            if "driver" in data:
                given["driver"] = Bound.from_json(data["driver"])
            if "knobs" in data:
                given["knobs"] = read_knobs(data["knobs"], "the job")
            if "program" in data:
                given["program"] = Program.from_table(data["program"], "the job")
            return cls(**given)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"this is not the job of a script: {error}") from error

    # ---- what can be turned

    @cached_property
    def placeholders(self) -> Mapping[str, str]:
        """The names of the command's placeholders, each with today's value or ""."""
        return {name: value for word in self.words for name, value in PLACEHOLDER.findall(word)}

    @cached_property
    def driven(self) -> Driven | None:
        """The driver of the recognised framework, applied to this command."""
        if self.driver is None:
            return None
        env = {**os.environ, **(self.launcher.env if self.launcher else {})}
        command, given = self.driver.driver.command, self.driver.given
        settings = Settings(command, self.words, Path(self.cwd), env, given)
        return Driven(self.driver, settings, self.devices, self.sequence_length, self.placeholders)

    @cached_property
    def told(self) -> Mapping[str, str]:
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
    def why_accumulation_stays(self) -> str:
        """Why the accumulation cannot change while the script runs; "" if it can."""
        frame = self.frame
        if frame.owner == "transformers" or (frame.on_deepspeed and not frame.owner):
            return ""
        return (
            "whole steps are measured: the accumulation of a running script can be set where its "
            "loop is transformers' Trainer or its own over a DeepSpeed engine"
        )

    @property
    def taken(self) -> tuple[str, ...]:
        """The variables whose values are not written down, but needed where ranks start."""
        return names_taken([*self.words, *(self.launcher.env.values() if self.launcher else ())])

    @property
    def compiled(self) -> bool:
        """True if the inspected launch showed a compiled model."""
        return self.frame.compiled

    @property
    def on_deepspeed(self) -> bool:
        """False if the script has another framework, whose driver says what it refuses."""
        return self.driver is None or self.frame.on_deepspeed
