"""What layers keep and compute, run on fake tensors, against real runs of the same models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.layers import measured, small_config
from tuner.search_spaces import built_model
from tuner.search_spaces.library_count import facts_in_library

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = 512


def counted(family: str, **changes: Any) -> dict[str, Any]:
    return built_model.count({**json.loads(small_config(family, 4)), **changes})


@pytest.mark.parametrize("family", ["gemma3_text", "cohere2", "granitemoe"])
def test_a_block_keeps_and_computes_what_a_real_one_does(family: str) -> None:
    kinds = counted(family)["kinds"]
    layers = sum(kind["layers"] for kind in kinds)

    def mean(name: str) -> float:
        return sum(kind["layers"] * kind["runs"]["2"][name] for kind in kinds) / layers

    kept, flops = measured(family, "bf16", False, None)
    assert mean("kept_bytes") == pytest.approx(kept, rel=0.01)
    assert mean("flops") + TOKENS * mean("attention_flops") == pytest.approx(flops, rel=1e-6)


def test_kinds_of_layers_are_run_each_and_weighted() -> None:
    dense, sparse = counted("glm4_moe", first_k_dense_replace=1)["kinds"]
    assert (dense["layers"], sparse["layers"]) == (1, 3)
    assert dense["runs"]["2"]["kept_bytes"] != sparse["runs"]["2"]["kept_bytes"]
    facts = facts_in_library("glm4_moe", counted("glm4_moe", first_k_dense_replace=1))
    each = [kind["runs"]["2"]["kept_bytes"] for kind in (dense, sparse)]
    assert facts["kept_16"] == pytest.approx((each[0] + 3 * each[1]) / 4)
    assert facts["doubts"] == ()


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gemma2", "no fused attention"),  # its scores are kept, which depends on the kernel
        ("jetmoe", "far off"),  # experts are called with as many tokens as chose them
        ("mamba2", "far off"),  # a recurrence runs by kernels of its own on a GPU
        ("qwen3_next", "linear_attention"),  # some layers of it
        ("falcon_h1", "far off"),  # recurrence and attention in one layer
    ],
)
def test_what_a_run_here_cannot_tell_of_a_gpu_stays_in_doubt(family: str, words: str) -> None:
    default = transformers.CONFIG_MAPPING[family]().to_dict()
    config = json.loads(json.dumps({**default, "model_type": family}))
    facts = facts_in_library(family, built_model.count(config))
    assert any(words in doubt for doubt in facts["doubts"])
    assert not facts.get("kept_16")


def test_a_run_leaves_transformers_as_it_was() -> None:
    from transformers import masking_utils

    before = masking_utils.find_packed_sequence_indices
    counted("gemma3_text")
    assert masking_utils.find_packed_sequence_indices is before
