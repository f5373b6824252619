"""Predictions with the time and energy that failures of nodes add."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tuner.models.analytic.failures import interruptions
from tuner.models.prior import Prediction
from tuner.search_spaces.cluster import Cluster


def with_failures(
    prediction: Prediction, ranks: Callable[[], np.ndarray], cluster: Cluster
) -> Prediction:
    """Return the mean time and power of a step, failures included, for numbers of ranks.

    Where nothing computes, in checkpoints and restarts, nodes draw their idle power.
    """
    if not cluster.failures_per_node_day:
        return prediction
    each, counts = cluster.devices_per_node, ranks()
    nodes = -(-counts // each)
    found = {int(n): interruptions(cluster, int(n)) for n in np.unique(nodes)}
    node_idle_W = cluster.host_W + cluster.device.idle_W * np.minimum(counts, each)
    idle_share = np.minimum(nodes * node_idle_W / prediction.power_W, 1.0)
    pairs = [(found[int(n)], share) for n, share in zip(nodes, idle_share, strict=True)]
    time = np.array([added.time_ratio for added, _ in pairs if added])
    energy = np.array([added.energy_ratio(share) for added, share in pairs if added])
    return replace(
        prediction,
        step_time_s=prediction.step_time_s * time,
        power_W=prediction.power_W * energy / time,
    )
