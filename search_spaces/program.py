"""Facts about a job's training program that no knob states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from tuner.search_spaces.data_files import check_keys
from tuner.search_spaces.errors import InputError, InvalidValue, check_integer
from tuner.search_spaces.plain_decoder import has_experts
from tuner.search_spaces.typed_json import check_fields

#: Legal values of `dropout`.
DROPOUTS = ("none", "hidden", "all")
#: Legal values of `partition`.
PARTITIONS = ("blocks", "ends", "parameters", "flops")
#: Legal values of `optimizer`.
OPTIMIZERS = ("adamw", "adamw_32bit", "adamw_8bit")
#: Bytes per parameter of two 8-bit moments, each with an fp32 scale per block of 256, in
#: bitsandbytes 0.50.2 and torchao 0.18 (Dettmers et al. 2021, arXiv 2110.02861, with blocks of
#: 2,048). Tensors below 4,096 values, which both leave in 16 or 32 bits, are not told apart.
MOMENTS_8BIT = 2 * (1 + 4 / 256)


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


@dataclass(frozen=True, kw_only=True)
class Program:
    """Behaviour of a training program that no knob states.

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
        optimizer: "adamw", whose moments are as wide as what it updates; "adamw_32bit", whose
            moments are always fp32 (bitsandbytes' AdamW32bit); or "adamw_8bit" (bitsandbytes' or
            torchao's AdamW8bit).
        pure_bf16: True if weights and gradients are bf16 without fp32 weights, and with "adamw" the
            moments too (DeepSpeed's bf16_master_weights_and_grads with bf16_optimizer_states).
        partition: what pipeline stages have equal shares of: "blocks" alone (Megatron-LM,
            DeepSpeed's type:REGEX, the built-in program), blocks with the embedding and the head
            as one each ("ends", torchtitan), "parameters" (DeepSpeed's default), or "flops".
        frozen_16bit: True if what of a quantized model is not quantized stays in 16 bits (qlora.py
            with --bf16). False for PEFT's prepare_model_for_kbit_training, which makes embeddings,
            norms and head fp32, and with them the values between the layers.
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
    optimizer: Literal["adamw", "adamw_32bit", "adamw_8bit"] = "adamw"
    pure_bf16: bool = False
    partition: Literal["blocks", "ends", "parameters", "flops"] = "blocks"
    frozen_16bit: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "program")
        if self.dropout not in DROPOUTS:
            legal = f"one of {', '.join(DROPOUTS)}"
            raise InvalidValue("dropout of a program", self.dropout, legal)
        if self.optimizer not in OPTIMIZERS:
            legal = f"one of {', '.join(OPTIMIZERS)}"
            raise InvalidValue("optimizer of a program", self.optimizer, legal)
        if self.partition not in PARTITIONS:
            legal = f"one of {', '.join(PARTITIONS)}"
            raise InvalidValue("partition of a program", self.partition, legal)
        if self.copies < 0:
            raise InvalidValue("copies of a program", self.copies, "an integer of at least 0")
        if self.pure_bf16 and self.fp32_gradients:
            raise InputError("pure_bf16 and fp32_gradients of a program exclude each other")

    def state_bytes(self, precision: str) -> StateBytes:
        """Return the bytes per trained parameter in a precision, before anything is sharded.

        In mixed precision 2 + 2 for weights and gradients, 4 for fp32 weights and 8 for the
        moments; in fp32 4 + 4 + 8 (Rajbhandari et al. 2020, arXiv 1910.02054, section 3).
        """
        width = 4.0 if precision == "fp32" else 2.0
        copy = 0.0 if precision == "fp32" or self.pure_bf16 else 4.0
        moments = 4.0 if self.pure_bf16 and self.optimizer == "adamw" else 8.0
        moments = MOMENTS_8BIT if self.optimizer == "adamw_8bit" else moments
        return StateBytes(width, width, copy, moments)

    @classmethod
    def from_table(cls, data: Any, where: str) -> Program:
        """Read the table that `to_table` makes, or a subset of its keys."""
        if not isinstance(data, Mapping):
            raise InvalidValue(f"[program] of {where}", data, "a table")
        check_keys(data, cls.__dataclass_fields__, f"[program] of {where}")
        return cls(**data)

    def to_table(self) -> dict[str, Any]:
        """Return the differences from the built-in training program."""
        values = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}


TARGETS = ("attention", "all-linear")
#: Bytes per frozen weight of a block's linear layers (QLoRA: Dettmers et al. 2023, arXiv
#: 2305.14314, section 3; bitsandbytes 0.50.2): 4 bits and an fp32 scale per 64 weights, which
#: double quantization stores in 8 bits, with an fp32 scale per 256. None: as computed with.
QUANTIZED = {"none": None, "nf4": 0.5 + 4 / 64, "nf4-double": 0.5 + 1 / 64 + 4 / (64 * 256)}


@dataclass(frozen=True)
class LoRA:
    """Table `[lora]` of a job: low-rank adapters (Hu et al. 2021, arXiv 2106.09685).

    A linear layer y = W x of `n` inputs and `m` outputs becomes y = W x + B A x, where A is (rank,
    n) and B is (m, rank). Only A and B are trained: rank x (n + m) parameters. What is adapted
    decides what the model learns, so no search changes it.

    Attributes:
        rank: rank of every adapter. The product B A is added as it is: alpha equals the rank.
        targets: "attention" adapts the linear layers of attention, "all-linear" those of the MLP
            too. Embedding and output projection stay frozen.
        quantization: how frozen weights of the blocks' linear layers are stored: "none", "nf4" or
            "nf4-double" (QLoRA). Embedding, norms and output projection are never quantized.
    """

    rank: int
    targets: str = "attention"
    quantization: str = "none"

    def __post_init__(self) -> None:
        check_integer("rank of [lora]", self.rank)
        if self.targets not in TARGETS:
            raise InvalidValue("targets of [lora]", self.targets, "one of " + ", ".join(TARGETS))
        if self.quantization not in list(QUANTIZED):
            legal = "one of " + ", ".join(QUANTIZED)
            raise InvalidValue("quantization of [lora]", self.quantization, legal)

    def to_table(self) -> dict[str, Any]:
        """Return the table, which the built-in training program reads too."""
        table = asdict(self)
        return {k: v for k, v in table.items() if (k, v) != ("quantization", "none")}

    @classmethod
    def from_table(cls, table: Any, where: str) -> LoRA:
        """Read the table `[lora]` of a job."""
        if not isinstance(table, Mapping):
            raise InvalidValue(f"lora in {where}", table, "a table with a rank")
        check_keys(table, cls.__dataclass_fields__, f"[lora] of {where}")
        if "rank" not in table:
            raise InputError(f"[lora] of {where} lacks its rank, such as rank = 16")
        return cls(**table)

    def check(self, model: Mapping[str, Any], where: str) -> None:
        """Check that a model can be adapted."""
        if "vision_config" in model:
            raise InputError(f"[lora] of {where} adapts models of text, not of video and text")
        plain = self.targets != "all-linear" and self.quantization == "none"
        experts = not plain and has_experts(model)
        if self.targets == "all-linear" and experts:
            raise InputError(
                f'[lora] of {where} adapts no experts: give targets = "attention" for this model'
            )
        if self.quantization != "none" and experts:
            raise InputError(
                f"quantization in [lora] of {where} is known for dense models only: leave it out"
            )
