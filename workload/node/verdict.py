"""The facts about this machine in short: what trains, what meters, what is missing."""

from __future__ import annotations

from tuner.workload.node.machine_facts import MachineFacts
from tuner.workload.node.readiness import NEEDED


def verdict_lines(facts: MachineFacts) -> list[str]:
    """Return whether probes can run, machine, energy, clocks, software, and what is missing."""
    free = f"{facts.free_bytes / 2**30:.0f} GiB free"
    devices = f"{facts.cores} cores, {free}, no GPU: each core is a device"
    if facts.gpus:
        devices = f"{len(facts.gpus)} x {facts.gpus[0].name}, {facts.cores} cores, {free}"
    meter = next((meter for meter in facts.meters if meter.available), None)
    energy = "nothing here meters or estimates it"
    if meter is not None:
        kind = "estimated, not metered" if meter.name == "estimated" else f"metered by {meter.name}"
        energy = f"{kind}: {meter.note}"
    absent = [name for name in NEEDED if facts.packages.get(name) is None]
    if absent:
        verdict = f"cannot train: {', '.join(absent)} missing; pip install 'joulefront[train]'"
    elif meter is None:
        verdict = "cannot measure: there is no meter"
    elif facts.missing:
        verdict = "probes train here; what is missing is listed below"
    elif meter.name == "estimated":
        verdict = "ready, without an energy meter: times are measured, energies are time x watts"
    else:
        verdict = "ready: probes train here, in real DeepSpeed processes"
    versions = (f"{name} {version}" for name, version in facts.packages.items() if version)
    return [
        f"verdict   {verdict}",
        f"machine   {facts.host}: {devices}",
        f"energy    {energy}",
        f"clocks    {'searched, and put back' if facts.clock_control else 'left as they are'}",
        f"software  Python {facts.python}, {', '.join(versions)}",
        *(line for thing in facts.missing for line in thing.text()),
    ]
