"""Baseline: the user's configuration of today, from their own DeepSpeed JSON and flags.

A saving is worth what it is measured against, so the baseline is the user's own configuration where
they give it, and otherwise a plain one that a careful user would run, never an untuned straw man.
The keys of the JSON that are knobs become part of the configuration; notes name the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.search_spaces.baseline import degrees
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError, InvalidConfiguration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knob_declarations import declared_words, with_baseline
from tuner.search_spaces.knobs import KNOBS, Value, split_words, values_of
from tuner.search_spaces.rules import why_it_cannot_run
from tuner.workload.scripts.deepspeed_file import read_deepspeed

#: Keys of DeepSpeed's JSON that are read, say how the batch is split, or change nothing of a step.
_FACTS = {"zero_optimization", "tensor_parallel", "fp16", "bf16", "sequence_parallel_size"}
_FACTS |= {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
_FACTS |= {"steps_per_print", "wall_clock_breakdown", "dump_state", "tensorboard", "wandb"}
#: Parts of "zero_optimization" that are knobs.
_ZERO = ("stage", "offload_optimizer", "offload_param", "zero_hpz_partition_size")
#: Beginning of the name of a default baseline.
_DEFAULT = "the default:"


@dataclass(frozen=True)
class Baseline:
    """Configuration that the user runs today; `name` is a phrase on where it comes from."""

    configuration: Configuration
    name: str
    notes: tuple[str, ...] = ()


def default_name(configuration: Configuration) -> str:
    """Return the name of the default baseline, which the report shows beside every saving."""
    named = any(name in KNOBS for name in configuration.live)
    live = "the clocks named" if named else "clocks left to the device"
    return (
        f"{_DEFAULT} data parallelism over {configuration.data_parallel} "
        f"device{'s' * (configuration.data_parallel != 1)}, the lowest ZeRO stage and the largest "
        f"micro-batch that fit, {live}"
    )


def lighter_defaults(default: Configuration, job: TrainingJob) -> list[Configuration]:
    """Return configurations that need less memory than a default, and still are plain ones.

    They have smaller micro-batches, higher ZeRO stages and checkpointed activations. The optimizer
    stays where it is: on the host a step may take many times as long, and a saving over that would
    be none of the user's.
    """
    share = job.global_batch // default.data_parallel
    batches = [n for n in range(default.micro_batch, 0, -1) if share % n == 0]
    stages = range(default.zero_stage, 4 if default.data_parallel > 1 else default.zero_stage + 1)
    kept = [default.launch["activation_checkpointing"], "full"]
    return [
        Configuration(
            Settings(
                {
                    **default.launch,
                    "micro_batch": micro_batch,
                    "zero_stage": stage,
                    "activation_checkpointing": checkpointing,
                }
            ),
            default.live,
        )
        for micro_batch in batches
        for stage in stages
        for checkpointing in dict.fromkeys(kept)
    ]


def is_default(identity: Mapping[str, Any]) -> bool:
    """Return True if the baseline of a problem's identity is the default, not the user's own."""
    section = identity.get("baseline")
    return isinstance(section, Mapping) and str(section.get("name", "")).startswith(_DEFAULT)


def read_baseline(words: Sequence[str | Path], job: TrainingJob, cluster: Cluster) -> Baseline:
    """Read a DeepSpeed JSON and KNOB=VALUE into a configuration.

    Args:
        words: at most one path of a DeepSpeed JSON, and KNOB=VALUE, which win over it.
        job, cluster: what it trains, and where. Where no word says otherwise, what the job
            states holds; else data parallelism fills the devices, as far as they divide the batch.

    Raises:
        InputError: the file is no DeepSpeed JSON, or there are two.
        InvalidConfiguration: the configuration cannot train this job on this cluster.
    """
    texts = [str(word) for word in words]
    declared, rest = declared_words(texts, job.knobs)
    files, flags = split_words(rest)
    if len(files) > 1:
        raise InputError(f"{files[1]!r} is a second file; --today takes one DeepSpeed JSON")
    own = {knob.name for knob in job.knobs}
    values = {name: value for name, value in job.stated.items() if name not in own}
    declared = {**{n: v for n, v in job.stated.items() if n in own}, **declared}
    notes: list[str] = []
    if files:
        config = read_deepspeed(Path(files[0]), option="--today")
        found, notes = _knobs_of(config, job, files[0])
        values |= found
    values |= values_of(flags)
    if "data_parallel" not in values:
        inside = Configuration.of(values).world_size
        fitting = [n for n in degrees(cluster.devices // inside) if job.global_batch % n == 0]
        values["data_parallel"] = max(fitting, default=1)
    if files and "micro_batch" not in values:
        times = config.get("gradient_accumulation_steps")
        times = times if isinstance(times, int) and times > 0 else 1
        share = max(1, job.global_batch // (int(str(values["data_parallel"])) * times))
        values["micro_batch"] = share
        notes.append(
            f"no micro-batch is named, so it is the global batch's share of a rank: {share}"
        )
    configuration = Configuration.of(values)
    launch = Settings({**configuration.launch, **declared})
    configuration = with_baseline(Configuration(launch, configuration.live), job.knobs)
    if broken := why_it_cannot_run(configuration, job, cluster):
        raise InvalidConfiguration(configuration.short, broken)
    name = ", ".join(Path(text).name if text in files else text for text in texts)
    return Baseline(
        configuration, f"yours: {name}" if name else default_name(configuration), tuple(notes)
    )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _knobs_of(
    config: Mapping[str, Any], job: TrainingJob, file: str
) -> tuple[dict[str, Value], list[str]]:
    values: dict[str, Value] = {}
    notes = []
    zero, tensor = _section(config, "zero_optimization"), _section(config, "tensor_parallel")
    stage = zero.get("stage", 0)
    if stage == "auto":
        notes.append(f"{file} leaves the ZeRO stage to its caller ('auto'); 0 is taken")
        stage = 0
    offload = _section(zero, "offload_optimizer")
    for knob, section in (
        ("optimizer_offload", offload),
        ("parameter_offload", _section(zero, "offload_param")),
    ):
        device = str(section.get("device", "none"))
        if device not in ("none", "cpu"):
            notes.append(
                f"{file} offloads to {device}, which is not a choice of {knob}; cpu is taken"
            )
            device = "cpu"
        if device != "none":
            values[knob] = device
    if offload.get("super_offload"):
        values["optimizer_offload"] = "async"
    micro = config.get("train_micro_batch_size_per_gpu")
    for knob, value, default in (
        ("zero_stage", stage, None),
        ("zero_hpz_partition_size", zero.get("zero_hpz_partition_size", 1), 1),
        ("tensor_parallel", tensor.get("autotp_size", tensor.get("tp_size", 1)), 1),
        ("sequence_parallel", config.get("sequence_parallel_size", 1), 1),
        ("micro_batch", micro if isinstance(micro, int) else None, None),
    ):
        if value != default:
            values[knob] = KNOBS[knob].check(value)
    whole = config.get("train_batch_size")
    if isinstance(whole, int) and whole != job.global_batch:
        notes.append(
            f"{file} has a global batch of {whole}; the job's {job.global_batch} is trained, as in "
            "every configuration"
        )
    for precision in ("fp16", "bf16"):
        enabled = _section(config, precision).get("enabled")
        if enabled is True and job.precision != precision:
            notes.append(f"{file} trains in {precision}; the job's {job.precision} is used")
    if left := [name for name in config if name not in _FACTS]:
        notes.append(f"no knob, so the job's own holds: {', '.join(left)} of {file}")
    if parts := [name for name in zero if name not in _ZERO]:
        notes.append(f"no knob, so DeepSpeed's default holds: {', '.join(parts)} of ZeRO in {file}")
    return values, notes
