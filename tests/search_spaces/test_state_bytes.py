"""Bytes of optimizer states and quantized weights, as their libraries make them on a CPU.

bitsandbytes and torchao are no dependencies: without them their cases are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tuner.search_spaces.job import QUANTIZED, Program
from tuner.search_spaces.model_facts import state_bytes

torch = pytest.importorskip("torch")
#: Number of values of the tensors that are made.
SIZE = 2**22


def weight() -> Any:
    made = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.bfloat16))
    made.grad = torch.ones_like(made)
    return made


def bytes_of(tensors: Iterable[Any]) -> float:
    """Return the bytes per value of tensors that are kept for `SIZE` values."""
    sizes = (t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
    return sum(sizes) / SIZE


def moments(optimizer: Any) -> float:
    """Return what is counted."""
    return state_bytes(Program(pure_bf16=True, optimizer=optimizer), "bf16").moments


def test_moments_of_torch() -> None:
    stepped = weight()
    optimizer = torch.optim.AdamW([stepped])
    optimizer.step()
    made = bytes_of(optimizer.state[stepped].values())
    assert moments("adamw") == pytest.approx(made, rel=1e-3)


@pytest.mark.parametrize(
    ("optimizer", "name"), [("adamw_8bit", "AdamW8bit"), ("adamw_32bit", "AdamW32bit")]
)
def test_moments_of_bitsandbytes(optimizer: str, name: str) -> None:
    library = pytest.importorskip("bitsandbytes")
    stepped = weight()
    made = getattr(library.optim, name)([stepped])
    made.init_state(made.param_groups[0], stepped, 0, 0)
    assert moments(optimizer) == pytest.approx(bytes_of(made.state[stepped].values()), rel=1e-3)


@pytest.mark.parametrize("quantization", ["nf4", "nf4-double"])
def test_quantized_weights_of_bitsandbytes(quantization: str) -> None:
    library = pytest.importorskip("bitsandbytes")
    packed, state = library.functional.quantize_4bit(
        torch.randn(2048, SIZE // 2048, dtype=torch.bfloat16),
        blocksize=64,
        quant_type="nf4",
        compress_statistics=quantization == "nf4-double",
    )
    scales = [state.absmax, *([state.state2.absmax] if quantization == "nf4-double" else [])]
    assert QUANTIZED[quantization] == pytest.approx(bytes_of([packed, *scales]), rel=1e-3)


def test_moments_of_torchao() -> None:
    library = pytest.importorskip("torchao.optim")
    stepped = weight()
    optimizer = library.AdamW8bit([stepped])
    both = [optimizer._new_buffer(stepped, signed) for signed in (True, False)]
    inner = [getattr(each, name) for each in both for name in each.__tensor_flatten__()[0]]
    assert moments("adamw_8bit") == pytest.approx(bytes_of(inner), rel=1e-3)
