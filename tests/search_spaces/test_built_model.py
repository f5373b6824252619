"""Sizes of models as transformers builds them, and doubts where no formula describes them."""

import pytest

from tuner.search_spaces import built_model, library_count
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.library_count import facts_in_library
from tuner.search_spaces.model_facts import ModelFacts
from tuner.search_spaces.parameter_count import is_listed

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 100,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
    **{"v_head_dim": 16, "num_key_value_heads": 4, "head_dim": 8},
}
EXPERTS = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
}
MAMBA = {
    **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2},
    **{"expand": 2, "conv_kernel": 4, "hybrid_override_pattern": "M-M*"},
}
IMAGES = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14, "intermediate_size": 48},
}
GEMMA3 = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {**SMALL, "model_type": "gemma3_text"},
    "vision_config": {**IMAGES, "model_type": "siglip_vision_model"},
}
#: Small configurations of a dozen families: dense, experts, latent attention, hybrids, encoders.
CONFIGS = [
    {"model_type": "phi3", **SMALL},
    {"model_type": "gemma2", **SMALL},
    {"model_type": "gemma3_text", **SMALL},
    {"model_type": "granite", **SMALL},
    {"model_type": "starcoder2", **SMALL},
    {"model_type": "bloom", **SMALL, "num_key_value_heads": 4, "intermediate_size": 256},
    {"model_type": "gpt_oss", **SMALL, "num_local_experts": 8, "num_experts_per_tok": 2},
    {"model_type": "deepseek_v3", **SMALL, **LATENT, **EXPERTS},
    {"model_type": "nemotron_h", **SMALL, **MAMBA},
    {"model_type": "mamba2", **SMALL, "num_heads": 8, "head_dim": 16, "n_groups": 2},
    {
        "model_type": "zamba2",
        **SMALL,
        "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid"] * 2,
    },
    {
        **{"model_type": "qwen3_next", **SMALL, "num_experts": 8, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 20, "shared_expert_intermediate_size": 20},
    },
    GEMMA3,
]
CROSSED = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 101, "add_cross_attention": True}
#: Configurations on which a simpler rule would be wrong, by what they are.
ADVERSARIES = {
    # Two tables that are each larger than a block.
    "llama": {**SMALL, "model_type": "llama", "tie_word_embeddings": False, "vocab_size": 5000},
    "small encoder": {**GEMMA3, "text_config": {**GEMMA3["text_config"], "vocab_size": 500_000}},
    "differential": {"model_type": "diffllama", **SMALL},
    "foreign class": {
        **{"model_type": "granite", **SMALL},
        "architectures": ["BertForMaskedLM", "os.systemFor", 3],
    },
    "foreign key": {"model_type": "bloom", **SMALL, "num_key_value_heads": 2},
    "shared expert": {
        **{"model_type": "qwen2_moe", **SMALL, "num_experts": 8, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 24, "shared_expert_intermediate_size": 36},
        "decoder_sparse_step": 1,
    },
    "shared expert and latent attention": {
        "model_type": "deepseek_v3",
        **SMALL,
        **LATENT,
        **EXPERTS,
    },
    "undivided": {"model_type": "bloom", **SMALL, "num_attention_heads": 7, "n_head": 7},
}


@pytest.fixture(scope="module")
def answers():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    configs = {**{c["model_type"]: c for c in CONFIGS}, **ADVERSARIES}
    return {name: built_model.count(config) for name, config in configs.items()}


def facts_of_answer(answers, name):
    """Return the fields of `ModelFacts` of one of these configurations."""
    return facts_in_library(ADVERSARIES[name]["model_type"], answers[name])


def built_parameters(config):
    """Return the parameters of the model that transformers' auto classes build in this process."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    read = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    nested = "vision_config" in config
    auto = transformers.AutoModelForImageTextToText if nested else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(read)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("config", CONFIGS, ids=[c["model_type"] for c in CONFIGS])
def test_parameters_equal_those_of_the_model_transformers_builds(config, answers):
    answer = answers[config["model_type"]]
    facts = facts_in_library(config["model_type"], answer)
    assert facts["parameters"] == built_parameters(config)
    assert facts["layers"] == SMALL["num_hidden_layers"]
    assert facts["block_parameters"] < facts["parameters"]
    assert facts["active_parameters"] <= facts["parameters"]


def test_experts_are_counted_apart_and_a_token_visits_a_few(answers):
    answer = answers["deepseek_v3"]
    expert, sparse = 3 * 64 * 20, 3  # the first layer is dense
    assert answer["expert_parameters"] == sparse * 8 * expert
    assert answer["parameters"] - answer["active_parameters"] == sparse * 6 * expert
    attention = 64 * 24 + 24 * 4 * 24 + 64 * (16 + 8) + 16 * 4 * (16 + 16) + 4 * 16 * 64
    router_and_shared = 64 * 8 + expert
    layers = 4 * attention + 3 * 64 * 100 + sparse * (router_and_shared + 2 * expert)
    assert answer["matmul_parameters"] == layers + 101 * 64


def test_a_block_that_several_layers_share_is_stored_once_and_computed_each_time(answers):
    kinds = answers["zamba2"]["kinds"]
    in_layers = sum(kind["layers"] * kind["parameters"] for kind in kinds)
    assert answers["zamba2"]["block_parameters"] < in_layers


def test_kinds_of_layers_are_told_apart(answers):
    kinds = answers["nemotron_h"]["kinds"]
    assert sorted((kind["layers"], kind["attends"]) for kind in kinds) == [
        *((1, False), (1, True), (2, False)),
    ]
    facts = facts_in_library("nemotron_h", answers["nemotron_h"])
    assert facts["attending"] == 0.25


#: Families whose layers run on fake tensors; gemma2 and bloom have no fused attention.
PLAIN = ("phi3", "gemma3_text", "granite", "starcoder2")


@pytest.mark.parametrize("model_type", [c["model_type"] for c in CONFIGS])
def test_only_models_of_plain_blocks_are_free_of_doubt(model_type, answers):
    doubts = facts_in_library(model_type, answers[model_type])["doubts"]
    assert bool(doubts) == (model_type not in PLAIN)


def test_a_plain_model_is_counted_as_by_the_formulas(answers):
    found = facts_of_answer(answers, "llama")
    expected = vars(ModelFacts.from_config(ADVERSARIES["llama"]))
    different = {name for name, value in found.items() if value != expected[name]}
    assert different <= {"family", "kept_16", "kept_32"}
    assert found["family"].gated


def test_a_shared_expert_is_described(answers):
    found = facts_of_answer(answers, "shared expert")
    expected = vars(ModelFacts.from_config(ADVERSARIES["shared expert"]))
    assert found["shared"] == expected["shared"] == 36
    assert not found["doubts"]
    for name in ("parameters", "matmul_parameters", "active_parameters", "expert_parameters"):
        assert found[name] == expected[name]
    latent = facts_of_answer(answers, "shared expert and latent attention")
    assert latent["shared"] == 20


def test_an_encoder_of_a_small_share_is_doubted(answers):
    """A rule by its share of the parameters would overlook it."""
    facts = facts_of_answer(answers, "small encoder")
    outside = facts["parameters"] - facts["block_parameters"] - facts["head_parameters"]
    assert 0 < outside < 0.01 * facts["parameters"]
    assert "outside the text model's layers" in facts["doubts"][0]


def test_blocks_of_the_usual_matrices_that_attend_otherwise_are_run(answers):
    """Differential attention has a plain block's matrices, and twice its scores."""
    plain, differential = (facts_of_answer(answers, name) for name in ("llama", "differential"))
    assert not differential["doubts"]
    assert differential["head_dim"] == 2 * plain["head_dim"]


def test_a_key_that_the_family_does_not_read_makes_a_doubt_and_no_error_of_the_count(answers):
    facts = facts_of_answer(answers, "foreign key")
    assert facts["parameters"] == answers["bloom"]["parameters"]
    assert facts["doubts"]


def test_a_class_that_does_not_belong_to_the_configuration_is_not_built(answers):
    assert answers["foreign class"] == answers["granite"]


def test_sizes_that_do_not_divide_are_one_sentence(answers):
    with pytest.raises(InputError, match="cannot build the bloom model of this config") as caught:
        facts_of_answer(answers, "undivided")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_listed_family_with_layers_that_no_formula_counts_is_built():
    pytest.importorskip("transformers")
    crossed = {"model_type": "gpt2", **CROSSED}
    plain = {**crossed, "add_cross_attention": False}
    assert ModelFacts.from_config(crossed).parameters == built_parameters(crossed)
    assert ModelFacts.from_config(plain).parameters == built_parameters(plain)


@pytest.mark.slow
def test_code_of_a_models_folder_never_runs(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    code = f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Config: ...\nclass Model: ...\n"
    (tmp_path / "strange.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    remote = {"AutoConfig": "strange.Config", "AutoModelForCausalLM": "strange.Model"}
    unknown = {**SMALL, "model_type": "strange", "auto_map": remote, "_name_or_path": "."}
    facts = ModelFacts.from_config(unknown)
    assert "never run" in facts.doubts[0]
    assert "strange" in facts.doubts[0]
    known = {**SMALL, "model_type": "granite", "auto_map": remote, "_name_or_path": "."}
    assert not ModelFacts.from_config(known).doubts
    assert not (tmp_path / "ran").exists()


def test_without_transformers_other_families_are_doubted(monkeypatch):
    monkeypatch.setattr(library_count, "is_installed", lambda: False)
    assert "install torch and transformers" in ModelFacts.from_config(GEMMA3).doubts[0]
    assert not ModelFacts.from_config({"model_type": "llama", **SMALL}).doubts
    bare = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}
    with pytest.raises(InputError, match="does not give hidden_size"):
        ModelFacts.from_config(bare)


@pytest.mark.parametrize(
    "others",
    [
        pytest.param(12, marks=pytest.mark.slow),
        pytest.param(1, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_every_family_that_transformers_can_build_is_counted(others):
    """In CI each that the formulas describe, and every twelfth of the others."""
    from benchmarks.models import classes_of_families, compare_families

    pytest.importorskip("transformers")
    classes = classes_of_families()
    listed = [name for name in classes if is_listed({}, name)]
    rest = [name for name in classes if name not in listed]
    chosen = [*listed, *rest[::others]]
    found = compare_families({name: classes[name] for name in chosen})
    assert len(found.counted) >= 0.85 * len(chosen)
    assert found.wrong == []
    assert found.not_counted == []
    assert found.silent == []
