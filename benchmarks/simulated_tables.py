"""Record simulated clusters as tables, so that `benchmarks.search` can search them.

The simulated runner answers every valid configuration of a job on a cluster without noise;
configurations that do not fit in memory are left out. The cluster departs from the analytic models:
each of their constants has a random error, each value of each launch knob has an effect that no
constant describes, and each launch departs by a few per cent, all drawn once per table. A search
that uses the models (the table's `[predicted_by]`) therefore has a wrong prior; its error is
printed beside the known error of the models. Of a table with too many launches for a search of
reasonable length, a random share is kept.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure, arguments, publish
from tuner.models.analytic.constants import Constants, constants_of
from tuner.models.analytic.model import AnalyticModel, Prediction
from tuner.models.analytic.model_error import known_error_lines
from tuner.models.simulated import Conditions, SimulatedRunner
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.space import load_space
from tuner.workload.probe import ProbeRequest, WindowPolicy

#: Job, cluster, space.
PROBLEMS = (("lmm-7b", "gh200-32", "default"), ("opt-350m", "a100-8", "parallelism"))
#: Noise that a search of the table meets, and what probing is charged (`Conditions`' defaults).
NOISE = Conditions()
WINDOW_S, SETTLE_S = 5.0, 1.0
#: Constants that say what memory holds: left as believed, for a table holds what fitted.
OF_MEMORY = ("context_bytes", "buffer_elements", "memory_overhead")
#: Constants that are shares of a whole, and cannot exceed it.
SHARES = (
    "bandwidth_clock",
    "dispatch_hidden",
    "gather_overlap",
    "reduce_overlap",
    "reduce_over_network",
)
#: Voltage stays a curve: a knee below the highest clock, a flat voltage below the highest.
HIGHEST_KNEE = 0.95


@dataclass(frozen=True)
class PriorError:
    """How far the models are from a table's truth.

    Attributes:
        time, power, energy: median and 90th percentile of the absolute relative error, once the
            scale is right (the surrogates fit a scale to what they measure).
        time_rank, energy_rank: Spearman's rank correlation over the configurations.
    """

    time: tuple[float, float]
    power: tuple[float, float]
    energy: tuple[float, float]
    time_rank: float
    energy_rank: float

    @property
    def sentence(self) -> str:
        errors = (
            f"{name} {100 * median:.1f} % (90th percentile {100 * high:.1f} %)"
            for name, (median, high) in (
                ("time", self.time),
                ("power", self.power),
                ("energy", self.energy),
            )
        )
        return (
            f"the models are off it, but for a common factor, by a median {', '.join(errors)}; "
            f"rank correlation of time {self.time_rank:.3f}, of energy {self.energy_rank:.3f}"
        )


def departed(cluster: Cluster, spread: float, seed: int) -> tuple[Cluster, Constants]:
    """A cluster like this one whose true constants are not those that the models believe.

    Every constant of `tuner.models.analytic.constants` but those of memory, the device's idle
    power, and what the node and its supply draw are multiplied by a log-normal factor each, of
    median 1.

    Args:
        cluster: as it is described.
        spread: standard deviation of the factors' logarithms.
        seed: of the factors.
    """
    draw = np.random.default_rng(seed)
    believed = constants_of(cluster.device)

    def off(value: float) -> float:
        return float(value * math.exp(spread * draw.standard_normal()))

    drawn: dict[str, Any] = {
        name: off(getattr(believed, name)) for name in Constants.figures() if name not in OF_MEMORY
    }
    for name, value in drawn.items():
        if name in SHARES or name.endswith("_efficiency"):
            drawn[name] = min(value, 1.0)
    for name in ("voltage_knee", "lowest_voltage"):
        drawn[name] = min(drawn[name], HIGHEST_KNEE)
    device = replace(cluster.device, idle_W=off(cluster.device.idle_W))
    there = replace(
        cluster,
        device=device,
        host_W=off(cluster.host_W),
        supply_loss=off(cluster.supply_loss),
    )
    return there, replace(believed, **drawn)


class DepartedTruth:
    """Truth of a cluster of `departed`, which no constants of the models describe.

    Each value of each launch knob has a factor of its own on time and on power. That is what an
    additive kernel over launch knobs assumes. With `beyond`, there are three more factors that it
    does not assume: of each pair of values of two launch knobs (an interaction), of the clock to a
    power that each value of a launch knob has of its own, and of each ordered launch knob beyond a
    level of its own (a threshold).

    Args:
        model: of the departed cluster.
        spread: standard deviation of the logarithm of each value's factor.
        seed: of the factors.
        beyond: the same of the three further factors; 0 for none. That of a pair is divided by the
            root of the number of knobs, so that it does not grow with their number.
        highest_MHz: clock at which the clock's factor is 1; None without one.
    """

    def __init__(
        self,
        model: AnalyticModel,
        spread: float,
        seed: int,
        *,
        beyond: float = 0.0,
        highest_MHz: float | None = None,
    ) -> None:
        self._model, self._spread, self._seed = model, spread, seed
        self._beyond, self._highest_MHz = beyond, highest_MHz

    def predict(self, configurations: Sequence[Configuration]) -> Prediction:
        said = self._model.predict(configurations)
        time, power = np.array([self._factors(c) for c in configurations]).T
        return replace(said, step_time_s=said.step_time_s * time, power_W=said.power_W * power)

    def _factors(self, configuration: Configuration) -> np.ndarray:
        knobs = [(name, str(value)) for name, value in configuration.launch.items()]
        logs = self._spread * np.sum([self._drawn(*knob) for knob in knobs], axis=0)
        if self._beyond:
            logs = logs + self._beyond * self._beyond_kernel(configuration, knobs)
        return np.asarray(np.exp(logs))

    def _beyond_kernel(
        self, configuration: Configuration, knobs: Sequence[tuple[str, str]]
    ) -> np.ndarray:
        """Return the logs of the further factors, in units of their standard deviation, (2,)."""
        logs = np.zeros(2)
        for one, other in itertools.combinations(sorted(knobs), 2):
            logs += self._drawn("pair", *one, *other) / math.sqrt(len(knobs))
        clock = configuration.get("clock_MHz")
        if clock is not None and self._highest_MHz:
            log_clock = math.log(float(np.mean(clock)) / self._highest_MHz)
            for knob in knobs:
                logs += log_clock * self._drawn("clock", *knob)
        for name, value in configuration.launch.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                # Levels of most knobs are powers of two: the threshold lies between two of 1 to 64.
                level = 2.0 ** float(self._generator("level", name).uniform(0, 6))
                logs += (value > level) * self._drawn("threshold", name)
        return logs

    def _generator(self, *words: str) -> np.random.Generator:
        text = "\n".join([str(self._seed), *words]).encode()
        return np.random.default_rng(int.from_bytes(hashlib.sha256(text).digest()[:8], "big"))

    def _drawn(self, *words: str) -> np.ndarray:
        """Return the log factors on time and power that belong to these words, (2,)."""
        return np.asarray(self._generator(*words).standard_normal(2))


@dataclass(frozen=True)
class Recorded:
    """What one table holds.

    Attributes:
        configurations: how many.
        error: of the models that do not know its truth.
    """

    configurations: int
    error: PriorError


def record(
    folder: Path,
    job_name: str,
    cluster_name: str,
    space: str,
    *,
    most: int,
    spread: float,
    of_values: float,
    error: float,
    seed: int,
    beyond: float = 0.0,
) -> Recorded:
    """Write one table.

    Args:
        folder: it is made.
        job_name, cluster_name, space: what is recorded, by shipped name.
        most: launches that it keeps at most.
        spread: of the constants about what the models believe (`departed`).
        of_values: of what each value of a launch knob does besides (`DepartedTruth`).
        error: relative standard deviation of each launch's own departure.
        seed: of everything drawn.
        beyond: of what an additive kernel does not assume (`DepartedTruth`).
    """
    job, cluster = load_job(job_name), load_cluster(cluster_name)
    candidates = load_space(space).candidates(job, cluster)
    still = Conditions(
        time_noise=0,
        power_noise=0,
        step_noise=0,
        first_window=0,
        warm_up=0,
        model_error=error,
    )
    there, constants = departed(cluster, spread, seed)
    truth = DepartedTruth(
        AnalyticModel(job, there, constants=constants),
        of_values,
        seed,
        beyond=beyond,
        highest_MHz=max(cluster.device.clocks_MHz, default=None),
    )
    runner = SimulatedRunner(job, there, seed=seed, conditions=still, truth=truth)
    order = np.random.default_rng(seed).permutation(len(candidates.launches))
    window = WindowPolicy(min_s=0.1, min_steps=1, settle_s=0.0)
    rows: list[tuple[Configuration, float, float]] = []
    kept = 0
    for place in order:
        launch, lives = candidates.launches[place], tuple(candidates.lives[place])
        answer = runner.run(ProbeRequest("table", launch, lives, window, math.inf))
        for m in answer.measurements:
            rows.append((Configuration(launch, m.live), m.step_time_s, m.power_W))
        kept += bool(answer.measurements)
        if kept == most:
            break
    said = prior_error(job, cluster, rows)
    names = sorted({name for row, _, _ in rows for name in (*row.launch, *row.live)})
    live = [name for name in names if KNOBS[name].kind == "live"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "step_time_s", "power_W"])
        for row, time_s, power_W in rows:
            cells = [_cell(row.get(name)) for name in names]
            writer.writerow([*cells, f"{time_s:.9g}", f"{power_W:.9g}"])
    (folder / "table.toml").write_text(
        f'name = "{job_name} on {cluster_name}"\n'
        f'what = "made by the analytic models with constants drawn off theirs (log-sd {spread:g}), '
        f"{of_values:g} a value of a launch knob, {beyond:g} beyond an additive kernel and "
        f"{error:g} a launch, seed {seed}; nothing was "
        f'measured; {kept} of {len(order)} launches, space {space}; {said.sentence}"\n'
        f"launch_knobs = {[n for n in names if n not in live]}\n"
        f"live_knobs = {live}\n"
        'time_s = "step_time_s"\npower_W = "power_W"\nunit_of_work = "step"\n'
        f'energy_scope = "{runner.meter.scope}"\nestimated = true\n\n'
        f'[predicted_by]\njob = "{job_name}"\ncluster = "{cluster_name}"\n\n'
        f"[noise]\ntime_cv = {NOISE.time_noise}\npower_cv = {NOISE.power_noise}\n\n"
        f"[cost]\nlaunch_s = {NOISE.launch_s + 5 * NOISE.launch_each_s}\n"
        f"launch_power = {NOISE.launch_power}\nsettle_s = {SETTLE_S}\nwindow_s = {WINDOW_S}\n"
    )
    return Recorded(len(rows), said)


def prior_error(
    job: TrainingJob, cluster: Cluster, rows: Sequence[tuple[Configuration, float, float]]
) -> PriorError:
    """How far the models of a job on a cluster are from (configuration, seconds, watts)."""
    from scipy.stats import spearmanr

    said = AnalyticModel(job, cluster).predict([row[0] for row in rows])
    true_t, true_p = np.array([row[1:] for row in rows]).T

    def off(predicted: np.ndarray, true: np.ndarray) -> tuple[float, float]:
        ratio = predicted / true
        apart = np.abs(ratio / np.exp(np.median(np.log(ratio))) - 1)
        return float(np.median(apart)), float(np.quantile(apart, 0.9))

    return PriorError(
        time=off(said.step_time_s, true_t),
        power=off(said.power_W, true_p),
        energy=off(said.step_time_s * said.power_W, true_t * true_p),
        time_rank=float(spearmanr(said.step_time_s, true_t).statistic),
        energy_rank=float(spearmanr(said.step_time_s * said.power_W, true_t * true_p).statistic),
    )


def _cell(value: object) -> str:
    if value is None:
        return ""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def main() -> None:
    parser = arguments("record simulated clusters as tables for benchmarks.search")
    add = parser.add_argument
    add("folder", type=Path, help="a folder for the tables, one folder each")
    add("--launches", type=int, default=250, help="launches of a table at most (default 250)")
    add(
        "--spread",
        type=float,
        default=0.2,
        help="log-sd of the true constants about those the models believe (default 0.2)",
    )
    add(
        "--of-values",
        type=float,
        default=0.05,
        help="log-sd of what each value of a launch knob does besides (default 0.05)",
    )
    add(
        "--beyond-kernel",
        type=float,
        default=0.0,
        metavar="SD",
        help="log-sd of interactions of launch knobs, of their dependence on the clock and of "
        "thresholds, none of which an additive kernel assumes (default 0)",
    )
    add("--error", type=float, default=0.03, help="of each launch besides (default 0.03)")
    add(
        "--seeds",
        type=lambda text: [int(word) for word in text.split(",")],
        default=[0],
        metavar="N,...",
        help="of what is drawn, a table each (default 0)",
    )
    options = parser.parse_args()
    figures = []
    for job, cluster, space in PROBLEMS:
        device = load_cluster(cluster).device
        print(f"the models' errors where they could be checked, on {device.name}:")
        for line in known_error_lines(device):
            print(f"  {line}")
        for seed in options.seeds:
            folder = options.folder / f"{job}-{cluster}-{seed}"
            made = record(
                folder,
                job,
                cluster,
                space,
                most=options.launches,
                spread=options.spread,
                of_values=options.of_values,
                error=options.error,
                seed=seed,
                beyond=options.beyond_kernel,
            )
            print(f"{folder}: {made.configurations} configurations; {made.error.sentence}")
            name = folder.name.replace("-", "_")
            figures += [
                Figure(f"{name}_configurations", made.configurations, "count"),
                Figure(f"{name}_time_error", made.error.time[0], "ratio"),
                Figure(f"{name}_power_error", made.error.power[0], "ratio"),
                Figure(f"{name}_energy_error", made.error.energy[0], "ratio"),
            ]
    publish(figures, options.json)


if __name__ == "__main__":
    main()
