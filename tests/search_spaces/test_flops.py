"""FLOPs and parameters from one place: against DeepSpeed, torch's counter, and built models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache

import pytest

from tuner.search_spaces.job import job_names, load_job

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

from benchmarks.flops import Count, built, counted, inputs_of, parameters_off


@lru_cache
def count_of(name: str) -> Count:
    job = load_job(name)
    return counted(job, built(job), inputs_of(job))


@pytest.fixture(autouse=True)
def _forget_the_program() -> Iterator[None]:
    """The program's modules have plain names, which other tests import from elsewhere."""
    yield
    for name in ("causal_lm", "multimodal"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", [name for name in job_names() if name.startswith("tiny")])
def test_flops_are_those_of_deepspeeds_profiler_and_of_torchs_counter(name: str) -> None:
    count = count_of(name)
    assert abs(count.off("deepspeed")) < 0.02
    # The same but for norms, activations and softmax, which the profiler counts and we do not.
    assert count.deepspeed > count.ours
    assert count.off("products") == 0
    assert count.off("torch") == 0
    # Backward, twice the forward pass: frames are not learnt, so their first convolution has no
    # gradient to hand on.
    assert count.off("torch_step") == pytest.approx(0, abs=0.01 if load_job(name).frames else 1e-12)


def test_what_the_profiler_misses_is_the_grouped_product_of_experts() -> None:
    """The day it does not, `benchmarks.flops` need not loop over the experts any more."""
    count = count_of("tiny-olmoe")
    # Two FLOPs a parameter, 2 samples of 64 tokens, 2 layers, 2 experts of 3 matrices.
    missed = 2 * (2 * 64) * 2 * 2 * (3 * 128 * 64)
    assert count.deepspeed - count.as_it_comes == pytest.approx(missed, rel=0.01)


@pytest.mark.parametrize("name", job_names())
def test_parameters_are_those_of_the_model_that_is_trained(name: str) -> None:
    job = load_job(name)
    assert parameters_off(job, built(job, weights=False)) == 0
