"""What `tuner fit` and `plan` read of Megatron-LM's arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tuner.planner.stated_training import StatedPlan, stated_plan
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.model_facts import facts_of

pytestmark = pytest.mark.usefixtures("launchers_here")

LLAMA = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --ffn-hidden-size 14336 --max-position-embeddings 8192 "
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --vocab-size 128256"
)
TRAINED = "--seq-length 8192 --bf16 --micro-batch-size 1 --global-batch-size 256 --train-iters 10"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pretrain_gpt.py").write_text("from megatron.training import pretrain\n")
    monkeypatch.chdir(tmp_path)


def read(arguments: str, ranks: int = 8) -> StatedPlan:
    launcher = ["torchrun", f"--nproc-per-node={ranks}", "pretrain_gpt.py"]
    return stated_plan([*launcher, *arguments.split()], "h100-32")


def test_llama_3_8b_with_tensor_and_sequence_parallelism() -> None:
    found = read(
        f"{LLAMA} {TRAINED} --tensor-model-parallel-size 4 --sequence-parallel "
        "--use-distributed-optimizer"
    )
    assert facts_of(found.job).parameters == 8_030_261_248  # as Meta states: 8.03 billion
    configuration = found.configuration
    assert (configuration.data_parallel, configuration.tensor_parallel) == (2, 4)
    assert (configuration.micro_batch, found.job.global_batch) == (1, 256)
    assert configuration.zero_stage == 1
    assert found.job.program.sequence_sharded
    assert found.job.precision == "bf16"
    assert not found.training.doubts


def test_states_are_whole_without_the_distributed_optimizer() -> None:
    assert read(f"{LLAMA} {TRAINED}").configuration.zero_stage == 0


def test_mixtral_8x7b_with_experts_spread() -> None:
    mixtral = LLAMA.replace("128256", "32000")
    found = read(
        f"{mixtral} {TRAINED} --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8"
    )
    assert facts_of(found.job).parameters == 46_702_792_704  # as Mistral states: 46.7 billion
    assert found.configuration.expert_parallel == 8


def test_gpt_2_by_megatrons_defaults() -> None:
    sizes = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --vocab-size 50257"
    found = read(f"{sizes} --max-position-embeddings 1024 {TRAINED.replace('8192', '1024')}")
    assert facts_of(found.job).parameters == 354_823_168  # as GPT-2 medium has


def test_the_mlp_of_swiglu_is_two_thirds_of_four_widths() -> None:
    plain = LLAMA.replace("--ffn-hidden-size 14336 ", "")
    assert read(f"{plain} {TRAINED}").job.model["intermediate_size"] == 10880


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ((" --vocab-size 128256", ""), "does not give --vocab-size"),
        (("--hidden-size 4096", ""), "does not give --hidden-size"),
        (("--normalization RMSNorm", "--normalization LayerNorm"), "no family that is described"),
        (("--swiglu", "--swiglu --multi-latent-attention"), "no family that is described"),
        (("--seq-length 8192", ""), "give seq-length"),
        (("--micro-batch-size 1", ""), "give micro-batch-size"),
    ],
)
def test_what_is_missing_is_one_sentence(changed: tuple[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(f"{LLAMA} {TRAINED}".replace(*changed))


@pytest.mark.parametrize(
    "changed", [(" --vocab-size 128256", ""), ("--swiglu", "--swiglu --multi-latent-attention")]
)
def test_a_models_configuration_stands_for_sizes_that_are_missing(
    changed: tuple[str, str], folder: None
) -> None:
    sizes = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 1024, "n_layer": 24, "n_head": 16}
    Path("config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    command = f"{LLAMA} {TRAINED.replace('8192', '1024')}".replace(*changed)
    found = stated_plan(
        ["torchrun", "--nproc-per-node=8", "pretrain_gpt.py", *command.split()],
        "h100-32",
        model_config=Path("config.json"),
    )
    assert facts_of(found.job).parameters == 354_823_168
    assert "sizes of config.json" in found.assumed


def test_its_fp8_is_doubted() -> None:
    assert any(
        "fp8" in doubt for doubt in read(f"{LLAMA} {TRAINED} --fp8-format e4m3").training.doubts
    )
