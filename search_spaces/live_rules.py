"""Validity rules of the live knobs: clocks and power limits.

They belong to `tuner.search_spaces.rules`, which says how rules are written.
"""

from __future__ import annotations

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.rule import Rule, registering

_RULES: list[Rule] = []
_rule = registering(_RULES)


@_rule("Clocks and power limits can be set only where the machine permits it.", "clock_MHz")
def _clock_control(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    if c.get("clock_MHz") is not None and not cluster.clocks_MHz:
        return f"cannot set clocks here (cluster {cluster.name!r}); leave clock_MHz out"
    return None


@_rule("A device runs only at the clocks it offers.", "clock_MHz")
def _clock_offered(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    offered, value = cluster.clocks_MHz, c.get("clock_MHz")
    if value is None or not offered:
        return None
    for clock in value if isinstance(value, tuple) else (value,):
        if clock not in offered:
            nearest = min(offered, key=lambda other: abs(other - float(clock)))
            return (
                f"{cluster.device.name} does not offer clock_MHz {clock}; the nearest is "
                f"{nearest}, the range {offered[0]} to {offered[-1]}"
            )
    return None


def _one_per_stage(c: Configuration, knob: str, what: str) -> str | None:
    """Return a phrase if a tuple does not have one value per pipeline stage, else None."""
    values = c.get(knob)
    if isinstance(values, tuple) and len(values) != c.pipeline_parallel:
        plural = "s" if len(values) != 1 else ""
        return (
            f"{knob} names {len(values)} {what}{plural}, pipeline_parallel is {c.pipeline_parallel}"
        )
    return None


@_rule("One clock per stage needs as many clocks as stages.", "clock_MHz", "pipeline_parallel")
def _clock_stages(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    return _one_per_stage(c, "clock_MHz", "clock")


@_rule("Clocks and power limits can be set only where the machine permits it.", "power_limit_W")
def _limit_control(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    if c.get("power_limit_W") is None:
        return None
    if not cluster.clock_control or cluster.device.min_limit_W is None:
        return f"cannot set power limits here (cluster {cluster.name!r}); leave power_limit_W out"
    return None


@_rule("A device takes only power limits within its range.", "power_limit_W")
def _limit_range(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    value, device = c.get("power_limit_W"), cluster.device
    low, high = device.min_limit_W, device.max_limit_W
    if value is None or low is None or not cluster.clock_control:
        return None
    for limit in value if isinstance(value, tuple) else (value,):
        if not low <= float(limit) <= high:
            return f"power_limit_W {limit} is outside {low:g} to {high:g} W of {device.name}"
    return None


@_rule(
    "One power limit per stage needs as many limits as stages.",
    "power_limit_W",
    "pipeline_parallel",
)
def _limit_stages(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    return _one_per_stage(c, "power_limit_W", "limit")


@_rule("Clocks and power limits can be set only where the machine permits it.", "memory_clock_MHz")
def _memory_clock_control(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    if c.get("memory_clock_MHz") is not None and not cluster.clock_control:
        return f"cannot set clocks here (cluster {cluster.name!r}); leave memory_clock_MHz out"
    return None


@_rule(
    "Of a locked clock and a power limit only the tighter acts, so the pair repeats one of them.",
    "clock_MHz",
    "power_limit_W",
)
def _one_limiter(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    if c.get("clock_MHz") is not None and c.get("power_limit_W") is not None:
        return "clock_MHz and power_limit_W are both set; only the tighter one acts, give one"
    return None


#: The rules above, in their order.
LIVE_RULES: tuple[Rule, ...] = tuple(_RULES)
