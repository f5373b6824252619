"""Sizes of a language model from its Hugging Face configuration, and the count of its parameters.

Families of models have different names for the same size (`hidden_size`, `n_embd`, `d_model`), and
properties that decide the count: gates, biases, norms, positions, experts. Both are listed in
`data/catalogue/language_models.toml`. A family that is not listed is read by the standard keys,
with `exact` False.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tuner.search_spaces.data_files import catalogue
from tuner.search_spaces.errors import InputError, InvalidValue, check_integer

_CATALOGUE = catalogue("language_models")
#: The keys of each size, in any family.
_ALIASES: Mapping[str, Sequence[str]] = _CATALOGUE["aliases"]


@dataclass(frozen=True)
class Family:
    """Properties of a `model_type` that decide the count of its parameters.

    `kv_heads`, `head_dim` and `positions` are defaults of the configuration class, if it has any;
    a `key` is that of the configuration which says so, if there is one.
    """

    gated: bool = True  # the MLP has a gate: three matrices, by default without bias
    bias: bool = False  # every linear layer of attention and MLP has one
    bias_key: str = ""
    attention_bias_key: str = ""
    mlp_bias_key: str = ""
    qkv_bias: bool = False  # the query, key and value projections alone have one
    qkv_bias_key: str = ""
    layer_norm: bool = False  # norms have weight and bias, not a weight alone
    norms: int = 2  # per layer
    learned_positions: bool = False  # max_position_embeddings + extra_positions entries
    extra_positions: int = 0
    qk_norm: str = ""  # norms on queries and keys: "head" over one head, "all" over all heads
    tied: bool = False  # default of tie_word_embeddings
    kv_heads: int | None = None
    head_dim: int | None = None
    positions: int | None = None
    dense_layers: bool = False  # some layers may have no experts
    shared_expert: bool = False


_FAMILIES = {name: Family(**table) for name, table in _CATALOGUE["families"].items()}


@dataclass(frozen=True)
class Sizes:
    """Sizes that a configuration gives, completed by the defaults of its family.

    Attributes:
        dense, expert: width of a dense MLP and of an expert; equal without experts.
        experts, experts_per_token: experts per layer, and those that a token visits; 0 if dense.
        positions: the longest sequence the configuration states; None if it states none.
        tied: True if the output projection shares the embedding table.
    """

    model_type: str
    family: Family
    exact: bool
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dense: int
    expert: int
    experts: int
    experts_per_token: int
    positions: int | None
    tied: bool


def is_listed(config: Mapping[str, Any], model_type: str) -> bool:
    """Return True if the formulas count the parameters of a configuration exactly."""
    usual = _CATALOGUE["not_counted"].items()
    changed = any(config.get(key) not in (None, value) for key, value in usual)
    return model_type in _FAMILIES and not changed


def read_sizes(config: Mapping[str, Any], model_type: str) -> Sizes:
    """Return the sizes of a text model."""
    of = f"of the {model_type} config"
    family = _FAMILIES.get(model_type)
    exact = family is not None
    if family is None:
        gate = str(config.get("hidden_act", "silu"))
        family = Family(gated="silu" in gate or "glu" in gate)
    needed = ("hidden", "layers", "heads", "vocab")
    hidden, layers, heads, vocab = (_required(config, name, model_type) for name in needed)
    head_dim = _size(config, "head_dim") or family.head_dim
    if head_dim is None and hidden % heads:
        raise InvalidValue(
            f"num_attention_heads {of}", heads, f"a divisor of the hidden size {hidden}"
        )
    kv_heads = _size(config, "kv_heads") or family.kv_heads or heads
    if heads % kv_heads:
        legal = f"a divisor of the {heads} attention heads"
        raise InvalidValue(f"num_key_value_heads {of}", kv_heads, legal)
    experts = _size(config, "experts", least=0) or 0
    per_token = _size(config, "experts_per_token", least=0) or (min(2, experts) if experts else 0)
    if experts and per_token > experts:
        raise InvalidValue(f"num_experts_per_tok {of}", per_token, f"at most the {experts} experts")
    dense = _size(config, "intermediate")
    if dense is None:
        if exact and family.gated:
            _required(config, "intermediate", model_type)  # raises: there is no usual width
        dense = 4 * hidden  # GPT-2's width if n_inner is null
    return Sizes(
        model_type=model_type,
        family=family,
        exact=exact,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        vocab=vocab,
        dense=dense,
        expert=(_size(config, "expert_intermediate") or dense) if experts else dense,
        experts=experts,
        experts_per_token=per_token if experts else 0,
        positions=_size(config, "positions") or family.positions,
        tied=read_flag(config, "tie_word_embeddings", family.tied),
    )


class _Blocks(NamedTuple):
    # Parameters of all blocks: all, those one token uses, those that multiply it, and experts';
    # and of the largest block.
    total: int
    active: int
    matmul: int
    experts: int
    largest: int


def count_parameters(config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Return the counts of `ModelFacts` by name, from `parameters` to `largest_layer`."""
    family, hidden, is_opt = sizes.family, sizes.hidden, sizes.model_type == "opt"
    norm = 2 * hidden if family.layer_norm else hidden
    affine = not is_opt or read_flag(config, "layer_norm_elementwise_affine", True)
    blocks = _count_blocks(config, sizes, norms=family.norms * norm if affine else 0)
    # OPT-350m embeds into a narrower space and projects in and out of it.
    width = (_number(config, "word_embed_proj_dim") if is_opt else None) or hidden
    projections = 0 if width == hidden else 2 * hidden * width
    table = sizes.vocab * width
    head = 0 if sizes.tied else table
    positions = 0
    if family.learned_positions:
        positions = ((sizes.positions or 0) + family.extra_positions) * hidden
    final_norm = norm if affine else 0
    if is_opt and not read_flag(config, "do_layer_norm_before", True):
        final_norm = 0
    outside = table + head + positions + final_norm + projections
    return {
        "parameters": blocks.total + outside,
        "active_parameters": blocks.active + outside,
        "matmul_parameters": blocks.matmul + table + projections,
        "head_parameters": table + projections,
        "block_parameters": blocks.total,
        "expert_parameters": blocks.experts,
        "shared": _shared_width(config, sizes) or 0,
        "largest_layer": max(blocks.largest, table),
    }


def _count_blocks(config: Mapping[str, Any], sizes: Sizes, *, norms: int) -> _Blocks:
    layers, experts, per_token = sizes.layers, sizes.experts, sizes.experts_per_token
    attention, small = _attention(config, sizes)
    small += norms
    dense_matrices, dense_biases = _mlp(config, sizes, sizes.dense)
    matrices = attention + dense_matrices
    dense = matrices + small + dense_biases
    if not experts:
        return _Blocks(layers * dense, layers * dense, layers * matrices, 0, dense)
    sparse = _sparse_layers(config, layers) if sizes.family.dense_layers else layers
    expert_matrices, expert_biases = _mlp(config, sizes, sizes.expert)
    expert = expert_matrices + expert_biases
    router = sizes.hidden * experts
    width = _shared_width(config, sizes)
    shared = 0 if width is None else sum(_mlp(config, sizes, width)) + sizes.hidden  # its gate
    every = attention + small + router + shared
    rest = (layers - sparse) * dense
    return _Blocks(
        total=sparse * (every + experts * expert) + rest,
        active=sparse * (every + per_token * expert) + rest,
        matmul=sparse * (attention + router + shared + per_token * expert_matrices)
        + (layers - sparse) * matrices,
        experts=sparse * experts * expert,
        largest=max(dense, every + experts * expert),
    )


def _shared_width(config: Mapping[str, Any], sizes: Sizes) -> int | None:
    """Return the width of the expert that every token visits; None if there is none."""
    if not sizes.family.shared_expert or not sizes.experts:
        return None
    return _size(config, "shared_intermediate")


def _attention(config: Mapping[str, Any], sizes: Sizes) -> tuple[int, int]:
    family, hidden = sizes.family, sizes.hidden
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    bias = read_flag(config, family.attention_bias_key or family.bias_key, family.bias)
    qkv_bias = read_flag(config, family.qkv_bias_key, bias or family.qkv_bias)
    small = (q + 2 * kv if qkv_bias else 0) + (hidden if bias else 0)
    if family.qk_norm:
        small += 2 * sizes.head_dim if family.qk_norm == "head" else q + kv
    return hidden * (q + 2 * kv) + q * hidden, small


def _mlp(config: Mapping[str, Any], sizes: Sizes, width: int) -> tuple[int, int]:
    family, hidden = sizes.family, sizes.hidden
    bias = read_flag(config, family.mlp_bias_key or family.bias_key, family.bias)
    up = 2 * width if family.gated else width
    return (3 if family.gated else 2) * hidden * width, (up + hidden if bias else 0)


def _sparse_layers(config: Mapping[str, Any], layers: int) -> int:
    step = _number(config, "decoder_sparse_step") or 1
    plain = config.get("mlp_only_layers")
    dense = set(plain) if isinstance(plain, list | tuple) else set()
    return sum(1 for i in range(layers) if i not in dense and (i + 1) % step == 0)


def _number(config: Mapping[str, Any], key: str, *, least: int = 1) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    return check_integer(f"{key} of the model config", value, least=least)


def _size(config: Mapping[str, Any], name: str, *, least: int = 1) -> int | None:
    numbers = (_number(config, key, least=least) for key in _ALIASES[name])
    return next((value for value in numbers if value is not None), None)


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
