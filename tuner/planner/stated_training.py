"""Predictions for a framework's command or file: its job and its configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.planner.fit import Fit, fit
from tuner.problem.job_request import cluster_of
from tuner.search_spaces.cluster import Cluster, enlarged
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knobs import Value
from tuner.search_spaces.model_names import config_of_model
from tuner.workload.scripts.frameworks.commands import training_of_command, training_of_file
from tuner.workload.scripts.frameworks.training import StatedTraining

#: Knobs that divide the ranks beside the replicas.
_DEGREES = ("tensor_parallel", "pipeline_parallel", "sequence_parallel")


@dataclass(frozen=True)
class StatedJob(TrainingJob):
    """Job of a training, which another engine than DeepSpeed may train."""

    by_deepspeed: bool = True

    @property
    def on_deepspeed(self) -> bool:
        """True if DeepSpeed's rules hold for it."""
        return self.by_deepspeed


@dataclass(frozen=True)
class StatedPlan:
    """Job and configuration that a training describes, on so many GPUs."""

    training: StatedTraining
    job: TrainingJob
    configuration: Configuration
    gpus: int
    assumed: tuple[str, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """Notes on the values that were read and assumed, a sentence each."""
        training = self.training
        read = f"read from {training.source} ({training.framework}): {_stated(training)}"
        return (read, *((f"assumed: {'; '.join(self.assumed)}",) if self.assumed else ()))


def stated_plan(
    named: str | Sequence[str],
    cluster: Cluster | str = "auto",
    *,
    gpus: int | None = None,
    model_config: Path | None = None,
    sequence_length: int | None = None,
) -> StatedPlan:
    """Return the job of a framework's file, or of a command as its words.

    Args:
        gpus: in place of those that the command starts, or else the cluster's.
        model_config: the model's config.json, if its name does not lead to one.

    Raises:
        InputError: something that it names is missing or cannot be read; one sentence.
    """
    found = cluster_of(cluster)
    devices = gpus or found.devices
    if isinstance(named, str):
        training = training_of_file(named, devices)
    else:
        training = training_of_command(named, devices, gpus=gpus)
    length = sequence_length or training.sequence_length
    if not length:
        raise InputError(
            f"{training.source} does not say the tokens of a sequence; give "
            f"{' or '.join(training.length_keys)}, or --sequence-length to tuner fit"
        )
    ranks, degree = _ranks_of(training, found, gpus)
    replicas = ranks // degree
    job = StatedJob(
        name=Path(training.source).stem.replace(" ", "-"),
        model=_model(training, model_config),
        sequence_length=length,
        global_batch=training.micro_batch * training.accumulation * replicas,
        precision=training.precision,  # type: ignore[arg-type]
        lora=training.lora,
        program=training.program,
        by_deepspeed=training.on_deepspeed,
    )
    knobs = {**training.knobs, "data_parallel": replicas}
    notes = list(training.assumed)
    if replicas * int(str(knobs.get("sequence_parallel", 1))) == 1:
        notes += _over_one(knobs)
    if model_config is not None:
        notes.append(f"sizes of {model_config}")
    if not (training.ranks or gpus):
        notes.append(f"on {ranks} GPUs, as it names no number")
    every = {"activation_checkpointing": "none", "optimizer_offload": "none", **knobs}
    return StatedPlan(training, job, Configuration(Settings(every)), ranks, tuple(notes))


def _model(training: StatedTraining, given: Path | None) -> Mapping[str, Any]:
    """Return the model's configuration; InputError names --model-config, too."""
    if given is not None:
        return config_of_model(str(given))
    if training.config is not None:
        return training.config
    if training.why_no_model:
        raise InputError(training.why_no_model)
    try:
        return config_of_model(training.model)
    except InputError as error:
        raise InputError(f"{error}, or give its config.json by --model-config") from error


def _ranks_of(training: StatedTraining, cluster: Cluster, gpus: int | None) -> tuple[int, int]:
    """Return the ranks, and the product of the degrees that divide them beside the replicas."""
    ranks = training.ranks or gpus or cluster.devices
    degree = math.prod(int(str(training.knobs.get(name, 1))) for name in _DEGREES)
    replicas = training.knobs.get("data_parallel")
    if isinstance(replicas, int) and replicas * degree != ranks:
        if training.ranks or gpus:
            raise InputError(
                f"{training.source} divides {replicas * degree} ranks, and {ranks} are started; "
                f"give --gpus {replicas * degree}, or other degrees"
            )
        ranks = replicas * degree
    if ranks > cluster.devices:
        enlarged(cluster, ranks)  # refuses what is not a multiple of a node
    if ranks % degree:
        raise InputError(
            f"{training.source} divides the ranks by {degree}, which does not divide {ranks} GPUs; "
            "give a multiple by --gpus"
        )
    return ranks, degree


def _over_one(knobs: dict[str, Value]) -> list[str]:
    """Remove sharding over one rank, which has nothing to shard; return a note on it."""
    sharded = knobs.get("zero_stage", 0) or knobs.get("sharding", "deepspeed") != "deepspeed"
    if knobs.get("parameter_offload", "none") != "none" or not sharded:
        return []
    knobs["sharding"] = "deepspeed"
    knobs["zero_stage"] = 0 if knobs.get("optimizer_offload", "none") == "none" else 1
    return ["states are whole on one GPU"]


def fit_training(
    named: str | Sequence[str],
    *,
    cluster: Cluster | str = "auto",
    changed: Configuration | None = None,
    space: str = "full",
    gpus: int | None = None,
    sequence_length: int | None = None,
    global_batch: int | None = None,
    model_config: Path | None = None,
) -> Fit:
    """Predict whether the training of a framework's file or command fits (`tuner.fit`).

    Args:
        named: the file, or the words of the command.
        changed: knobs in place of those that it states.
    """
    found = stated_plan(
        named, cluster, gpus=gpus, model_config=model_config, sequence_length=sequence_length
    )
    launch = {**found.configuration.launch, **(changed.launch if changed else {})}
    if changed and {*changed.launch} & {*_DEGREES} and "data_parallel" not in changed.launch:
        del launch["data_parallel"]
    live = changed.live if changed else found.configuration.live
    answer = fit(
        found.job,
        cluster=cluster,
        configuration=Configuration(Settings(launch), live),
        space=space,
        gpus=found.gpus,
        global_batch=global_batch,
    )
    doubts = (*answer.doubts, *found.training.doubts)
    return replace(answer, assumed=(*found.sentences, *answer.assumed), doubts=doubts)


def _by_its_sizes(training: StatedTraining) -> str:
    return f"{training.config['model_type']} by its sizes" if training.config else "a model"


def _stated(training: StatedTraining) -> str:
    lora = training.lora
    parts = [
        training.model or _by_its_sizes(training),
        f"micro-batch {training.micro_batch}, accumulation {training.accumulation}",
        *([f"{training.sequence_length:,} tokens"] if training.sequence_length else []),
        training.precision,
        f"LoRA of rank {lora.rank} on {lora.targets}" if lora else "every parameter trained",
    ]
    if lora and lora.quantization != "none":
        parts.append(lora.quantization)
    return ", ".join(parts)
