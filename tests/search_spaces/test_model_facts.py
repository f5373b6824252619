"""Parameters and FLOPs from a Hugging Face configuration, against transformers and by hand."""

import sys

import pytest

from tuner.search_spaces import library_count
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.model_facts import (
    UNKNOWN_MODEL,
    ModelFacts,
    facts_of,
    model_state_parts,
)
from tuner.search_spaces.model_sizes import READER
from tuner.workload.scripts.script_job import ScriptJob

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "pad_token_id": 0,
}
GATED = {**SMALL, "intermediate_size": 100, "num_key_value_heads": 2}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 101}
EXACT = [
    ("gpt2", GPT2),
    ("gpt2", {**GPT2, "n_inner": 100, "n_positions": 33, "tie_word_embeddings": False}),
    ("opt", {**SMALL, "ffn_dim": 100, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    ("opt", {**SMALL, "ffn_dim": 100, "word_embed_proj_dim": 64, "enable_bias": False}),
    (
        "opt",
        {
            **SMALL,
            "ffn_dim": 100,
            "word_embed_proj_dim": 64,
            "layer_norm_elementwise_affine": False,
        },
    ),
    ("gpt_neox", {**SMALL, "intermediate_size": 100}),
    ("llama", {**GATED, "tie_word_embeddings": True}),
    ("llama", {**GATED, "attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("mistral", GATED),
    ("mixtral", {**GATED, "num_local_experts": 6}),
    ("mixtral", GATED),  # eight experts, which its file need not say
    ("qwen2", GATED),
    ("qwen3", {**GATED, "head_dim": 16}),
    ("qwen3", {**GATED, "attention_bias": True}),
    ("olmoe", {**GATED, "num_experts": 6, "num_experts_per_tok": 2}),
    ("olmo2", GATED),
    ("gemma", {**GATED, "head_dim": 16}),
    (
        "qwen2_moe",
        {
            **GATED,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 30,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 2,
        },
    ),
    (
        "qwen3_moe",
        {
            **GATED,
            "moe_intermediate_size": 20,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [0],
        },
    ),
]


@pytest.mark.parametrize(("model_type", "sizes"), EXACT)
def test_parameters_equal_those_of_the_model_transformers_builds(model_type, sizes):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[model_type](**sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    # From what the class fills in, and from what a config.json would hold alone.
    for given in (config.to_dict(), {"model_type": model_type, **sizes}):
        facts = ModelFacts.from_config(given)
        assert not facts.doubts
        assert facts.parameters == counted


@pytest.mark.parametrize(
    ("job", "parameters", "active"),
    [
        # The sizes that the models' authors publish: 331 M, 7.61 B, and 6.9 B of which 1.3 B.
        ("opt-350m", 331_196_416, 331_196_416),
        ("qwen2.5-7b", 7_615_616_512, 7_615_616_512),
        ("olmoe-1b-7b", 6_919_161_856, 1_282_017_280),
    ],
)
def test_shipped_models_have_their_published_sizes(job, parameters, active):
    facts = facts_of(load_job(job))
    assert facts.parameters == parameters
    assert facts.active_parameters == active


def gpt_job(*, hidden, layers, heads, vocab, sequence, batch):
    model = {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "vocab_size": vocab,
        "n_positions": sequence,
    }
    return TrainingJob("gpt", model, sequence_length=sequence, global_batch=batch, steps=1)


@pytest.mark.parametrize(("h", "n", "s", "b"), [(768, 12, 1024, 8), (4096, 32, 2048, 3)])
def test_flops_of_a_gpt_follow_megatron(h, n, s, b):
    """NeMo's calculate_performance.py: (24 B s h^2 + 4 B s^2 h) 3 L + 6 B s h V."""
    v = 50257
    job = gpt_job(hidden=h, layers=n, heads=h // 64, vocab=v, sequence=s, batch=b)
    expected = (24 * b * s * h**2 + 4 * b * s**2 * h) * 3 * n + 6 * b * s * h * v
    assert facts_of(job).flops(b, s) == pytest.approx(expected, rel=1e-12)


def test_flops_of_experts_count_only_those_visited():
    one, two = (
        ModelFacts.from_config(
            {"model_type": "mixtral", **GATED, "num_local_experts": 8, "num_experts_per_tok": k}
        )
        for k in (1, 2)
    )
    assert one.parameters == two.parameters
    # One expert more: 3 matrices of 64 x 100 in each of 3 layers, 6 FLOPs a parameter and token.
    assert two.flops(1, 10) - one.flops(1, 10) == pytest.approx(6 * 10 * 3 * 3 * 64 * 100)


def test_unknown_family_with_standard_keys_gets_an_answer_that_says_it_is_one():
    pytest.importorskip("transformers")
    facts = ModelFacts.from_config({"model_type": "somethingnew", "n_head": 4, **GATED})
    assert facts.doubts
    assert facts.parameters == ModelFacts.from_config({"model_type": "llama", **GATED}).parameters


def without(key):
    return {name: value for name, value in GATED.items() if name != key}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": True, **GATED}, ["model_type"]),
        ({"model_type": "llama", **without("hidden_size")}, ["hidden_size", "n_embd"]),
        ({"model_type": "llama", **without("num_hidden_layers")}, ["num_hidden_layers"]),
        ({"model_type": "llama", **without("intermediate_size")}, ["intermediate_size"]),
        ({"model_type": "llama", **without("vocab_size")}, ["vocab_size"]),
        ({"model_type": "llama", **GATED, "vocab_size": True}, ["vocab_size", "at least 1"]),
        ({"model_type": "llama", **GATED, "vocab_size": -3}, ["vocab_size", "-3"]),
        ({"model_type": "llama", **GATED, "vocab_size": "many"}, ["vocab_size", "many"]),
        ({"model_type": "llama", **GATED, "num_attention_heads": 5}, ["5", "divisor"]),
        ({"model_type": "llama", **GATED, "num_key_value_heads": 3}, ["3", "4 attention heads"]),
        ({"model_type": "llama", **GATED, "tie_word_embeddings": 1}, ["true or false"]),
        (
            {
                **{"model_type": "mixtral", **GATED, "num_local_experts": 4},
                "num_experts_per_tok": 8,
            },
            ["8", "4 experts"],
        ),
    ],
)
def test_bad_model_is_one_sentence(config, words):
    with pytest.raises(InputError) as error:
        ModelFacts.from_config(config)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama", **GATED, "num_hidden_layers": 10_001}, "at most 10,000"),
        ({"model_type": "gpt2", **GPT2, "n_layer": 10**9}, "at most 10,000"),
        ({"model_type": "qwen2", **GATED, "num_hidden_layers": 10**6}, "at most 10,000"),
        ({"model_type": "llama", **GATED, "vocab_size": 10**12}, "at most 100,000,000"),
        ({"model_type": "llama", **GATED, "hidden_size": 10**18}, "at most 1,000,000"),
        ({"model_type": "mixtral", **GATED, "num_local_experts": 10**7}, "at most 100,000"),
        ({"model_type": "whisper", "encoder_layers": 10**6}, "encoder_layers"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**6}}, "at most 10,000"),
    ],
)
def test_sizes_beyond_any_model_are_refused_before_they_are_counted(config, words, monkeypatch):
    monkeypatch.setattr(library_count, "run_program", None)
    with pytest.raises(InputError, match=words):
        ModelFacts.from_config(config)


def test_the_largest_sizes_are_described():
    config = {"model_type": "llama", **GATED, "num_hidden_layers": 10_000, "vocab_size": 10**8}
    assert ModelFacts.from_config(config).layers == 10_000


@pytest.mark.parametrize(
    ("precision", "stage", "replicas", "a_parameter"),
    [
        # ZeRO's figure 1 (7.5 B parameters, 64 ranks: 120, 31.4, 16.6 and 1.9 GB).
        ("bf16", 0, 64, 120 / 7.5),
        ("bf16", 1, 64, 31.4 / 7.5),
        ("bf16", 2, 64, 16.6 / 7.5),
        ("bf16", 3, 64, 1.9 / 7.5),
        ("fp32", 0, 1, 16),
        ("fp32", 3, 4, 4),
    ],
)
def test_model_states_follow_zero(precision, stage, replicas, a_parameter):
    found = sum(model_state_parts(1.0, stage, replicas, precision))
    assert found == pytest.approx(a_parameter, rel=0.02)


def test_without_what_reads_sizes_a_script_has_an_unknown_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = load_job("opt-350m")
    facts_of.cache_clear()
    monkeypatch.setitem(sys.modules, READER, None)
    script = ScriptJob("s", model={}, sequence_length=0, global_batch=0, steps=None)
    assert facts_of(script) is UNKNOWN_MODEL
    with pytest.raises(InputError, match="reading the sizes of a model needs a part of joulefront"):
        facts_of(job)
