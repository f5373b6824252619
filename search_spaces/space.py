"""What can be chosen: named spaces, and the finite list of valid configurations they give.

A `SearchSpace` names for each knob its values, some of them relative to the job and the cluster
("auto" degrees, divisors of the global batch, evenly spaced clocks). `candidates` walks the launch
knobs one by one and applies each rule (`search_spaces.rules`) as soon as the knobs it reads are
chosen, so that a hopeless degree is dropped before anything is multiplied with it; the live
settings are judged once, not once a launch. The result, `Candidates`, is what a study searches.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any, Literal

from search_spaces.candidates import Candidates
from search_spaces.cluster import Cluster
from search_spaces.configuration import Configuration, Settings
from search_spaces.errors import InputError, InvalidConfiguration, InvalidValue, UnknownName
from search_spaces.job import TrainingJob
from search_spaces.knobs import KNOBS, Knob, Value, knob_named
from search_spaces.model_facts import facts_of, model_state_bytes
from search_spaces.rules import RULES, Rule, broken_rules
from search_spaces.typed import names_a_file

__all__ = [
    "Auto",
    "Candidates",
    "SearchSpace",
    "default_configuration",
    "load_space",
    "space_names",
]

_DEGREES = (
    "data_parallel",
    "tensor_parallel",
    "pipeline_parallel",
    "sequence_parallel",
    "expert_parallel",
)


@dataclass(frozen=True)
class Auto:
    """Values that follow from the job and the cluster.

    Attributes:
        kind: "auto", or "baseline" for the one value of `default_configuration`.
        max: the highest degree or micro-batch; None for no bound.
        count: the most clocks or power limits, evenly spaced; None for all that are offered.
        lowest_share: the lowest clock, as a share of the highest.
    """

    kind: Literal["auto", "baseline"] = "auto"
    max: int | None = None
    count: int | None = None
    lowest_share: float = 0.0


@dataclass(frozen=True)
class SearchSpace:
    """Which values each knob may take. A knob that is not named stands at its default.

    Attributes:
        name: what it is called.
        choices: for each knob its values, or `Auto` where they follow from job and cluster.
        what: one line for people.
    """

    name: str
    choices: Mapping[str, tuple[Value, ...] | Auto] = field(hash=False)
    what: str = ""

    def __post_init__(self) -> None:
        tidy: dict[str, tuple[Value, ...] | Auto] = {}
        for name, choice in self.choices.items():
            knob = knob_named(name)
            if isinstance(choice, Auto):
                if choice.kind == "baseline" and knob.kind == "live":
                    raise InvalidValue(
                        f"{name} in space {self.name!r}", "baseline", "for launch knobs only"
                    )
                tidy[name] = choice
                continue
            if not choice:
                raise InvalidValue(f"{name} in space {self.name!r}", list(choice), "not empty")
            tidy[name] = tuple(dict.fromkeys(knob.check(value) for value in choice))
        # The order of KNOBS, degrees first, whatever order the file has them in.
        object.__setattr__(self, "choices", {n: tidy[n] for n in KNOBS if n in tidy})

    def values(self, job: TrainingJob, cluster: Cluster) -> dict[str, tuple[Value, ...]]:
        """The values of each knob for this job on this cluster, before any rule.

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

    def check(self, configuration: Configuration, job: TrainingJob, cluster: Cluster) -> None:
        """Make sure that a configuration can train this job on this cluster.

        The rules decide, not the values listed here: a clock between two of the listed ones may be
        probed. Whether it is a candidate is `configuration in candidates`.

        Raises:
            UnknownName: it names something that is no knob.
            InvalidValue: a value is not legal for its knob.
            InvalidConfiguration: a rule refuses it; the error says which numbers broke which.
        """
        for half in (configuration.launch, configuration.live):
            for name, value in half.items():
                knob_named(name).check(value)
        reasons = broken_rules(configuration, job, cluster)
        if reasons:
            raise InvalidConfiguration(configuration.key, reasons)

    def candidates(self, job: TrainingJob, cluster: Cluster) -> Candidates:
        """Every valid configuration of this space for this job on this cluster.

        The empty live setting, "left to the device", is always one of each launch's; where clocks
        cannot be set it is the only one.

        Raises:
            InputError: none is valid; the sentence names the rule that refused the most.
        """
        values = self.values(job, cluster)
        self._check_micro_batches(values, job)
        launch_values = {n: v for n, v in values.items() if KNOBS[n].kind == "launch"}
        live_values = {n: v for n, v in values.items() if KNOBS[n].kind == "live"}
        walk = _Walk(launch_values, job, cluster)
        launches = tuple(walk.launches())
        if not launches:
            raise InputError(
                f"space {self.name!r} has no configuration that can train job {job.name!r} on "
                f"cluster {cluster.name!r}: {walk.verdict()}"
            )

        # Live rules may read launch knobs (one clock a stage): judge once for each of their values.
        rules = [r for r in RULES if any(KNOBS[k].kind == "live" for k in r.knobs)]
        read = sorted({k for r in rules for k in r.knobs if KNOBS[k].kind == "launch"})
        every = _live_settings(live_values)
        judged: dict[tuple[Value | None, ...], tuple[Settings, ...]] = {}
        shared: dict[tuple[Settings, ...], tuple[Settings, ...]] = {}
        lives = []
        for launch in launches:
            configuration = Configuration(launch)
            context = tuple(configuration.get(knob) for knob in read)
            if context not in judged:
                allowed = tuple(
                    live
                    for live in every
                    if all(
                        r.broken(Configuration(launch, live), job, cluster) is None for r in rules
                    )
                )
                judged[context] = shared.setdefault(allowed, allowed)
            lives.append(judged[context])
        if cluster.clock_control and any(live_values.values()) and not any(map(any, lives)):
            self._refuse_live(live_values, rules, launches[0], job, cluster)
        return Candidates(launches, tuple(lives))

    def _check_micro_batches(self, values: Mapping[str, Sequence[Value]], job: TrainingJob) -> None:
        micro_batches = [m for m in values.get("micro_batch", (1,)) if isinstance(m, int)]
        batches = [b for b in values.get("global_batch", ()) if isinstance(b, int)]
        batches = batches or [job.global_batch]
        if all(batch % micro for micro in micro_batches for batch in batches):
            raise InputError(
                f"the global batch {job.global_batch} of job {job.name!r} is divided by no "
                f"micro-batch of space {self.name!r} ({', '.join(map(str, micro_batches))}); "
                "it must be a multiple of one of them"
            )

    def _refuse_live(
        self,
        live_values: Mapping[str, Sequence[Value]],
        rules: Sequence[Rule],
        launch: Settings,
        job: TrainingJob,
        cluster: Cluster,
    ) -> None:
        """Every live setting that the space asks for by value was refused: say why."""
        for name, choices in live_values.items():
            for value in choices:
                asked = Configuration(launch, Settings({name: value}))
                for rule in rules:
                    phrase = rule.broken(asked, job, cluster)
                    if phrase:
                        raise InputError(f"no live setting of space {self.name!r} holds: {phrase}")


def _automatic(knob: Knob, choice: Auto, job: TrainingJob, cluster: Cluster) -> tuple[Value, ...]:
    """The values of one "auto" knob."""
    if knob.choices:
        return knob.choices
    if knob.name == "clock_MHz":
        offered = cluster.clocks_MHz
        if not offered:
            return ()
        usable = [clock for clock in offered if clock >= choice.lowest_share * offered[-1]]
        return tuple(usable[i] for i in _evenly(len(usable), choice.count))
    if knob.name == "power_limit_W":
        low, high = cluster.device.min_limit_W, cluster.device.max_W
        if not cluster.clock_control or low is None or high <= low:
            return ()
        # The highest limit is what the device does when left alone, so it is not asked for again.
        count = choice.count or 8
        return tuple(dict.fromkeys(math.ceil(low + (high - low) * i / count) for i in range(count)))
    if knob.name == "global_batch":
        return job.global_batches
    if knob.name in _DEGREES:
        found = _degrees(cluster.devices)
    else:
        found = [n for n in range(1, job.global_batch + 1) if job.global_batch % n == 0]
    return tuple(n for n in found if choice.max is None or n <= choice.max)


def _degrees(devices: int) -> list[int]:
    """Powers of two, and every divisor of the device count, up to it."""
    return [n for n in range(1, devices + 1) if devices % n == 0 or n & (n - 1) == 0]


def _evenly(length: int, count: int | None) -> list[int]:
    """Up to `count` indices of a list, evenly spaced, the last (the highest clock) included."""
    if count is None or count >= length:
        return list(range(length))
    if count == 1:
        return [length - 1]
    return [round(i * (length - 1) / (count - 1)) for i in range(count)]


def _live_settings(values: Mapping[str, Sequence[Value]]) -> list[Settings]:
    """Every combination of live values, each knob also left alone; the empty setting first."""
    combinations = product(*((None, *choices) for choices in values.values()))
    return [
        Settings({n: v for n, v in zip(values, combination, strict=True) if v is not None})
        for combination in combinations
    ]


class _Walk:
    """Depth-first through the launch knobs, each rule applied as soon as its knobs are chosen."""

    def __init__(
        self, values: Mapping[str, tuple[Value, ...]], job: TrainingJob, cluster: Cluster
    ) -> None:
        self._names = list(values)
        self._values = list(values.values())
        self._job, self._cluster = job, cluster
        self._refused: dict[str, int] = {}
        self._examples: dict[str, str] = {}
        # below[d]: how many launches hang under one choice of the first d knobs.
        self._below = [1] * (len(values) + 1)
        for depth in reversed(range(len(values))):
            self._below[depth] = self._below[depth + 1] * len(self._values[depth])
        # due[d]: the rules whose knobs are all chosen (or stand at defaults) after d knobs.
        place = {name: depth + 1 for depth, name in enumerate(self._names)}
        self._due: list[list[Rule]] = [[] for _ in range(len(values) + 1)]
        for rule in RULES:
            if all(KNOBS[knob].kind == "launch" for knob in rule.knobs):
                self._due[max((place.get(knob, 0) for knob in rule.knobs), default=0)].append(rule)

    def launches(self, chosen: tuple[Value, ...] = ()) -> Iterator[Settings]:
        depth = len(chosen)
        settings = Settings(dict(zip(self._names, chosen, strict=False)))
        if self._due[depth] and self._refuses(Configuration(settings), depth):
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
        """Which rule refused the most, with the first numbers that broke it."""
        name = max(self._refused, key=lambda rule: self._refused[rule])
        return (
            f"rule {name} refuses {self._refused[name]} of {self._below[0]} launch settings, the "
            f"first because {self._examples[name]}"
        )


# What a user runs today.

#: Share of a device's memory that model states may take before a user reaches for the next ZeRO
#: stage, and share that states and activations may take together; the rest is for buffers, the
#: framework's context and fragmentation (DeepSpeed's buckets alone are 1 to 4 GB).
_STATES_SHARE, _FULL_SHARE = 0.8, 0.9

#: Tokens a rank takes at once: enough to fill a GPU's matrix units, few enough for its memory.
_USUAL_TOKENS = 8192


def default_configuration(job: TrainingJob, cluster: Cluster) -> Configuration:
    """The baseline: what a user would run today without tuning.

    Data parallelism over as many devices as the global batch allows, the lowest ZeRO stage whose
    model states fit a device (`model_state_bytes`), the largest micro-batch of at most 8,192 tokens
    whose activations fit beside them, and the clock left to the device. Only where that cannot fit
    does it offload the optimizer (no stage fits) or checkpoint activations (no micro-batch fits).

    Raises:
        InvalidConfiguration: the job cannot run on this cluster at all (e.g. fp16 on a CPU).
        InputError: the model cannot be read.
    """
    refused: list[str] = []
    for data_parallel in reversed(_degrees(cluster.devices)):
        configuration = _baseline_at(data_parallel, job, cluster)
        refused = broken_rules(configuration, job, cluster)
        if not refused:
            return configuration
    raise InvalidConfiguration(configuration.key, refused)


def _baseline_at(data_parallel: int, job: TrainingJob, cluster: Cluster) -> Configuration:
    facts, memory = facts_of(job), cluster.device.memory_bytes
    stages = range(4) if data_parallel > 1 else range(1)
    states = [
        model_state_bytes(facts.parameters, stage, data_parallel, job.precision) for stage in stages
    ]
    fitting = [stage for stage in stages if states[stage] <= _STATES_SHARE * memory]
    offload = "none" if fitting else "cpu"
    zero_stage = fitting[0] if fitting else (3 if data_parallel > 1 else 1)
    room = _FULL_SHARE * memory - (states[zero_stage] if fitting else 0.0)

    share = job.global_batch // data_parallel
    usual = max(1, _USUAL_TOKENS // job.sequence_length)
    divisors = [n for n in range(min(share, usual), 0, -1) if share % n == 0] or [1]
    for checkpointing in ("none", "full"):
        for micro_batch in divisors:
            if _activation_bytes(job, micro_batch, checkpointing) <= room:
                break
        else:
            continue
        break
    return Configuration.of(
        data_parallel=data_parallel,
        micro_batch=micro_batch,
        zero_stage=zero_stage,
        optimizer_offload=offload,
        activation_checkpointing=checkpointing,
    )


def _activation_bytes(job: TrainingJob, micro_batch: int, checkpointing: str) -> float:
    """Activations of one rank, bytes, with fused attention.

    34 s b h a layer in 16 bits (Korthikanti et al. 2022, arXiv 2205.05198, equation 1 without the
    scores that fused attention never stores), or 2 s b h a layer and one live layer under full
    checkpointing; the same for an encoder's layers and patches; about 10 bytes a logit for the
    loss. Rough: it only picks the baseline.
    """
    facts = facts_of(job)
    tokens = job.sequence_length * micro_batch
    towers = [(float(tokens * facts.hidden), facts.layers)]
    if facts.vision is not None:
        patches = job.frames * facts.vision.patches * micro_batch
        towers.append((float(patches * facts.vision.hidden), facts.vision.layers))
    if checkpointing == "full":
        kept = sum(2.0 * width * layers for width, layers in towers)
        kept += 34.0 * max(width for width, _ in towers)
    else:
        kept = sum(34.0 * width * layers for width, layers in towers)
    return kept * (2 if job.precision == "fp32" else 1) + 10.0 * tokens * facts.vocab


# Spaces by name or file.


def space_names() -> list[str]:
    """The spaces that joulefront ships."""
    folder = resources.files("search_spaces") / "data" / "spaces"
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    )


def load_space(name_or_path: str | Path | None = None) -> SearchSpace:
    """A space by shipped name or by the path of a toml file; with none, "default".

    The file has `what` and a table `[knobs]`: for each knob a list of values, "auto", "baseline",
    or a table of `Auto`'s fields, e.g. `clock_MHz = { count = 8, lowest_share = 0.4 }`.

    Raises:
        InputError: no such space, or its file is not one; the sentence says which key.
    """
    text = str(name_or_path or "default")
    shipped = resources.files("search_spaces") / "data" / "spaces" / f"{text}.toml"
    path = None if text in space_names() else Path(text)
    if path is not None and not names_a_file(path):
        raise UnknownName("space", text, [*space_names(), "or the path of a toml file"])
    try:
        data = tomllib.loads(
            shipped.read_text(encoding="utf-8") if path is None else path.read_text("utf-8")
        )
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the space {text!r}: {error}") from error
    name = text if path is None else path.stem
    for key in data:
        if key not in ("name", "what", "knobs"):
            raise UnknownName(f"key in space {name!r}", key, ("name", "what", "knobs"))
    knobs = data.get("knobs")
    if not isinstance(knobs, dict) or not knobs:
        raise InputError(f"space {name!r} has no table [knobs]; name at least one knob there")
    choices = {knob: _read_choice(knob, choice, name) for knob, choice in knobs.items()}
    return SearchSpace(str(data.get("name", name)), choices, str(data.get("what", "")))


def _read_choice(name: str, choice: Any, space: str) -> tuple[Value, ...] | Auto:
    """One knob's entry in a space file."""
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
