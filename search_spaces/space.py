"""Search spaces, and the enumeration of their valid configurations.

A `SearchSpace` gives the values of each knob, some of them relative to the job and the cluster
("auto" degrees, divisors of the global batch, evenly spaced clocks). `candidates` chooses the
launch knobs one by one and applies each rule (`tuner.search_spaces.rules`) as soon as the knobs it
reads are chosen, so that an impossible degree is dropped before it is combined with others; the
live settings are checked once for all launches. A study searches the result, `Candidates`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from tuner.search_spaces.baseline import default_configuration, degrees
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.data_files import check_keys, find_file, included_names, read_toml
from tuner.search_spaces.errors import InputError, InvalidValue, UnknownName
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knob_declarations import Knob, check_knobs, marked
from tuner.search_spaces.knobs import KNOBS, StandardKnob, Value, knob_named
from tuner.search_spaces.rules import RULES, Rule

_DEGREES = tuple(name for name, knob in KNOBS.items() if knob.degree)


@dataclass(frozen=True)
class Auto:
    """Values that depend on the job and the cluster; "baseline" is `default_configuration`'s.

    Attributes:
        count: largest number of clocks or power limits, evenly spaced; None for all.
        lowest_share: the lowest clock, as a share of the highest.
    """

    kind: Literal["auto", "baseline"] = "auto"
    max: int | None = None
    count: int | None = None
    lowest_share: float = 0.0


@dataclass(frozen=True)
class SearchSpace:
    """Values of each knob; knobs that are not listed have their defaults."""

    name: str
    choices: Mapping[str, tuple[Value, ...] | Auto] = field(hash=False)
    what: str = ""

    def __post_init__(self) -> None:
        tidy: dict[str, tuple[Value, ...] | Auto] = {}
        for name, choice in self.choices.items():
            knob = knob_named(name)
            where = f"{name} in space {self.name!r}"
            if isinstance(choice, Auto):
                if choice.kind == "baseline" and knob.kind == "live":
                    raise InvalidValue(where, "baseline", "for launch knobs only")
                tidy[name] = choice
            elif not choice:
                raise InvalidValue(where, list(choice), "not empty")
            else:
                tidy[name] = tuple(dict.fromkeys(knob.check(value) for value in choice))
        # In the order of KNOBS, degrees first.
        object.__setattr__(self, "choices", {n: tidy[n] for n in KNOBS if n in tidy})

    @property
    def changing(self) -> tuple[str, ...]:
        """Names of its knobs that change the trained model."""
        return tuple(name for name in self.choices if KNOBS[name].changes_training)

    def same_training(self) -> SearchSpace:
        """Return this space with the knobs that change the trained model left at their defaults."""
        kept = {n: choice for n, choice in self.choices.items() if n not in self.changing}
        return replace(self, choices=kept)

    def to_knobs(self) -> dict[str, Any]:
        """Return the table [knobs] of a space file."""
        table: dict[str, Any] = {}
        for name, choice in self.choices.items():
            if isinstance(choice, Auto):
                own = {k: v for k, v in vars(choice).items() if k != "kind" and v}
                table[name] = own or choice.kind
            else:
                table[name] = list(choice)
        return table

    def values(self, job: TrainingJob, cluster: Cluster) -> dict[str, tuple[Value, ...]]:
        """Return the values of each knob for this job on this cluster, before any rule.

        A live knob may have none: it is then left to the device.
        """
        resolved: dict[str, tuple[Value, ...]] = {}
        baseline: Configuration | None = None
        for name, choice in self.choices.items():
            if not isinstance(choice, Auto):
                resolved[name] = choice
            elif choice.kind == "baseline":
                baseline = baseline or default_configuration(job, cluster)
                value = baseline.get(name)
                assert value is not None  # every launch knob has a default
                resolved[name] = (value,)
            else:
                resolved[name] = _automatic(KNOBS[name], choice, job, cluster)
        return resolved

    def candidates(self, job: TrainingJob, cluster: Cluster) -> Candidates:
        """Return every valid configuration of this space for this job on this cluster.

        Each launch is combined with the values of the knobs that the job declares. Every launch
        has the live setting in which clocks are "left to the device"; if clocks cannot be set, and
        the job declares no live knob, it is the only one.
        """
        launches, lives = zip(*self.groups(job, cluster), strict=True)
        return Candidates(launches, lives)

    def groups(
        self, job: TrainingJob, cluster: Cluster, *, gpus: int | None = None
    ) -> Iterator[tuple[Settings, tuple[Settings, ...]]]:
        """Yield each launch of `candidates` with its live settings, so that none need be kept.

        With `gpus`, only launches of this number of ranks, if there are any.
        """
        values = self.values(job, cluster)
        launch_values = {n: v for n, v in values.items() if KNOBS[n].kind == "launch"}
        live_values = {n: v for n, v in values.items() if KNOBS[n].kind == "live"}
        walk = _Walk(launch_values, job, cluster, gpus)

        # Live rules may read launch knobs (one clock per stage): check once per value of these.
        rules = [r for r in RULES if any(KNOBS[k].kind == "live" for k in r.knobs)]
        read = sorted({k for r in rules for k in r.knobs if KNOBS[k].kind == "launch"})
        every = [
            Settings({n: v for n, v in zip(live_values, each, strict=True) if v is not None})
            for each in product(*((None, *choices) for choices in live_values.values()))
        ]
        checked: dict[tuple[Value | None, ...], tuple[Settings, ...]] = {}
        combined: dict[tuple[Any, ...], tuple[Settings, ...]] = {}
        shared: dict[tuple[Settings, ...], tuple[Settings, ...]] = {}
        first: Settings | None = None
        knobs = check_knobs(job.knobs)

        def refusal(launch: Settings, live: Settings) -> str | None:
            phrases = (rule.broken(Configuration(launch, live), job, cluster) for rule in rules)
            return next((phrase for phrase in phrases if phrase is not None), None)

        for launch in (each for standard in walk.launches() for each in expanded(standard, knobs)):
            first = first or launch
            configuration = Configuration(launch)
            context = tuple(configuration.get(knob) for knob in read)
            if context not in checked:
                checked[context] = tuple(live for live in every if refusal(launch, live) is None)
            own = live_choices(launch, knobs)
            if (context, own) not in combined:
                lives = tuple(Settings(each, **more) for more in own for each in checked[context])
                combined[context, own] = shared.setdefault(lives, lives)
            yield launch, combined[context, own]
        if first is None:
            if gpus is not None:
                return
            raise InputError(
                f"space {self.name!r} has no configuration that can train job {job.name!r} on "
                f"cluster {cluster.name!r}: {walk.verdict()}"
            )
        if cluster.clock_control and not any(map(any, checked.values())):
            alone = (
                Settings({n: value}) for n, choices in live_values.items() for value in choices
            )
            if phrase := next(filter(None, (refusal(first, live) for live in alone)), None):
                raise InputError(f"no live setting of space {self.name!r} holds: {phrase}")


def _automatic(
    knob: StandardKnob, choice: Auto, job: TrainingJob, cluster: Cluster
) -> tuple[Value, ...]:
    if knob.choices:
        return knob.choices
    if knob.name == "clock_MHz":
        offered = cluster.clocks_MHz
        if not offered:
            return ()
        usable = [clock for clock in offered if clock >= choice.lowest_share * offered[-1]]
        return tuple(usable[i] for i in _evenly(len(usable), choice.count))
    if knob.name == "power_limit_W":
        low, high = cluster.device.min_limit_W, cluster.device.max_limit_W
        if not cluster.clock_control or low is None or high <= low:
            return ()
        # The highest limit is the device's default, so it would be measured twice.
        count = choice.count or 8
        return tuple(dict.fromkeys(math.ceil(low + (high - low) * i / count) for i in range(count)))
    if knob.name == "global_batch":
        return job.global_batches
    if knob.name in _DEGREES:
        numbers = degrees(cluster.devices)
    else:
        numbers = [n for n in range(1, job.global_batch + 1) if job.global_batch % n == 0]
    return tuple(n for n in numbers if choice.max is None or n <= choice.max)


def _evenly(length: int, count: int | None) -> list[int]:
    if count is None or count >= length:
        return list(range(length))
    if count == 1:
        return [length - 1]
    return [round(i * (length - 1) / (count - 1)) for i in range(count)]


def expanded(launch: Settings, knobs: Sequence[Knob]) -> Iterator[Settings]:
    """Yield a launch with each combination of the declared knobs that apply, baseline first.

    Knobs are in the order of `check_knobs`. One that does not apply, or is not set, is left out.
    """
    knobs = [knob for knob in knobs if not knob.live]

    def choices(chosen: dict[str, Value], left: Sequence[Knob]) -> Iterator[dict[str, Value]]:
        if not left:
            yield chosen
            return
        knob, *rest = left
        for level in knob.levels if knob.applies(chosen, knobs) else (None,):
            more = chosen if level is None else {**chosen, knob.name: level}
            yield from choices(more, rest)

    for chosen in choices(dict(launch), knobs):
        yield Settings(marked(chosen, knobs))


def live_choices(launch: Settings, knobs: Sequence[Knob]) -> tuple[Settings, ...]:
    """Return each combination of the declared live knobs that apply to a launch, baseline first."""
    able = [knob for knob in knobs if knob.live and knob.applies(launch, knobs)]
    levels = ([level for level in knob.levels if level is not None] for knob in able)
    return tuple(
        Settings(dict(zip((knob.name for knob in able), chosen, strict=True)))
        for chosen in product(*levels)
    )


class _Walk:
    """Depth-first enumeration of launches that applies each rule once its knobs are chosen."""

    def __init__(
        self,
        values: Mapping[str, tuple[Value, ...]],
        job: TrainingJob,
        cluster: Cluster,
        gpus: int | None,
    ) -> None:
        self._names = list(values)
        self._values = list(values.values())
        self._job, self._cluster, self._gpus = job, cluster, gpus
        self._refused: dict[str, int] = {}
        self._examples: dict[str, str] = {}
        # below[d]: number of launches under one choice of the first d knobs.
        self._below = [1] * (len(values) + 1)
        for depth in reversed(range(len(values))):
            self._below[depth] = self._below[depth + 1] * len(self._values[depth])
        # due[d]: the rules whose knobs are all chosen (or have defaults) after d knobs.
        place = {name: depth + 1 for depth, name in enumerate(self._names)}
        self._all_degrees = max((place.get(degree, 0) for degree in _DEGREES), default=0)
        self._due: list[list[Rule]] = [[] for _ in range(len(values) + 1)]
        for rule in RULES:
            if all(KNOBS[knob].kind == "launch" for knob in rule.knobs):
                self._due[max((place.get(knob, 0) for knob in rule.knobs), default=0)].append(rule)

    def launches(self, chosen: tuple[Value, ...] = ()) -> Iterator[Settings]:
        """Yield the launches that no rule refuses, under values of the first knobs."""
        depth = len(chosen)
        sized = self._gpus is not None and depth == self._all_degrees
        if sized or self._due[depth] or depth == len(self._names):
            settings = Settings(dict(zip(self._names, chosen, strict=False)))
            configuration = Configuration(settings)
            if sized and configuration.world_size != self._gpus:
                return
            if self._due[depth] and self._refuses(configuration, depth):
                return
            if depth == len(self._names):
                yield settings
                return
        for value in self._values[depth]:
            yield from self.launches((*chosen, value))

    def _refuses(self, configuration: Configuration, depth: int) -> bool:
        for rule in self._due[depth]:
            phrase = rule.broken(configuration, self._job, self._cluster)
            if phrase is not None:
                self._refused[rule.name] = self._refused.get(rule.name, 0) + self._below[depth]
                self._examples.setdefault(rule.name, phrase)
                return True
        return False

    def verdict(self) -> str:
        """Return a phrase on the rule that refused the most, with its first numbers."""
        name = max(self._refused, key=lambda rule: self._refused[rule])
        return (
            f"rule {name} refuses {self._refused[name]} of {self._below[0]} launch settings, the "
            f"first because {self._examples[name]}"
        )


def space_names() -> list[str]:
    """Return the names of the spaces that joulefront includes."""
    return included_names("spaces")


def load_space(name_or_path: str | Path | None = None) -> SearchSpace:
    """Load a space by shipped name or by the path of a toml file; "default" by default.

    The file has `what` and a table `[knobs]`: for each knob a list of values, "auto", "baseline",
    or a table of `Auto`'s fields, e.g. `clock_MHz = { count = 8, lowest_share = 0.4 }`.
    """
    text = str(name_or_path or "default")
    file, name = find_file("spaces", text, "space")
    data = read_toml(file, f"space {text!r}")
    check_keys(data, ("name", "what", "knobs"), f"space {name!r}")
    what = str(data.get("what", ""))
    return read_space(str(data.get("name", name)), data.get("knobs"), what=what)


def read_space(name: str, knobs: Any, *, what: str = "") -> SearchSpace:
    """Return a space from the table [knobs] of its file, or of a study (`SearchSpace.to_knobs`)."""
    if not isinstance(knobs, Mapping) or not knobs:
        raise InputError(f"space {name!r} has no table [knobs]; name at least one knob there")
    choices = {knob: _read_choice(knob, choice, name) for knob, choice in knobs.items()}
    return SearchSpace(name, choices, what)


def _read_choice(name: str, choice: Any, space: str) -> tuple[Value, ...] | Auto:
    knob = knob_named(name)
    where = f"{name} in space {space!r}"
    if choice in ("auto", "baseline"):
        return Auto(kind=choice)
    if isinstance(choice, list):
        return tuple(knob.check(value) for value in choice)
    if not isinstance(choice, dict):
        raise InvalidValue(where, choice, 'a list of values, "auto", "baseline" or a table')
    allowed: tuple[str, ...] = () if knob.choices else ("max",)
    if knob.kind == "live":
        allowed = ("count", "lowest_share") if name == "clock_MHz" else ("count",)
    for key, value in choice.items():
        if key not in allowed:
            raise UnknownName(f"key of {where}", key, allowed)
        share = key == "lowest_share"
        number = isinstance(value, int | float) if share else isinstance(value, int)
        if not number or isinstance(value, bool) or not (0 <= value <= 1 if share else value >= 1):
            legal = "a share from 0 to 1" if share else "an integer of at least 1"
            raise InvalidValue(f"{key} of {where}", value, legal)
    return Auto(**choice)
