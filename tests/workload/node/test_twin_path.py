"""The whole GPU path on a twin node: real ranks, whose speed and power follow their GPU's clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.twin.front import small_job
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.testing.twin import TwinNode
from tuner.testing.twin.specimens import CORE_GPU
from tuner.workload.meters import Reading
from tuner.workload.meters.nvml import NvmlMeter
from tuner.workload.node.machine import detect_cluster
from tuner.workload.node.runner import LocalRunner
from tuner.workload.probe import ProbeRequest, WindowPolicy

pytestmark = [pytest.mark.twin, pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

WINDOW = WindowPolicy(2.0, 3, 4.0, 0.01, settle_s=0.5, idle_s=0.5, check_drift=False)


class TrueMeter(NvmlMeter):
    """A meter that notes the exact energy and work at the edges of windows."""

    def __init__(self, node: TwinNode) -> None:
        super().__init__()
        self._node, self.edges = node, list[tuple[float, ...]]()

    def boundary(self, *, opens: bool) -> Reading:
        if opens:
            reading = super().boundary(opens=True)
        node = self._node
        self.edges.append((node.energy_J(), node.work_s(0), node.work_s(1)))
        return reading if opens else super().boundary(opens=False)


@pytest.mark.parametrize(
    ("launch", "live"),
    [
        ({"data_parallel": 1}, (Settings(clock_MHz=1410), Settings(clock_MHz=710))),
        ({"data_parallel": 1, "pipeline_parallel": 2}, (Settings(clock_MHz=(1410, 710)),)),
    ],
    ids=["one rank", "a clock a stage"],
)
def test_energy_time_and_clocks_are_the_twins(
    twin_node: Callable[..., TwinNode],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launch: dict[str, int],
    live: tuple[Settings, ...],
) -> None:
    node = twin_node(CORE_GPU, CORE_GPU, virtual_time=False)
    for name, value in node.environment().items():
        monkeypatch.setenv(name, value)
    meter = TrueMeter(node)
    runner = LocalRunner(small_job(), detect_cluster(), run_dir=tmp_path / "run", meter=meter)
    try:
        record = runner.run(
            ProbeRequest("p", Configuration.of({**launch, "micro_batch": 1}).launch, live, WINDOW)
        )
    finally:
        runner.close()
    assert record.ok, record.failure
    assert record.meter.mark == "twin"
    assert [node.locked_MHz(gpu) for gpu in range(2)] == [None, None]
    windows = list(zip(meter.edges[2::2], meter.edges[3::2], strict=True))  # the idle power's first
    assert len(windows) == len(record.measurements) == len(live)
    for measured, (opened, closed) in zip(record.measurements, windows, strict=True):
        energy_J, *works = (b - a for a, b in zip(opened, closed, strict=True))
        assert measured.energy_J == pytest.approx(energy_J, rel=0.02)
        clocks = measured.live["clock_MHz"]
        each = clocks if isinstance(clocks, tuple) else (clocks, clocks)
        for gpu, (work_s, clock) in enumerate(zip(works, each, strict=True)):
            assert isinstance(clock, int)
            busy_s = work_s * node.device_s(clock)
            assert busy_s < 1.05 * measured.window_s  # no GPU computes more than its clock permits
            if isinstance(clocks, tuple):
                assert measured.delivered[f"clock_MHz.{gpu}"] == pytest.approx(clock, rel=0.02)
            elif work_s:
                assert busy_s > 0.5 * measured.window_s  # and with one rank it is hardly idle
    if len(live) == 2:
        time_s = {m.live["clock_MHz"]: m.step_time_s for m in record.measurements}
        ratio = node.device_s(710) / node.device_s(1410)
        assert time_s[710] / time_s[1410] == pytest.approx(ratio, rel=0.3)
