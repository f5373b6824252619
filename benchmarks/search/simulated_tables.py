"""Simulated clusters recorded as tables.

The simulated runner answers every valid configuration of a job on a cluster without noise;
configurations that do not fit in memory are left out. The cluster departs from the analytic models:
each of their constants has a random error, each value of each launch knob has an effect that no
constant describes, and each launch departs by a few per cent, all drawn once per table. A search
that uses the models (the table's `[predicted_by]`) therefore has a wrong prior. Of a table with too
many launches for a search of reasonable length, a random share is kept.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tuner.models.analytic.constants import Constants, constants_of
from tuner.models.analytic.model import AnalyticModel
from tuner.models.prior import Prediction
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.job import load_job
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.space import load_space
from tuner.simulated.runner import Conditions, SimulatedRunner
from tuner.workload.records.probe import ProbeRequest, WindowPolicy

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


#: Of the predicted log of energy x time of each launch: factors of the time of some.
Misjudged = Callable[[Mapping[Settings, float]], Mapping[Settings, float]]


class DepartedTruth:
    """Truth of a cluster of `departed`, which no constants of the models describe.

    Each value of each launch knob has a factor of its own on time and on power. That is what an
    additive kernel over launch knobs assumes.

    Args:
        model: of the departed cluster.
        spread: standard deviation of the logarithm of each value's factor.
        seed: of the factors.
    """

    def __init__(self, model: AnalyticModel, spread: float, seed: int) -> None:
        self._model, self._spread, self._seed = model, spread, seed

    def predict(self, configurations: Sequence[Configuration]) -> Prediction:
        said = self._model.predict(configurations)
        time, power = np.array([self._factors(c) for c in configurations]).T
        return replace(said, step_time_s=said.step_time_s * time, power_W=said.power_W * power)

    def _factors(self, configuration: Configuration) -> np.ndarray:
        knobs = [(name, str(value)) for name, value in configuration.launch.items()]
        return np.exp(self._spread * np.sum([self._drawn(*knob) for knob in knobs], axis=0))

    def _drawn(self, *words: str) -> np.ndarray:
        """Return the log factors on time and power that belong to these words, (2,)."""
        text = "\n".join([str(self._seed), *words]).encode()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
        return np.asarray(np.random.default_rng(seed).standard_normal(2))


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
    misjudged: Misjudged | None = None,
) -> None:
    """Write one table.

    Args:
        folder: it is made.
        job_name, cluster_name, space: what is recorded, by shipped name.
        most: launches that it keeps at most.
        spread: of the constants about what the models believe (`departed`).
        of_values: of what each value of a launch knob does besides (`DepartedTruth`).
        error: relative standard deviation of each launch's own departure.
        seed: of everything drawn.
        misjudged: of what is kept, with the model's log of energy x time at the best setting of
            each launch, the factor by which some launches take longer yet.
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
    truth = DepartedTruth(AnalyticModel(job, there, constants=constants), of_values, seed)
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
    if misjudged is not None:
        said = AnalyticModel(job, cluster).predict([row for row, _, _ in rows])
        products: dict[Settings, float] = {}
        for (row, _, _), log in zip(rows, np.log(said.power_W * said.step_time_s**2), strict=True):
            products[row.launch] = min(float(log), products.get(row.launch, math.inf))
        factors = misjudged(products)
        rows = [(row, t * factors.get(row.launch, 1.0), p) for row, t, p in rows]
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
        f"{of_values:g} a value of a launch knob and {error:g} a launch, seed {seed}; nothing was "
        f'measured; {kept} of {len(order)} launches, space {space}"\n'
        f"launch_knobs = {[n for n in names if n not in live]}\n"
        f"live_knobs = {live}\n"
        'time_s = "step_time_s"\npower_W = "power_W"\nunit_of_work = "step"\n'
        f'energy_scope = "{runner.meter.scope}"\nestimated = true\n\n'
        f'[predicted_by]\njob = "{job_name}"\ncluster = "{cluster_name}"\n\n'
        f"[noise]\ntime_cv = {NOISE.time_noise}\npower_cv = {NOISE.power_noise}\n\n"
        f"[cost]\nlaunch_s = {NOISE.launch_s + 5 * NOISE.launch_each_s}\n"
        f"launch_power = {NOISE.launch_power}\nsettle_s = {SETTLE_S}\nwindow_s = {WINDOW_S}\n"
    )


def _cell(value: object) -> str:
    if value is None:
        return ""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
