"""Inputs of the analytic models: constants, and configurations as arrays.

`data/constants/*.toml` has one file of constants per device kind, and `cuda.toml` and `cpu.toml`
for all others; a file names the one that it modifies (`like`) and gives reasons (`sources`).

Many configurations differ only in a clock, so launch knobs are read for the distinct launches, and
100,000 configurations are predicted in a second. Likewise each kind of stage is computed once: its
number of blocks, and if it holds the embedding or makes the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np

from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.data_files import check_keys, read_toml
from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.search_spaces.fields import names_a_file
from tuner.search_spaces.job import Program, TrainingJob
from tuner.search_spaces.knobs import KNOBS, Value, by_stage, stage_values
from tuner.search_spaces.model_facts import ModelFacts, StateBytes, facts_of, state_bytes, widens

#: Tensor-core peak in bf16 over the fp32 peak without tensor cores, for a device whose file does
#: not state the latter: 16 on A100, 15 on H100, 8 on V100, 4 on A40 (NVIDIA data sheets).
TENSOR_OVER_FP32 = 16.0
#: Peak of TF32 products as a share of the bf16 peak, on Ampere and Hopper (NVIDIA data sheets).
TF32_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Shares of a data sheet that a training step reaches, fixed times, and shares of power."""

    matrix_efficiency: float  # share of the stated peak that a large matrix product reaches
    # share of the stated peak that fused attention reaches, of the FLOPs that it executes.
    attention_efficiency: float
    # fixed seconds of one matrix product at the highest clock (it scales with it); with the share
    # above this is Calculon's stepped curve of efficiency over size.
    product_s: float
    # seconds that dispatching one operator adds to a step in an eager program; the host's, so no SM
    # clock changes it.
    operator_s: float
    compiled_operator_s: float  # the same in a program that compiles its model
    # operators of that time that the recomputation of one block adds to those that it repeats: its
    # random states are saved and restored, and autograd is entered again.
    recompute_operators: float
    dispatch_hidden: float  # 0 adds dispatch to the device's work, 1 hides the smaller of both
    # seconds of the host for one collective of one block's parameters or gradients (FSDP, ZeRO-3):
    # hooks, views, streams and events. The host runs at most two blocks ahead, so they are exposed.
    unit_s: float
    memory_efficiency: float  # share of the stated memory bandwidth that a stream reaches
    bandwidth_clock: float  # below this share of the highest clock the SMs cannot keep memory busy
    # link_efficiency, link_latency_s: inside a node: share of the stated bandwidth, and seconds of
    # each of a collective's rounds.
    link_efficiency: float
    link_latency_s: float
    # network_efficiency, network_latency_s: the same between nodes.
    network_efficiency: float
    network_latency_s: float
    # share of a link's or network's bandwidth that the reduction of gradients at the end of a step
    # reaches.
    reduce_efficiency: float
    reduce_over_network: float  # share of that which is left if the reduction crosses nodes
    # share of the network's bandwidth that a stage's activation reaches.
    transfer_efficiency: float
    stage_s: float  # seconds that schedule and exchange of shapes cost per micro-batch and stage
    step_s: float  # seconds of every optimizer step that nothing else explains (loop, clipping)
    gather_overlap: float  # share of compute that ZeRO-3's gathering and reducing hides behind
    reduce_overlap: float  # share of the backward pass that ZeRO 0 to 2's reducing hides behind
    # compute behind which a collective hides takes longer by this share of what is hidden.
    overlap_slowdown: float
    # host_link_efficiency, host_memory_efficiency: shares of the bandwidth of the link to host
    # memory and of host memory that are reached.
    host_link_efficiency: float
    host_memory_efficiency: float
    nvme_Bps: float  # bytes per second of a node's drives, for reading and writing
    # context_bytes, context_alone_bytes: memory of a rank without a model: context, libraries,
    # workspaces, and the buffers of collectives, which a rank that is alone does not have.
    context_bytes: float
    context_alone_bytes: float
    buffer_elements: float  # elements of DeepSpeed's reduction and gathering buckets
    memory_overhead: float  # share that fragmentation adds to activations
    # power that full-rate matrix arithmetic adds at the highest clock, as a share of the device's
    # `reference_W` (uncapped: it may exceed the limit).
    compute_W: float
    # memory_W, link_W: power that full use of memory and of the links adds, likewise.
    memory_W: float
    link_W: float
    # power that a device adds at the highest clock while it runs a program, likewise.
    awake_W: float
    # power that the spinning kernels of a collective or a pipeline's bubble add to that at the
    # highest clock, likewise.
    wait_W: float
    host_link_W: float  # power that moving data to host memory adds, likewise
    # power that a host optimizer adds to a node while it runs, watts per device.
    host_busy_W: float
    # watts that the shares are of; 0 takes the device's limit less its idle power.
    reference_W: float
    voltage_knee: float  # share of the highest clock up to which the voltage is flat
    lowest_voltage: float  # the flat voltage as a share of the highest
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.figures():
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
                raise InvalidValue(f"constant {name}", value, "a number of at least 0")

    @classmethod
    @lru_cache(maxsize=1)
    def figures(cls) -> tuple[str, ...]:
        """Return the names of the numbers."""
        return tuple(field.name for field in fields(cls) if field.name != "sources")


def _file(name: str) -> Traversable:
    return resources.files("tuner.models") / "data" / "constants" / f"{name}.toml"


def _read(name: str, path: Path | None = None) -> dict[str, Any]:
    data = read_toml(path or _file(name), f"constants {name!r}")
    check_keys(data, (*Constants.figures(), "sources", "like"), f"constants {name!r}")
    if "like" not in data:
        return data
    below = _read(str(data.pop("like")))
    sources = [*data.pop("sources", ()), *below.pop("sources", ())]
    return {**below, **data, "sources": sources}


def load_constants(name: str | Path) -> Constants:
    """Load constants by shipped name or by the path of a toml file (else InputError)."""
    path = Path(name) if str(name).endswith(".toml") else None
    data = _read(str(name), path)
    if missing := [figure for figure in Constants.figures() if figure not in data]:
        raise InputError(f"constants {str(name)!r} lack {', '.join(missing)}")
    return Constants(**{**data, "sources": tuple(data.get("sources", ()))})


@lru_cache(maxsize=64)
def constants_of(device: Device) -> Constants:
    """Return the constants of a device: from its own file if it exists, else those of its type."""
    return load_constants(device.name if names_a_file(_file(device.name)) else device.type)


def origin_of(device: Device) -> str:
    """Return where a device's constants come from: published, scaled, guessed or estimated.

    Published are those that were set to published measurements of such devices; scaled those of all
    NVIDIA GPUs, shares of the figures of the data sheet; guessed the same on another vendor's GPUs.
    """
    if names_a_file(_file(device.name)):
        return "published"
    return {"cuda": "scaled", "cpu": "estimated"}.get(device.type, "guessed")


@dataclass(frozen=True)
class Setup:
    """Job on a cluster."""

    job: TrainingJob
    cluster: Cluster
    constants: Constants
    program: Program

    @cached_property
    def facts(self) -> ModelFacts:
        """Sizes of the job's model."""
        return facts_of(self.job)

    @cached_property
    def peak_flops(self) -> float:
        """Peak of the job's precision on one device, FLOP/s.

        PyTorch multiplies fp32 matrices without tensor cores unless the program allows TF32
        (torch.backends.cuda.matmul.allow_tf32 is False by default), and the training program does
        not. A CPU's stated peak is assumed to be that of the job's precision.
        """
        device = self.cluster.device
        if self.job.precision != "fp32" or not device.is_gpu:
            return device.peak_flops
        if self.program.tf32:
            return TF32_SHARE * device.peak_flops
        return device.fp32_flops or device.peak_flops / TENSOR_OVER_FP32

    @cached_property
    def element(self) -> float:
        """Bytes of an activation, a gradient or a communicated parameter."""
        return 4.0 if self.job.precision == "fp32" else 2.0

    @cached_property
    def widened(self) -> Setup:
        """Setup whose element is that of the values between the layers."""
        job = replace(self.job, program=self.program)
        if not widens(job):
            return self
        # No optimizer of pure bf16 is known in fp32, and none matters between the layers.
        plain = replace(self.job, precision="fp32", program=replace(self.program, pure_bf16=False))
        return replace(self, job=plain)

    @property
    def states(self) -> StateBytes:
        """Bytes of weights, gradients and optimizer states per trained parameter."""
        return state_bytes(self.program, self.job.precision)

    @property
    def updated_element(self) -> float:
        """Bytes of a weight that the optimizer updates, and of a gradient that FSDP2 reduces."""
        return 2.0 if self.program.pure_bf16 else 4.0

    @property
    def bandwidth_Bps(self) -> float:
        """Memory bandwidth that a stream reaches on one device, bytes per second."""
        return self.constants.memory_efficiency * self.cluster.device.memory_bandwidth_Bps

    @property
    def flops_per_s(self) -> float:
        """Rate that a large matrix product reaches on one device, FLOP/s."""
        return self.constants.matrix_efficiency * self.peak_flops

    @property
    def host_link_Bps(self) -> float:
        """Bandwidth reached to host memory, bytes per second, of 25 GB/s if none is stated."""
        return self.constants.host_link_efficiency * (self.cluster.host_link_Bps or 2.5e10)


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

    @cached_property
    def column(self) -> Launches:
        """These launches as a column, each array of shape (n, 1)."""
        return self[:, None]

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
        staged = {i: stage_values(v) for i, v in enumerate(values) if by_stage(v)}
        plain = [np.nan if v is None or i in staged else v for i, v in enumerate(values)]
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
    last = len(sums) - 1
    begins = np.zeros((stages + 1, len(sums)), dtype=np.int32)
    # Weights of the largest and the smallest stage of what is before each place, in one stage.
    most, least = np.where(np.arange(len(sums)) > 0, sums, np.inf), sums.copy()
    for stage in range(2, stages + 1):
        before, most, least = (most, least), np.full_like(most, np.inf), np.full_like(most, np.inf)
        # The last place, behind the head, has begins in a range of its own.
        for ends in (np.arange(stage, last), np.array([last])):
            for rows, lo, width in _ranges(sums, before, stage, ends):
                begin = np.minimum(lo[:, None] + np.arange(width), rows[:, None] - 1)
                largest, smallest = _extremes(sums, before, rows[:, None], begin)
                # of equal ones the last, as a row's end may be repeated
                at = width - 1 - np.argmin((largest - smallest)[:, ::-1], axis=1)
                here = np.arange(len(rows)), at
                most[rows], least[rows] = largest[here], smallest[here]
                begins[stage, rows] = begin[here]
    cuts = [last]
    for stage in range(stages, 0, -1):
        cuts.append(int(begins[stage, cuts[-1]]))
    inside = [min(max(each - 1, 0), layers) for each in reversed(cuts)]
    return tuple(after - before for before, after in pairwise(inside))


#: Begins of stages that are compared at once.
_AT_ONCE = 2**18


def _extremes(
    sums: np.ndarray, before: tuple[np.ndarray, np.ndarray], ends: np.ndarray, begin: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest and the smallest stage if the last one is from `begin` to `ends`."""
    here = sums[ends] - sums[begin]
    return np.maximum(before[0][begin], here), np.minimum(before[1][begin], here)


def _ranges(
    sums: np.ndarray, before: tuple[np.ndarray, np.ndarray], stage: int, ends: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yield ends, in parts, with the first of the begins that may be best and their number.

    Stages differ at least by as much as the last one differs from the others' mean, and by as much
    as the embedding is above the last one and above the mean of those between; a begin for which
    that is more than the difference at a begin near the balance is not the best.
    """
    total, table, others = sums[ends], sums[1], stage - 1
    near = np.full(len(ends), np.inf)
    for balance in (total * others / stage, table + (total - table) * (others - 1) / others):
        for offset in (-1, 0):
            begin = np.clip(np.searchsorted(sums, balance) + offset, others, ends - 1)
            largest, smallest = _extremes(sums, before, ends, begin)
            near = np.minimum(near, largest - smallest)
    near += 1e-9 * sums[-1]  # rounding
    low = np.maximum((total - near) * others / stage, table + (table - near) * (others - 1))
    high = np.minimum((total + near) * others / stage, total - table + near)
    first = np.clip(np.searchsorted(sums, low), others, ends - 1)
    number = np.minimum(np.searchsorted(sums, high, side="right"), ends) - first
    start = 0
    while start < len(ends):
        rows = max(1, _AT_ONCE // max(1, int(number[start:].max())))
        part = slice(start, start + rows)
        yield ends[part], first[part], max(1, int(number[part].max()))
        start += rows


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
