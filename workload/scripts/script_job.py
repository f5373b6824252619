"""A user's own training script as a job: its present state, and its start under a configuration.

`tuner.workload.scripts.command` holds the command, `tuner.workload.scripts.knob_support` the knobs
that can be set and the reasons against the others. `ScriptJob` keeps both with the facts of one
inspected launch, writes the merged DeepSpeed configuration of a probe and the options of the hook.
The user's choices (optimizer, scheduler, precision, global batch) are kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.declared import Knob, check_knobs, read_knobs, with_baseline
from tuner.search_spaces.errors import InputError, check_integer
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.program import Program
from tuner.search_spaces.safe_files import write_text
from tuner.search_spaces.space import SearchSpace
from tuner.workload.declared_knobs import (
    environment,
    framework_settings,
    native_values,
    read_by_script,
    resolved,
    set_by_script,
    text_values,
    with_files,
)
from tuner.workload.hook import merge
from tuner.workload.scripts.command import (
    LAUNCH,
    PLACEHOLDER,
    Start,
    asks_for_a_rank,
    filled,
)
from tuner.workload.scripts.deepspeed_overlay import is_deepspeed, overlay, read_json
from tuner.workload.scripts.frameworks.driven import Bound, Driven
from tuner.workload.scripts.frameworks.settings import Settings
from tuner.workload.scripts.knob_support import (
    SWITCH,
    Framework,
    KnobSupport,
    narrowed,
    offers,
    refused,
    sentences,
)
from tuner.workload.scripts.launchers import Launcher
from tuner.workload.scripts.launchers.secrets import names_taken

#: Nothing of a probe is logged: a run of twenty steps is no experiment.
_QUIET = {name: {"enabled": False} for name in ("tensorboard", "wandb", "csv_monitor", "comet")}
_QUIET_ENV = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
}


@dataclass(frozen=True)
class ScriptJob(TrainingJob):
    """Job that a user's script trains.

    `model` may be empty, and `sequence_length`, `global_batch` and `steps` 0, if unknown. What
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
        for name, least in (("global_batch", 0), ("steps", 0), ("devices", 1)):
            check_integer(f"{name} of script {self.name!r}", getattr(self, name), least=least)

    # ---- what is written down

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON."""
        facts = asdict(self.frame)
        del facts["first_step_s"]
        if not self.frame.compiled:  # as in studies from before it was looked at
            del facts["compiled"]
        later = ("counted", "sources", "own", "given", "carries", "keeps")
        for name in (*later, "micro_batch_stays", "ranks_stay"):  # as in studies from before
            if not facts[name]:
                del facts[name]
        frame = json.dumps(facts, sort_keys=True)
        listed = {"words": list(self.words), "assumed": list(self.assumed)}
        data = {**super().to_json(), **listed, "frame": frame}
        if self.launcher is None:  # as in studies from before launchers were read
            del data["launcher"]
        else:
            data["launcher"] = json.dumps(self.launcher.to_json(), sort_keys=True)
        del data["driver"], data["secrets"]
        return data | ({"driver": self.driver.to_json()} if self.driver else {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ScriptJob:
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
            if path.suffix == ".json" and path.is_file() and is_deepspeed(path):
                return position, path
        return None

    @property
    def file_config(self) -> Mapping[str, Any]:
        """The DeepSpeed configuration that the command names; empty if it names none."""
        named = self.placeholders.get("deepspeed_config")
        path = Path(self.cwd) / named if named else self.config_word and self.config_word[1]
        return read_json(path) if path else {}

    @property
    def asked_of_script(self) -> tuple[str, ...]:
        """Names that the script takes by a placeholder or reads from the hook."""
        return (*self.placeholders, *self.frame.reads)

    def asks(self, *names: str) -> bool:
        """Return True if the script takes one of these itself, in its command or by reading it."""
        follows = self.driven is not None and self.driven.accumulates
        asked = {*self.told, *self.asked_of_script, *(["gradient_accumulation"] * follows)}
        return any(name in asked for name in names)

    @property
    def accumulates(self) -> bool:
        """True if the accumulation can be chosen to keep the global batch."""
        frame = self.frame
        given = not frame.kind and "deepspeed_config" in self.placeholders  # not inspected yet
        by_deepspeed = (frame.on_deepspeed or given) and not frame.owner
        if not self.global_batch:
            return False
        kept = frame.keeps == "accumulation"
        return by_deepspeed or kept or self._can_set("gradient_accumulation")

    @property
    def sets_micro_batch(self) -> bool:
        """True if the script's micro-batch can be set."""
        return self.frame.follows or self._can_set("micro_batch")

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

    def _can_set(self, name: str) -> bool:
        return name in self.frame.turns or self.asks(name)

    @cached_property
    def baseline(self) -> Configuration:
        """The user's present configuration."""
        config, frame = self.frame.config, self.frame
        parallel = config.get("tensor_parallel") or {}
        degrees = {
            "tensor_parallel": parallel.get("autotp_size") or parallel.get("tp_size") or 1,
            "pipeline_parallel": frame.stages,
            "sequence_parallel": config.get("sequence_parallel_size") or 1,
        }
        inside = 1
        for name, degree in degrees.items():
            degrees[name] = degree = int(self.told.get(name) or degree)
            inside *= degree
        values: dict[str, Any] = {
            **degrees,
            "data_parallel": max(1, self.devices // inside),
            "micro_batch": frame.micro_batch,
            "zero_stage": int(frame.zero.get("stage", 0)),
            "optimizer_offload": "cpu" if frame.device("offload_optimizer") == "cpu" else "none",
            "parameter_offload": "cpu" if frame.device("offload_param") == "cpu" else "none",
            "activation_checkpointing": "full" if frame.checkpoints else "none",
        }
        for name, text in self.told.items():
            if name in LAUNCH and text:
                values[name] = int(text) if text.isdigit() else text
        # Of the others only what is not at its default: a configuration's name stays short.
        if not frame.micro_batch:
            del values["micro_batch"]
        always = ("data_parallel", "micro_batch", "zero_stage")
        for name in set(values) - set(always):
            if name not in KNOBS or values[name] == KNOBS[name].default:
                del values[name]
        return with_baseline(Configuration.of(values), self.knobs)

    def declares(self, knobs: Sequence[Knob]) -> ScriptJob:
        """Return this job with declared knobs at today's values; InputError if one cannot be."""
        made, left_out = [], []
        for knob in knobs:
            try:
                made.append(self._applied(knob))
            except InputError as error:
                if not knob.optional:
                    raise
                left_out.append(f"knob {knob.name} is left out: {error}")
        kept = check_knobs(made)
        return replace(self, knobs=kept, assumed=tuple(dict.fromkeys([*self.assumed, *left_out])))

    def _applied(self, declared: Knob) -> Knob:
        knob = resolved(
            declared,
            driven=self.driven.declared if self.driven else None,
            placeholders=self.placeholders,
            words=self.words,
            cwd=Path(self.cwd),
            config=self.frame.config or self.file_config,
            config_file=self.config_word[1] if self.config_word else None,
            launcher_env=self.launcher.env if self.launcher else {},
        )
        if not self.frame.kind:  # not inspected yet
            return knob
        if knob.by_script:
            return set_by_script(declared, self.frame.live)
        if knob.how == "hook" and knob.name not in self.frame.reads:
            raise InputError(
                f"the script takes no knob {knob.name!r}: it neither has {{{knob.name}}} in its "
                "command nor reads it from joulefront_hook.configuration()"
            )
        if knob.how == "hook" and declared.baseline is None:
            return read_by_script(replace(declared, how="hook"), self.frame.own)
        under = self.frame.on_deepspeed or "deepspeed_config" in self.placeholders
        if knob.target[0] == "deepspeed" and not under:
            raise InputError(
                f"knob {knob.name!r} is a key of DeepSpeed's configuration, and the script does "
                "not train under DeepSpeed"
            )
        return knob

    @cached_property
    def offers(self) -> Mapping[str, KnobSupport]:
        """The support of each launch knob, with the reason."""
        return offers(self)

    def sentences(self, searched: Collection[str] = LAUNCH) -> tuple[str, ...]:
        """Describe the knobs of `searched` in play and the reasons against the rest."""
        return sentences(self, searched)

    def narrowed(self, space: SearchSpace) -> SearchSpace:
        """Return the space with the knobs that this script cannot set fixed at present values."""
        return narrowed(self, space)

    def refused(self, configuration: Configuration) -> list[str]:
        """Return a phrase for each knob value that this script cannot take; empty if none."""
        return refused(self, configuration)

    # ---- how it starts

    def overlay(self, configuration: Configuration) -> dict[str, Any]:
        """Return a configuration's changes to the DeepSpeed settings; None removes a key."""
        return overlay(self, configuration)

    def start(self, configuration: Configuration, folder: Path, *, probe: bool = True) -> Start:
        """Write the files of this configuration to `folder`, and return the start of its ranks.

        A probe leaves loggers and checkpoints out, and checks the batches' size. InvalidValue if
        micro-batch x replicas does not divide the global batch; OSError if it cannot write.
        """
        changes = self.overlay(configuration)
        base = self.frame.config or self.file_config
        # "auto" is filled in by transformers from its own arguments, which the command sets.
        changes = {name: value for name, value in changes.items() if base.get(name) != "auto"}
        if probe and (base or self.frame.on_deepspeed):
            changes = {**_QUIET, "autotuning": None, **changes}
        config = merge(base, changes) if base or changes else {}
        values = {name: str(configuration.get(name)) for name in LAUNCH}
        values |= self.frame.batch_words(configuration, self.global_batch)
        path = folder.resolve() / "ds_config.json"
        if config:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(config, indent=2) + "\n")
        values |= {"deepspeed_config": str(path), **text_values(configuration, self.knobs)}
        words = [filled(word, values) for word in self.words]
        words, framework_env = self._with_framework(words, configuration, folder, probe=probe)
        words[:] = with_files(words, Path(self.cwd), configuration, self.knobs, folder)
        if self.config_word and config:
            position = self.config_word[0]
            before, equals, _ = words[position].rpartition("=")
            words[position] = f"{before}{equals}{path}"
        asked = {name: configuration.get(name) for name in LAUNCH}
        asked["gradient_accumulation"] = configuration.accumulation(self.global_batch)
        if not self.global_batch:  # the script's own values hold
            del asked["gradient_accumulation"], asked["micro_batch"]
        asked |= native_values(configuration, self.knobs)
        options: dict[str, Any] = {"configuration": asked, "deepspeed": changes, "quiet": probe}
        if self.hook_turns:
            options["owned"] = {name: asked[name] for name in self.hook_turns}
        if self.driver is not None:
            options["step"] = asdict(self.driver.driver.step)
            options["env"] = {n: v for n, v in framework_env.items() if n != "PYTHONPATH"}
            if "PYTHONPATH" in framework_env:  # of a generated module
                options["path"] = [framework_env["PYTHONPATH"]]
        if self.offers["activation_checkpointing"].why == SWITCH:
            mode = configuration.get("activation_checkpointing")
            options["activation_checkpointing"] = mode
        if probe and self.frame.measured and self.sets_micro_batch:
            options["micro_batch"] = configuration.micro_batch
        options["counts"] = probe and self.frame.counted
        options |= {"bare": True} if self.bare and configuration.world_size == 1 else {}
        if not probe:  # a probe's agent sets them between steps
            options["live"] = {k.name: asked[k.name] for k in self.knobs if k.by_script}
        env = {
            **(self.launcher.env if self.launcher else {}),
            **(_QUIET_ENV if probe else {}),
            **framework_env,
            **environment(configuration, self.knobs),
        }
        return Start(tuple(words), self.cwd, options, config, env, self.secrets)

    @property
    def taken(self) -> tuple[str, ...]:
        """The variables whose values are not written down, but needed where ranks start."""
        return names_taken([*self.words, *(self.launcher.env.values() if self.launcher else ())])

    def _with_framework(
        self, words: list[str], configuration: Configuration, folder: Path, *, probe: bool
    ) -> tuple[list[str], dict[str, str]]:
        if self.driven is None:
            return words, {}
        changes = self.driven.changes(configuration, self.baseline, self.global_batch)
        changes |= framework_settings(configuration, self.knobs)
        changed, env = self.driven.start(changes, folder, tuple(words), probe=probe)
        return list(changed), env

    @property
    def hook_turns(self) -> tuple[str, ...]:
        """What the hook tells the script's framework, because no key of its command does."""
        turns = self.frame.turns
        if self.driven is not None and self.driven.accumulates and "micro_batch" in self.told:
            turns = tuple(name for name in turns if name not in self.told)
            turns = tuple(name for name in turns if name != "gradient_accumulation")
        return turns

    @cached_property
    def bare(self) -> bool:
        """True if one process of the script is started without a rank, as its command does."""
        launched = self.launcher is not None and bool(self.launcher.words)
        return not launched and asks_for_a_rank(self.words, self.cwd)

    @property
    def compiled(self) -> bool:
        """True if the inspected launch showed a compiled model."""
        return self.frame.compiled

    @property
    def on_deepspeed(self) -> bool:
        """False if the script has another framework, whose driver says what it refuses."""
        return self.driver is None or self.frame.on_deepspeed

    @property
    def needs_hook(self) -> bool:
        """True if the script needs the hook outside a probe too.

        It does where it reads its configuration there, takes its rank in its command, or builds
        what is set (DeepSpeed's settings, the model's switch, its framework's batches) itself.
        """
        given = self.config_word is not None or "deepspeed_config" in self.placeholders
        switched = self.offers["activation_checkpointing"].why == SWITCH or self.hook_turns
        asks = bool(self.frame.reads) or self.asks("rank", "local_rank")
        asks = asks or any(knob.by_script for knob in self.knobs)
        asks = asks or self.bare
        asks = asks or self.frame.owner == "lightning"  # which is told the ranks that were started
        return bool(asks or switched) or (self.frame.on_deepspeed and not given)
