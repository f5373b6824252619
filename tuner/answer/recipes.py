"""Predictions for a framework's command or file: its job and its configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.answer.fit import Fit, fit
from tuner.problem.from_job import cluster_of
from tuner.search_spaces.cluster import Cluster, enlarged
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knobs import Value
from tuner.search_spaces.model_names import config_of_model
from tuner.workload.scripts.recipe import Recipe
from tuner.workload.scripts.recipes import recipe_of_command, recipe_of_file

#: Knobs that divide the ranks beside the replicas.
_DEGREES = ("tensor_parallel", "pipeline_parallel", "sequence_parallel")


@dataclass(frozen=True)
class RecipeJob(TrainingJob):
    """Job of a recipe, which another engine than DeepSpeed may train."""

    by_deepspeed: bool = True

    @property
    def on_deepspeed(self) -> bool:
        """True if DeepSpeed's rules hold for it."""
        return self.by_deepspeed


@dataclass(frozen=True)
class RecipePlan:
    """Job and configuration that a recipe describes, on so many GPUs."""

    recipe: Recipe
    job: TrainingJob
    configuration: Configuration
    gpus: int
    assumed: tuple[str, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """Notes on the values that were read and assumed, a sentence each."""
        recipe = self.recipe
        read = f"read from {recipe.source} ({recipe.framework}): {_stated(recipe)}"
        return (read, *((f"assumed: {'; '.join(self.assumed)}",) if self.assumed else ()))


def planned(
    named: str | Sequence[str],
    cluster: Cluster | str = "auto",
    *,
    gpus: int | None = None,
    model_config: Path | None = None,
    sequence_length: int | None = None,
) -> RecipePlan:
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
        recipe = recipe_of_file(named, devices)
    else:
        recipe = recipe_of_command(named, devices, gpus=gpus)
    ranks, degree = _ranks_of(recipe, found, gpus)
    replicas = ranks // degree
    job = RecipeJob(
        name=Path(recipe.source).stem.replace(" ", "-"),
        model=_model(recipe, model_config),
        sequence_length=sequence_length or recipe.sequence_length,
        global_batch=recipe.micro_batch * recipe.accumulation * replicas,
        precision=recipe.precision,  # type: ignore[arg-type]
        lora=recipe.lora,
        program=recipe.program,
        by_deepspeed=recipe.on_deepspeed,
    )
    knobs = {**recipe.knobs, "data_parallel": replicas}
    notes = list(recipe.assumed)
    if replicas * int(str(knobs.get("sequence_parallel", 1))) == 1:
        notes += _over_one(knobs)
    if model_config is not None:
        notes.append(f"sizes of {model_config}")
    if not (recipe.ranks or gpus):
        notes.append(f"on {ranks} GPUs, as it names no number")
    every = {"activation_checkpointing": "none", "optimizer_offload": "none", **knobs}
    return RecipePlan(recipe, job, Configuration(Settings(every)), ranks, tuple(notes))


def _model(recipe: Recipe, given: Path | None) -> Mapping[str, Any]:
    """Return the model's configuration; InputError names --model-config, too."""
    if given is not None:
        return config_of_model(str(given))
    if recipe.config is not None:
        return recipe.config
    if recipe.why_no_model:
        raise InputError(recipe.why_no_model)
    try:
        return config_of_model(recipe.model)
    except InputError as error:
        raise InputError(f"{error}, or give its config.json by --model-config") from error


def _ranks_of(recipe: Recipe, cluster: Cluster, gpus: int | None) -> tuple[int, int]:
    """Return the ranks, and the product of the degrees that divide them beside the replicas."""
    ranks = recipe.ranks or gpus or cluster.devices
    degree = math.prod(int(str(recipe.knobs.get(name, 1))) for name in _DEGREES)
    replicas = recipe.knobs.get("data_parallel")
    if isinstance(replicas, int) and replicas * degree != ranks:
        if recipe.ranks or gpus:
            raise InputError(
                f"{recipe.source} divides {replicas * degree} ranks, and {ranks} are started; "
                f"give --gpus {replicas * degree}, or other degrees"
            )
        ranks = replicas * degree
    if ranks > cluster.devices:
        enlarged(cluster, ranks)  # refuses what is not a multiple of a node
    if ranks % degree:
        raise InputError(
            f"{recipe.source} divides the ranks by {degree}, which does not divide {ranks} GPUs; "
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


def fit_recipe(
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
    found = planned(
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
    doubts = (*answer.doubts, *found.recipe.doubts)
    return replace(answer, assumed=found.sentences, doubts=doubts)


def _by_its_sizes(recipe: Recipe) -> str:
    return f"{recipe.config['model_type']} by its sizes" if recipe.config else "a model"


def _stated(recipe: Recipe) -> str:
    lora = recipe.lora
    parts = [
        recipe.model or _by_its_sizes(recipe),
        f"micro-batch {recipe.micro_batch}, accumulation {recipe.accumulation}",
        f"{recipe.sequence_length:,} tokens",
        recipe.precision,
        f"LoRA of rank {lora.rank} on {lora.targets}" if lora else "every parameter trained",
    ]
    if lora and lora.quantization != "none":
        parts.append(lora.quantization)
    return ", ".join(parts)
