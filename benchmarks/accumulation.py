"""Steps of few micro-batches against whole steps, and what a probe of a large job then costs.

Each configuration of a small job is launched once on this machine's cores. Whole steps and the
estimate from short ones are measured alternately in that launch, so that both see the same
machine; of the estimates, the distance from the whole steps around them is the error, and the
share whose 90 % intervals (of the estimate and of the whole steps together) contain it is the
coverage. Time is wall time. Energy is the processor time of the ranks, which the energy of a core
is nearly proportional to, so that other processes of a busy machine add nothing to it; its errors
show how far a step is a line, those of the time also how busy the machine was.
`accumulation_energy_ratio` is of the models: joules of a probe of the job by simulated
launches, micro-batches over whole steps. It is printed for the whole cluster, where a launch costs
more than all steps, and for one of its nodes.

    python -m benchmarks.accumulation --rounds 4
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.figures import Figure, arguments, publish
from tuner.models.simulated import SimulatedRunner
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.workload.measure.accumulated import measure_accumulated
from tuner.workload.measure.statistics import Z90, Window
from tuner.workload.measure.window import Conductor
from tuner.workload.meters.base import PowerSample, Reading
from tuner.workload.meters.timeline import Timeline
from tuner.workload.node.machine import detect_cluster
from tuner.workload.node.probe_run import Probe
from tuner.workload.node.rank_launch import ProbeNode
from tuner.workload.node.runner import LocalRunner
from tuner.workload.probe import MeterInfo, ProbeRequest, WindowPolicy


@dataclass(frozen=True)
class _ProcessorTime:
    """Meter of the processor time of processes, at 1 W a busy core; ended threads are lost."""

    pids: Sequence[int]
    info = MeterInfo("processor-time", "node", "processor time of the ranks at 1 W", estimated=True)
    resolution_s = 1e-6

    def read(self) -> Reading:
        """Return the processor seconds so far (Linux, Documentation/scheduler/sched-stats.rst)."""
        ran_ns = 0
        for pid in self.pids:
            for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):  # the thread has ended
                    ran_ns += int(path.read_text().split()[0])
        return Reading(time.monotonic(), ran_ns / 1e9)

    def boundary(self, *, opens: bool) -> Reading:
        return self.read()

    def sample(self) -> PowerSample:
        return PowerSample(time.monotonic(), math.nan)

    def close(self) -> None:
        """Do nothing."""


#: Whole steps of so many micro-batches per replica.
ACCUMULATION = 16
#: Configurations of two cores.
CONFIGURATIONS = {
    "dp": {"data_parallel": 2},
    "zero1": {"data_parallel": 2, "zero_stage": 1},
    "zero2": {"data_parallel": 2, "zero_stage": 2},
    "zero3": {"data_parallel": 2, "zero_stage": 3},
    "pp": {"data_parallel": 1, "pipeline_parallel": 2},
    "zero1 offload": {"data_parallel": 2, "zero_stage": 1, "optimizer_offload": "cpu"},
}
#: The job and cluster of the energy ratio, and configurations of all its GPUs and of one node's.
LARGE, NODES = "qwen2.5-7b", "h100-32"
ALL = (
    {"data_parallel": 32, "zero_stage": 3},
    {"data_parallel": 8, "tensor_parallel": 4, "zero_stage": 1},
    {"data_parallel": 4, "pipeline_parallel": 8, "zero_stage": 1},
)
ONE_NODE = (
    {"data_parallel": 8, "zero_stage": 3},
    {"data_parallel": 2, "tensor_parallel": 4, "zero_stage": 1},
    {"data_parallel": 2, "pipeline_parallel": 4, "zero_stage": 1},
)


@dataclass(frozen=True)
class Pair:
    """An estimate, and whole steps around it, of one quantity."""

    estimate: float
    estimate_rse: float
    whole: float
    whole_rse: float

    @property
    def error(self) -> float:
        """Signed distance of the estimate from the whole steps, as a share of them."""
        return self.estimate / self.whole - 1

    @property
    def covered(self) -> bool:
        """True if the distance lies within the 90 % interval of the ratio."""
        return abs(self.error) <= Z90 * math.hypot(self.estimate_rse, self.whole_rse)


class _Comparison(Probe):
    """Launch that measures short and whole steps alternately."""

    rounds, window_s = 4, 3.0

    def __init__(self, node: ProbeNode, request: ProbeRequest) -> None:
        super().__init__(node, request)
        self.pairs: list[tuple[Pair, Pair]] = []  # of time, of energy

    def lead(self, conductor: Conductor, timeline: Timeline) -> None:
        plan = self.launch.accumulations
        assert self._group is not None
        meter = _ProcessorTime(self._group.pids)
        warm = conductor.warm_up()
        whole_s = warm.step_time_s * plan.own / plan.measured[0]

        def whole() -> Window:
            conductor.set_accumulation(plan.own)
            policy = WindowPolicy(min_s=self.window_s, max_s=self.window_s, min_steps=4)
            return conductor.measure(meter, policy, whole_s)

        before = whole()
        for _ in range(self.rounds):
            conductor.set_accumulation(plan.measured[0])
            short = measure_accumulated(
                conductor,
                meter,
                WindowPolicy(min_s=self.window_s, max_s=2 * self.window_s),
                plan.measured,
                plan.own,
                micro_batch_s=before.step_time_s / plan.own,
            )
            after = whole()
            self.pairs.append(_pairs(short, (before, after)))
            before = after


def _pairs(short: Window, around: Sequence[Window]) -> tuple[Pair, Pair]:
    """Return estimate and whole steps, of time and of energy."""
    times = [w.step_time_s for w in around]
    joules = [w.energy_J / len(w.step_times_s) for w in around]
    inside = math.hypot(*(w.step_time_se_s for w in around)) / 2 / statistics.fmean(times)
    time_rse = short.step_time_se_s / short.step_time_s
    energy_rse = math.hypot(time_rse, short.power_se_W / short.power_W)
    return (
        Pair(
            short.step_time_s,
            time_rse,
            statistics.fmean(times),
            # Before and after differ by more than their steps tell where the machine drifts.
            max(_apart(times), inside),
        ),
        Pair(
            short.power_W * short.step_time_s, energy_rse, statistics.fmean(joules), _apart(joules)
        ),
    )


def _apart(two: Sequence[float]) -> float:
    """Return half the distance of two values, as a share of their mean."""
    return abs(two[0] - two[1]) / (two[0] + two[1])


def compare(job: TrainingJob, rounds: int, window_s: float, folder: Path) -> list[list[Pair]]:
    """Return the pairs of each configuration, measured on this machine."""
    _Comparison.rounds, _Comparison.window_s = rounds, window_s
    found = []
    cluster = replace(detect_cluster(), devices_per_node=2)
    with closing(LocalRunner(job, cluster, run_dir=folder)) as runner:
        for name, knobs in CONFIGURATIONS.items():
            made: list[_Comparison] = []

            def make(
                node: ProbeNode, request: ProbeRequest, made: list[_Comparison] = made
            ) -> Probe:
                made.append(_Comparison(node, request))
                return made[0]

            launch = Configuration.of({"micro_batch": 1, **knobs}).launch
            request = ProbeRequest(name.replace(" ", "-"), launch, time_limit_s=600.0)
            record = runner.run_as(make, request)
            if record.failure is not None:
                raise RuntimeError(f"{name}: {record.failure.message}")
            pairs = [pair for both in made[0].pairs for pair in both]
            errors = ", ".join(f"{100 * wall.error:+.1f}" for wall, _ in made[0].pairs)
            joules = ", ".join(f"{100 * energy.error:+.1f}" for _, energy in made[0].pairs)
            print(f"{name:14} step time off by {errors} %, energy by {joules} %", flush=True)
            found.append(pairs)
    return found


def energy_ratios(configurations: Sequence[dict[str, int]]) -> tuple[float, float]:
    """Return the joules of simulated probes, and of their windows: short over whole steps."""
    runner = SimulatedRunner(load_job(LARGE), load_cluster(NODES))
    probes, windows = [0.0, 0.0], [0.0, 0.0]
    for knobs in configurations:
        launch = Configuration.of({"micro_batch": 1, **knobs}).launch
        for short in (False, True):
            window = WindowPolicy(micro_batches=short)
            record = runner.run(ProbeRequest("p0000", launch, window=window, time_limit_s=3600.0))
            probes[short] += record.energy_J
            windows[short] += math.fsum(m.energy_J for m in record.measurements)
    return probes[1] / probes[0], windows[1] / windows[0]


def main() -> None:
    """Print the figures."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="estimates of each configuration")
    parser.add_argument("--window-s", type=float, default=3.0, help="length of each (default: 3)")
    given = parser.parse_args()
    job = replace(load_job(), global_batch=2 * ACCUMULATION, sequence_length=32)
    with tempfile.TemporaryDirectory() as folder:
        found = compare(job, given.rounds, given.window_s, Path(folder))
    pairs = [pair for each in found for pair in each]
    times, energies = pairs[::2], pairs[1::2]

    def median_error(pairs: Sequence[Pair]) -> float:
        return 100 * statistics.median(abs(pair.error) for pair in pairs)

    on_all, _ = energy_ratios(ALL)
    on_one_node, of_windows = energy_ratios(ONE_NODE)
    publish(
        [
            Figure("accumulation_error_median", median_error(pairs), "%"),
            Figure("accumulation_time_error_median", median_error(times), "%"),
            Figure("accumulation_processor_time_error_median", median_error(energies), "%"),
            Figure("accumulation_coverage", statistics.fmean(p.covered for p in pairs), "ratio"),
            Figure("accumulation_energy_ratio", on_all, "ratio"),
            Figure("accumulation_energy_ratio_one_node", on_one_node, "ratio"),
            Figure("accumulation_windows_ratio_one_node", of_windows, "ratio"),
        ],
        given.json,
    )


if __name__ == "__main__":
    main()
