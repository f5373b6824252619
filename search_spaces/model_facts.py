"""Parameters of a model, and the arithmetic of its bytes and FLOPs.

With it comes what they decide of a job's plain training: the usual launch that fits a device, and
which models and adapters the built-in training program has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TARGETS, Precision, Program, TrainingJob
from tuner.search_spaces.model_sizes import NO_SIZES, READER, Sizes
from tuner.search_spaces.plugins import extra_module

#: Bytes per parameter of two 8-bit moments, each with an fp32 scale per block of 256, in
#: bitsandbytes 0.50.2 and torchao 0.18 (Dettmers et al. 2021, arXiv 2110.02861, with blocks of
#: 2,048). Tensors below 4,096 values, which both leave in 16 or 32 bits, are not told apart.
MOMENTS_8BIT = 2 * (1 + 4 / 256)
_READING = "reading the sizes of a model"
_PLAIN = Program()


@dataclass(frozen=True)
class VisionFacts:
    """Sizes of the encoder that turns video frames into tokens, including its projector.

    It is a SigLIP encoder, which cuts a frame into patches and runs a plain transformer over them;
    a two-layer MLP that projects each patch to the language model's width; and 2x2 pooling, which
    leaves a quarter of them as tokens. A learned token ends the video. All is as in
    LLaVA-OneVision (`transformers.models.llava_onevision`), parameter by parameter.

    Attributes:
        tokens: those of one frame that the language model reads.
        parameters: parameters of encoder, projector and the token that ends a video.
        matmul_parameters: those of `parameters` that multiply each patch.
    """

    layers: int
    hidden: int
    heads: int
    intermediate: int
    patches: int
    tokens: int
    extra_tokens: int
    parameters: int
    matmul_parameters: int
    largest_layer: int

    def tokens_of(self, frames: int) -> int:
        """Return the number of tokens of a video."""
        return frames * self.tokens + self.extra_tokens

    def forward_flops(self, frames: float) -> float:
        """Return the FLOPs of encoding and projecting frames.

        They are 2 per parameter and patch, and 4 n h per patch and layer for attention over the
        patches of a frame (see `ModelFacts.forward_flops`).
        """
        attention = 4.0 * self.patches * self.hidden * self.layers
        return frames * self.patches * (2.0 * self.matmul_parameters + attention)


@dataclass(frozen=True)
class LoRAFacts:
    """Sizes of a model's adapters.

    Attributes:
        inputs, outputs: sums of the widths that a block's adapters read and write.
        first: parameters of the products of the first block's input. Nothing before it is trained,
            so the backward pass does not compute its gradient.
        frozen_bytes: bytes per frozen weight of a linear layer; None if it is not quantized.
        linear: parameters of the blocks' linear layers, which may be quantized.
        further: trainable parameters beside those of equal blocks: of adapters outside them, of the
            blocks' where they differ, and DoRA's magnitudes.
        doubts: sentences on what of the adapters is not known.
    """

    rank: int
    adapters: int
    inputs: int
    outputs: int
    layers: int
    mlp: bool
    first: int
    frozen_bytes: float | None = None
    linear: int = 0
    further: int = 0
    doubts: tuple[str, ...] = ()

    @property
    def block_parameters(self) -> int:
        """Trainable parameters of one block."""
        return self.rank * (self.inputs + self.outputs)

    @property
    def parameters(self) -> int:
        """Trainable parameters of the model: the adapters', which are all that is trained."""
        return self.layers * self.block_parameters + self.further


@dataclass(frozen=True)
class ModelFacts(Sizes):
    """Sizes of one decoder-only language model, and of its encoder of video frames, if any.

    With an encoder, all but `parameters`, `active_parameters`, `largest_layer` and `vision` are
    the language model's alone.

    Attributes:
        active_parameters: those that one token uses (all of them in a dense model).
        matmul_parameters: those of `active_parameters` that multiply each token: no embedding
            table, position table, bias or norm, but the output projection, shared or not.
        head_parameters: those of `matmul_parameters` that make the logits, and the projections of
            a table that is narrower than the model.
        block_parameters: those of all blocks together, every expert counted.
        expert_parameters: those of `block_parameters` that expert parallelism spreads.
        largest_layer: parameters of the largest block or table (what ZeRO-3 gathers at once).
        lora: adapters beside those parameters, which are then frozen; None if all are trained.
        attending: share of the blocks that have attention.
        shared: width of the experts that every token visits beside `experts_per_token`; 0 if none.
        kept_16, kept_32: bytes that a block keeps of each token for the backward pass, in 16 bits
            and in fp32, as its code does on fake tensors (`built_layers`), the mean of all blocks;
            0 if the formulas describe them, or nothing ran.
        doubts: sentences on what the figures of this model rest on that is not known; empty if its
            parameters are counted exactly and its blocks are those that the formulas describe.
    """

    parameters: int
    active_parameters: int
    matmul_parameters: int
    head_parameters: int
    block_parameters: int
    expert_parameters: int
    largest_layer: int
    vision: VisionFacts | None = None
    lora: LoRAFacts | None = None
    attending: float = 1.0
    shared: int = 0
    kept_16: float = 0.0
    kept_32: float = 0.0
    doubts: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelFacts:
        """Read a Hugging Face configuration.

        Raises:
            InputError: a size is missing or invalid, or the model has to be built by transformers
                and cannot be.
        """
        found: ModelFacts = extra_module(READER, _READING).facts_in(config)
        return found

    @property
    def visited_width(self) -> int:
        """Width of all the experts that a token visits, or of the dense MLP."""
        return self.intermediate * max(self.experts_per_token, 1) + self.shared

    @property
    def trainable_parameters(self) -> int:
        """Parameters that have a gradient: the adapters' or, without LoRA, all."""
        return self.lora.parameters if self.lora else self.parameters

    def block_elements(self, element: float) -> float:
        """Return `block_parameters` with quantized weights as elements of so many bytes."""
        if self.lora is None or self.lora.frozen_bytes is None:
            return self.block_parameters
        return self.block_parameters - self.lora.linear * (1 - self.lora.frozen_bytes / element)

    def flops(self, sequences: int, sequence_length: int, frames: int = 0) -> float:
        """Return the FLOPs of forward and backward passes, without recomputation.

        6 a parameter and token for the matrix products (2 forward, 4 backward: Kaplan et al. 2020,
        arXiv 2001.08361, section 2.1; Megatron-LM, arXiv 2104.04473, appendix) plus attention's own
        two products, 4 s (heads x head_dim) a token and layer forward, three times that in all. For
        a GPT whose MLP is 4 h wide that is Megatron's and NeMo's
        (24 B s h^2 + 4 B s^2 h) 3 L + 6 B s h V. The causal mask is not discounted, as there: these
        are the FLOPs of the formula, which TFLOP/s are stated in. A fused attention kernel executes
        half of the attention's (tuner.models.analytic.compute.CAUSAL_SHARE).
        Full recomputation adds one forward pass of the blocks: see `forward_flops`. The arithmetic
        between the products (norms, activations, softmax) is left out, as it is there.

        With LoRA frozen weights take 4 a parameter and token, because their gradients are not
        computed, and adapters 6; the gradient of the first block's input is not computed either.
        The sequence length counts the tokens of its video, too.
        """
        every = 3.0 * self.forward_flops(sequences, sequence_length, frames)
        if self.lora is None:
            return every
        left_out = self.matmul_parameters + self.lora.first
        return every - 2.0 * sequences * sequence_length * left_out

    def forward_flops(self, sequences: int, sequence_length: int, frames: int = 0) -> float:
        """Return the FLOPs of the forward pass alone, including the output projection."""
        tokens = float(sequences) * sequence_length
        encoder = self.vision.forward_flops(sequences * frames) if self.vision else 0.0
        attention = self.attention_flops(sequences, sequence_length)
        adapters = self.lora.parameters if self.lora else 0
        return encoder + tokens * 2.0 * (self.matmul_parameters + adapters) + attention

    def attention_flops(self, sequences: int, sequence_length: int) -> float:
        """Return the FLOPs of the language model's scores and values in a forward pass."""
        tokens = float(sequences) * sequence_length
        scores = 4.0 * sequence_length * self.heads * self.head_dim
        return tokens * scores * self.layers * self.attending


#: Model of unknown sizes, with no limit on its layers.
_UNKNOWN: Any = {item.name: 0 for item in fields(ModelFacts)} | {
    **NO_SIZES,
    **{
        "vision": None,
        "lora": None,
        "attending": 1.0,
        "doubts": (),
        "kept_16": 0.0,
        "kept_32": 0.0,
    },
}
UNKNOWN_MODEL = ModelFacts(**_UNKNOWN)


@lru_cache(maxsize=64)
def facts_of(job: TrainingJob) -> ModelFacts:
    """Return the facts of a job's model, cached per job.

    For a script without a given model this is `UNKNOWN_MODEL`, which no rule on sizes refuses.
    """
    if not job.model:
        return UNKNOWN_MODEL
    facts = ModelFacts.from_config(job.model)
    if job.precision == "fp32" and facts.kept_16 and not facts.kept_32:
        doubt = "its layers were run in 16 bits alone, so that activations in fp32 may be far off"
        facts = replace(facts, doubts=(*facts.doubts, doubt))
    if job.lora is None:
        return facts
    adapters = extra_module(READER, _READING).lora_facts(job.lora, job.model, facts)
    return replace(facts, lora=adapters, doubts=(*facts.doubts, *adapters.doubts))


@dataclass(frozen=True)
class StateBytes:
    """Bytes per trained parameter.

    Attributes:
        copy: of the weights that the optimizer updates, if they are not those computed with.
        moments: of Adam's two moments.
    """

    weights: float
    gradients: float
    copy: float
    moments: float


def state_bytes(program: Program, precision: str) -> StateBytes:
    """Return the bytes per trained parameter in a precision, before anything is sharded.

    In mixed precision 2 + 2 for weights and gradients, 4 for fp32 weights and 8 for the
    moments; in fp32 4 + 4 + 8 (Rajbhandari et al. 2020, arXiv 1910.02054, section 3).
    """
    width = 4.0 if precision == "fp32" else 2.0
    copy = 0.0 if precision == "fp32" or program.pure_bf16 else 4.0
    moments = 4.0 if program.pure_bf16 and program.optimizer == "adamw" else 8.0
    moments = MOMENTS_8BIT if program.optimizer == "adamw_8bit" else moments
    return StateBytes(width, width, copy, moments)


def model_state_parts(
    parameters: float,
    zero_stage: int,
    replicas: int,
    precision: Precision = "bf16",
    program: Program = _PLAIN,
) -> tuple[float, float, float]:
    """Return the bytes of parameters, gradients and optimizer states on one rank.

    ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 3 and figure 1) with K = 12: in mixed
    precision 2 + 2 bytes a parameter for weights and gradients and 12 for the fp32 copy and Adam's
    two moments; in fp32 4 + 4 + 8. Stage 1 shards the last part over the replicas, stage 2 the
    gradients too, stage 3 all. No activations, buffers or fragmentation. Under pure bf16
    DeepSpeed (0.19.8) still copies its partition of the weights in stages 1 and 2. `parameters`
    are those of the rank's share before ZeRO shards them over the `replicas` (data x sequence
    parallelism).
    """
    each = state_bytes(program, precision)
    copy = 2.0 if program.pure_bf16 and zero_stage in (1, 2) else each.copy
    shards = [1 / replicas if zero_stage >= stage else 1.0 for stage in (3, 2, 1)]
    return (
        parameters * each.weights * shards[0],
        parameters * each.gradients * shards[1],
        parameters * (copy + each.moments) * shards[2],
    )


def widens(job: TrainingJob) -> bool:
    """Return True if a quantized model computes between its layers in fp32 instead of 16 bits.

    PEFT's prepare_model_for_kbit_training makes embeddings, norms and head fp32, and a quantized
    layer returns its output as wide as its input (bitsandbytes 0.50.2, nn/modules.py).
    """
    quantized = job.lora is not None and job.lora.quantization != "none"
    return quantized and not job.program.frozen_16bit and job.precision != "fp32"


def job_state_bytes(job: TrainingJob, zero_stage: int, replicas: int) -> float:
    """Return the bytes of a job's parameters, gradients and optimizer states on one rank.

    Frozen weights are stored in the job's precision alone, or quantized, and ZeRO-3 shards them.
    """
    facts = facts_of(job)
    number, program = facts.trainable_parameters, job.program
    trained = sum(model_state_parts(number, zero_stage, replicas, job.precision, program))
    if facts.lora is None:
        return trained
    weight = 4.0 if job.precision == "fp32" else 2.0
    outside = facts.parameters - facts.block_parameters
    width = 4.0 if widens(job) else weight
    frozen = width * outside + weight * facts.block_elements(weight)
    return trained + frozen / (replicas if zero_stage == 3 else 1)


#: Share of a device's memory that model states may take before a user reaches for the next ZeRO
#: stage, and share that states and activations may take together; the rest is for buffers, the
#: framework's context and fragmentation (DeepSpeed's buckets alone are 1 to 4 GB).
_STATES_SHARE, _FULL_SHARE = 0.8, 0.9


def lightest_that_fits(
    job: TrainingJob, cluster: Cluster, data_parallel: int, sizes: Sequence[int]
) -> dict[str, Any]:
    """Return the knobs of the plainest launch on so many replicas that fits a device.

    Args:
        sizes: micro-batches to choose from, largest first.
    """
    memory = cluster.device.memory_bytes
    stages = range(4) if data_parallel > 1 else range(1)
    states = [job_state_bytes(job, stage, data_parallel) for stage in stages]
    fitting = [stage for stage in stages if states[stage] <= _STATES_SHARE * memory]
    # The CPU's Adam has no 8-bit states.
    alone = bool(fitting) or job.program.optimizer == "adamw_8bit"
    zero_stage = fitting[0] if fitting else (3 if data_parallel > 1 else 0 if alone else 1)
    room = _FULL_SHARE * memory - (states[zero_stage] if fitting else 0.0)
    both = [(size, kept) for kept in ("none", "full") for size in sizes]
    fit = (each for each in both if _activation_bytes(job, *each) <= room)
    micro_batch, checkpointing = next(fit, both[-1])
    return {
        "micro_batch": micro_batch,
        "zero_stage": zero_stage,
        "optimizer_offload": "none" if alone else "cpu",
        "activation_checkpointing": checkpointing,
    }


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


def why_too_large(job: TrainingJob, cluster: Cluster) -> str:
    """Return why one device cannot hold a job's states, as a phrase; "" if it can."""
    memory = cluster.device.memory_limit_bytes
    if memory is None or job_state_bytes(job, 0, 1) <= memory:
        return ""
    parameters = facts_of(job).parameters
    return f"{parameters / 1e9:.2g} billion parameters on {memory / 1e9:.0f} GB devices"


def untrainable(configuration: Configuration, job: TrainingJob) -> list[str]:
    """Return a phrase for each thing of a job's model that the built-in program has not."""
    states = ", ".join(other_states(job))
    phrase = f"the built-in training program has no {states}; leave it out, or plan it"
    return [
        *([phrase] if states else []),
        *_unfit_adapters(job),
        *_unfit_frames(configuration, job),
    ]


def _unfit_adapters(job: TrainingJob) -> list[str]:
    # What the built-in training program adapts is fewer than what is counted.
    if job.lora is None or not job.model:
        return []
    program = "the built-in training program adapts"
    if job.lora.targets not in TARGETS:
        return [f"{program} {' or '.join(TARGETS)}, not {job.lora.targets}; plan it"]
    if "vision_config" in job.model:
        return [f"{program} models of text, not of video and text; plan it"]
    if job.lora.targets == "all-linear" and facts_of(job).experts:
        return [f'{program} no experts: give targets = "attention" for this model, or plan it']
    return []


def other_states(job: TrainingJob) -> list[str]:
    """Return how a job stores weights and states, a phrase each, where that is not the usual."""
    phrases = []
    if job.lora is not None and job.lora.quantization != "none":
        double = " with double quantization" if job.lora.quantization == "nf4-double" else ""
        nf4 = f"4-bit NF4 frozen weights{double}"
        phrases.append("8-bit frozen weights" if job.lora.quantization == "int8" else nf4)
    if job.lora is not None and job.lora.dora:
        phrases.append("magnitudes of DoRA")
    if job.program.optimizer == "adamw_8bit":
        phrases.append("8-bit moments")
    if job.program.pure_bf16:
        moments = " and moments" if job.program.optimizer == "adamw" else ""
        phrases.append(f"pure bf16 weights, gradients{moments} without fp32 weights")
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
    # A recorded table may use these names for something else.
    values = [configuration.get(name) for name in ("sequence_parallel", "tensor_parallel")]
    degree, tensor = (value if isinstance(value, int) else 1 for value in values)
    if frames % degree:
        return [
            f"sequence_parallel {degree} does not divide the {frames} frames, and each rank of a "
            "sequence encodes equally many"
        ]
    if vision.heads % tensor:
        return [f"tensor_parallel {tensor} does not divide the encoder's {vision.heads} heads"]
    return []
