"""The benchmark of `tuner fit`: torch's count of a small model, and the published runs."""

from dataclasses import replace

import pytest

from benchmarks.fit import errors_of_runs, predicted_apart, torch_bytes
from benchmarks.validation import reports
from benchmarks.validation.comparison import rows_of
from benchmarks.validation.ran import read_runs
from benchmarks.validation.torch_fsdp import fsdp_bytes
from benchmarks.validation.torch_memory import count
from tuner.search_spaces.job import load_job
from tuner.search_spaces.model_facts import facts_of

JOB = load_job("tiny-opt")


@pytest.mark.slow
def test_torch_counts_parameters_gradients_and_what_is_kept() -> None:
    plain, again, twice = (count(JOB, b, c) for b, c in ((1, "none"), (1, "full"), (2, "none")))
    element = 4 if JOB.precision == "fp32" else 2
    assert plain.parameters == plain.gradients
    # Beside parameters a model may hold a few buffers (positions, masks).
    assert plain.parameters == pytest.approx(element * facts_of(JOB).parameters, rel=0.01)
    assert again.kept < plain.kept < plain.peak
    assert again.peak < plain.peak
    # Values grow with the micro-batch, masks and positions do not.
    assert twice.kept == pytest.approx(2 * plain.kept, rel=0.02)
    assert torch_bytes(JOB, plain) > plain.peak


@pytest.mark.slow
def test_torch_counts_gradients_of_adapters_alone() -> None:
    job = load_job("tiny-qwen2.5-lora")
    counted = count(job, 1, "none")
    assert counted.gradients == 4 * facts_of(job).trainable_parameters
    # The models take LoRA's activations from what torch keeps of them.
    for micro_batch in (1, 8):
        truth = torch_bytes(job, count(job, micro_batch, "none"))
        assert predicted_apart(job, micro_batch, "none") == pytest.approx(truth, rel=0.05)
    everything = replace(job, lora=None)
    assert counted.kept < count(everything, 1, "none").kept


@pytest.mark.slow
def test_torch_counts_what_fsdp2_holds() -> None:
    parameters = facts_of(JOB).parameters
    sizes = {
        (ranks, groups, reshard): fsdp_bytes(
            JOB, 1, "full", ranks=ranks, groups=groups, reshard=reshard
        )
        for ranks, groups, reshard in ((2, 1, True), (4, 1, True), (4, 2, True), (4, 1, False))
    }
    # Parameters, gradients and two moments in fp32: the shards of two ranks are twice those of 4.
    # HSDP holds a group's sum beside the reduced gradients that it was added to until its end.
    assert sizes[2, 1, True] - sizes[4, 1, True] == pytest.approx(16 * parameters / 4, rel=0.02)
    assert sizes[4, 2, True] == pytest.approx(sizes[2, 1, True], rel=0.02)
    assert sizes[4, 1, True] < sizes[4, 1, False] < sizes[4, 1, True] + 4 * parameters


def test_predictions_apart_have_neither_context_nor_communication() -> None:
    job = load_job("qwen2.5-7b")
    states = 16 * facts_of(job).parameters / 8
    small, large = (predicted_apart(job, b, "full") - states for b in (1, 2))
    assert large == pytest.approx(2 * small)


def test_published_runs_are_told_apart() -> None:
    runs = read_runs()
    assert {run.ran for run in runs} == {True, False}
    lines, errors, false_yes, false_no = errors_of_runs(runs)
    assert len(lines) == len(runs) + 1
    assert sorted(abs(error) for error in errors)[len(errors) // 2] < 0.05
    assert false_yes + false_no == sum("WRONG" in line for line in lines) <= 2


def test_a_wrong_answer_is_counted() -> None:
    ran = next(run for run in read_runs() if run.ran)
    claimed = replace(ran, row={**ran.row, "outcome": "ran out"})
    assert errors_of_runs([claimed])[2:] == (1, 0)
    huge = replace(ran, row={**ran.row, "configuration": "dp64 mb16", "blocks": ""})
    assert errors_of_runs([huge])[2:] == (0, 1)


def test_reports_of_one_gpu_are_never_told_wrong() -> None:
    # Those of dense models that need no library; `python -m benchmarks.fit --reports` has all.
    rows = rows_of(reports.TABLE)
    rows = [row for row in rows if "llama" in row["model"] or "mistral" in row["model"]]
    found = [reports.judged(row) for row in rows]
    assert len(found) == 31
    assert [each.told for each in found].count("right") >= 27
    assert "WRONG" not in [each.told for each in found]
    assert all(each.likelier_is_right for each in found)
    claimed = reports.judged({**rows[0], "outcome": "ran out", "device": "H100-SXM-80GB"})
    assert claimed.told == "WRONG"
    errors = sorted(abs(each.error) for each in found if each.error is not None)
    assert errors[len(errors) // 2] < 0.05
    assert errors[-1] < 0.2
