"""What layers keep and compute: predicted, against real runs of whole models on cores.

Each family is one of transformers that no formula describes. Predicted is what the analytic models
say of a block (`AnalyticModel`, `ModelFacts.forward_flops`), from a run of its layers on fake
tensors. Measured is the difference between models of four and of eight layers that run forward with
real weights, tokens and torch's own attention: the bytes of the tensors that autograd keeps, by its
hooks, and the FLOPs of torch's counter. Nothing was fitted.
"""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.figures import Figure
from tuner.models.analytic.constants import constants_of
from tuner.models.analytic.model import AnalyticModel
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import LoRA, TrainingJob, load_job
from tuner.search_spaces.model_facts import facts_of

#: Families of each kind of block: norms around attention, soft caps, windows, one norm for both
#: halves, latent attention, experts of several kinds and widths, scaled residuals.
FAMILIES = (
    *("gemma2", "gemma3_text", "cohere", "cohere2", "olmo2", "olmo3", "granite", "glm4"),
    *("deepseek_v3", "glm4_moe", "granitemoe", "qwen3_moe", "gpt_oss", "ernie4_5_moe"),
)
#: Sizes of the small models, by the keys that configurations have.
_SMALL = {
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
_LEFT_OUT = ("layer_types", "mlp_layer_types", "per_layer_config", "moe_layer_start_index")
_LENGTH = 512
_DEPTHS = (4, 8)


@dataclass(frozen=True)
class Row:
    """Predicted and measured cost of one block for one token."""

    name: str
    predicted_bytes: float
    measured_bytes: float
    predicted_flops: float
    measured_flops: float

    @property
    def bytes_error(self) -> float:
        """Relative error of the bytes that are kept."""
        return abs(self.predicted_bytes / self.measured_bytes - 1)

    @property
    def flops_error(self) -> float:
        """Relative error of the FLOPs of the forward pass."""
        return abs(self.predicted_flops / self.measured_flops - 1)


@cache
def small_config(family: str, layers: int) -> str:
    """Return a small configuration of a family as JSON."""
    import transformers

    default = transformers.CONFIG_MAPPING[family]().to_dict()
    kept = {k: v for k, v in default.items() if k not in _LEFT_OUT and not k.endswith("_token_id")}
    small = {key: value for key, value in _SMALL.items() if key in kept}
    names = {"model_type": family, "num_hidden_layers": layers, "pad_token_id": None}
    return json.dumps({**kept, **small, **names})


def job_of(family: str, layers: int, precision: str, lora: LoRA | None) -> TrainingJob:
    """Return the job that trains a small model."""
    config = json.loads(small_config(family, layers))
    base = load_job("tiny-gpt")
    changes: dict[str, Any] = {"model": config, "sequence_length": _LENGTH, "global_batch": 1}
    return replace(base, precision=precision, lora=lora, **changes)


def predicted(
    family: str, precision: str, checkpointed: bool, lora: LoRA | None
) -> tuple[float, float]:
    """Return (bytes, FLOPs) of one block and token by the analytic models."""
    cluster = load_cluster("a100-8")
    constants = replace(constants_of(cluster.device), memory_overhead=0.0)
    configuration = Configuration.of(
        data_parallel=1,
        micro_batch=1,
        activation_checkpointing="full" if checkpointed else "none",
    )
    costs = []
    for layers in _DEPTHS:
        job = job_of(family, layers, precision, lora)
        memory = AnalyticModel(job, cluster, constants=constants).breakdown(configuration).memory
        costs.append((memory["activations"], facts_of(job).forward_flops(1, _LENGTH)))
    few, many = costs
    blocks = (_DEPTHS[1] - _DEPTHS[0]) * _LENGTH
    return (many[0] - few[0]) / blocks, (many[1] - few[1]) / blocks


def measured(
    family: str, precision: str, checkpointed: bool, lora: LoRA | None
) -> tuple[float, float]:
    """Return (bytes, FLOPs) of one block and token by real runs."""
    costs = [_run(family, layers, precision, checkpointed, lora) for layers in _DEPTHS]
    few, many = costs
    blocks = (_DEPTHS[1] - _DEPTHS[0]) * _LENGTH
    return (many[0] - few[0]) / blocks, (many[1] - few[1]) / blocks


def _run(
    family: str, layers: int, precision: str, checkpointed: bool, lora: LoRA | None
) -> tuple[int, int]:
    import torch
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    config = transformers.CONFIG_MAPPING[family].from_dict(json.loads(small_config(family, layers)))
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    model = _fused(transformers.AutoModelForCausalLM, config, dtype)
    if lora is not None:
        import peft

        names = ["q_proj", "k_proj", "v_proj", "o_proj"]
        adapted = peft.LoraConfig(r=lora.rank, target_modules=names, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapted).to(dtype)
        model.enable_input_require_grads()
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parameters = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = tensor  # which holds its address
        return tensor

    tokens = torch.randint(0, 500, (1, _LENGTH))
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with FlopCounterMode(display=False, custom_mapping=_uncounted()) as counter, hooks:
        model(input_ids=tokens, use_cache=False)
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    return size, counter.get_total_flops()


def _fused(auto: Any, config: Any, dtype: Any) -> Any:
    """Build a model with torch's fused attention; if its class refuses that, with plain one."""
    try:
        return auto.from_config(config, dtype=dtype, attn_implementation="sdpa")
    except ValueError:
        return auto.from_config(config, dtype=dtype, attn_implementation="eager")


def _uncounted() -> Mapping[Any, Any]:
    # Operators that torch's counter leaves out: fused attention on cores, products of experts.
    import torch
    from torch.utils.flop_counter import sdpa_flop_count

    def grouped(rows: Any, matrices: Any, *_: Any, **__: Any) -> int:
        return 2 * int(rows[0]) * int(rows[1]) * int(matrices[-1])

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    aten = torch.ops.aten
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    return {flash: attention, aten._grouped_mm: grouped}


def rows() -> Iterator[Row]:
    """Yield the comparison of each family: plain, with checkpoints, in fp32, with adapters."""
    cases: list[tuple[str, str, bool, LoRA | None]] = [
        ("", "bf16", False, None),
        ("checkpointed", "bf16", True, None),
        ("fp32", "fp32", False, None),
        ("LoRA", "bf16", False, LoRA(8, targets="attention")),
    ]
    for family in FAMILIES:
        for name, *case in cases:
            job = job_of(family, _DEPTHS[0], case[0], case[2])  # type: ignore[arg-type]
            if facts_of(job).doubts:
                print(f"  {family} {name}: doubted, {facts_of(job).doubts[0]}")
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                said, done = predicted(family, *case), measured(family, *case)  # type: ignore[arg-type]
            row = Row(f"{family} {name}".strip(), said[0], done[0], said[1], done[1])
            print(
                f"  {row.name:26} {row.predicted_bytes:9.0f} B predicted, "
                f"{row.measured_bytes:9.0f} B kept; {row.predicted_flops:.4g} and "
                f"{row.measured_flops:.4g} FLOPs",
                flush=True,
            )
            yield row


def figures() -> list[Figure]:
    """Compare every family and return the figures."""
    found = list(rows())
    errors = [100 * row.bytes_error for row in found]
    return [
        Figure("saved_bytes_rows", len(found), "count"),
        Figure("saved_bytes_error_median", statistics.median(errors), "%"),
        Figure("saved_bytes_error_worst", max(errors), "%"),
        Figure("flops_error", max(100 * row.flops_error for row in found), "%"),
    ]
