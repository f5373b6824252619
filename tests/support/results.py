"""Results to draw in tests, built by hand: one of many points, one as small as a laptop's."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

from tuner.answer.parts import Attainment, Choice, Interval, Point, ResolvedRequest, SearchCost
from tuner.models.surrogate import LeaveOneOut
from tuner.problem.constraints import Constraints
from tuner.problem.settings import StopReason
from tuner.result import Result
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.records.probe import (
    Failure,
    Measurement,
    MeterInfo,
    PowerSample,
    ProbeRecord,
    ProbeRequest,
)
from tuner.workload.records.trace import write_power_samples

NVML = MeterInfo("nvml", "gpu", "NVML total-energy counter")
TWIN = MeterInfo("nvml", "gpu", "NVML total-energy counter of 8 twin GPUs", twin=True)
ESTIMATED = MeterInfo("estimated", "node", "utilisation x envelope", estimated=True)
#: A step of `phased`, and the power of its forward and its backward pass.
STEP_S, LOW_W, HIGH_W = 0.4, 100.0, 300.0
#: Text of the user's that must stay text in a page.
HOSTILE = "<script>alert(1)</script>"


def point(
    configuration: Configuration,
    time_s: float,
    power_W: float,
    meter: MeterInfo,
    spread: float = 0.02,
    **more: object,
) -> Point:
    """Return a measured point whose intervals follow from the spread of its time."""
    energy = time_s * power_W / 1000
    given: dict = {
        "source": "measured",
        "windows": 1,
        "p_nondominated": 0.0,
        "peak_memory_bytes": 3 * 2**30,
        **more,
    }
    return Point(
        configuration=configuration,
        energy_to_solution_kJ=energy,
        time_to_solution_s=time_s,
        energy_interval_kJ=Interval(energy * (1 - 1.5 * spread), energy * (1 + 1.5 * spread)),
        time_interval_s=Interval(time_s * (1 - spread), time_s * (1 + spread)),
        power_W=power_W,
        meter=meter,
        **given,
    )


def front_of(points: list[Point]) -> list[Point]:
    """Return the points that no other one dominates, from the fastest."""
    front: list[Point] = []
    for p in sorted(points, key=lambda p: (p.time_to_solution_s, p.energy_to_solution_kJ)):
        if not front or p.energy_to_solution_kJ < front[-1].energy_to_solution_kJ:
            front.append(replace(p, p_nondominated=0.9 if front else 0.97))
    return front


def result_of(
    name: str, points: list[Point], baseline: Point | None, best: int, **more: object
) -> Result:
    """Return a result of these points; `best` is the chosen one's place on the front."""
    front = front_of(points)
    noise = random.Random(3)
    pairs = tuple(
        (
            p.time_to_solution_s / 1000,
            p.time_to_solution_s / 1000 * math.exp(noise.gauss(0, 0.05)),
            p.power_W,
            p.power_W * math.exp(noise.gauss(0, 0.03)),
        )
        for p in points[:25]
    )
    chosen = front[min(best, len(front) - 1)]
    total, progress = 0.0, []
    for i in range(14):
        total += 3 + noise.random() * 2
        progress.append((total, 800 * (1 - math.exp(-i / 3))))
    given: dict = {
        "run_dir": Path("runs") / name,
        "choice": Choice(
            "budget_kJ",
            True,
            f"The fastest configuration within the budget takes "
            f"{chosen.time_to_solution_s:,.0f} s.",
        ),
        "spent": SearchCost(total, 1234.0, 14, 0, len(points), 2500.0, 0.25),
        "steps": 10_000,
        "request": ResolvedRequest(Constraints(budget_kJ=chosen.energy_to_solution_kJ * 1.01)),
        "leave_one_out": LeaveOneOut(len(pairs), 0.034, 0.021, 0.88, pairs),
        "progress": tuple(progress),
        "stop": StopReason("exhausted"),
        "about": {
            "job": {"name": name, "steps": 10_000, "model": {"model_type": "gpt2", "n_layer": 2}},
            "cluster": {"name": "this machine", "devices_per_node": 2},
            "versions": {"joulefront": "0.1.0", "optuna": "5.0.0"},
        },
        **more,
    }
    return Result(
        name=name,
        front_points=tuple(front),
        points=tuple(points),
        best=chosen,
        baseline=baseline,
        **given,
    )


def large_result(meter: MeterInfo = NVML) -> Result:
    """Return 48 points over micro-batch and clock, with the valley in energy that clocks make."""
    points = []
    for micro_batch in (1, 2, 4, 8):
        for clock in range(600, 1800, 100):
            speed = clock / 1700 * (1 - 0.35 / micro_batch)
            time_s = 900 * (0.35 + 0.65 / speed)
            power_W = 90 + 8 * micro_batch + 330 * (clock / 1700) ** 2.6
            configuration = Configuration.of(
                data_parallel=2, micro_batch=micro_batch, zero_stage=1, clock_MHz=clock
            )
            points.append(point(configuration, time_s, power_W, meter))
    baseline = replace(points[11])
    return result_of("gpt-h100", points, baseline, best=3)


def small_result(points: int = 9, meter: MeterInfo = ESTIMATED) -> Result:
    """Return what a laptop gives: a few launch settings, no clock, wide intervals, two failures."""
    launches = [
        {"data_parallel": d, "micro_batch": m, "zero_stage": z, "activation_checkpointing": c}
        for d, m, z, c in (
            (1, 1, 0, "none"),
            (2, 1, 0, "none"),
            (2, 2, 1, "none"),
            (2, 4, 0, "none"),
            (1, 4, 0, "none"),
            (2, 4, 3, "none"),
            (1, 8, 0, "full"),
            (2, 2, 2, "full"),
            (1, 2, 1, "none"),
        )
    ]
    times = (310.0, 182.0, 174.0, 161.0, 262.0, 203.0, 330.0, 240.0, 298.0)
    powers = (21.0, 39.0, 38.5, 38.0, 20.5, 38.2, 20.9, 39.0, 21.5)
    made = [
        point(
            Configuration.of(launch), t, w, meter, spread=0.06, flags=("window shorter than 5 s",)
        )
        for launch, t, w in zip(launches, times, powers, strict=True)
    ][:points]
    result = result_of("tiny-gpt", made, made[0], best=1)
    failures = (failed("p0004", "out_of_memory", "a rank ran out of memory", "MemoryError: 2 GiB"),)
    return replace(
        result,
        failures=(*failures, failed("p0009", "crash", "rank 1 ended with signal 9", "")),
        spent=replace(result.spent, failed=2),
    )


def failed(probe_id: str, kind: str, message: str, tail: str, **launch: object) -> ProbeRecord:
    """Return the record of a failed probe."""
    request = ProbeRequest(probe_id, Settings(launch or {"data_parallel": 2, "micro_batch": 8}))
    return ProbeRecord(
        request=request,
        measurements=(),
        meter=ESTIMATED,
        failure=Failure(kind, message, tail),
        launch_s=2.0,
        wall_s=8.5,
        energy_J=310.0,
    )


def records_of(result: Result) -> list[ProbeRecord]:
    """Return probes that could have given the result, failed ones included."""
    records = list(result.failures)
    for i, p in enumerate(result.points[:10]):
        request = ProbeRequest(f"p{i:04d}", p.configuration.launch, purpose="search")
        records.append(ProbeRecord(request, (), p.meter, wall_s=9.0, launch_s=2.0, energy_J=400.0))
    return records


def phased(run_dir: Path) -> ProbeRecord:
    """Return a probe of 10 s: launch 2 s, one window of 5 s; each step is half forward."""
    live = Settings(clock_MHz=1200)
    window = Measurement(
        live=live,
        steps=12,
        window_s=4.8,
        step_time_s=STEP_S,
        energy_J=4.8 * 200,
        power_W=200.0,
        started_s=3.0,
        phases_s={"forward": STEP_S / 2, "backward": STEP_S / 2},
    )
    request = ProbeRequest("p0001", Settings(data_parallel=2), (live,))
    samples, marks = [], []
    for i in range(1000):
        t = i / 100
        backward = t >= 3 and (t - 3) % STEP_S >= STEP_S / 2
        samples.append(PowerSample(50 + t, HIGH_W if backward else LOW_W))
    for step in range(12):
        marks += [(53 + step * STEP_S, "forward"), (53 + (step + 0.5) * STEP_S, "backward")]
    marks.append((53 + 12 * STEP_S, "boundary"))
    write_power_samples(run_dir, "p0001", samples, since_s=50.0, phases=marks)
    return ProbeRecord(
        request, (window,), NVML, launch_s=2.0, wall_s=10.0, energy_J=2000.0, idle_W=60.0
    )


def result_of_phased(run_dir: Path) -> tuple[Result, ProbeRecord]:
    """Return a result whose best point is the window of `phased`, and that probe."""
    record = phased(run_dir)
    (window,) = record.measurements
    best = point(Configuration(record.request.launch, window.live), 400.0, 200.0, NVML)
    base = large_result()
    result = replace(
        base,
        run_dir=run_dir,
        points=(best, *base.points),
        best=best,
        front_points=(best,),
        windows={best.configuration: (window,)},
    )
    return result, record


def attained(result: Result) -> Attainment:
    """Return a band of 3 % around the front of a result."""
    times = tuple(p.time_to_solution_s for p in result.front_points)
    energy = [p.energy_to_solution_kJ for p in result.front_points]
    low, high = (tuple(f * e for e in energy) for f in (0.97, 1.03))
    return Attainment(
        (times[0] / 2, *times),
        (math.inf, *energy),
        (math.inf, *high),
        (math.inf, *low),
        500,
    )


def hostile_result(text: str = HOSTILE) -> Result:
    """Return a result with a text in every field that a user or a script can fill."""
    launch = Settings({"optimizer": text, text: "</script>", "micro_batch": 2})
    points = [
        replace(
            point(Configuration(launch, Settings(clock_MHz=clock)), 100.0 - i, 200.0 - i, NVML),
            flags=(text,),
            meter=replace(NVML, source=text),
        )
        for i, clock in enumerate((900, 1200, 1500))
    ]
    result = result_of(text, points, points[0], best=0)
    return replace(
        result,
        choice=Choice(text, False, text),
        stop=StopReason("node_failures", {"failures": 3}, text),
        failures=(failed(text, "crash", text, "log</script><!--" + text, x=text),),
        about={text: {text: [text, {"deep": {text: text}}]}},
    )
