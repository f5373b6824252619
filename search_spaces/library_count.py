"""Sizes of a model as transformers builds it, for families that no formula of ours is exact for.

The model is built without weights in an interpreter of its own (`built_model`), by the class that
the installed transformers has for the configuration. What the formulas of `tuner.models.analytic`
do not describe is returned as doubts, in sentences.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.parameter_count import Family

_PROGRAM = Path(__file__).with_name("built_model.py")
#: Limit of the time that building a model may take.
LIMIT_S = 120
#: Types of attention layers whose parameters and activations are those of full attention.
_ATTENTION = ("", "full_attention", "sliding_attention", "chunked_attention")
#: Largest share of a block's products by which it may differ from a plain transformer block's.
_SAME = 0.001
#: Share of the parameters up to which those outside blocks and tables belong to norms and the head.
_SMALL = 0.01


def is_installed() -> bool:
    """Return True if this Python has torch and transformers."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def count_in_library(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cached result of `built_model.count` for a configuration.

    Raises:
        InputError: the configuration cannot be written as JSON, or the model takes too long.
    """
    try:
        return dict(_counted(json.dumps(config, sort_keys=True)))
    except (TypeError, ValueError) as error:
        raise InputError(f"the model config is not JSON: {error}") from error


@lru_cache(maxsize=64)
def _counted(line: str) -> dict[str, Any]:
    command = [sys.executable, "-P", str(_PROGRAM)]
    try:
        done = subprocess.run(
            command, input=line + "\n", capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"transformers did not build the model of this config in {LIMIT_S} s; check its sizes"
        ) from error
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError) as error:
        stderr = (getattr(error, "stderr", None) or str(error)).strip() or repr(error)
        return {"failure": "failed", "why": stderr.splitlines()[-1][:300], "transformers": ""}


def facts_in_library(model_type: str, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ModelFacts` that an answer of `built_model.count` gives.

    Raises:
        InputError: transformers could not build the model, or it has no layers.
    """
    library = f"transformers {report['transformers']}".strip()
    if "failure" in report:
        raise InputError(
            f"{library} cannot build the {model_type} model of this config: {report['why']}; "
            "correct the config, or install what is missing"
        )
    if not report["layers"]:
        raise InputError(
            f"no layers were found in {report['class']}, which {library} builds of this config"
        )
    given = report["sizes"]
    heads = given["heads"] or 1
    hidden = given["hidden"] or 1
    experts = given["experts"] if report["expert_parameters"] else 0
    dense = given["dense"] or 4 * hidden
    sizes: dict[str, Any] = {
        "layers": report["layers"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": given["kv_heads"] or heads,
        "head_dim": given["head_dim"] or max(1, hidden // heads),
        "vocab": given["vocab"] or 1,
        "dense": dense,
        "expert": (given["expert"] or dense) if experts else dense,
        "experts": experts or 0,
        "experts_per_token": min(given["experts_per_token"] or 1, experts) if experts else 0,
        "positions": given["positions"],
        "tied": report["tied"],
    }
    gated, unlike = _plain_blocks(sizes, report["kinds"])
    ran = _layers_run(report, sizes)
    if ran:
        unlike = ()
    elif not unlike:
        unlike = (_doubt_on_kept(report),)
    visited = max((kind["shared"] for kind in report["kinds"]), default=0)
    attending = sum(kind["layers"] for kind in report["kinds"] if kind["attends"])
    counts = ("parameters", "active_parameters", "matmul_parameters", "head_parameters")
    blocks = ("block_parameters", "expert_parameters", "largest_layer")
    return {
        **sizes,
        **{name: report[name] for name in (*counts, *blocks)},
        **ran,
        "model_type": model_type,
        "family": Family(gated=gated, learned_positions=report["learned_positions"]),
        "exact": True,
        "attending": attending / report["layers"],
        "shared": visited // ((3 if gated else 2) * hidden),
        "doubts": (*unlike, *_other_doubts(sizes, report)),
    }


def _plain_blocks(
    sizes: Mapping[str, Any], kinds: list[Mapping[str, Any]]
) -> tuple[bool, tuple[str, ...]]:
    """Return if the blocks' MLPs have gates, and a doubt if a kind is not a plain block."""
    every = [_gates(sizes, kind) for kind in kinds]
    common = set.intersection(*every)
    gated = 3 in common or not common
    layers = sum(kind["layers"] for kind in kinds)
    unlike: dict[str, int] = {}
    for kind, gates in zip(kinds, every, strict=True):
        if (3 if gated else 2) not in gates:
            name = f"{kind['class']} {kind['type']}".strip()
            unlike[name] = unlike.get(name, 0) + kind["layers"]
    if not unlike:
        return gated, ()
    named = ", ".join(f"{number} {name}" for name, number in unlike.items())
    return gated, (
        f"{sum(unlike.values())} of {layers} layers ({named}) are not those of a plain "
        "transformer, so that activations and step time, which are computed as if they were, may "
        "be far off; the parameters are counted in transformers' own model",
    )


def _layers_run(report: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return memory and FLOPs of the layers, run on fake tensors; empty if in doubt.

    A layer without a call of attention runs by operators of torch here and by kernels of its own on
    a GPU, which keep and compute something else.
    """
    kinds = report["kinds"]
    if not all(kind["runs"].get("2", {}).get("calls_of_attention") for kind in kinds):
        return {}
    layers = sum(kind["layers"] for kind in kinds)

    def mean(name: str, size: str = "2") -> float:
        if not all(size in kind["runs"] for kind in kinds):
            return 0.0
        return sum(kind["layers"] * kind["runs"][size][name] for kind in kinds) / layers

    return {
        "kept_16": mean("kept_bytes"),
        "kept_32": mean("kept_bytes", "4"),
        "matmul_parameters": round(layers * mean("flops") / 2) + report["head_parameters"],
        "head_dim": max(1, round(mean("attention_flops") / (4 * sizes["heads"]))),
    }


def _doubt_on_kept(report: Mapping[str, Any]) -> str:
    why = next((kind["why_not_run"] for kind in report["kinds"] if "why_not_run" in kind), "")
    return (
        f"what the layers of {report['class']} keep for the backward pass could not be counted"
        + (f" ({why})" if why else "")
        + "; activations are those of a plain transformer, and may be far off"
    )


def _gates(sizes: Mapping[str, Any], kind: Mapping[str, Any]) -> set[int]:
    """Return the numbers of an MLP's matrices with which a plain block has a kind's products."""
    if not kind["attends"] or kind["type"] not in _ATTENTION or kind["unusual"]:
        return set()
    hidden, width = sizes["hidden"], sizes["heads"] * sizes["head_dim"]
    attention = hidden * (2 * width + 2 * sizes["kv_heads"] * sizes["head_dim"]) + kind["shared"]
    experts = sizes["experts_per_token"] * sizes["expert"] * hidden
    found = set()
    for matrices in (2, 3):
        expected = [attention + matrices * sizes["dense"] * hidden]
        if experts:
            expected.append(attention + hidden * sizes["experts"] + matrices * experts)
        if any(abs(kind["matmul"] / each - 1) < _SAME for each in expected):
            found.add(matrices)
    return found


def _other_doubts(sizes: Mapping[str, Any], report: Mapping[str, Any]) -> list[str]:
    """Return doubts about the parts of a model beside the blocks of its text model."""
    doubts = []
    tables = (sizes["positions"] or 0) + 8 if report["learned_positions"] else 8
    other = report["other_parameters"]
    if report["is_encoder_decoder"]:
        doubts.append(
            "it has an encoder and a decoder, of which only the decoder's layers are computed; "
            "all parameters are counted"
        )
    elif other > tables * sizes["hidden"] and (
        report["is_nested"] or other > _SMALL * report["parameters"]
    ):
        doubts.append(
            f"{other / 1e9:.3g} billion parameters are outside the text model's layers (encoders "
            "of images or sound, projectors): they are counted, but the activations and the time "
            "of what they compute are left out"
        )
    if not report["head_parameters"]:
        doubts.append("no output projection was found, so that the memory of the logits is a guess")
    return doubts


def doubts_without_library(model_type: str) -> tuple[str, ...]:
    """Return the doubt on a count by standard keys where transformers is not installed."""
    return (
        f"the formulas are not exact for the family {model_type}, so that parameters, memory and "
        "time may be far off; install torch and transformers here, which count them",
    )


def doubts_of_unknown(config: Mapping[str, Any], model_type: str, version: str) -> tuple[str, ...]:
    """Return the doubt on a count by standard keys of a family that transformers does not have."""
    code = " (its own code, which auto_map names, is never run)" if "auto_map" in config else ""
    return (
        f"transformers {version} has no model_type {model_type}{code}, so that its parameters are "
        "counted by the standard keys and may be far off; install a release that has it",
    )
