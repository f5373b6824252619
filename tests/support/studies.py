"""A made-up table, and runners that model and misbehave, for tests of studies."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import tuner
from tests.support.entry_points import require_parts
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.problem import from_job
from tuner.problem.constraints import Constraints
from tuner.problem.job_request import JobRequest
from tuner.problem.problem import Problem
from tuner.problem.settings import SearchSettings
from tuner.result import Result
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.job import load_job
from tuner.search_spaces.knobs import stage_values
from tuner.workload.records.probe import (
    Failure,
    Measurement,
    MeterInfo,
    ProbeRecord,
    ProbeRequest,
    Runner,
    WindowPolicy,
)

METER = MeterInfo("estimated", "node", "a test's envelope", estimated=True)
#: A training so long that every probe repays itself, so that its limits end a search.
LONG_JOB = replace(load_job("tiny-gpt"), steps=10**8)
TOML = """
name = "made-up"
launch_knobs = ["shape"]
live_knobs = ["speed"]
unit_of_work = "lap"
time_s = "t"
power_W = "p"
energy_scope = "gpu"

[cost]
launch_s = 10.0
launch_power = 0.5
settle_s = 1.0
window_s = 4.0
"""


def table_point(shape: int, speed: int) -> tuple[float, float]:
    """Return (time s, power W): wider shapes pay off up to 4, power rises faster than speed."""
    time_s = 20.0 / speed**0.8 * (1 + abs(shape - 4) / 4)
    return time_s, 40.0 + 12.0 * speed**1.6 + 3.0 * shape


def write_table(
    folder: Path, *, toml: str = TOML, shapes: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
) -> Path:
    """Write a grid of `shapes` x speeds 1 to 5."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["shape,speed,t,p"]
    for shape in shapes:
        for speed in range(1, 6):
            time_s, power_W = table_point(shape, speed)
            rows.append(f"{shape},{speed},{time_s:.6f},{power_W:.4f}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    (folder / "table.toml").write_text(toml)
    return folder


def problem_of_job(
    job: Any = None,
    cluster: Cluster | str = "auto",
    space: Any = None,
    *,
    max_gpus: int | None = None,
    **asked: Any,
) -> Problem:
    """Return the problem of a request with these arguments."""
    limits = Constraints(max_gpus=max_gpus)
    request = JobRequest(job, cluster, space, constraints=limits, **asked)
    return from_job.problem_of_job(request)


def request(name: str = "p0000", *, live: tuple[Settings, ...] = (Settings(),)) -> ProbeRequest:
    """Return a request for one launch."""
    return ProbeRequest(name, Settings(data_parallel=2, micro_batch=4), live, WindowPolicy())


def measured(
    live: Settings | None = None, *, time_s: float = 0.5, power_W: float = 20.0
) -> Measurement:
    """Return a window of ten steps."""
    return Measurement(
        live=live or Settings(),
        steps=10,
        window_s=10 * time_s,
        step_time_s=time_s,
        step_time_se_s=0.01 * time_s,
        energy_J=power_W * 10 * time_s,
        power_W=power_W,
    )


def record(name: str = "p0000", **changes: Any) -> ProbeRecord:
    """Return a record of one window, with changes."""
    values: dict[str, Any] = {
        "request": request(name),
        "measurements": (measured(),),
        "meter": METER,
        "launch_s": 3.0,
        "wall_s": 9.0,
        "energy_J": 160.0,
    }
    return ProbeRecord(**{**values, **changes})


def probe_with(
    planner: Any,
    records: list[ProbeRecord],
    answer: Callable[[Configuration], tuple[float, float]],
    **asked: Any,
) -> list[Configuration]:
    """Make one probe as the planner plans it, add its record, and return what it visited.

    Args:
        answer: returns step time and power of a configuration.
        asked: further fields of the planner's state.
    """
    from tuner.search.planner import PlanningState  # some of these tools serve without Optuna

    state = PlanningState(tuple(records), **asked)
    plan = planner.plan(state)
    if plan is None:
        return []
    name = f"p{len(records):04d}"
    request = ProbeRequest(name, plan.launch, plan.live, extendable=plan.extendable)
    figures: dict[Configuration, tuple[float, float]] = {}
    while True:
        figures |= {c: answer(c) for c in request.configurations() if c not in figures}
        windows = tuple(measured(c.live, time_s=t, power_W=p) for c, (t, p) in figures.items())
        so_far = ProbeRecord(request, windows, METER)
        further = planner.plan_continuation(state, so_far) if request.extendable else None
        if further is None:
            records.append(so_far)
            return list(figures)
        request = replace(request, live=(*request.live, *further.live))


class FormulaRunner(Runner):
    """Answers for a training by formulas of its knobs, bent a little by configuration.

    More ranks divide the step, larger micro-batches and whole activations make it shorter, sharding
    makes it longer, and a lower clock takes longer for less power.

    Args:
        meter: what it claims to meter with.
        serial_s: a step on one device at its highest clock.
        device_W: power that one device adds at its highest clock.
        top_MHz: its highest clock.
    """

    def __init__(
        self,
        meter: MeterInfo = METER,
        *,
        serial_s: float = 0.8,
        device_W: float = 5.8,
        top_MHz: int = 1410,
    ) -> None:
        self.meter = meter
        self._serial_s, self._device_W, self._top_MHz = serial_s, device_W, top_MHz

    def figures(self, configuration: Configuration) -> tuple[float, float]:
        """Return step time and power."""
        launch = configuration.launch
        number = {name: float(v) for name, v in launch.items() if not isinstance(v, str | tuple)}
        clocks = stage_values(configuration.live.get("clock_MHz")) or (self._top_MHz,)
        slower = self._top_MHz / min(float(clock) for clock in clocks)
        bend = 1 + 0.2 * (zlib.crc32(launch.key.encode()) % 100) / 100
        time_s = self._serial_s / configuration.world_size * bend * (0.4 + 0.6 * slower)
        time_s *= 1 + 0.1 / number.get("micro_batch", 1.0) + 0.02 * number.get("zero_stage", 0.0)
        if launch.get("activation_checkpointing") == "full":
            time_s *= 1.3
        busy = 0.3 + 0.7 / slower**3
        return time_s, self._device_W * (0.7 + configuration.world_size * busy)

    def run(self, request: ProbeRequest) -> ProbeRecord:
        windows = []
        for configuration in request.configurations():
            time_s, power_W = self.figures(configuration)
            windows.append(measured(configuration.live, time_s=time_s, power_W=power_W))
        spent_J = sum(m.energy_J for m in windows) + 5.0 * windows[0].power_W
        return ProbeRecord(
            request,
            tuple(windows),
            self.meter,
            launch_s=5.0,
            wall_s=5.0 + sum(m.window_s for m in windows),
            energy_J=spent_J,
        )

    def close(self) -> None:
        pass


#: A node of eight GPUs that trains a model of 350 million parameters.
EIGHT_GPUS = {"serial_s": 25.0, "device_W": 370.0}


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords of `optimize` and `replay`, those of the two objects gathered into them."""
    rest = dict(options)
    made: dict[str, Any] = {}
    for name, kind in (("constraints", Constraints), ("search", SearchSettings)):
        values = {f.name: rest.pop(f.name) for f in fields(kind) if f.name in rest}
        if values:
            made[name] = kind(**values)
    return {**rest, **made}


def run_optimize(*arguments: Any, **options: Any) -> Result:
    """Call `tuner.optimize` with the fields of its two objects as plain keywords."""
    return tuner.optimize(*arguments, **grouped(options))


def run_replay(*arguments: Any, **options: Any) -> Result:
    """Call `tuner.replay` with the fields of its two objects as plain keywords."""
    require_parts("tuner.recordings.problem")
    return tuner.replay(*arguments, **grouped(options))


def modelled_study(runs_dir: Path, *, max_probes: int) -> Result:
    """Run a study of the default job on `FormulaRunner`'s probes, in a run named "study"."""
    return run_optimize(
        cluster="cpu-2",
        executor=SimulatedExecutor(FormulaRunner()),
        runs_dir=runs_dir,
        name="study",
        report=False,
        max_probes=max_probes,
        verify=False,
    )


class TalliedRunner(Runner):
    """Counts what a runner is asked, and spoils what it is told to spoil.

    Args:
        runner: answers.
        spoil: returns a failure for the requests that are to fail, else None; or raises.
    """

    def __init__(
        self, runner: Runner, spoil: Callable[[ProbeRequest], Failure | None] = lambda request: None
    ) -> None:
        self._runner, self._spoil = runner, spoil
        self.meter = runner.meter
        self.asked: list[ProbeRequest] = []
        self.closed = 0

    @property
    def visits(self) -> list[Configuration]:
        return [c for request in self.asked for c in request.configurations()]

    def run(self, request: ProbeRequest) -> ProbeRecord:
        self.asked.append(request)
        failure = self._spoil(request)
        if failure is not None:
            return ProbeRecord(request, (), self.meter, failure, wall_s=20.0, energy_J=500.0)
        return self._runner.run(request)

    def close(self) -> None:
        self.closed += 1
        self._runner.close()
