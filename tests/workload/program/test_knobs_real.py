"""Every knob of the built-in training program, really turned: it must train the very same job.

From one seed, loss and gradient norm of the first five steps are compared with plain data
parallelism. The norm tells more than the loss: Adam hides a gradient that is a multiple of what it
should be, and clipping, which every job has, does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import tuner.workload.node.runner
from tests.workload.program.trainer import (
    REFERENCE,
    Trainer,
    configuration_with,
    small_dense_job,
    small_sparse_job,
    values,
)
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.search_spaces.rules import broken_rules, unrunnable, why_it_cannot_run
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.program.built_in_job import BuiltInJob

#: The first offload compiles CPU Adam, which takes minutes on a busy machine.
pytestmark = [pytest.mark.real, pytest.mark.timeout(1000)]

#: Four devices, whatever this machine has: ranks may share a core, which costs time alone.
CLUSTER = replace(detect_cluster(), devices_per_node=4, nodes=1)
DENSE, SPARSE, VIDEO = small_dense_job(), small_sparse_job(), load_job("tiny-lmm")


def choosing(experts: int) -> TrainingJob:
    model = {**SPARSE.model, "num_experts_per_tok": experts, "norm_topk_prob": experts > 1}
    return replace(SPARSE, name=f"sparse{experts}", model=model)


JOBS = {
    "dense": DENSE,
    "sparse": SPARSE,
    "video": VIDEO,
    "sparse1": choosing(1),
    "sparse3": choosing(3),
    "opt": load_job("tiny-opt"),
    "qwen": load_job("tiny-qwen2.5"),  # 2 key-value heads
    "lora": load_job("tiny-qwen2.5-lora"),
    "dense-bf16": replace(DENSE, name="dense-bf16", precision="bf16"),
    "sparse-bf16": replace(SPARSE, name="sparse-bf16", precision="bf16"),
}
#: Every setting, and the three models.
SETTINGS = """
dense dp2 sp2 seq-all_gather zero3 optim-cpu param-cpu ckpt-every_2
dense dp2 pp2 pipe-interleaved vs2 ckpt-selective
dense dp2 pp2 pipe-zero_bubble vs2
dense dp2 fsdp2 ckpt-selective
sparse dp2 ep2 zero2 optim-cpu ckpt-full
sparse dp4 mb1 fsdp2_no_reshard hsdp2 ckpt-every_2
video dp2 tp2 zero2 optim-cpu ckpt-every_2
"""
#: With those, every two settings that can be combined, and every setting with each of the models.
PAIRS = """
dense sp2 seq-all_gather zero2 optim-cpu ckpt-selective
dense sp2 seq-all_gather zero1 optim-cpu ckpt-full
dense tp2 zero1 optim-cpu ckpt-full
dense pp2 pipe-interleaved vs2 ckpt-full
dense pp2 pipe-interleaved vs2 ckpt-every_2
dense dp4 mb1 fsdp2_no_reshard hsdp2 ckpt-selective
sparse dp2 pp2 ep2 zero1 optim-cpu ckpt-every_2
sparse sp2 zero3 optim-cpu param-cpu ckpt-selective
sparse dp2 fsdp2 ckpt-every_2
video pp2 zero1 optim-cpu ckpt-selective
video sp2 zero3 optim-cpu param-cpu ckpt-full
video dp2 fsdp2_no_reshard ckpt-full
video dp4 mb1 fsdp2 hsdp2 ckpt-full
"""
#: Other models and a precision.
OTHERS = """
dense dp4 mb1 zero3 hpz2
sparse1 dp2 ep2 zero1
lora dp2 zero3 ckpt-full
dense-bf16 pp2 ckpt-full
"""
MORE_OTHERS = """
dense pp2
opt tp2
qwen sp4 zero1
"""
#: What pairs no more settings.
REST = """
dense tp4
dense sp4 zero2 ckpt-every_4
dense pp4
dense dp2 tp2 zero2
dense dp2 sp2 zero3
dense dp2 pp2 zero1
dense dp2 pp2 pipe-zero_bubble
sparse dp4 ep2 zero1
sparse dp4 ep4 zero2
sparse pp2
sparse3 dp2 ep2 zero1
video sp4 zero1
video dp2 sp2 zero2
video dp2 zero3 mb4 param-cpu
opt sp2 zero1
opt pp2
qwen tp2
qwen sp2 zero1
qwen pp2
lora dp2
lora dp2 fsdp2
dense-bf16 tp2
dense-bf16 sp2 zero2
sparse-bf16 dp2 ep2 zero2
"""


def rows(text: str, *marks: pytest.MarkDecorator) -> Iterator[Any]:
    for line in filter(None, text.splitlines()):
        yield pytest.param(*line.split(" ", 1), marks=marks, id=line)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path_factory.mktemp("run"), CLUSTER)
    yield trainer
    trainer.close()


def compare(trainer: Trainer, job: TrainingJob, configuration: Configuration) -> None:
    """Train the configuration; loss and norm must be those of plain data parallelism."""
    expected, told = trainer.reference(job), trainer.train(job, configuration)
    if job.precision == "bf16":  # 8 bits: one rounding of a loss near 8 is 0.03
        assert told.losses == pytest.approx(expected.losses, abs=0.03)
        return
    # Sums in another order: about 1e-6 in five steps. (Weight decay, 0.01 of the learning rate a
    # step, is 3e-5: DeepSpeed's CPU Adam forgets it unless told.)
    assert told.losses == pytest.approx(expected.losses, abs=5e-6)
    if told.norms:  # DeepSpeed keeps none in fp32 at ZeRO 0; that of adapters has four digits
        of_adapters = max(expected.norms) < 0.1
        assert told.norms == pytest.approx(expected.norms, rel=3e-5 if of_adapters else 1e-5)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *rows(SETTINGS + OTHERS, pytest.mark.slow),
        *rows(PAIRS + MORE_OTHERS, pytest.mark.long),
        *rows(REST, pytest.mark.slow, pytest.mark.all_knobs),
    ],
)
def test_every_configuration_trains_the_same(trainer: Trainer, name: str, words: str) -> None:
    job = JOBS[name]
    configuration = Configuration.parse(words if " mb" in words else f"{words} mb2")
    assert why_it_cannot_run(configuration, job, CLUSTER) == []
    assert unrunnable(configuration, job) == []
    compare(trainer, job, configuration)
    if job in (SPARSE, VIDEO):
        assert min(trainer.reference(job).norms) > 1.0  # so clipping was at work


def runnable(job: TrainingJob, *settings: tuple[str, Value]) -> bool:
    """Return whether two or four ranks here can train the job with these settings together."""
    needed = [dict(configuration_with(*setting).launch) for setting in settings]
    for ranks, zero_stage in itertools.product((1, 2, 4), (0, 1, 2, 3)):
        plain: dict[str, Any] = {"data_parallel": ranks, "zero_stage": zero_stage}
        for base in (plain, {**needed[0], **needed[-1]}, {**needed[0], **needed[-1], **plain}):
            knobs = {**base, **dict(settings)}
            knobs["micro_batch"] = 1 if knobs.get("data_parallel") == 4 else 2
            asked = Configuration.of(knobs)
            broken = broken_rules(asked, job, CLUSTER) or unrunnable(asked, job)
            if asked.world_size in (2, 4) and not broken:
                return True
    return False


def settings_of(rows: str) -> list[tuple[str, list[tuple[str, Value]]]]:
    """Return each row's job, and what it sets that is not a default."""
    found = []
    for line in filter(None, rows.splitlines()):
        name, words = line.split(" ", 1)
        used = [
            (knob, 2 if not KNOBS[knob].choices else value)
            for knob, value in Configuration.parse(words).launch.items()
            if value != KNOBS[knob].default
        ]
        found.append((name, used))
    return found


@pytest.mark.slow
def test_every_setting_and_every_pair_of_settings_is_trained() -> None:
    """Sizes of a split count as one setting, as do the numbers of layers that keep activations."""
    left_out = {"micro_batch", "every_4", "every_8"}  # sizes
    left_out |= {"compilation"}  # takes half a minute: `test_what_is_compiled`
    every = [pair for pair in values() if not left_out & {*pair}]
    trained: set[object] = set()
    for name, used in settings_of(SETTINGS + PAIRS):
        trained |= {(name, setting) for setting in used}
        trained |= {frozenset(pair) for pair in itertools.combinations(used, 2)}
    jobs = {"dense": DENSE, "sparse": SPARSE, "video": VIDEO}
    needed = {
        (name, setting)
        for name, job in jobs.items()
        for setting in every
        if (name, setting) in trained or runnable(job, setting)
    }
    assert needed <= trained
    by_ci = {setting for _, used in settings_of(SETTINGS + OTHERS) for setting in used}
    assert {setting for _, setting in needed} <= by_ci
    assert [
        (one, other)
        for one, other in itertools.combinations(every, 2)
        if one[0] != other[0] and frozenset((one, other)) not in trained
        if any(runnable(job, one, other) for job in jobs.values())
    ] == []


@pytest.mark.parametrize(
    "zero_stage", [pytest.param(1, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.slow)]
)
def test_activations_kept_on_the_host_train_the_same(
    trainer: Trainer, zero_stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU it only copies, and is refused for that; what it computes is tested all the same."""
    knobs = {**REFERENCE, "zero_stage": zero_stage, "activation_offload": "sync"}
    configuration = Configuration.of(knobs)
    (phrase,) = broken_rules(configuration, DENSE, CLUSTER)
    assert "needs a CUDA device" in phrase
    monkeypatch.setattr(tuner.workload.node.runner, "why_it_cannot_run", lambda *_: [])
    compare(trainer, DENSE, configuration)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "knobs", "words"),
    [
        (DENSE, {"pipeline_parallel": 2, "data_parallel": 2, "zero_stage": 2}, "ZeRO-2"),
        (SPARSE, {"expert_parallel": 2, "data_parallel": 2, "zero_stage": 3}, "MoE"),
        (DENSE, {"data_parallel": 2, "zero_stage": 3, "optimizer_offload": "async"}, "CUDA"),
        (SPARSE, {"tensor_parallel": 2}, "tp_plan"),
    ],
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
    monkeypatch.setattr(tuner.workload.node.runner, "why_it_cannot_run", lambda *_: [])
    monkeypatch.setattr(BuiltInJob, "refused", lambda *_: [])
    with pytest.raises(RuntimeError, match=words):
        trainer.train(job, asked)
