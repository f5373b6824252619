"""Cost of one block and of the head, per rank and micro-batch: arithmetic, memory, dispatch.

A block is its matrix products (a roofline: the slower of arithmetic and memory), the traffic
through memory between them (norms, activations, and the scores of attention that is not fused), and
the operators that the host dispatches. Figures are of the forward pass; the backward pass is twice
that, recomputation one more. Arrays have one entry per launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.models.analytic.layout import Launches
from tuner.models.analytic.setup import Setup
from tuner.search_spaces.model_facts import ModelFacts

__all__ = ["Pass", "Passes", "activation_bytes_per_token", "encoder_block_bytes"]

#: Matrix products of a block beside the MLP's: query-key-value (one fused or three small), scores,
#: values, output.
ATTENTION_PRODUCTS = 4
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
#: Bytes per logit that the loss moves in the forward pass: written in 16 bits, converted to fp32
#: (2 + 4), read and written by the softmax (8), read for the loss.
LOGIT_BYTES = 18.0


@dataclass(frozen=True)
class Pass:
    """Forward pass of one block or head, for one micro-batch and rank; arrays over launches.

    Attributes:
        arithmetic_s: matrix products at the highest clock, including their fixed times.
        operand_s: the same products' traffic through memory.
        stream_s: traffic of everything else.
        operators: number of operators that the host dispatches.
    """

    arithmetic_s: np.ndarray
    operand_s: np.ndarray
    stream_s: np.ndarray
    operators: np.ndarray


def activation_bytes_per_token(facts: ModelFacts, t: np.ndarray, element: float) -> np.ndarray:
    """Return the bytes of one token's activations in one block on one rank, without scores.

    Counted as Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), for any widths: attention
    keeps its input, q, k, v and the product's input; the MLP its input and the values between its
    matrices; the norms their inputs; dropout a byte per value. For a GPT that is 34 h in 16 bits,
    of which 10 h are not split by tensor parallelism (their equation 2).
    """
    h, k = facts.hidden, max(facts.experts_per_token, 1)
    q, kv = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    dropout = 0.0 if facts.gated else 2.0 * h
    whole = element * 4 * h + dropout
    between = facts.intermediate * k * (4 if facts.gated else 2)
    copies = element * k * h if facts.experts else 0.0
    return np.asarray(whole + copies + element * (2 * q + 2 * kv + between) / t)


def encoder_block_bytes(
    facts: ModelFacts, patches: np.ndarray, t: np.ndarray, element: float, *, fused_attention: bool
) -> np.ndarray:
    """Return the bytes that one block of the encoder keeps of its patches on one rank.

    They are those of `activation_bytes_per_token` for a block with an ungated MLP and no dropout,
    and the scores of each frame if attention stores them (5 bytes in 16 bits:
    tuner.models.analytic.memory).
    """
    vision = facts.vision
    assert vision is not None
    kept = element * (4 * vision.hidden + (4 * vision.hidden + 2 * vision.intermediate) / t)
    if not fused_attention:
        kept = kept + 5.0 * element / 2 * vision.patches * vision.heads / t
    return np.asarray(patches * kept)


@dataclass(frozen=True)
class Passes:
    """Forward passes of one rank over one micro-batch.

    Attributes:
        setup: job and cluster.
        launches: the launches, one entry of each array per launch.
    """

    setup: Setup
    launches: Launches

    def block(self) -> Pass:
        """Return the pass of one block."""
        facts, launches, element = self.setup.facts, self.launches, self.setup.element
        t, u, e, s = launches.t, launches.u, launches.e, self.setup.job.sequence_length
        tokens = launches.b * s / u
        width = facts.heads * facts.head_dim
        matrix = (facts.matmul_parameters - facts.head_parameters) / facts.layers / t
        # Scores and values: 4 s (heads x head_dim) a token (ModelFacts.attention_flops).
        executed = CAUSAL_SHARE if self.setup.fused_attention else 1.0
        flops = tokens * (2 * matrix + executed * 4 * s * width / t)
        mlp = 3 if facts.gated else 2
        local_experts = facts.experts / e if facts.experts else np.ones_like(e)
        products = ATTENTION_PRODUCTS + mlp * local_experts
        # Weights once a pass (every local expert's), inputs and outputs of each product.
        plain = facts.block_parameters - facts.expert_parameters
        weights = element * (plain + facts.expert_parameters / e) / facts.layers / t
        operands = weights + 2 * tokens * element * (
            facts.hidden + (2 * width + facts.intermediate * max(facts.experts_per_token, 1)) / t
        )
        streamed = 2 * tokens * activation_bytes_per_token(facts, t, element)
        if not self.setup.fused_attention:
            streamed = streamed + SCORE_BYTES * element / 2 * tokens * s * facts.heads / t
        return self._pass(flops, products, operands, streamed)

    def encoder(self) -> Pass:
        """Return the pass that encodes and projects video frames; zero for a model without one.

        Each rank of a sequence encodes its share of the frames, as the training program does.
        """
        setup, launches = self.setup, self.launches
        element, vision = setup.element, setup.facts.vision
        nothing = np.zeros(len(launches))
        if vision is None:
            return Pass(nothing, nothing, nothing, nothing)
        t = launches.t
        frames = launches.b * setup.job.frames / launches.u
        patches = frames * vision.patches
        products = vision.layers * (ATTENTION_PRODUCTS + 2) + 3.0  # and patches, and the projector
        flops = vision.forward_flops(1) * frames / t
        # Weights once, inputs and outputs of each block's products.
        operands = element * vision.matmul_parameters / t + (
            2 * patches * element * vision.layers
        ) * (vision.hidden + (2 * vision.hidden + vision.intermediate) / t)
        kept = encoder_block_bytes(
            setup.facts, patches, t, element, fused_attention=setup.fused_attention
        )
        return self._pass(flops, products + nothing, operands, 2 * vision.layers * kept)

    def head(self) -> Pass:
        """Return the pass of the output projection and the loss."""
        setup, launches = self.setup, self.launches
        facts, element = setup.facts, setup.element
        t = launches.t
        tokens = launches.b * setup.job.sequence_length / launches.u
        arithmetic = tokens * 2 * facts.head_parameters / t / setup.flops_per_s
        operands = element * (facts.head_parameters / t + tokens * facts.hidden)
        streamed = LOGIT_BYTES * element / 2 * tokens * facts.vocab / t
        return Pass(
            arithmetic_s=arithmetic + setup.constants.product_s,
            operand_s=operands / setup.bandwidth_Bps,
            stream_s=streamed / setup.bandwidth_Bps,
            operators=2.0 * OPERATORS_PER_PRODUCT * np.ones(len(launches)),
        )

    def _pass(
        self, flops: np.ndarray, products: np.ndarray, operands: np.ndarray, streamed: np.ndarray
    ) -> Pass:
        """Return a pass from its FLOPs, number of products, and bytes of operands and others."""
        setup = self.setup
        return Pass(
            arithmetic_s=flops / setup.flops_per_s + products * setup.constants.product_s,
            operand_s=operands / setup.bandwidth_Bps,
            stream_s=streamed / setup.bandwidth_Bps,
            operators=products * OPERATORS_PER_PRODUCT,
        )
