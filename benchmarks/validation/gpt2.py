"""Sizes of a GPT-2, as the published programs state them."""

from __future__ import annotations

from typing import Any


def gpt2(
    hidden: int, layers: int, heads: int, *, positions: int, vocabulary: int
) -> dict[str, Any]:
    """Return a model as a Hugging Face configuration names its sizes."""
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": positions,
        "vocab_size": vocabulary,
    }
