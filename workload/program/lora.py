"""LoRA (Hu et al. 2021, arXiv 2106.09685): low-rank adapters on linear layers, all else frozen.

An adapted layer y = W x becomes y = W x + B A x, with A drawn as the family draws linear layers and
B zero, so that training starts from the plain model. The layers stay where they are and keep their
names: they get the same weights as without adapters.
"""

from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

#: Names of a block's attention in the families of transformers.
ATTENTION = ("self_attn", "attn", "attention")


class Zero(torch.nn.Module):
    """Product with a matrix that is zero at first (`Filler` calls `start`)."""

    def __init__(self, inputs: int, outputs: int, **made: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, **made))

    def start(self) -> None:
        """Set the matrix to zero."""
        torch.nn.init.zeros_(self.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return B x."""
        return torch.nn.functional.linear(hidden, self.weight)


class Adapter(torch.nn.Module):
    """Low-rank product B A x."""

    def __init__(self, inputs: int, outputs: int, rank: int, **made: Any) -> None:
        super().__init__()
        self.down = torch.nn.Linear(inputs, rank, bias=False, **made)
        self.up = Zero(rank, outputs, **made)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return B A x."""
        return self.up(self.down(hidden))


class AdaptedLinear(torch.nn.Linear):
    """Linear layer with an adapter."""

    adapter: Adapter

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return W x + B A x."""
        return super().forward(hidden) + self.adapter(hidden)


class AdaptedConv1D(Conv1D):
    """Linear layer of GPT-2, whose matrix is transposed, with an adapter."""

    adapter: Adapter

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return W x + B A x."""
        return super().forward(hidden) + self.adapter(hidden)


def adapt(model: Any, blocks: Any, table: dict[str, Any]) -> None:
    """Freeze a model and add the adapters of the job's `[lora]` table, without values yet."""
    model.requires_grad_(False)
    for block in blocks:
        linear = (torch.nn.Linear, Conv1D)
        layers = [(n, part) for n, part in block.named_modules() if isinstance(part, linear)]
        for name, layer in layers:
            if table["targets"] == "all-linear" or name.split(".")[0] in ATTENTION:
                _adapt_layer(layer, table["rank"])


def _adapt_layer(layer: Any, rank: int) -> None:
    convolution = isinstance(layer, Conv1D)
    inputs = layer.nx if convolution else layer.in_features
    outputs = layer.nf if convolution else layer.out_features
    made = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    layer.adapter = Adapter(inputs, outputs, rank, **made)
    # Its class, not its `forward`: torch.compile then has one code for blocks alike.
    layer.__class__ = AdaptedConv1D if convolution else AdaptedLinear


def trained(model: Any) -> list[torch.nn.Parameter]:
    """Return the parameters that have a gradient, which are all that an optimizer needs."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def cast_frozen(module: Any, dtype: torch.dtype | None) -> None:
    """Store frozen weights in the precision of computation, if that is not their own (None)."""
    for parameter in module.parameters() if dtype else ():
        if not parameter.requires_grad and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
