"""The whole GPU path on a machine without one: real ranks on cores, metered and clocked as GPUs.

The ranks train for real over gloo; meter and governor speak to a twin node's NVML as they would to
a driver. Its GPUs are always busy, and clocks do not slow the ranks: that is `test_twin_path`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.twin import TwinGpu, TwinNode
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.job import load_job
from tuner.workload.node.clocks.governor import NvmlGovernor
from tuner.workload.node.meters.nvml import NvmlMeter
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import Measurement, ProbeRequest, WindowPolicy
from tuner.workload.records.trace import read_power, recover_pending

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("cc"),
    pytest.mark.real,
    pytest.mark.quiet,
    pytest.mark.usefixtures("one_fork_server"),
]

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


def test_an_open_probe_goes_on_at_other_clocks_in_one_launch(
    twin_node: Make, tmp_path: Path
) -> None:
    node = twin_node(BUSY, BUSY, virtual_time=False)
    runner = runner_on(tmp_path)
    low, middle, high = (Settings(clock_MHz=clock) for clock in CLOCKS)
    locked: list[object] = []

    def next_settings(
        request: ProbeRequest, measurements: Sequence[Measurement]
    ) -> tuple[Settings, ...]:
        locked.append(node.locked_MHz(0))
        return {1: (low,), 2: (middle,)}.get(len(measurements), ())

    launch = Configuration.of(data_parallel=1, micro_batch=4).launch
    window = WindowPolicy(min_s=0.5, max_s=1.0, settle_s=0.1, check_drift=False)
    try:
        record = runner.run_interactive(
            ProbeRequest("open", launch, (high,), window, extendable=True), next_settings
        )
    finally:
        runner.close()
    assert record.ok, record.failure
    assert [m.live for m in record.measurements] == [high, low, middle]
    assert record.request.live == (high, low, middle)
    assert locked == [
        (1410, 1410),
        (900, 900),
        (1200, 1200),
    ]  # the launch waits at the clock of its last window
    assert node.locked_MHz(0) is None
    assert record.energy_J > sum(m.energy_J for m in record.measurements)


def test_a_probe_sweeps_clocks_and_energy_is_the_counters(twin_node: Make, tmp_path: Path) -> None:
    node = twin_node(BUSY, BUSY, virtual_time=False)
    runner = runner_on(tmp_path, keep=True)
    live = tuple(Settings(clock_MHz=clock) for clock in CLOCKS)
    window = WindowPolicy(min_s=1.0, max_s=1.5, settle_s=0.2)
    launch = Configuration.of(data_parallel=1, micro_batch=4).launch
    try:
        record = runner.run(ProbeRequest("sweep", launch, live, window))
    finally:
        runner.close()
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
