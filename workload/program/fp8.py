"""Matrix products in FP8: the linear layers of the blocks, by torch's scaled products.

Each operand is divided by a scale of its own, made from its largest value just before the product
(dynamic scaling), so that it fills the range of its FP8 format, and the product is multiplied by
both scales. "tensorwise" has one scale a matrix; "rowwise" one for each row of the left operand and
each column of the right one, along the side that is summed over. Weights, optimizer, norms,
attention and the output projection are as without FP8, and so is what is kept for the backward
pass. Formats and scales are those of torchao's recipes of the same names (Micikevicius et al. 2022,
arXiv 2209.05433, for the formats).
"""

from typing import Any

import torch

#: Format of activations and weights, and of gradients under one scale a matrix: these need range
#: rather than precision. With a scale for each row E4M3 has range enough.
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def scale_of(matrix: torch.Tensor, form: torch.dtype, scaling: str) -> torch.Tensor:
    """Return the scales of a matrix (m, k), fp32: one, or (m, 1) if "rowwise"."""
    if scaling == "rowwise":
        largest = torch.linalg.vector_norm(matrix, torch.inf, dim=1, keepdim=True)
    else:
        largest = torch.linalg.vector_norm(matrix, torch.inf)
    # A matrix of zeros keeps a scale that can be divided by.
    return largest.float().clamp(min=1e-12) / torch.finfo(form).max


def cast(
    matrix: torch.Tensor, form: torch.dtype, scaling: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix (m, k) in an FP8 format, row by row in memory, and its scales."""
    scale = scale_of(matrix, form, scaling)
    # The largest value may exceed the format's by the rounding of the scale, far less than a step
    # of the format, so that the cast takes it to the largest and not out of range.
    return (matrix / scale).to(form).contiguous(), scale


def product(
    left: torch.Tensor, right: torch.Tensor, scaling: str, form: torch.dtype = E4M3
) -> torch.Tensor:
    """Return left (m, k) times right (n, k) transposed, both cast to FP8, as (m, n) in bf16.

    Args:
        left: the operand of the format `form`.
        right: the operand in E4M3. The tensor cores sum over the last side of both in memory.
        scaling: "tensorwise" or "rowwise".
        form: format of `left`.
    """
    a, scale_a = cast(left, form, scaling)
    b, scale_b = cast(right, E4M3, scaling)
    if scaling == "rowwise":
        scale_b = scale_b.t().contiguous()
    # Sums over part of a row in less than fp32 are allowed but for gradients of the wide format.
    fast = form == E4M3
    return torch._scaled_mm(
        a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


class Linear(torch.autograd.Function):
    """Linear map without bias whose three products, of both passes, are in FP8."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor, scaling: str) -> torch.Tensor:
        """Return values (tokens, k) times weight (n, k) transposed."""
        ctx.save_for_backward(values, weight)
        ctx.scaling = scaling
        # DeepSpeed's ZeRO 3 keeps activations in fp32 on a CPU.
        return product(values, weight, scaling).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return the gradients of values and weight."""
        values, weight = ctx.saved_tensors
        form = E4M3 if ctx.scaling == "rowwise" else E5M2
        of_values = product(gradient, weight.t(), ctx.scaling, form)
        of_weight = product(gradient.t(), values.t(), ctx.scaling, form)
        return of_values.to(values.dtype), of_weight.to(weight.dtype), None


class Fp8Linear(torch.nn.Linear):
    """Linear layer that multiplies in FP8; `convert` makes one of a plain layer."""

    scaling: str

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the map of values (..., k) as (..., n)."""
        flat = Linear.apply(values.flatten(0, -2), self.weight, self.scaling)
        made = flat.unflatten(0, values.shape[:-1])
        return made if self.bias is None else made + self.bias


def convert(blocks: Any, scaling: str) -> None:
    """Let the linear layers of blocks multiply in FP8, in place; their weights stay as they are."""
    every = (layer for block in blocks for layer in block.modules())
    plain: list[Any] = [layer for layer in every if type(layer) is torch.nn.Linear]
    for layer in plain:
        layer.__class__ = Fp8Linear
        layer.scaling = scaling
