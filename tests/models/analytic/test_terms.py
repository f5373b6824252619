"""Terms of the models that one knob or one record brings: drives, memory clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tuner.models.analytic.constants import constants_of
from tuner.models.analytic.model import AnalyticModel
from tuner.planner.evaluate import forecast
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job

JOB = load_job("qwen2.5-7b")
CLUSTER = load_cluster("h100-32")
MODEL = AnalyticModel(JOB, CLUSTER)


def zero3(**knobs: object) -> Configuration:
    return Configuration.of(data_parallel=32, micro_batch=1, zero_stage=3, **knobs)


def test_where_the_optimizers_states_lie() -> None:
    said = MODEL.predict([zero3(optimizer_offload=where) for where in ("none", "cpu", "nvme")])
    device, host, time = said.memory_bytes, said.host_memory_bytes, said.step_time_s
    # 12 bytes of fp32 weight and moments and 2 of gradient a parameter leave, over 32 ranks.
    gone = 14 * MODEL.facts.parameters / 32
    assert device[0] - device[1] == pytest.approx(gone, rel=0.05)
    assert device[1] == device[2]
    assert host[0] < host[2] < host[1]
    assert time[0] < time[1] < time[2]
    # What the drive adds: in and out, 24 bytes a parameter, over a node's own drive.
    nodes = CLUSTER.nodes
    drive = 24 * MODEL.facts.parameters / nodes / constants_of(CLUSTER.device).nvme_Bps
    assert time[2] - time[1] == pytest.approx(drive, rel=0.05)


def test_where_the_parameters_lie() -> None:
    base = {"optimizer_offload": "cpu"}
    said = MODEL.predict(
        [zero3(**base, parameter_offload=where) for where in ("none", "cpu", "nvme")]
    )
    device, host, time = said.memory_bytes, said.host_memory_bytes, said.step_time_s
    shard = 2 * MODEL.facts.parameters / 32
    assert device[0] - device[1] == pytest.approx(shard, rel=0.05)
    assert device[1] == device[2]
    assert host[1] - host[0] == pytest.approx(CLUSTER.devices_per_node * shard, rel=0.05)
    assert host[2] == host[0]
    assert time[0] <= time[1] < time[2]
    # More micro-batches fetch them more often.
    many = AnalyticModel(replace(JOB, global_batch=8 * JOB.global_batch), CLUSTER)
    both = many.predict([zero3(**base, parameter_offload=where) for where in ("none", "nvme")])
    assert np.diff(both.step_time_s)[0] > 4 * (time[2] - time[0])


def test_a_slower_memory_slows_what_memory_bounds_and_saves_no_traffic() -> None:
    top = CLUSTER.device.memory_clock_MHz
    assert top is not None
    half = top // 2
    said = MODEL.predict([zero3(), zero3(memory_clock_MHz=top), zero3(memory_clock_MHz=half)])
    assert said.step_time_s[0] == said.step_time_s[1]
    assert said.step_time_s[2] > 1.05 * said.step_time_s[1]
    assert said.step_time_s[2] < 2 * said.step_time_s[1]
    assert said.power_W[2] < said.power_W[1]
    silent = replace(CLUSTER, device=replace(CLUSTER.device, memory_clock_MHz=None))
    same = AnalyticModel(JOB, silent).predict([zero3(), zero3(memory_clock_MHz=half)])
    assert same.step_time_s[0] == same.step_time_s[1]


# a GPU of one's own

DEVICE = """
type = "cuda"
memory_bytes = 48_000_000_000
peak_flops = 362e12
memory_bandwidth_Bps = 864e9
idle_W = 35.0
max_W = 350.0
clocks_MHz = { min = 210, max = 2520, step = 15 }
default_clock_MHz = 2520
sources = ["a data sheet"]
"""
NODE = """
device = "mine.toml"
devices_per_node = 4
nodes = 2
link_Bps = 32e9
network_Bps = 12.5e9
host_link_Bps = 32e9
host_memory_bytes = 512_000_000_000
clock_control = true
sources = ["a data sheet"]
"""


def test_a_user_adds_a_gpu_by_adding_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(DEVICE)
    (tmp_path / "node.toml").write_text(NODE)
    cluster = load_cluster(str(tmp_path / "node.toml"))
    said = forecast(load_job("opt-350m"), cluster, Configuration.of(data_parallel=8, micro_batch=2))
    assert said.breakdown.memory_bytes <= cluster.device.memory_bytes
    assert "unknown" in said.known_error[0]
    faster = DEVICE.replace("peak_flops = 362e12", "peak_flops = 724e12")
    (tmp_path / "mine.toml").write_text(faster)
    again = forecast(
        load_job("opt-350m"),
        load_cluster(str(tmp_path / "node.toml")),
        Configuration.of(data_parallel=8, micro_batch=2),
    )
    assert again.breakdown.step_time_s < said.breakdown.step_time_s


@pytest.mark.parametrize(
    "name", ["h100-32", "h200-8", "b200-8", "a100-8", "a100-40gb-8", "gh200-32", "jupiter-32"]
)
def test_every_shipped_gpu_predicts_something_sensible(name: str) -> None:
    cluster = load_cluster(name)
    model = AnalyticModel(load_job("opt-350m"), cluster)
    said = model.predict([Configuration.of(data_parallel=4, micro_batch=2)])
    most = 4 * cluster.device.max_W * (1 + cluster.supply_loss) + 2 * cluster.host_W
    assert 4 * cluster.device.idle_W < said.power_W[0] <= most
    assert 0.01 < said.step_time_s[0] < 100
    assert said.memory_bytes[0] < cluster.device.memory_bytes
