"""Sizes and parameters of a plain decoder, from the sizes that its configuration declares.

A plain decoder is a stack of equal blocks of attention and an MLP between a table of tokens and an
output projection. Its families, and the names that configurations have for one size (`hidden_size`,
`n_embd`, `d_model`), are listed in `data/catalogue/language_models.toml`. Any other model is
counted by transformers (`tuner.search_spaces.library_count`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.search_spaces.data_files import catalogue
from tuner.search_spaces.errors import InputError, InvalidValue, check_integer
from tuner.search_spaces.model_sizes import Sizes

_CATALOGUE = catalogue("language_models")
#: The keys of each size, in any family.
_ALIASES: Mapping[str, Sequence[str]] = _CATALOGUE["aliases"]
_PARTS: Sequence[str] = _CATALOGUE["parts"]["keys"]
#: Limits of sizes, tens of times those of any model: with larger ones an answer would not end.
_MOST: Mapping[str, int] = _CATALOGUE["most"]


@dataclass(frozen=True)
class Decoder:
    """Properties of a family of plain decoders.

    Attributes:
        gated: True if the MLP has a gate: three matrices instead of two.
        biased: True if every linear layer and every norm has a bias.
        learned_positions: True if positions are a table of parameters.
        qk_norm: True if the queries and the keys of each head are normed.
        experts, experts_per_token, kv_heads, head_dim, positions, tied: defaults of the
            configuration class; None or 0 if it has none.
    """

    gated: bool = True
    biased: bool = False
    learned_positions: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 2
    kv_heads: int | None = None
    head_dim: int | None = None
    positions: int | None = None
    tied: bool = False


_DECODERS = {name: Decoder(**table) for name, table in _CATALOGUE["decoders"].items()}


def is_plain(config: Mapping[str, Any]) -> bool:
    """Return True if a configuration is of a listed family and adds no parts to its blocks."""
    return config.get("model_type") in _DECODERS and not any(config.get(key) for key in _PARTS)


def check_limits(config: Mapping[str, Any]) -> None:
    """Check the sizes of a configuration, and of those in it, against the limits of any model."""
    for name, most in _MOST.items():
        for key in _ALIASES.get(name, (name,)):
            value = config.get(key)
            if isinstance(value, int) and value > most:
                raise InvalidValue(f"{key} of the model config", value, f"at most {most:,}")
    for nested in config.values():
        if isinstance(nested, Mapping):
            check_limits(nested)


def describe(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Return the sizes of a plain decoder and its numbers of parameters, by the names of
    `ModelFacts`.

    A family that is not listed is described as a Llama, with a gate if its activation has one.

    Raises:
        InputError: a size is missing, no integer, or does not divide another.
    """
    decoder = _DECODERS.get(model_type)
    if decoder is None:
        gate = str(config.get("hidden_act", "silu"))
        decoder = Decoder(gated="silu" in gate or "glu" in gate)
    sizes = _read_sizes(config, model_type, decoder)
    return {**vars(sizes), **_count(sizes, biased=decoder.biased)}


def _read_sizes(config: Mapping[str, Any], model_type: str, decoder: Decoder) -> Sizes:
    of = f"of the {model_type} config"
    needed = ("hidden", "layers", "heads", "vocab")
    hidden, layers, heads, vocab = (_required(config, name, model_type) for name in needed)
    head_dim = _size(config, "head_dim") or decoder.head_dim
    if head_dim is None and hidden % heads:
        raise InvalidValue(
            f"num_attention_heads {of}", heads, f"a divisor of the hidden size {hidden}"
        )
    kv_heads = _size(config, "kv_heads") or decoder.kv_heads or heads
    if heads % kv_heads:
        legal = f"a divisor of the {heads} attention heads"
        raise InvalidValue(f"num_key_value_heads {of}", kv_heads, legal)
    experts, per_token = 0, 0
    if decoder.experts or model_type not in _DECODERS:  # a Llama does not read such a key
        experts = _size(config, "experts", least=0) or decoder.experts
    if experts:
        usual = min(decoder.experts_per_token, experts)
        per_token = _size(config, "experts_per_token") or usual
        if per_token > experts:
            legal = f"at most the {experts} experts"
            raise InvalidValue(f"num_experts_per_tok {of}", per_token, legal)
    dense = _size(config, "intermediate")
    if dense is None:
        if model_type in _DECODERS and decoder.gated:
            _required(config, "intermediate", model_type)  # raises: there is no usual width
        dense = 4 * hidden  # GPT-2's width if n_inner is null
    return Sizes(
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        vocab=vocab,
        dense=dense,
        expert=(_size(config, "expert_intermediate") or dense) if experts else dense,
        experts=experts,
        experts_per_token=per_token,
        positions=_size(config, "positions") or decoder.positions,
        tied=read_flag(config, "tie_word_embeddings", decoder.tied),
        gated=decoder.gated,
        learned_positions=decoder.learned_positions,
        qk_norm=decoder.qk_norm,
    )


def _count(sizes: Sizes, *, biased: bool) -> dict[str, int]:
    """Return the counts of `ModelFacts` by name, from `parameters` to `largest_layer`."""
    hidden, layers = sizes.hidden, sizes.layers
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    norm = 2 * hidden if biased else hidden
    attention = hidden * (2 * q + 2 * kv)
    small = 2 * norm + (2 * sizes.head_dim if sizes.qk_norm else 0)
    matrices = (3 if sizes.gated else 2) * hidden * sizes.expert
    mlp = matrices
    if biased:
        small += q + 2 * kv + hidden
        mlp += sizes.expert + hidden
    router, stored = hidden * sizes.experts, max(sizes.experts, 1)
    visited = max(sizes.experts_per_token, 1)
    block = attention + small + router + stored * mlp
    table = sizes.vocab * hidden
    positions = (sizes.positions or 0) * hidden if sizes.learned_positions else 0
    parameters = layers * block + (1 if sizes.tied else 2) * table + positions + norm
    return {
        "parameters": parameters,
        "active_parameters": parameters - layers * (stored - visited) * mlp,
        "matmul_parameters": layers * (attention + router + visited * matrices) + table,
        "head_parameters": table,
        "block_parameters": layers * block,
        "expert_parameters": layers * sizes.experts * mlp,
        "largest_layer": max(block, table),
    }


def _size(config: Mapping[str, Any], name: str, *, least: int = 1) -> int | None:
    for key in _ALIASES[name]:
        value = config.get(key)
        if value is not None:
            return check_integer(f"{key} of the model config", value, least=least)
    return None


def _required(config: Mapping[str, Any], name: str, model_type: str) -> int:
    value = _size(config, name)
    if value is None:
        names = " or ".join(_ALIASES[name])
        raise InputError(f"the {model_type} model config does not give {names}")
    return value


def read_flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return the boolean under a key, or the default if it is absent or null."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidValue(f"{key} of the model config", value, "true or false")
    return value
