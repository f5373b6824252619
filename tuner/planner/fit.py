"""Memory fit of a job: predicted memory, its parts, headroom, and the cheapest change that fits.

The figures are the analytic models' (`tuner.models.analytic.memory`), and how sure an answer is
follows from their error before any probe (`tuner.models.memory_margin`). Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from tuner.models.analytic.memory import DEVICE_PARTS
from tuner.models.analytic.model import AnalyticModel, known_errors
from tuner.models.memory_margin import ALONE_BIAS, MemoryMargin
from tuner.models.prior import Prediction
from tuner.problem.from_job import cluster_to_predict
from tuner.search_spaces.cluster import Cluster, enlarged
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob, job_of
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.model_facts import facts_of
from tuner.search_spaces.model_names import is_model, job_of_model
from tuner.search_spaces.rules import broken_rules
from tuner.search_spaces.space import SearchSpace, changed_default, load_space

#: Probability from which a configuration is said to fit, and from which that is called sure.
LIKELY, SURE = 0.5, 0.9
#: The longest sequence is sought in steps of this many tokens per sequence-parallel rank.
TOKENS = 128
#: Limit on the sequences that are tried, tokens.
LONGEST = 2**24
#: The fewest GPUs are sought up to this multiple of the cluster's.
MULTIPLE = 16
#: Number of changes that are named; each takes more knobs than the one before, and must be faster
#: by this share.
MOST_CHANGES, WORTH = 3, 0.05

#: Values that take no less memory than another of the same knob does.
_NO_LIGHTER = {"activation_offload": "async"}
#: Knobs of a launch that change what the model learns, or where it is stored, are left alone.
_KEPT = ("global_batch",)


@dataclass(frozen=True)
class Headroom:
    """Limit of a quantity, as long as everything else stays.

    Attributes:
        likely: where the job fits with a probability of at least `LIKELY`; 0 if nowhere.
        sure: where it fits with a probability of at least `SURE`; 0 if nowhere.
        capped: True if something else than memory limits it: the batch, or the model's positions.
    """

    likely: int
    sure: int
    capped: bool = False


@dataclass(frozen=True)
class Change:
    """Configuration that fits, compared with the requested one.

    Attributes:
        time_ratio, energy_ratio: both over those of the configuration that was asked about, as if
            that had room.
    """

    configuration: Configuration
    knobs: tuple[str, ...]
    probability: float
    memory_bytes: float
    step_time_s: float
    energy_J: float
    time_ratio: float
    energy_ratio: float


@dataclass(frozen=True)
class Fit:
    """Answer to whether a configuration of a job fits in memory; every figure is predicted.

    Attributes:
        parts: bytes by part on the fullest rank's device (`DEVICE_PARTS`).
        capacity_bytes: memory of one device, or a rank's share of a CPU node.
        host_memory_bytes: peak that the ranks of one node use on its host.
        probability: of fitting, by the models' error before any probe; 0 if the host is too small.
            It holds only if there are no `doubts`, and the JSON is null otherwise.
        micro_batch: the largest micro-batch that divides the global batch.
        fewest_replicas: the fewest GPUs on which it fits if only the replicas' number changes;
            None if it does on none.
        changes: configurations of the space that fit, on as many GPUs if any does, the fastest
            first: then slower ones that differ in fewer knobs; empty if this one surely fits.
        doubts: sentences on what of the model no formula describes (`ModelFacts.doubts`).
        assumed: sentences on what a model alone does not give.
    """

    job: TrainingJob
    cluster: Cluster
    configuration: Configuration
    space: str
    parts: Mapping[str, float]
    capacity_bytes: float
    host_memory_bytes: float
    probability: float
    micro_batch: Headroom
    sequence_length: Headroom
    fewest_replicas: int | None
    changes: tuple[Change, ...]
    known_error: tuple[str, ...]
    parameter_count: int
    find_fewest_gpus: Callable[[], tuple[int, Change] | None] = field(repr=False, compare=False)
    doubts: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @cached_property  # enumerating the space takes most of a second
    def fewest_gpus(self) -> tuple[int, Change] | None:
        """The fewest GPUs on which a configuration of the space fits, or None (`MULTIPLE`)."""
        return self.find_fewest_gpus()

    @property
    def saving_bytes(self) -> float:
        """Bytes on the first rank's host while the whole model is saved (`saving_bytes`)."""
        return saving_bytes(self.job, self.cluster, self.configuration)

    @property
    def memory_bytes(self) -> float:
        """Predicted peak of the fullest rank's device."""
        return sum(self.parts.values())

    @property
    def spare_bytes(self) -> float:
        """Memory of a device that is left; below 0 if it does not fit."""
        return self.capacity_bytes - self.memory_bytes

    @property
    def fits(self) -> bool:
        """True if it fits rather than not."""
        return self.probability >= LIKELY

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON values."""
        fewest = self.fewest_gpus
        return {
            "predicted": True,
            "job": self.job.name,
            "parameter_count": self.parameter_count,
            "doubts": list(self.doubts),
            "assumed": list(self.assumed),
            "cluster": self.cluster.name,
            "precision": self.job.precision,
            "program": asdict(self.job.program),
            "lora": self.job.lora.to_table() if self.job.lora else None,
            "configuration": self.configuration.to_json(),
            "space": self.space,
            "fits": self.fits,
            "probability": None if self.doubts else self.probability,
            "memory_bytes": self.memory_bytes,
            "capacity_bytes": self.capacity_bytes,
            "spare_bytes": self.spare_bytes,
            "parts": dict(self.parts),
            "host_memory_bytes": self.host_memory_bytes,
            "saving_host_bytes": self.saving_bytes,
            "host_capacity_bytes": self.cluster.host_memory_bytes or None,
            "largest_micro_batch": self._limit(self.micro_batch),
            "longest_sequence": self._limit(self.sequence_length),
            "fewest_gpus": fewest and {"gpus": fewest[0], **self._change(fewest[1])},
            "fewest_gpus_by_replicas": self.fewest_replicas,
            "changes": [self._change(change) for change in self.changes],
            "known_error": list(self.known_error),
        }

    def _limit(self, most: Headroom) -> dict[str, Any]:
        return {**asdict(most), "sure": None if self.doubts else most.sure}

    def _change(self, change: Change) -> dict[str, Any]:
        data = {**asdict(change), "configuration": change.configuration.to_json()}
        return {**data, "probability": None if self.doubts else change.probability}


def fit(
    job: TrainingJob | str | Path | None = None,
    *,
    cluster: Cluster | str = "auto",
    configuration: Configuration | str | None = None,
    space: str = "full",
    gpus: int | None = None,
    sequence_length: int | None = None,
    global_batch: int | None = None,
) -> Fit:
    """Predict whether a job fits in memory, the headroom, and the changes that would make it fit.

    Args:
        job: a `TrainingJob`, a shipped job's name, or a job file; None is the default job. Also a
            model alone: its config.json, the folder of that, or its name in transformers' cache.
        cluster: a `Cluster`, a name or path, or "auto" for the machine this runs on.
        configuration: what to change of the configuration that a user would run without tuning, a
            `Configuration` or its short name ("dp8 mb4 zero1"); on as many GPUs as it allows.
        space: name or path of the search space whose configurations may be the change.
        sequence_length: instead of the job's; of a model alone, instead of what is assumed.
        global_batch: likewise.

    Raises:
        InputError: the input is wrong, the model is unknown, or the configuration cannot train
            this job on this cluster; one sentence.
    """
    job, assumed = _job_of(job, sequence_length, global_batch)
    cluster, leased = _clusters(cluster_to_predict(cluster), gpus)
    if isinstance(configuration, str):
        configuration = Configuration.parse(configuration)
    configuration = changed_default(job, leased, configuration or Configuration(Settings()))
    request = _Request(job, cluster, configuration, _launches_alone(load_space(space)))
    breakdown = request.model.breakdown(configuration)
    probability = request.probability
    return Fit(
        job=job,
        cluster=cluster,
        configuration=configuration,
        space=request.space.name,
        parts={name: breakdown.memory.get(name, 0.0) for name in DEVICE_PARTS},
        capacity_bytes=float(_capacity(cluster, [configuration])[0]),
        host_memory_bytes=breakdown.host_memory_bytes,
        probability=probability,
        micro_batch=_largest_micro_batch(request),
        sequence_length=_longest_sequence(request),
        fewest_replicas=_fewest_replicas(request),
        changes=_changes(request) if probability < SURE else (),
        known_error=tuple(
            check.sentence for check in known_errors(cluster.device) if "memory" in check.what
        ),
        parameter_count=facts_of(job).parameters,
        find_fewest_gpus=partial(_fewest_gpus, request),
        doubts=facts_of(job).doubts,
        assumed=(*assumed, f"Assumed of the node: {cluster.assumed}.")
        if cluster.assumed
        else assumed,
    )


def _clusters(cluster: Cluster, gpus: int | None) -> tuple[Cluster, Cluster]:
    """Return the cluster with room for so many GPUs, and the part of it that a default uses."""
    if gpus is None:
        return cluster, cluster
    larger = enlarged(cluster, gpus)
    return larger, replace(larger, devices_per_node=min(gpus, larger.devices_per_node))


def _job_of(
    named: TrainingJob | str | Path | None, sequence_length: int | None, global_batch: int | None
) -> tuple[TrainingJob, tuple[str, ...]]:
    """Return the named job and the assumptions about it."""
    if isinstance(named, str | Path) and is_model(str(named)):
        return job_of_model(str(named), sequence_length=sequence_length, global_batch=global_batch)
    job = job_of(named)
    if not job.is_modelled:
        raise InputError(
            f"whether job {job.name!r} fits cannot be predicted: its model and sequence length "
            "are not known"
        )
    if sequence_length is not None:
        job = replace(job, sequence_length=sequence_length)
    return job if global_batch is None else replace(job, global_batch=global_batch), ()


def _capacity(cluster: Cluster, configurations: Sequence[Configuration]) -> np.ndarray:
    each = float(cluster.device.memory_bytes or np.inf)
    if cluster.device.has_own_memory:
        return np.full(len(configurations), each)
    ranks = np.array([c.world_size for c in configurations], dtype=float)
    return each * cluster.devices_per_node / np.minimum(ranks, cluster.devices_per_node)


@dataclass(frozen=True)
class _Request:
    """Requested configuration with its prediction; changes are those of `space`."""

    job: TrainingJob
    cluster: Cluster
    configuration: Configuration
    space: SearchSpace

    @cached_property
    def model(self) -> AnalyticModel:
        return AnalyticModel(self.job, self.cluster)

    @cached_property
    def prediction(self) -> Prediction:
        return self.model.predict([self.configuration])

    def probabilities(
        self,
        device_bytes: np.ndarray,
        host_bytes: np.ndarray,
        configurations: Sequence[Configuration],
    ) -> np.ndarray:
        """Return the probability that each predicted peak fits; 0 if the host has no room."""
        share = device_bytes / _capacity(self.cluster, configurations)
        alone = np.array([c.world_size == 1 for c in configurations])
        probability = np.where(
            alone,
            MemoryMargin(1.0, bias=ALONE_BIAS).probability_of_fitting(share),
            MemoryMargin(1.0).probability_of_fitting(share),
        )
        host = self.cluster.host_memory_bytes
        return np.where(host_bytes > host, 0.0, probability) if host else probability

    @property
    def probability(self) -> float:
        peaks = self.model.peaks([self.configuration])
        return float(self.probabilities(*peaks, [self.configuration])[0])

    @cached_property
    def lightest(self) -> SearchSpace:
        """The space with its smallest micro-batch alone, and without `_NO_LIGHTER`."""
        choices = dict(self.space.choices)
        for name, values in self.space.values(self.job, self.cluster).items():
            if name == "micro_batch":
                choices[name] = (min(int(str(value)) for value in values),)
            elif name in _NO_LIGHTER and len(values) > 1:
                choices[name] = tuple(value for value in values if value != _NO_LIGHTER[name])
        return replace(self.space, choices=choices)

    def sizes_with_room(self, gpus: int | None) -> list[int]:
        """Return the numbers of ranks on which a launch fits: this one, or any if it is None.

        Many fewer launches are listed than there are: the others never fit better (`lightest`).
        """
        found, _ = _with_room(self, self.launches_on(gpus, self.lightest))
        return sorted({launch.world_size for launch in found})

    def launches_on(self, gpus: int | None, space: SearchSpace) -> list[Configuration]:
        """Return the launches of so many ranks, which are listed without the others, or of any."""
        kept = {n: v for n in _KEPT if (v := self.configuration.launch.get(n)) is not None}
        try:
            return [
                Configuration(Settings(launch, **kept), self.configuration.live)
                for launch, _ in space.groups(self.job, self.cluster, gpus=gpus)
            ]
        except InputError:
            return []


def _launches_alone(space: SearchSpace) -> SearchSpace:
    space = space.same_training()
    kept = {n: c for n, c in space.choices.items() if KNOBS[n].kind == "launch" and n not in _KEPT}
    return replace(space, choices=kept)


def _with(configuration: Configuration, **values: int) -> Configuration:
    return Configuration(Settings(configuration.launch, **values), configuration.live)


def _largest_micro_batch(request: _Request) -> Headroom:
    job = request.job.at(request.configuration)
    share = job.global_batch // request.configuration.data_parallel
    sizes = (n for n in range(1, share + 1) if share % n == 0)
    every = (_with(request.configuration, micro_batch=n) for n in sizes)
    valid = [c for c in every if not broken_rules(c, request.job, request.cluster)]
    micro_batches = np.array([c.micro_batch for c in valid])
    probability = request.probabilities(*request.model.peaks(valid), valid)
    likely, sure = (
        int(micro_batches[probability >= least].max(initial=0)) for least in (LIKELY, SURE)
    )
    return Headroom(likely, sure, capped=bool(sure == micro_batches.max()))


def _longest_sequence(request: _Request) -> Headroom:
    step = TOKENS * request.configuration.sequence_parallel
    facts = facts_of(request.job)
    limit = facts.positions if facts.learned_positions and facts.positions else LONGEST
    most = limit // step

    def fits(count: int, least: float) -> bool:
        longer = replace(request, job=replace(request.job, sequence_length=count * step))
        broken = broken_rules(request.configuration, longer.job, request.cluster)
        return longer.probability >= least and not broken

    found = []
    for least in (LIKELY, SURE):
        low, high = 0, 1
        while high <= most and fits(high, least):
            low, high = high, 2 * high
        high = min(high, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle, least) else (low, middle)
        found.append(low)
    # Video alone takes its tokens: a shorter sequence cannot hold it.
    least_tokens = facts.vision.tokens_of(request.job.frames) if facts.vision else 0
    likely, sure = (n * step if n * step > least_tokens else 0 for n in found)
    return Headroom(likely, sure, capped=sure == most * step)


def _sizes(cluster: Cluster) -> Iterator[int]:
    node = cluster.devices_per_node
    yield from (n for n in range(1, node + 1) if node % n == 0)
    size = 2 * node
    while size <= MULTIPLE * cluster.devices:
        yield size
        size *= 2


def _fitting(request: _Request, gpus: int | None) -> list[Change]:
    """Return what surely fits on so many GPUs, or else probably, or on any; the fastest first."""
    sizes = request.sizes_with_room(gpus)
    if not sizes:
        return []
    every = [launch for size in sizes for launch in request.launches_on(size, request.space)]
    configurations, probability = _with_room(request, every)
    prediction = request.model.predict(configurations)
    times_s, energies_J = prediction.step_time_s, prediction.step_time_s * prediction.power_W
    now_s = float(request.prediction.step_time_s[0])
    now_J = now_s * float(request.prediction.power_W[0])
    return [
        Change(
            configuration=(changed := configurations[row]),
            knobs=tuple(
                name
                for name, knob in KNOBS.items()
                if knob.kind == "launch" and changed.get(name) != request.configuration.get(name)
            ),
            probability=float(probability[row]),
            memory_bytes=float(prediction.memory_bytes[row]),
            step_time_s=float(times_s[row]),
            energy_J=float(energies_J[row]),
            time_ratio=float(times_s[row]) / now_s,
            energy_ratio=float(energies_J[row]) / now_J,
        )
        for row in np.argsort(times_s, kind="stable").tolist()
    ]


def _with_room(
    request: _Request, configurations: Sequence[Configuration]
) -> tuple[list[Configuration], np.ndarray]:
    """Return those that surely fit, or else probably, with their probabilities."""
    if not configurations:
        return [], np.empty(0)
    peaks = request.model.peaks(configurations)
    probability = request.probabilities(*peaks, configurations)
    rows = np.flatnonzero(probability >= (SURE if (probability >= SURE).any() else LIKELY))
    return [configurations[row] for row in rows.tolist()], probability[rows]


def _fewest_gpus(request: _Request) -> tuple[int, Change] | None:
    # Of those on so few GPUs it is the fastest of the ones that differ in the fewest knobs.
    for size in _sizes(request.cluster):
        there = replace(request, cluster=enlarged(request.cluster, size))
        if found := _fitting(there, size):
            return size, min(found, key=lambda change: len(change.knobs))
    return None


def _fewest_replicas(request: _Request) -> int | None:
    one = request.configuration.world_size // request.configuration.data_parallel
    for size in _sizes(request.cluster):
        if size % one:
            continue
        job, there = request.job, enlarged(request.cluster, size)
        changed = _with(request.configuration, data_parallel=size // one)
        if not broken_rules(changed, job, there) and (
            replace(request, cluster=there, configuration=changed).probability >= LIKELY
        ):
            return size
    return None


def _changes(request: _Request) -> tuple[Change, ...]:
    """Return the fastest change by each number of knobs, as long as more knobs are worth it.

    The fastest of them is the first. The number of GPUs stays if anything fits on as many.
    """
    best: dict[int, Change] = {}
    for change in _fitting(request, request.configuration.world_size) or _fitting(request, None):
        best.setdefault(len(change.knobs), change)
    found: list[Change] = []
    for number in sorted(best):
        worth = not found or best[number].step_time_s < (1 - WORTH) * found[-1].step_time_s
        if number and worth:
            found.append(best[number])
    return tuple(reversed(found[:MOST_CHANGES]))


def saving_bytes(job: TrainingJob, cluster: Cluster, configuration: Configuration) -> float:
    """Return the bytes that a whole model takes on the first rank's host while it is saved.

    Sharded parameters are gathered there: in 16 bits under ZeRO-3 (DeepSpeed 0.19.8, engine.py,
    _zero3_consolidated_16bit_state_dict), in fp32 under FSDP (torch's FULL_STATE_DICT). 0 where
    each rank holds them, with adapters, and where device and host are one memory.
    """
    by_torch = configuration.get("sharding") != "deepspeed"
    gathers = by_torch or configuration.zero_stage == 3
    if job.lora or not cluster.device.has_own_memory or not gathers:
        return 0.0
    return facts_of(job).parameters * (4.0 if by_torch or job.precision == "fp32" else 2.0)
