"""Sizes of models, from their Hugging Face configurations.

Sizes and parameters of a plain decoder come from those that its configuration declares, those of
any other model from transformers (`tuner.search_spaces.library_count`); a model of video and text
is its language model and its encoder of frames. Tests compare parameters with the models that
transformers builds, and FLOPs with DeepSpeed's profiler and torch's own counter; all agree.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuner.search_spaces import library_count
from tuner.search_spaces.data_files import catalogue
from tuner.search_spaces.errors import InputError, InvalidValue, check_integer
from tuner.search_spaces.job import QUANTIZED, TARGETS, LoRA, TrainingJob
from tuner.search_spaces.model_facts import (
    LoRAFacts,
    ModelFacts,
    VisionFacts,
    facts_of,
    lightest_that_fits,
    untrainable,
    why_too_large,
)
from tuner.search_spaces.model_sizes import Sizes

# Sizes and parameters of a plain decoder, from the sizes that its configuration declares.
#
# A plain decoder is a stack of equal blocks of attention and an MLP between a table of tokens and
# an output projection. Its families, and the names that configurations have for one size
# (`hidden_size`, `n_embd`, `d_model`), are listed in `data/catalogue/language_models.toml`.


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


#: What the core asks for, by `tuner.search_spaces.model_sizes`.
__all__ = [
    "counts_to_keep",
    "facts_in",
    "facts_of",
    "lightest_that_fits",
    "lora_facts",
    "take_kept_counts",
    "untrainable",
    "why_too_large",
]

#: Families whose query, key and value projections are one linear layer.
_FUSED = ("gpt2", "gpt_neox")
#: Linear layers of a block with a gate, those of attention first.
_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_VISION_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("image_size", "patch_size"),
)


def facts_in(config: Mapping[str, Any]) -> ModelFacts:
    """Read a Hugging Face configuration.

    A plain decoder is described by its formula, any other model is built by transformers; one
    that transformers does not know is described by the standard keys, with a doubt.

    Raises:
        InputError: a size is missing or invalid, or the model has to be built by transformers
            and cannot be.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise InvalidValue("model_type of the model config", model_type, "a name such as llama")
    check_limits(config)
    if is_plain(config):
        return ModelFacts(**describe(config, model_type))
    encoder = _encoder_sizes(config) if model_type == "llava_onevision" else None
    report = library_count.count_in_library(config)
    if report.get("failure") == "unknown":
        doubts = library_count.doubts_of_unknown(config, model_type, report["transformers"])
        return ModelFacts(**describe(*_text_of(config, model_type)), doubts=doubts)
    counted_as = str(report.get("counted_as", model_type))
    facts = ModelFacts(**library_count.facts_in_library(counted_as, report))
    doubts = library_count.doubt_on_class(report, model_type)
    facts = replace(facts, model_type=model_type, doubts=(*doubts, *facts.doubts))
    if encoder is None:
        return facts
    vision = _vision_facts(encoder, report["encoder"])
    return replace(
        facts, vision=vision, largest_layer=max(facts.largest_layer, vision.largest_layer)
    )


def _text_of(config: Mapping[str, Any], model_type: str) -> tuple[Mapping[str, Any], str]:
    """Return the configuration of the text model, and its family, of one that may be nested."""
    text = config.get("text_config")
    if not isinstance(text, Mapping) or any(key in config for key in ("hidden_size", "n_embd")):
        return config, model_type
    tied = read_flag(config, "tie_word_embeddings", True)
    return {"tie_word_embeddings": tied, **text}, str(text.get("model_type", model_type))


def _encoder_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the encoder of frames in a multimodal configuration."""
    vision = config.get("vision_config")
    if not isinstance(config.get("text_config"), Mapping) or not isinstance(vision, Mapping):
        raise InputError("the llava_onevision model config lacks text_config or vision_config")
    kind = vision.get("model_type")
    if kind != "siglip_vision_model":
        raise InvalidValue(
            "vision_config.model_type of the model config", kind, "siglip_vision_model"
        )
    sizes = {}
    for name in _VISION_SIZES:
        if vision.get(name) is None:
            raise InputError(f"the vision_config of the model config does not give {name}")
        sizes[name] = check_integer(f"{name} of the vision_config", vision[name])
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if hidden % heads:
        legal = f"a divisor of the hidden size {hidden}"
        raise InvalidValue("num_attention_heads of the vision_config", heads, legal)
    return sizes


def _vision_facts(sizes: Mapping[str, int], counts: Mapping[str, int]) -> VisionFacts:
    """Return the facts of an encoder of these sizes, with the counts of its parameters."""
    side = sizes["image_size"] // sizes["patch_size"]
    return VisionFacts(
        layers=sizes["num_hidden_layers"],
        hidden=sizes["hidden_size"],
        heads=sizes["num_attention_heads"],
        intermediate=sizes["intermediate_size"],
        patches=side * side,
        tokens=math.ceil(side / 2) ** 2,
        extra_tokens=1,
        **counts,
    )


def lora_facts(lora: LoRA, config: Mapping[str, Any], sizes: ModelFacts) -> LoRAFacts:
    """Return the sizes of the adapters of a model.

    Raises:
        InputError: the model has to be built by transformers and cannot be, or has no such
            layers.
    """
    if _by_formula(lora, config, sizes):
        return _of_plain(lora, sizes)
    return _in_library(lora, config, sizes)


def _by_formula(lora: LoRA, config: Mapping[str, Any], sizes: ModelFacts) -> bool:
    """Return True if the adapters of a model need not be counted in transformers' own."""
    described = is_plain(config) or sizes.model_type in library_count.DESCRIBED
    if not described or sizes.vision is not None:
        return False
    usual = sizes.gated and sizes.model_type not in _FUSED
    named = bool(lora.names) and usual and {*lora.names} <= {*_LAYERS}
    if sizes.experts:
        return lora.targets == "attention" and lora.quantization == "none"
    return lora.targets in TARGETS or named


def _in_library(lora: LoRA, config: Mapping[str, Any], sizes: ModelFacts) -> LoRAFacts:
    report = library_count.adapters_in_library(config, lora)
    blocks, outside = report["adapted"]["blocks"], report["adapted"]["outside"]
    inputs, outputs = (blocks[name] // sizes.layers for name in ("inputs", "outputs"))
    equal = sizes.layers * lora.rank * (inputs + outputs)
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    alone = report["adapted"]["attention"]
    return LoRAFacts(
        rank=lora.rank,
        adapters=max(1, round(blocks["adapters"] / sizes.layers)),
        inputs=inputs,
        outputs=outputs,
        layers=sizes.layers,
        mlp=not alone,
        first=sizes.hidden * (q + 2 * kv),
        frozen_bytes=QUANTIZED[lora.quantization],
        linear=report["linear"],
        further=blocks["parameters"] + outside["parameters"] - equal,
        doubts=_doubts_on_adapters(lora, report),
    )


def _of_plain(lora: LoRA, sizes: ModelFacts) -> LoRAFacts:
    hidden, q = sizes.hidden, sizes.heads * sizes.head_dim
    kv = sizes.kv_heads * sizes.head_dim
    up = ("gate_proj", "up_proj") if sizes.gated else ("up_proj",)
    widths = {
        **{"q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv)},
        **{"o_proj": (q, hidden), **dict.fromkeys(up, (hidden, sizes.dense))},
        "down_proj": (sizes.dense, hidden),
    }
    if sizes.model_type in _FUSED:
        widths["q_proj"] = hidden, q + 2 * kv
        del widths["k_proj"], widths["v_proj"]
    attention = [name for name in widths if name in _LAYERS[:4]]
    named = lora.names or (attention if lora.targets == "attention" else widths)
    adapted = [name for name in widths if name in named]
    layers = [widths[name] for name in adapted]
    reads_input = sum(name in adapted for name in attention if name != "o_proj")
    return LoRAFacts(
        rank=lora.rank,
        adapters=len(layers),
        inputs=sum(n for n, _ in layers),
        outputs=sum(m for _, m in layers),
        layers=sizes.layers,
        mlp=not {*adapted} <= {*attention},
        first=hidden * (q + 2 * kv) + lora.rank * hidden * reads_input,
        frozen_bytes=QUANTIZED[lora.quantization],
        linear=sizes.matmul_parameters - sizes.head_parameters,
        further=sizes.layers * sum(m for _, m in layers) if lora.dora else 0,
    )


def _doubts_on_adapters(lora: LoRA, report: Mapping[str, Any]) -> tuple[str, ...]:
    """Return doubts on adapters that were counted in transformers' own model."""
    wide = not report["adapted"]["attention"] or lora.targets == "all-linear" or lora.names
    doubts = []
    if report["stacked_experts"] and wide and not report["by_peft"] and not lora.text_alone:
        doubts.append(
            "transformers stacks the experts in one parameter each, and what LoRA adds to those "
            "follows peft, which is not installed in this Python: it is left out (pip install peft)"
        )
    if lora.quantization != "none" and report["stacked_experts"]:
        doubts.append(
            "bitsandbytes quantizes linear layers, and transformers stacks the experts in one "
            "parameter each: they are counted in 16 bits"
        )
    return tuple(doubts)


def counts_to_keep(job: TrainingJob) -> Mapping[str, Mapping[str, str]]:
    """Return the counts by transformers that a run keeps of its model and its adapters, for
    machines without transformers; empty for any other job."""
    if not job.model:
        return {}
    kept: dict[str, Mapping[str, str]] = {}
    with contextlib.suppress(InputError):
        if not is_plain(job.model):
            kept["counted_model"] = library_count.count_to_keep(job.model)
        sizes = facts_in(job.model)
        if job.lora is not None and not _by_formula(job.lora, job.model, sizes):
            kept["counted_adapters"] = library_count.adapters_to_keep(job.model, job.lora)
    return {name: count for name, count in kept.items() if count}


def take_kept_counts(study: Mapping[str, object]) -> None:
    """Use the counts that a run's study keeps where transformers is not installed."""
    for name in ("counted_model", "counted_adapters"):
        library_count.take_kept_count(study.get(name))
