"""A driver bound to one command: today's values of its knobs, and a configuration applied.

Today's configuration changes nothing, so the baseline is what the command and its file say. Another
one changes the settings that differ, and always the batches, which must still make the same global
batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import Program
from tuner.search_spaces.knob_declarations import Knob, holds, names_in
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.workload.scripts.declared_knobs import framework_settings
from tuner.workload.scripts.frameworks.driver import Driver, read_driver
from tuner.workload.scripts.frameworks.settings import (
    TEMPLATE,
    UNSET,
    Fact,
    KnobKeys,
    Settings,
    matches,
    wrapped,
)
from tuner.workload.scripts.key_files import shown_text
from tuner.workload.scripts.routes import ACCUMULATION, Draft, KnobSupport, Route
from tuner.workload.scripts.script_facts import ScriptTraining

#: Follow from the micro-batch and the replicas, so they need no value today to be set.
_FOLLOW = ("global_batch", "gradient_accumulation")


@dataclass(frozen=True)
class Bound:
    """Driver of a command's framework in a version, and values `given` by a user's function.

    `gone` are the keys that the version lacks, and `former` the earlier names by which it takes
    others.
    """

    driver: Driver
    version: str = ""
    gone: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict, hash=False)
    former: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """The framework's name."""
        return self.driver.name

    @property
    def declared(self) -> Mapping[str, Knob]:
        """Knobs of its own, by name."""
        return self.driver.declared

    @property
    def title(self) -> str:
        """Name and version, for sentences."""
        return f"{self.driver.name} {self.version}".strip()

    def settings(self, words: tuple[str, ...], cwd: Path, env: Mapping[str, str]) -> Settings:
        """Return the keys of a command."""
        names = self.driver.other_names
        return Settings(self.driver.command, words, cwd, env, self.given, names, self.former)

    def applied(
        self,
        words: tuple[str, ...],
        cwd: Path,
        env: Mapping[str, str],
        *,
        devices: int,
        sequence_length: int,
        taken: Mapping[str, str],
    ) -> BoundDriver:
        """Return the driver applied to a command; `taken` knobs have placeholders of their own."""
        return BoundDriver(self, self.settings(words, cwd, env), devices, sequence_length, taken)

    def to_json(self) -> str:
        """Convert to text that `from_json` reads."""
        data = {
            **{"version": self.version, "gone": list(self.gone), "given": dict(self.given)},
            "driver": self.driver.table,
        }
        if self.former:
            data["former"] = dict(self.former)
        return json.dumps(data, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Bound:
        """Read the output of `to_json`; InputError if invalid."""
        try:
            data = json.loads(text)
            driver = read_driver(data["driver"], "the study's framework")
            former = data.get("former", {})
            return cls(driver, data["version"], tuple(data["gone"]), data["given"], former)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"this is not the framework of a script: {error}") from error


@dataclass(frozen=True)
class BoundDriver:
    """Driver and the command that it applies to; `taken` knobs have placeholders of their own."""

    bound: Bound
    settings: Settings
    devices: int
    sequence_length: int = 0
    taken: Mapping[str, str] = field(default_factory=dict)

    # ---- today

    @cached_property
    def _read(self) -> tuple[dict[str, Value], dict[str, str]]:
        today: dict[str, Value] = {}
        against: dict[str, str] = {}
        routes = self.bound.driver.knobs
        degrees = [name for name in self.bound.driver.divide if name not in self.taken]
        inside = math.prod(int(self.taken.get(n) or 1) for n in self.bound.driver.divide)
        for name in [*degrees, *(n for n in routes if n not in (*degrees, *_FOLLOW))]:
            if name in self.taken or name not in routes:
                continue
            try:
                found = self._today(name, routes[name], today)
            except InputError as error:
                against[name] = str(error)
                continue
            today[name] = found
            if name in degrees and isinstance(found, int):
                inside *= found
                today["data_parallel"] = max(1, self.devices // inside)
        return today, against

    def _today(self, name: str, route: KnobKeys, read_values: Mapping[str, Value]) -> Value:
        values = self._values({"data_parallel": self.devices, **read_values})
        gone = [key for key in route.keys if key in self.bound.gone]
        if gone and not self.levels(name):
            raise InputError(f"{self.bound.title} has no {gone[0]}")
        for key, any_of in route.needs.items():
            if not self._is(key, any_of, values):
                raise InputError(f"{key} is not {any_of[0]} today")
        for other in (*route.over, *(names_in(route.when) if route.when else ())):
            if other in self.bound.driver.knobs and other not in read_values:
                raise InputError(f"it depends on {other}, which is kept")
        if route.when and not holds(route.when, values):
            default: Value = values[name]
            return default
        if route.key:
            given = self.settings.get(route.key)
            value = route.default if given is None else given
            if name == "data_parallel" and (value is None or value == -1):
                return int(values["data_parallel"])
            factor = math.prod(values.get(other, 0) for other in route.times)
            if type(value) is not int or not factor or value % factor or value < 1:
                now = "not known" if value is None else shown_text(str(value))
                raise InputError(f"today's {route.key} is {now}")
            return KNOBS[name].check(value // factor * math.prod(values[o] for o in route.over))
        for level, wanted in self.levels(name).items():
            if all(self._is(key, any_of, values) for key, any_of in wanted.items()):
                return level
        given = [
            f"{key}={shown_text(str(now))}"
            for key in route.keys
            if (now := self.settings.get(key)) is not None
        ]
        raise InputError(f"{', '.join(given) or 'what it does by default'} of today is kept")

    def levels(self, name: str) -> Mapping[Value, Mapping[str, tuple[Any, ...]]]:
        """Return the levels of a knob for which the installed version has the keys."""
        gone = {*self.bound.gone}
        return {
            level: wanted
            for level, wanted in self.bound.driver.knobs[name].levels.items()
            if all(UNSET in wanted[key] for key in gone & {*wanted})
        }

    def _is(self, key: str, any_of: tuple[Any, ...], values: Mapping[str, Any]) -> bool:
        return _holds(self.settings.get(key), any_of, values)

    def _values(self, launch: Mapping[str, Any]) -> dict[str, Any]:
        defaults = {name: knob.default for name, knob in KNOBS.items() if knob.kind == "launch"}
        return {**defaults, "sequence_length": self.length, "world_size": self.devices, **launch}

    def _values_of(self, configuration: Configuration) -> dict[str, Any]:
        launch = {name: configuration.get(name) for name in self._values({}) if name in KNOBS}
        return {**self._values(launch), "world_size": configuration.world_size}

    @property
    def today(self) -> Mapping[str, Value]:
        """Today's value of each knob that the driver sets."""
        return self._read[0]

    @property
    def against(self) -> Mapping[str, str]:
        """The reason against each knob that the driver has and cannot set here."""
        return self._read[1]

    @cached_property
    def length(self) -> int:
        """Tokens of a sequence; 0 where not known."""
        return self.sequence_length or self.fact("sequence_length") or 0

    def fact(self, name: str) -> int:
        """Return an integer that the command or its file gives, such as "steps"; 0 without it."""
        fact = self.bound.driver.facts.get(name, Fact())
        given = (value for key in fact.keys if (value := self.settings.get(key)) is not None)
        value = next(given, None)
        return value if type(value) is int and value > 0 else 0

    @property
    def program(self) -> Program:
        """Behaviour of the framework's program with today's settings."""
        facts: dict[str, Any] = {
            name: self.settings.get(value) is True if isinstance(value, str) else value
            for name, value in self.bound.driver.program.items()
        }
        return Program(**facts, partition=self.bound.driver.partition)  # type: ignore[arg-type]

    @cached_property
    def accumulates(self) -> bool:
        """True if the framework takes the global batch or the accumulation."""
        routes = self.bound.driver.knobs
        named = [name for name in _FOLLOW if name in routes and name not in self.taken]
        return any(not {*routes[name].keys} & {*self.bound.gone} for name in named)

    @cached_property
    def batches(self) -> tuple[int, int]:
        """Today's (micro-batch, accumulation); 0 where not known."""
        micro = self.today.get("micro_batch") or int(self.taken.get("micro_batch") or 0)
        replicas = self.today.get("data_parallel")
        replicas = replicas if isinstance(replicas, int) else self.devices
        if not isinstance(micro, int) or not micro or not self.accumulates:
            return (micro if isinstance(micro, int) else 0), 0
        routes = self.bound.driver.knobs
        values = self._values({**self.today, "data_parallel": replicas})
        for name in _FOLLOW:
            if name not in routes:
                continue
            route = routes[name]
            given = self.settings.get(route.key)
            given = route.default if given is None else given
            whole = math.prod(values[other] for other in route.times)
            whole *= micro * replicas if name == "global_batch" else 1
            if type(given) is int and given > 0 and whole and given % whole == 0:
                return micro, given // whole
            if given is None:
                return micro, 0
        return micro, 1

    # ---- a configuration

    def changes(
        self, configuration: Configuration, today: Configuration, global_batch: int
    ) -> dict[str, Any]:
        """Return the settings that a configuration changes, by key."""
        changed: dict[str, Any] = {}
        if configuration.launch == today.launch:
            return changed
        times = configuration.accumulation(global_batch)
        values = self._values_of(configuration)
        values |= {"global_batch": global_batch, "gradient_accumulation": times}
        for name, route in self.bound.driver.knobs.items():
            follows = name in _FOLLOW and self.accumulates
            if name in self.taken or (name not in self.today and not follows):
                continue
            if route.when and not holds(route.when, values):
                continue
            if route.key:
                new = values[name] * math.prod(values[other] for other in route.times)
                new //= math.prod(values[other] for other in route.over)
                now = self.settings.get(route.key)
                if now != new and not (now is None and new == route.default):
                    changed[route.key] = new
            else:
                for key, any_of in route.levels.get(values[name], {}).items():
                    # A knob before this one in the file may have set the key already.
                    now = changed.get(key, self.settings.get(key))
                    if not _holds(None if now == UNSET else now, any_of, values):
                        changed[key] = _rendered(any_of[0], values)
        return changed

    def declared(self, knob: Knob) -> Any:
        """Return today's value of a declared knob, or None; InputError if its key is gone."""
        if knob.target[1] in self.bound.gone:
            raise InputError(f"{self.bound.title} has no {knob.target[1]}")
        now = self.settings.get(knob.target[1])
        return self.bound.driver.defaults.get(knob.target[1]) if now is None else now

    def refused(self, configuration: Configuration) -> list[str]:
        """Return a phrase for each rule of the framework that a configuration breaks."""
        values, phrases = self._values_of(configuration), []
        replicas = int(values["data_parallel"]) * int(values["sequence_parallel"])
        kept = all(values[name] == "none" for name in ("optimizer_offload", "parameter_offload"))
        for name in ("zero_stage", "sharding") if replicas == 1 and kept else ():
            if values[name] != (now := self.today.get(name, values[name])):
                phrases.append(f"{name} over one replica repeats today's {now}")
        groups = int(values["hsdp_replicas"])
        if groups > 1 and replicas <= groups:
            phrases.append(f"hsdp_replicas {groups} leaves one rank of each group to shard over")
        for rule in self.bound.driver.rules:
            if rule.require:
                broken = not holds(rule.require, values)
                reason = f"{rule.require} does not hold"
            else:
                whole = values.get(rule.of) or self.settings.get(rule.of) or rule.default
                degree = math.prod(int(values[name]) for name in rule.divide)
                broken = type(whole) is int and whole % degree != 0
                reason = f"{' x '.join(rule.divide)} = {degree} does not divide {rule.of} = {whole}"
            if broken:
                phrases.append(f"{reason}: {rule.why}")
        return phrases

    def start(
        self, changes: Mapping[str, Any], folder: Path, words: tuple[str, ...], *, probe: bool
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """Write the changed file or module; return words and variables, or raise InputError."""
        driver = self.bound.driver
        quiet = {k: v for k, v in driver.quiet.items() if k not in self.bound.gone} if probe else {}
        wanted = {**{k: v for k, v in quiet.items() if self.settings.get(k) != v}, **changes}
        settings = replace(self.settings, words=words)
        env = dict(driver.quiet_env) if probe else {}
        in_words = {
            key: value for key, value in wanted.items() if settings.in_command(settings.name(key))
        }
        if driver.wrapper is None:
            words, more = settings.changed(wanted, folder)
        else:
            words, more = settings.changed(in_words, folder)
            rest = {key: value for key, value in wanted.items() if key not in in_words}
            if rest:
                words, more = wrapped(driver.wrapper, rest, words, folder)
        return words, {**env, **more}


def _holds(now: Any, any_of: tuple[Any, ...], values: Mapping[str, Any]) -> bool:
    return matches(now, tuple(_rendered(one, values) for one in any_of))


def _rendered(value: Any, values: Mapping[str, Any]) -> Any:
    if not isinstance(value, str):
        return value
    whole = TEMPLATE.fullmatch(value)
    if whole:
        return values[whole[1]]
    return TEMPLATE.sub(lambda found: str(values[found[1]]), value)


def _driven(job: ScriptTraining) -> BoundDriver | None:
    return job.driven if isinstance(job.driven, BoundDriver) else None


class DriverKeys(Route):
    """Keys of a recognised framework in the command, its file or the environment."""

    def today(self, job: ScriptTraining) -> Mapping[str, Value]:
        """Return the values of the keys."""
        return driven.today if (driven := _driven(job)) is not None else {}

    def support(self, job: ScriptTraining, knob: str) -> KnobSupport | None:
        """Support each knob whose key the installed framework has."""
        if (driven := _driven(job)) is None:
            return None
        driver = driven.bound.driver
        if knob == ACCUMULATION and driven.accumulates:
            return KnobSupport(f"{driver.name} follows the global batch", route=self)
        if knob not in driven.today:
            return None
        levels = tuple(driven.levels(knob)) if knob in driver.knobs else ()
        named = driver.knobs[knob].keys[0] if knob in driver.knobs else "number of ranks"
        return KnobSupport(f"{driver.name}'s {named}", levels, self)

    def why_not(self, job: ScriptTraining, knob: str) -> str:
        """Return the driver's reason."""
        return driven.against.get(knob, "") if (driven := _driven(job)) is not None else ""

    def apply(self, job: ScriptTraining, configuration: Configuration, draft: Draft) -> None:
        """Write the keys that differ from today's, and those that keep a probe silent."""
        if (driven := _driven(job)) is None:
            return
        changes = driven.changes(configuration, draft.baseline, job.global_batch)
        changes |= framework_settings(configuration, job.knobs)
        words, env = driven.start(changes, draft.folder, tuple(draft.words), probe=draft.probe)
        draft.use_words(words)
        draft.add_variables(env)
        draft.options["env"] = {name: env[name] for name in env if name != "PYTHONPATH"}
        if "PYTHONPATH" in env:  # of a generated module
            draft.options["path"] = [env["PYTHONPATH"]]
