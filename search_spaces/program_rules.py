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

__all__ = ["unrunnable"]

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

#: The model families in which a compiled model was compared with the eager one likewise.
_COMPILED = frozenset({"llama", "opt", "qwen2"})
#: And those in which attention over gathered keys and values was.
_GATHERED = frozenset({"llama", "opt", "qwen2"})
#: And those in which interleaved and zero-bubble schedules were.
_SCHEDULED = frozenset({"llama", "opt", "qwen2"})
#: And those whose blocks were multiplied in FP8 by the program, on a CPU.
_IN_FP8 = frozenset({"llama", "opt", "qwen2"})


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
    if configuration.get("activation_checkpointing") == "selective":
        phrases += [
            f"activation_checkpointing selective with {name} is not run by the built-in training "
            "program: DeepSpeed changes the kept outputs of matrix products in place"
            for name in split
            if name in ("tensor_parallel", "expert_parallel")
        ]
    if job is not None:
        family = str(job.model["model_type"])
        for name in split:
            if family not in _COMPARED[name]:
                phrases.append(
                    f"{name} is run by the built-in training program for models of type "
                    f"{', '.join(sorted(_COMPARED[name]))} only, not {family}"
                )
        phrases += _unfit_frames(configuration, job)
    return [
        *phrases,
        *_not_gathered(configuration, job),
        *_not_compiled(configuration, job),
        *_not_scheduled(configuration, job),
        *_not_in_fp8(configuration, job),
    ]


def _not_in_fp8(configuration: Configuration, job: TrainingJob | None) -> list[str]:
    """Return phrases on why the program does not multiply in FP8 in a configuration."""
    scaling = configuration.get("fp8")
    if scaling in (None, "none"):
        return []
    run = f"fp8 {scaling} is run by the built-in training program"
    if scaling == "mx":
        return [
            "fp8 mx is not run by the built-in training program yet: torch takes its scales only "
            "in the layout of the tensor cores, which no device here could check"
        ]
    phrases = [
        f"{run} without {name} only: the layers that it splits are DeepSpeed's"
        for name in ("tensor_parallel", "expert_parallel")
        if _degree(configuration, name) > 1
    ]
    if configuration.get("pipeline_schedule") not in (None, "1f1b"):
        phrases.append(f"{run} with pipeline_schedule 1f1b only")
    if job is not None and job.model["model_type"] not in _IN_FP8:
        phrases.append(
            f"{run} for models of type {', '.join(sorted(_IN_FP8))} only, "
            f"not {job.model['model_type']}"
        )
    return phrases


def _not_gathered(configuration: Configuration, job: TrainingJob | None) -> list[str]:
    """Return phrases on why the program cannot gather keys and values in a configuration."""
    if configuration.get("sequence_method") != "all_gather":
        return []
    run = "sequence_method all_gather is run by the built-in training program"
    phrases = []
    if job is not None and job.model["model_type"] not in _GATHERED:
        phrases.append(
            f"{run} for models of type {', '.join(sorted(_GATHERED))} only, "
            f"not {job.model['model_type']}"
        )
    if configuration.get("compilation") not in (None, "none"):
        phrases.append(f"{run} without compilation only")
    return phrases


def _not_scheduled(configuration: Configuration, job: TrainingJob | None) -> list[str]:
    """Return phrases on why the program cannot run a pipeline schedule in a configuration."""
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
    if job is not None and job.model["model_type"] not in _SCHEDULED:
        phrases.append(
            f"{run} for models of type {', '.join(sorted(_SCHEDULED))} only, "
            f"not {job.model['model_type']}"
        )
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
    """Return phrases on why the program does not compile the model under a configuration."""
    scope, phrases = configuration.get("compilation"), []
    if scope not in ("regional", "full"):
        return []
    if scope == "full" and _degree(configuration, "pipeline_parallel") > 1:
        phrases.append(
            "compilation full with pipeline_parallel is not run by the built-in training program: "
            "no rank of a pipeline holds the whole model (regional compiles its blocks)"
        )
    if _degree(configuration, "expert_parallel") > 1 or (
        job is not None and job.model["model_type"] not in _COMPILED
    ):
        phrases.append(
            f"compilation {scope} is run by the built-in training program for dense models of type "
            f"{', '.join(sorted(_COMPILED))} only"
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
    """Return phrases on why the model cannot read the job's video under a configuration."""
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
