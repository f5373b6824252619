"""What layers keep and compute, run on fake tensors, against real runs of the same models."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tuner.search_spaces import built_model
from tuner.search_spaces.library_count import facts_in_library

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = 512
#: Sizes of the small models, by the keys that configurations have.
SMALL = {
    **{"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "vocab_size": 512, "head_dim": 32, "num_experts": 8},
    **{"num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_k": 2},
    **{"moe_intermediate_size": 128, "q_lora_rank": 96, "kv_lora_rank": 64, "v_head_dim": 32},
    **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 0, "n_shared_experts": 1, "moe_num_experts": 8},
    **{"query_pre_attn_scalar": 32, "max_position_embeddings": 512, "sliding_window": 4096},
    **{"moe_num_shared_experts": 1, "qk_head_dim": 48, "attention_dropout": 0.0},
}
#: Keys whose values are of the default number of layers, or of tokens that the small table lacks.
LEFT_OUT = ("layer_types", "mlp_layer_types", "per_layer_config", "moe_layer_start_index")


def small_config(family: str, layers: int = 4) -> dict[str, Any]:
    default = transformers.CONFIG_MAPPING[family]().to_dict()
    kept = {k: v for k, v in default.items() if k not in LEFT_OUT and not k.endswith("_token_id")}
    small = {key: value for key, value in SMALL.items() if key in kept}
    names = {"model_type": family, "num_hidden_layers": layers, "pad_token_id": None}
    return json.loads(json.dumps({**kept, **small, **names}))


def counted(family: str, **changes: Any) -> dict[str, Any]:
    return built_model.count({**small_config(family), **changes})


def measured(family: str) -> tuple[float, float]:
    """Return (bytes, FLOPs) of one block and token: models of eight layers less those of four."""
    few, many = (forward(family, layers) for layers in (4, 8))
    blocks = 4 * TOKENS
    return (many[0] - few[0]) / blocks, (many[1] - few[1]) / blocks


def forward(family: str, layers: int) -> tuple[int, int]:
    """Run a model forward with real weights and tokens; return what autograd keeps, and FLOPs."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    config = transformers.CONFIG_MAPPING[family].from_dict(small_config(family, layers))
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model.train()
    parameters = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = tensor  # which holds its address
        return tensor

    tokens = torch.randint(0, 500, (1, TOKENS))
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with FlopCounterMode(display=False, custom_mapping=uncounted()) as counter, hooks:
        model(input_ids=tokens, use_cache=False)
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    return size, counter.get_total_flops()


def uncounted() -> dict[Any, Callable[..., int]]:
    """Operators that torch's counter leaves out: fused attention on cores, products of experts."""
    import torch
    from torch.utils.flop_counter import sdpa_flop_count

    def grouped(rows: Any, matrices: Any, *_: Any, **__: Any) -> int:
        return 2 * int(rows[0]) * int(rows[1]) * int(matrices[-1])

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    aten = torch.ops.aten
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    return {flash: attention, aten._grouped_mm: grouped}


@pytest.mark.parametrize("family", ["gemma3_text", "cohere2", "granitemoe"])
def test_a_block_keeps_and_computes_what_a_real_one_does(family: str) -> None:
    kinds = counted(family)["kinds"]
    layers = sum(kind["layers"] for kind in kinds)

    def mean(name: str) -> float:
        return sum(kind["layers"] * kind["runs"]["2"][name] for kind in kinds) / layers

    kept, flops = measured(family)
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
