"""Context parallelism: each rank holds a part of every sequence and gathers all keys and values.

As in the training of Llama 3 (arXiv 2407.21783, section 3.3.2): a sequence is cut into 2 u chunks
for u ranks, and rank r takes chunks r and 2 u - 1 - r, so that causal attention is the same work on
every rank. Queries stay where they are; each chunk attends to the keys up to its own end. Unlike
with Ulysses, the number of heads limits nothing.
"""

from types import ModuleType
from typing import Any

import torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from torch import distributed as dist
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, degree = group, dist.get_world_size(group)
        mine = part.movedim(2, 0).contiguous()
        every = mine.new_empty((degree, *mine.shape))
        dist.all_gather_into_tensor(every.flatten(0, 1), mine, group=group)
        heads, tails = every.unflatten(1, (2, -1)).unbind(1)
        return torch.cat((heads, tails.flip(0))).flatten(0, 1).movedim(0, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor, None]:
        degree = dist.get_world_size(ctx.group)
        chunks = given[0].movedim(2, 0).unflatten(0, (2 * degree, -1))
        paired = torch.stack((chunks[:degree], chunks[degree:].flip(0)), 1).flatten(1, 2)
        mine = torch.empty_like(paired[0])
        dist.reduce_scatter_tensor(mine, paired.flatten(0, 1).contiguous(), group=ctx.group)
        return mine.movedim(0, 2), None


def _causal(length: int, seen: int) -> CausalBias:
    with _disable_current_modes():
        return causal_lower_right(length, seen)


def split_sequences(model: Any, degree: int) -> ModuleType:
    """Make the model attend across `degree` ranks; return the mpu, Ulysses', for DeepSpeed."""
    parallel_state_sp.initialize_sequence_parallel(degree)
    group = parallel_state_sp.get_sequence_parallel_group()
    rank = parallel_state_sp.get_sequence_parallel_rank()

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
        keys, values = _Gather.apply(key, group), _Gather.apply(value, group)
        length = query.shape[2] // 2
        out = []
        for number, chunk in zip((rank, 2 * degree - 1 - rank), query.chunk(2, 2), strict=True):
            seen = (number + 1) * length
            out.append(
                torch.nn.functional.scaled_dot_product_attention(
                    chunk,
                    keys[:, :, :seen],
                    values[:, :, :seen],
                    attn_mask=_causal(length, seen),
                    dropout_p=dropout,
                    scale=scaling,
                    enable_gqa=query.shape[1] != keys.shape[1],
                )
            )
        return torch.cat(out, 2).transpose(1, 2).contiguous(), None

    AttentionInterface.register("all_gather", attention)
    # For a name that it has no mask function for transformers makes no mask; a part's were wrong.
    model.config.get_text_config()._attn_implementation = "all_gather"
    return parallel_state_sp
