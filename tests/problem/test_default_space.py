"""The space that is searched when the user names none."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tuner
from tests.support.studies import problem_of_job
from tuner.problem.from_job import problem_parts
from tuner.problem.job_request import JobRequest
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.search_spaces.space import load_space


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
