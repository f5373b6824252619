"""Memory and FLOPs of one layer of each kind, run on fake tensors by the model's own code.

Part of the program `built_model`: the model runs forward without weights or arithmetic, on fake
tensors (torch._subclasses.fake_tensor), and of each kind of layer only the first runs; the others
hand on what they get. Attention is a function of ours that keeps what FlashAttention keeps (Dao
2023, arXiv 2307.08691): queries, keys, values, output and a sum in fp32 for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

#: Tokens of the run. What a layer keeps is proportional to them, since scores are not kept.
TOKENS = 512
_NAME = "joulefront_kept"


@dataclass
class Layer:
    """Record of the first layer of a kind: bytes and FLOPs of a forward pass over `TOKENS` tokens.

    Attributes:
        attention: (query heads, width of a key, width of a value) of each call of attention.
        storages, shared: storages that are kept, by their address, and addresses of those that
            other layers keep as well.
        returned: number of values that the layer returns; 0 if it returns a tensor.
    """

    flops: int = 0
    attention: list[tuple[int, int, int]] = field(default_factory=list)
    storages: dict[int, Any] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)
    returned: int = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes kept for the backward pass, without parameters, each storage once."""
        return sum(s.nbytes() for key, s in self.storages.items() if key not in self.shared)

    def run(self, forward: Callable[..., Any], given: Sequence[Any], named: dict[str, Any]) -> Any:
        """Call the layer with these arguments and count its FLOPs."""
        from torch.utils.flop_counter import FlopCounterMode

        # What else a layer is given, as the angles of its positions, is the same for all of them.
        self.shared.update(_addresses((given[1:], list(named.values()))))
        with FlopCounterMode(display=False, custom_mapping=_grouped()) as counter:
            result = forward(*given, **named)
        self.flops = counter.get_total_flops()
        self.returned = len(result) if isinstance(result, tuple) else 0
        return result

    def to_json(self) -> dict[str, Any]:
        """Return bytes, FLOPs and the products of attention for each token and visible key."""
        width = sum(heads * (key + value) for heads, key, value in self.attention)
        return {
            "kept_bytes": self.kept_bytes / TOKENS,
            "flops": self.flops / TOKENS,
            "attention_flops": 2 * width,
            "calls_of_attention": len(self.attention),
        }


def _flash(current: Callable[[], Layer | None]) -> Callable[..., Any]:
    """Return an attention function of transformers that computes nothing and keeps as flash."""
    import torch

    class KeptTensors(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, query: Any, key: Any, value: Any) -> Any:
            batch, heads, length, _ = query.shape
            output = query.new_empty(batch, length, heads, value.shape[-1])
            sums = query.new_empty(batch, heads, length, dtype=torch.float32)
            context.save_for_backward(query, key, value, output, sums)
            return output

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            return tuple(torch.empty_like(each) for each in context.saved_tensors[:3])

    def attend(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        layer = current()
        if layer is not None:
            layer.attention.append((query.shape[1], query.shape[-1], value.shape[-1]))
        return KeptTensors.apply(query, key, value), None

    return attend


@contextmanager
def _without_masks() -> Iterator[None]:
    # Masks are of the values of positions, which fake tensors do not have; flash needs none.
    from transformers import masking_utils

    replaced: dict[str, Any] = {"find_packed_sequence_indices": lambda *_, **__: None}
    if hasattr(masking_utils, "is_tracing"):  # true of fake tensors, which makes masks explicit
        replaced["is_tracing"] = lambda *_, **__: False
    before = {name: getattr(masking_utils, name) for name in replaced}
    try:
        for name, function in replaced.items():
            setattr(masking_utils, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(masking_utils, name, function)


def run_layers(
    build: Callable[[], Any], kinds_of: Callable[[Any], Sequence[tuple[Any, Any]]], bytes_each: int
) -> dict[Any, dict[str, Any]]:
    """Return the memory and FLOPs of the first layer of each kind.

    Args:
        build: makes the model; it is called under fake tensors, with the type of the job.
        kinds_of: the layers of a model, each with its kind.
        bytes_each: 2 for bfloat16, 4 for float32.

    Raises:
        ValueError: sizes depend on values, as of experts that are called one by one.
        NotImplementedError: its attention is not fused, and keeps its scores.
        Exception: whatever the model's own code raises on fake tensors.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from transformers import AttentionInterface, AttentionMaskInterface

    layers: dict[Any, Layer] = {}
    running: list[Layer] = []
    AttentionInterface.register(_NAME, _flash(lambda: running[-1] if running else None))
    AttentionMaskInterface.register(_NAME, lambda *_, **__: None)
    usual = torch.get_default_dtype()
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), _without_masks():
        torch.set_default_dtype({2: torch.bfloat16, 4: torch.float32}[bytes_each])
        try:
            model = build()
        finally:
            torch.set_default_dtype(usual)
        if not model._supports_sdpa:
            raise NotImplementedError("transformers has no fused attention for it")
        model.set_attn_implementation(_NAME)
        model.train()
        parameters = {weight.untyped_storage()._cdata for weight in model.parameters()}
        for block, kind in kinds_of(model):
            _watch(block, kind, layers, running)

        def kept(tensor: Any) -> Any:
            if running and (storage := tensor.untyped_storage())._cdata not in parameters:
                running[-1].storages[storage._cdata] = storage
            return tensor

        words = torch.zeros(1, TOKENS, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
            model(input_ids=words, use_cache=False)
    for layer in layers.values():
        if not isinstance(layer.kept_bytes, int) or not isinstance(layer.flops, int):
            raise ValueError("its sizes depend on the values of tensors")
    return {kind: layer.to_json() for kind, layer in layers.items()}


def _watch(block: Any, kind: Any, layers: dict[Any, Layer], running: list[Layer]) -> None:
    """Run the first block of a kind under a counter; others return their input."""
    plain = block.forward
    if kind in layers:
        first = layers[kind]
        block.forward = lambda states, *_, **__: (
            (states, *[None] * (first.returned - 1)) if first.returned else states
        )
        return
    layer = layers[kind] = Layer()

    def forward(*given: Any, **named: Any) -> Any:
        running.append(layer)
        try:
            return layer.run(plain, given, named)
        finally:
            running.pop()

    block.forward = forward


def _grouped() -> dict[Any, Any]:
    # Products of experts over the tokens that visit them, which torch's counter does not know.
    import torch

    def flops(rows: Any, matrices: Any, *_: Any, **__: Any) -> int:
        return 2 * int(rows[0]) * int(rows[1]) * int(matrices[-1])

    return {torch.ops.aten._grouped_mm: flops} if hasattr(torch.ops.aten, "_grouped_mm") else {}


def _addresses(values: Any) -> Iterator[int]:
    import torch

    if isinstance(values, torch.Tensor):
        yield values.untyped_storage()._cdata
    elif isinstance(values, list | tuple):
        for each in values:
            yield from _addresses(each)
