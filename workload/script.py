"""A user's own training script: how it is started, and which knobs can be turned on it.

A script is a command, in which `{micro_batch}` and the like may stand where it owns a flag. What
else can be turned is found out by looking: one inspected launch (`workload.inspection`) shows the
*frame* that the script trains in, e.g. whether DeepSpeed, transformers' Trainer or a plain torch
loop owns the batches, and whether they follow when DeepSpeed's micro-batch changes. `ScriptJob`
keeps both, offers the knobs that this frame turns, says why it does not offer the others, and
starts the script under one configuration. What the user chose (optimizer, scheduler, precision,
global batch) stays theirs.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from search_spaces.configuration import Configuration
from search_spaces.errors import InputError, InvalidValue, UnknownName
from search_spaces.job import TrainingJob
from search_spaces.knobs import KNOBS, Value
from search_spaces.space import Auto, SearchSpace
from workload.deepspeed_config import render_deepspeed_config
from workload.hook import merge

__all__ = ["Frame", "Offer", "Script", "ScriptJob", "Start"]

_PLACEHOLDER = re.compile(r"\{(\w+)(?:=([^{}]*))?\}")
#: What a command may hold beside the launch knobs. The last three differ from rank to rank.
_EXTRA = ("gradient_accumulation", "deepspeed_config", "world_size", "rank", "local_rank")
_LAUNCH = tuple(name for name, knob in KNOBS.items() if knob.kind == "launch")
#: Starters that would start the ranks themselves, which is the agent's part.
_STARTERS = ("torchrun", "deepspeed", "accelerate", "mpirun", "srun")
#: A JSON object with one of these is taken for a DeepSpeed configuration.
_DEEPSPEED_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_optimization",
)
#: Nothing of a probe is logged: a run of twenty steps is no experiment.
_QUIET = {name: {"enabled": False} for name in ("tensorboard", "wandb", "csv_monitor", "comet")}
_QUIET_ENV = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
}
#: Knobs that say where a part of the training state lives, and their sections in DeepSpeed's JSON.
_OFFLOADS = {"optimizer_offload": "offload_optimizer", "parameter_offload": "offload_param"}
_BUILT = ("tensor_parallel", "pipeline_parallel", "sequence_parallel", "expert_parallel")


@dataclass(frozen=True)
class Script:
    """A script as the user names it.

    Attributes:
        command: the program and its arguments as one shell line, e.g. "train.py --ds ds.json".
            `{NAME}` or `{NAME=VALUE}` stands where the script takes a knob; VALUE is today's.
        cwd: the folder it is started in; relative paths of the command are found from there.
        steps: optimizer steps that make the solution.
        global_batch: samples an optimizer step, where DeepSpeed's configuration does not say.
        sequence_length: tokens a sample, where the first batch does not show it.
        model_config: a Hugging Face config.json, where the model does not carry its own.
    """

    command: str
    cwd: Path = field(default_factory=Path.cwd)
    steps: int | None = None
    global_batch: int | None = None
    sequence_length: int | None = None
    model_config: Path | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch", "sequence_length"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidValue(name, value, "an integer of at least 1")

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The command's words, without the interpreter.

        Raises:
            InputError: there is no script, it starts ranks itself, or a placeholder is unknown.
        """
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise InputError(f"the script's command cannot be read: {error}") from error
        while words and re.fullmatch(r"python[\d.]*", Path(words[0]).name):
            words = words[1:]
        if not words:
            raise InputError('a script needs a command, e.g. --script "train.py --data DIR"')
        if Path(words[0]).name in _STARTERS:
            raise InputError(
                f"{Path(words[0]).name} starts ranks itself, which is joulefront's part here; give "
                'the script and its own arguments alone, e.g. --script "train.py --data DIR"'
            )
        if words[0] == "-m":
            if len(words) == 1:
                raise InputError("-m must be followed by a module's name")
        elif not (self.cwd / words[0]).is_file():
            raise InputError(f"there is no script {words[0]!r} in {self.cwd}")
        for word in words:
            for name, value in _PLACEHOLDER.findall(word):
                if name not in (*_LAUNCH, *_EXTRA):
                    raise UnknownName("placeholder", name, (*_LAUNCH, *_EXTRA))
                if value and name in _LAUNCH:
                    KNOBS[name].check(int(value) if value.isdigit() else value)
        return tuple(words)

    @property
    def name(self) -> str:
        return self.words[1] if self.words[0] == "-m" else Path(self.words[0]).stem


@dataclass(frozen=True)
class Frame:
    """What one inspected launch showed of how a script trains.

    Attributes:
        kind: who takes the optimizer step: "deepspeed", "pipeline" (DeepSpeed's pipeline engine),
            "torch" (a torch optimizer), "program" (it told by `step()`), or "" before inspection.
        owner: the framework that calls DeepSpeed or the optimizer ("transformers", "accelerate",
            "lightning"), which then owns batches and accumulation; "" where the script does.
        config: what the script passes to `deepspeed.initialize`.
        micro_batch, accumulation: today's; 0 where unknown.
        follows: its batches take their size from DeepSpeed's micro-batch.
        measured: the first batch's leading dimension is the micro-batch, so probes can check it.
        client_optimizer: the class of the optimizer that the script builds, or "".
        can_checkpoint: the model has transformers' switch for activation checkpointing.
        checkpoints: and it is on today.
        stages: pipeline stages today.
        reads: what the script reads from `joulefront_hook.configuration()`.
    """

    kind: str = ""
    owner: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    micro_batch: int = 0
    accumulation: int = 0
    follows: bool = False
    measured: bool = False
    client_optimizer: str = ""
    can_checkpoint: bool = False
    checkpoints: bool = False
    stages: int = 1
    reads: tuple[str, ...] = ()

    @property
    def on_deepspeed(self) -> bool:
        return self.kind in ("deepspeed", "pipeline")

    def device(self, section: str) -> str:
        """Where "offload_optimizer" or "offload_param" puts its part today: none, cpu or nvme."""
        zero = self.config.get("zero_optimization") or {}
        return str((zero.get(section) or {}).get("device", "none"))


@dataclass(frozen=True)
class Offer:
    """Whether one launch knob is in play on a script.

    Attributes:
        turned: it is.
        why: by what it is turned, or why it is not, as a phrase.
        values: those that can be had; empty for all.
    """

    turned: bool
    why: str
    values: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Start:
    """How the ranks of one configuration start.

    Attributes:
        words: the command with every placeholder but those of a rank filled in.
        cwd: the folder.
        options: for the hook: `configuration` (every launch knob), `deepspeed` (laid over what the
            script passes; null takes a key away), `activation_checkpointing` (set on the model),
            `micro_batch` (which batches must hold), `quiet` (no checkpoints are written),
            `inspect` and `alter` (see `workload.inspection`).
        config: the DeepSpeed configuration that results; empty where the script uses none.
        env: what is added to the environment.
    """

    words: tuple[str, ...]
    cwd: str
    options: Mapping[str, Any]
    config: Mapping[str, Any]
    env: Mapping[str, str]

    def argv(self, rank: int, world: int) -> tuple[str, ...]:
        """The command of one rank of `world` on this node."""
        mine = {"rank": str(rank), "local_rank": str(rank), "world_size": str(world)}
        return tuple(_fill(word, mine) for word in self.words)


@dataclass(frozen=True)
class ScriptJob(TrainingJob):
    """A job that a user's script trains.

    `model` may be empty and `sequence_length` 0 where nobody knows them; what needs them (the
    analytic prediction, parallelism inside the model) is then left out.

    Attributes:
        words: the command, placeholders included.
        cwd: the folder it is started in.
        devices: ranks that it starts on today.
        frame: what the inspection showed.
        assumed: what was not told and is taken, one sentence each.
    """

    words: tuple[str, ...] = ()
    cwd: str = "."
    devices: int = 1
    frame: Frame = field(default_factory=Frame, hash=False)
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("global_batch", "steps", "devices"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidValue(f"{name} of script {self.name!r}", value, "an integer above 0")

    # ---- what is written down

    def to_json(self) -> dict[str, Any]:
        frame = json.dumps(asdict(self.frame), sort_keys=True)
        listed = {"words": list(self.words), "assumed": list(self.assumed)}
        return {**super().to_json(), **listed, "frame": frame}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ScriptJob:
        """Read what `to_json` wrote.

        Raises:
            InputError: it is no such job.
        """
        try:
            told = json.loads(data["frame"])
            frame = Frame(**{**told, "reads": tuple(told["reads"])})
            listed = {name: tuple(data.get(name, ())) for name in ("words", "assumed")}
            names = {item.name for item in fields(cls)} & set(data)
            return cls(**{**{name: data[name] for name in names}, **listed, "frame": frame})
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"this is not the job of a script: {error}") from error

    # ---- what can be turned

    @cached_property
    def placeholders(self) -> Mapping[str, str]:
        """The names that stand in the command, each with today's value or ""."""
        return {name: value for word in self.words for name, value in _PLACEHOLDER.findall(word)}

    @cached_property
    def config_word(self) -> tuple[int, Path] | None:
        """Which word names a DeepSpeed configuration, and the file; None where none does."""
        for position, word in enumerate(self.words):
            path = Path(self.cwd) / word.rpartition("=")[2]
            if path.suffix == ".json" and path.is_file() and _is_deepspeed(path):
                return position, path
        return None

    @property
    def file_config(self) -> Mapping[str, Any]:
        """The DeepSpeed configuration that the command names; empty where it names none."""
        named = self.placeholders.get("deepspeed_config")
        path = Path(self.cwd) / named if named else self.config_word and self.config_word[1]
        return _read_json(path) if path else {}

    def _asks(self, *names: str) -> bool:
        """The script takes one of these itself, in its command or by reading them."""
        return any(name in self.placeholders or name in self.frame.reads for name in names)

    @property
    def accumulates(self) -> bool:
        """The accumulation can be chosen, so that the global batch stays whatever else changes."""
        frame = self.frame
        given = not frame.kind and "deepspeed_config" in self.placeholders  # not inspected yet
        return ((frame.on_deepspeed or given) and not frame.owner) or self._asks(
            "gradient_accumulation"
        )

    @property
    def sets_micro_batch(self) -> bool:
        return self.frame.follows or self._asks("micro_batch")

    @cached_property
    def baseline(self) -> Configuration:
        """What the user runs today."""
        config, frame = self.frame.config, self.frame
        parallel = config.get("tensor_parallel") or {}
        degrees = {
            "tensor_parallel": parallel.get("autotp_size") or parallel.get("tp_size") or 1,
            "pipeline_parallel": frame.stages,
            "sequence_parallel": config.get("sequence_parallel_size") or 1,
        }
        inside = 1
        for name, degree in degrees.items():
            degrees[name] = degree = int(self.placeholders.get(name) or degree)
            inside *= degree
        values: dict[str, Any] = {
            **degrees,
            "data_parallel": max(1, self.devices // inside),
            "micro_batch": frame.micro_batch or 1,
            "zero_stage": int((config.get("zero_optimization") or {}).get("stage", 0)),
            "optimizer_offload": "cpu" if frame.device("offload_optimizer") == "cpu" else "none",
            "parameter_offload": "cpu" if frame.device("offload_param") == "cpu" else "none",
            "activation_checkpointing": "full" if frame.checkpoints else "none",
        }
        for name, text in self.placeholders.items():
            if name in _LAUNCH and text:
                values[name] = int(text) if text.isdigit() else text
        # Of the others only what is not at its default: a configuration's name stays short.
        always = ("data_parallel", "micro_batch", "zero_stage")
        for name in set(values) - set(always):
            if name not in KNOBS or values[name] == KNOBS[name].default:
                del values[name]
        return Configuration.of(values)

    @cached_property
    def offers(self) -> Mapping[str, Offer]:
        """For each launch knob whether it is in play, and why (not)."""
        found = {}
        for name in _LAUNCH:
            if name in _BUILT and self._asks(name) and not self.model:
                why = "the model's sizes are not known; give --model-config"
                found[name] = Offer(False, why)
            elif name == "data_parallel":
                found[name] = self._offer_data_parallel()
            elif name == "micro_batch":
                found[name] = self._offer_micro_batch()
            elif self._asks(name):
                found[name] = Offer(True, "the script takes it")
            else:
                found[name] = self._offer_deepspeed(name)
        return found

    def _offer_data_parallel(self) -> Offer:
        if self.accumulates:
            return Offer(True, "the accumulation keeps the global batch")
        by = self.frame.owner or "the script"
        return Offer(
            False,
            f"on fewer ranks the global batch would shrink, for {by} sets the accumulation "
            "({gradient_accumulation} in the command would)",
        )

    def _offer_micro_batch(self) -> Offer:
        if self.frame.follows:
            return Offer(True, "the batches follow DeepSpeed's micro-batch")
        if self._asks("micro_batch") and self.accumulates:
            return Offer(True, "the script takes it")
        if self._asks("micro_batch"):
            return Offer(
                False,
                "the accumulation cannot follow it ({gradient_accumulation} in the command would)",
            )
        by = self.frame.owner or "the script"
        return Offer(
            False, f"{by} makes its batches itself ({{micro_batch}} in the command would set it)"
        )

    def _offer_deepspeed(self, name: str) -> Offer:
        """A knob that DeepSpeed's configuration or the model's own switch can turn."""
        frame, placed = self.frame, "deepspeed_config" in self.placeholders
        if name == "zero_stage" and (frame.on_deepspeed or placed):
            return Offer(True, "DeepSpeed's configuration")
        if name in _OFFLOADS and (frame.on_deepspeed or placed):
            if (device := frame.device(_OFFLOADS[name])) not in ("none", "cpu"):
                return Offer(False, f"today's offload to {device} is kept")
            own = frame.client_optimizer
            if (
                own and name == "optimizer_offload"
            ):  # SuperOffload replaces the optimizer, ours to keep
                return Offer(True, f"DeepSpeed's configuration, with its {own}", ("none", "cpu"))
            return Offer(True, "DeepSpeed's configuration")
        if name == "activation_checkpointing" and frame.can_checkpoint and frame.on_deepspeed:
            return Offer(True, "the model's own switch", ("none", "full"))
        if name == "zero_stage" or name in _OFFLOADS:
            return Offer(False, "the script does not train under DeepSpeed")
        return Offer(
            False,
            "the script must build it: it may read joulefront_hook.configuration() or take "
            "{KNOB} in its command",
        )

    def sentences(self, searched: Collection[str] = _LAUNCH) -> tuple[str, ...]:
        """What is in play and why the rest is not, one sentence each, for people.

        Args:
            searched: the knobs that the search space names.
        """
        able = [name for name in _LAUNCH if self.offers[name].turned]
        turned = [name for name in able if name in searched]
        left = [name for name in able if name not in searched]
        reasons: dict[str, list[str]] = {}
        for name in _LAUNCH:
            if not self.offers[name].turned:
                reasons.setdefault(self.offers[name].why, []).append(name)
        frame = self.frame
        counted = {"torch": "a torch optimizer", "program": "steps of its own"}
        by = f"{frame.owner} over " * bool(frame.owner) + counted.get(frame.kind, "DeepSpeed")
        what = f"the script {self.name!r} trains by {by}"
        return (
            f"{what}; in play: {', '.join(turned) or 'no launch knob'}, and live settings where "
            "the machine lets them be set",
            *([f"not in this search space: {', '.join(left)}"] if left else []),
            *(f"not in play: {', '.join(names)}: {why}" for why, names in reasons.items()),
            *self.assumed,
        )

    def narrowed(self, space: SearchSpace) -> SearchSpace:
        """The space without what this script cannot turn: such knobs stand where they are."""
        choices: dict[str, tuple[Value, ...] | Auto] = {}
        for name in KNOBS:
            choice, offer = space.choices.get(name), self.offers.get(name)
            if offer is None:
                if choice is not None:
                    choices[name] = choice
                continue
            today = self.baseline.get(name)
            assert today is not None  # every launch knob has a default
            if choice is None or not offer.turned or choice == Auto(kind="baseline"):
                default = KNOBS[name].default
                if today != default and default is not None:
                    # A knob that the space does not name stands at its default, or as today.
                    choices[name] = (
                        (default, today) if choice is None and offer.turned else (today,)
                    )
            elif isinstance(choice, tuple):
                kept = [v for v in choice if not offer.values or v in offer.values]
                choices[name] = (*kept, today)
            else:
                choices[name] = (*offer.values, today) if offer.values else choice
        return replace(space, choices=choices)

    def refused(self, configuration: Configuration) -> list[str]:
        """A phrase for each knob that this script cannot be given so; empty when it can."""
        phrases = []
        for name, value in configuration.launch.items():
            offer, today = self.offers.get(name), self.baseline.get(name)
            if offer is None:
                phrases.append(f"{name} is no knob of a script")
            elif value != today and not offer.turned:
                phrases.append(f"{name} is {today} in this script and not {value}: {offer.why}")
            elif value != today and offer.values and value not in offer.values:
                phrases.append(f"{name} {value} is none of {', '.join(map(str, offer.values))}")
        return phrases

    # ---- how it starts

    def overlay(self, configuration: Configuration) -> dict[str, Any]:
        """What a configuration lays over the script's DeepSpeed settings; None takes a key away.

        Keys are DeepSpeed 0.19's (deepspeed.ai/docs/config-json). Only knobs in play are said.

        Raises:
            InvalidValue: micro-batch x data parallelism does not divide the global batch.
        """
        said: dict[str, Any] = {}
        if self.accumulates and (self.sets_micro_batch or self.frame.micro_batch):
            said |= {
                "train_batch_size": self.global_batch,
                "train_micro_batch_size_per_gpu": configuration.micro_batch,
                "gradient_accumulation_steps": configuration.accumulation(self.global_batch),
            }
        if self.offers["zero_stage"].turned:
            stage = configuration.zero_stage
            said["zero_optimization"] = zero = {"stage": stage}
            if stage != 3:  # nowhere else does DeepSpeed take it
                zero["offload_param"] = None
            if stage and (self.frame.client_optimizer or "deepspeed_config" in self.placeholders):
                # The user's own optimizer is as exact under ZeRO as without it.
                said["zero_allow_untested_optimizer"] = True
        rendered = render_deepspeed_config(configuration, self)["zero_optimization"]
        for knob, section in _OFFLOADS.items():
            if knob in self.offers and self.offers[knob].turned:
                said.setdefault("zero_optimization", {})[section] = rendered.get(section)
        if (said.get("zero_optimization") or {}).get("offload_optimizer"):
            said |= self._optimizer_on_host()
        return said

    def _optimizer_on_host(self) -> dict[str, Any]:
        """The user's optimizer with its states on the host."""
        optimizer = self.frame.config.get("optimizer") or {}
        if self.frame.client_optimizer or not optimizer:
            return {"zero_force_ds_cpu_optimizer": False}
        if (optimizer.get("params") or {}).get("torch_adam"):
            # The same update by DeepSpeed's kernel for the host, which it insists on.
            return {"optimizer": {"params": {"torch_adam": False}}}
        return {}

    def start(self, configuration: Configuration, folder: Path, *, probe: bool = True) -> Start:
        """Write what this configuration needs to `folder`, and say how its ranks start.

        Args:
            configuration: launch settings.
            folder: takes ds_config.json.
            probe: leave loggers and checkpoints out, and check the batches' size.

        Raises:
            InvalidValue: micro-batch x data parallelism does not divide the global batch.
            OSError: the file cannot be written.
        """
        overlay = self.overlay(configuration)
        base = self.frame.config or self.file_config
        # "auto" is filled in by transformers from its own arguments, which the command sets.
        overlay = {name: value for name, value in overlay.items() if base.get(name) != "auto"}
        if probe and (base or self.frame.on_deepspeed):
            overlay = {**_QUIET, "autotuning": None, **overlay}
        config = merge(base, overlay) if base or overlay else {}
        values = {name: str(configuration.get(name)) for name in _LAUNCH}
        values["gradient_accumulation"] = str(configuration.accumulation(self.global_batch))
        path = (folder / "ds_config.json").resolve()
        if config:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        values["deepspeed_config"] = str(path)
        words = [_fill(word, values) for word in self.words]
        if self.config_word and config:
            position = self.config_word[0]
            before, equals, _ = words[position].rpartition("=")
            words[position] = f"{before}{equals}{path}"
        asked = {name: configuration.get(name) for name in _LAUNCH}
        asked["gradient_accumulation"] = configuration.accumulation(self.global_batch)
        options: dict[str, Any] = {"configuration": asked, "deepspeed": overlay, "quiet": probe}
        if self.offers["activation_checkpointing"].why == "the model's own switch":
            mode = configuration.get("activation_checkpointing")
            options["activation_checkpointing"] = mode
        if probe and self.frame.measured and self.sets_micro_batch:
            options["micro_batch"] = configuration.micro_batch
        return Start(tuple(words), self.cwd, options, config, _QUIET_ENV if probe else {})

    @property
    def needs_hook(self) -> bool:
        """Whether the script needs the hook outside a probe too.

        It does where it reads its configuration there, takes its rank in its command, or builds
        what is set (DeepSpeed's settings, the model's switch) itself.
        """
        given = self.config_word is not None or "deepspeed_config" in self.placeholders
        switched = self.offers["activation_checkpointing"].why == "the model's own switch"
        asks = bool(self.frame.reads) or self._asks("rank", "local_rank")
        return asks or switched or (self.frame.on_deepspeed and not given)


def _fill(word: str, values: Mapping[str, str]) -> str:
    """The word with the placeholders that `values` knows filled in."""
    return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), word)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the DeepSpeed configuration {path}: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path} holds no JSON object, so it is no DeepSpeed configuration")
    return data


def _is_deepspeed(path: Path) -> bool:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and any(key in data for key in _DEEPSPEED_KEYS)
