"""The whole GPU path on a machine without one: real ranks on cores, metered and clocked as GPUs.

The ranks train for real over gloo; meter and governor speak to a twin node's NVML as they would to
a driver. Its GPUs are always busy and clocks do not slow the ranks, or, in the last two tests,
speed and power of the ranks follow their GPU's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.twin.front import law_J, small_job, works_s
from tests.twin import TwinGpu, TwinNode
from tests.twin.specimens import CORE_GPU
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.job import load_job
from tuner.workload.node.clocks.governor import NvmlGovernor
from tuner.workload.node.meters.nvml import NvmlMeter
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import Measurement, ProbeRequest, WindowPolicy
from tuner.workload.records.trace import read_power, recover_pending

pytestmark = [pytest.mark.needs("cc"), pytest.mark.real, pytest.mark.quiet]

Make = Callable[..., TwinNode]
BUSY = TwinGpu(load=1.0)
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}  # leaves the cores
CLOCKS = (900, 1200, 1410)
PHASES = {"data", "forward", "backward", "communication", "optimizer", "boundary"}


def runner_on(run_dir: Path, *, keep: bool = False) -> LocalRunner:
    """Ranks on this machine's cores, under the clocks and counters of these GPUs."""
    here = detect_cluster(environ=HIDDEN)
    device = replace(here.device, clocks_MHz=CLOCKS, default_clock_MHz=1410)
    return LocalRunner(
        load_job(),
        replace(here, device=device, clock_control=True),
        run_dir=run_dir,
        meter=NvmlMeter(environ={}),
        governor=NvmlGovernor(environ={}, guarded=False),
        keep=keep,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("one_fork_server")
def test_an_open_probe_goes_on_at_other_clocks_in_one_launch(
    twin_node: Make, tmp_path: Path
) -> None:
    node = twin_node(BUSY, BUSY, virtual_time=False)
    low, middle, high = (Settings(clock_MHz=clock) for clock in CLOCKS)
    locked: list[object] = []

    def next_settings(
        request: ProbeRequest, measurements: Sequence[Measurement]
    ) -> tuple[Settings, ...]:
        locked.append(node.locked_MHz(0))
        return {1: (low,), 2: (middle,)}.get(len(measurements), ())

    launch = Configuration.of(data_parallel=1, micro_batch=4).launch
    window = WindowPolicy(min_s=0.5, max_s=1.0, settle_s=0.1, check_drift=False)
    asked = ProbeRequest("open", launch, (high,), window, extendable=True)
    with closing(runner_on(tmp_path)) as runner:
        record = runner.run_interactive(asked, next_settings)
    assert record.ok, record.failure
    assert [m.live for m in record.measurements] == [high, low, middle]
    assert record.request.live == (high, low, middle)
    # The launch waits at the clock of its last window.
    assert locked == [(1410, 1410), (900, 900), (1200, 1200)]
    assert node.locked_MHz(0) is None
    assert record.energy_J > sum(m.energy_J for m in record.measurements)


@pytest.mark.slow
@pytest.mark.usefixtures("one_fork_server")
def test_a_probe_sweeps_clocks_and_energy_is_the_counters(twin_node: Make, tmp_path: Path) -> None:
    node = twin_node(BUSY, BUSY, virtual_time=False)
    live = tuple(Settings(clock_MHz=clock) for clock in CLOCKS)
    window = WindowPolicy(min_s=1.0, max_s=1.5, settle_s=0.2)
    launch = Configuration.of(data_parallel=1, micro_batch=4).launch
    with closing(runner_on(tmp_path, keep=True)) as runner:
        record = runner.run(ProbeRequest("sweep", launch, live, window))
    assert record.ok, record.failure
    assert record.meter.scope == "gpu"
    assert not record.meter.estimated
    assert {m.live for m in record.measurements} == set(live)
    # Each window was saved as it ended: a driver that dies in the middle finds it.
    (so_far,) = recover_pending(tmp_path)
    assert [m.energy_J for m in so_far.measurements] == [m.energy_J for m in record.measurements]
    by_clock: dict[int, float] = {}
    for m in record.measurements:
        asked = m.live["clock_MHz"]
        assert isinstance(asked, int)
        assert m.delivered["clock_MHz"] == pytest.approx(asked, abs=15)
        by_clock[asked] = m.power_W
    powers = [by_clock[clock] for clock in sorted(by_clock)]
    assert powers == sorted(powers)
    assert powers[0] < powers[-1]
    assert node.locked_MHz(0) is None
    assert node.locked_MHz(1) is None
    # The first setting was visited once more at the end, and what drifted meanwhile is told.
    assert len(record.measurements) == len(live) + 1
    assert record.drift is not None
    assert record.drift.live == record.measurements[0].live == record.measurements[-1].live
    assert record.drift.apart_s > 3.0
    # The load does not follow the ranks: idle or not, both GPUs draw 380 W.
    assert record.idle_W == pytest.approx(760.0, rel=0.02)
    assert record.waiting_devices == detect_cluster(environ=HIDDEN).devices_per_node - 1
    for m in record.measurements:
        assert m.sampled_energy_J == pytest.approx(m.energy_J, rel=0.03)
        assert not any("differ" in flag for flag in m.flags)
    # The training program's phase marks lie on the power timeline.
    power = tmp_path / "trace" / "power" / "sweep.csv.gz"
    phases = read_power(power)[1]
    assert {name for _, name in phases} == PHASES
    opened_s = record.measurements[0].started_s
    inside = [at_s for at_s, _ in phases if 0 <= at_s - opened_s <= record.measurements[0].window_s]
    assert len(inside) >= 4 * record.measurements[0].steps
    assert "gpu1_clock_MHz" in read_power(power)[0][-1].extra


WINDOW = WindowPolicy(2.0, 3, 4.0, 0.01, settle_s=0.5, idle_s=0.5, check_drift=False)


@pytest.mark.timeout(600)
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
    twin_node: Make, tmp_path: Path, launch: dict[str, int], live: tuple[Settings, ...]
) -> None:
    node = twin_node(CORE_GPU, CORE_GPU, virtual_time=False, children=True)
    asked = Configuration.of({**launch, "micro_batch": 1})
    with closing(LocalRunner(small_job(), detect_cluster(), run_dir=tmp_path / "run")) as runner:
        record = runner.run(ProbeRequest("p", asked.launch, live, WINDOW))
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


@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_probe_with_a_hot_gpu_is_marked(twin_node: Make, tmp_path: Path) -> None:
    node = twin_node(CORE_GPU, CORE_GPU, virtual_time=False, children=True)
    node.set(step_s=0.1)  # long beside what the ranks compute on cores
    node.set(1, heat_MHz=700)
    asked = Configuration.of({"data_parallel": 2, "micro_batch": 1})
    window = WindowPolicy(12.0, 3, 15.0, 0.001, settle_s=0.5, idle_s=0.5, check_drift=False)
    with closing(LocalRunner(small_job(), detect_cluster(), run_dir=tmp_path / "run")) as runner:
        record = runner.run(ProbeRequest("p", asked.launch, (Settings(),), window))
    assert record.ok, record.failure
    (named,) = record.environment["stragglers"]
    assert (named["state"]["device"], named["cause"]) == (1, "heat")
    assert any(flag.startswith("straggler: GPU 1: heat") for flag in record.measurements[0].flags)
