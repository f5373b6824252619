"""What the parts share: a folder, the lines of a summary, and probes that set nothing."""

from __future__ import annotations

import json
import subprocess
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_hour.nvml_recording import NvmlRecording, record_nvml
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.workload.node.clocks.base import FixedGovernor
from tuner.workload.node.meters import Reading
from tuner.workload.node.meters.nvml import NvmlMeter
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import Measurement, ProbeRecord, ProbeRequest, WindowPolicy

#: No check begins after this time: a command may have ten minutes, and packs evidence at its end.
LAST_START_S = 510.0
WINDOW = WindowPolicy(min_s=3.0, max_s=6.0, settle_s=0.0, check_drift=False)
REHEARSAL = replace(WINDOW, min_s=0.5, max_s=1.0)


class EdgeMeter(NvmlMeter):
    """A meter that notes its boundaries: time (s), energy (J), and if a window opens there."""

    def __init__(self) -> None:
        super().__init__()
        self.edges: list[tuple[float, float, bool]] = []

    def boundary(self, *, opens: bool) -> Reading:
        reading = super().boundary(opens=opens)
        self.edges.append((reading.time_s, reading.energy_J, opens))
        return reading


@dataclass
class Rows:
    """Readings of the first GPU.

    Attributes:
        recording: all that was recorded.
        began_s: CLOCK_MONOTONIC at time 0 of its rows.
    """

    recording: NvmlRecording
    began_s: float

    def energies(self) -> list[tuple[float, float]]:
        """Return (time by CLOCK_MONOTONIC in s, counter in J)."""
        rows = self.recording.rows[0]
        return [
            (self.began_s + row[0], row[1] / 1000)
            for row in rows
            if row[0] is not None and row[1] is not None
        ]


@contextmanager
def recording(file: Path, seconds: float) -> Iterator[Future[Rows]]:
    """Record NVML into a file while the body runs, and at least this long."""
    times_s: list[float] = []

    def clock() -> float:
        times_s[1:] = [time.monotonic()]  # the first one stays: it is time 0 of the rows
        return times_s[-1]

    def record() -> Rows:
        made = record_nvml(seconds, clock=clock)
        made.write(file)
        return Rows(made, times_s[0])

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(record)


def measured(record: ProbeRecord) -> Measurement:
    """Return the only measurement of a probe.

    Raises:
        RuntimeError: the probe failed.
    """
    if record.failure is not None:
        raise RuntimeError(described(record))
    return record.measurements[0]


def described(record: ProbeRecord) -> str:
    """Return a probe's outcome in one line."""
    if record.failure is not None:
        log = " | ".join(record.failure.log_tail.splitlines()[-2:])
        return f"{record.failure.kind}: {record.failure.message[:200]} [{log[:200]}]"
    found = record.measurements[0]
    peak_GiB = (found.peak_memory_bytes or 0) / 2**30
    sampled = ""
    if found.sampled_energy_J:
        sampled = (
            f"sampled power {found.sampled_energy_J / found.energy_J - 1:+.1%} of the counter, "
        )
    return (
        f"ok, step {1000 * found.step_time_s:.1f} ms +- {found.step_time_rse:.2%}, "
        f"{found.power_W:.0f} W +- {found.power_rse:.2%}, {sampled}peak {peak_GiB:.1f} GiB, "
        f"launch {record.launch_s:.0f} s, new interpreters "
        f"{record.environment.get('fresh_interpreter')}, flags {list(found.flags)}"
    )


class Hour:
    """One part of the hour. A check that fails is a line of its summary and ends nothing.

    Args:
        folder: gets summary.txt, records.jsonl, the recordings and evidence.tar.gz.
        rehearse: train tiny jobs in short windows, on a machine without a GPU.
        only: words; a check whose name contains none of them is left out. Empty: all are made.
    """

    def __init__(self, folder: Path, *, rehearse: bool = False, only: tuple[str, ...] = ()) -> None:
        self.folder, self.rehearse, self._only = folder, rehearse, only
        folder.mkdir(parents=True, exist_ok=True)
        self.work = Path(tempfile.mkdtemp(prefix="gpu-hour-"))
        self.lines: list[str] = []
        self.meter: EdgeMeter | None = None
        self._runner: LocalRunner | None = None
        self._began_s = time.monotonic()

    def announce(self, text: str) -> None:
        """Print a line, and add it to the summary."""
        print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)
        self.lines.append(text)
        (self.folder / "summary.txt").write_text("\n".join(self.lines) + "\n")

    def check(self, name: str, run: Callable[[], str]) -> None:
        """Run one check, and add what it returns to the summary."""
        if self._only and not any(word in name for word in self._only):
            return
        began_s = time.monotonic()
        if began_s - self._began_s > LAST_START_S:
            self.announce(f"{name}: left out, the time is up")
            return
        try:
            found = run()
        except Exception as error:
            traceback.print_exc()
            found = f"FAILED: {type(error).__name__}: {error}"
        self.announce(f"{name}: {found}   ({time.monotonic() - began_s:.0f} s)")

    def command(self, *words: str | Path, limit_s: float = 240.0, **more: Any) -> tuple[str, str]:
        """Run a command; return its output, and its exit code with the last line."""
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=limit_s, check=False, **more
        )
        with (self.work / "commands.log").open("a") as log:
            log.write(f"$ {' '.join(map(str, words))}\n{done.stdout}{done.stderr}\n")
        last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:] or [""]
        return done.stdout, f"exit code {done.returncode}, {last[0]}"

    def runner(self) -> LocalRunner:
        """Return the runner of this part's probes, which sets no clock and no limit."""
        if self._runner is None:
            cluster = detect_cluster()
            self.announce(
                f"cluster: {cluster.devices_per_node} x {cluster.device.name}, max "
                f"{cluster.device.max_W:g} W, {len(cluster.device.clocks_MHz)} clocks"
            )
            self.meter = EdgeMeter()
            self._runner = LocalRunner(
                load_job("tiny-gpt"),
                cluster,
                run_dir=self.work / "run",
                meter=self.meter,
                governor=FixedGovernor("nothing is set on this machine"),
                announce=self.announce,
            )
            # One GPU has nothing to shard: the rules refuse what is to be tried here.
            self._runner.check = lambda request, nodes=1: None  # type: ignore[method-assign]
            self._runner.node = replace(self._runner.node, check=self._runner.check)
        return self._runner

    def job(self, name: str = "", **more: Any) -> TrainingJob:
        """Return a job with other values than its file's; a tiny one in a rehearsal."""
        values = {"global_batch": 16, "sequence_length": 1024, **more}
        if self.rehearse and not name:
            values |= {"sequence_length": 32, "global_batch": min(values["global_batch"], 32)}
        return replace(load_job(name or ("tiny-gpt" if self.rehearse else "opt-350m")), **values)

    @property
    def window(self) -> WindowPolicy:
        """The policy of a probe's window."""
        return REHEARSAL if self.rehearse else WINDOW

    def probe(
        self,
        name: str,
        job: TrainingJob | None = None,
        window: WindowPolicy | None = None,
        **knobs: Any,
    ) -> ProbeRecord:
        """Run one probe, and save its record at once: what is there survives a killed command."""
        runner = self.runner()
        runner.set_job(job or self.job())
        launch = Settings({"data_parallel": 1, "micro_batch": 4, **knobs})
        request = ProbeRequest(name, launch, window=window or self.window, time_limit_s=150.0)
        record = runner.run(request)
        with (self.folder / "records.jsonl").open("a") as file:
            file.write(json.dumps({**record.to_json(), "host": "borrowed"}) + "\n")
        return record

    def close(self) -> None:
        """End the runner and pack the evidence: logs, power samples, and the meter's boundaries."""
        if self._runner is not None:
            self._runner.close()
        if self.meter is not None:
            (self.work / "edges.json").write_text(json.dumps(self.meter.edges))
        with tarfile.open(self.folder / "evidence.tar.gz", "w:gz") as archive:
            archive.add(self.work, "evidence")
