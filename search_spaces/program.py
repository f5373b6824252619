"""What a training program does that no knob states, as predictions need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from tuner.search_spaces.data_files import check_keys
from tuner.search_spaces.errors import InvalidValue
from tuner.search_spaces.typed import check_fields

#: Legal values of `dropout`.
DROPOUTS = ("none", "hidden", "all")


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a training program does that no knob states.

    Attributes:
        fused_attention: True if attention runs in a fused kernel, which stores no scores and skips
            those that the causal mask hides.
        tf32: True if fp32 products run on tensor cores (torch.backends.cuda.matmul.allow_tf32, or
            TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which NVIDIA's PyTorch containers set).
        dropout: what drops values, whose masks are kept: "none", "hidden" (the outputs of a block's
            two halves, in a model without gate), or "all" (scores too, if attention stores them).
        copies: number of copies of a rank's parameters that the engine keeps beside them.
        logits: False if the program makes no logits (its loss reads the last block's output).
        vocabulary_parallel_loss: True for Megatron-LM's loss, whose passes over the logits are
            kernels of their own.
        sequence_sharded: True if tensor-parallel ranks divide what is between their products, too
            (Megatron's --sequence-parallel; torchtitan always does).
        fused_blocks: True if norms keep their input alone and a gated MLP its two inputs and their
            product (Transformer Engine, Megatron-Core).
        fp32_gradients: True if gradients accumulate in fp32 (Megatron's
            --accumulate-allreduce-grads-in-fp32, its default in bf16).
        fused_loss: True if the loss keeps 16-bit logits and their gradient in their place.
    """

    fused_attention: bool = True
    tf32: bool = False
    dropout: Literal["none", "hidden", "all"] = "all"
    copies: int = 0
    logits: bool = True
    vocabulary_parallel_loss: bool = False
    sequence_sharded: bool = False
    fused_blocks: bool = False
    fp32_gradients: bool = False
    fused_loss: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "program")
        if self.dropout not in DROPOUTS:
            legal = f"one of {', '.join(DROPOUTS)}"
            raise InvalidValue("dropout of a program", self.dropout, legal)
        if self.copies < 0:
            raise InvalidValue("copies of a program", self.copies, "an integer of at least 0")

    @classmethod
    def from_table(cls, data: Any, where: str) -> Program:
        """Read the table that `to_table` makes, or a part of it.

        Raises:
            InputError: it is no table, a key is unknown, or a value is not legal.
        """
        if not isinstance(data, Mapping):
            raise InvalidValue(f"[program] of {where}", data, "a table")
        check_keys(data, cls.__dataclass_fields__, f"[program] of {where}")
        return cls(**data)

    def to_table(self) -> dict[str, Any]:
        """Return what differs from the built-in training program."""
        values = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}
