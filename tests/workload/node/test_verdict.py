"""The facts about a machine in five lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tuner.doctor.command import node_lines
from tuner.workload.node.facts import MeterFacts, NodeFacts, inspect_node
from tuner.workload.node.platforms.base import GpuFacts


@pytest.fixture
def facts(tmp_path: Path) -> NodeFacts:
    found = inspect_node(sys=tmp_path)
    found = replace(found, missing=())
    versions = {"torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.23.0", "ray": None}
    return replace(found, packages=versions)


def test_five_lines_say_what_trains_what_meters_and_that_it_can(facts: NodeFacts) -> None:
    lines = node_lines(facts)
    assert [line.split()[0] for line in lines] == [
        "verdict",
        "machine",
        "energy",
        "clocks",
        "software",
    ]
    assert "estimated, not metered: " in lines[2]
    assert "ray" not in lines[4]
    assert lines[0].startswith("verdict   ready, without an energy meter: ")


def test_a_gpu_node_is_named_by_its_gpus(facts: NodeFacts) -> None:
    gpus = tuple(GpuFacts(i, f"GPU-{i}", "NVIDIA H100", 80 * 2**30) for i in range(8))
    meters = (MeterFacts("nvml", True, "NVML total-energy counter"), *facts.meters)
    lines = node_lines(replace(facts, gpus=gpus, meters=meters, clock_control=True))
    assert "8 x NVIDIA H100" in lines[1]
    assert lines[0] == "verdict   ready: probes train here, in real DeepSpeed processes"
    assert lines[2] == "energy    metered by nvml: NVML total-energy counter"
    assert lines[3] == "clocks    searched, and put back"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"packages": {"torch": "2.13.0"}},
            "plans and measures commands; to search, install deepspeed, transformers",
        ),
        ({"meters": ()}, "cannot measure: there is no meter"),
    ],
)
def test_what_keeps_a_probe_from_running_is_the_verdict(
    facts: NodeFacts, changes: dict[str, object], said: str
) -> None:
    assert said in node_lines(replace(facts, **changes))[0]
