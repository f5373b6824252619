"""Sizes of a model, and the arithmetic of its bytes and FLOPs.

What reads them of a Hugging Face configuration (`model_reading`) an installation may leave out: the
model of a script is then not known.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from tuner.search_spaces.job import Precision, Program, TrainingJob
from tuner.search_spaces.plugins import Socket

#: What reads a model's sizes: shipped, or left out.
SOCKET = Socket(
    *("joulefront.models", "reader of models", 1, ("facts_in",)),
    {"sizes": "tuner.search_spaces.model_reading"},
)
_READING = "reading the sizes of a model"
_PLAIN = Program()


@dataclass(frozen=True)
class Sizes:
    """Sizes that a configuration gives, completed by the defaults of its family.

    Attributes:
        dense, expert: width of a dense MLP and of an expert; equal without experts.
        experts, experts_per_token: experts per layer, and those that a token visits; 0 if dense.
        positions: the longest sequence the configuration states; None if it states none.
        tied: True if the output projection shares the embedding table.
        gated: True if the MLP multiplies by a gate (SwiGLU and its kin).
        learned_positions: True if positions are a table of parameters.
        qk_norm: True if queries and keys are normed.
    """

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dense: int
    expert: int
    experts: int
    experts_per_token: int
    positions: int | None
    tied: bool
    gated: bool
    learned_positions: bool
    qk_norm: bool


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
        found: ModelFacts = SOCKET.needed("sizes", _READING).facts_in(config)
        return found

    @property
    def intermediate(self) -> int:
        """Width of a dense MLP, or of one expert if there are experts."""
        return self.expert

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
    **{"model_type": "unknown", "gated": False, "tied": False, "learned_positions": False},
    **{"qk_norm": False},
    **{"layers": sys.maxsize, "positions": None, "vision": None, "lora": None},
    **{"attending": 1.0, "doubts": (), "shared": 0, "kept_16": 0.0, "kept_32": 0.0},
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
    adapters = SOCKET.needed("sizes", _READING).lora_facts(job.lora, job.model, facts)
    return replace(facts, lora=adapters, doubts=(*facts.doubts, *adapters.doubts))


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
    each = program.state_bytes(precision)
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
