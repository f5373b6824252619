"""What a search says of its knobs: in play, or not and why."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tuner.problem.from_job import knobs_in_play
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job
from tuner.search_spaces.rules import broken_rules, unrunnable
from tuner.search_spaces.space import SearchSpace, load_space

JOB = load_job("tiny-gpt")
CPU = load_cluster("cpu-2")


def said(space: SearchSpace, job=JOB, cluster=CPU) -> tuple[str, ...]:
    return knobs_in_play(space.candidates(job, cluster), space, job, cluster)


def test_the_default_space_on_a_cpu_says_what_it_leaves_out() -> None:
    turned, absent, left = said(load_space("default"))
    assert turned.startswith("in play: data_parallel, micro_batch, zero_stage")
    assert "tensor_parallel" not in turned
    assert absent == (
        "not in space 'default': tensor_parallel, pipeline_parallel, sequence_parallel, "
        "expert_parallel and 9 others (`tuner list spaces` lists others)"
    )
    assert left == "not in play: global_batch: the job says its steps at one size only"


def test_a_knob_that_a_rule_refuses_gives_the_rules_reason() -> None:
    *_, left = said(load_space("full"))
    assert "activation_offload: activation_offload sync needs a CUDA device" in left
    assert "expert_parallel: expert_parallel 2 needs a mixture-of-experts model" in left


@pytest.mark.extra("tuner.models.job_prior")
def test_a_knob_that_the_models_do_not_know_is_said() -> None:
    *_, last = said(load_space("compilation"))
    assert last.startswith("the models predict no effect of compilation: ")


def test_the_steps_of_each_global_batch_are_said() -> None:
    space = SearchSpace("sizes", {"global_batch": (8, 16)})
    turned, *_ = said(space, replace(JOB, steps_at={8: JOB.steps, 16: 150}))
    assert f"global_batch (the solution takes {JOB.steps} at 8, 150 at 16 steps)" in turned


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_whatever_the_space_leaves_out_is_left_out_for_a_reason(ranks: int) -> None:
    """Every combination of values is a candidate, or at least one rule says why it is not."""
    cluster, space = replace(CPU, devices_per_node=ranks), load_space("cpu-all")
    job = replace(JOB, model={**JOB.model, "num_hidden_layers": 4})
    values = {n: v for n, v in space.values(job, cluster).items() if n != "clock_MHz"}
    candidates = space.candidates(job, cluster)
    assert len(candidates) > 100
    refused = 0
    for combination in product(*values.values()):
        asked = Configuration.of(dict(zip(values, combination, strict=True)))
        phrases = broken_rules(asked, job, cluster)
        assert bool(phrases) == (asked not in candidates), asked.key
        refused += bool(phrases)
        assert all(len(p.split()) > 4 for p in [*phrases, *unrunnable(asked, job)])
    assert refused > 0
