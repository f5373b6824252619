"""Baseline configuration: the one that a user would run today, without tuning."""

from __future__ import annotations

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InvalidConfiguration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.model_facts import facts_of, job_state_bytes
from tuner.search_spaces.rules import broken_rules, why_it_cannot_run

#: Share of a device's memory that model states may take before a user reaches for the next ZeRO
#: stage, and share that states and activations may take together; the rest is for buffers, the
#: framework's context and fragmentation (DeepSpeed's buckets alone are 1 to 4 GB).
_STATES_SHARE, _FULL_SHARE = 0.8, 0.9

#: Tokens in a micro-batch: enough to fill a GPU's matrix units, few enough for its memory.
_USUAL_TOKENS = 8192


def degrees(devices: int) -> list[int]:
    """Return the powers of two and the divisors of the device count, up to it."""
    return [n for n in range(1, devices + 1) if devices % n == 0 or n & (n - 1) == 0]


def default_configuration(job: TrainingJob, cluster: Cluster) -> Configuration:
    """Return the baseline, which a user would run today without tuning.

    Data parallelism over as many devices as the global batch allows, the lowest ZeRO stage whose
    model states fit a device (`job_state_bytes`), the largest micro-batch of at most 8,192 tokens
    whose activations fit beside them, and the clock left to the device. It offloads the optimizer
    only if no stage fits, and checkpoints activations only if no micro-batch fits.
    InvalidConfiguration if the job cannot run here at all (e.g. fp16 on a CPU).
    """
    refused: list[str] = []
    for data_parallel in reversed(degrees(cluster.devices)):
        configuration = _baseline_at(data_parallel, job, cluster)
        refused = broken_rules(configuration, job, cluster)
        if not refused:
            return configuration
    raise InvalidConfiguration(configuration.short, refused)


def changed_default(job: TrainingJob, cluster: Cluster, changed: Configuration) -> Configuration:
    """Return the default configuration with some knobs changed, on as many devices as they allow.

    What is not changed is the default's at that number of replicas. A ZeRO stage that the other
    knobs rule out, as stages 2 and 3 in a pipeline, gives way to a lower one.
    """
    degree = changed.world_size // changed.data_parallel
    numbers = reversed(degrees(max(1, cluster.devices // degree)))
    if "data_parallel" in changed.launch:
        numbers = iter([changed.data_parallel])
    found: list[tuple[Configuration, list[str]]] = []
    for data_parallel in numbers:
        default = _baseline_at(data_parallel, job, cluster).launch
        stage = default["zero_stage"]
        assert isinstance(stage, int)
        for zero_stage in range(stage, -1, -1):
            settings = {**default, "zero_stage": zero_stage, **changed.launch}
            configuration = Configuration(Settings(settings), changed.live)
            if not (broken := why_it_cannot_run(configuration, job, cluster)):
                return configuration
            found.append((configuration, broken))
    # The most devices and the lowest stage: its sentence is about the changed knobs.
    configuration, broken = found[0]
    raise InvalidConfiguration(configuration.short, broken)


def _baseline_at(data_parallel: int, job: TrainingJob, cluster: Cluster) -> Configuration:
    memory = cluster.device.memory_bytes
    stages = range(4) if data_parallel > 1 else range(1)
    states = [job_state_bytes(job, stage, data_parallel) for stage in stages]
    fitting = [stage for stage in stages if states[stage] <= _STATES_SHARE * memory]
    # The CPU's Adam has no 8-bit states.
    alone = bool(fitting) or job.program.optimizer == "adamw_8bit"
    offload = "none" if alone else "cpu"
    zero_stage = fitting[0] if fitting else (3 if data_parallel > 1 else 0 if alone else 1)
    room = _FULL_SHARE * memory - (states[zero_stage] if fitting else 0.0)

    share = job.global_batch // data_parallel
    usual = max(1, _USUAL_TOKENS // job.sequence_length)
    divisors = [n for n in range(min(share, usual), 0, -1) if share % n == 0] or [1]
    both = [(size, kept) for kept in ("none", "full") for size in divisors]
    fit = (each for each in both if _activation_bytes(job, *each) <= room)
    micro_batch, checkpointing = next(fit, both[-1])
    return Configuration.of(
        data_parallel=data_parallel,
        micro_batch=micro_batch,
        zero_stage=zero_stage,
        optimizer_offload=offload,
        activation_checkpointing=checkpointing,
    )


def _activation_bytes(job: TrainingJob, micro_batch: int, checkpointing: str) -> float:
    # With fused attention 34 s b h per layer in 16 bits (Korthikanti et al. 2022, arXiv 2205.05198,
    # equation 1 without the scores, which it never stores), or 2 s b h per layer and one live layer
    # under full checkpointing; the same for an encoder's layers and patches; about 10 bytes per
    # logit for the loss. Rough: it only picks the baseline.
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
