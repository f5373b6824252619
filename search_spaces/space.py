"""Search spaces, the configurations in them, and the one that a user would run untuned.

A `SearchSpace` gives the values of each knob, some of them relative to the job and the cluster
("auto" degrees, divisors of the global batch, evenly spaced clocks). `candidates` chooses the
launch knobs one by one and applies each rule (`tuner.search_spaces.rules`) as soon as the knobs it
reads are chosen, so that an impossible degree is dropped before it is combined with others; the
live settings are checked once for all launches.

A study searches the result: `Candidates`, a finite list grouped by launch, because a launch is paid
for once and a live setting costs only a window. It may also come from any list of configurations,
such as a recorded table. Configurations are found by hash; indices are not pickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, product
from pathlib import Path
from typing import Any, Literal

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.data_files import check_keys, find_file, included_names, read_toml
from tuner.search_spaces.errors import InputError, InvalidConfiguration, InvalidValue, UnknownName
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knob_declarations import Knob, check_knobs, marked
from tuner.search_spaces.knobs import KNOBS, StandardKnob, Value, knob_named
from tuner.search_spaces.model_sizes import reader_of
from tuner.search_spaces.rules import RULES, Rule, broken_rules, why_it_cannot_run


@dataclass(frozen=True)
class Candidates:
    """Finite list of valid configurations, grouped by launch.

    Attributes:
        lives: the live settings of each launch (not every launch of a recorded table has all of
            them). Equal settings are one object.
        among: the list that these were selected from; None if it is complete.
        knobs: knobs that the user declares, which say how far their values are apart.
    """

    launches: tuple[Settings, ...]
    lives: tuple[tuple[Settings, ...], ...]
    among: Candidates | None = None
    knobs: tuple[Knob, ...] = ()

    def __post_init__(self) -> None:
        if len(self.launches) != len(self.lives):
            raise InputError(f"{len(self.launches)} launches but {len(self.lives)} lists of lives")
        if len(set(self.launches)) != len(self.launches):
            raise InputError("a launch setting occurs twice among the candidates")

    @classmethod
    def from_configurations(cls, configurations: Iterable[Configuration]) -> Candidates:
        """Group any list of configurations by launch, in the order of first occurrence."""
        groups: dict[Settings, dict[Settings, None]] = {}
        shared: dict[Settings, Settings] = {}
        for configuration in configurations:
            live = shared.setdefault(configuration.live, configuration.live)
            group = groups.setdefault(configuration.launch, {})
            if live in group:
                raise InputError(f"configuration {configuration.key} occurs twice in the list")
            group[live] = None
        tuples: dict[tuple[Settings, ...], tuple[Settings, ...]] = {}
        lives = (tuple(group) for group in groups.values())
        return cls(tuple(groups), tuple(tuples.setdefault(live, live) for live in lives))

    @property
    def whole(self) -> Candidates:
        """Complete list, which names a study's parameters, whichever of it are searched."""
        return self.among or self

    def where(self, wanted: Callable[[Settings], bool]) -> Candidates:
        """Return the candidates whose launch is wanted."""
        both = zip(self.launches, self.lives, strict=True)
        kept = [(launch, lives) for launch, lives in both if wanted(launch)]
        if len(kept) == len(self.launches):
            return self
        launches, lives = zip(*kept, strict=True) if kept else ((), ())
        return Candidates(launches, lives, self.whole, self.knobs)

    @cached_property
    def configurations(self) -> tuple[Configuration, ...]:
        """All configurations, launch by launch."""
        return tuple(
            Configuration(launch, live)
            for launch, lives in zip(self.launches, self.lives, strict=True)
            for live in lives
        )

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(accumulate(map(len, self.lives), initial=0))

    @cached_property
    def _launch_positions(self) -> dict[Settings, int]:
        exact = {launch: i for i, launch in enumerate(self.launches)}
        return {without_defaults(launch): i for launch, i in exact.items()} | exact

    @cached_property
    def _live_positions(self) -> dict[tuple[Settings, ...], dict[Settings, int]]:
        return {lives: {live: i for i, live in enumerate(lives)} for lives in set(self.lives)}

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[Configuration]:
        return iter(self.configurations)

    def __getitem__(self, index: int) -> Configuration:
        return self.configurations[index]

    def __contains__(self, configuration: object) -> bool:
        return isinstance(configuration, Configuration) and self.find(configuration) is not None

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without the indices, which are rebuilt on demand."""
        return {name: getattr(self, name) for name in ("launches", "lives", "among", "knobs")}

    def _launch_position(self, launch: Settings) -> int | None:
        position = self._launch_positions.get(launch)
        return (
            self._launch_positions.get(without_defaults(launch)) if position is None else position
        )

    def find(self, configuration: Configuration) -> int | None:
        """Return the position of a configuration, or None; see `index_of`."""
        position = self._launch_position(configuration.launch)
        if position is None:
            return None
        live = self._live_positions[self.lives[position]].get(configuration.live)
        return None if live is None else self._starts[position] + live

    def indices_of_launch(self, launch: Settings) -> range:
        """Return the positions of the configurations of one launch."""
        position = self._launch_position(launch)
        if position is None:
            raise InputError(
                f"launch setting {launch.key} is not among the {len(self.launches)} candidates'"
            )
        return range(self._starts[position], self._starts[position + 1])

    def index_of(self, configuration: Configuration) -> int:
        """Return the position of a configuration; a missing launch knob means its default."""
        index = self.find(configuration)
        if index is None:
            raise InputError(
                f"configuration {configuration.key} is not one of the {len(self)} candidates"
            )
        return index


def without_defaults(launch: Settings) -> Settings:
    """Return launch settings without those that are defaults, which start the same if left out."""
    return Settings({n: v for n, v in launch.items() if n not in KNOBS or KNOBS[n].default != v})


#: Tokens in a micro-batch: enough to fill a GPU's matrix units, few enough for its memory.
_USUAL_TOKENS = 8192


def degrees(devices: int) -> list[int]:
    """Return the powers of two and the divisors of the device count, up to it."""
    return [n for n in range(1, devices + 1) if devices % n == 0 or n & (n - 1) == 0]


def default_configuration(job: TrainingJob, cluster: Cluster) -> Configuration:
    """Return the baseline, which a user would run today without tuning.

    Data parallelism over as many devices as the global batch allows, the lowest ZeRO stage whose
    model states fit a device, the largest micro-batch of at most 8,192 tokens
    whose activations fit beside them, and the clock left to the device. It offloads the optimizer
    only if no stage fits, and checkpoints activations only if no micro-batch fits.
    InvalidConfiguration if the job cannot run here at all (e.g. fp16 on a CPU).
    """
    refused: list[str] = []
    for data_parallel in reversed(degrees(cluster.devices)):
        configuration = _baseline_at(data_parallel, job, cluster)
        refused = broken_rules(configuration, job, cluster)
        if not refused:
            return configuration
    raise InvalidConfiguration(configuration.short, refused)


def changed_default(job: TrainingJob, cluster: Cluster, changed: Configuration) -> Configuration:
    """Return the default configuration with some knobs changed, on as many devices as they allow.

    What is not changed is the default's at that number of replicas. A ZeRO stage that the other
    knobs rule out, as stages 2 and 3 in a pipeline, gives way to a lower one.
    """
    degree = changed.world_size // changed.data_parallel
    numbers = reversed(degrees(max(1, cluster.devices // degree)))
    if "data_parallel" in changed.launch:
        numbers = iter([changed.data_parallel])
    found: list[tuple[Configuration, list[str]]] = []
    for data_parallel in numbers:
        default = _baseline_at(data_parallel, job, cluster).launch
        stage = default["zero_stage"]
        assert isinstance(stage, int)
        for zero_stage in range(stage, -1, -1):
            settings = {**default, "zero_stage": zero_stage, **changed.launch}
            configuration = Configuration(Settings(settings), changed.live)
            if not (broken := why_it_cannot_run(configuration, job, cluster)):
                return configuration
            found.append((configuration, broken))
    # The most devices and the lowest stage: its sentence is about the changed knobs.
    configuration, broken = found[0]
    raise InvalidConfiguration(configuration.short, broken)


def _baseline_at(data_parallel: int, job: TrainingJob, cluster: Cluster) -> Configuration:
    share = job.global_batch // data_parallel
    usual = max(1, _USUAL_TOKENS // job.sequence_length)
    sizes = [n for n in range(min(share, usual), 0, -1) if share % n == 0] or [1]
    settings: Mapping[str, Any] = {
        "micro_batch": sizes[0],
        "zero_stage": 0,
        "optimizer_offload": "none",
        "activation_checkpointing": "none",
    }
    if (reader := reader_of(job)) is not None:
        settings = reader.lightest_that_fits(job, cluster, data_parallel, sizes)
    return Configuration.of(data_parallel=data_parallel, **settings)


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
