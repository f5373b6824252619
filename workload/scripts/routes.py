"""Routes: the ways in which a knob is set on a user's script.

A route knows what its way can do on a script: the values that stand there today, which knobs it
supports and why it does not support another, and what a configuration changes on the start of the
ranks. `support_of` asks the routes in their order; each of them is applied at every start.
"""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import whole_number
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.search_spaces.safe_files import write_text
from tuner.workload.scripts import SOCKET
from tuner.workload.scripts.command import filled
from tuner.workload.scripts.declared_knobs import (
    environment,
    native_values,
    text_values,
    torch_settings,
    with_files,
)
from tuner.workload.scripts.script_facts import LAUNCH, OFFLOADS, ScriptTraining

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


#: What would open both, of a loop of the script's own that steps after each backward pass.
_EDIT = "; a loop without accumulation needs four lines: docs/your-script.md#accumulation"
#: Reason against the knobs that split a batch of unknown size.
NO_BATCH = "the global batch is not known (--global-batch N tells it)"


@dataclass(frozen=True)
class BatchSplit(Route):
    """Split of the same global batch over ranks, micro-batches and accumulation.

    The other routes set its parts; this one says which splits keep the global batch.
    """

    carriers: Callable[[], Sequence[Route]]

    def today(self, job: ScriptTraining) -> Mapping[str, Value]:
        """Return the micro-batch that the inspection showed, and the ranks that are left for it."""
        found = today_by(self.carriers(), job)
        degrees: list[Any] = [found.get(name, 1) for name in DEGREES[:3]]
        return {
            "data_parallel": max(1, job.devices // math.prod(degrees)),
            **({"micro_batch": job.frame.micro_batch} if job.frame.micro_batch else {}),
        }

    def support(self, job: ScriptTraining, knob: str) -> KnobSupport | None:
        """Support a part of the split if another part keeps the global batch."""
        frame = job.frame
        if knob == "data_parallel" and not frame.ranks_stay:
            if frame.keeps == "micro_batch":
                return KnobSupport("the micro-batch keeps the global batch", route=self)
            if self.accumulates(job):
                return KnobSupport("the accumulation keeps the global batch", route=self)
        if knob != "micro_batch" or self._stays(job):
            return None
        if frame.keeps == "micro_batch" and not frame.ranks_stay:
            return KnobSupport("with the ranks, so that the global batch stays", route=self)
        return self._carrier(job, "micro_batch") if self.accumulates(job) else None

    def _stays(self, job: ScriptTraining) -> str:
        return "" if "micro_batch" in job.placeholders else job.frame.micro_batch_stays

    def why_not(self, job: ScriptTraining, knob: str) -> str:
        """Return which part of the split cannot follow."""
        frame = job.frame
        name = f"{{gradient_accumulation={frame.accumulation or 'N'}}}"
        would = f"(if an argument of the script sets it, write {name} in its place)"
        if knob == "data_parallel":
            by = frame.owner or "the script"
            return frame.ranks_stay or (
                f"on other ranks the global batch would change, for {by} keeps its accumulation "
                f"{would}"
                if job.global_batch
                else NO_BATCH
            )
        if self._stays(job):
            return frame.micro_batch_stays
        if self.sets_micro_batch(job):
            if not job.global_batch:
                return NO_BATCH
            edit = _EDIT if frame.accumulation == 1 and not frame.owner else ""
            return f"the accumulation does not follow it {would}{edit}"
        if frame.unproven:
            return (
                f"{frame.unproven} (if it sets the batch all the same, write "
                f"{{micro_batch={frame.micro_batch or 'N'}}} for its value)"
            )
        by = "the script" if frame.owner in ("", "accelerate", "lightning") else frame.owner
        return (
            f"no argument of {by} was found that sets its batch size (if one does, write "
            f"{{micro_batch={frame.micro_batch or 'N'}}} in its place)"
        )

    def apply(self, job: ScriptTraining, configuration: Configuration, draft: Draft) -> None:
        """Have the hook compare the first batches of a probe with the configuration."""
        if draft.probe and draft.checks_batch:
            draft.options["micro_batch"] = configuration.micro_batch
        draft.options["counts"] = draft.probe and job.frame.counted

    def sets_micro_batch(self, job: ScriptTraining) -> bool:
        """Return True if the micro-batch of a script can be set."""
        return self._carrier(job, "micro_batch") is not None

    def accumulates(self, job: ScriptTraining) -> bool:
        """Return True if the accumulation can be chosen to keep the global batch."""
        if not job.global_batch:
            return False
        return job.frame.keeps == "accumulation" or self._carrier(job, ACCUMULATION) is not None

    def _carrier(self, job: ScriptTraining, knob: str) -> KnobSupport | None:
        found = (route.support(job, knob) for route in self.carriers())
        return next((support for support in found if support is not None), None)


def today_by(routes: Sequence[Route], job: ScriptTraining) -> dict[str, Value]:
    """Return the present values that some routes know; of several the first one's."""
    found: dict[str, Value] = {}
    for route in reversed(routes):
        found |= route.today(job)
    return found


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


class Placeholders(Route):
    """Placeholders of the command, such as {micro_batch=8}."""

    def today(self, job: ScriptTraining) -> Mapping[str, Value]:
        """Return the values that the placeholders state."""
        stated = {name: text for name, text in job.placeholders.items() if name in LAUNCH and text}
        numbers = {name: whole_number(text) for name, text in stated.items()}
        return {
            name: text if numbers[name] is None else numbers[name]  # type: ignore[misc]
            for name, text in stated.items()
        }

    def support(self, job: ScriptTraining, knob: str) -> KnobSupport | None:
        """Support each knob that has a placeholder."""
        return taken_by_script(self, job, knob) if knob in job.placeholders else None

    def why_not(self, job: ScriptTraining, knob: str) -> str:
        """Name the requirements of the script's own parallelism."""
        return sizes_unknown(job, knob) if knob in job.placeholders else ""

    def apply(self, job: ScriptTraining, configuration: Configuration, draft: Draft) -> None:
        """Fill the placeholders in; those of a rank stay."""
        values = {name: str(configuration.get(name)) for name in LAUNCH}
        values |= self._batch(job, configuration)
        values |= {"deepspeed_config": str(draft.config_file)}
        values |= text_values(configuration, job.knobs)
        draft.fill(values)

    def _batch(self, job: ScriptTraining, configuration: Configuration) -> dict[str, str]:
        # An argument may carry more than its part of the batch.
        times = job.frame.accumulation  # an unknown global batch leaves the script's own
        if job.global_batch:
            times = configuration.accumulation(job.global_batch)
        parts = {"micro_batch": configuration.micro_batch, ACCUMULATION: times}
        factors = {"ranks": configuration.data_parallel, ACCUMULATION: times}
        for name, carried in job.frame.carries.items():
            parts[name] *= math.prod(factors[each] for each in carried.split())
        return {name: str(part) for name, part in parts.items()}


class KeyFiles(Route):
    """Keys of the user's files, for declared knobs."""

    def apply(self, job: ScriptTraining, configuration: Configuration, draft: Draft) -> None:
        """Write changed copies of the files, and name them in the command."""
        words = with_files(draft.words, Path(job.cwd), configuration, job.knobs, draft.folder)
        draft.use_words(words)


class Variables(Route):
    """Environment variables, for declared knobs."""

    def apply(self, job: ScriptTraining, configuration: Configuration, draft: Draft) -> None:
        """Set the variables."""
        draft.add_variables(environment(configuration, job.knobs))


FRAMEWORK_ARGUMENTS = FrameworkArguments()
MODEL_SWITCH = ModelSwitch()


@cache
def carriers() -> tuple[Route, ...]:
    """Return the routes that set a value each, in the order in which they answer and are applied.

    Those of frameworks and of DeepSpeed where they are installed, and last those of other
    distributions.
    """
    in_command = [Placeholders(), *_shipped("framework keys"), HookValues()]
    in_settings = [*_shipped("deepspeed"), FRAMEWORK_ARGUMENTS, MODEL_SWITCH, KeyFiles()]
    plugins = [PluginRoute(name, route) for name, route in SOCKET.plugins.found.items()]
    return (*in_command, *in_settings, Variables(), TorchSettings(), *plugins)


def _shipped(name: str) -> list[Route]:
    made = SOCKET.part(name)
    return [made()] if made is not None else []


BATCH_SPLIT = BatchSplit(carriers)


def routes() -> tuple[Route, ...]:
    """Return all routes, as they are applied."""
    return (*carriers(), BATCH_SPLIT)


_MUST_BUILD = (
    "the script must build it: it may read joulefront_hook.configuration() or take {KNOB} in its "
    "command"
)


def support_of(job: ScriptTraining, knob: str) -> KnobSupport:
    """Return the support of a launch knob by the first route that has it, or the first reason."""
    able = (BATCH_SPLIT,) if knob in SPLIT else carriers()
    for route in able:
        if (support := route.support(job, knob)) is not None:
            return support
    reasons = (route.why_not(job, knob) for route in able)
    return KnobSupport(next(filter(None, reasons), _MUST_BUILD))


__all__ = [
    "BATCH_SPLIT",
    "FRAMEWORK_ARGUMENTS",
    "MODEL_SWITCH",
    "Draft",
    "KnobSupport",
    "Route",
    "carriers",
    "routes",
    "support_of",
    "today_by",
]
