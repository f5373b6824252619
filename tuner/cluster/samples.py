"""Power samples of several nodes as one, with the states of devices shared by neighbours.

States change slowly, and merging those of a thousand nodes at each sample would take the lead
longer than the sample lasts. So each node combines its own over some samples before it sends them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from tuner.workload.records.probe import PowerSample

#: Samples that share the states of their devices: a second of the timeline.
SHARED = 10


def _is_worst(name: str) -> bool:
    return name.startswith("throttle") or "temperature" in name


def together(states: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the states of successive samples: means; of temperatures and throttling the highest.

    What only some of the samples hold is a mean over those.
    """
    values: dict[str, list[float]] = {}
    for state in states:
        for name, value in state.items():
            values.setdefault(name, []).append(value)
    return {
        name: max(each) if _is_worst(name) else sum(each) / len(each)
        for name, each in values.items()
    }


def with_shared_states(samples: Sequence[PowerSample]) -> tuple[PowerSample, ...]:
    """Return the samples with the states of each `SHARED` of them combined."""
    shared = []
    for first in range(0, len(samples), SHARED):
        block = samples[first : first + SHARED]
        extra = together([sample.extra for sample in block])
        shared += [PowerSample(sample.time_s, sample.power_W, extra) for sample in block]
    return tuple(shared)


def merged(samples: Sequence[PowerSample], devices_per_node: int) -> PowerSample:
    """Combine simultaneous samples of all nodes: power summed, devices numbered through.

    Means over devices become means over nodes; of temperatures and throttling the highest counts.
    """
    extra: dict[str, list[float]] = {}
    several = len(samples) > 1
    for node, sample in enumerate(samples):
        first = node * devices_per_node
        for name, value in sample.extra.items():
            number, _, rest = name.removeprefix("gpu").partition("_")
            if name.startswith("gpu") and number.isdigit():
                name = f"gpu{first + int(number)}_{rest}"
            elif several and devices_per_node == 1 and name.endswith("clock_MHz"):
                extra.setdefault(f"gpu{first}_{name}", []).append(value)
                extra.setdefault(f"gpu{first}_power_W", [sample.power_W])
            extra.setdefault(name, []).append(value)

    def over_nodes(name: str, values: list[float]) -> float:
        if _is_worst(name):
            return max(values)
        return sum(values) / (1 if name.endswith("_W") else len(values))

    return PowerSample(
        samples[0].time_s,
        sum(sample.power_W for sample in samples),
        {name: over_nodes(name, values) for name, values in extra.items()},
    )


def nearest(times: Sequence[float], at_s: float) -> int:
    """Return the place of the time that is nearest."""
    i = bisect_left(times, at_s)
    if i == len(times) or (i > 0 and at_s - times[i - 1] < times[i] - at_s):
        return i - 1
    return i
