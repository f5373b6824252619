"""Limits of the built-in training program.

These are not rules of DeepSpeed: layers written for it can do more. They are the models on which
the program's partitioning was compared with data parallelism, the pairs of degrees that it does not
combine, and the ways in which a job's video can be partitioned.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.search_spaces.changed_training import CHANGED
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.model_facts import facts_of

#: The model families in which each degree was compared with data parallelism, loss and gradient
#: norm step by step (tests/workload/program/test_knobs_real.py). Another family may place its
#: blocks, positions or experts differently, and would then silently train another model.
_COMPARED: Mapping[str, frozenset[str]] = {
    "tensor_parallel": frozenset({"llama", "llava_onevision", "opt", "qwen2"}),
    "pipeline_parallel": frozenset({"llama", "llava_onevision", "olmoe", "opt", "qwen2"}),
    "sequence_parallel": frozenset({"llama", "llava_onevision", "olmoe", "opt", "qwen2"}),
    "expert_parallel": frozenset({"olmoe"}),
}

#: Reasons why the program does not combine two degrees. Layers written for both (as those of
#: Megatron-DeepSpeed) can, so `RULES` allows the pair.
_APART: Mapping[tuple[str, str], str] = {
    ("tensor_parallel", "pipeline_parallel"): (
        "DeepSpeed's automatic tensor parallelism aborts inside a pipeline"
    ),
    ("tensor_parallel", "sequence_parallel"): (
        "DeepSpeed's automatic tensor parallelism replaces the groups of Ulysses by its own"
    ),
    ("tensor_parallel", "expert_parallel"): (
        "DeepSpeed's automatic tensor parallelism refuses mixtures of experts"
    ),
    ("pipeline_parallel", "sequence_parallel"): (
        "its pipeline stages take whole sequences, as DeepSpeed has one set of groups at a time"
    ),
    ("sequence_parallel", "expert_parallel"): (
        "DeepSpeed's MoE layer fails on the parts of sequences that Ulysses gives it"
    ),
}

#: The model families in which these were compared likewise: compilation, attention over gathered
#: keys and values, interleaved and zero-bubble schedules.
_DENSE = frozenset({"llama", "opt", "qwen2"})


def _other_family(run: str, job: TrainingJob | None, families: frozenset[str]) -> list[str]:
    """Return a phrase if the job's model is not of these families; `run` says what is run."""
    if job is None or job.model["model_type"] in families:
        return []
    return [
        f"{run} for models of type {', '.join(sorted(families))} only, "
        f"not {job.model['model_type']}"
    ]


def _degree(configuration: Configuration, name: str) -> int:
    """Return a degree; 1 if a recorded table uses its name for something else."""
    value = configuration.get(name)
    return value if isinstance(value, int) else 1


def unrunnable(configuration: Configuration, job: TrainingJob | None = None) -> list[str]:
    """Return a phrase for each reason why the built-in training program cannot run this.

    The list is empty if it can. Without a job, limits that depend on the model are not checked.
    """
    declared = {CHANGED, *(knob.name for knob in (job.knobs if job is not None else ()))}
    phrases = [
        f"{name} is not a knob of the built-in training program"
        for name in (*configuration.launch, *configuration.live)
        if name not in KNOBS and name not in declared
    ]

    split = [name for name in _COMPARED if _degree(configuration, name) > 1]
    for (one, other), why in _APART.items():
        if one in split and other in split:
            phrases.append(f"{one} with {other} is not run by the built-in training program: {why}")
    sharding = configuration.get("sharding")
    if sharding != KNOBS["sharding"].default:
        phrases += [
            f"the knob {knob.name} of DeepSpeed's configuration does nothing under sharding "
            f"{sharding}"
            for knob in (job.knobs if job is not None else ())
            if knob.how.startswith("deepspeed:")
            and configuration.launch.get(knob.name, knob.baseline) != knob.baseline
        ]
        phrases += [
            f"sharding {sharding} with {name} is not run by the built-in training program: the "
            "degree is DeepSpeed's"
            for name in split
        ]
    if configuration.get("fp8") not in (None, "none"):
        phrases.append(
            f"fp8 {configuration.get('fp8')} is not run by the built-in training program; it is "
            "predicted, and set in a framework that multiplies in FP8"
        )
    if configuration.get("activation_checkpointing") == "selective":
        phrases += [
            f"activation_checkpointing selective with {name} is not run by the built-in training "
            "program: DeepSpeed changes the kept outputs of matrix products in place"
            for name in split
            if name in ("tensor_parallel", "expert_parallel")
        ]
    if job is not None:
        for name in split:
            run = f"{name} is run by the built-in training program"
            phrases += _other_family(run, job, _COMPARED[name])
        phrases += _unfit_frames(configuration, job)
    return [
        *phrases,
        *_not_gathered(configuration, job),
        *_not_compiled(configuration, job),
        *_not_scheduled(configuration, job),
    ]


def _not_gathered(configuration: Configuration, job: TrainingJob | None) -> list[str]:
    if configuration.get("sequence_method") != "all_gather":
        return []
    run = "sequence_method all_gather is run by the built-in training program"
    phrases = _other_family(run, job, _DENSE)
    if configuration.get("compilation") not in (None, "none"):
        phrases.append(f"{run} without compilation only")
    return phrases


def _not_scheduled(configuration: Configuration, job: TrainingJob | None) -> list[str]:
    schedule = configuration.get("pipeline_schedule")
    if schedule not in ("interleaved", "zero_bubble"):
        return []
    run = f"pipeline_schedule {schedule} is run by the built-in training program"
    phrases = [
        f"{run} without {name} only"
        for name in ("expert_parallel", "activation_offload", "optimizer_offload")
        if configuration.get(name) not in (None, KNOBS[name].default)
    ]
    if configuration.get("zero_stage") != 0:
        phrases.append(f"{run} at zero_stage 0 only: torch's schedules know no ZeRO")
    if job is not None and job.precision == "fp16":
        phrases.append(f"{run} in fp32 and bf16 only: it scales no loss")
    phrases += _other_family(run, job, _DENSE)
    split = [
        name
        for name in ("compilation", "activation_checkpointing")
        if configuration.get(name) not in (None, "none")
    ]
    if schedule == "zero_bubble" and split:
        phrases.append(
            f"{run} without {' or '.join(split)} only: the gradients of weights are computed apart"
        )
    return phrases


def _not_compiled(configuration: Configuration, job: TrainingJob | None) -> list[str]:
    scope, phrases = configuration.get("compilation"), []
    if scope not in ("regional", "full"):
        return []
    if scope == "full" and _degree(configuration, "pipeline_parallel") > 1:
        phrases.append(
            "compilation full with pipeline_parallel is not run by the built-in training program: "
            "no rank of a pipeline holds the whole model (regional compiles its blocks)"
        )
    if _degree(configuration, "expert_parallel") > 1 or (
        job is not None and job.model["model_type"] not in _DENSE
    ):
        phrases.append(
            f"compilation {scope} is run by the built-in training program for dense models of type "
            f"{', '.join(sorted(_DENSE))} only"
        )
    sharding = configuration.get("sharding")
    if sharding not in (None, KNOBS["sharding"].default):
        phrases.append(
            f"compilation {scope} with sharding {sharding} is not run by the built-in training "
            "program yet"
        )
    if configuration.get("activation_offload") not in (None, "none"):
        phrases.append(
            f"compilation {scope} with activation_offload is not run by the built-in training "
            "program: compiled code keeps its activations where torch's hooks do not see them"
        )
    return phrases


def _unfit_frames(configuration: Configuration, job: TrainingJob) -> list[str]:
    vision, frames = facts_of(job).vision, job.frames
    if vision is None:
        return [f"the model reads no video, and the job gives {frames} frames"] if frames else []
    visual, length = vision.tokens_of(frames), job.sequence_length
    if not frames:
        return ["the model reads video, and the job gives no frames; set frames in the job's file"]
    if visual + 2 > length:
        return [
            f"{frames} frames are {visual} tokens, which with two of text do not fit in a "
            f"sequence of {length}"
        ]
    degree = _degree(configuration, "sequence_parallel")
    if frames % degree:
        return [
            f"sequence_parallel {degree} does not divide the {frames} frames, and each rank of a "
            "sequence encodes equally many"
        ]
    tensor = _degree(configuration, "tensor_parallel")
    if vision.heads % tensor:
        return [f"tensor_parallel {tensor} does not divide the encoder's {vision.heads} heads"]
    return []
