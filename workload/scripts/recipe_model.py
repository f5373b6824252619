"""The model of a command that gives its sizes, as Megatron-LM's arguments do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tuner.search_spaces.errors import InputError

#: Sizes without which there is no model, by their names in a config.json.
_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
#: The names that GPT-2's configuration has for them.
_GPT2 = {
    **{"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head"},
    **{"intermediate_size": "n_inner", "max_position_embeddings": "n_positions"},
}


class Reader(Protocol):
    """Reader of a command's keys."""

    @property
    def source(self) -> str:
        """Source of the keys, for sentences."""

    def number(self, keys: tuple[str, ...]) -> int:
        """Return a number of at least 1; 0 if it is not given."""

    def holding(self, of: str) -> str:
        """Return the value of a fact; "" if no case of it holds."""


def sizes_of_model(keys: Mapping[str, str], reader: Reader) -> dict[str, Any]:
    """Return the Hugging Face configuration of the model that a command's sizes describe.

    Megatron-LM's defaults (megatron/training/arguments.py, validate_args): the MLP is four times as
    wide as the model, or 2/3 of that, rounded down to a multiple of 64, with SwiGLU; as many heads
    of keys and values as of queries.

    Raises:
        InputError: a size is missing, or its blocks are of no family that is described so.
    """
    family = reader.holding("model_type")
    if not family:
        raise InputError(
            f"the norms, activation and positions of {reader.source} are of no family that is "
            "described so; give the model's config.json by --model-config"
        )
    sizes = {name: reader.number((key,)) for name, key in keys.items()}
    for name in _NEEDED:
        if not sizes[name]:
            raise InputError(
                f"{reader.source} does not give --{keys[name]}, without which the model has no "
                "size; add it, or give the model's config.json by --model-config"
            )
    hidden = sizes["hidden_size"]
    wide = 4 * hidden if family == "gpt2" else int(4 * hidden * 2 / 3) // 64 * 64
    sizes["intermediate_size"] = sizes["intermediate_size"] or wide
    if family == "mixtral":
        sizes["intermediate_size"] = sizes["moe_intermediate_size"] or sizes["intermediate_size"]
        sizes["num_experts_per_tok"] = sizes["num_experts_per_tok"] or 2
    given = {name: size for name, size in sizes.items() if size}
    given.pop("moe_intermediate_size", None)
    if family == "gpt2":
        given = {_GPT2.get(name, name): size for name, size in given.items()}
        given.pop("num_key_value_heads", None)
    tied = reader.holding("tied") == "true"
    return {"model_type": family, **given, "tie_word_embeddings": tied}
