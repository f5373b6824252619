"""The whole GPU path on a machine without one: real ranks on cores, metered and clocked as GPUs.

The ranks train for real over gloo; the meter, the governor and the guard speak to the fake NVML as
they would to a driver. Only the coupling of clock and speed is missing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

from fake_nvml import FakeGpu, FakeNVML

from search_spaces.configuration import Configuration, Settings
from search_spaces.job import load_job
from workload.agent import LocalRunner
from workload.governor import NvmlGovernor
from workload.machine import detect_cluster
from workload.meters.nvml import NvmlMeter
from workload.probe import ProbeRequest, WindowPolicy

pytestmark = pytest.mark.real

CLOCKS = (900, 1200, 1410)


def test_a_probe_sweeps_clocks_and_energy_is_the_counters(tmp_path: Path) -> None:
    nvml = FakeNVML([FakeGpu(), FakeGpu()])
    here = detect_cluster()
    device = replace(here.device, clocks_MHz=CLOCKS, default_clock_MHz=1410)
    cluster = replace(here, device=device, clock_control=True)
    meter = NvmlMeter(nvml=nvml, environ={})
    governor = NvmlGovernor(nvml=nvml, environ={}, guard_nvml="")
    runner = LocalRunner(load_job(), cluster, run_dir=tmp_path, meter=meter, governor=governor)
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
    by_clock: dict[int, float] = {}
    for m in record.measurements:
        asked = m.live["clock_MHz"]
        assert isinstance(asked, int)
        assert m.delivered["clock_MHz"] == pytest.approx(asked, abs=15)
        by_clock[asked] = m.power_W
    powers = [by_clock[clock] for clock in sorted(by_clock)]
    assert powers == sorted(powers)
    assert powers[0] < powers[-1]
    assert nvml.locked_MHz(0) is None
    assert nvml.locked_MHz(1) is None
