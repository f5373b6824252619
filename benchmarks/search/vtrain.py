"""vTrain's measured problems as searches for the fastest launch: launches until one within 2 %.

92 problems of 8 launches or more on A100 (`benchmarks.validation.vtrain`), over tensor, data and
pipeline parallelism and micro-batch, without a live knob. Only time was measured: power is the same
constant for all, and the search is asked for the least time. Each search starts at what a user runs
today, the widest data parallelism with one sequence a micro-batch. `joulefront+models` also has the
models of the problem's job, whose constants nothing corrects.
"""

from __future__ import annotations

import csv
import statistics
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import optuna

from benchmarks.figures import Figure
from benchmarks.search.names import OURS
from benchmarks.search.problems import Problem
from benchmarks.search.runner import ProblemSearch
from benchmarks.search.statistics import figure_name, quartiles
from benchmarks.validation import vtrain
from tuner.models.analytic.model import Prior
from tuner.problem.constraints import Constraints
from tuner.search.question import Question
from tuner.search_spaces.configuration import Configuration

SAMPLERS = (OURS, f"{OURS}+models", "hill-climb", "random-sweep")
#: A problem is solved by a launch that is slower than the best by this share at most.
WITHIN = 0.02
KNOBS = ("tensor_parallel", "data_parallel", "pipeline_parallel", "micro_batch")
TOML = """name = "{name}"
what = "measured step times of one problem; the power is made up, the same for every launch"
launch_knobs = [{knobs}]
live_knobs = []
time_s = "t"
power_W = "p"
unit_of_work = "step"
energy_scope = "gpu"

[baseline]
{baseline}

[noise]
time_cv = 0.005
power_cv = 0.005

[cost]
launch_s = 30.0
launch_power = 0.5
settle_s = 0.0
window_s = 5.0
"""


def searched_problems() -> list[list[vtrain.Launch]]:
    """Return the launches of each problem that is searched."""
    every = vtrain.problems(vtrain.read_launches()).values()
    return [launches for launches in every if len(launches) >= vtrain.CHOICES]


def write_table(folder: Path, launches: Sequence[vtrain.Launch]) -> Path:
    """Write the table of one problem; return its folder."""
    folder.mkdir(parents=True)
    fixed = {"zero_stage": 0, "activation_checkpointing": "full"}
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*KNOBS, *fixed, "t", "p"])
        for one in launches:
            writer.writerow([*one.degrees, *fixed.values(), one.measured_s, 100.0])
    today = vtrain.first_launch(launches).degrees
    text = TOML.format(
        name=folder.name,
        knobs=", ".join(f'"{name}"' for name in (*KNOBS, *fixed)),
        baseline="\n".join(f"{name} = {v}" for name, v in zip(KNOBS, today, strict=True)),
    )
    (folder / "table.toml").write_text(text)
    return folder


class _FastestSearch(ProblemSearch):
    """A search that ends at a launch within `WITHIN` of the fastest."""

    def __init__(self, problem: Problem, name: str, seed: int, prior: Prior | None) -> None:
        super().__init__(problem, name, seed, 1, False, prior)
        self.ask(Question(Constraints(objective="time"), steps=1))
        self._least_s = min(point.time_s for point in self.truth.points)

    def _note_ends(self, measured: Sequence[Configuration], kJ: float) -> None:
        times = [p.time_s for p in self.truth.points if p.configuration in measured]
        if self.found is None and min(times) <= (1 + WITHIN) * self._least_s:
            self.found = kJ, self.submitted, len(measured)


def launches_needed(folder: Path, name: str, number: int, seed: int) -> int:
    """Return the launches that a sampler needs for a problem, the start among them."""
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    launches = searched_problems()[number]
    models = name.endswith("+models")
    prior = vtrain.model_of(launches[0].problem) if models else None
    problem = Problem(folder / f"vtrain-{number:03d}", f"vtrain-{number:03d}")
    search = _FastestSearch(problem, name.removesuffix("+models"), seed, prior)
    search.run(len(launches))
    assert search.found is not None
    return search.found[1]


def vtrain_figures(jobs: int = 1, every: int = 1, seed: int = 0) -> list[Figure]:
    """Search the problems, print a line for each sampler, and return the figures.

    Args:
        jobs: number of processes.
        every: only each n-th problem is searched.
        seed: of the samplers and of the noise.
    """
    figures = []
    problems = searched_problems()
    numbers = list(range(0, len(problems), every))
    print(f"\nvTrain: {len(numbers)} problems, launches to within {100 * WITHIN:.0f} %:")
    with TemporaryDirectory() as temporary, ProcessPoolExecutor(jobs) as pool:
        for number in numbers:
            write_table(Path(temporary) / f"vtrain-{number:03d}", problems[number])
        for name in SAMPLERS:
            one = partial(launches_needed, Path(temporary), name, seed=seed)
            needed = list(pool.map(one, numbers, chunksize=4))
            low, middle, high = quartiles(needed)
            print(
                f"  {name:18} {middle:4.1f} (quartiles {low:.1f}, {high:.1f}; "
                f"mean {statistics.fmean(needed):.2f}, most {max(needed)})",
                flush=True,
            )
            begin = "" if name == OURS else f"{figure_name(name)}_"
            figures.append(Figure(f"{begin}vtrain_launches_median", middle, "count"))
    return figures
