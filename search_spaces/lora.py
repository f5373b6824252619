"""LoRA: low-rank adapters on frozen weights (Hu et al. 2021, arXiv 2106.09685).

A linear layer y = W x of `n` inputs and `m` outputs becomes y = W x + B A x, where A is (rank, n)
and B is (m, rank). Only A and B are trained: rank x (n + m) parameters. What is adapted is a fact
of the job: it decides what the model learns, so no search changes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tuner.search_spaces.data_files import check_keys
from tuner.search_spaces.errors import InputError, InvalidValue, check_integer
from tuner.search_spaces.parameter_count import Sizes

TARGETS = ("attention", "all-linear")
#: Bytes per frozen weight of a block's linear layers (QLoRA: Dettmers et al. 2023, arXiv
#: 2305.14314, section 3; bitsandbytes 0.50.2): 4 bits and an fp32 scale per 64 weights, which
#: double quantization stores in 8 bits, with an fp32 scale per 256. None: as computed with.
QUANTIZED = {"none": None, "nf4": 0.5 + 4 / 64, "nf4-double": 0.5 + 1 / 64 + 4 / (64 * 256)}
#: Families whose query, key and value projections are one linear layer.
_FUSED = ("gpt2", "gpt_neox")


@dataclass(frozen=True)
class LoRA:
    """Table `[lora]` of a job.

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
        if self.targets == "all-linear" and _sizes_of(model).experts:
            raise InputError(
                f'[lora] of {where} adapts no experts: give targets = "attention" for this model'
            )
        if self.quantization != "none" and _sizes_of(model).experts:
            raise InputError(
                f"quantization in [lora] of {where} is known for dense models only: leave it out"
            )


@dataclass(frozen=True)
class LoRAFacts:
    """Sizes of a model's adapters.

    Attributes:
        inputs, outputs: sums of the widths that a block's adapters read and write.
        first: parameters of the products of the first block's input. Nothing before it is trained,
            so the backward pass does not compute its gradient.
        frozen_bytes: bytes per frozen weight of a linear layer; None if it is not quantized.
    """

    rank: int
    adapters: int
    inputs: int
    outputs: int
    layers: int
    mlp: bool
    first: int
    frozen_bytes: float | None = None

    @property
    def block_parameters(self) -> int:
        """Trainable parameters of one block."""
        return self.rank * (self.inputs + self.outputs)

    @property
    def parameters(self) -> int:
        """Trainable parameters of the model: the adapters', which are all that is trained."""
        return self.layers * self.block_parameters

    @classmethod
    def of(cls, lora: LoRA, model: Mapping[str, Any]) -> LoRAFacts:
        """Return the sizes of the adapters of a model, given by its Hugging Face configuration."""
        sizes = _sizes_of(model)
        hidden, q = sizes.hidden, sizes.heads * sizes.head_dim
        kv = sizes.kv_heads * sizes.head_dim
        if sizes.model_type in _FUSED:
            layers = [(hidden, q + 2 * kv), (q, hidden)]
        else:
            layers = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden)]
        attention = len(layers)
        mlp = lora.targets == "all-linear"
        if mlp:
            up = 2 if sizes.family.gated else 1
            layers += [(hidden, sizes.dense)] * up + [(sizes.dense, hidden)]
        return cls(
            rank=lora.rank,
            adapters=len(layers),
            inputs=sum(n for n, _ in layers),
            outputs=sum(m for _, m in layers),
            layers=sizes.layers,
            mlp=mlp,
            first=hidden * (q + 2 * kv) + lora.rank * hidden * (attention - 1),
            frozen_bytes=QUANTIZED[lora.quantization],
        )


def _sizes_of(model: Mapping[str, Any]) -> Sizes:
    return Sizes.from_config(model, str(model["model_type"]))
