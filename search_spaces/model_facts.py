"""What a model's Hugging Face configuration says of its size and its arithmetic, without torch.

A `config.json` names the same thing differently from family to family (`hidden_size`, `n_embd`,
`d_model`); the aliases here read them all. Parameters are then counted tensor by tensor from what
tells the families apart (`_FAMILIES`): gates, biases, norms, positions, experts. A family that is
not listed still gets an answer from the standard keys, marked `exact = False`. A model of video
and text is its language model and what encodes the frames (`vision_facts`).

What `python -m benchmarks.flops` shows: all of it agrees with the models that transformers builds,
and the FLOPs with DeepSpeed's profiler and with torch's own counter.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from search_spaces.errors import InputError, InvalidValue
from search_spaces.job import Precision, TrainingJob
from search_spaces.vision_facts import VisionFacts

__all__ = ["UNKNOWN_MODEL", "ModelFacts", "facts_of", "flops_per_step", "model_state_bytes"]

_ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "vocab": ("vocab_size",),
    "head_dim": ("head_dim",),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_top_k", "num_experts_per_token"),
    "expert_intermediate": ("moe_intermediate_size",),
    "shared_intermediate": ("shared_expert_intermediate_size",),
}


@dataclass(frozen=True)
class _Family:
    """What tells one `model_type` from another where the parameters are counted.

    Attributes:
        gated: the MLP has a gate (three matrices, no bias by default) rather than two.
        bias: every linear layer of attention and MLP has a bias.
        qkv_bias: only the query, key and value projections have one.
        layer_norm: norms have weight and bias; otherwise a weight alone.
        norms: norms a layer.
        learned_positions: a table of positions, of `max_position_embeddings` + `extra_positions`.
        qk_norm: norms on queries and keys: "" none, "head" over one head, "all" over all heads.
        tied: `tie_word_embeddings` where the configuration does not say.
        kv_heads, head_dim, positions: the class's own default where the configuration is silent.
    """

    gated: bool = True
    bias: bool = False
    qkv_bias: bool = False
    layer_norm: bool = False
    norms: int = 2
    learned_positions: bool = False
    extra_positions: int = 0
    qk_norm: str = ""
    tied: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None
    positions: int | None = None


# Read from transformers' modelling code; tests/test_search_spaces_model.py compares each with the
# model that transformers builds. Defaults are those of the configuration classes.
_FAMILIES: Mapping[str, _Family] = {
    "gpt2": _Family(
        gated=False,
        bias=True,
        layer_norm=True,
        learned_positions=True,
        positions=1024,
        tied=True,
    ),
    "opt": _Family(
        gated=False,
        bias=True,
        layer_norm=True,
        learned_positions=True,
        positions=2048,
        extra_positions=2,
        tied=True,
    ),
    "gpt_neox": _Family(gated=False, bias=True, layer_norm=True),
    "llama": _Family(),
    "mistral": _Family(kv_heads=8),
    "mixtral": _Family(kv_heads=8),
    "qwen2": _Family(qkv_bias=True, kv_heads=32),
    "qwen2_vl_text": _Family(qkv_bias=True, kv_heads=8),
    "qwen2_moe": _Family(qkv_bias=True, kv_heads=16),
    "qwen3": _Family(qk_norm="head", kv_heads=32, head_dim=128),
    "qwen3_moe": _Family(qk_norm="head", kv_heads=4),
    "olmoe": _Family(qk_norm="all"),
    "olmo2": _Family(qk_norm="all"),
    "gemma": _Family(tied=True, kv_heads=16, head_dim=256),
}


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of one decoder-only language model, and of what encodes frames for it.

    Where there is an encoder, all but `parameters`, `active_parameters`, `largest_layer` and
    `vision` are the language model's alone.

    Attributes:
        model_type: the family, as the configuration names it.
        layers: transformer blocks.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of one head.
        intermediate: width of a dense MLP, or of one expert where there are experts.
        vocab: entries of the embedding table.
        positions: the longest sequence the configuration states; None where it states none.
        learned_positions: True where no sequence can be longer than `positions`.
        experts: experts a layer; 0 for a dense model.
        experts_per_token: experts that each token visits; 0 for a dense model.
        gated: the MLP multiplies by a gate (SwiGLU and its kin).
        tied: the output projection shares the embedding table.
        parameters: all parameters, each counted once.
        active_parameters: those that one token uses (all of them in a dense model).
        matmul_parameters: those of `active_parameters` that multiply each token: no embedding
            table, position table, bias or norm, but the output projection, shared or not.
        head_parameters: those of `matmul_parameters` that make the logits, and the projections of
            a table that is narrower than the model.
        block_parameters: those of all blocks together, every expert counted.
        expert_parameters: those of `block_parameters` that expert parallelism spreads.
        largest_layer: parameters of the largest block or table (what ZeRO-3 gathers at once).
        exact: the family is known, and the count equals that of transformers' own model.
        vision: the encoder of frames and its projector; None where there is none.
    """

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    positions: int | None
    learned_positions: bool
    experts: int
    experts_per_token: int
    gated: bool
    tied: bool
    parameters: int
    active_parameters: int
    matmul_parameters: int
    head_parameters: int
    block_parameters: int
    expert_parameters: int
    largest_layer: int
    exact: bool
    vision: VisionFacts | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelFacts:
        """Read a Hugging Face configuration.

        Raises:
            InputError: a size is missing or is not a positive integer; the sentence says which.
        """
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or not model_type:
            raise InvalidValue("model_type of the model config", model_type, "a name such as llama")
        if model_type == "llava_onevision":
            return _with_encoder(config)
        family = _FAMILIES.get(model_type)
        exact = family is not None
        if family is None:
            gate = str(config.get("hidden_act", "silu"))
            family = _Family(gated="silu" in gate or "glu" in gate)

        hidden = _required(config, "hidden", model_type)
        layers = _required(config, "layers", model_type)
        heads = _required(config, "heads", model_type)
        vocab = _required(config, "vocab", model_type)
        head_dim = _size(config, "head_dim") or family.head_dim
        if head_dim is None:
            if hidden % heads:
                raise InvalidValue(
                    f"num_attention_heads of the {model_type} config",
                    heads,
                    f"a divisor of the hidden size {hidden}",
                )
            head_dim = hidden // heads
        kv_heads = _size(config, "kv_heads") or family.kv_heads or heads
        if heads % kv_heads:
            raise InvalidValue(
                f"num_key_value_heads of the {model_type} config",
                kv_heads,
                f"a divisor of the {heads} attention heads",
            )
        experts = _size(config, "experts") or 0
        per_token = _size(config, "experts_per_token") or (min(2, experts) if experts else 0)
        if per_token > experts:
            raise InvalidValue(
                f"num_experts_per_tok of the {model_type} config",
                per_token,
                f"at most the {experts} experts",
            )
        dense = _size(config, "intermediate")
        if dense is None:
            if exact and family.gated:
                _required(config, "intermediate", model_type)  # raises: there is no usual width
            dense = 4 * hidden  # the width of GPT-2 where n_inner is null
        expert = (_size(config, "expert_intermediate") or dense) if experts else dense
        positions = _size(config, "positions") or family.positions
        tied = _flag(config, "tie_word_embeddings", family.tied)

        return cls(
            model_type=model_type,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=expert if experts else dense,
            vocab=vocab,
            positions=positions,
            learned_positions=family.learned_positions,
            experts=experts,
            experts_per_token=per_token,
            gated=family.gated,
            tied=tied,
            exact=exact,
            vision=None,
            **_count(
                config,
                family,
                model_type=model_type,
                hidden=hidden,
                layers=layers,
                q=heads * head_dim,
                kv=kv_heads * head_dim,
                head_dim=head_dim,
                vocab=vocab,
                dense=dense,
                expert=expert,
                experts=experts,
                per_token=per_token,
                positions=positions,
                tied=tied,
            ),
        )

    def flops(self, sequences: int, sequence_length: int, frames: int = 0) -> float:
        """FLOPs of forward and backward over `sequences` sequences, nothing recomputed.

        6 a parameter and token for the matrix products (2 forward, 4 backward: Kaplan et al. 2020,
        arXiv 2001.08361, section 2.1; Megatron-LM, arXiv 2104.04473, appendix) plus attention's own
        two products, 4 s (heads x head_dim) a token and layer forward, three times that in all. For
        a GPT whose MLP is 4 h wide that is Megatron's and NeMo's
        (24 B s h^2 + 4 B s^2 h) 3 L + 6 B s h V. The causal mask is not discounted, as there.
        Full recomputation adds one forward pass of the blocks: see `forward_flops`. The arithmetic
        between the products (norms, activations, softmax) is left out, as it is there.

        Args:
            sequences: how many.
            sequence_length: tokens of each, those of its video included.
            frames: video frames of each.
        """
        return 3.0 * self.forward_flops(sequences, sequence_length, frames)

    def forward_flops(self, sequences: int, sequence_length: int, frames: int = 0) -> float:
        """FLOPs of the forward pass alone, the output projection included."""
        tokens = float(sequences) * sequence_length
        attention = 4.0 * sequence_length * self.heads * self.head_dim * self.layers
        seen = self.vision.forward_flops(sequences * frames) if self.vision else 0.0
        return seen + tokens * (2.0 * self.matmul_parameters + attention)


def _with_encoder(config: Mapping[str, Any]) -> ModelFacts:
    """The facts of a language model that reads frames, too."""
    text = config.get("text_config")
    if not isinstance(text, Mapping) or not isinstance(config.get("vision_config"), Mapping):
        raise InputError("the llava_onevision model config lacks text_config or vision_config")
    tied = _flag(config, "tie_word_embeddings", False)
    language = ModelFacts.from_config({**text, "tie_word_embeddings": tied})
    vision = VisionFacts.from_config(config, language.hidden)
    return replace(
        language,
        model_type=str(config["model_type"]),
        parameters=language.parameters + vision.parameters,
        active_parameters=language.active_parameters + vision.parameters,
        largest_layer=max(language.largest_layer, vision.largest_layer),
        vision=vision,
    )


def _count(
    config: Mapping[str, Any],
    family: _Family,
    *,
    model_type: str,
    hidden: int,
    layers: int,
    q: int,
    kv: int,
    head_dim: int,
    vocab: int,
    dense: int,
    expert: int,
    experts: int,
    per_token: int,
    positions: int | None,
    tied: bool,
) -> dict[str, int]:
    """Parameters: all, those one token uses, those that multiply it, and the largest block's."""
    bias = family.bias
    if model_type == "opt":
        bias = _flag(config, "enable_bias", True)
    attention_bias = bias
    if model_type in ("llama", "olmoe", "olmo2", "qwen3", "qwen3_moe", "gemma", "gpt_neox"):
        attention_bias = _flag(config, "attention_bias", family.bias)
    qkv_bias = attention_bias or family.qkv_bias
    if model_type == "qwen2_moe":
        qkv_bias = _flag(config, "qkv_bias", True)
    mlp_bias = _flag(config, "mlp_bias", bias) if model_type == "llama" else bias

    def mlp(width: int) -> tuple[int, int]:
        """(matrices, biases) of one MLP."""
        matrices = (3 if family.gated else 2) * hidden * width
        up = 2 * width if family.gated else width
        return matrices, (up + hidden if mlp_bias else 0)

    attention = hidden * (q + 2 * kv) + q * hidden
    small = (q + 2 * kv if qkv_bias else 0) + (hidden if attention_bias else 0)
    if family.qk_norm:
        small += 2 * head_dim if family.qk_norm == "head" else q + kv
    norm = 2 * hidden if family.layer_norm else hidden
    affine = model_type != "opt" or _flag(config, "layer_norm_elementwise_affine", True)
    small += family.norms * norm if affine else 0

    dense_matrices, dense_small = mlp(dense)
    block_matrices = attention + dense_matrices
    block_small = small + dense_small
    total_blocks = layers * (block_matrices + block_small)
    active_blocks, matmul_blocks = total_blocks, layers * block_matrices
    largest = block_matrices + block_small
    expert_blocks = 0
    if experts:
        one_matrices, one_small = mlp(expert)
        router = hidden * experts
        shared = _size(config, "shared_intermediate") if model_type == "qwen2_moe" else None
        shared_all = 0 if shared is None else sum(mlp(shared)) + hidden  # and its own gate
        every = attention + small + router + shared_all
        sparse = _sparse_layers(config, layers) if model_type.endswith("_moe") else layers
        rest = (layers - sparse) * (block_matrices + block_small)
        expert_blocks = sparse * experts * (one_matrices + one_small)
        total_blocks = sparse * every + expert_blocks + rest
        active_blocks = sparse * (every + per_token * (one_matrices + one_small)) + rest
        matmul_blocks = (
            sparse * (attention + router + shared_all + per_token * one_matrices)
            + (layers - sparse) * block_matrices
        )
        largest = max(largest, every + experts * (one_matrices + one_small))

    # OPT-350m embeds into a narrower space and projects in and out of it.
    width = hidden
    projections = 0
    if model_type == "opt":
        width = _number(config, "word_embed_proj_dim") or hidden
        projections = 0 if width == hidden else 2 * hidden * width
    table = vocab * width
    head = 0 if tied else table
    place = (positions or 0) + family.extra_positions if family.learned_positions else 0
    final_norm = norm if affine else 0
    if model_type == "opt" and not _flag(config, "do_layer_norm_before", True):
        final_norm = 0
    outside = table + head + place * hidden + final_norm + projections
    return {
        "parameters": total_blocks + outside,
        "active_parameters": active_blocks + outside,
        "matmul_parameters": matmul_blocks + table + projections,
        "head_parameters": table + projections,
        "block_parameters": total_blocks,
        "expert_parameters": expert_blocks,
        "largest_layer": max(largest, table),
    }


def _sparse_layers(config: Mapping[str, Any], layers: int) -> int:
    """How many blocks of a Qwen MoE have experts (the others have one dense MLP)."""
    step = _number(config, "decoder_sparse_step") or 1
    plain = config.get("mlp_only_layers")
    dense = set(plain) if isinstance(plain, list | tuple) else set()
    return sum(1 for i in range(layers) if i not in dense and (i + 1) % step == 0)


#: No dimension of a model is larger; products of several must stay within a float.
LARGEST = 10**12


def _number(config: Mapping[str, Any], key: str) -> int | None:
    """A positive integer under this very key; None where it is absent or null."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidValue(f"{key} of the model config", value, "an integer of at least 1")
    if value > LARGEST:
        raise InvalidValue(f"{key} of the model config", "larger", f"at most {LARGEST:g}")
    return value


def _size(config: Mapping[str, Any], what: str) -> int | None:
    """A size under the first of its names that the configuration bears."""
    for key in _ALIASES[what]:
        value = _number(config, key)
        if value is not None:
            return value
    return None


def _required(config: Mapping[str, Any], what: str, model_type: str) -> int:
    value = _size(config, what)
    if value is None:
        names = " or ".join(_ALIASES[what])
        raise InputError(f"the {model_type} model config does not give {names}")
    return value


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidValue(f"{key} of the model config", value, "true or false")
    return value


#: A model of which nothing is known: no sizes, and as many layers as are asked for.
_NOTHING: Any = {item.name: 0 for item in fields(ModelFacts)} | {
    **{"model_type": "unknown", "layers": sys.maxsize, "positions": None},
    **{"learned_positions": False, "gated": False, "tied": False, "exact": False, "vision": None},
}
UNKNOWN_MODEL = ModelFacts(**_NOTHING)


@lru_cache(maxsize=64)
def facts_of(job: TrainingJob) -> ModelFacts:
    """The facts of a job's model, read once a job.

    Of a script whose model nobody told, `UNKNOWN_MODEL`: no rule on its sizes refuses anything.

    Raises:
        InputError: as `ModelFacts.from_config`.
    """
    if not job.model:
        return UNKNOWN_MODEL
    return ModelFacts.from_config(job.model)


def flops_per_step(job: TrainingJob) -> float:
    """FLOPs of one optimizer step over all ranks: forward and backward, nothing recomputed.

    The formula and its source: `ModelFacts.flops`. Fixed by the job alone, because the global batch
    is: no configuration changes it, only recomputation adds to it.
    """
    return facts_of(job).flops(job.global_batch, job.sequence_length, job.frames)


def model_state_bytes(
    parameters: float, zero_stage: int, replicas: int, precision: Precision = "bf16"
) -> float:
    """Bytes of parameters, gradients and Adam's states on one rank.

    ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 3 and figure 1) with K = 12: in mixed
    precision 2 + 2 bytes a parameter for weights and gradients and 12 for the fp32 copy and two
    moments; in fp32 4 + 4 + 8. Stage 1 shards the last part over the replicas, stage 2 the
    gradients too, stage 3 all. No activations, buffers or fragmentation.

    Args:
        parameters: those this rank's share of the model has before ZeRO shards them.
        zero_stage: 0 to 3.
        replicas: ranks that ZeRO shards over (data x sequence parallelism).
        precision: of the job.
    """
    weights, gradients, states = (4.0, 4.0, 8.0) if precision == "fp32" else (2.0, 2.0, 12.0)
    shards = [1 / replicas if zero_stage >= stage else 1.0 for stage in (3, 2, 1)]
    return parameters * (weights * shards[0] + gradients * shards[1] + states * shards[2])
