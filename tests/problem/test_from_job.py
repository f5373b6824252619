"""The space of a job: what is searched when the user names none, and what is said of its knobs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

import tuner
from tests.support.studies import problem_of_job
from tuner.problem.from_job import knobs_in_play, problem_parts
from tuner.problem.job_request import JobRequest
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.search_spaces.rules import broken_rules, unrunnable
from tuner.search_spaces.space import SearchSpace, load_space


@pytest.mark.extra("tuner.search_spaces.model_reading")
@pytest.mark.parametrize(
    ("job", "cluster", "space"),
    [
        ("tiny-gpt", "cpu-2", "default"),
        ("opt-350m", "a100-8", "default"),
        ("qwen2.5-7b", "h200-8", "default"),  # 122 GB of states, 151 GB of memory
        ("qwen2.5-7b", "a100-8", "large"),  # 86 GB of memory
        ("opt-350m", "h100-32", "large"),  # four nodes
        ("olmoe-1b-7b", "h200-8", "experts"),
        ("olmoe-1b-7b", "h100-32", "experts"),
    ],
)
def test_several_nodes_and_large_models_are_split(job: str, cluster: str, space: str) -> None:
    problem = problem_of_job(job, cluster, predicted=True)
    assert problem.identity["space"]["name"] == space
    degrees = {c.get("tensor_parallel") for c in problem.candidates}
    assert (len(degrees) > 1) == (space != "default")
    spread = {c.get("expert_parallel") for c in problem.candidates}
    assert (len(spread) > 1) == (space == "experts")
    said = [note for note in problem.notes if note.startswith(f"space {space!r} is searched for ")]
    assert len(said) == (space != "default")
    (absent,) = [n for n in problem.notes if n.startswith(f"not in space {space!r}: ")]
    assert ("tensor_parallel" in absent) == (space == "default")


def test_a_single_device_splits_nothing() -> None:
    alone = replace(load_cluster("a100-8"), devices_per_node=1)
    asked = problem_parts(JobRequest("lmm-72b", alone))
    assert asked.space_name == "default"
    assert not any("is searched for" in note for note in asked.notes)


def test_a_mixture_of_experts_on_one_device_divides_nothing() -> None:
    alone = replace(load_cluster("h200-8"), devices_per_node=1)
    assert problem_parts(JobRequest("olmoe-1b-7b", alone)).space_name == "default"


def test_a_configuration_that_states_zero_experts_is_dense() -> None:
    """Families with and without experts state 0 for their dense sizes."""
    dense = load_job("qwen2.5-7b")
    dense = replace(dense, model={**dense.model, "num_experts": 0})
    assert problem_parts(JobRequest(dense, load_cluster("h200-8"))).space_name == "default"


def test_the_space_of_experts_is_the_large_one_and_what_a_mixture_needs() -> None:
    """The best of Qwen3-30B-A3B moves activations to the host, and was not in the space."""
    large, experts = load_space("large").choices, load_space("experts").choices
    assert experts.keys() - large.keys() == {"expert_parallel", "activation_offload"}
    same = large.keys() - {"activation_checkpointing"}
    assert {n: experts[n] for n in same} == {n: large[n] for n in same}


def test_the_large_space_has_every_launch_knob_of_the_default_one() -> None:
    large, default = load_space("large").choices, load_space("default").choices
    assert default.keys() < large.keys()
    between = {"tensor_parallel", "pipeline_parallel", "zero_hpz_partition_size"}
    assert large.keys() - default.keys() == between


@pytest.mark.extra("tuner.simulated.runner")
@pytest.mark.usefixtures("next_candidates")
def test_an_existing_run_keeps_the_space_that_it_names(tmp_path) -> None:
    """Releases before the space "large" searched "default" on several nodes."""
    asked = {"cluster": "h100-32", "executor": "simulated", "name": "old", "runs_dir": tmp_path}
    asked["report"] = False
    one, two = (tuner.SearchSettings(max_probes=n) for n in (1, 2))
    before = tuner.optimize("opt-350m", space="default", search=one, **asked)
    after = tuner.optimize("opt-350m", search=two, **asked)
    assert after.about["space"] == before.about["space"]
    assert after.about["space"]["name"] == "default"
    assert after.spent.probes == 2
    with pytest.raises(InputError, match=r"space\.name was default and is large"):
        tuner.optimize("opt-350m", space="large", search=two, **asked)


@pytest.mark.extra("tuner.planner.plan")
def test_a_plan_says_what_is_not_searched(tmp_path) -> None:
    said: list[str] = []
    tuner.plan(
        "opt-350m",
        cluster="h100-32",
        runs_dir=tmp_path,
        report=False,
        on_progress=lambda event: said.append(event.message),
    )
    assert said[0].startswith("space 'large' is searched for 4 nodes")
    assert said[1].startswith("not in space 'large': sequence_parallel, expert_parallel, ")


# ---- knobs in play, or not and why


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
