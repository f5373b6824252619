"""Enumeration, presets, the baseline, and the finite list of candidates."""

import json
import pickle
from dataclasses import replace
from itertools import product

import pytest

from tuner.search_spaces.cluster import Cluster, Device, cluster_names, load_cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError, InvalidConfiguration
from tuner.search_spaces.job import job_names, load_job
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.model_facts import facts_of
from tuner.search_spaces.rules import broken_rules, unrunnable
from tuner.search_spaces.space import (
    Auto,
    Candidates,
    SearchSpace,
    default_configuration,
    load_space,
    space_names,
)

CORE = Device("core", "cpu", 4 << 30, 5e10, 1e10, 2.0, 8.0)
H100 = load_cluster("h100-32")
QWEN = load_job("qwen2.5-7b")
TINY = load_job("tiny-gpt")


def machine(cores: int) -> Cluster:
    return Cluster("this-machine", CORE, cores)


#: Knobs with a space of their own, which would multiply the number of configurations of `full`.
OF_THEIR_OWN = {"compilation", "fp8", "pipeline_schedule", "virtual_stages", "sequence_method"}


@pytest.mark.slow
def test_full_gives_more_than_ten_thousand_on_four_nodes():
    candidates = load_space("full").candidates(QWEN, H100)
    assert len(candidates) > 10_000
    assert len(set(candidates.configurations)) == len(candidates)
    assert {n for launch in candidates.launches for n in launch} == {
        n
        for n in KNOBS
        if KNOBS[n].kind == "launch" and n != "global_batch" and n not in OF_THEIR_OWN
    }
    assert {n for lives in candidates.lives for live in lives for n in live} == {
        "clock_MHz",
        "power_limit_W",
    }


@pytest.mark.parametrize("space", space_names())
@pytest.mark.parametrize(
    ("job", "cluster"),
    [
        (TINY, machine(1)),
        (TINY, machine(3)),
        (load_job("opt-350m"), load_cluster("a100-40gb-8")),
        (QWEN, load_cluster("jupiter-32")),
        (load_job("olmoe-1b-7b"), load_cluster("h200-8")),
    ],
)
def test_every_candidate_keeps_the_global_batch_and_breaks_no_rule(space, job, cluster):
    candidates = load_space(space).candidates(job, cluster)
    assert len(candidates) >= 1
    for launch in candidates.launches:
        c = Configuration(launch)
        accumulation = c.accumulation(job.global_batch)
        assert c.micro_batch * accumulation * c.data_parallel == job.global_batch
        assert c.world_size <= cluster.devices
    for configuration in candidates.configurations[:: max(1, len(candidates) // 500)]:
        assert broken_rules(configuration, job, cluster) == []
    offered = set(cluster.clocks_MHz)
    tells_clocks = any(KNOBS[name].kind == "live" for name in load_space(space).choices)
    for lives in candidates.lives:
        assert lives[0] == Settings()
        assert {live["clock_MHz"] for live in lives if "clock_MHz" in live} <= offered
        assert (len(lives) > 1) == (cluster.clock_control and tells_clocks)


def test_pruned_walk_finds_exactly_what_brute_force_finds():
    """Against every combination judged by every rule, on a space small enough for it."""
    space = SearchSpace(
        "small",
        {
            "zero_stage": (0, 1, 2, 3),
            "clock_MHz": (345, 1200, 1203, (1200, 1980)),
            "data_parallel": Auto(max=8),
            "pipeline_parallel": (1, 2, 64),
            "tensor_parallel": (1, 2, 3),
            "optimizer_offload": ("none", "cpu", "async"),
            "power_limit_W": (100, 500),
        },
    )
    values = space.values(QWEN, H100)
    expected = set()
    for picked in product(
        *(v if KNOBS[n].kind == "launch" else (None, *v) for n, v in values.items())
    ):
        knobs = {n: v for n, v in zip(values, picked, strict=True) if v is not None}
        configuration = Configuration.of(knobs)
        if not broken_rules(configuration, QWEN, H100):
            expected.add(configuration)
    found = space.candidates(QWEN, H100)
    assert set(found) == expected
    assert len(found) == len(expected) > 50
    assert any(isinstance(c.get("clock_MHz"), tuple) for c in found)


@pytest.mark.parametrize("cores", [1, 2, 4])
def test_default_space_on_a_machine_without_a_gpu(cores):
    candidates = load_space("default").candidates(TINY, machine(cores))
    assert len(candidates) >= 8  # what one run of `tuner optimize` probes at least
    assert set(candidates.lives) == {(Settings(),)}
    assert {c.data_parallel for c in candidates} == {n for n in (1, 2, 4) if n <= cores}
    assert all(not unrunnable(c) for c in candidates)
    assert default_configuration(TINY, machine(cores)) in candidates


@pytest.mark.parametrize("job", job_names())
@pytest.mark.parametrize("cluster", cluster_names())
def test_default_space_holds_only_what_is_run_today_and_the_baseline(job, cluster):
    job, cluster = load_job(job), load_cluster(cluster)
    candidates = load_space("default").candidates(job, cluster)
    assert all(not unrunnable(Configuration(launch), job) for launch in candidates.launches)
    baseline = default_configuration(job, cluster)
    assert baseline.live == Settings()
    assert candidates[candidates.index_of(baseline)] == baseline


def test_clocks_space_is_the_baseline_launch_alone():
    candidates = load_space("clocks").candidates(QWEN, H100)
    assert candidates.launches == (default_configuration(QWEN, H100).launch,)
    clocks = [live["clock_MHz"] for live in candidates.lives[0] if live]
    assert clocks == sorted(clocks)
    assert clocks[-1] == 1980
    assert len(clocks) == 16
    assert min(clocks) >= 0.4 * 1980


@pytest.mark.parametrize(
    ("job", "cluster", "expected"),
    [
        (TINY, machine(1), {"data_parallel": 1, "micro_batch": 8, "zero_stage": 0}),
        (TINY, machine(2), {"data_parallel": 2, "micro_batch": 4, "zero_stage": 0}),
        (TINY, machine(3), {"data_parallel": 2, "micro_batch": 4, "zero_stage": 0}),
        (TINY, machine(64), {"data_parallel": 8, "micro_batch": 1, "zero_stage": 0}),
        # 122 GB of model states: stage 1 over 32 ranks leaves 33 GB of them on each.
        (QWEN, H100, {"data_parallel": 32, "micro_batch": 2, "zero_stage": 1}),
        # Over 8 ranks of 40 GB, 2 + 14/8 bytes a parameter are 28.6 GB: stage 2.
        (QWEN, load_cluster("a100-40gb-8"), {"data_parallel": 8, "zero_stage": 2}),
        # On one GPU nothing fits, so the optimizer's states move out.
        (
            QWEN,
            replace(H100, devices_per_node=1, nodes=1),
            {"data_parallel": 1, "zero_stage": 1, "optimizer_offload": "cpu"},
        ),
    ],
)
def test_baseline_is_what_a_user_would_run(job, cluster, expected):
    baseline = default_configuration(job, cluster)
    assert {name: baseline.get(name) for name in expected} == expected
    assert broken_rules(baseline, job, cluster) == []


def test_baseline_checkpoints_only_where_activations_cannot_fit():
    assert default_configuration(QWEN, H100).get("activation_checkpointing") == "none"
    long = replace(QWEN, sequence_length=32768)
    assert default_configuration(long, H100).get("activation_checkpointing") == "full"


def test_baseline_of_a_job_that_cannot_run_says_why():
    with pytest.raises(InvalidConfiguration, match="fp16 does not run on a CPU"):
        default_configuration(replace(TINY, precision="fp16"), machine(2))


def test_auto_values():
    space = SearchSpace(
        "auto",
        {
            "data_parallel": Auto(),
            "micro_batch": Auto(max=12),
            "optimizer_offload": Auto(),
            "clock_MHz": Auto(count=3),
            "power_limit_W": Auto(count=2),
        },
    )
    job = replace(TINY, global_batch=24)
    values = space.values(job, machine(12))
    assert values["data_parallel"] == (1, 2, 3, 4, 6, 8, 12)
    assert values["micro_batch"] == (1, 2, 3, 4, 6, 8, 12)
    assert values["optimizer_offload"] == ("none", "cpu", "async", "nvme")
    assert values["clock_MHz"] == values["power_limit_W"] == ()
    on_gpu = space.values(job, H100)
    assert on_gpu["clock_MHz"][0] == 345
    assert on_gpu["clock_MHz"][-1] == 1980
    assert len(on_gpu["clock_MHz"]) == 3
    assert on_gpu["power_limit_W"] == (200, 450)


# Candidates.


def test_candidates_share_objects_and_find_their_own():
    candidates = load_space("default").candidates(QWEN, H100)
    assert len(candidates) == len(candidates.configurations) == sum(map(len, candidates.lives))
    for launch in candidates.launches[::5]:
        indices = candidates.indices_of_launch(launch)
        assert all(candidates[i].launch is launch for i in indices)
    for i in range(0, len(candidates), 97):
        assert candidates.index_of(candidates[i]) == i
        read = Configuration.from_json(json.loads(json.dumps(candidates[i].to_json())))
        assert candidates.index_of(read) == i
    assert len({id(live) for lives in candidates.lives for live in lives}) == len(
        {live for lives in candidates.lives for live in lives}
    )


def test_a_knob_left_out_means_its_default():
    candidates = load_space("default").candidates(TINY, machine(2))
    short = Configuration.of(micro_batch=4)
    found = candidates[candidates.index_of(short)]
    assert (
        found.key
        == Configuration.of(
            data_parallel=1,
            micro_batch=4,
            zero_stage=0,
            optimizer_offload="none",
            activation_checkpointing="none",
        ).key
    )
    assert short in candidates
    assert candidates.index_of(short) in candidates.indices_of_launch(short.launch)


def irregular():
    """A recorded table's: knobs of its own, and launches with different live settings."""
    rows = [(32, 100), (64, 150), (32, 150), (64, 100), (128, 250)]
    return [Configuration(Settings(batch=b), Settings(power_limit_W=w)) for b, w in rows]


def test_candidates_from_an_irregular_list():
    candidates = Candidates.from_configurations(irregular())
    assert set(candidates) == set(irregular())
    assert [launch["batch"] for launch in candidates.launches] == [32, 64, 128]
    assert list(candidates.indices_of_launch(Settings(batch=64))) == [2, 3]
    assert [c.live["power_limit_W"] for c in candidates] == [100, 150, 150, 100, 250]
    absent = Configuration(Settings(batch=128), Settings(power_limit_W=100))
    assert absent not in candidates
    with pytest.raises(InputError, match=r"batch=128 .* is not one of the 5"):
        candidates.index_of(absent)
    with pytest.raises(InputError, match="batch=7"):
        candidates.indices_of_launch(Settings(batch=7))
    with pytest.raises(InputError, match="twice"):
        Candidates.from_configurations([*irregular(), irregular()[0]])


def test_candidates_of_any_order_group_alike():
    candidates = load_space("default").candidates(TINY, machine(4))
    again = Candidates.from_configurations(candidates.configurations)
    assert again == candidates
    assert hash(again) == hash(candidates)


def test_a_hundred_thousand_survive_pickling():
    rows = (
        Configuration(Settings(batch=i), Settings(clock_MHz=j))
        for i in range(10_000)
        for j in range(10)
    )
    candidates = Candidates.from_configurations(rows)
    assert len(candidates) == 100_000
    again = pickle.loads(pickle.dumps(candidates))
    assert again == candidates
    assert again.index_of(candidates[77_777]) == 77_777
    assert len({id(lives) for lives in candidates.lives}) == 1


def test_space_and_facts_survive_pickling():
    space = load_space("full")
    assert pickle.loads(pickle.dumps(space)) == space
    assert pickle.loads(pickle.dumps(facts_of(QWEN))) == facts_of(QWEN)
    assert pickle.loads(pickle.dumps(H100)) == H100


def test_configurations_survive_json():
    staged = Configuration.of(pipeline_parallel=2, clock_MHz=[1200, 1980])
    assert Configuration.from_json(json.loads(json.dumps(staged.to_json()))) == staged


def test_launches_of_one_number_of_gpus_are_those_among_all() -> None:
    job, cluster = load_job("opt-350m"), load_cluster("a100-8")
    space = load_space("parallelism")
    every = list(space.groups(job, cluster))
    for gpus in (1, 4, 8):
        wanted = [g for g in every if Configuration(g[0]).world_size == gpus]
        assert wanted
        assert list(space.groups(job, cluster, gpus=gpus)) == wanted
    assert not list(space.groups(job, cluster, gpus=3))
