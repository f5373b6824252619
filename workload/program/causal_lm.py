"""The model, by `transformers` with random weights, and the tokens, which are synthetic.

Both depend on the job alone, never on how ranks share the work: the same seed gives the same
weights everywhere, and one step's tokens are drawn whole before each rank takes its part. That is
what lets the loss of two parallelisms be compared digit by digit.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def build_model(job: dict[str, Any], activation_checkpointing: str) -> Any:
    """The job's model, in fp32 on the host; DeepSpeed casts and moves it."""
    values = dict(job["model"])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.use_cache = False
    # The same seed on every rank and for every configuration: the same weights.
    torch.manual_seed(job["seed"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    every = {"none": 0, "full": 1}.get(activation_checkpointing)
    if every is None:
        every = int(activation_checkpointing.removeprefix("every_"))
    if every:
        checkpoint_blocks(model, every)
    model.train()
    return model


def blocks_of(model: Any) -> Any:
    """The transformer blocks, whatever the family calls them."""
    decoder = model.get_decoder()
    return decoder.layers if hasattr(decoder, "layers") else decoder.h


def checkpoint_blocks(model: Any, every: int) -> None:
    """Recompute each `every`-th block in the backward pass instead of keeping its activations."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for number, block in enumerate(blocks_of(model)):
        if every > 1 and not hasattr(block, "gradient_checkpointing"):
            raise NotImplementedError("this release of transformers checkpoints all blocks or none")
        block.gradient_checkpointing = number % every == 0


def check_attention(model: Any, length: int) -> None:
    """Make sure that attention is plainly causal, for where the family's own mask is not used.

    Raises:
        NotImplementedError: a window shorter than the sequence hides some of what came before.
    """
    window = getattr(model.config, "sliding_window", None)
    if window is not None and window < length:
        raise NotImplementedError(f"attention within a window of {window} tokens is not split yet")


def tokens_of_step(job: dict[str, Any], step: int) -> torch.Tensor:
    """One step's tokens, (global_batch, sequence_length + 1), the same on all ranks.

    One more than the length, so that each position has a token to predict and every part of a
    sequence weighs the same.
    """
    generator = torch.Generator().manual_seed(job["seed"] * 1_000_003 + step)
    shape = (job["global_batch"], job["sequence_length"] + 1)
    return torch.randint(job["model"]["vocab_size"], shape, generator=generator)
