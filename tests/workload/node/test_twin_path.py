"""The whole GPU path on a twin node: real ranks, whose speed and power follow their GPU's clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.twin.front import law_J, small_job, works_s
from tests.twin import TwinNode
from tests.twin.specimens import CORE_GPU
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import ProbeRequest, WindowPolicy

pytestmark = [
    pytest.mark.needs("cc"),
    pytest.mark.real,
    pytest.mark.quiet,
    pytest.mark.timeout(600),
]

WINDOW = WindowPolicy(2.0, 3, 4.0, 0.01, settle_s=0.5, idle_s=0.5, check_drift=False)


@pytest.mark.parametrize(
    ("launch", "live"),
    [
        pytest.param(
            {"data_parallel": 1},
            (Settings(clock_MHz=1410), Settings(clock_MHz=710)),
            id="one rank",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"data_parallel": 1, "pipeline_parallel": 2},
            (Settings(clock_MHz=(1410, 710)),),
            id="a clock a stage",
            marks=pytest.mark.long,
        ),
    ],
)
def test_energy_time_and_clocks_are_the_twins(
    twin_node: Callable[..., TwinNode],
    tmp_path: Path,
    launch: dict[str, int],
    live: tuple[Settings, ...],
) -> None:
    node = twin_node(CORE_GPU, CORE_GPU, virtual_time=False, children=True)
    asked = Configuration.of({**launch, "micro_batch": 1})
    runner = LocalRunner(small_job(), detect_cluster(), run_dir=tmp_path / "run")
    try:
        record = runner.run(ProbeRequest("p", asked.launch, live, WINDOW))
    finally:
        runner.close()
    assert record.ok, record.failure
    assert record.meter.mark == "twin"
    assert [node.locked_MHz(gpu) for gpu in range(2)] == [None, None]
    works = works_s(small_job(), asked)
    assert len(record.measurements) == len(live)
    for measured in record.measurements:
        clocks = measured.live["clock_MHz"]
        each = clocks if isinstance(clocks, tuple) else (clocks,) * len(works)
        busy = [work_s * node.device_s(clock) for work_s, clock in zip(works, each, strict=True)]
        # What is left is the wait for the agent's word at a boundary.
        assert measured.step_time_s == pytest.approx(max(busy), rel=0.02)
        if isinstance(clocks, tuple):
            for gpu, clock in enumerate(clocks):
                assert measured.delivered[f"clock_MHz.{gpu}"] == pytest.approx(clock, rel=0.02)
            window_s = measured.window_s
            energy_J = sum(
                law_J(node, Settings(clock_MHz=clock), window_s, measured.steps * busy_s, gpus=1)
                for clock, busy_s in zip(clocks, busy, strict=True)
            )
        else:
            energy_J = law_J(node, measured.live, measured.window_s, measured.steps * sum(busy))
        assert measured.energy_J == pytest.approx(energy_J, rel=0.01)


@pytest.mark.long
def test_a_probe_with_a_hot_gpu_is_marked(
    twin_node: Callable[..., TwinNode], tmp_path: Path
) -> None:
    node = twin_node(CORE_GPU, CORE_GPU, virtual_time=False, children=True)
    node.set(step_s=0.1)  # long beside what the ranks compute on cores
    node.set(1, heat_MHz=700)
    asked = Configuration.of({"data_parallel": 2, "micro_batch": 1})
    window = WindowPolicy(12.0, 3, 15.0, 0.001, settle_s=0.5, idle_s=0.5, check_drift=False)
    runner = LocalRunner(small_job(), detect_cluster(), run_dir=tmp_path / "run")
    try:
        record = runner.run(ProbeRequest("p", asked.launch, (Settings(),), window))
    finally:
        runner.close()
    assert record.ok, record.failure
    (named,) = record.environment["stragglers"]
    assert (named["state"]["device"], named["cause"]) == (1, "heat")
    assert any(flag.startswith("straggler: GPU 1: heat") for flag in record.measurements[0].flags)
