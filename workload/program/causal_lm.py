"""The model, by `transformers` with random weights, and the tokens, which are synthetic.

Both depend on the job alone, never on how ranks share the work: each module's weights are drawn
from the job's seed and the module's name, and one step's tokens are drawn whole. So the loss of two
parallelisms can be compared digit by digit.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lora
import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)


def reads_video(job: dict[str, Any]) -> bool:
    """Return True if the job's model encodes frames besides reading text."""
    return "vision_config" in job["model"]


def planned_model(job: dict[str, Any], activation_checkpointing: str) -> Any:
    """Build the job's model without weights: it takes no memory until `Filler` fills it."""
    values = dict(job["model"])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.use_cache = False
    kind: Any = AutoModelForImageTextToText if reads_video(job) else AutoModelForCausalLM
    with torch.device("meta"):
        # In fp32 whatever the configuration says; releases name the argument differently.
        model = kind.from_config(config).float()
    if "lora" in job:
        lora.adapt(model, blocks_of(model), job["lora"])
    checkpoint_blocks(model, activation_checkpointing)
    model.train()
    return model


def build_model(job: dict[str, Any], activation_checkpointing: str) -> Any:
    """Build the job's whole model, in fp32 on the host; DeepSpeed casts and moves it."""
    model = planned_model(job, activation_checkpointing)
    Filler(model, job["seed"])(model)
    model.tie_weights()
    return model


class Filler:
    """Initialiser of a planned model's weights, in the way of the model's family.

    The same module gets the same weights on every rank and under every configuration: a device's
    generator is counter-based (Philox), so its values depend on the seed alone. They are drawn in
    fp32 and stored in `dtype`, as DeepSpeed would cast them.
    """

    def __init__(
        self, model: Any, seed: int, device: str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        self._seed, self._device, self._dtype = seed, device, dtype
        self._registered: dict[Any, tuple[str, Any]] = {}
        self._register(model, "", model)

    def _register(self, module: Any, name: str, owner: Any) -> None:
        owner = module if isinstance(module, PreTrainedModel) else owner
        self._registered[module] = name, owner
        for child, part in module.named_children():
            self._register(part, f"{name}.{child}", owner)

    def __call__(self, *modules: Any, recurse: bool = True) -> None:
        """Fill modules and, if `recurse`, their parts, except those that have weights already."""
        for module in modules:
            self._fill(module, recurse)
            # Only once its parts are drawn: a module may draw its parts' weights anew.
            for parameter in module.parameters(recurse) if self._dtype else ():
                if not parameter.is_meta:
                    parameter.data = parameter.data.to(self._dtype)

    def _fill(self, module: Any, recurse: bool) -> bool:
        filled = False
        for part in module.children() if recurse else ():
            filled |= self._fill(part, recurse)
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(tensor.is_meta for tensor in own):
            module.to_empty(device=self._device, recurse=False)
            filled = True
        if filled and module in self._registered:
            name, owner = self._registered[module]
            torch.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
            owner._init_weights(module)
            if isinstance(module, lora.Zero):
                module.start()
        return filled


def blocks_of(model: Any) -> Any:
    """Return the transformer blocks, by any family's name for them."""
    # `get_decoder` is None, the decoder or the whole language model, as the release has it.
    base = model.base_model
    parts = (base, *(getattr(base, name, None) for name in ("decoder", "language_model")))
    found = (getattr(part, name, None) for part in parts for name in ("layers", "h"))
    return next(blocks for blocks in found if blocks is not None)


def encoder_blocks_of(model: Any) -> Any:
    """Return the blocks of the image encoder, if there is one."""
    encoder = getattr(model.base_model, "vision_tower", None)
    return () if encoder is None else encoder.encoder.layers


#: Operators whose outputs selective checkpointing keeps: matrix products and fused attention.
KEPT_OPERATORS = (
    *("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
)


def kept_by_operator() -> Any:
    """Return contexts of a forward pass and its recomputation that keep `KEPT_OPERATORS`."""
    operators = (getattr(torch.ops.aten, name, None) for name in KEPT_OPERATORS)
    kept = [operator.default for operator in operators if operator is not None]
    return create_selective_checkpoint_contexts(kept)


def checkpoint_blocks(model: Any, mode: str) -> None:
    """Recompute blocks in the backward pass instead of keeping their activations.

    Of each N-th block ("every_N"), all ("full") or none ("none"); "selective" recomputes in all
    blocks what is cheap, as matrix products and fused attention are not.
    """
    if mode == "none":
        return
    every = int(mode.removeprefix("every_")) if mode.startswith("every_") else 1
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = kept_by_operator
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    for blocks in (blocks_of(model), encoder_blocks_of(model)):
        for number, block in enumerate(blocks):
            if every > 1 and not hasattr(block, "gradient_checkpointing"):
                raise NotImplementedError(
                    "this release of transformers checkpoints all blocks or none"
                )
            block.gradient_checkpointing = number % every == 0


def compile_model(model: Any, scope: str) -> None:
    """Compile each block (`regional`), the whole model (`full`) or nothing, in place."""
    for part in {"none": (), "regional": blocks_of(model), "full": (model,)}[scope]:
        part.compile()


def check_attention(model: Any, length: int) -> None:
    """Raise NotImplementedError if a window shorter than the sequence hides a part."""
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    if window is not None and window < length:
        raise NotImplementedError(f"attention within a window of {window} tokens is not split yet")


@dataclass(frozen=True)
class Share:
    """Share of this rank in a step: its samples, and its part of each.

    Replica `replica` of `replicas` (data parallelism); part `part` of `parts` of a sequence, a
    chunk near the start and one as near to the end if `paired` (`context`).
    """

    accumulation: int
    replicas: int
    replica: int
    micro_batch: int
    parts: int = 1
    part: int = 0
    paired: bool = False

    def of(self, samples: torch.Tensor) -> torch.Tensor:
        """Return this replica's samples of a step: (accumulation, micro_batch, ...)."""
        shape = (self.accumulation, self.replicas, self.micro_batch, *samples.shape[1:])
        return samples.view(shape)[:, self.replica]

    def positions(self, length: int) -> torch.Tensor:
        """Return the positions of this rank's part of a sequence of `length` tokens."""
        if not self.paired:
            own = self.slice(length)
            return torch.arange(own.start, own.stop)
        chunks = torch.arange(length).chunk(2 * self.parts)
        return torch.cat((chunks[self.part], chunks[-1 - self.part]))

    def slice(self, length: int) -> slice:
        """Return this rank's part of a sequence of `length` tokens."""
        each = length // self.parts
        return slice(self.part * each, (self.part + 1) * each)


def generator_of(job: dict[str, Any], step: int) -> torch.Generator:
    """Return the random generator of one step: the same on all ranks, different for each step."""
    return torch.Generator().manual_seed(job["seed"] * 1_000_003 + step)


def tokens_of_step(job: dict[str, Any], step: int) -> torch.Tensor:
    """Draw one step's tokens, (global_batch, sequence_length + 1), the same on all ranks."""
    shape = (job["global_batch"], job["sequence_length"] + 1)
    return torch.randint(job["model"]["vocab_size"], shape, generator=generator_of(job, step))


class Samples:
    """Samples of a job, one step at a time, in this rank's share."""

    def __init__(self, job: dict[str, Any], share: Share) -> None:
        self._job, self._share = job, share

    def of_step(self, step: int) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Yield inputs and target tokens of each micro-batch."""
        share, own = self._share, self._share.positions(self._job["sequence_length"])
        for tokens in share.of(tokens_of_step(self._job, step)):
            inputs: dict[str, Any] = {"input_ids": tokens[:, :-1][:, own]}
            if share.parts > 1:
                inputs["position_ids"] = own[None]
            yield inputs, tokens[:, 1:][:, own].contiguous()
