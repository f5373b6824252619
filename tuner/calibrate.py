"""`tuner calibrate`: what metering costs on this machine, and whether its sources agree.

One probe of the job runs its steps with and without metering in turn; the pairs give the meter's
overhead on the step time with its interval. Beside it stand what the node draws idle, how often the
energy counter is updated, and whether counter and integrated power agree. The outcome is kept in
the runs folder, and the results of later studies on this machine carry it.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from search_spaces.cluster import Cluster, load_cluster
from search_spaces.configuration import Configuration
from search_spaces.errors import InputError
from search_spaces.job import TrainingJob, load_job
from tuner.compare import Difference, compare_paired
from workload.probe import MeterInfo, ProbeRequest

__all__ = ["Calibration", "calibrate", "last_calibration"]

FILE = "calibration.json"


@dataclass(frozen=True)
class Calibration:
    """What a calibration found.

    Attributes:
        host: the machine.
        made_at: UTC, ISO 8601.
        meter: which meter.
        overhead: step time with metering against without; a paired test.
        pairs: how many pairs of blocks.
        core_share: processor time of the sampling over its time: the share of one core it takes.
        samples, lost: power samples taken in the metered blocks, and missing from their grid.
        idle_W: what the scope draws when nothing trains; None where unknown.
        update_period_s: how often the energy counter is updated.
        disagreement: integrated power over the counter, minus 1; None where there is one source.
    """

    host: str
    made_at: str
    meter: MeterInfo
    overhead: Difference
    pairs: int
    core_share: float
    samples: int
    lost: int
    idle_W: float | None
    update_period_s: float
    disagreement: float | None

    def lines(self) -> list[str]:
        """For people, a finding a line."""
        over = self.overhead
        agree = "one source only, nothing to compare"
        if self.disagreement is not None:
            agree = f"integrated power is {100 * self.disagreement:+.2f} % off the energy counter"
        idle = "unknown" if self.idle_W is None else f"{self.idle_W:.1f} W"
        label = "estimated" if self.meter.estimated else "metered"
        return [
            f"meter       {self.meter.name}, {self.meter.scope} scope, {label}: "
            f"{self.meter.source}",
            f"charged     {self.meter.host}",
            f"overhead    {100 * over.relative:+.2f} % of the step time, 95 % interval "
            f"[{100 * over.low:+.2f}, {100 * over.high:+.2f}] % ({over.method})",
            f"            sampling takes {100 * self.core_share:.2f} % of one core",
            f"samples     {self.samples} taken, {self.lost} lost",
            f"idle power  {idle}",
            f"counter     updated every {1000 * self.update_period_s:.0f} ms",
            f"agreement   {agree}",
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "meter": dict(vars(self.meter)),
            "overhead": dict(vars(self.overhead)),
        }


def calibrate(
    job: TrainingJob | str | None = None,
    *,
    cluster: Cluster | str = "auto",
    runs_dir: str | Path = "runs",
    pairs: int = 20,
    block_s: float = 3.0,
    say: Callable[[str], None] | None = None,
) -> Calibration:
    """Run steps with and without metering on this machine, and report on the meter.

    Args:
        job: what is trained; the default job.
        cluster: this machine ("auto"), or a cluster that describes it.
        runs_dir: the outcome is kept there as `calibration.json`.
        pairs: of blocks, one metered and one not; at least 2.
        block_s: how long a block lasts, about.
        say: told what takes long.

    Raises:
        InputError: the job or cluster is unknown, there are too few pairs, or the probe failed.
    """
    from tuner.problem import default_configuration
    from workload.agent import LocalRunner
    from workload.in_turn import run_in_turn
    from workload.machine import detect_cluster

    if pairs < 2:
        raise InputError(f"{pairs} pairs say nothing of the spread; take at least 2")
    job = job if isinstance(job, TrainingJob) else load_job(job) if job else load_job()
    if not isinstance(cluster, Cluster):
        cluster = detect_cluster() if cluster == "auto" else load_cluster(cluster)
    chosen: Configuration = default_configuration(job, cluster)
    tell = say or (lambda sentence: None)
    runner = LocalRunner(job, cluster, run_dir=Path(runs_dir) / "calibration", say=tell)
    try:
        runner.prepare()
        tell(f"{pairs} pairs of {block_s:g} s with and without metering: {chosen.key}")
        limit_s = 120.0 + 4 * pairs * block_s
        request = ProbeRequest(
            "calibration", chosen.launch, time_limit_s=limit_s, purpose="calibration"
        )
        record, turns = run_in_turn(runner, request, pairs=pairs, block_s=block_s)
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
    path.write_text(json.dumps(found.to_json(), indent=1) + "\n")
    return found


def last_calibration(runs_dir: str | Path, host: str | None = None) -> dict[str, str]:
    """The last calibration of this machine kept in a runs folder, for a report; empty where none.

    Args:
        runs_dir: the folder.
        host: the machine's name; this one by default.
    """
    try:
        data = json.loads((Path(runs_dir) / FILE).read_text())
        if data["host"] != (host or platform.node()):
            return {}
        known = {name: data[name] for name in Calibration.__dataclass_fields__}
        known["meter"], known["overhead"] = (
            MeterInfo(**data["meter"]),
            Difference(**data["overhead"]),
        )
        lines = Calibration(**known).lines()
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    named: dict[str, str] = {"made_at": data["made_at"]}
    last = ""
    for line in lines:
        name, text = line[:12].strip() or last, line[12:]
        named[name] = f"{named[name]}; {text}" if name in named else text
        last = name
    return named
