"""`tuner dev calibrate`: what metering costs on this machine, and whether its sources agree.

The outcome is kept in the runs folder, and later results on this machine carry it.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tuner.results.parts import as_json
from tuner.results.significance import Difference, compare_paired
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.safe_files import require_own, write_text
from tuner.workload.probe import MeterInfo, ProbeRequest, WindowPolicy

FILE = "calibration.json"


@dataclass(frozen=True)
class Calibration:
    """Findings of a calibration."""

    host: str
    made_at: str
    meter: MeterInfo
    overhead: Difference
    pairs: int
    # processor time of the sampling over its time: the share of one core it takes.
    core_share: float
    samples: int
    lost: int
    idle_W: float | None
    update_period_s: float
    # integrated power over the counter, minus 1; None where there is one source.
    disagreement: float | None

    @property
    def findings(self) -> dict[str, str]:
        """The findings by name, each in a phrase."""
        over, meter = self.overhead, self.meter
        agree = "one source only, nothing to compare"
        if self.disagreement is not None:
            agree = f"integrated power is {100 * self.disagreement:+.2f} % off the energy counter"
        return {
            "meter": f"{meter.name}, {meter.scope} scope, {meter.label}: {meter.source}",
            "charged": meter.host,
            "overhead": (
                f"{100 * over.relative:+.2f} % of the step time, 95 % interval "
                f"[{100 * over.low:+.2f}, {100 * over.high:+.2f}] % ({over.method}); "
                f"sampling takes {100 * self.core_share:.2f} % of one core"
            ),
            "samples": f"{self.samples} taken, {self.lost} lost",
            "idle power": "unknown" if self.idle_W is None else f"{self.idle_W:.1f} W",
            "counter": f"updated every {1000 * self.update_period_s:.0f} ms",
            "agreement": agree,
        }

    def lines(self) -> list[str]:
        """Return the findings as lines in two columns."""
        return [f"{name:<12}{text}" for name, text in self.findings.items()]


def calibrate(
    job: TrainingJob | str | None = None,
    *,
    cluster: Cluster | str = "auto",
    runs_dir: str | Path = "runs",
    pairs: int = 20,
    block_s: float = 3.0,
    say: Callable[[str], None] = lambda sentence: None,
) -> Calibration:
    """Run at least 2 pairs of blocks of steps, metered and not, and report on the meter."""
    from tuner.problem.from_job import cluster_of
    from tuner.search_spaces.space import default_configuration
    from tuner.workload.measure.metering_overhead import measure_overhead
    from tuner.workload.node.runner import LocalRunner

    if pairs < 2:
        raise InputError(f"{pairs} pairs say nothing of the spread; take at least 2")
    job = job if isinstance(job, TrainingJob) else load_job(job) if job else load_job()
    cluster = cluster_of(cluster)
    chosen: Configuration = default_configuration(job, cluster)
    folder = Path(runs_dir) / "calibration"
    require_own(folder)
    runner = LocalRunner(job, cluster, run_dir=folder, say=say)
    try:
        runner.prepare()
        say(f"{pairs} pairs of {block_s:g} s with and without metering: {chosen.key}")
        request = ProbeRequest(
            "calibration",
            chosen.launch,
            window=WindowPolicy(micro_batches=False),
            time_limit_s=120.0 + 4 * pairs * block_s,
            purpose="calibration",
        )
        record, turns = measure_overhead(runner, request, pairs=pairs, block_s=block_s)
    finally:
        runner.close()
    if record.failure is not None:
        raise InputError(f"the calibration's probe failed: {record.failure.message}")
    (window,) = record.measurements
    disagreement: float | None = window.sampled_energy_J / window.energy_J - 1
    found = Calibration(
        host=platform.node(),
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        meter=record.meter,
        overhead=compare_paired(turns.plain_s, turns.metered_s, "step_time"),
        pairs=pairs,
        core_share=turns.busy_share,
        samples=turns.samples,
        lost=turns.lost,
        idle_W=record.idle_W,
        update_period_s=turns.resolution_s,
        disagreement=None if math.isnan(disagreement or 0.0) else disagreement,
    )
    path = Path(runs_dir) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(as_json(found), indent=1) + "\n")
    return found


def last_calibration(runs_dir: str | Path, host: str | None = None) -> dict[str, str]:
    """Return this machine's or another's last calibration, for a report; empty if there is none."""
    try:
        data = json.loads((Path(runs_dir) / FILE).read_text())
        if data["host"] != (host or platform.node()):
            return {}
        known = {name: data[name] for name in Calibration.__dataclass_fields__}
        meter, overhead = MeterInfo(**data["meter"]), Difference(**data["overhead"])
        findings = Calibration(**{**known, "meter": meter, "overhead": overhead}).findings
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {"made_at": data["made_at"], **findings}
