"""Routes through the hook: values read by a script, a framework's arguments, a model's switch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.workload.scripts.declared_knobs import native_values, torch_settings
from tuner.workload.scripts.routes.base import (
    ACCUMULATION,
    DEGREES,
    SPLIT,
    Draft,
    KnobSupport,
    Route,
    sizes_unknown,
    taken_by_script,
)
from tuner.workload.scripts.script_facts import LAUNCH, OFFLOADS
from tuner.workload.scripts.script_training import ScriptTraining


class HookValues(Route):
    """Values that the script reads by `joulefront_hook.configuration()`."""

    def today(self, job: ScriptTraining) -> Mapping[str, Value]:
        """Return the values that the script itself gives where it reads a knob."""
        found: dict[str, Value] = {}
        for name in job.frame.reads:
            own: Any = job.frame.own.get(name)
            counted = name in (*SPLIT, *DEGREES)
            in_file = bool(job.file_config) and name in ("zero_stage", *OFFLOADS)
            if name in LAUNCH and not (counted or in_file) and _is_legal(name, own):
                found[name] = own
        return found

    def support(self, job: ScriptTraining, knob: str) -> KnobSupport | None:
        """Support each knob that the script was seen to read."""
        return taken_by_script(self, job, knob) if knob in job.frame.reads else None

    def why_not(self, job: ScriptTraining, knob: str) -> str:
        """Name the requirements of the script's own parallelism."""
        return sizes_unknown(job, knob) if knob in job.frame.reads else ""

    def apply(self, job: ScriptTraining, configuration: Configuration, draft: Draft) -> None:
        """Give the hook the whole configuration, and live knobs where no agent sets them."""
        requested = {name: configuration.get(name) for name in LAUNCH}
        requested[ACCUMULATION] = configuration.accumulation(job.global_batch)
        if not job.global_batch:  # the script's own values hold
            del requested[ACCUMULATION], requested["micro_batch"]
        requested |= native_values(configuration, job.knobs)
        draft.options["configuration"] = requested
        if not draft.probe:
            draft.options["live"] = {
                knob.name: requested[knob.name] for knob in job.knobs if knob.live
            }


class TorchSettings(Route):
    """Settings of torch that the hook sets in whatever loader and optimizer a program makes."""

    def apply(self, job: ScriptTraining, configuration: Configuration, draft: Draft) -> None:
        """Have the hook set what differs from today's."""
        if settings := torch_settings(configuration, job.knobs):
            draft.options["torch"] = settings


class FrameworkArguments(Route):
    """Batch arguments of Trainer, Accelerate or Lightning, which the hook sets."""

    def support(self, job: ScriptTraining, knob: str) -> KnobSupport | None:
        """Support the arguments that the inspected framework was given."""
        if knob not in job.frame.turns:
            return None
        return KnobSupport(f"{job.frame.owner or 'its framework'}'s own argument", route=self)

    def set_by_hook(self, job: ScriptTraining) -> tuple[str, ...]:
        """Return the arguments that no key or placeholder of the command sets."""
        turns = job.frame.turns
        if job.driven is None or not job.driven.accumulates:
            return turns
        given = {*job.driven.today, *job.placeholders}
        if "micro_batch" not in given:
            return turns
        return tuple(name for name in turns if name not in (*given, ACCUMULATION))

    def apply(self, job: ScriptTraining, configuration: Configuration, draft: Draft) -> None:
        """Have the hook set the arguments."""
        values = {"micro_batch": configuration.micro_batch}
        values[ACCUMULATION] = configuration.accumulation(job.global_batch)
        if names := self.set_by_hook(job):
            draft.options["owned"] = {name: values[name] for name in names}


class ModelSwitch(Route):
    """Activation checkpointing by the switch of a transformers model."""

    knob = "activation_checkpointing"

    def today(self, job: ScriptTraining) -> Mapping[str, Value]:
        """Return the switch's position."""
        return {self.knob: "full" if job.frame.checkpoints else "none"}

    def support(self, job: ScriptTraining, knob: str) -> KnobSupport | None:
        """Support the switch's two positions."""
        if knob != self.knob or not job.frame.can_checkpoint:
            return None
        return KnobSupport("the model's own switch", ("none", "full"), self)

    def apply(self, job: ScriptTraining, configuration: Configuration, draft: Draft) -> None:
        """Have the hook set the switch, unless another route sets the knob."""
        if draft.offers[self.knob].route == self:
            draft.options[self.knob] = configuration.get(self.knob)


def _is_legal(name: str, value: Any) -> bool:
    if type(value) not in (int, str):
        return False
    try:
        KNOBS[name].check(value)
    except InputError:
        return False
    return True
