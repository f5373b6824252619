"""Power samples restricted to the devices that the ranks use.

A lease may hold more devices than a job uses. The idle ones are in the energy, but what their
clocks, temperatures and throttling are says nothing of the job: they may stand at a lock that the
busy ones do not reach, or ignore it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from tuner.workload.meters.base import PowerSample
from tuner.workload.meters.gpus import over_devices


def device_number(name: str) -> int | None:
    """Return the number in a name like "gpu3_clock_MHz"; None if it names no single device."""
    number = name.removeprefix("gpu").partition("_")[0]
    return int(number) if name.startswith("gpu") and number.isdigit() else None


def of_used_devices(
    samples: Sequence[PowerSample], devices: Collection[int] | None
) -> Sequence[PowerSample]:
    """Return the samples with what only these devices told, as means over them.

    Power stays the lease's. Samples of a meter that does not tell devices apart stay as they are.
    """
    if devices is None:
        return samples
    return [_restricted(sample, frozenset(devices)) for sample in samples]


def _restricted(sample: PowerSample, devices: frozenset[int]) -> PowerSample:
    states: dict[int, dict[str, float]] = {}
    whole: dict[str, float] = {}
    for name, value in sample.extra.items():
        number = device_number(name)
        if number is None:
            whole[name] = value
        elif number in devices:
            states.setdefault(number, {})[name.partition("_")[2]] = value
    if not states:
        return sample
    merged = over_devices([states[number] for number in sorted(states)])
    own = {f"gpu{n}_{name}": value for n, state in states.items() for name, value in state.items()}
    del merged["power_W"]
    return replace(sample, extra={**whole, **merged, **own})
