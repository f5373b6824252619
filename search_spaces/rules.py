"""Validity rules: conditions under which a configuration can train a job on a cluster.

`data/catalogue/knobs.toml` lists all of them with their reasons, most of them as conditions; rules
that compute are functions here, of the same name. The enumeration (`tuner.search_spaces.space`)
applies each as soon as the knobs that it reads are chosen. `RULES` refuses configurations that
cannot work anywhere or are not worth a try, as those that only repeat another one; those that work,
but not in the built-in training program, are found by `unrunnable`, so that planning, replay and
recorded tables may use them.
"""

from __future__ import annotations

import math
import operator
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.data_files import catalogue
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knob_declarations import CHANGED, Values, holds, names_in
from tuner.search_spaces.knobs import KNOBS, by_stage, stage_values
from tuner.search_spaces.model_sizes import reader_of, sizes_of

Check = Callable[[Configuration, TrainingJob, Cluster], str | None]


@dataclass(frozen=True)
class Rule:
    """Reason that excludes a configuration.

    Attributes:
        knobs: the knobs it reads; empty for a rule on the job and the cluster alone.
        runs: True if a configuration that breaks it trains all the same, and is only not worth a
            try.
    """

    name: str
    knobs: tuple[str, ...]
    why: str
    broken: Check
    runs: bool = False


class _Facts(NamedTuple):
    configuration: Configuration
    job: TrainingJob
    cluster: Cluster

    def get(self, name: str) -> Any:
        return _reader(name)(self)


def _whole_batch(facts: _Facts) -> int:
    chosen = facts.configuration.get("global_batch")
    return chosen if isinstance(chosen, int) else facts.job.global_batch


def _micro_batches(facts: _Facts) -> int | None:
    # None if they do not divide the global batch, which another rule refuses.
    share = facts.configuration.micro_batch * facts.configuration.data_parallel
    count, left = divmod(_whole_batch(facts), share)
    return None if left else count


def _length(knob: str) -> Callable[[_Facts], int | None]:
    def length(facts: _Facts) -> int | None:
        value = facts.configuration.get(knob)
        return len(stage_values(value)) if by_stage(value) else None

    return length


_DEGREES = ("data_parallel", "tensor_parallel", "pipeline_parallel", "sequence_parallel")
_BATCHES = ("data_parallel", "micro_batch", "global_batch")
#: What a condition may read beside knobs and facts: the knobs that it is made of, and how.
_MADE: Mapping[str, tuple[tuple[str, ...], Callable[[_Facts], Any]]] = {
    "world_size": (_DEGREES, lambda facts: facts.configuration.world_size),
    "replicas": (
        ("data_parallel", "sequence_parallel"),
        lambda facts: facts.get("data_parallel") * facts.get("sequence_parallel"),
    ),
    "virtual_depth": (
        ("virtual_stages", "pipeline_parallel"),
        lambda facts: facts.get("virtual_stages") * facts.get("pipeline_parallel"),
    ),
    "micro_batches": (_BATCHES, _micro_batches),
    "schedule_rounds": (
        (*_BATCHES, "pipeline_parallel"),
        lambda facts: max(1, (_micro_batches(facts) or 0) // facts.get("pipeline_parallel")),
    ),
    "stage_clocks": (("clock_MHz",), _length("clock_MHz")),
    "stage_limits": (("power_limit_W",), _length("power_limit_W")),
}
_OWNERS = {"device": "cluster.device", "program": "job.program"}


@lru_cache(maxsize=256)
def _reader(name: str) -> Callable[[_Facts], Any]:
    if name in _MADE:
        return _MADE[name][1]
    if name in KNOBS:
        if hasattr(Configuration, name):  # which refuses what is no degree
            return lambda facts: getattr(facts.configuration, name)
        return lambda facts: facts.configuration.get(name)
    owner, _, field = name.partition("_")
    if owner == "model":
        return lambda facts: getattr(sizes_of(facts.job), field)
    return operator.attrgetter(f"{_OWNERS.get(owner, owner)}.{field}")


class _Phrases(string.Formatter):
    """Formatter of phrases, in which `{devices:device}` is "1 device" or "2 devices"."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return args[0].get(str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        return f"{value} {format_spec}{'s' if value != 1 else ''}" if format_spec else str(value)


@dataclass(frozen=True)
class _Case:
    """Condition of a rule with its phrase, as `data/catalogue/knobs.toml` explains them."""

    when: str
    divide: tuple[str | int, ...]
    of: str
    phrase: str

    @classmethod
    def of_table(cls, table: Mapping[str, Any]) -> list[_Case]:
        made = []
        for each in table.get("each", [""]):
            texts = [str(table.get(key, "")).replace("{each}", each) for key in ("when", "phrase")]
            divide = tuple(table.get("divide", ()))
            made.append(cls(texts[0], divide, str(table.get("of", "")), texts[1]))
        return made

    @property
    def names(self) -> set[str]:
        named = {name for _, name, _, _ in string.Formatter().parse(self.phrase) if name}
        divided = {name for name in (*self.divide, self.of) if isinstance(name, str) and name}
        return named | divided | (set(names_in(self.when)) if self.when else set())

    def broken(self, facts: Values) -> str | None:
        if self.when and not holds(self.when, facts):
            return None
        if self.divide:
            parts = [part if isinstance(part, int) else facts.get(part) for part in self.divide]
            if not all(isinstance(part, int) for part in parts):
                return None  # a recorded table uses the name for something else
            if facts.get(self.of) % math.prod(parts) == 0:
                return None
        return _Phrases().vformat(self.phrase, (facts,), {})


def _of_cases(cases: Sequence[_Case]) -> Check:
    def broken(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
        facts = _Facts(c, job, cluster)
        return next((phrase for case in cases if (phrase := case.broken(facts))), None)

    return broken


_COMPUTED: dict[str, Check] = {}


def _computed(check: Check) -> Check:
    _COMPUTED[check.__name__.removeprefix("_")] = check
    return check


@_computed
def _batch_known(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    chosen = c.get("global_batch")
    if isinstance(chosen, int) and job.steps_with(chosen) is None:
        legal = ", ".join(map(str, job.global_batches))
        return (
            f"job {job.name!r} does not give the number of steps at global_batch {chosen}, only at "
            f"{legal}; add a table steps_at or a noise_scale to its file"
        )
    return None


@_computed
def _global_batch(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    share, whole = c.micro_batch * c.data_parallel, _whole_batch(_Facts(c, job, cluster))
    if whole % share == 0:
        return None
    phrase = (
        f"micro_batch {c.micro_batch} x data_parallel {c.data_parallel} = {share} "
        f"does not divide the global batch {whole}"
    )
    if whole % c.data_parallel:
        return f"{phrase}, and data_parallel {c.data_parallel} alone does not either"
    near = _nearest_divisors(whole // c.data_parallel, c.micro_batch)
    return f"{phrase}; near it, micro_batch can be {' or '.join(map(str, near))}"


@lru_cache(maxsize=4096)  # asked for each combination of knobs of a space
def _nearest_divisors(number: int, value: int) -> tuple[int, ...]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = {*small, *(number // n for n in small)}
    below, above = [n for n in divisors if n < value], [n for n in divisors if n > value]
    return (*([max(below)] if below else []), *([min(above)] if above else []))


@_computed
def _sequence_heads(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    facts, degree = sizes_of(job), c.sequence_parallel
    if degree == 1 or c.get("sequence_method") != "ulysses" or not facts.heads:
        return None
    heads, kv = (max(1, n // c.tensor_parallel) for n in (facts.heads, facts.kv_heads))
    share = " left by tensor parallelism" if c.tensor_parallel > 1 else ""
    if heads % degree:
        return f"sequence_parallel {degree} does not divide the {heads} attention heads{share}"
    if kv % degree and degree % kv:
        return (
            f"sequence_parallel {degree} neither divides the {kv} key-value heads{share} "
            "nor is a multiple of them"
        )
    return None


#: What the sides of a matrix must be multiples of: 16 bytes, of one byte a value
#: (torch._scaled_mm). A block of MX is 32 values, along the side that is summed over, and each side
#: is in one of a layer's three products.
_SIDES = {"tensorwise": 16, "rowwise": 16, "mx": 32}


@_computed
def _fp8_sides(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    scaling = str(c.get("fp8"))
    if scaling == "none" or not job.is_modelled:
        return None
    facts, multiple = sizes_of(job), _SIDES[scaling]
    sides = {
        "tokens of a micro-batch": c.micro_batch * job.sequence_length // c.sequence_parallel,
        "hidden size": facts.hidden,
        "query width": facts.heads * facts.head_dim // c.tensor_parallel,
        "key and value width": facts.kv_heads * facts.head_dim // c.tensor_parallel,
        "intermediate size": facts.intermediate // c.tensor_parallel,
    }
    for name, side in sides.items():
        if side % multiple:
            return f"fp8 {scaling} needs a multiple of {multiple} as {name}, not {side}"
    return None


@_computed
def _clock_offered(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    offered = cluster.clocks_MHz
    for clock in stage_values(c.get("clock_MHz")) if offered else ():
        if clock not in offered:
            nearest = min(offered, key=lambda other: abs(other - float(clock)))
            return (
                f"{cluster.device.name} does not offer clock_MHz {clock}; the nearest is "
                f"{nearest}, the range {offered[0]} to {offered[-1]}"
            )
    return None


@_computed
def _limit_range(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    device = cluster.device
    low, high = device.min_limit_W, device.max_limit_W
    if low is None or not cluster.clock_control:
        return None
    for limit in stage_values(c.get("power_limit_W")):
        if not low <= float(limit) <= high:
            return f"power_limit_W {limit} is outside {low:g} to {high:g} W of {device.name}"
    return None


def _rule(name: str, table: Mapping[str, Any]) -> Rule:
    if "reads" in table:
        return Rule(name, tuple(table["reads"]), table["why"], _COMPUTED[name])
    cases = [case for part in table.get("cases", [table]) for case in _Case.of_table(part)]
    read = {name for case in cases for name in case.names}
    names = {knob for name in read for knob in (_MADE[name][0] if name in _MADE else (name,))}
    knobs = tuple(n for n in KNOBS if n in names)
    return Rule(name, knobs, table["why"], _of_cases(cases), table.get("runs", False))


#: All rules, in the order of the catalogue.
RULES: tuple[Rule, ...] = tuple(_rule(*item) for item in catalogue("knobs")["rules"].items())


def broken_rules(configuration: Configuration, job: TrainingJob, cluster: Cluster) -> list[str]:
    """Return a phrase for each rule that refuses this configuration as a candidate."""
    phrases = (rule.broken(configuration, job, cluster) for rule in RULES)
    return [phrase for phrase in phrases if phrase is not None]


def why_it_cannot_run(
    configuration: Configuration, job: TrainingJob, cluster: Cluster
) -> list[str]:
    """Return a phrase for each rule that nothing that trains can break; empty if it can run.

    What somebody runs today need not be worth a try, as ZeRO stage 1 over one rank.
    """
    phrases = (rule.broken(configuration, job, cluster) for rule in RULES if not rule.runs)
    return [phrase for phrase in phrases if phrase is not None]


#: Limits of the built-in training program: each with the families of models that are compared.
_LIMITS = tuple(
    (case, tuple(table.get("families", ())))
    for table in catalogue("knobs")["limits"]
    for case in _Case.of_table(table)
)


def unrunnable(configuration: Configuration, job: TrainingJob | None = None) -> list[str]:
    """Return a phrase for each reason why the built-in training program cannot run this.

    The list is empty if it can. Without a job, limits that depend on the model are not checked.
    """
    knobs = job.knobs if job is not None else ()
    declared = {CHANGED, *(knob.name for knob in knobs)}
    phrases = [
        f"{name} is not a knob of the built-in training program"
        for name in (*configuration.launch, *configuration.live)
        if name not in KNOBS and name not in declared
    ]
    sharding = configuration.get("sharding")
    phrases += [
        f"the knob {knob.name} of DeepSpeed's configuration does nothing under sharding {sharding}"
        for knob in knobs
        if knob.how.startswith("deepspeed:")
        and sharding != KNOBS["sharding"].default
        and configuration.launch.get(knob.name, knob.baseline) != knob.baseline
    ]
    # A recorded table may use the name of a degree for something else.
    plain = {name: configuration.get(name) for name in KNOBS}
    plain["job_precision"] = job.precision if job is not None else None
    for case, families in _LIMITS:
        if job is None and families:
            continue
        model = job.model["model_type"] if job is not None and families else ""
        if model in families or (phrase := case.broken(plain)) is None:
            continue
        restriction = f" models of type {', '.join(families)} only, not {model}" if families else ""
        phrases.append(phrase + restriction)
    if job is None:
        return phrases
    reader = reader_of(job)
    return phrases if reader is None else [*phrases, *reader.untrainable(configuration, job)]
