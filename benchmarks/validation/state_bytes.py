"""Bytes of optimizer states and quantized weights as their libraries make them, on a CPU.

bitsandbytes and torchao are no dependencies: without them their rows are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tuner.search_spaces.job import QUANTIZED, Program
from tuner.search_spaces.model_facts import state_bytes

#: Number of values of the tensors that are made.
SIZE = 2**22


def rows() -> list[tuple[str, float, float]]:
    """Return (what, bytes per parameter that the library takes, bytes that are counted)."""
    found = [("torch AdamW, bf16 moments", _of_torch(), _moments("adamw"))]
    try:
        import bitsandbytes
    except ImportError:
        pass
    else:
        found += _of_bitsandbytes(bitsandbytes)
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        return found
    weight = _weight()
    made = AdamW8bit([weight])
    both = [made._new_buffer(weight, signed) for signed in (True, False)]
    inner = [getattr(each, name) for each in both for name in each.__tensor_flatten__()[0]]
    return [*found, ("torchao AdamW8bit", _bytes(inner), _moments("adamw_8bit"))]


def _weight() -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    return weight


def _bytes(tensors: Iterable[Any]) -> float:
    sizes = (t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
    return sum(sizes) / SIZE


def _moments(optimizer: Any) -> float:
    return state_bytes(Program(pure_bf16=True, optimizer=optimizer), "bf16").moments


def _of_torch() -> float:
    weight = _weight()
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    return _bytes(optimizer.state[weight].values())


def _of_bitsandbytes(library: Any) -> list[tuple[str, float, float]]:
    found = []
    for optimizer, name in (("adamw_8bit", "AdamW8bit"), ("adamw_32bit", "AdamW32bit")):
        weight = _weight()
        made = getattr(library.optim, name)([weight])
        made.init_state(made.param_groups[0], weight, 0, 0)
        states = made.state[weight].values()
        found.append((f"bitsandbytes {name}", _bytes(states), _moments(optimizer)))
    for name in ("nf4", "nf4-double"):
        packed, state = library.functional.quantize_4bit(
            torch.randn(2048, SIZE // 2048, dtype=torch.bfloat16),
            blocksize=64,
            quant_type="nf4",
            compress_statistics=name == "nf4-double",
        )
        scales = [state.absmax, *([state.state2.absmax] if name == "nf4-double" else [])]
        said = QUANTIZED[name]
        assert said is not None
        found.append((f"bitsandbytes {name}", _bytes([packed, *scales]), said))
    return found
