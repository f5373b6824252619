"""Sequence parallelism by DeepSpeed's Ulysses: each rank holds a part of every sequence.

Everything but attention works on a rank's own tokens. Around attention an all-to-all swaps the
split: in, each rank gets all tokens of some heads; out, all heads of some tokens
(`deepspeed.sequence.layer.DistributedAttention`). transformers looks attention up by name, so one
registered function serves every family.
"""

from types import ModuleType
from typing import Any

import torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from transformers import AttentionInterface


def split_sequences(model: Any, degree: int) -> ModuleType:
    """Make the model attend across `degree` ranks; return the mpu for `deepspeed.initialize`.

    The mpu makes DeepSpeed reduce gradients over these ranks too: the same degree by `mesh_param`
    or by the JSON leaves that out and trains another model (0.19.8).
    """
    parallel_state_sp.initialize_sequence_parallel(degree)
    attend = DistributedAttention(
        _whole_sequence_attention, parallel_state_sp.get_sequence_parallel_group(), 2, 1
    )

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        # From (batch, heads, part of the sequence, width), as transformers has it.
        if key.shape[1] % degree:
            # Too few key-value heads to share out: give each query head its own copy.
            copies = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
        parts = (x.transpose(1, 2).contiguous() for x in (query, key, value))
        return attend(*parts, 0, dropout=dropout, scaling=scaling), None

    AttentionInterface.register("ulysses", attention)
    # For a name that it has no mask function for transformers makes no mask; a part's were wrong.
    model.config.get_text_config()._attn_implementation = "ulysses"
    if hasattr(model.base_model, "vision_tower"):
        import multimodal

        multimodal.split_sequences(model, parallel_state_sp.get_sequence_parallel_group())
    return parallel_state_sp


def _whole_sequence_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=dropout,
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous()


def loss_share(degree: int, zero_stage: int) -> float:
    """Return the factor of a rank's mean loss that gives gradients of the whole sequence.

    DeepSpeed 0.19.8 sums gradients over the ranks of a sequence at ZeRO 0 to 2 and averages them at
    ZeRO 3. Adam hides the difference, gradient clipping does not.
    """
    return 1.0 if zero_stage == 3 else 1.0 / degree
