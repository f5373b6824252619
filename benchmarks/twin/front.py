"""A whole study on a twin node, against the front that the twin's laws give.

`tuner.optimize` runs under Ray, which finds the twin's GPUs by its own NVML calls; real DeepSpeed
ranks compute on cores at the speed of their GPU's clock. Afterwards each launch runs once more for
the truth: the work of its ranks in a step and the time that they wait for each other, by the twin's
own account. The laws of speed and power then give its step time and energy at every clock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import tuner
from tuner.pareto import hypervolume, reference_point
from tuner.problem.from_job import problem_of_job
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.testing.twin import TwinNode
from tuner.testing.twin.specimens import CORE_GPU
from tuner.workload.meters import Reading
from tuner.workload.meters.nvml import NvmlMeter
from tuner.workload.node.runner import LocalRunner
from tuner.workload.probe import ProbeRequest, WindowPolicy

__all__ = ["FoundFront", "Truth", "run_study"]

SPACE = """what = "a small space of a twin node"
[knobs]
data_parallel = [1, 2]
micro_batch = [1, 2, 4]
clock_MHz = { count = 6, lowest_share = 0.4 }
"""
WINDOW = WindowPolicy(min_s=2.0, max_s=5.0, settle_s=0.3, idle_s=0.1)
TRUE_WINDOW_S, TRUE_CLOCKS = 3.0, (1410, 910)


def small_job() -> TrainingJob:
    """Return a training of steps of some 15 ms of a core, so long that every probe repays."""
    job = load_job("tiny-gpt")
    model = {
        **job.model,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "vocab_size": 512,
    }
    return replace(job, steps=10**8, sequence_length=32, global_batch=4, model=model)


@dataclass(frozen=True)
class Truth:
    """A launch as the twin saw it, from which its laws give a step at every clock.

    Attributes:
        work_s: CPU time of a step of each GPU's rank, seconds; 0 for a GPU without one.
        wait_s: time of a step in which the busiest rank does not compute, seconds.
    """

    work_s: tuple[float, ...]
    wait_s: float

    def step(self, node: TwinNode, clock_MHz: float) -> tuple[float, float]:
        """Return (joules, seconds) of a step at a clock."""
        device_s = node.device_s(clock_MHz)
        step_s = max(self.work_s) * device_s + self.wait_s
        idle_W = node.law_W(clock_MHz, 0.0)
        dynamic_W = node.law_W(clock_MHz, 1.0) - idle_W
        energy_J = len(self.work_s) * idle_W * step_s + dynamic_W * sum(self.work_s) * device_s
        return energy_J, step_s


class _TrueMeter(NvmlMeter):
    """A meter that keeps, at every edge of a window, what the twin knows."""

    def __init__(self, node: TwinNode) -> None:
        super().__init__()
        self._node = node
        self.edges: list[tuple[float, ...]] = []  # seconds, and the work of each GPU

    def _keep(self) -> None:
        works = (self._node.work_s(gpu) for gpu in range(len(self.gpus)))
        self.edges.append((self._node.clock(), *works))

    def boundary(self, *, opens: bool) -> Reading:
        if not opens:
            self._keep()
        reading = super().boundary(opens=opens)
        if opens:
            self._keep()
        return reading


def _truth(node: TwinNode, cluster: Cluster, launch: Settings, folder: Path) -> Truth:
    meter = _TrueMeter(node)
    runner = LocalRunner(small_job(), cluster, run_dir=folder, meter=meter)
    window = WindowPolicy(
        TRUE_WINDOW_S, 3, TRUE_WINDOW_S, 1.0, settle_s=0.5, idle_s=0.0, check_drift=False
    )
    live = tuple(Settings(clock_MHz=clock) for clock in TRUE_CLOCKS)
    name = "-".join(str(value) for value in launch.values())
    try:
        record = runner.run(ProbeRequest(f"true-{name}", launch, live, window))
    finally:
        runner.close()
    if record.failure is not None:
        raise RuntimeError(f"{launch} has no truth: {record.failure.message}")
    works, waits = [], []
    for measured, opened, closed in zip(
        record.measurements, meter.edges[::2], meter.edges[1::2], strict=True
    ):
        step = (np.array(closed) - np.array(opened)) / measured.steps
        works.append(step[1:])
        clock_MHz = measured.live["clock_MHz"]
        assert isinstance(clock_MHz, int)
        waits.append(step[0] - max(step[1:]) * node.device_s(clock_MHz))
    work_s = tuple(float(work) for work in np.mean(works, axis=0))
    return Truth(work_s, max(0.0, float(np.mean(waits))))


def _study(folder: Path, max_probes: int, executor: str) -> dict[str, Any]:
    """Run the study and take the truth, on the twin node on which this process is."""
    node, job = TwinNode.of_environment(), small_job()
    space = folder / "space.toml"
    space.write_text(SPACE)
    result = tuner.optimize(
        job,
        space=str(space),
        search=SearchSettings(max_probes=max_probes, window=WINDOW),
        executor=executor,
        runs_dir=folder / "runs",
        name="twin",
    )
    problem = problem_of_job(job, "auto", str(space))
    locked = [node.locked_MHz(gpu) for gpu in range(problem.cluster.devices_per_node)]
    clocks_set = sum(name == "nvmlDeviceSetGpuLockedClocks" for name, _, _ in node.log)
    truths = {
        launch: _truth(node, problem.cluster, launch, folder / "truth")
        for launch in problem.candidates.launches
    }

    def true_step(configuration: Configuration) -> tuple[float, float]:
        clock_MHz = configuration.live.get("clock_MHz", max(CORE_GPU.clock_MHz))
        return truths[configuration.launch].step(node, clock_MHz)

    return {
        "true": [true_step(configuration) for configuration in problem.candidates],
        "found": [true_step(point.configuration) for point in result.front_points],
        "measured": [
            [
                str(point.configuration.key),
                1000 * point.energy_to_solution_kJ / job.steps,
                point.time_to_solution_s / job.steps,
                *true_step(point.configuration),
            ]
            for point in result.points
        ],
        "locked_after": locked,
        "clocks_set": clocks_set,
        "marks": sorted({point.meter.mark for point in result.points}),
        "meters": sorted({point.meter.source for point in result.points}),
        "report": result.report_path.read_text() if result.report_path else "",
        "json": result.to_json(),
        "verification": result.verification.status if result.verification else "",
        "answer": result.choice.sentence,
        "devices": problem.cluster.devices_per_node,
    }


@dataclass(frozen=True)
class FoundFront:
    """Outcome of a study on a twin node.

    Attributes:
        found, true: (joules, seconds) of a step by the twin's laws: of the configurations of the
            front found, and of every configuration.
        told: the other facts, as `_study` returns them.
    """

    found: np.ndarray
    true: np.ndarray
    told: Mapping[str, Any]

    @property
    def hypervolume(self) -> float:
        """Hypervolume of the front found, over that of the true one."""
        reference = reference_point(np.log(self.true))
        volumes = [hypervolume(np.log(steps), reference) for steps in (self.found, self.true)]
        return volumes[0] / volumes[1]

    @property
    def errors(self) -> np.ndarray:
        """Relative errors of the measured energy and time of each point, (n, 2)."""
        figures = np.array([row[1:] for row in self.told["measured"]], dtype=float)
        return figures[:, :2] / figures[:, 2:] - 1


def run_study(*, max_probes: int = 14, executor: str = "ray", limit_s: float = 900) -> FoundFront:
    """Run a study on a new twin node in a process of its own.

    Raises:
        CalledProcessError: it failed; TimeoutExpired: it took longer than the limit.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        node = TwinNode(folder / "node", [CORE_GPU, CORE_GPU], virtual_time=False)
        try:
            subprocess.run(
                [sys.executable, "-m", __name__, str(folder), str(max_probes), executor],
                env=os.environ | node.environment(),
                timeout=limit_s,
                check=True,
            )
        finally:
            node.close()
        told = json.loads((folder / "told.json").read_text())
    return FoundFront(np.array(told["found"]), np.array(told["true"]), told)


if __name__ == "__main__":
    into = Path(sys.argv[1])
    (into / "told.json").write_text(json.dumps(_study(into, int(sys.argv[2]), sys.argv[3])))
