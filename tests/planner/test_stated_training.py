"""What a framework's file or command trains is read as its framework reads it, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tuner.cli.main import main
from tuner.planner.stated_training import fit_training, stated_plan
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import LoRA
from tuner.workload.scripts.frameworks.commands import (
    is_training_file,
    training_of_command,
    training_of_file,
)

LLAMA = {
    **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336},
    **{"vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 131072},
}
AXOLOTL = """\
base_model: ./llama
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_target_linear: true
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: paged_adamw_8bit
bf16: auto
gradient_checkpointing: true
"""
FULL = """\
base_model: ./llama
sequence_len: 2048
micro_batch_size: 1
bf16: true
"""
FACTORY = """\
model_name_or_path: ./llama
stage: sft
finetuning_type: full
deepspeed: ds/z3.json
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
"""
TRL = """\
model_name_or_path: ./llama
torch_dtype: bfloat16
bf16: true
max_length: 2048
per_device_train_batch_size: 16
gradient_accumulation_steps: 8
gradient_checkpointing: true
optim: adamw_torch
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "ds").mkdir()
    zero = {
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": "auto"},
    }
    (tmp_path / "ds" / "z3.json").write_text(json.dumps(zero))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str, name: str = "train.yaml") -> str:
    Path(name).write_text(text)
    return name


LLAMA_FACTORY = """\
model_name_or_path: ./llama
stage: sft
finetuning_type: lora
lora_rank: 4
cutoff_len: 128
bf16: true
"""
ADAPTED_BY_TRL = (
    "model_name_or_path: ./llama\nuse_peft: true\nlora_r: 4\nmax_length: 128\nbf16: true\n"
)


@pytest.mark.parametrize(
    ("text", "lora"),
    [
        (LLAMA_FACTORY + "lora_target: all\n", LoRA(4, "all-linear", text_alone=True)),
        (LLAMA_FACTORY, LoRA(4, "all-linear", text_alone=True)),
        (
            LLAMA_FACTORY + "lora_target: q_proj, v_proj\nuse_dora: true\n",
            LoRA(4, "q_proj,v_proj", dora=True, text_alone=True),
        ),
        (
            LLAMA_FACTORY + "freeze_vision_tower: false\nquantization_bit: 8\nuse_rslora: true\n",
            LoRA(4, "all-linear", "int8"),
        ),
        (
            AXOLOTL.replace("lora_target_linear: true", "lora_target_modules: [q_proj, gate_proj]")
            + "peft_use_dora: true\npeft_use_rslora: true\n",
            LoRA(32, "q_proj,gate_proj", "nf4-double", dora=True),
        ),
        (
            AXOLOTL.replace("4bit", "8bit").replace(
                "lora_target_linear: true", r"lora_target_modules: '.*layers.[\d]+.mlp.up_proj'"
            ),
            LoRA(32, r".*layers.[\d]+.mlp.up_proj", "int8"),
        ),
        (
            ADAPTED_BY_TRL + "lora_target_modules: [up_proj, down_proj]\nload_in_8bit: true\n",
            LoRA(4, "up_proj,down_proj", "int8"),
        ),
        (
            ADAPTED_BY_TRL + "lora_target_modules: all-linear\nuse_dora: true\n",
            LoRA(4, "all-linear", dora=True),
        ),
    ],
)
def test_adapters_are_read_as_the_framework_adds_them(text: str, lora: LoRA) -> None:
    read = training_of_file(write(text), 8)
    assert read.lora == lora
    assert [doubt for doubt in read.doubts if "lora" in doubt or "bit" in doubt] == []


def test_what_is_frozen_beside_adapters_is_doubted_without_them() -> None:
    full = LLAMA_FACTORY.replace("lora\n", "full\n") + "freeze_vision_tower: true\n"
    assert any("freeze_vision_tower" in doubt for doubt in training_of_file(write(full), 8).doubts)


def test_a_file_of_axolotl() -> None:
    read = training_of_file(write(AXOLOTL), 8)
    assert (read.model, read.micro_batch, read.accumulation) == ("./llama", 2, 4)
    assert (read.sequence_length, read.precision, read.doubts) == (4096, "bf16", ())
    assert (read.lora.rank, read.lora.targets, read.lora.quantization) == (
        *(32, "all-linear", "nf4-double"),
    )
    assert read.program.optimizer == "adamw_8bit"
    assert not read.program.pure_bf16
    assert read.knobs["activation_checkpointing"] == "full"


def test_a_file_of_llama_factory_with_deepspeeds() -> None:
    read = training_of_file(write(FACTORY), 8)
    assert (read.micro_batch, read.accumulation, read.lora) == (1, 2, None)
    assert read.knobs["zero_stage"] == 3
    assert read.on_deepspeed
    assert read.knobs["activation_checkpointing"] == "full"


def test_a_file_of_trl_keeps_weights_as_they_are_loaded() -> None:
    read = training_of_file(write(TRL), 8)
    assert (read.micro_batch, read.accumulation, read.sequence_length) == (16, 8, 2048)
    assert read.program.pure_bf16
    assert not training_of_file(
        write(TRL.replace("torch_dtype: bfloat16\n", "")), 8
    ).program.pure_bf16


def test_the_global_batch_is_that_of_all_ranks() -> None:
    found = stated_plan(write(AXOLOTL), "a100-8")
    assert (found.job.global_batch, found.configuration.data_parallel) == (2 * 4 * 8, 8)
    fewer = stated_plan(write(AXOLOTL), "a100-8", gpus=4)
    assert (fewer.job.global_batch, fewer.configuration.data_parallel) == (2 * 4 * 4, 4)


@pytest.mark.slow
def test_exit_code_3_where_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    name = write(FACTORY.replace("deepspeed: ds/z3.json\n", ""))
    assert main(["fit", name, "--cluster", "a100-40gb-8"]) == 3
    assert "read from train.yaml (llama-factory): ./llama, micro-batch 1" in capsys.readouterr().out
    assert main(["fit", write(AXOLOTL), "--cluster", "a100-8"]) == 0


# ---- adversaries


def test_a_value_that_stands_twice_is_the_last_and_named() -> None:
    found = training_of_file(write(AXOLOTL + "micro_batch_size: 8\n"), 8)
    assert found.micro_batch == 8
    assert any("micro_batch_size stands twice" in sentence for sentence in found.assumed)
    assert not any("twice" in each for each in training_of_file(write(AXOLOTL), 8).assumed)


@pytest.mark.parametrize("words", [("--micro-batch-size", "8"), ("--micro_batch_size=8",)])
def test_a_key_on_the_command_line_counts_before_the_file(words: tuple[str, ...]) -> None:
    name = write(AXOLOTL)
    assert training_of_command(["-m", "axolotl.cli.train", name, *words], 8).micro_batch == 8
    assert training_of_command(["-m", "axolotl.cli.train", name], 8).micro_batch == 2


def test_anchors_and_merged_tables_are_read() -> None:
    text = AXOLOTL.replace("lora_r: 32", "rank: &rank 64\nlora_r: *rank")
    read = training_of_file(write(text), 8)
    assert read.lora.rank == 64


@pytest.mark.parametrize("value", ["${MICRO}", "$MICRO", "${oc.env:MICRO}", "{{ micro }}"])
def test_what_only_a_start_fills_in_is_refused(value: str) -> None:
    text = AXOLOTL.replace("micro_batch_size: 2", f"micro_batch_size: '{value}'")
    with pytest.raises(InputError, match=r"micro_batch_size in train.yaml is .* filled in only"):
        training_of_file(write(text), 8)
    # Of a key that changes nothing here it may stand.
    training_of_file(write(AXOLOTL + f"output_dir: '{value}'\n"), 8)


def test_a_batch_found_only_by_starting_is_refused() -> None:
    text = TRL.replace("train_batch_size: 16", "train_batch_size: auto")
    with pytest.raises(InputError, match="'auto', which is found only by starting it"):
        training_of_file(write(text), 8)


def test_deepspeeds_own_batch_must_agree() -> None:
    zero = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4}
    Path("ds/z2.json").write_text(json.dumps(zero))
    with pytest.raises(InputError, match=r"is 1 in train.yaml and 4 in z2.json; make them equal"):
        training_of_file(write(FACTORY.replace("z3", "z2")), 8)
    zero["train_micro_batch_size_per_gpu"] = 1
    Path("ds/z2.json").write_text(json.dumps(zero))
    assert training_of_file(write(FACTORY.replace("z3", "z2")), 8).knobs["zero_stage"] == 2


def test_axolotls_batch_of_a_rank() -> None:
    text = AXOLOTL.replace("gradient_accumulation_steps: 4", "batch_size: 16")
    assert training_of_file(write(text), 8).accumulation == 8
    with pytest.raises(InputError, match=r"batch_size 15 of train.yaml is not a multiple"):
        training_of_file(write(text.replace("batch_size: 16", "batch_size: 15")), 8)


def test_a_doubted_answer_has_no_probability_and_what_is_counted_is_not_doubted() -> None:
    doubted = fit_training(write(f"{AXOLOTL}rl: dpo\n"), cluster="a100-8")
    assert doubted.to_json()["probability"] is None
    assert fit_training(write(AXOLOTL), cluster="a100-8").doubts == ()


FACTORY_V1 = """model: ./llama
model_class: llm
peft_config: {name: lora, r: 16, lora_alpha: 32, lora_dropout: 0.05, target_modules: all}
kernel_config: {name: auto}
quant_config: null
dist_config: {name: fsdp2, dcp_path: null}
train_dataset: data/v1_sft_demo.yaml
micro_batch_size: 1
cutoff_len: 2048
learning_rate: 1.0e-4
max_steps: 10
sample_backend: hf
"""
ADAPTERS = (
    "peft_config: {name: lora, r: 16, lora_alpha: 32, lora_dropout: 0.05, target_modules: all}\n"
)
WHOLE_V1 = FACTORY_V1.replace(ADAPTERS, "")
SHARDED = "dist_config: {name: fsdp2, dcp_path: null}"


@pytest.mark.parametrize(
    ("text", "batch", "precision", "knobs", "lora"),
    [
        # LLaMA-Factory's examples/v1: train_full_fsdp2_batching_normal, train_lora_sft,
        # quantization, train_full_deepspeed, train_full_ulysses_cp, as counted by hand.
        (
            WHOLE_V1.replace("batch_size: 1", "batch_size: 2") + "batching_strategy: normal\n",
            (2, 1),
            "bf16",
            {"sharding": "fsdp2", "activation_checkpointing": "full", "zero_stage": 0},
            None,
        ),
        (FACTORY_V1, (1, 1), "bf16", {"sharding": "fsdp2"}, LoRA(16, "all-linear")),
        (
            FACTORY_V1.replace("quant_config: null", "quant_config: {name: bnb}"),
            (1, 1),
            "bf16",
            {"sharding": "fsdp2"},
            LoRA(16, "all-linear", "nf4-double"),
        ),
        (
            WHOLE_V1.replace(SHARDED, "dist_config: {name: deepspeed, config_file: ds/z3.json}"),
            (1, 1),
            "bf16",
            {"zero_stage": 3, "activation_checkpointing": "full"},
            None,
        ),
        (
            WHOLE_V1 + "cp_mode: ulysses\ncp_size: 2\nbf16: false\n",
            (1, 1),
            "fp32",
            {"sequence_parallel": 2, "sharding": "fsdp2"},
            None,
        ),
        # Without a plug-in it is torch's DDP of fp32 weights; bf16 is FSDP's alone.
        (WHOLE_V1.replace(SHARDED, "dist_config: null"), (1, 1), "fp32", {"zero_stage": 0}, None),
        (
            WHOLE_V1.replace("null}", "null, offload_params: true, reshard_after_forward: false}")
            + "global_batch_size: 32\nenable_activation_checkpointing: false\n",
            (1, 4),
            "bf16",
            {
                "sharding": "fsdp2_no_reshard",
                "parameter_offload": "cpu",
                "activation_checkpointing": "none",
            },
            None,
        ),
    ],
)
def test_files_of_llama_factorys_v1_schema(
    text: str, batch: tuple[int, int], precision: str, knobs: dict[str, object], lora: LoRA | None
) -> None:
    read = training_of_file(write(text), 8)
    assert (read.framework, read.model) == ("llama-factory-v1", "./llama")
    assert (read.micro_batch, read.accumulation, read.sequence_length) == (*batch, 2048)
    assert (read.precision, read.lora, read.doubts) == (precision, lora, ())
    assert {name: read.knobs.get(name) for name in knobs} == knobs


def test_the_command_of_v1_is_read_by_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    name = write(FACTORY_V1)
    for words in (["llamafactory-cli", "sft", name], ["lmf", "train", name]):
        read = training_of_command([*words, "micro_batch_size=4"], 8)
        assert (read.framework, read.micro_batch) == ("llama-factory-v1", 4)
    assert training_of_command(["lmf", "train", write(FACTORY)], 8).framework == "llama-factory"


AUTOMODEL = """recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 8, ckpt_every_steps: 1000}
dist_env: {backend: nccl, timeout_minutes: 1}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: ./llama
distributed: {strategy: fsdp2, dp_size: none, tp_size: 1, cp_size: 1, sequence_parallel: false}
loss_fn: {_target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy}
dataset: {_target_: nemo_automodel.components.datasets.llm.squad.make_squad_dataset, split: train}
packed_sequence: {packed_sequence_size: 0}
optimizer: {_target_: torch.optim.Adam, betas: [0.9, 0.999], eps: 1e-8, lr: 1.0e-5}
lr_scheduler: {lr_decay_style: cosine, min_lr: 1.0e-6}
"""
MOCK = "dataset: {_target_: mock.MockIterableDataset, vocab_size: 100, seq_len: 4096}"
NEMO_LORA = """peft:
  _target_: nemo_automodel.components._peft.lora.PeftConfig
  target_modules: '*_proj'
  dim: 16
  alpha: 32
  use_triton: true
"""
SQUAD = AUTOMODEL.splitlines()[8]


@pytest.mark.parametrize(
    ("text", "batch", "length", "knobs", "lora"),
    [
        # NeMo Automodel's examples, as counted by hand: llama3_2_1b_squad of 0.1 and of today,
        # qwen2_5_7b_peft_benchmark, llama3_1_8b_instruct_squad_qlora_2node, gptoss_20b_torch.
        (
            AUTOMODEL.replace(
                "strategy: fsdp2",
                "_target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager",
            ),
            (8, 1),
            0,
            {"sharding": "fsdp2", "activation_checkpointing": "none"},
            None,
        ),
        (AUTOMODEL, (8, 1), 0, {"sharding": "fsdp2", "tensor_parallel": 1}, None),
        (
            AUTOMODEL.replace("64, local_batch_size: 8", "32, local_batch_size: 2").replace(
                SQUAD, MOCK
            )
            + NEMO_LORA,
            (2, 2),
            4096,
            {"sharding": "fsdp2"},
            LoRA(16, "all-linear"),
        ),
        (
            AUTOMODEL.replace("64, local_batch_size: 8", "16, local_batch_size: 1")
            + NEMO_LORA
            + "quantization: {load_in_4bit: true, load_in_8bit: false, "
            "bnb_4bit_compute_dtype: bfloat16, bnb_4bit_use_double_quant: true}\n",
            (1, 2),
            0,
            {"sharding": "fsdp2"},
            LoRA(16, "all-linear", "nf4-double"),
        ),
        (
            AUTOMODEL.replace("64, local_batch_size: 8", "256, local_batch_size: 1")
            .replace(SQUAD, MOCK)
            .replace("cp_size: 1", "cp_size: 1, ep_size: 8, activation_checkpointing: true")
            .replace(
                "  pretrained_model_name_or_path: ./llama",
                "  config: {pretrained_model_name_or_path: ./llama}",
            ),
            (1, 32),
            4096,
            {"expert_parallel": 8, "activation_checkpointing": "full"},
            None,
        ),
        (
            AUTOMODEL.replace("packed_sequence_size: 0", "packed_sequence_size: 8192").replace(
                "tp_size: 1, cp_size: 1", "tp_size: 2, cp_size: 2"
            ),
            (8, 4),
            8192,
            {"tensor_parallel": 2, "sequence_parallel": 2},
            None,
        ),
    ],
)
def test_files_of_nemo_automodel(
    text: str, batch: tuple[int, int], length: int, knobs: dict[str, object], lora: LoRA | None
) -> None:
    read = training_of_file(write(text), 8)
    assert (read.framework, read.model, read.precision) == ("nemo-automodel", "./llama", "bf16")
    assert (read.micro_batch, read.accumulation, read.sequence_length) == (*batch, length)
    assert (read.lora, read.doubts) == (lora, ())
    assert {name: read.knobs.get(name) for name in knobs} == knobs
    # Weights, gradients and moments keep the dtype in which the model is loaded.
    assert read.program.pure_bf16 == (lora is None)


@pytest.mark.parametrize(
    ("text", "doubted"),
    [
        (f"{AXOLOTL}rl: dpo\n", "rl"),
        (f"{AXOLOTL}use_galore: true\n", "use_galore"),
        (f"{AXOLOTL}unfrozen_parameters: [a]\n", "unfrozen_parameters"),
        (f"{AXOLOTL}qat: {{a: 1}}\n", "qat"),
        (f"{FACTORY}optim: adafactor\n", "optim = adafactor"),
        (f"{FACTORY}quantization_bit: 8\n", "quantization = int8 without adapters"),
        (FACTORY.replace("type: full", "type: freeze"), "finetuning_type = freeze"),
        (f"{TRL}beta: 0.1\n", "beta"),
        (WHOLE_V1 + "peft_config: {name: freeze}\n", "= freeze"),
        (WHOLE_V1 + "optim_config: {name: muon}\n", "optim_config.name = muon"),
        (WHOLE_V1.replace("class: llm", "class: cls"), "model_class = cls"),
        (FACTORY_V1.replace("quant_config: null", "quant_config: {name: gptq}"), "gptq"),
        (AUTOMODEL.replace("strategy: fsdp2", "strategy: megatron_fsdp"), "sharding of"),
        (AUTOMODEL.replace("strategy: fsdp2", "_target_: a.DDPManager"), "sharding of"),
        (AUTOMODEL.replace("torch.optim.Adam", "dion.Muon"), "optimizer._target_ = dion.Muon"),
        (AUTOMODEL.replace("masked_ce.Masked", "linear_ce.FusedLinear"), "FusedLinearCross"),
        (AUTOMODEL.replace("NextTokenPrediction", "SequenceClassification"), "recipe = "),
        (AUTOMODEL + NEMO_LORA + "  exclude_modules: ['*.lm_head']\n", "exclude_modules"),
        (AUTOMODEL + "qat: {enabled: true}\n", "qat"),
    ],
)
def test_what_is_not_counted_is_doubted_alone(text: str, doubted: str) -> None:
    (doubt,) = training_of_file(write(text), 8).doubts
    assert doubted in doubt


def test_a_length_that_no_file_states_is_asked_for() -> None:
    with pytest.raises(InputError, match=r"does not say the tokens .* --sequence-length"):
        stated_plan(write(AUTOMODEL), "a100-8")
    found = stated_plan(write(AUTOMODEL), "a100-8", sequence_length=1024)
    assert (found.job.sequence_length, found.job.global_batch) == (1024, 64)


def test_a_global_batch_that_the_replicas_do_not_share_is_refused() -> None:
    text = AUTOMODEL.replace("global_batch_size: 64", "global_batch_size: 60")
    with pytest.raises(InputError, match=r"60 of train[.]yaml is no multiple of the micro-batch"):
        training_of_file(write(text), 8)


def test_a_file_of_data_beside_it_may_be_no_yaml() -> None:
    data = write("{% for each in rows %}", "rows.yaml")
    training = training_of_command(["llamafactory-cli", "train", write(FACTORY), f"data={data}"], 8)
    assert training.framework == "llama-factory"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: 1\n", "has the keys of no framework that is read"),
        ("- a\n", "holds no keys"),
        (
            "trainer: {devices: 8}\nexp_manager: {}\nmodel: {}\n",
            "the schema of NeMo's Hydra files, which",
        ),
        ("apiVersion: v1\nkind: Job\n", "manifest of Kubernetes"),
        ("compute_environment: LOCAL_MACHINE\n", "names no model"),
        (AXOLOTL.replace("micro_batch_size: 2\n", ""), "does not say its micro-batch"),
        (AXOLOTL.replace("micro_batch_size: 2", "micro_batch_size: 0"), "at least 1"),
        (AXOLOTL.replace("lora_r: 32\n", ""), "without lora_r"),
        (AXOLOTL + "deepspeed: nowhere.json\n", "there is no such file"),
        (AXOLOTL.replace("./llama", "nobody/nothing"), "not in transformers' cache"),
        (AXOLOTL.replace("./llama", "''"), "names no model"),
        (FACTORY + "fsdp: full_shard\n", "both DeepSpeed's configuration and FSDP"),
        (AXOLOTL + "tensor_parallel_size: 3\n", "divides the ranks by 3"),
        ("a: [\n", "is not valid YAML"),
    ],
)
def test_bad_input_is_one_sentence(
    text: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", write(text), "--cluster", "a100-8"]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("-m axolotl.cli.train nowhere.yaml", "there is no such file"),
        ("nowhere.py --config a.yaml", "there is no script 'nowhere.py'"),
        ("bash job.sh", "script of the shell"),
    ],
)
def test_a_command_whose_file_is_missing(
    command: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write("#!/bin/sh\n", "job.sh")
    assert main(["fit", "--cluster", "a100-8", "--", *command.split()]) == 2
    assert sentence in capsys.readouterr().err


def test_sharding_of_fsdp_and_of_one_gpu() -> None:
    text = FACTORY.replace("deepspeed: ds/z3.json", "fsdp: full_shard auto_wrap offload")
    knobs = training_of_file(write(text), 8).knobs
    assert (knobs["sharding"], knobs["parameter_offload"]) == ("fsdp2", "cpu")
    alone = stated_plan(write(FACTORY), "a100-8", gpus=1)
    assert alone.configuration.get("zero_stage") == 0
    assert "states are whole on one GPU" in alone.assumed


def test_a_plan_has_the_command_as_today(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--cluster", "a100-8", "--json", "--name", "a", "--quiet"]
    assert main([*words, "--", "-m", "axolotl.cli.train", write(AXOLOTL)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["read"][0].startswith("read from train.yaml (axolotl)")


def test_accelerates_file_and_deepspeeds_of_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    read = training_of_file(write(FACTORY), 8)
    assert read.knobs["zero_stage"] == 3
    assert any("counts before ZeRO 2 of accelerate" in sentence for sentence in read.assumed)
    own = FACTORY.replace("deepspeed: ds/z3.json\n", "")
    assert training_of_file(write(own), 8).knobs["zero_stage"] == 2


def test_degrees_of_replicas_must_make_the_ranks() -> None:
    sharded = "fsdp_version: 2\nfsdp_config:\n  reshard_after_forward: true\n"
    text = FULL + f"{sharded}dp_shard_size: 4\ndp_replicate_size: 2\n"
    found = stated_plan(write(text), "a100-8")
    assert (found.gpus, found.configuration.get("hsdp_replicas")) == (8, 2)
    with pytest.raises(InputError, match="divides 8 ranks, and 4 are started"):
        stated_plan(write(text), "a100-8", gpus=4)


def test_a_file_that_only_predicts_is_refused() -> None:
    with pytest.raises(InputError, match="has the keys of no framework"):
        training_of_file(write(FACTORY + "do_predict: true\n"), 8)


@pytest.mark.slow
def test_json_of_a_trainer_and_of_deepspeed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"model_name_or_path": "./llama", "per_device_train_batch_size": 2, "bf16": True}
    name = write(json.dumps(arguments), "arguments.json")
    assert main(["fit", name, "--cluster", "a100-8"]) in (0, 3)
    assert "read from arguments.json (transformers-trainer)" in capsys.readouterr().out
    assert main(["fit", "ds/z3.json", "--cluster", "a100-8"]) == 2
    assert "DeepSpeed's configuration, which names no model" in capsys.readouterr().err
    assert main(["fit", "llama/config.json", "--cluster", "a100-8"]) in (0, 3)


TITAN = """\
[job]
description = "a"
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./llama"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 2
global_batch_size = 64
seq_len = 8192
[parallelism]
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""


def test_a_file_of_torchtitan() -> None:
    found = stated_plan(write(TITAN, "titan.toml"), "a100-8")
    assert (found.training.micro_batch, found.training.accumulation) == (2, 8)
    assert (found.job.global_batch, found.job.sequence_length) == (64, 8192)
    assert (found.job.precision, found.training.doubts) == ("bf16", ())
    launch = found.configuration.launch
    assert (launch["tensor_parallel"], launch["data_parallel"]) == (2, 4)
    assert (launch["sharding"], launch["activation_checkpointing"]) == ("fsdp2", "full")


def test_what_torchtitan_converts_is_doubted_and_a_job_stays_a_job() -> None:
    text = TITAN.replace('name = "llama3"', 'name = "llama3"\nconverters = ["float8"]')
    assert "model.converters" in training_of_file(write(text, "titan.toml"), 8).doubts[0]
    job = 'sequence_length = 8\nglobal_batch = 8\nsteps = 1\n[model]\nconfig = "tiny-opt"\n'
    assert not is_training_file(write(job, "job.toml"))
    assert is_training_file("titan.toml")


@pytest.mark.parametrize(("script", "doubts"), [("dpo.py", 1), ("sft.py", 0)])
def test_a_script_of_another_loss_is_doubted(script: str, doubts: int) -> None:
    write("from trl import TrlParser\n", script)
    read = training_of_command([script, "--config", write(TRL)], 8)
    assert len(read.doubts) == doubts
    assert read.ranks == 1


def test_a_function_of_the_users_is_not_called() -> None:
    Path("mine").mkdir()
    code = "from pathlib import Path\nPath('called').touch()\ndef f(): Path('called').touch()\n"
    for name in ("__init__.py", "config_registry.py"):
        Path("mine", name).write_text(code)
    words = ["-m", "torchtitan.train", "--module", "mine", "--config", "f"]
    with pytest.raises(InputError, match=r"torchtitan.* are not read for a prediction"):
        training_of_command(words, 8)
    assert not Path("called").exists()


def test_checkpointing_of_fsdp_is_read() -> None:
    text = FULL + "fsdp_version: 2\nfsdp_config:\n  activation_checkpointing: true\n"
    assert training_of_file(write(text), 8).knobs["activation_checkpointing"] == "full"
    none = training_of_file(write(text.replace("true\n", "false\n")), 8).knobs
    assert none["activation_checkpointing"] == "none"


OLD_TITAN = """\
[model]
name = "llama3"
flavor = "8B"
tokenizer_path = "./llama"
[optimizer]
name = "AdamW"
[training]
batch_size = 2
seq_len = 4096
compile = true
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[experimental]
pipeline_parallel_degree = 1
context_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""


def test_a_file_of_torchtitan_before_its_first_release() -> None:
    assert is_training_file(write(OLD_TITAN, "old.toml"))
    found = stated_plan("old.toml", "a100-8")
    assert (found.training.micro_batch, found.job.sequence_length) == (2, 4096)
    assert found.training.doubts == ()
    launch = found.configuration.launch
    assert (launch["tensor_parallel"], launch["sequence_parallel"]) == (2, 2)
    assert (launch["data_parallel"], launch["activation_checkpointing"]) == (2, "full")


@pytest.mark.parametrize("key", ["sequence_parallel_degree", "context_parallel_size"])
def test_axolotls_sequence_parallelism_by_both_of_its_names(key: str) -> None:
    found = stated_plan(write(f"{FULL}{key}: 4\n"), "a100-8")
    assert found.training.doubts == ()
    assert found.configuration.get("sequence_parallel") == 4
    assert found.configuration.data_parallel == 2
    assert stated_plan(write(f"{FULL}{key}: 1\n"), "a100-8").training.doubts == ()
    words = [
        "-m",
        "axolotl.cli.train",
        write(f"{FULL}{key}: 4\n"),
        "--sequence-parallel-degree",
        "2",
    ]
    assert training_of_command(words, 8, gpus=8).knobs["sequence_parallel"] == 2
    with pytest.raises(InputError, match="divides the ranks by 3"):
        stated_plan(write(f"{FULL}{key}: 3\n"), "a100-8")


@pytest.mark.parametrize(
    ("line", "doubtful"),
    [
        *((f"{key}: {value}", False) for key in ("sequence_parallel_degree", "tp_size")
          for value in ("1", "'1'", "null", "0", "none", "'False'")),
        *((f"quantize_moe_experts: {off}", False) for off in ("false", "no", "~", "''", "0")),
        ("expert_parallel_size: 1", False),
        ("peft: {use_dora: false, layers: []}", False),
        ("peft: {use_dora: true}", True),
        ("expert_parallel_size: 2", True),
        ("use_galore: 1", True),  # a truth value that is written as a number
        ("load_in_fp8: '1'", True),
        ("offload_num_layers: 1", True),
        ("dpo_beta: 1", True),
        ("unfrozen_parameters: [false]", True),
    ],
)  # fmt: skip
def test_only_what_turns_something_on_is_doubtful(line: str, doubtful: bool) -> None:
    doubts = training_of_file(write(f"{FULL}{line}\n"), 8).doubts
    assert bool(doubts) is doubtful


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (True, (1, "none", "none")),
        ({"stage": 2, "cpu_offload": True}, (2, "cpu", "none")),
        ({"stage": 3, "cpu_offload": True, "cpu_offload_param": True}, (3, "cpu", "cpu")),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, (3, "none", "nvme")),
        ({"stage": 3, "cpu_offload": False}, (3, "none", "none")),
    ],
)
def test_deepspeeds_older_spellings(zero: object, expected: tuple[object, ...]) -> None:
    Path("ds/z3.json").write_text(json.dumps({"zero_optimization": zero}))
    knobs = training_of_file(write(FACTORY), 8).knobs
    names = ("zero_stage", "optimizer_offload", "parameter_offload")
    assert tuple(knobs[name] for name in names) == expected


def test_names_of_transformers_and_trl_in_both_of_their_forms() -> None:
    new = TRL.replace("torch_dtype", "dtype") + "use_liger_kernel: true\n"
    old = TRL.replace("per_device", "per_gpu") + "use_liger: true\n"
    read = [training_of_file(write(text), 8) for text in (new, old)]
    assert read[0].program == read[1].program
    assert read[0].program.pure_bf16
    for each in read:
        assert (each.micro_batch, each.doubts) == (16, ())
        assert any("Liger" in sentence for sentence in each.assumed)


TORCHTUNE = """\
output_dir: /tmp/out
model:
  _component_: torchtune.models.llama3_1.{component}
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  lora_rank: 16
  lora_alpha: 32
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 4096
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: ./llama
batch_size: 2
gradient_accumulation_steps: 8
optimizer:
  _component_: bitsandbytes.optim.PagedAdamW8bit
  lr: 3e-4
  weight_decay: 0.01
dtype: bf16
enable_activation_checkpointing: True
tensor_parallel_dim: 1
data_parallel_shard_dim: -1
batch_size_val: ${{batch_size}}
"""


def test_a_length_that_torchtune_does_not_limit_is_assumed_and_no_default(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    text = TORCHTUNE.format(component="llama3_1_8b")
    file.write_text(text.replace("  max_seq_len: 4096\n", ""))
    found = training_of_file(str(file), 8)
    (told,) = [sentence for sentence in found.assumed if "tokens a sequence" in sentence]
    assert told == (
        "2,048 tokens a sequence, assumed: without tokenizer.max_seq_len, a sequence is as long as "
        "its text"
    )


@pytest.mark.parametrize(
    ("component", "lora"),
    [
        ("llama3_1_8b", None),
        ("lora_llama3_1_8b", "none"),
        ("qlora_llama3_1_8b", "nf4"),
    ],
)
def test_torchtunes_components_are_read(component: str, lora: str | None, tmp_path: Path) -> None:
    """A degree of -1 is that of the ranks that are left, and raises no doubt."""
    file = tmp_path / "t.yaml"
    file.write_text(TORCHTUNE.format(component=component))
    found = training_of_file(str(file), 8)
    assert (found.framework, found.model) == ("torchtune", "./llama")
    assert (found.micro_batch, found.accumulation, found.sequence_length) == (2, 8, 4096)
    assert (found.precision, found.program.optimizer) == ("bf16", "adamw_8bit")
    assert found.knobs["sharding"] == "fsdp2"
    assert found.knobs["activation_checkpointing"] == "full"
    assert found.doubts == ()
    if lora is None:
        assert found.lora is None
    else:
        names = "q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
        assert found.lora == LoRA(16, names, lora)


def test_what_torchtune_alone_does_is_doubted_or_noted(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    text = TORCHTUNE.format(component="lora_llama3_1_8b")
    file.write_text(text.replace("tensor_parallel_dim: 1", "optimizer_in_bwd: True\nquantizer: x"))
    found = training_of_file(str(file), 8)
    assert any("optimizer in the backward pass" in note for note in found.assumed)
    assert found.doubts == ("quantizer = x of t.yaml is not counted",)
    file.write_text(text.replace("PagedAdamW8bit", "PagedLion"))
    (doubt,) = training_of_file(str(file), 8).doubts
    assert doubt.startswith("optimizer._component_ = bitsandbytes.optim.PagedLion")


def test_a_generation_by_torchtune_trains_nothing(tmp_path: Path) -> None:
    file = tmp_path / "g.yaml"
    text = TORCHTUNE.format(component="llama3_1_8b")
    file.write_text(text.replace("optimizer:", "prompt:"))
    with pytest.raises(InputError, match="keys of no framework that is read"):
        training_of_file(str(file), 8)
