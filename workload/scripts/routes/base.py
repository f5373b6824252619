"""Parts of every route: its protocol, the support of a knob, and the start that it changes."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.search_spaces.safe_files import write_text
from tuner.workload.scripts.command import filled
from tuner.workload.scripts.script_facts import LAUNCH
from tuner.workload.scripts.script_training import ScriptTraining

#: Degrees of parallelism inside the model, which a script builds by the model's sizes.
DEGREES = ("tensor_parallel", "pipeline_parallel", "sequence_parallel", "expert_parallel")
#: Parts of the split of a batch, which follow from each other.
ACCUMULATION = "gradient_accumulation"
SPLIT = ("data_parallel", "micro_batch")


@dataclass(frozen=True)
class KnobSupport:
    """Support of a knob by a script, and a phrase with the reason.

    Attributes:
        route: the route that sets it, or None if none does.
        values: the values that it can have; all of the search space if there are none.
    """

    why: str
    values: tuple[Value, ...] = ()
    route: Route | None = None

    @property
    def turned(self) -> bool:
        """True if the knob can be set."""
        return self.route is not None


@dataclass
class Draft:
    """Start of a script's ranks, which the routes fill in.

    Attributes:
        baseline: the present configuration.
        offers: support of each launch knob by the first route that has it.
        splits_batch: the micro-batch can be set, or is known, and the accumulation follows it.
        checks_batch: the ranks compare the size of their first batch with the configuration.
        command: the whole command, if it is started as it stands; else "".
        typed: words of a rank as that command starts them.
        options: those of the hook.
        config: the whole DeepSpeed configuration; empty without DeepSpeed.
    """

    folder: Path
    probe: bool
    baseline: Configuration
    offers: Mapping[str, KnobSupport]
    splits_batch: bool
    checks_batch: bool
    words: list[str]
    env: dict[str, str]
    command: str = ""
    typed: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def config_file(self) -> Path:
        """Path of the DeepSpeed configuration of this start."""
        return self.folder.resolve() / "ds_config.json"

    def fill(self, values: Mapping[str, str]) -> None:
        """Fill in the placeholders of the words, and of the whole command."""
        self.words = [filled(word, values) for word in self.words]
        self.typed = tuple(filled(word, values) for word in self.typed)
        self.command = filled(self.command, values)

    def use_words(self, words: Sequence[str]) -> None:
        """Replace the words of the command."""
        self.words = list(words)

    def add_variables(self, env: Mapping[str, str]) -> None:
        """Set environment variables of the ranks."""
        self.env |= env

    def use_config(self, config: dict[str, Any]) -> None:
        """Set the whole DeepSpeed configuration, and write its file."""
        self.config = config
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.config_file, json.dumps(config, indent=2) + "\n")


@dataclass(frozen=True)
class Route:
    """One way in which knobs are set on a user's script; those of one class are equal."""

    def today(self, job: ScriptTraining) -> Mapping[str, Value]:
        """Return the present values of the knobs that this route sets."""
        return {}

    def support(self, job: ScriptTraining, knob: str) -> KnobSupport | None:
        """Return the support of a launch knob, or of the accumulation; None if there is none."""
        return None

    def why_not(self, job: ScriptTraining, knob: str) -> str:
        """Return why a knob is not supported, a phrase, or "" if another route may know."""
        return ""

    def apply(self, job: ScriptTraining, configuration: Configuration, draft: Draft) -> None:
        """Change the start of the ranks to this configuration."""
        raise NotImplementedError


@dataclass(frozen=True)
class PluginRoute(Route):
    """A route of another distribution, without which the others go on if it fails.

    A start that it was to change does not: InputError names the route.
    """

    name: str
    route: Any = field(compare=False)

    def today(self, job: ScriptTraining) -> Mapping[str, Value]:
        found = self._asked("today", job)
        with contextlib.suppress(AttributeError, TypeError, InputError):
            if {*found} <= {*LAUNCH}:
                return {name: KNOBS[name].check(value) for name, value in found.items()}
        self._warn(f"today() must return launch knobs with their values, not {found!r}"[:200])
        return {}

    def support(self, job: ScriptTraining, knob: str) -> KnobSupport | None:
        found = self._asked("support", job, knob)
        if isinstance(found, KnobSupport):
            return replace(found, route=self)
        if found is not None:
            self._warn(f"support() must return a KnobSupport or None, not {found!r}"[:200])
        return None

    def why_not(self, job: ScriptTraining, knob: str) -> str:
        return str(self._asked("why_not", job, knob) or "")

    def _asked(self, method: str, *about: Any) -> Any:
        try:
            return getattr(self.route, method)(*about)
        except Exception as error:  # of another distribution: whatever it raises
            self._warn(f"{method}() failed ({type(error).__name__}: {str(error)[:200]})")
            return {} if method == "today" else None

    def _warn(self, fault: str) -> None:
        warnings.warn(f"the route {self.name!r} sets nothing: {fault}", stacklevel=2)

    def apply(self, job: ScriptTraining, configuration: Configuration, draft: Draft) -> None:
        try:
            self.route.apply(job, configuration, draft)
        except Exception as error:
            fault = f"apply() failed ({type(error).__name__}: {str(error)[:200]})"
            raise InputError(f"the route {self.name!r} cannot start the script: {fault}") from error


def taken_by_script(route: Route, job: ScriptTraining, knob: str) -> KnobSupport | None:
    """Return the support of a knob that the script itself builds, or None."""
    if sizes_unknown(job, knob):
        return None
    return KnobSupport("the script takes it", route=route)


def sizes_unknown(job: ScriptTraining, knob: str) -> str:
    """Return why a script cannot build a degree of parallelism, or ""."""
    if knob not in DEGREES or job.model:
        return ""
    return "the model's sizes are not known; give --model-config"
