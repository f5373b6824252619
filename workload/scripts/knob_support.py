"""Knobs of a user's script: the search space that they leave, and sentences about the others.

The *frame* that a script trains in (DeepSpeed, transformers' Trainer, Accelerate, Lightning, a
plain torch loop) decides: it may own the batches, the accumulation, the optimizer and the model.
A knob without evidence of one inspected launch is not offered, and the user gets the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.knob_declarations import CHANGED, with_baseline
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.search_spaces.space import Auto, SearchSpace
from tuner.workload.scripts.routes import KnobSupport, support_of, today_of
from tuner.workload.scripts.routes.batch_split import NO_BATCH
from tuner.workload.scripts.script_facts import LAUNCH
from tuner.workload.scripts.script_training import ScriptTraining

#: Part of a configuration's name even at their defaults; of the others only what is not.
_ALWAYS_NAMED = ("data_parallel", "micro_batch", "zero_stage")


@dataclass(frozen=True)
class ScriptKnobs:
    """Knobs of a script: their present values, their support and the space that they leave."""

    job: ScriptTraining

    @cached_property
    def baseline(self) -> Configuration:
        """The user's present configuration."""
        values = {
            name: value
            for name, value in today_of(self.job).items()
            if name in _ALWAYS_NAMED or (name in KNOBS and value != KNOBS[name].default)
        }
        return with_baseline(Configuration.of(values), self.job.knobs)

    @cached_property
    def offers(self) -> Mapping[str, KnobSupport]:
        """The support of each launch knob."""
        return {name: support_of(self.job, name) for name in LAUNCH}

    def refused(self, configuration: Configuration) -> list[str]:
        """Return a phrase for each knob value that this script cannot take; empty if none."""
        phrases = []
        declared = {*(knob.name for knob in self.job.knobs), CHANGED}
        for name, value in configuration.launch.items():
            if name in declared:
                continue
            offer, today = self.offers.get(name), self.baseline.get(name)
            if offer is None:
                phrases.append(f"{name} is not a knob of a script")
            elif value != today and not offer.turned:
                phrases.append(f"{name} is {today} in this script and not {value}: {offer.why}")
            elif value != today and offer.values and value not in offer.values:
                phrases.append(f"{name} {value} is none of {', '.join(map(str, offer.values))}")
        if self.job.frame.keeps == "micro_batch" and not phrases:
            today = self.baseline.micro_batch * self.baseline.data_parallel
            if configuration.micro_batch * configuration.data_parallel != today:
                phrases.append(f"micro-batch x ranks stay {today}: the script does not accumulate")
        if phrases or self.job.driven is None or configuration.launch == self.baseline.launch:
            return phrases
        return self.job.driven.refused(configuration)

    def restricted(self, space: SearchSpace) -> SearchSpace:
        """Return the space with knobs that a script cannot set fixed at present values."""
        choices: dict[str, tuple[Value, ...] | Auto] = {}
        for name in KNOBS:
            choice = space.choices.get(name)
            if name == "sharding" and choice is None and _shards_otherwise(self.job, space):
                choice = self.offers[name].values
            if name == "global_batch":
                continue
            kept = self._choice_of(name, choice) if name in self.offers else choice
            if kept is not None:
                choices[name] = kept
        return replace(space, choices=choices)

    def _choice_of(
        self, name: str, choice: tuple[Value, ...] | Auto | None
    ) -> tuple[Value, ...] | Auto | None:
        offer, today, default = self.offers[name], self.baseline.get(name), KNOBS[name].default
        assert today is not None  # every launch knob has a default
        if choice is None or not offer.turned or choice == Auto(kind="baseline"):
            if today == default or default is None:
                return None
            # A knob that the space does not name stands at its default, or as today.
            can = choice is None and offer.turned and default in (offer.values or (default,))
            return (default, today) if can else (today,)
        if isinstance(choice, tuple):
            kept = [value for value in choice if not offer.values or value in offer.values]
            return (*kept, today)
        return (*offer.values, today) if offer.values else choice

    def sentences(self, searched: Collection[str] = LAUNCH) -> tuple[str, ...]:
        """Describe the knobs in play and the reasons against the rest, one sentence each."""
        able = [name for name in LAUNCH if self.offers[name].turned]
        declared = [knob.name for knob in self.job.knobs]
        turned = [*(name for name in able if name in searched), *declared]
        left = [name for name in able if name not in searched]
        sentences = [
            f"the script {self.job.name!r} trains by {_trainer(self.job)}; in play: "
            f"{', '.join(turned) or 'no launch knob'}, and live settings where the machine lets "
            "them be set"
        ]
        if left:
            sentences.append(f"not in this search space: {', '.join(left)}")
        if others := _undeclared(self.job):
            sentences.append(f"{others} (--knobs framework)")
        for why, names in self._reasons(LAUNCH).items():
            sentences.append(f"not in play: {', '.join(names)}: {why}")
        return (*sentences, *self.job.assumed)

    def why_nothing(self) -> tuple[str, ...]:
        """Return why none of the knobs that split the batch can be turned, a sentence each."""
        reasons = self._reasons(("micro_batch", "data_parallel"))
        stay = [
            f"{' and '.join(names)}: {why}" for why, names in reasons.items() if why != NO_BATCH
        ]
        return (*stay, *(note for note in self.job.assumed if "predicted before" not in note))

    def _reasons(self, names: Collection[str]) -> dict[str, list[str]]:
        reasons: dict[str, list[str]] = {}
        for name in names:
            if not self.offers[name].turned:
                reasons.setdefault(self.offers[name].why, []).append(name)
        return reasons


def _trainer(job: ScriptTraining) -> str:
    counted = {"torch": "a torch optimizer", "program": "steps of its own"}
    by = counted.get(job.frame.kind, "DeepSpeed")
    by = f"{job.frame.owner} over {by}" if job.frame.owner else by
    return f"{by}, recognised as {job.driver.title}" if job.driver else by


def _undeclared(job: ScriptTraining) -> str:
    if job.driver is None:
        return ""
    own, driver = {knob.name for knob in job.knobs}, job.driver.driver
    others = [name for name in driver.declared if name not in own]
    return f"{driver.name} also has {', '.join(others)}" if others else ""


def _shards_otherwise(job: ScriptTraining, space: SearchSpace) -> bool:
    stages = space.choices.get("zero_stage")
    searched = isinstance(stages, tuple) and len(stages) > 1
    return searched and job.driven is not None and "sharding" in job.driven.today
