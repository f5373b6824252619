"""Coverage of intervals from 8 GPUs to 64 and 512, on clusters that the models misjudge.

The simulated cluster uses the same formulas with other constants: those that the correction treats
as uncertain are drawn at random, as are some that it treats as certain (latencies, overlaps, fixed
times), and each launch departs by 3 %. The small cluster is probed at random launches; the large
one is predicted. Coverage is of the 90 % intervals of step time, power and energy.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tuner.models.analytic.constants import Constants, constants_of
from tuner.models.scale_out import UNCERTAIN, ScaleOut, predictor
from tuner.search_spaces.cluster import Cluster, enlarged, load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job
from tuner.search_spaces.space import load_space

#: Job, cluster, how many are at hand, and how many are wanted.
CASES = (("opt-350m", "gh200-32", 8), ("qwen2.5-7b", "h100-32", 8))
TARGETS = (64, 512)
#: What the correction takes for certain, and by how much it is off here (log sd).
TAKEN_FOR_CERTAIN = {
    "product_s": 0.3,
    "link_latency_s": 0.3,
    "network_latency_s": 0.3,
    "gather_overlap": 0.15,
    "reduce_overlap": 0.15,
    "step_s": 0.3,
    "link_W": 0.4,
}
#: Each launch's own, in log; and launches that are probed, at so many clocks each.
OWN, LAUNCHES, CLOCKS = 0.03, 8, 3
#: The job's own batch feeds too few GPUs: 512 of them want more sequences a step.
GLOBAL_BATCH = 1024


def _disturbed(constants: Constants, rng: np.random.Generator) -> Constants:
    moved = {}
    for name, spread in {**UNCERTAIN, **TAKEN_FOR_CERTAIN}.items():
        moved[name] = getattr(constants, name) * float(np.exp(spread * rng.standard_normal()))
    for name in ("gather_overlap", "reduce_overlap", "lowest_voltage", "voltage_knee"):
        moved[name] = min(moved[name], 0.97)
    return replace(constants, **moved)


def _drawn(
    job_name: str, cluster: Cluster, count: int, rng: np.random.Generator
) -> list[Configuration]:
    """Launches drawn at random, each at a few clocks."""
    job = replace(load_job(job_name), global_batch=GLOBAL_BATCH)
    launches = load_space("parallelism").candidates(job, cluster).launches
    top = cluster.device.clocks_MHz[-1]
    clocks = [clock for clock in cluster.device.clocks_MHz if clock >= 0.55 * top]
    rows = rng.choice(len(launches), min(count, len(launches)), replace=False)
    return [
        Configuration.of(**dict(launches[row]), clock_MHz=int(clock))
        for row in rows
        for clock in rng.choice(clocks, CLOCKS, replace=False)
    ]


def compare(trials: int) -> dict[tuple[int, str], tuple[float, float]]:
    """Return the median error and the coverage of each figure, by number of GPUs and name."""
    rng = np.random.default_rng(0)
    found: dict[tuple[int, str], list[tuple[float, bool]]] = {}
    for job_name, cluster_name, few in CASES:
        job = replace(load_job(job_name), global_batch=GLOBAL_BATCH)
        small = enlarged(load_cluster(cluster_name), few)
        base = constants_of(small.device)
        for _ in range(trials):
            true = _disturbed(base, rng)
            own: dict[str, np.ndarray] = {}

            def measure(cluster: Cluster, configurations: list[Configuration]) -> np.ndarray:
                logs = predictor(job, cluster, configurations)(true)  # noqa: B023
                for row, each in enumerate(configurations):
                    key = f"{cluster.devices} {each.launch.key}"
                    if key not in own:  # noqa: B023
                        own[key] = OWN * rng.standard_normal(2)  # noqa: B023
                    logs[row] += own[key]  # noqa: B023
                return logs

            probed = _drawn(job_name, small, LAUNCHES, rng)
            line = ScaleOut(
                base,
                predictor(job, small, probed),
                gpus=[each.world_size for each in probed],
                launches=[each.launch.key for each in probed],
                measured=measure(small, probed),
            )
            for gpus in TARGETS:
                big = enlarged(small, gpus)
                wanted = _drawn(job_name, big, 10, rng)
                truth = np.exp(measure(big, wanted))
                world = [each.world_size for each in wanted]
                said = line.correct(predictor(job, big, wanted), world)
                for name, figure, here in (
                    ("step time", said.step_time_s, truth[:, 0]),
                    ("power", said.power_W, truth[:, 1]),
                    ("energy", said.energy_J, truth.prod(axis=1)),
                ):
                    inside = (figure.low <= here) & (here <= figure.high)
                    errors = np.abs(figure.median / here - 1)
                    found.setdefault((gpus, name), []).extend(zip(errors, inside, strict=True))
    return {
        key: (float(np.median([error for error, _ in each])), float(np.mean([i for _, i in each])))
        for key, each in found.items()
    }
