"""Peak memory of QLoRA: measured rows, and configurations on which the rule would be wrong."""

from dataclasses import replace

import pytest

from benchmarks.validation.qlora import PROGRAM, read_runs
from tuner.models.analytic.model import AnalyticModel
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import LoRA, TrainingJob, load_job
from tuner.search_spaces.model_facts import job_state_bytes

JOB = load_job("qwen2.5-7b")
QLORA = replace(JOB, lora=LoRA(16, quantization="nf4-double"))
ONE = replace(load_cluster("a100-8"), devices_per_node=1)
CHOSEN = Configuration.of(data_parallel=1, micro_batch=1, activation_checkpointing="full")


def test_the_measured_peaks_of_checkpointed_qlora_are_met() -> None:
    quantized = [run for run in read_runs() if run.row["quantization"] != "none"]
    checkpointed = [run for run in quantized if run.row["checkpointing"] == "full"]
    assert len(checkpointed) == 9
    for run in checkpointed:
        assert run.predicted_GiB() == pytest.approx(run.measured_GiB, rel=0.01)


def memory(job: TrainingJob) -> dict[str, float]:
    return dict(AnalyticModel(job, ONE).breakdown(CHOSEN).memory)


def test_a_program_that_casts_its_embeddings_back_needs_less() -> None:
    """PEFT's widening is not QLoRA's: qlora.py --bf16 undoes it."""
    wide = replace(QLORA, program=PROGRAM)
    narrow = replace(QLORA, program=replace(PROGRAM, frozen_16bit=True))
    outside = 2 * 152_064 * 3584 + 3584  # table, head and the last norm
    assert memory(wide)["parameters"] - memory(narrow)["parameters"] == pytest.approx(2 * outside)
    assert memory(wide)["activations"] == pytest.approx(2 * memory(narrow)["activations"])
    gained = job_state_bytes(wide, 0, 1) - job_state_bytes(narrow, 0, 1)
    assert gained == pytest.approx(2 * outside)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_adapters_beside_weights_that_are_not_quantized_widen_nothing(precision: str) -> None:
    plain = replace(JOB, lora=LoRA(16), precision=precision)
    cast = replace(plain, program=replace(plain.program, frozen_16bit=True))
    assert memory(plain) == memory(cast)


def test_a_quantized_model_that_computes_in_fp32_is_not_widened_twice() -> None:
    whole = replace(QLORA, precision="fp32")
    cast = replace(whole, program=replace(PROGRAM, frozen_16bit=True))
    assert memory(replace(whole, program=PROGRAM)) == memory(cast)


def test_pure_bf16_and_quantized_weights_are_predicted() -> None:
    job = replace(QLORA, program=replace(PROGRAM, pure_bf16=True))
    assert memory(job)["activations"] == memory(replace(QLORA, program=PROGRAM))["activations"]
