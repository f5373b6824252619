"""Pipeline parallelism by DeepSpeed: the same blocks in stages of equal numbers of blocks.

`transformers` plans the whole model, which takes no memory; each stage then fills its own layers
with the weights that they have under every other configuration. Between two stages flow hidden
states alone: what all blocks share (rotary angles) each stage computes once for itself.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

import torch
from causal_lm import reads_video
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

#: Gives modules their weights (`causal_lm.Filler`).
Fill = Callable[..., None]


class Table(torch.nn.Module):
    """Token embedding table, which the last stage shares if the family ties the two."""

    def __init__(self, decoder: Any, fill: Fill) -> None:
        super().__init__()
        fill(decoder.embed_tokens)
        self.table = decoder.embed_tokens

    @property
    def weight(self) -> torch.nn.Parameter:
        return self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


class Start(torch.nn.Module):
    """Projection and learned positions that some families have between table and first block."""

    def __init__(self, decoder: Any, fill: Fill) -> None:
        super().__init__()
        self.projection = getattr(decoder, "project_in", None)
        self.positions = decoder.embed_positions
        fill(self)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.projection is not None:
            hidden = self.projection(hidden)
        there = torch.ones(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        return hidden + self.positions(there, 0, position_ids=there.cumsum(1) - 1)


class Block(torch.nn.Module):
    """Transformer block with the inputs that the decoder would pass to it."""

    def __init__(self, block: Any, angles: "Angles | None", fill: Fill) -> None:
        super().__init__()
        fill(block)
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
    """Rotary angles, computed once per shape, of `positions` where they are more than a count."""

    def __init__(self, rotary: Any, positions: torch.Tensor | None) -> None:
        self._rotary, self._positions = rotary, positions
        self._shared: dict[Any, Any] = {}

    def __call__(self, hidden: torch.Tensor) -> Any:
        key = (hidden.shape[1], hidden.device, hidden.dtype)
        if key not in self._shared:
            numbers = torch.arange(hidden.shape[1]) if self._positions is None else self._positions
            numbers = numbers.to(hidden.device).unsqueeze(-2)
            with torch.no_grad():
                rotary = self._rotary.to(hidden.device)
                self._shared[key] = rotary(hidden, position_ids=numbers)
        return self._shared[key]


class End(torch.nn.Module):
    """Last norm and, in some families, the projection back to the table's width."""

    def __init__(self, decoder: Any, fill: Fill) -> None:
        super().__init__()
        self.norm = getattr(decoder, "norm", None) or getattr(decoder, "final_layer_norm", None)
        self.projection = getattr(decoder, "project_out", None)
        fill(self)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden if self.norm is None else self.norm(hidden)
        return hidden if self.projection is None else self.projection(hidden)


class Head(torch.nn.Module):
    """Output projection of a model that does not share its table."""

    def __init__(self, model: Any, fill: Fill) -> None:
        super().__init__()
        fill(model.lm_head)
        self.projection = model.lm_head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.projection(hidden)


class Frames(torch.nn.Module):
    """Token table and frame encoder, whose features replace the video's tokens."""

    def __init__(self, model: Any, fill: Fill) -> None:
        super().__init__()
        self.table = model.get_decoder().embed_tokens
        whole = model.base_model
        fill(self.table, whole.vision_tower, whole.multi_modal_projector)
        fill(whole, recurse=False)
        # transformers' own but for its language model, whose blocks the stages share out.
        self.encoder = copy.copy(whole)
        self.encoder._modules = dict(self.encoder._modules)
        del self.encoder._modules["language_model"]
        self._placeholder = model.config.video_token_id

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        tokens, frames = inputs
        hidden = self.table(tokens)
        features = self.encoder.get_video_features(frames, return_dict=True).pooler_output
        here = (tokens == self._placeholder).unsqueeze(-1)
        return hidden.masked_scatter(here, features.to(hidden.dtype))


def fed(parts: Iterable[tuple[dict[str, Any], torch.Tensor]]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield the input of the first stage, and the targets of the last one."""
    for inputs, targets in parts:
        given = [value for name, value in inputs.items() if name != "position_ids"]
        yield (given[0] if len(given) == 1 else tuple(given)), targets


#: DeepSpeed's instructions to a stage, by the phase that each begins.
PHASES = {
    "LoadMicroBatch": "data",
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "SendActivation": "communication",
    "RecvActivation": "communication",
    "SendGrad": "communication",
    "RecvGrad": "communication",
    "ReduceGrads": "communication",
    "ReduceTiedGrads": "communication",
    "OptimizerStep": "optimizer",
}


def mark_phases(engine: Any, phase: Callable[[str], None]) -> None:
    """Mark the phases of this rank's stage: several passes a step, and waits for its neighbours."""

    def marked(name: str, run: Callable[..., None]) -> Callable[..., None]:
        def instruction(self: Any, **given: Any) -> None:
            phase(name)
            MethodType(run, self)(**given)

        return instruction

    engine._INSTRUCTION_MAP = {
        kind: marked(PHASES[kind.__name__], run) if kind.__name__ in PHASES else run
        for kind, run in engine._INSTRUCTION_MAP.items()
    }


def layers_of(model: Any, job: dict[str, Any], fill: Fill) -> list[LayerSpec]:
    """Return the layers in order, each still to be built: start, blocks, norm, head.

    NotImplementedError for a family whose decoder is put together in another way.
    """
    decoder = model.get_decoder()
    if not hasattr(decoder, "embed_tokens") or not hasattr(decoder, "layers"):
        raise NotImplementedError(f"{type(model).__name__} is not cut into pipeline stages yet")
    positions = None
    if reads_video(job):
        import multimodal

        positions = multimodal.Layout(job).positions()
    angles = None
    if hasattr(decoder, "rotary_emb"):
        fill(decoder.rotary_emb)
        angles = Angles(decoder.rotary_emb, positions)
    blocks = [LayerSpec(Block, block, angles, fill) for block in decoder.layers]
    tied = model.config.tie_word_embeddings
    if tied and positions is not None:
        raise NotImplementedError(
            "an encoder of frames and a shared table are not cut together yet"
        )
    first: Any
    last: Any
    if positions is not None:
        first, last = LayerSpec(Frames, model, fill), LayerSpec(Head, model, fill)
    elif tied:
        first = TiedLayerSpec("table", Table, decoder, fill)
        last = TiedLayerSpec("table", Table, decoder, fill, forward_fn=logits_of)
    else:
        first, last = LayerSpec(Table, decoder, fill), LayerSpec(Head, model, fill)
    start = [LayerSpec(Start, decoder, fill)] if hasattr(decoder, "embed_positions") else []
    return [first, *start, *blocks, LayerSpec(End, decoder, fill), last]


def cut(model: Any, stages: int, job: dict[str, Any], fill: Fill) -> PipelineModule:
    """Return the model as a pipeline of `stages`, each with the same number of blocks."""
    pipeline = PipelineModule(
        layers_of(model, job, fill),
        num_stages=stages,
        loss_fn=loss_of,
        partition_method="type:Block",
    )
    # The specifications hold the whole model; this stage keeps its own part of it.
    for spec in pipeline._layer_specs:
        spec.module_args = ()
    for parameter in pipeline.parameters():
        # Else DeepSpeed 0.19.8 clips at ZeRO 0 by the norm of the first stage's gradients alone.
        parameter.model_parallel = not parameter.ds_pipe_replicated
    return pipeline


def logits_of(table: Table, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits that a shared table makes of hidden states."""
    return torch.nn.functional.linear(hidden, table.weight)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in fp32, as transformers computes it."""
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
