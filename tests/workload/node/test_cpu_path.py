"""A probe that sweeps the clocks of cores: real ranks, on a made-up sysfs that meters them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.sysfs import make_sysfs, settings_of
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.job import load_job
from tuner.search_spaces.space import load_space
from tuner.workload.node.clocks.cpu import CpuGovernor
from tuner.workload.node.meters.base import Reading
from tuner.workload.node.meters.rapl import RaplMeter
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import ProbeRecord, ProbeRequest, WindowPolicy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.quiet,
    pytest.mark.usefixtures("one_fork_server"),
]

#: The made-up package draws 5 W and 5 W more for each GHz; no core runs above 3 GHz.
BASE_W, PER_GHZ_W, FASTEST_MHZ = 5.0, 5.0, 3000


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    made = make_sysfs(tmp_path / "sys", cores=max(os.sched_getaffinity(0)) + 1)
    over = threading.Event()

    def run() -> None:
        counter = made / "class/powercap/intel-rapl:0/energy_uj"
        energy_J, before_s = 1.0, time.monotonic()
        policies = list(made.glob("devices/system/cpu/cpufreq/policy*"))
        while not over.wait(0.005):
            clocks = []
            for policy in policies:
                allowed = (policy / "scaling_max_freq").read_text().strip()
                clocks.append(min(int(allowed or 0) // 1000, FASTEST_MHZ))
                (policy / "scaling_cur_freq").write_text(f"{clocks[-1] * 1000}\n")
            now_s = time.monotonic()
            energy_J += (BASE_W + PER_GHZ_W * max(clocks) / 1000) * (now_s - before_s)
            before_s = now_s
            # Replaced at once: a reader must not see an empty file.
            fresh = counter.with_name("fresh")
            fresh.write_text(f"{round(1e6 * energy_J)}\n")
            fresh.replace(counter)

    thread = threading.Thread(target=run)
    thread.start()
    yield made
    over.set()
    thread.join()


def probed(
    root: Path, folder: Path, clocks_MHz: tuple[int, ...], meter: type[RaplMeter] = RaplMeter
) -> ProbeRecord:
    """Probe clocks of the cores in one launch of a rank."""
    cluster = detect_cluster(environ={"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, sys=root)
    assert cluster.clock_control
    offered = load_space("clocks").candidates(load_job(), cluster)
    assert any(live.get("clock_MHz") for lives in offered.lives for live in lives)
    window = WindowPolicy(min_s=0.6, max_s=1.0, settle_s=0.2, check_drift=False)
    runner = LocalRunner(
        load_job(),
        cluster,
        run_dir=folder / "run",
        meter=meter(root / "class/powercap"),
        governor=CpuGovernor(root, guarded=False),
    )
    launch = Configuration.of(data_parallel=1, micro_batch=4).launch
    live = tuple(Settings(clock_MHz=clock) for clock in clocks_MHz)
    with closing(runner):
        return runner.run(ProbeRequest("sweep", launch, live, window))


def test_a_probe_sweeps_the_clocks_of_cores(root: Path, tmp_path: Path) -> None:
    before = settings_of(root)
    record = probed(root, tmp_path, (1000, 2000, 3600))
    assert record.ok, record.failure
    assert settings_of(root) == before
    powers = {m.live["clock_MHz"]: m.power_W for m in record.measurements}
    assert powers == {
        1000: pytest.approx(10.0, rel=0.1),
        2000: pytest.approx(15.0, rel=0.1),
        3600: pytest.approx(20.0, rel=0.1),
    }
    # No core reached the highest clock: the models learn the one that ran.
    reached = {m.live["clock_MHz"]: m.as_delivered["clock_MHz"] for m in record.measurements}
    assert reached == {1000: 1000, 2000: 2000, 3600: pytest.approx(FASTEST_MHZ, abs=50)}


def test_a_window_within_which_another_sets_a_clock_is_measured_again(
    root: Path, tmp_path: Path
) -> None:
    before = settings_of(root)
    theirs = "devices/system/cpu/cpufreq/policy0/scaling_max_freq"

    class Capped(RaplMeter):
        """A meter of a node whose site lowers a clock within the window at 2000 MHz."""

        def boundary(self, *, opens: bool) -> Reading:
            reading = super().boundary(opens=opens)
            if not opens and (root / theirs).read_text() == "2000000":
                (root / theirs).write_text("1500000")
            return reading

    record = probed(root, tmp_path, (1000, 2000), Capped)
    assert record.ok, record.failure
    # Below the cap is a data point; what is above it is not set, and said.
    assert [m.live["clock_MHz"] for m in record.measurements] == [1000]
    (missed,) = record.missed
    assert missed.live["clock_MHz"] == 2000
    assert "another process has set since" in missed.message
    assert settings_of(root) == {**before, theirs: "1500000"}
