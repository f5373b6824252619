"""Matrix products in FP8: their rate, their operands, and what casting costs.

Only the linear layers of the blocks are in FP8. The rate is the share of the stated FP8 peak that a
product in bf16 reaches of its own peak, since no other share is known. Against torchtitan's
published runs of Llama 3.1 8B (docs/knobs.md) the gain of compiled blocks is predicted too small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tuner.models.analytic.layout import FP8, Launches
from tuner.models.analytic.setup import Setup


class _Bytes(NamedTuple):
    inputs: float
    outputs: float
    weights: float


#: Input, weight and gradient of the output are each an operand of two of a layer's three products,
#: one of them transposed. By torch's operators of the built-in program: read for the largest value
#: (2), divided (2 + 2, or 2 + 4 by scales of rows, which are fp32), cast (2 + 1, or 4 + 1), and
#: once copied in FP8 for the transposition (1 + 1). A block of MX is read and written at once
#: (2 + 1), the gradient in both orders (2 + 1 + 1).
CAST_BYTES = {
    "none": _Bytes(0.0, 0.0, 0.0),
    "tensorwise": _Bytes(20.0, 20.0, 20.0),
    "rowwise": _Bytes(28.0, 28.0, 28.0),
    "mx": _Bytes(6.0, 4.0, 6.0),
}
#: The same where torch.compile fuses them: the kernel that makes an activation or a gradient finds
#: its largest value, so that the cast reads and writes it (2 + 1; a gradient in both orders). No
#: kernel makes a weight, which is read for its largest value in either pass (2).
FUSED_CAST_BYTES = {
    **CAST_BYTES,
    "tensorwise": _Bytes(6.0, 4.0, 10.0),
    "rowwise": _Bytes(6.0, 4.0, 10.0),
}
#: Operators of the host for one product: two operands, each with its largest value, in fp32, not
#: zero, as a scale, the division and the cast; and one copy. Fused: the cast of each operand.
CAST_OPERATORS, FUSED_CAST_OPERATORS = 13.0, 2.0
#: The passes over which casts are spread: forward once, backward twice.
PASSES = 3.0


@dataclass(frozen=True)
class Fp8:
    """What FP8 changes in the products of one pass of a block; arrays over launches."""

    flops_per_s: np.ndarray
    # weight_share, value_share: bytes of weights, and of inputs and outputs, that the products
    # move, as a share of those without FP8. Outputs are in bf16.
    weight_share: np.ndarray
    value_share: np.ndarray
    cast_operators: np.ndarray


def fp8_of(setup: Setup, launches: Launches) -> Fp8:
    """Return what FP8 changes in each launch; nothing where a launch has none."""
    device, share = setup.cluster.device, setup.constants.matrix_efficiency
    peaks = [setup.peak_flops]
    peaks += [device.flops_in_fp8(kind) or setup.peak_flops for kind in FP8[1:]]
    used = launches.fp8 > 0
    operators = np.where(launches.compiled, FUSED_CAST_OPERATORS, CAST_OPERATORS)
    return Fp8(
        flops_per_s=share * np.array(peaks)[launches.fp8],
        weight_share=np.where(used, 1 / setup.element, 1.0),
        value_share=np.where(used, (1 + setup.element) / (2 * setup.element), 1.0),
        cast_operators=np.where(used, operators, 0.0),
    )


def cast_s(setup: Setup, launches: Launches) -> np.ndarray:
    """Return the seconds of casting in one block and micro-batch, as a mean of its three passes."""
    facts, t = setup.facts, launches.t
    tokens = launches.b * setup.job.sequence_length / launches.u
    h, width, kv = facts.hidden, facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    visits, before = max(facts.experts_per_token, 1), 2 if facts.gated else 1
    plain = facts.block_parameters - facts.expert_parameters
    weights = (plain + facts.expert_parameters / launches.e) / facts.layers / t
    # Query, key and value have one input, and so have gate and up: fused code casts it once.
    once = h + width / t + visits * (h + facts.intermediate / t)
    each = once + 2 * h + visits * (before - 1) * h
    inputs = tokens * np.where(launches.compiled, once, each)
    ends = h + (width + 2 * kv) / t + visits * (h + before * facts.intermediate / t)
    kinds = zip((CAST_BYTES[k] for k in FP8), (FUSED_CAST_BYTES[k] for k in FP8), strict=True)
    table = np.array(list(kinds))[launches.fp8, launches.compiled.astype(int)]
    moved = inputs * table[:, 0] + tokens * ends * table[:, 1] + weights * table[:, 2]
    return np.asarray(moved / PASSES / setup.bandwidth_Bps)
