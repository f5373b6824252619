"""Coverage of predicted step times on 128 to 4,096 GPUs from probes on 8, 16 and 32.

Twelve clusters draw their constants from the models' own uncertainties, and each is a truth in
three worlds: as the models say; with an oversubscribed network, on which reductions beyond the
probed sizes have half the bandwidth; and with steps that wait for the slowest device, 2 % longer
with every doubling beyond the probed sizes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tuner.models.analytic.constants import constants_of
from tuner.models.scale_out import AT_MOST, UNCERTAIN, ScaleOut, predictor
from tuner.search_spaces.cluster import enlarged, load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job

PROBED, PREDICTED = (8, 16, 32), (128, 512, 4096)
CLUSTERS = 12
#: Standard deviation of a probe's log step time, and the slowdown by the slowest of all devices.
NOISE, SLOWEST = 0.01, 0.02
WORLDS = ("model", "oversubscribed", "slowest")


def covered(seed: int = 0) -> dict[str, np.ndarray]:
    """Return, by world, whether the truth is in the 90 % interval, (clusters, sizes)."""
    job = replace(load_job("qwen2.5-7b"), global_batch=16_384)
    cluster = enlarged(load_cluster("h100-32"), PREDICTED[-1])

    def configurations(sizes: tuple[int, ...]) -> list[Configuration]:
        return [Configuration.of(data_parallel=n, micro_batch=1, zero_stage=1) for n in sizes]

    near = predictor(job, cluster, configurations(PROBED))
    far = predictor(job, cluster, configurations(PREDICTED))
    base, rng = constants_of(cluster.device), np.random.default_rng(seed)
    beyond = np.log2(np.array(PREDICTED) / PROBED[-1])
    found: dict[str, list[np.ndarray]] = {world: [] for world in WORLDS}
    for _ in range(CLUSTERS):
        drawn = {
            name: getattr(base, name) * float(np.exp(spread * rng.standard_normal()))
            for name, spread in UNCERTAIN.items()
            if getattr(base, name) > 0
        }
        for name in AT_MOST.keys() & drawn.keys():
            drawn[name] = min(drawn[name], AT_MOST[name])
        true = replace(base, **drawn)
        logs = near(true)
        model = ScaleOut(
            base,
            near,
            gpus=PROBED,
            launches=PROBED,
            measured=logs + NOISE * rng.standard_normal(logs.shape),
        )
        said = model.correct(far, PREDICTED).step_time_s
        half = replace(true, reduce_over_network=true.reduce_over_network / 2)
        truths = {
            "model": far(true)[:, 0],
            "oversubscribed": far(half)[:, 0],
            "slowest": far(true)[:, 0] + np.log(1 + SLOWEST * beyond),
        }
        for world, log in truths.items():
            found[world].append((said.low <= np.exp(log)) & (np.exp(log) <= said.high))
    return {world: np.array(rows) for world, rows in found.items()}
