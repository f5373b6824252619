"""A user's script with what can be set on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.declared import CHANGED, with_baseline
from tuner.search_spaces.knobs import KNOBS
from tuner.workload.scripts.routes import KnobSupport, support_of, today_of
from tuner.workload.scripts.script_facts import LAUNCH
from tuner.workload.scripts.script_training import ScriptTraining

#: Part of a configuration's name even at their defaults; of the others only what is not.
_ALWAYS_NAMED = ("data_parallel", "micro_batch", "zero_stage")


@dataclass(frozen=True)
class SupportedScript(ScriptTraining):
    """Script with its present configuration and the support of each knob."""

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
