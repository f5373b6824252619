"""Pipeline parallelism by DeepSpeed: the same blocks, cut into stages of equally many.

`transformers` builds the whole model from the seed, as for every other configuration; each stage
then takes its own blocks out of it and drops the rest. Between two stages flow hidden states alone:
what all blocks share (rotary angles) each stage computes once for itself.
"""

from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec


class Table(torch.nn.Module):
    """The table of tokens, which the last stage shares where the family ties the two."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.table = decoder.embed_tokens

    @property
    def weight(self) -> torch.nn.Parameter:
        return self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


class Start(torch.nn.Module):
    """What some families do between table and first block: widen, and add learned positions."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.projection = getattr(decoder, "project_in", None)
        self.positions = decoder.embed_positions

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.projection is not None:
            hidden = self.projection(hidden)
        there = torch.ones(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        return hidden + self.positions(there, 0, position_ids=there.cumsum(1) - 1)


class Block(torch.nn.Module):
    """One transformer block, given what the decoder would have handed it."""

    def __init__(self, block: Any, angles: "Angles | None") -> None:
        super().__init__()
        self.block = block
        self._angles = [angles]  # in a list: shared by the stage's blocks, a module of none

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {"attention_mask": None}  # causal by itself, as whole sequences are
        angles = self._angles[0]
        if angles is not None:
            given["position_embeddings"] = angles(hidden)
        out = self.block(hidden, **given)
        return out[0] if isinstance(out, tuple) else out


class Angles:
    """Rotary angles, computed once a shape."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self._known: dict[Any, Any] = {}

    def __call__(self, hidden: torch.Tensor) -> Any:
        key = (hidden.shape[1], hidden.device, hidden.dtype)
        if key not in self._known:
            numbers = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
            with torch.no_grad():
                rotary = self._rotary.to(hidden.device)
                self._known[key] = rotary(hidden, position_ids=numbers)
        return self._known[key]


class End(torch.nn.Module):
    """The last norm and, where the family has one, the projection back to the table's width."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.norm = getattr(decoder, "norm", None) or getattr(decoder, "final_layer_norm", None)
        self.projection = getattr(decoder, "project_out", None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden if self.norm is None else self.norm(hidden)
        return hidden if self.projection is None else self.projection(hidden)


class Head(torch.nn.Module):
    """The output projection of a model that does not share its table."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.projection = model.lm_head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.projection(hidden)


def cut(model: Any, stages: int) -> PipelineModule:
    """The model as a pipeline of `stages`, each with equally many blocks.

    Raises:
        NotImplementedError: a family whose decoder is put together in another way.
    """
    decoder = model.get_decoder()
    if not hasattr(decoder, "embed_tokens") or not hasattr(decoder, "layers"):
        raise NotImplementedError(f"{type(model).__name__} is not cut into pipeline stages yet")
    angles = Angles(decoder.rotary_emb) if hasattr(decoder, "rotary_emb") else None
    blocks = [LayerSpec(Block, block, angles) for block in decoder.layers]
    if model.config.tie_word_embeddings:
        first = TiedLayerSpec("table", Table, decoder)
        last = TiedLayerSpec("table", Table, decoder, forward_fn=_logits)
    else:
        first, last = LayerSpec(Table, decoder), LayerSpec(Head, model)
    start = [LayerSpec(Start, decoder)] if hasattr(decoder, "embed_positions") else []
    pipeline = PipelineModule(
        [first, *start, *blocks, LayerSpec(End, decoder), last],
        num_stages=stages,
        loss_fn=_loss,
        partition_method="type:Block",
    )
    # The specifications hold the whole model; this stage keeps its own part of it.
    for spec in pipeline._layer_specs:
        spec.module_args = ()
    for parameter in pipeline.parameters():
        # Else DeepSpeed 0.19.8 clips at ZeRO 0 by the norm of the first stage's gradients alone.
        parameter.model_parallel = not parameter.ds_pipe_replicated
    return pipeline


def _logits(table: Table, hidden: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(hidden, table.weight)


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in fp32, as transformers' own."""
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
