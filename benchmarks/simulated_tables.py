"""Record simulated clusters as tables, so that `benchmarks.search` can search them.

Every valid configuration of a job on a cluster is asked of the simulated runner without noise; what
does not fit in memory is left out. The cluster departs from the models by a few per cent a launch,
drawn once, so the truth is rougher than a formula. A table with so many launches that a search's
figures would take hours keeps a share of them, drawn at random; the table says so.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure, arguments, publish
from models.simulated import Conditions, SimulatedRunner
from search_spaces.cluster import load_cluster
from search_spaces.job import load_job
from search_spaces.knobs import KNOBS
from search_spaces.space import load_space
from workload.probe import ProbeRequest, WindowPolicy

#: Job, cluster, space.
PROBLEMS = (("lmm-7b", "gh200-32", "default"), ("opt-350m", "a100-8", "parallelism"))
#: Noise that a search of the table meets, and what probing is charged (`Conditions`' defaults).
NOISE = Conditions()
WINDOW_S, SETTLE_S = 5.0, 1.0


def record(
    folder: Path, job_name: str, cluster_name: str, space: str, most: int, error: float, seed: int
) -> int:
    """Write one table; returns how many configurations it holds."""
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
    runner = SimulatedRunner(job, cluster, seed=seed, conditions=still)
    order = np.random.default_rng(seed).permutation(len(candidates.launches))
    window = WindowPolicy(min_s=0.1, min_steps=1, settle_s=0.0)
    rows, kept = [], 0
    for place in order:
        launch, lives = candidates.launches[place], tuple(candidates.lives[place])
        answer = runner.run(ProbeRequest("table", launch, lives, window, math.inf))
        for m in answer.measurements:
            rows.append(({**launch, **m.live}, m.step_time_s, m.power_W))
        kept += bool(answer.measurements)
        if kept == most:
            break
    names = sorted({name for knobs, _, _ in rows for name in knobs})
    live = [name for name in names if KNOBS[name].kind == "live"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "step_time_s", "power_W"])
        for knobs, time_s, power_W in rows:
            cells = [_cell(knobs.get(name)) for name in names]
            writer.writerow([*cells, f"{time_s:.9g}", f"{power_W:.9g}"])
    (folder / "table.toml").write_text(
        f'name = "{job_name} on {cluster_name}"\n'
        f'what = "predicted by the analytic models, off by {error:g} a launch; nothing was '
        f'measured; {kept} of {len(order)} launches, space {space}"\n'
        f"launch_knobs = {[n for n in names if n not in live]}\n"
        f"live_knobs = {live}\n"
        'time_s = "step_time_s"\npower_W = "power_W"\nunit_of_work = "step"\n'
        f'energy_scope = "{runner.meter.scope}"\nestimated = true\n\n'
        f"[noise]\ntime_cv = {NOISE.time_noise}\npower_cv = {NOISE.power_noise}\n\n"
        f"[cost]\nlaunch_s = {NOISE.launch_s + 5 * NOISE.launch_each_s}\n"
        f"launch_power = {NOISE.launch_power}\nsettle_s = {SETTLE_S}\nwindow_s = {WINDOW_S}\n"
    )
    return len(rows)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def main() -> None:
    parser = arguments("record simulated clusters as tables for benchmarks.search")
    add = parser.add_argument
    add("folder", type=Path, help="a folder for the tables, one folder each")
    add("--launches", type=int, default=250, help="launches of a table at most (default 250)")
    add("--error", type=float, default=0.03, help="between models and cluster (default 0.03)")
    add("--seed", type=int, default=0, help="of what is drawn (default 0)")
    options = parser.parse_args()
    figures = []
    for job, cluster, space in PROBLEMS:
        name = f"{job}-{cluster}"
        count = record(
            options.folder / name,
            job,
            cluster,
            space,
            options.launches,
            options.error,
            options.seed,
        )
        print(f"{options.folder / name}: {count} configurations")
        figures.append(Figure(f"{name.replace('-', '_')}_configurations", count, "count"))
    publish(figures, options.json)


if __name__ == "__main__":
    main()
