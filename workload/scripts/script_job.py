"""A user's own training script as a job: its knobs, and its start under a configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.declared import CHANGED, Knob, check_knobs, with_baseline
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.safe_files import write_text
from tuner.workload.declared_knobs import resolved
from tuner.workload.hook import merge, split_differently
from tuner.workload.scripts.command import Start, asks_for_a_rank
from tuner.workload.scripts.routes import (
    BATCH_SPLIT,
    FRAMEWORK_ARGUMENTS,
    MODEL_SWITCH,
    ROUTES,
    Draft,
    KnobSupport,
    support_of,
    today_of,
)
from tuner.workload.scripts.script_facts import LAUNCH, ScriptFacts

#: Part of a configuration's name even at their defaults; of the others only what is not.
_ALWAYS_NAMED = ("data_parallel", "micro_batch", "zero_stage")
#: Variables of a probe, of which nothing is logged.
_QUIET_ENV = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
}


@dataclass(frozen=True)
class ScriptJob(ScriptFacts):
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

    # ---- knobs

    @cached_property
    def baseline(self) -> Configuration:
        """The user's present configuration."""
        values = {
            name: value
            for name, value in today_of(self).items()
            if name in _ALWAYS_NAMED or (name in KNOBS and value != KNOBS[name].default)
        }
        return with_baseline(Configuration.of(values), self.knobs)

    @cached_property
    def offers(self) -> Mapping[str, KnobSupport]:
        """The support of each launch knob."""
        return {name: support_of(self, name) for name in LAUNCH}

    def refused(self, configuration: Configuration) -> list[str]:
        """Return a phrase for each knob value that this script cannot take; empty if none."""
        phrases = []
        declared = {*(knob.name for knob in self.knobs), CHANGED}
        for name, value in configuration.launch.items():
            if name in declared:
                continue
            offer, today = self.offers.get(name), self.baseline.get(name)
            if offer is None:
                phrases.append(f"{name} is no knob of a script")
            elif value != today and not offer.turned:
                phrases.append(f"{name} is {today} in this script and not {value}: {offer.why}")
            elif value != today and offer.values and value not in offer.values:
                phrases.append(f"{name} {value} is none of {', '.join(map(str, offer.values))}")
        if self.frame.keeps == "micro_batch" and not phrases:
            today = self.baseline.micro_batch * self.baseline.data_parallel
            if configuration.micro_batch * configuration.data_parallel != today:
                phrases.append(f"micro-batch x ranks stay {today}: the script does not accumulate")
        if self.driven is not None and not phrases and configuration.launch != self.baseline.launch:
            phrases += self.driven.refused(configuration)
        return phrases

    # ---- how it starts

    def start(self, configuration: Configuration, folder: Path, *, probe: bool = True) -> Start:
        """Write the files of this configuration to `folder`, and return the start of its ranks.

        A probe leaves loggers and checkpoints out, and checks the batches' size. InvalidValue if
        micro-batch x replicas does not divide the global batch; OSError if it cannot write.
        """
        env = {**(self.launcher.env if self.launcher else {}), **(_QUIET_ENV if probe else {})}
        sets_micro_batch = BATCH_SPLIT.sets_micro_batch(self)
        known = sets_micro_batch or bool(self.frame.micro_batch)
        draft = Draft(
            folder,
            probe,
            self.baseline,
            self.offers,
            splits_batch=known and BATCH_SPLIT.accumulates(self),
            checks_batch=sets_micro_batch and self.frame.measured,
            words=list(self.words),
            env=env,
        )
        draft.options["quiet"] = probe
        if self.bare and configuration.world_size == 1:
            draft.options["bare"] = True
        for route in ROUTES:
            route.apply(self, configuration, draft)
        words, options = tuple(draft.words), draft.options
        return Start(words, self.cwd, options, draft.config, draft.env, self.secrets)

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

    @cached_property
    def bare(self) -> bool:
        """True if one process of the script is started without a rank, as its command does."""
        launched = self.launcher is not None and bool(self.launcher.words)
        return not launched and asks_for_a_rank(self.words, self.cwd)

    @property
    def needs_hook(self) -> bool:
        """True if the script needs the hook outside a probe too, to read or be set what it asks."""
        given = self.config_word is not None or "deepspeed_config" in self.placeholders
        switched = self.offers[MODEL_SWITCH.knob].route is MODEL_SWITCH
        return bool(
            self.frame.reads
            or {"rank", "local_rank"} & {*self.placeholders}
            or any(knob.live for knob in self.knobs)
            or self.bare
            or self.frame.owner == "lightning"  # which is told the ranks that were started
            or switched
            or FRAMEWORK_ARGUMENTS.set_by_hook(self)
            or (self.frame.on_deepspeed and not given)
        )
