"""Failures of nodes during a long training: lost work, checkpoints and restarts.

J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
Generation Computer Systems 22 (2006): failures come at random with a mean time M between them, the
state is saved every tau seconds of work, which takes delta, and a restart takes R. The expected
wall time of work that takes T is

    M exp(R / M) (exp((tau + delta) / M) - 1) T / tau

and the interval that makes it least is, for delta below 2 M,

    sqrt(2 delta M) (1 + sqrt(delta / 2 M) / 3 + (delta / 2 M) / 9) - delta

which begins with Young's sqrt(2 delta M), and M beyond.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError

DAY_S = 86400.0
#: Exponents above this are a training that does not end, and so is one that takes this much longer.
_MOST, _LONGEST = 700.0, 100.0


@dataclass(frozen=True)
class Interruptions:
    """Cost of failures in a training on some nodes.

    Attributes:
        a_day: failures a day.
        interval_s: work between two checkpoints.
        time_ratio: expected wall time over that without failures and checkpoints.
        idle_ratio: the part of it in which no device computes: checkpoints and restarts.
    """

    a_day: float
    interval_s: float
    time_ratio: float
    idle_ratio: float

    def energy_ratio(self, idle_share: float) -> float:
        """Return energy over that without failures; `idle_share` is idle over training power."""
        return self.time_ratio - (1 - idle_share) * self.idle_ratio


def best_interval_s(mean_s: float, checkpoint_s: float) -> float:
    """Return Daly's interval between checkpoints for a mean time between failures."""
    if checkpoint_s >= 2 * mean_s:
        return mean_s
    small = checkpoint_s / (2 * mean_s)
    first = math.sqrt(2 * checkpoint_s * mean_s)
    return first * (1 + math.sqrt(small) / 3 + small / 9) - checkpoint_s


def require_end(cluster: Cluster) -> None:
    """Raise InputError if a training on all of the nodes would never end."""
    found = interruptions(cluster, cluster.nodes)
    if found is not None and found.time_ratio > _LONGEST:
        raise InputError(
            f"cluster {cluster.name!r} states {found.a_day:.3g} failures a day on {cluster.nodes} "
            f"nodes, with which a training takes over {_LONGEST:.0f} times as long: lower "
            "failures_per_node_day, restart_s, checkpoint_s or checkpoint_interval_s"
        )


def interruptions(cluster: Cluster, nodes: int) -> Interruptions | None:
    """Return the cost of failures on some nodes of a cluster; None if it states no failures."""
    a_day = cluster.failures_per_node_day * nodes
    if not a_day:
        return None
    mean_s, checkpoint_s, restart_s = DAY_S / a_day, cluster.checkpoint_s, cluster.restart_s
    interval_s = cluster.checkpoint_interval_s or best_interval_s(mean_s, checkpoint_s)
    exponent = (restart_s + interval_s + checkpoint_s) / mean_s
    if exponent > _MOST:
        return Interruptions(a_day, interval_s, math.inf, 0.0)
    grown = math.exp(restart_s / mean_s) * math.expm1((interval_s + checkpoint_s) / mean_s)
    time_ratio = mean_s * grown / interval_s
    idle_ratio = checkpoint_s / interval_s + restart_s * time_ratio / mean_s
    return Interruptions(a_day, interval_s, time_ratio, min(idle_ratio, time_ratio - 1))
