"""Launch knobs that can be set on a user's script, and the reasons against the others.

The *frame* that a script trains in (DeepSpeed, transformers' Trainer, Accelerate, Lightning, a
plain torch loop) decides: it may own the batches, the accumulation, the optimizer and the model.
A knob without evidence of one inspected launch is not offered, and the user gets the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.declared import CHANGED
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.search_spaces.space import Auto, SearchSpace
from tuner.workload.scripts.script_facts import LAUNCH, OFFLOADS, ScriptFacts

_BUILT = ("tensor_parallel", "pipeline_parallel", "sequence_parallel", "expert_parallel")
#: Why the knobs that split the batch stay as they are.
NO_BATCH = "the global batch is not known (--global-batch N tells it)"
#: Why activation checkpointing is in play where the hook turns it on the model.
_SWITCH = "the model's own switch"


@dataclass(frozen=True)
class KnobSupport:
    """Support of one launch knob by a script, with why (not), a phrase; no values for all."""

    turned: bool
    why: str
    values: tuple[Value, ...] = ()


def _without_sizes(job: ScriptFacts, name: str) -> KnobSupport | None:
    if name in _BUILT and name in job.asked_of_script and not job.model:
        return KnobSupport(False, "the model's sizes are not known; give --model-config")
    return None


def _by_framework(job: ScriptFacts, name: str) -> KnobSupport | None:
    driven = job.driven
    if driven is None or name not in driven.today:
        return None
    driver = driven.bound.driver
    return KnobSupport(
        True, f"{driver.name}'s {driver.knobs[name].keys[0]}", tuple(driven.levels(name))
    )


def _by_script(job: ScriptFacts, name: str) -> KnobSupport | None:
    return KnobSupport(True, "the script takes it") if job.asks(name) else None


def _data_parallel(job: ScriptFacts, name: str) -> KnobSupport | None:
    if name != "data_parallel":
        return None
    if job.frame.ranks_stay:
        return KnobSupport(False, job.frame.ranks_stay)
    if job.frame.keeps == "micro_batch":
        return KnobSupport(True, "the micro-batch keeps the global batch")
    if job.accumulates:
        return KnobSupport(True, "the accumulation keeps the global batch")
    by = job.frame.owner or "the script"
    if not job.global_batch:
        return KnobSupport(False, NO_BATCH)
    return KnobSupport(
        False,
        f"on fewer ranks the global batch would shrink, for {by} sets the accumulation "
        f"({{gradient_accumulation={job.frame.accumulation or 'N'}}} in the command would)",
    )


def _micro_batch(job: ScriptFacts, name: str) -> KnobSupport | None:
    if name != "micro_batch":
        return None
    if job.frame.micro_batch_stays and "micro_batch" not in job.placeholders:
        return KnobSupport(False, job.frame.micro_batch_stays)
    if job.frame.keeps == "micro_batch" and not job.frame.ranks_stay:
        return KnobSupport(True, "with the ranks, so that the global batch stays")
    if job.frame.follows:
        return KnobSupport(True, "the batches follow DeepSpeed's micro-batch")
    if job.driven is not None and "micro_batch" in job.driven.today and job.accumulates:
        return _by_framework(job, "micro_batch")
    if "micro_batch" in job.frame.turns and job.accumulates:
        return KnobSupport(True, f"{job.frame.owner or 'its framework'}'s own argument")
    if job.asks("micro_batch") and job.accumulates:
        return KnobSupport(True, "the script takes it")
    if job.asks("micro_batch"):
        return KnobSupport(
            False,
            NO_BATCH
            if not job.global_batch
            else "the accumulation cannot follow it ("
            f"{{gradient_accumulation={job.frame.accumulation or 'N'}}} in the command would)",
        )
    by = "the script" if job.frame.owner in ("", "accelerate", "lightning") else job.frame.owner
    return KnobSupport(
        False,
        f"{by} makes its batches itself ({{micro_batch={job.frame.micro_batch or 'N'}}} in the "
        "command would set it)",
    )


def _by_deepspeed(job: ScriptFacts, name: str) -> KnobSupport | None:
    frame = job.frame
    under = frame.on_deepspeed or "deepspeed_config" in job.placeholders
    if name == "zero_stage" and under:
        return KnobSupport(True, "DeepSpeed's configuration")
    if name not in OFFLOADS or not under or frame.device(OFFLOADS[name]) not in ("none", "cpu"):
        return None
    own = frame.client_optimizer
    if own and name == "optimizer_offload":
        # SuperOffload replaces the optimizer, which is the user's to keep.
        return KnobSupport(True, f"DeepSpeed's configuration, with its {own}", ("none", "cpu"))
    # A script's own folder on a drive is not known.
    values = tuple(value for value in KNOBS[name].choices if value != "nvme")
    return KnobSupport(True, "DeepSpeed's configuration", values)


def _by_switch(job: ScriptFacts, name: str) -> KnobSupport | None:
    able = name == "activation_checkpointing" and job.frame.can_checkpoint
    return KnobSupport(True, _SWITCH, ("none", "full")) if able else None


def _why_not(job: ScriptFacts, name: str) -> KnobSupport:
    if job.driven is not None and name in job.driven.against:
        why = job.driven.against[name]
    elif name in OFFLOADS and (job.frame.on_deepspeed or "deepspeed_config" in job.placeholders):
        why = f"today's offload to {job.frame.device(OFFLOADS[name])} is kept"
    elif name == "zero_stage" or name in OFFLOADS:
        why = "the script does not train under DeepSpeed"
    else:
        why = (
            "the script must build it: it may read joulefront_hook.configuration() or take {KNOB} "
            "in its command"
        )
    return KnobSupport(False, why)


#: Ways to set a knob on a script, in the order in which they answer for it.
_ROUTES: tuple[Callable[[ScriptFacts, str], KnobSupport | None], ...] = (
    *(_without_sizes, _data_parallel, _micro_batch),
    *(_by_framework, _by_script, _by_deepspeed, _by_switch, _why_not),
)


@dataclass(frozen=True)
class SupportedScript(ScriptFacts):
    """Facts about a script, and the launch knobs that it supports."""

    @cached_property
    def offers(self) -> Mapping[str, KnobSupport]:
        """The support of each launch knob, by the first route that answers for it."""
        return {
            name: next(support for route in _ROUTES if (support := route(self, name)))
            for name in LAUNCH
        }

    @property
    def by_switch(self) -> bool:
        """True if activation checkpointing is set by the model's own switch."""
        return self.offers["activation_checkpointing"].why == _SWITCH

    def sentences(self, searched: Collection[str] = LAUNCH) -> tuple[str, ...]:
        """Describe the knobs in play and the reasons against the rest, one sentence each."""
        able = [name for name in LAUNCH if self.offers[name].turned]
        turned = [name for name in able if name in searched] + [knob.name for knob in self.knobs]
        left = [name for name in able if name not in searched]
        reasons: dict[str, list[str]] = {}
        for name in LAUNCH:
            if not self.offers[name].turned:
                reasons.setdefault(self.offers[name].why, []).append(name)
        frame, driver = self.frame, self.driver.driver if self.driver else None
        own = {knob.name for knob in self.knobs}
        others = [name for name in driver.declared if name not in own] if driver else []
        counted = {"torch": "a torch optimizer", "program": "steps of its own"}
        by = f"{frame.owner} over " * bool(frame.owner) + counted.get(frame.kind, "DeepSpeed")
        by += f", recognised as {self.driver.title}" if self.driver else ""
        return (
            f"the script {self.name!r} trains by {by}; in play: "
            f"{', '.join(turned) or 'no launch knob'}, and live settings where the machine lets "
            "them be set",
            *([f"not in this search space: {', '.join(left)}"] if left else []),
            *(
                [f"{driver.name} also has {', '.join(others)} (--knobs framework)"]
                if driver and others
                else []
            ),
            *(f"not in play: {', '.join(names)}: {why}" for why, names in reasons.items()),
            *self.assumed,
        )

    def narrowed(self, space: SearchSpace) -> SearchSpace:
        """Return the space with knobs that this script cannot set fixed at present values."""
        choices: dict[str, tuple[Value, ...] | Auto] = {}
        for name in KNOBS:
            choice, offer = space.choices.get(name), self.offers.get(name)
            if name == "global_batch":
                continue
            if offer is None:
                if choice is not None:
                    choices[name] = choice
                continue
            today = self.baseline.get(name)
            assert today is not None  # every launch knob has a default
            if name == "sharding" and choice is None and _shards_otherwise(self, space):
                choice = offer.values
            if choice is None or not offer.turned or choice == Auto(kind="baseline"):
                default = KNOBS[name].default
                if today != default and default is not None:
                    # A knob that the space does not name stands at its default, or as today.
                    can = choice is None and offer.turned
                    can = can and default in (offer.values or (default,))
                    choices[name] = (default, today) if can else (today,)
            elif isinstance(choice, tuple):
                kept = [v for v in choice if not offer.values or v in offer.values]
                choices[name] = (*kept, today)
            else:
                choices[name] = (*offer.values, today) if offer.values else choice
        return replace(space, choices=choices)

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


def why_nothing(job: SupportedScript) -> tuple[str, ...]:
    """Return why none of the knobs that split the batch can be turned, a sentence each."""
    reasons: dict[str, list[str]] = {}
    for name in ("micro_batch", "data_parallel"):
        reasons.setdefault(job.offers[name].why, []).append(name)
    stay = [f"{' and '.join(names)}: {why}" for why, names in reasons.items() if why != NO_BATCH]
    return (*stay, *(note for note in job.assumed if "predicted before" not in note))


def _shards_otherwise(job: ScriptFacts, space: SearchSpace) -> bool:
    stages = space.choices.get("zero_stage")
    searched = isinstance(stages, tuple) and len(stages) > 1
    return searched and job.driven is not None and "sharding" in job.driven.today
