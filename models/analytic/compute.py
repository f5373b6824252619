"""Cost of one block and of the head, per rank and micro-batch: arithmetic, memory, dispatch.

Figures are of the forward pass; the backward pass is twice that (once for the products of frozen
weights), recomputation one more. Arrays have one entry per launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tuner.models.analytic.constants import FP8, Launches, Setup

#: Matrix products of a block beside the MLP's: query-key-value (one fused or three small), scores,
#: values, output.
ATTENTION_PRODUCTS = 4
#: Those of them that are linear layers: query-key-value and output.
LINEAR_ATTENTION_PRODUCTS = 2
#: Operators that accompany a matrix product: bias, norm, activation, residual, reshape, cast.
OPERATORS_PER_PRODUCT = 3
#: Bytes per score that attention without a fused kernel moves in the forward pass: written by the
#: product, read and written by the masked softmax, read and written with a mask byte by dropout,
#: read by the last product (2 + 4 + 5 + 2).
SCORE_BYTES = 13.0
#: Share of the scores that fused attention computes under a causal mask: it skips the blocks above
#: the diagonal, and FlashAttention counts its FLOPs so (Dao 2023, arXiv 2307.08691, section 4.1).
#: Attention that is not fused computes all scores and masks them afterwards.
CAUSAL_SHARE = 0.5
#: Seconds of fused attention's backward pass over those of its forward pass: five products where
#: the forward pass has two, because the scores are computed again (Dao 2023, section 4.1).
ATTENTION_BACKWARD = 2.5
#: Bytes per logit that the loss moves in the forward pass: written in 16 bits and converted to fp32
#: (2 + 4), or written in fp32; then read and written by the softmax (8), and read for the loss.
LOGIT_BYTES = {2.0: 18.0, 4.0: 16.0}
#: The same for Megatron-LM's vocabulary-parallel loss (core/tensor_parallel/cross_entropy.py), a
#: third of what both passes move: in fp32 written (4), maximum (4), subtracted and exponentiated
#: (16), summed and divided (12), then a gradient of ten values; in 16 bits converted first.
PARALLEL_LOGIT_BYTES = {2.0: 27.0, 4.0: 25.0}
#: Families whose MLP is activated by ReLU (transformers).
RELU = ("opt",)


#: Bytes of a cast to FP8 by input, output and weight, as it is and where torch.compile fuses it.
#: Input, weight and gradient of the output are each an operand of two of a layer's three products,
#: one of them transposed. By torch's operators of the built-in program: read for the largest value
#: (2), divided (2 + 2, or 2 + 4 by scales of rows, which are fp32), cast (2 + 1, or 4 + 1), and
#: once copied in FP8 for the transposition (1 + 1). A block of MX is read and written at once
#: (2 + 1), the gradient in both orders (2 + 1 + 1). Fused, the kernel that makes an activation or a
#: gradient finds its largest value, so that the cast reads and writes it (2 + 1; a gradient in both
#: orders). No kernel makes a weight, which is read for its largest value in either pass (2).
CAST_BYTES = {
    "none": ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0)),
    "tensorwise": ((20.0, 20.0, 20.0), (6.0, 4.0, 10.0)),
    "rowwise": ((28.0, 28.0, 28.0), (6.0, 4.0, 10.0)),
    "mx": ((6.0, 4.0, 6.0), (6.0, 4.0, 6.0)),
}
#: Operators of the host for one product: two operands, each with its largest value, in fp32, not
#: zero, as a scale, the division and the cast; and one copy. Fused: the cast of each operand.
CAST_OPERATORS, FUSED_CAST_OPERATORS = 13.0, 2.0
#: The passes over which casts are spread: forward once, backward twice.
CAST_PASSES = 3.0


@dataclass(frozen=True)
class Pass:
    """Forward pass of one block or head, for one micro-batch and rank; arrays over launches."""

    arithmetic_s: np.ndarray  # matrix products at the highest clock, including their fixed times
    attention_s: np.ndarray  # fused attention's products at the highest clock
    operand_s: np.ndarray  # the same products' traffic through memory
    stream_s: np.ndarray  # traffic of everything else
    operators: np.ndarray


def activation_bytes_per_token(setup: Setup, t: np.ndarray, *, kept: bool = True) -> np.ndarray:
    """Return the bytes of one token's activations in one block on one rank, without scores.

    Those that are `kept` for the backward pass, or all that the forward pass makes. Counted as
    Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), for any widths: attention keeps its
    input, q, k, v and the product's input; the MLP its input and the values between its matrices;
    the norms their inputs; dropout a byte per value. For a GPT that is 34 h in 16 bits, of which 10
    h are not split by tensor parallelism (their equation 2).
    """
    facts, element = setup.facts, setup.element
    h, k = facts.hidden, max(facts.experts_per_token, 1)
    q, kv = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    dropout = 0.0 if facts.gated or setup.program.dropout == "none" else 2.0 * h
    whole = element * 4 * h + dropout
    gated = 3 if kept and setup.program.fused_blocks else 4
    values = gated if facts.gated else 1 if kept and facts.model_type in RELU else 2
    between = facts.visited_width * values
    copies = element * k * h if facts.experts else 0.0
    every = (whole + copies) / sharded_over(setup, t) + element * (2 * q + 2 * kv + between) / t
    return np.asarray(every - _not_kept(setup) if kept and facts.lora else every)


def sharded_over(setup: Setup, t: np.ndarray) -> np.ndarray | float:
    """Return the ranks that divide the work between the products of tensor parallelism.

    All of them with Megatron's sequence parallelism: 34 h / t of a GPT's block (Korthikanti et al.
    2022, arXiv 2205.05198, equation 4).
    """
    return t if setup.program.sequence_sharded else 1.0


def _not_kept(setup: Setup) -> float:
    # A frozen product needs its weights alone for the gradient of its input. An adapter keeps the
    # input of the layer that it adapts, and what is between its two products.
    facts, lora = setup.facts, setup.facts.lora
    assert lora is not None
    values = -float(lora.rank * lora.adapters)
    if not lora.mlp:
        values += facts.hidden * (max(facts.experts_per_token, 1) if facts.experts else 1)
        if facts.model_type not in RELU:  # ReLU keeps its output, the last product's input
            values += facts.visited_width
    return setup.element * values


def stored_score_bytes(setup: Setup) -> float:
    """Return the bytes per score that attention without a fused kernel keeps for its backward pass.

    The softmax's output, and dropout's output and mask: 5 in 16 bits (Korthikanti et al. 2022,
    arXiv 2205.05198: 5 a s^2 b per layer).
    """
    return 2 * setup.element + 1.0 if setup.program.dropout == "all" else setup.element


def encoder_block_bytes(setup: Setup, patches: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Return the bytes that one block of the encoder keeps of its patches on one rank."""
    vision, element = setup.facts.vision, setup.element
    assert vision is not None
    kept = element * (4 * vision.hidden + (4 * vision.hidden + 2 * vision.intermediate) / t)
    if not setup.program.fused_attention:
        kept = kept + stored_score_bytes(setup) * vision.patches * vision.heads / t
    return np.asarray(patches * kept)


@dataclass(frozen=True)
class Passes:
    """Forward passes of one rank over one micro-batch."""

    setup: Setup
    launches: Launches

    @property
    def _tokens(self) -> np.ndarray:
        return self.launches.b * self.setup.job.sequence_length / self.launches.u

    @property
    def _nothing(self) -> np.ndarray:
        return np.zeros(len(self.launches))

    def _block_weights(self) -> np.ndarray:
        facts, launches = self.setup.facts, self.launches
        plain = facts.block_parameters - facts.expert_parameters
        return np.asarray(
            (plain + facts.expert_parameters / launches.e) / facts.layers / launches.t
        )

    def block(self) -> Pass:
        """Return the pass of one block.

        In FP8, if at all, are its linear layers. Their rate is the share of the stated FP8 peak
        that a product in bf16 reaches of its own peak, since no other share is known. Against
        torchtitan's published runs of Llama 3.1 8B (docs/knobs.md) the gain of compiled blocks is
        predicted too small.
        """
        setup, launches, tokens = self.setup, self.launches, self._tokens
        facts, element, device = setup.facts, setup.element, setup.cluster.device
        t, e, s = launches.t, launches.e, setup.job.sequence_length
        width = facts.heads * facts.head_dim
        matrix = (facts.matmul_parameters - facts.head_parameters) / facts.layers / t
        # Scores and values: 4 s (heads x head_dim) a token (ModelFacts.attention_flops).
        scores = CAUSAL_SHARE * tokens * 4 * s * width * facts.attending / t
        flops = tokens * 2 * matrix
        local_experts = facts.experts / e if facts.experts else np.ones_like(e)
        local_experts = local_experts + (facts.shared > 0)
        products = ATTENTION_PRODUCTS + (3 if facts.gated else 2) * local_experts
        # Weights once a pass (every local expert's), inputs and outputs of each product, which stay
        # in bf16 where the products are in FP8.
        in_fp8 = launches.fp8 > 0
        weights = self._block_weights() * np.where(in_fp8, 1 / element, 1.0)
        values = 2 * tokens * (facts.hidden + (2 * width + facts.visited_width) / t)
        values = values * np.where(in_fp8, (1 + element) / (2 * element), 1.0)
        operands = element * (weights + values)
        streamed = 2 * tokens * activation_bytes_per_token(setup, t, kept=False)
        # FLOPs at the rate of the job's precision, at which `_pass` counts them.
        peaks = [device.flops_in_fp8(kind) or setup.peak_flops for kind in FP8[1:]]
        rate = (
            setup.constants.matrix_efficiency * np.array([setup.peak_flops, *peaks])[launches.fp8]
        )
        flops = flops * (setup.flops_per_s / rate)
        if not setup.program.fused_attention:
            # Every score is computed, by products that store it.
            flops, scores = flops + scores / CAUSAL_SHARE, np.zeros_like(scores)
            streamed = streamed + SCORE_BYTES * element / 2 * tokens * s * facts.heads / t
        made = self._pass(flops, scores, products, operands, streamed)
        linear = products - ATTENTION_PRODUCTS + LINEAR_ATTENTION_PRODUCTS
        casts = np.where(launches.compiled, FUSED_CAST_OPERATORS, CAST_OPERATORS)
        return replace(made, operators=made.operators + linear * np.where(in_fp8, casts, 0.0))

    def adapters(self) -> Pass | None:
        """Return the pass of one block's LoRA adapters; None if it has none."""
        lora, element, tokens = self.setup.facts.lora, self.setup.element, self._tokens
        if lora is None:
            return None
        widths = lora.inputs + 2 * lora.adapters * lora.rank + lora.outputs
        return self._pass(
            tokens * 2 * lora.block_parameters,
            self._nothing,
            2.0 * lora.adapters + self._nothing,
            element * (lora.block_parameters + tokens * widths),
            3 * element * tokens * lora.outputs,
        )

    def encoder(self) -> Pass:
        """Return the pass that encodes and projects video frames; zero for a model without one."""
        setup, t, nothing = self.setup, self.launches.t, self._nothing
        element, vision = setup.element, setup.facts.vision
        if vision is None:
            return Pass(*[nothing] * 5)
        frames = self.launches.b * setup.job.frames / self.launches.u
        patches = frames * vision.patches
        products = vision.layers * (ATTENTION_PRODUCTS + 2) + 3.0  # and patches, and the projector
        flops = vision.forward_flops(1) * frames / t
        # Weights once, inputs and outputs of each block's products.
        operands = element * vision.matmul_parameters / t + (
            2 * patches * element * vision.layers
        ) * (vision.hidden + (2 * vision.hidden + vision.intermediate) / t)
        kept = encoder_block_bytes(setup, patches, t)
        return self._pass(flops, nothing, products + nothing, operands, 2 * vision.layers * kept)

    def head(self) -> Pass:
        """Return the pass of the output projection and the loss."""
        setup, t, tokens, nothing = self.setup, self.launches.t, self._tokens, self._nothing
        facts, element = setup.facts, setup.element
        if not setup.program.logits:
            return Pass(*[nothing] * 5)
        parallel = setup.program.vocabulary_parallel_loss
        logit_bytes = (PARALLEL_LOGIT_BYTES if parallel else LOGIT_BYTES)[element]
        made = self._pass(
            tokens * 2 * facts.head_parameters / t,
            nothing,
            1.0 + nothing,
            element * (facts.head_parameters / t + tokens * facts.hidden),
            logit_bytes * tokens * facts.vocab / t,
        )
        return replace(made, operators=2.0 * OPERATORS_PER_PRODUCT + nothing)

    def _pass(
        self,
        flops: np.ndarray,
        scores: np.ndarray,
        products: np.ndarray,
        operands: np.ndarray,
        streamed: np.ndarray,
    ) -> Pass:
        setup = self.setup
        attention_rate = setup.constants.attention_efficiency * setup.peak_flops
        return Pass(
            arithmetic_s=flops / setup.flops_per_s + products * setup.constants.product_s,
            attention_s=scores / attention_rate,
            operand_s=operands / setup.bandwidth_Bps,
            stream_s=streamed / setup.bandwidth_Bps,
            operators=products * OPERATORS_PER_PRODUCT,
        )

    def cast_s(self) -> np.ndarray:
        """Return the seconds of casting to FP8 in one block, as a mean of its three passes."""
        setup, launches, tokens = self.setup, self.launches, self._tokens
        facts, t = setup.facts, launches.t
        h, width, kv = facts.hidden, facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
        visits, before = max(facts.experts_per_token, 1), 2 if facts.gated else 1
        # Query, key and value have one input, and so have gate and up: fused code casts it once.
        once = h + width / t + visits * (h + facts.intermediate / t)
        each = once + 2 * h + visits * (before - 1) * h
        inputs = tokens * np.where(launches.compiled, once, each)
        ends = h + (width + 2 * kv) / t + visits * (h + before * facts.intermediate / t)
        every = np.array([CAST_BYTES[kind] for kind in FP8])
        table = every[launches.fp8, launches.compiled.astype(int)]
        moved = inputs * table[:, 0] + tokens * ends * table[:, 1]
        moved = moved + self._block_weights() * table[:, 2]
        return np.asarray(moved / CAST_PASSES / setup.bandwidth_Bps)
