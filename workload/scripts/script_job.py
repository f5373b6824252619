"""A user's own training script as a job: its knobs, and its start under a configuration.

`ScriptJob` writes the merged DeepSpeed configuration of a probe and the options of the hook. The
user's choices (optimizer, scheduler, precision, global batch) are kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.declared import Knob, check_knobs
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import write_text
from tuner.workload.declared_knobs import (
    deepspeed_settings,
    environment,
    framework_settings,
    native_values,
    resolved,
    text_values,
    with_files,
)
from tuner.workload.deepspeed_config import render_deepspeed_config
from tuner.workload.hook import merge, split_differently
from tuner.workload.scripts.command import Start, asks_for_a_rank, filled
from tuner.workload.scripts.knob_support import SupportedScript
from tuner.workload.scripts.script_facts import LAUNCH, OFFLOADS, OLD_OFFLOADS

#: Nothing of a probe is logged: a run of twenty steps is no experiment.
_QUIET = {name: {"enabled": False} for name in ("tensorboard", "wandb", "csv_monitor", "comet")}
_QUIET_ENV = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
}


@dataclass(frozen=True)
class ScriptJob(SupportedScript):
    """Job that a user's script trains: its knobs, and its start under a configuration."""

    def declares(self, knobs: Sequence[Knob]) -> ScriptJob:
        """Return this job with declared knobs at today's values; InputError if one cannot be."""
        made, left_out = [], []
        for knob in knobs:
            try:
                made.append(resolved(knob, self))
            except InputError as error:
                if not knob.optional:
                    raise
                left_out.append(f"knob {knob.name} is left out: {error}")
        kept = check_knobs(made)
        return replace(self, knobs=kept, assumed=tuple(dict.fromkeys([*self.assumed, *left_out])))

    # ---- how it starts

    def overlay(self, configuration: Configuration) -> dict[str, Any]:
        """Return a configuration's changes to the DeepSpeed settings (0.19); None removes a key.

        InvalidValue if micro-batch x data parallelism does not divide the global batch.
        """
        said: dict[str, Any] = {}
        if self.driver is not None and not self.frame.on_deepspeed:
            return deepspeed_settings(configuration, self.knobs)
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
        for knob, section in OFFLOADS.items():
            if knob in self.offers and self.offers[knob].turned:
                zero = said.setdefault("zero_optimization", {})
                zero[section] = rendered.get(section)
                # DeepSpeed refuses the old spelling beside the new one.
                zero |= {name: None for name in OLD_OFFLOADS[section] if name in self.frame.zero}
        if (said.get("zero_optimization") or {}).get("offload_optimizer"):
            said |= self._optimizer_on_host
        return merge(said, deepspeed_settings(configuration, self.knobs))

    @property
    def _optimizer_on_host(self) -> dict[str, Any]:
        optimizer = self.frame.config.get("optimizer") or {}
        if self.frame.client_optimizer or not optimizer:
            return {"zero_force_ds_cpu_optimizer": False}
        if (optimizer.get("params") or {}).get("torch_adam"):
            # The same update by DeepSpeed's kernel for the host, which it insists on.
            return {"optimizer": {"params": {"torch_adam": False}}}
        return {}

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
            options["env"] = {n: v for n, v in framework_env.items() if n != "PYTHONPATH"}
            if "PYTHONPATH" in framework_env:  # of a generated module
                options["path"] = [framework_env["PYTHONPATH"]]
        if self.by_switch:
            mode = configuration.get("activation_checkpointing")
            options["activation_checkpointing"] = mode
        if probe and self.frame.measured and self.sets_micro_batch:
            options["micro_batch"] = configuration.micro_batch
        options["counts"] = probe and self.frame.counted
        options |= {"bare": True} if self.bare and configuration.world_size == 1 else {}
        if not probe:  # a probe's agent sets them between steps
            options["live"] = {k.name: asked[k.name] for k in self.knobs if k.live}
        env = {
            **(self.launcher.env if self.launcher else {}),
            **(_QUIET_ENV if probe else {}),
            **framework_env,
            **environment(configuration, self.knobs),
        }
        return Start(tuple(words), self.cwd, options, config, env, self.secrets)

    def inspection_start(self, configuration: Configuration, folder: Path, *, alter: bool) -> Start:
        """Return the start of a look at the script: under the hook, until its first steps.

        With `alter`, and if DeepSpeed's configuration allows it, the batch is split otherwise: the
        size of the first one shows if the script follows DeepSpeed or makes its batches itself.
        """
        start = self.start(configuration, folder)
        options = {**start.options, "inspect": True, "alter": False}
        if alter and "micro_batch" not in self.placeholders:
            other = split_differently(start.config, configuration.data_parallel)
            if other:  # in the file too: the script may read it by itself
                config = merge(start.config, other)
                write_text(folder / "ds_config.json", json.dumps(config))
                options["deepspeed"] = {**start.options["deepspeed"], **other}
            options["alter"] = not start.config
        return replace(start, options=options)

    def _with_framework(
        self, words: list[str], configuration: Configuration, folder: Path, *, probe: bool
    ) -> tuple[list[str], dict[str, str]]:
        if self.driven is None:
            return words, {}
        changes = self.driven.changes(configuration, self.baseline, self.global_batch)
        changes |= framework_settings(configuration, self.knobs)
        changed, env = self.driven.start(changes, folder, tuple(words), probe=probe)
        return list(changed), env

    @cached_property
    def bare(self) -> bool:
        """True if one process of the script is started without a rank, as its command does."""
        launched = self.launcher is not None and bool(self.launcher.words)
        return not launched and asks_for_a_rank(self.words, self.cwd)

    @property
    def needs_hook(self) -> bool:
        """True if the script needs the hook outside a probe too, to be told or set what it asks."""
        given = self.config_word is not None or "deepspeed_config" in self.placeholders
        switched = self.by_switch or self.hook_turns
        asks = bool(self.frame.reads) or self.asks("rank", "local_rank")
        asks = asks or any(knob.live for knob in self.knobs)
        asks = asks or self.bare
        asks = asks or self.frame.owner == "lightning"  # which is told the ranks that were started
        return bool(asks or switched) or (self.frame.on_deepspeed and not given)
