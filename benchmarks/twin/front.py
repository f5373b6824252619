"""A whole study on a twin node, against the front that the twin's laws give.

`tuner.optimize` runs under Ray, which finds the twin's GPUs by its own NVML calls; real DeepSpeed
ranks train, and each of their steps takes the device time of the twin's laws. From the same laws
follow time and energy of a step of every configuration, which nothing under test can read.
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
from tests.support.studies import problem_of_job
from tests.twin import TwinNode
from tests.twin.specimens import CORE_GPU
from tuner.pareto import hypervolume, reference_point
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.workload.records.probe import WindowPolicy
from tuner.workload.records.trace import read_trace

SPACE = """what = "a small space of a twin node"
[knobs]
data_parallel = [1, 2]
micro_batch = [1, 2, 4]
clock_MHz = { count = 6, lowest_share = 0.4 }
"""
WINDOW = WindowPolicy(min_s=2.0, max_s=5.0, settle_s=0.3, idle_s=0.1)
GPUS = 2


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


def works_s(job: TrainingJob, configuration: Configuration) -> tuple[float, ...]:
    """Return the work of a step of each rank, seconds of its GPU at the highest clock."""
    gpu, ranks = CORE_GPU, configuration.world_size
    samples = configuration.micro_batch * configuration.data_parallel / ranks
    each_s = gpu.micro_batch_s + gpu.sample_s * samples
    return (gpu.step_s + configuration.accumulation(job.global_batch) * each_s,) * ranks


def _busy_s(node: TwinNode, configuration: Configuration) -> tuple[float, float]:
    """Return the time of a step, and the sum of the times that its GPUs are busy, seconds."""
    factor = node.device_s(_clock_MHz(configuration.live))
    works = works_s(small_job(), configuration)
    return max(works) * factor, sum(works) * factor


def _clock_MHz(live: Settings) -> float:
    return float(live.get("clock_MHz", max(CORE_GPU.clock_MHz)))  # type: ignore[arg-type]


def law_J(
    node: TwinNode, live: Settings, lasts_s: float, busy_s: float, *, gpus: int = GPUS
) -> float:
    """Return the energy of GPUs over `lasts_s`, `busy_s` GPU seconds of them busy."""
    clock_MHz = _clock_MHz(live)
    idle_W = node.law_W(clock_MHz, 0.0)
    return gpus * idle_W * lasts_s + (node.law_W(clock_MHz, 1.0) - idle_W) * busy_s


def _true_step(node: TwinNode, configuration: Configuration) -> tuple[float, float]:
    """Return (joules, seconds) of a step."""
    step_s, busy_s = _busy_s(node, configuration)
    return law_J(node, configuration.live, step_s, busy_s), step_s


def _windows(node: TwinNode, trace: Path) -> list[tuple[float, float]]:
    """Return (measured, true) joules of each window of a study, by the steps that were in it."""
    return [
        (
            measured.energy_J,
            law_J(
                node,
                measured.live,
                measured.window_s,
                measured.steps
                * _busy_s(node, Configuration(record.request.launch, measured.live))[1],
            ),
        )
        for record in read_trace(trace).records
        for measured in record.measurements
    ]


def _study(folder: Path, max_probes: int, executor: str) -> dict[str, Any]:
    """Run the study on the twin node on which this process is; return what came of it."""
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
    assert problem.cluster is not None
    locked = [node.locked_MHz(gpu) for gpu in range(problem.cluster.devices_per_node)]
    clocks_set = sum(name == "nvmlDeviceSetGpuLockedClocks" for name, _, _ in node.log)
    return {
        "true": [_true_step(node, configuration) for configuration in problem.candidates],
        "found": [_true_step(node, point.configuration) for point in result.front_points],
        "windows": _windows(node, folder / "runs" / "twin" / "trace" / "probes.jsonl"),
        "measured": [
            [
                str(point.configuration.key),
                *_step(point.inferred, job.steps),
                *_step(point, job.steps),
                *_true_step(node, point.configuration),
            ]
            for point in result.points
        ],
        "locked_after": locked,
        "clocks_set": clocks_set,
        "marks": sorted({point.meter.mark for point in result.points}),
        "meters": sorted({point.meter.source for point in result.points}),
        "report": result.report_path.read_text() if result.report_path else "",
        "json": result.to_json(),
        "action": result.recommendation.action if result.recommendation else "",
        "answer": result.choice.sentence,
        "devices": problem.cluster.devices_per_node,
        "late_s": node.late_s(),
    }


def _step(figures: Any, steps: int) -> tuple[float, float]:
    return 1000 * figures.energy_to_solution_kJ / steps, figures.time_to_solution_s / steps


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
        """Relative errors of each point's energy and time as verdicts count them, (n, 2)."""
        return self._points[:, :2] / self._points[:, 4:] - 1

    @property
    def shown_errors(self) -> np.ndarray:
        """The same of what a table shows."""
        return self._points[:, 2:4] / self._points[:, 4:] - 1

    @property
    def _points(self) -> np.ndarray:
        return np.array([row[1:] for row in self.told["measured"]], dtype=float)

    @property
    def window_errors(self) -> np.ndarray:
        """Relative error of the energy of each window, against the laws for its very steps."""
        measured, true = np.array(self.told["windows"]).T
        return measured / true - 1


def run_study(*, max_probes: int = 14, executor: str = "ray", limit_s: float = 900) -> FoundFront:
    """Run a study on a new twin node in a process of its own.

    Raises:
        CalledProcessError: it failed; TimeoutExpired: it took longer than the limit.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        node = TwinNode(folder / "node", [CORE_GPU] * GPUS, virtual_time=False)
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
