"""The table `[lora]` of a job: what it adds to the model, and what it refuses."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tuner.models.analytic.model import AnalyticModel
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import LoRA, Program, TrainingJob, load_job
from tuner.search_spaces.model_facts import facts_of, job_state_bytes
from tuner.search_spaces.rules import unrunnable

QWEN, CLUSTER = load_job("qwen2.5-7b"), load_cluster("a100-8")
HEAD = 'sequence_length = 8\nglobal_batch = 2\nsteps = 3\n[model]\nconfig = "tiny-qwen2.5"\n'


def read(tmp_path: Path, table: str, head: str = HEAD) -> TrainingJob:
    (tmp_path / "job.toml").write_text(head + table)
    return TrainingJob.from_toml(tmp_path / "job.toml")


def test_adapters_of_qwen_by_hand() -> None:
    # q and o are 3584 x 3584, k and v 3584 x 512, the MLP 3584 x 18944 three times; 28 blocks.
    attention = 16 * (2 * (3584 + 3584) + 2 * (3584 + 512))
    mlp = 16 * 3 * (3584 + 18944)
    for targets, block in (("attention", attention), ("all-linear", attention + mlp)):
        facts = facts_of(replace(QWEN, lora=LoRA(16, targets)))
        assert facts.trainable_parameters == 28 * block
        assert facts.parameters == facts_of(QWEN).parameters == facts_of(QWEN).trainable_parameters


def test_states_are_those_of_the_adapters_and_one_copy_of_the_rest() -> None:
    job = replace(QWEN, lora=LoRA(16))
    base, adapters = facts_of(job).parameters, facts_of(job).trainable_parameters
    assert job_state_bytes(job, 0, 8) == 2 * base + 16 * adapters
    assert job_state_bytes(job, 1, 8) == 2 * base + 4 * adapters + 12 * adapters / 8
    assert job_state_bytes(job, 3, 8) == pytest.approx((2 * base + 16 * adapters) / 8)
    assert job_state_bytes(QWEN, 0, 8) == 16 * base
    # Two thirds of the arithmetic of training all, and less than the adapters' own beside it.
    assert 2 / 3 < facts_of(job).flops(8, 512) / facts_of(QWEN).flops(8, 512) < 0.72


def test_frozen_weights_of_qlora_by_hand() -> None:
    # Linear layers of 28 blocks: q and o 3584 x 3584, k and v 3584 x 512, the MLP's three.
    linear = 28 * (2 * 3584 * (3584 + 512) + 3 * 3584 * 18944)
    plain = job_state_bytes(replace(QWEN, lora=LoRA(16)), 0, 8)
    for quantization, bits in (("nf4", 4 + 32 / 64), ("nf4-double", 4 + 8 / 64 + 32 / 64 / 256)):
        job = replace(QWEN, lora=LoRA(16, quantization=quantization))
        saved = linear * (2 - bits / 8)
        cast = replace(job, program=Program(frozen_16bit=True))
        assert plain - job_state_bytes(cast, 0, 8) == pytest.approx(saved)
        # PEFT makes table, head and norms fp32.
        outside = facts_of(QWEN).parameters - facts_of(QWEN).block_parameters
        assert plain - job_state_bytes(job, 0, 8) == pytest.approx(saved - 2 * outside)
        at = [Configuration.of(data_parallel=8, zero_stage=z) for z in (0, 3)]
        job = cast
        said = [AnalyticModel(job, CLUSTER).breakdown(c).memory["parameters"] for c in at]
        adapters = 2 * facts_of(job).trainable_parameters
        assert said[0] == pytest.approx(2 * facts_of(job).parameters + adapters - saved)
        assert said[1] == pytest.approx(said[0] / 8)
        # Fewer bytes are gathered; nothing else of the time is known.
        z3 = [AnalyticModel(j, CLUSTER).predict(at) for j in (replace(QWEN, lora=LoRA(16)), job)]
        assert z3[1].step_time_s[1] < z3[0].step_time_s[1]
        assert z3[1].step_time_s[0] == pytest.approx(z3[0].step_time_s[0])
        assert TrainingJob.from_json(job.to_json()) == job


def test_fsdp2_shards_and_gathers_quantized_weights() -> None:
    cast = replace(QWEN, program=Program(frozen_16bit=True))
    plain, job = (replace(cast, lora=LoRA(16, quantization=how)) for how in ("none", "nf4-double"))
    here = Configuration.of(data_parallel=8, sharding="fsdp2_no_reshard")
    parts = [AnalyticModel(j, CLUSTER).breakdown(here).memory for j in (plain, job)]
    assert parts[1]["parameters"] < 0.5 * parts[0]["parameters"]
    assert parts[1]["communication"] < parts[0]["communication"]


def test_the_built_in_program_refuses_what_it_cannot_store() -> None:
    job = replace(QWEN, lora=LoRA(16, quantization="nf4"))
    (phrase,) = unrunnable(Configuration.of(data_parallel=8), job)
    assert "4-bit NF4 frozen weights" in phrase


def test_a_job_is_read_and_written_with_its_table_and_without(tmp_path: Path) -> None:
    job = read(tmp_path, '[lora]\nrank = 4\ntargets = "all-linear"\n')
    assert job.lora == LoRA(4, "all-linear")
    assert job.to_json()["lora"] == {"rank": 4, "targets": "all-linear"}
    assert TrainingJob.from_json(job.to_json()) == job
    plain = read(tmp_path, "")
    assert plain.lora is None
    assert "lora" not in plain.to_json()  # as in studies from before there was one
    assert TrainingJob.from_json(plain.to_json()) == plain


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("[lora]\n", "lacks its rank"),
        ("[lora]\nrank = 0\n", "rank of"),
        ("[lora]\nrank = true\n", "rank of"),
        ('[lora]\nrank = 4\ntargets = " ,"\n', "names of modules, such as q_proj,v_proj"),
        ("[lora]\nrank = 4\ntargets = 4\n", "names of modules"),
        ("[lora]\nrank = 4\ndora = 1\n", "dora of .*true or false"),
        ("[lora]\nrank = 4\nalpha = 8\n", "alpha"),
        ('[lora]\nrank = 4\nquantization = "fp4"\n', "one of none, nf4, nf4-double, int8"),
        ("[lora]\nrank = 4\nquantization = 4\n", "one of none, nf4, nf4-double"),
        ("[lora]\nrank = 4\nquantization = []\n", "one of none, nf4, nf4-double"),
    ],
)
def test_a_table_that_is_wrong_is_refused(tmp_path: Path, table: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(tmp_path, table)


def test_what_cannot_be_adapted_is_refused_by_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a table with a rank"):
        read(tmp_path, "", "lora = 4\n" + HEAD)


@pytest.mark.parametrize(
    ("job", "lora", "words"),
    [
        ("tiny-olmoe", LoRA(4, "all-linear"), "adapts no experts"),
        ("tiny-olmoe", LoRA(4, "q_proj"), "adapts attention or all-linear, not q_proj"),
        ("tiny-qwen2.5", LoRA(4, dora=True), "has no magnitudes of DoRA"),
        ("tiny-qwen2.5", LoRA(4, quantization="int8"), "has no 8-bit frozen weights"),
        ("tiny-lmm", LoRA(4), "adapts models of text, not of video and text"),
    ],
)
def test_what_the_built_in_program_cannot_adapt_is_planned_alone(
    job: str, lora: LoRA, words: str
) -> None:
    phrases = unrunnable(Configuration.of(data_parallel=1), replace(load_job(job), lora=lora))
    assert any(words in phrase for phrase in phrases), phrases


def test_named_targets_and_magnitudes_by_hand() -> None:
    q, v = 3584 + 3584, 3584 + 512
    for targets in ("q_proj,v_proj", " v_proj , q_proj"):
        facts = facts_of(replace(QWEN, lora=LoRA(16, targets)))
        assert facts.trainable_parameters == 28 * 16 * (q + v)
    with_magnitudes = facts_of(replace(QWEN, lora=LoRA(16, "q_proj,v_proj", dora=True)))
    assert with_magnitudes.trainable_parameters == 28 * (16 * (q + v) + 3584 + 512)
    cast = replace(QWEN, program=Program(frozen_16bit=True))
    eight = [
        job_state_bytes(replace(cast, lora=LoRA(16, quantization=how)), 0, 8)
        for how in ("none", "int8")
    ]
    assert eight[0] - eight[1] == 28 * (2 * 3584 * (3584 + 512) + 3 * 3584 * 18944)


# ---- on transformers' own modules

#: Small models of each kind: text, experts, text and images, encoder and decoder, sound.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64},
        **{"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16},
    },
    "gemma3": {
        "text_config": {
            **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "vocab_size": 64},
        },
        "vision_config": {
            **{"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2},
            **{"intermediate_size": 24, "image_size": 28, "patch_size": 14},
            "vision_use_head": False,
        },
    },
    "t5": {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32, "num_layers": 2, "vocab_size": 64},
    "whisper": {
        **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 64},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32},
        **{"decoder_ffn_dim": 32, "num_mel_bins": 8, "max_source_positions": 8},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    },
}
#: Adapters of rank 4 on all linear layers, by hand: 4 (inputs + outputs) of each.
_GEMMA_TEXT = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
_GEMMA_VISION = 3 * 4 * (4 * (16 + 16) + 2 * (16 + 24))
BY_HAND = [
    ("qwen3_moe", LoRA(4, "q_proj"), 2 * 4 * (32 + 32)),
    ("qwen3_moe", LoRA(4, text_alone=True), 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16))),
    ("gemma3", LoRA(4, "all-linear"), _GEMMA_TEXT + _GEMMA_VISION),
    ("gemma3", LoRA(4, "all-linear", text_alone=True), _GEMMA_TEXT),
    ("gemma3", LoRA(4, r".*language_model\..*\.(q|v)_proj"), 2 * 4 * (32 + 32 + 32 + 16)),
    ("t5", LoRA(4, "q,v"), 4 * 6 * 2 * (16 + 16)),
    ("t5", LoRA(4, "q,v", dora=True), 6 * 2 * (4 * (16 + 16) + 16)),
    ("whisper", LoRA(4, "q_proj,v_proj"), 4 * 6 * 2 * (16 + 16)),
]


@pytest.mark.parametrize(("family", "lora", "parameters"), BY_HAND)
def test_adapters_on_what_models_are_made_of(family: str, lora: LoRA, parameters: int) -> None:
    config = {"model_type": family, **FAMILIES[family]}
    job = replace(QWEN, model=config, lora=lora)
    assert facts_of(job).trainable_parameters == parameters


def test_what_is_not_known_of_adapters_on_experts_is_doubted() -> None:
    config = {"model_type": "qwen3_moe", **FAMILIES["qwen3_moe"]}
    job = replace(QWEN, model=config)
    wide = facts_of(replace(job, lora=LoRA(4, "all-linear"))).doubts
    assert any("pip install peft" in doubt for doubt in wide) or find_spec("peft")
    quantized = facts_of(replace(job, lora=LoRA(4, quantization="nf4"))).doubts
    assert any("counted in 16 bits" in doubt for doubt in quantized)
    assert facts_of(replace(job, lora=LoRA(4, text_alone=True))).doubts == facts_of(job).doubts


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ("wings", "no module of .* is named by the targets of LoRA, wings"),
        ("(", "LoRA on .* cannot be counted"),
        ("self_attn", "LoRA on self_attn cannot be counted on the gemma3 model.* not supported"),
    ],
)
def test_targets_that_fit_no_layer_are_one_sentence(targets: str, words: str) -> None:
    config = {"model_type": "gemma3", **FAMILIES["gemma3"]}
    with pytest.raises(InputError, match=words):
        facts_of(replace(QWEN, model=config, lora=LoRA(4, targets)))
