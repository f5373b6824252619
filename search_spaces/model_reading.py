"""Sizes of models, from their Hugging Face configurations.

Sizes and parameters of a plain decoder come from `tuner.search_spaces.plain_decoder`, those of any
other model from transformers (`tuner.search_spaces.library_count`); a model of video and text is
its language model and its encoder of frames. Tests compare parameters with the models that
transformers builds, and FLOPs with DeepSpeed's profiler and torch's own counter; all agree.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tuner.search_spaces import library_count
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
from tuner.search_spaces.plain_decoder import check_limits, describe, is_plain, read_flag

#: What the core asks for, by `tuner.search_spaces.model_sizes.SOCKET`.
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

PROTOCOL = 1
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
