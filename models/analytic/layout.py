"""Configurations as arrays for the analytic models: launches, live settings, pipeline stages.

Many configurations differ only in a clock, so launch knobs are read for the distinct launches, and
100,000 configurations are predicted in a second. Likewise each kind of stage is computed once: its
number of blocks, and if it holds the embedding or makes the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import pairwise
from typing import Any, Self

import numpy as np

from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.search_spaces.model_facts import ModelFacts

#: Knobs whose effect the analytic models do not predict, each with the reason.
UNMODELLED = {
    "compilation": "of the time on the device: what fused operators save there is published for "
    "single models only",
}

#: Kinds of scaling in FP8, whose numbers `Launches.fp8` holds.
FP8 = ("none", "tensorwise", "rowwise", "mx")


class Rows:
    """Base of dataclasses of arrays, whose rows are taken from all of them at once."""

    def __getitem__(self, rows: Any) -> Self:
        return type(self)(*(getattr(self, name)[rows] for name in self.__match_args__))  # type: ignore[attr-defined]


def _of(knob: str, *values: str) -> dict[str, Any]:
    return {"knob": knob, "values": values}


@dataclass(frozen=True)
class Launches(Rows):
    """Launch knobs as arrays, one entry per launch: numbers, and True for some values."""

    d: np.ndarray = field(metadata=_of("data_parallel"))
    t: np.ndarray = field(metadata=_of("tensor_parallel"))
    p: np.ndarray = field(metadata=_of("pipeline_parallel"))
    u: np.ndarray = field(metadata=_of("sequence_parallel"))
    e: np.ndarray = field(metadata=_of("expert_parallel"))
    b: np.ndarray = field(metadata=_of("micro_batch"))
    z: np.ndarray = field(metadata=_of("zero_stage"))
    v: np.ndarray = field(metadata=_of("virtual_stages"))
    groups: np.ndarray = field(metadata=_of("hsdp_replicas"))
    second_copy: np.ndarray = field(metadata=_of("zero_hpz_partition_size"))
    gathered: np.ndarray = field(metadata=_of("sequence_method", "all_gather"))
    zero_bubble: np.ndarray = field(metadata=_of("pipeline_schedule", "zero_bubble"))
    selective: np.ndarray = field(metadata=_of("activation_checkpointing", "selective"))
    parameters_offloaded: np.ndarray = field(metadata=_of("parameter_offload", "cpu", "nvme"))
    parameters_nvme: np.ndarray = field(metadata=_of("parameter_offload", "nvme"))
    offload: np.ndarray = field(metadata=_of("optimizer_offload", "cpu", "async", "nvme"))
    offload_async: np.ndarray = field(metadata=_of("optimizer_offload", "async"))
    offload_nvme: np.ndarray = field(metadata=_of("optimizer_offload", "nvme"))
    fsdp: np.ndarray = field(metadata=_of("sharding", "fsdp2", "fsdp2_no_reshard"))
    reshard: np.ndarray = field(metadata=_of("sharding", "fsdp2"))
    activations: np.ndarray = field(metadata=_of("activation_offload", "sync", "async"))
    activations_async: np.ndarray = field(metadata=_of("activation_offload", "async"))
    m: np.ndarray  # number of micro-batches per replica and step
    recomputed: np.ndarray  # share of the blocks that are recomputed in the backward pass
    # True if blocks are compiled: their dispatch is shorter, and the casts of FP8 are fused.
    compiled: np.ndarray
    fp8: np.ndarray  # kind of scaling of the blocks' products in FP8, a number of `FP8`; 0 without

    @property
    def replicas(self) -> np.ndarray:
        """Ranks that hold the same parameters before ZeRO shards: data x sequence parallel."""
        return self.d * self.u

    @property
    def shards(self) -> np.ndarray:
        """Ranks over which FSDP2 shards the states: the replicas of one group."""
        return self.replicas / self.groups

    @property
    def ranks(self) -> np.ndarray:
        return self.d * self.t * self.p * self.u

    def __len__(self) -> int:
        return len(self.d)


@dataclass(frozen=True)
class Layout:
    """Configurations as arrays: `row` is the number of each one's launch.

    Live settings have the shape (n,), NaN if left to the device or set per stage; those per stage
    stand by the configuration's number.
    """

    launches: Launches
    row: np.ndarray
    clock_MHz: np.ndarray
    limit_W: np.ndarray
    memory_clock_MHz: np.ndarray
    stage_clocks_MHz: dict[int, tuple[int, ...]]
    stage_limits_W: dict[int, tuple[int, ...]]


def _recomputed(mode: str) -> float:
    return 1.0 / int(mode.removeprefix("every_")) if mode.startswith("every_") else mode == "full"


def _read_launches(launches: Sequence[Settings], global_batch: int, compiled: bool) -> Launches:
    def values(knob: str) -> list[Value | None]:
        return [launch.get(knob, KNOBS[knob].default) for launch in launches]

    read: dict[str, np.ndarray] = {}
    for item in fields(Launches):
        if not item.metadata:
            continue
        knob, wanted = item.metadata["knob"], item.metadata["values"]
        found = values(knob)
        for value in () if wanted else found:
            if not isinstance(value, int):
                raise InvalidValue(knob, value, "an integer")
        read[item.name] = (
            np.array([value in wanted for value in found], dtype=bool)
            if wanted
            else np.array(found, dtype=float)
        )
    chosen = [b if isinstance(b, int) else global_batch for b in values("global_batch")]
    batches = np.array(chosen, dtype=float)
    modes = map(str, values("activation_checkpointing"))
    unsaid = "full" if compiled else "none"
    return Launches(
        **read,
        m=np.maximum(1.0, np.round(batches / (read["b"] * read["d"]))),
        recomputed=np.array([_recomputed(mode) for mode in modes], dtype=float),
        compiled=np.array([each.get("compilation", unsaid) != "none" for each in launches], bool),
        fp8=np.array([FP8.index(str(value)) for value in values("fp8")], dtype=int),
    )


def read_layout(
    configurations: Sequence[Configuration], global_batch: int, *, compiled: bool = False
) -> Layout:
    """Read configurations into arrays; `compiled` if the program compiles by default."""
    groups = [(each.launch, (each.live,)) for each in configurations]
    return layout_of_groups(groups, global_batch, compiled=compiled)


def layout_of_groups(
    groups: Sequence[tuple[Settings, tuple[Settings, ...]]],
    global_batch: int,
    *,
    compiled: bool = False,
) -> Layout:
    """Read launches with their live settings into arrays, group by group.

    Of many configurations this is ten times as fast as `read_layout`, because launches share few
    lists of live settings and no configuration is made.
    """
    launches: dict[Settings, int] = {}
    lives: dict[Settings, int] = {}
    lists: dict[int, list[int]] = {}
    row: list[int] = []
    live_row: list[int] = []
    for launch, each in groups:
        if id(each) not in lists:
            lists[id(each)] = [lives.setdefault(live, len(lives)) for live in each]
        row += [launches.setdefault(launch, len(launches))] * len(each)
        live_row += lists[id(each)]

    def live(name: str) -> tuple[np.ndarray, dict[int, tuple[int, ...]]]:
        values = [settings.get(name) for settings in lives]
        plain = [np.nan if v is None or isinstance(v, tuple) else v for v in values]
        staged = {i: v for i, v in enumerate(values) if isinstance(v, tuple)}
        by_number = {i: staged[j] for i, j in enumerate(live_row) if j in staged} if staged else {}
        return np.array(plain, dtype=float)[np.array(live_row, dtype=np.intp)], by_number

    clock, stage_clocks = live("clock_MHz")
    limit, stage_limits = live("power_limit_W")
    return Layout(
        launches=_read_launches(list(launches), global_batch, compiled),
        row=np.array(row, dtype=np.intp),
        clock_MHz=clock,
        limit_W=limit,
        memory_clock_MHz=live("memory_clock_MHz")[0],
        stage_clocks_MHz=stage_clocks,
        stage_limits_W=stage_limits,
    )


@dataclass(frozen=True)
class Stages:
    """Kinds of stage; arrays of shape (kinds,)."""

    blocks: np.ndarray
    embeds: np.ndarray
    heads: np.ndarray
    count: np.ndarray
    # number of the kind's first stage; under 1F1B it keeps the most micro-batches.
    first: np.ndarray
    kind: np.ndarray  # each stage's kind, shape (stages,)

    def each(self) -> Stages:
        """Return these stages, each as its own kind (each may run at its own clock)."""
        one, kind = np.arange(len(self.kind)), self.kind
        ones, first = np.ones(len(one)), one.astype(float)
        return Stages(self.blocks[kind], self.embeds[kind], self.heads[kind], ones, first, one)


@lru_cache(maxsize=1024)
def balanced(layers: int, stages: int, embedding: float, head: float) -> tuple[int, ...]:
    """Return the number of blocks of each stage whose weights differ least.

    A block weighs 1, and the ends of the model `embedding` and `head`. Of the partitions between
    which the largest and the smallest stage differ by as much, the one with the later cuts is
    taken, as DeepSpeed's does (0.19.8, runtime/utils.py, partition_balanced).
    """
    if not embedding and not head and stages <= layers:
        each, more = divmod(layers, stages)
        return (each + 1,) * more + (each,) * (stages - more)
    sums = np.concatenate([[0.0], np.cumsum([embedding, *[1.0] * layers, head])])
    count = len(sums)
    most, least = (np.full((count, stages + 1), np.inf) for _ in range(2))
    begins = np.zeros((count, stages + 1), dtype=int)
    most[0, 0] = 0.0
    for end in range(1, count):
        here = sums[end] - sums[:end]
        for stage in range(1, min(end, stages) + 1):
            largest = np.maximum(most[:end, stage - 1], here)
            smallest = np.minimum(least[:end, stage - 1], here)
            spread = largest - smallest
            begin = end - 1 - int(np.argmin(spread[::-1]))
            most[end, stage], least[end, stage] = largest[begin], smallest[begin]
            begins[end, stage] = begin
    cuts = [count - 1]
    for stage in range(stages, 0, -1):
        cuts.append(int(begins[cuts[-1], stage]))
    inside = [min(max(each - 1, 0), layers) for each in reversed(cuts)]
    return tuple(after - before for before, after in pairwise(inside))


def end_weights(partition: str, facts: ModelFacts) -> tuple[float, float]:
    """Return the weights of embedding and head, in blocks, by which a program cuts its stages.

    FLOPs of attention's scores, which depend on the sequence, are left out of a block's.
    """
    if partition == "parameters":
        block = facts.block_parameters / facts.layers
        table = facts.parameters - facts.block_parameters
        table -= 0 if facts.tied else facts.head_parameters
        return table / block, facts.head_parameters / block
    if partition == "flops":
        block = (facts.matmul_parameters - facts.head_parameters) / facts.layers
        return 0.0, facts.head_parameters / block
    return (1.0, 1.0) if partition == "ends" else (0.0, 0.0)


def cut(
    layers: int,
    stages: int,
    given: Sequence[int] | None = None,
    ends: tuple[float, float] = (0.0, 0.0),
) -> Stages:
    """Partition the blocks of a model into stages.

    Args:
        given: number of blocks of each stage, if known.
        ends: weights of the embedding and of the head, in blocks, by which stages are balanced.
    """
    if given is not None:
        if len(given) != stages or sum(given) != layers:
            raise InputError(
                f"the partition {tuple(given)} must name {stages} stages of {layers} layers in all"
            )
        blocks = list(given)
    elif stages == 1:
        blocks = [layers]
    else:
        blocks = list(balanced(layers, stages, *ends))
    every = [(here, i == 0, i == stages - 1) for i, here in enumerate(blocks)]
    kinds = list(dict.fromkeys(every))
    number = np.array([kinds.index(stage) for stage in every])
    here, embeds, heads = np.array(kinds, dtype=float).T
    first = np.array([every.index(stage) for stage in kinds], dtype=float)
    return Stages(here, embeds, heads, np.bincount(number).astype(float), first, number)
