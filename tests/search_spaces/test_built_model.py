"""Sizes of models as transformers builds them, and doubts where no formula describes them."""

import json

import pytest

from benchmarks import counted_models
from tuner.search_spaces import built_model, library_count
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.search_spaces.library_count import facts_in_library
from tuner.search_spaces.library_count import run_program as run_program_alone
from tuner.search_spaces.model_facts import ModelFacts, facts_of
from tuner.search_spaces.model_reading import is_plain

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


def test_a_plain_decoder_is_counted_as_by_its_formula(answers):
    found = facts_of_answer(answers, "llama")
    expected = vars(ModelFacts.from_config(ADVERSARIES["llama"]))
    assert {name: expected[name] for name in found} == found


def test_a_shared_expert_is_described(answers):
    found = facts_of_answer(answers, "shared expert")
    assert found["shared"] == 36
    assert not found["doubts"]
    one, shared = 3 * 64 * 24, 3 * 64 * 36
    assert found["expert_parameters"] == 4 * 8 * one
    assert found["parameters"] - found["active_parameters"] == 4 * 6 * one
    block = 64 * (2 * 64 + 2 * 32) + 64 * 8 + 2 * one + shared + 64  # and the gate of the shared
    assert found["matmul_parameters"] == 4 * block + 101 * 64
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
    with pytest.raises(InputError, match="cannot build the bloom model of this config"):
        facts_of_answer(answers, "undivided")


@pytest.mark.parametrize(
    "parts",
    [
        {"model_type": "gpt2", **CROSSED},
        {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen3", **SMALL, "attention_bias": True},
    ],
)
def test_a_plain_decoder_with_more_parts_is_built(parts):
    pytest.importorskip("transformers")
    assert ModelFacts.from_config(parts).parameters == built_parameters(parts)
    plain = {key: value for key, value in parts.items() if value is not True}
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


def test_without_transformers_only_plain_and_included_models_have_sizes(monkeypatch):
    monkeypatch.setattr(library_count, "is_installed", lambda: False)
    for config in (GEMMA3, {"model_type": "llama", **SMALL, "mlp_bias": True}):
        with pytest.raises(InputError, match="pip install torch transformers"):
            ModelFacts.from_config(config)
    assert not ModelFacts.from_config({"model_type": "llama", **SMALL}).doubts
    assert facts_of(load_job("olmoe-1b-7b")).experts == 64


def test_a_family_of_its_own_code_is_counted_as_the_class_that_it_names():
    """Kimi-K2 is built by DeepSeek-V3's class, and its model_type tells it apart."""
    pytest.importorskip("transformers")
    sizes = {**SMALL, **LATENT, **EXPERTS}
    named = {"architectures": ["DeepseekV3ForCausalLM"], "auto_map": {"AutoConfig": "c.Config"}}
    kimi = ModelFacts.from_config({**sizes, **named, "model_type": "kimi_k2"})
    same = ModelFacts.from_config({**sizes, "model_type": "deepseek_v3"})
    assert kimi.parameters == same.parameters
    assert kimi.active_parameters == same.active_parameters
    assert "is counted as DeepseekV3ForCausalLM, which its architectures name" in kimi.doubts[0]
    other = {**sizes, "model_type": "kimi_k2", "architectures": ["KimiForCausalLM"]}
    assert "has no model_type kimi_k2" in ModelFacts.from_config(other).doubts[0]
    for bent in (5, [], [None], [["x"]]):
        strange = {**SMALL, "model_type": "strange", "architectures": bent}
        assert "counted by the standard keys" in ModelFacts.from_config(strange).doubts[0]


def test_a_count_is_kept_until_the_model_or_a_release_is_another(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library_count, "_counted", library_count._counted.__wrapped__)
    asked = []

    def run_program(line):
        asked.append(json.loads(line))
        return {"failure": "unknown", "transformers": "1"}

    monkeypatch.setattr(library_count, "run_program", run_program)
    config = {"model_type": "strange", **SMALL}
    first = library_count.count_in_library(config)
    assert library_count.count_in_library({**config, "torch_dtype": "bfloat16"}) == first
    assert len(asked) == 1
    library_count.count_in_library({**config, "hidden_size": 65})
    assert len(asked) == 2
    monkeypatch.setattr(library_count.importlib.metadata, "version", lambda name: "0")
    library_count.count_in_library(config)
    assert len(asked) == 3
    for other in (tmp_path / "joulefront" / "counted_models").iterdir():
        other.write_text("{")
    assert library_count.count_in_library(config) == first
    assert len(asked) == 4


def test_a_model_that_cannot_be_built_is_tried_again_and_no_cache_is_needed(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(library_count, "_counted", library_count._counted.__wrapped__)
    answers = [{"failure": "failed", "why": "memory", "transformers": "1"}, {"kinds": []}]
    monkeypatch.setattr(library_count, "run_program", lambda line: answers.pop(0))
    assert "failure" in library_count.count_in_library({"model_type": "strange"})
    assert library_count.count_in_library({"model_type": "strange"}) == {"kinds": []}


@pytest.mark.parametrize(
    ("work", "wait_s", "said"),
    [
        pytest.param(
            "while True: pass", 60, "in 1 s of processor time; check its sizes", id="work"
        ),
        pytest.param("time.sleep(60)", 0.5, "this machine is very busy", id="no answer"),
        pytest.param("time.sleep(1.5)", 60, "", id="a busy machine"),
    ],
)
def test_what_ends_is_a_count_that_works_too_long_not_one_that_waits(
    monkeypatch, tmp_path, work, wait_s, said
):
    program = tmp_path / "program.py"
    program.write_text(
        f"""import sys, time
sys.path.insert(0, {str(library_count._PROGRAM.parent)!r})
import built_model
def answer(asked):
    {work}
    return asked
built_model.answer = answer
built_model.main()
"""
    )
    monkeypatch.setattr(library_count, "_PROGRAM", program)
    monkeypatch.setattr(library_count, "LIMIT_CPU_S", 1)
    monkeypatch.setattr(library_count, "WAIT_LIMIT_S", wait_s)
    if not said:
        assert run_program_alone('{"kinds": []}') == {"kinds": []}
        return
    with pytest.raises(InputError, match=said):
        run_program_alone("{}")


def test_the_counts_of_the_included_models_are_those_of_transformers():
    pytest.importorskip("transformers")
    kept = json.loads(counted_models.FILE.read_text())["models"]
    assert [*map(counted_models.compared, kept)] == [
        *map(counted_models.compared, counted_models.counted(here=True))
    ]


@pytest.mark.parametrize(
    "others",
    [
        pytest.param(12, marks=pytest.mark.slow),
        pytest.param(1, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_every_family_that_transformers_can_build_is_counted(others):
    """In CI the plain decoders, and every twelfth of the others."""
    from benchmarks.models import classes_of_families, compare_families

    pytest.importorskip("transformers")
    classes = classes_of_families()
    listed = [name for name in classes if is_plain({"model_type": name})]
    rest = [name for name in classes if name not in listed]
    chosen = [*listed, *rest[::others]]
    found = compare_families({name: classes[name] for name in chosen})
    assert len(found.counted) >= 0.85 * len(chosen)
    assert found.wrong == []
    assert found.not_counted == []
    assert found.silent == []
