"""Every knob of the built-in training program, really turned: it must train the very same job.

From one seed, loss and gradient norm of the first five steps are compared with plain data
parallelism. The norm tells more than the loss: Adam hides a gradient that is a multiple of what it
should be, and clipping, which every job has, does not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("deepspeed")

import tuner.workload.node.runner
from benchmarks.knobs import REFERENCE, Trainer, small_dense_job, small_sparse_job
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.rules import broken_rules, unrunnable
from tuner.search_spaces.space import load_space
from tuner.workload.node.machine import detect_cluster

pytestmark = pytest.mark.real

#: Four devices, whatever this machine has: ranks may share a core, which costs time alone.
CLUSTER = replace(detect_cluster(), devices_per_node=4, nodes=1)
DENSE = small_dense_job()
SPARSE = small_sparse_job()
VIDEO = load_job("tiny-lmm")


def compare(trainer: Trainer, job: TrainingJob, knobs: dict[str, Any]) -> None:
    """Train as `knobs` say; loss and norm must be those of plain data parallelism."""
    expected, told = trainer.reference(job), trainer.train(job, Configuration.of(knobs))
    # Sums in another order: about 1e-6 in five steps. (Weight decay, 0.01 of the learning rate a
    # step, is 3e-5: DeepSpeed's CPU Adam forgets it unless told.)
    assert told.losses == pytest.approx(expected.losses, abs=5e-6)
    if told.norms:  # DeepSpeed keeps none in fp32 at ZeRO 0
        assert told.norms == pytest.approx(expected.norms, rel=1e-5)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path_factory.mktemp("run"), CLUSTER)
    yield trainer
    trainer.close()


def check(trainer: Trainer, job: TrainingJob, knobs: dict[str, Any]) -> None:
    knobs = {"micro_batch": 2, **knobs}
    configuration = Configuration.of(knobs)
    assert broken_rules(configuration, job, CLUSTER) == []
    assert unrunnable(configuration, job) == []
    compare(trainer, job, knobs)


def names(value: object) -> str:
    """A test's name for a job, for knobs, or for words."""
    if isinstance(value, TrainingJob):
        return value.name
    if isinstance(value, dict):
        return " ".join(f"{name}={setting}" for name, setting in value.items())
    return str(value)


@pytest.mark.parametrize(
    "knobs",
    [
        {"tensor_parallel": 2},
        {"sequence_parallel": 2, "zero_stage": 1},
        {"sequence_parallel": 2, "zero_stage": 3},
        {"pipeline_parallel": 2},
        {"data_parallel": 4, "micro_batch": 1, "sharding": "fsdp2", "hsdp_replicas": 2},
        {"data_parallel": 2, "zero_stage": 3, "parameter_offload": "cpu"},
        {"data_parallel": 2, "zero_stage": 1, "activation_checkpointing": "every_2"},
    ],
    ids=names,
)
def test_a_dense_model_trains_the_same(trainer: Trainer, knobs: dict[str, Any]) -> None:
    check(trainer, DENSE, knobs)


def test_experts_on_two_ranks_train_the_same(trainer: Trainer) -> None:
    knobs = {"data_parallel": 2, "expert_parallel": 2, "zero_stage": 1}
    check(trainer, SPARSE, knobs)
    assert min(trainer.reference(SPARSE).norms) > 1.0  # so clipping was at work


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        {"data_parallel": 2, "tensor_parallel": 2, "zero_stage": 1},
        {"data_parallel": 2, "tensor_parallel": 2, "zero_stage": 2},
        {"tensor_parallel": 2, "zero_stage": 1, "optimizer_offload": "cpu"},
        {"tensor_parallel": 2, "activation_checkpointing": "full"},
        {"tensor_parallel": 4},
        {"sequence_parallel": 2},
        {"sequence_parallel": 2, "zero_stage": 2, "activation_checkpointing": "every_4"},
        {"sequence_parallel": 2, "zero_stage": 2, "optimizer_offload": "cpu"},
        {"data_parallel": 2, "sequence_parallel": 2, "zero_stage": 1},
        {"data_parallel": 2, "sequence_parallel": 2, "zero_stage": 3},
        {"sequence_parallel": 4, "zero_stage": 2},
        {"sequence_parallel": 2, "sequence_method": "all_gather", "zero_stage": 3},
        {"pipeline_parallel": 2, "zero_stage": 1, "optimizer_offload": "cpu"},
        {"pipeline_parallel": 2, "activation_checkpointing": "every_2"},
        {"data_parallel": 2, "pipeline_parallel": 2, "zero_stage": 1},
        {"data_parallel": 2, "pipeline_parallel": 2},
        {"pipeline_parallel": 4},
        {"pipeline_parallel": 2, "pipeline_schedule": "interleaved", "virtual_stages": 2},
        {"data_parallel": 2, "pipeline_parallel": 2, "pipeline_schedule": "zero_bubble"},
        {"data_parallel": 2, "sharding": "fsdp2_no_reshard", "activation_checkpointing": "full"},
        {"data_parallel": 2, "sharding": "fsdp2", "activation_checkpointing": "selective"},
        {
            "data_parallel": 2,
            "zero_stage": 3,
            "parameter_offload": "cpu",
            "optimizer_offload": "cpu",
            "activation_checkpointing": "full",
        },
    ],
    ids=names,
)
def test_more_of_a_dense_model_trains_the_same(trainer: Trainer, knobs: dict[str, Any]) -> None:
    check(trainer, DENSE, knobs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        {"data_parallel": 2, "expert_parallel": 2},
        {"data_parallel": 2, "expert_parallel": 2, "zero_stage": 2},
        {
            "data_parallel": 2,
            "expert_parallel": 2,
            "zero_stage": 1,
            "optimizer_offload": "cpu",
            "activation_checkpointing": "full",
        },
        {"data_parallel": 4, "expert_parallel": 2, "zero_stage": 1},
        {"data_parallel": 4, "expert_parallel": 4, "zero_stage": 2},
        {"data_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2, "zero_stage": 1},
        {"data_parallel": 2, "zero_stage": 3},
        {"data_parallel": 2, "sharding": "fsdp2"},
        {"sequence_parallel": 2, "zero_stage": 1},
        {"pipeline_parallel": 2},
    ],
    ids=names,
)
def test_more_of_a_mixture_of_experts_trains_the_same(
    trainer: Trainer, knobs: dict[str, Any]
) -> None:
    check(trainer, SPARSE, knobs)


@pytest.mark.parametrize(
    "knobs",
    [
        {"sequence_parallel": 2, "zero_stage": 1},
        pytest.param({"data_parallel": 2, "zero_stage": 3}, marks=pytest.mark.slow),
        pytest.param({"data_parallel": 2}, marks=pytest.mark.slow),
        pytest.param({"data_parallel": 2, "sharding": "fsdp2"}, marks=pytest.mark.slow),
        pytest.param({"sequence_parallel": 2, "zero_stage": 3}, marks=pytest.mark.slow),
        pytest.param(
            {"data_parallel": 2, "sequence_parallel": 2, "zero_stage": 2}, marks=pytest.mark.slow
        ),
        pytest.param({"sequence_parallel": 4, "zero_stage": 1}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"data_parallel": 2, "tensor_parallel": 2, "zero_stage": 1}, marks=pytest.mark.slow
        ),
        pytest.param({"pipeline_parallel": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"data_parallel": 2, "pipeline_parallel": 2, "zero_stage": 1}, marks=pytest.mark.slow
        ),
        pytest.param(
            {
                "data_parallel": 2,
                "zero_stage": 2,
                "optimizer_offload": "cpu",
                "activation_checkpointing": "every_2",
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"data_parallel": 2, "zero_stage": 3, "parameter_offload": "cpu", "micro_batch": 4},
            marks=pytest.mark.slow,
        ),
    ],
    ids=names,
)
def test_a_model_of_video_and_text_trains_the_same(trainer: Trainer, knobs: dict[str, Any]) -> None:
    check(trainer, VIDEO, knobs)
    assert min(trainer.reference(VIDEO).norms) > 1.0  # so clipping was at work


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [1, 3])
def test_any_number_of_chosen_experts_trains_the_same(trainer: Trainer, chosen: int) -> None:
    model = {**SPARSE.model, "num_experts_per_tok": chosen, "norm_topk_prob": chosen > 1}
    job = replace(SPARSE, name=f"sparse{chosen}", model=model)
    check(trainer, job, {"data_parallel": 2, "expert_parallel": 2, "zero_stage": 1})


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tensor_parallel", "sequence_parallel", "pipeline_parallel"])
@pytest.mark.parametrize("job", ["tiny-opt", "tiny-qwen2.5"])
def test_other_families_train_the_same(trainer: Trainer, job: str, split: str) -> None:
    check(trainer, load_job(job), {split: 2, "zero_stage": int(split == "sequence_parallel")})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "knobs"),
    [
        (DENSE, {"tensor_parallel": 2}),
        (DENSE, {"sequence_parallel": 2, "zero_stage": 2}),
        (DENSE, {"pipeline_parallel": 2, "activation_checkpointing": "full"}),
        (SPARSE, {"data_parallel": 2, "expert_parallel": 2, "zero_stage": 2}),
    ],
    ids=names,
)
def test_half_precision_trains_the_same(
    trainer: Trainer, job: TrainingJob, knobs: dict[str, Any]
) -> None:
    job = replace(job, name=f"{job.name}-bf16", precision="bf16")
    asked = Configuration.of({"micro_batch": 2, **knobs})
    # bf16 has 8 bits: one rounding of a loss near 8 is 0.03.
    assert trainer.train(job, asked).losses == pytest.approx(
        trainer.reference(job).losses, abs=0.03
    )


@pytest.mark.slow
def test_fewer_key_value_heads_than_sequence_ranks(trainer: Trainer) -> None:
    job = load_job("tiny-qwen2.5")  # 2 key-value heads
    check(trainer, job, {"sequence_parallel": 4, "zero_stage": 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        {"data_parallel": 2},
        {"data_parallel": 2, "zero_stage": 3, "activation_checkpointing": "full"},
        {"data_parallel": 2, "sharding": "fsdp2"},
    ],
    ids=names,
)
def test_adapters_train_the_same(trainer: Trainer, knobs: dict[str, Any]) -> None:
    job, asked = load_job("tiny-qwen2.5-lora"), Configuration.of({"micro_batch": 2, **knobs})
    assert broken_rules(asked, job, CLUSTER) == []
    expected, told = trainer.reference(job), trainer.train(job, asked)
    assert told.losses == pytest.approx(expected.losses, abs=5e-6)
    # The norm, 0.07, is logged to 1e-6.
    assert told.norms == pytest.approx(expected.norms if told.norms else [], rel=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_activations_kept_on_the_host_train_the_same(
    trainer: Trainer, zero_stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU it only copies, and is refused for that; what it computes is tested all the same."""
    knobs = {**REFERENCE, "zero_stage": zero_stage, "activation_offload": "sync"}
    (phrase,) = broken_rules(Configuration.of(knobs), DENSE, CLUSTER)
    assert "needs a CUDA device" in phrase
    monkeypatch.setattr(tuner.workload.node.runner, "broken_rules", lambda *_: [])
    compare(trainer, DENSE, knobs)


@pytest.mark.slow
def test_products_in_fp8_train_nearly_the_same(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused on a CPU, too, where torch has the products; ZeRO 3 gathers their weights."""
    job = replace(DENSE, name="bf16", precision="bf16")
    knobs = {"data_parallel": 2, "micro_batch": 2, "zero_stage": 3, "fp8": "rowwise"}
    (phrase,) = broken_rules(Configuration.of(knobs), job, CLUSTER)
    assert "needs a CUDA device" in phrase
    monkeypatch.setattr(tuner.workload.node.runner, "broken_rules", lambda *_: [])
    told, expected = trainer.train(job, Configuration.of(knobs)), trainer.reference(job)
    assert told.losses == pytest.approx(expected.losses, rel=1e-3)
    assert told.norms == pytest.approx(expected.norms, rel=0.05)
    assert told.losses != pytest.approx(expected.losses, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "knobs", "words"),
    [
        (DENSE, {"pipeline_parallel": 2, "data_parallel": 2, "zero_stage": 2}, "ZeRO-2"),
        (SPARSE, {"expert_parallel": 2, "data_parallel": 2, "zero_stage": 3}, "MoE"),
        (DENSE, {"data_parallel": 2, "zero_stage": 3, "optimizer_offload": "async"}, "CUDA"),
        (SPARSE, {"tensor_parallel": 2}, "tp_plan"),
    ],
    ids=names,
)
def test_what_the_rules_refuse_deepspeed_refuses(
    trainer: Trainer,
    job: TrainingJob,
    knobs: dict[str, Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a rule that DeepSpeed has outgrown would keep back what could be run."""
    asked = Configuration.of({"micro_batch": 2, **knobs})
    assert broken_rules(asked, job, CLUSTER) or unrunnable(asked, job)
    monkeypatch.setattr(tuner.workload.node.runner, "broken_rules", lambda *_: [])
    monkeypatch.setattr(tuner.workload.node.runner, "unrunnable", lambda *_: [])
    with pytest.raises(RuntimeError, match=words):
        trainer.train(job, asked)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sample"), [(2, 12), (4, 8)])
def test_whatever_the_space_offers_trains_the_same(
    trainer: Trainer, ranks: int, sample: int
) -> None:
    """Some at random of all that `cpu-all` offers; `benchmarks.knobs --all` runs every one."""
    cluster = replace(CLUSTER, devices_per_node=ranks)
    offered = load_space("cpu-all").candidates(DENSE, cluster)
    most = [c for c in offered if c.world_size == ranks and not unrunnable(c, DENSE)]
    for configuration in random.Random(0).sample(most, sample):
        compare(trainer, DENSE, dict(configuration.launch))
