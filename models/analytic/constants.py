"""Constants of the analytic models, each with its source, as data.

`data/constants/*.toml` has one file per device kind, and `cuda.toml` and `cpu.toml` for all others;
a file names the one that it modifies (`like`) and gives reasons (`sources`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from tuner.search_spaces.cluster import Device
from tuner.search_spaces.data_files import check_keys, read_toml
from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.search_spaces.typed import names_a_file


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Shares of a data sheet that a training step reaches, fixed times, and shares of power.

    Attributes:
        matrix_efficiency: share of the stated peak that a large matrix product reaches.
        attention_efficiency: share of the stated peak that fused attention reaches, of the FLOPs
            that it executes.
        product_s: fixed seconds of one matrix product at the highest clock (it scales with it);
            with the share above this is Calculon's stepped curve of efficiency over size.
        operator_s: seconds that dispatching one operator adds to a step in an eager program; the
            host's, so no SM clock changes it.
        compiled_operator_s: the same in a program that compiles its model.
        dispatch_hidden: 0 adds dispatch to the device's work, 1 hides the smaller of both.
        memory_efficiency: share of the stated memory bandwidth that a stream reaches.
        bandwidth_clock: below this share of the highest clock the SMs cannot keep memory busy.
        link_efficiency, link_latency_s: inside a node: share of the stated bandwidth, and seconds
            of each of a collective's rounds.
        network_efficiency, network_latency_s: the same between nodes.
        reduce_efficiency: share of a link's or network's bandwidth that the reduction of gradients
            at the end of a step reaches.
        reduce_over_network: share of that which is left if the reduction crosses nodes.
        transfer_efficiency: share of the network's bandwidth that a stage's activation reaches.
        stage_s: seconds that schedule and exchange of shapes cost per micro-batch and stage.
        step_s: seconds of every optimizer step that nothing else explains (loop, clipping).
        gather_overlap: share of compute that ZeRO-3's gathering and reducing hides behind.
        reduce_overlap: share of the backward pass that ZeRO 0 to 2's reducing hides behind.
        overlap_slowdown: compute behind which a collective hides takes longer by this share of
            what is hidden.
        host_link_efficiency, host_memory_efficiency: shares of the bandwidth of the link to host
            memory and of host memory that are reached.
        nvme_Bps: bytes per second of a node's drives, for reading and writing.
        context_bytes: memory of a rank without a model: context, libraries, workspaces.
        buffer_elements: elements of DeepSpeed's reduction and gathering buckets.
        memory_overhead: share that fragmentation adds to activations.
        compute_W: power that full-rate matrix arithmetic adds at the highest clock, as a share of
            the device's `reference_W` (uncapped: it may exceed the limit).
        memory_W, link_W: power that full use of memory and of the links adds, likewise.
        awake_W: power that a device adds at the highest clock while it runs a program, likewise.
        wait_W: power that the spinning kernels of a collective or a pipeline's bubble add to that
            at the highest clock, likewise.
        reference_W: watts that the shares are of; 0 takes the device's limit less its idle power.
        voltage_knee: share of the highest clock up to which the voltage is flat.
        lowest_voltage: the flat voltage as a share of the highest.
        host_link_W: power that moving data to host memory adds, likewise.
        host_busy_W: power that a host optimizer adds to a node while it runs, watts per device.
    """

    matrix_efficiency: float
    attention_efficiency: float
    product_s: float
    operator_s: float
    compiled_operator_s: float
    dispatch_hidden: float
    memory_efficiency: float
    bandwidth_clock: float
    link_efficiency: float
    link_latency_s: float
    network_efficiency: float
    network_latency_s: float
    reduce_efficiency: float
    reduce_over_network: float
    transfer_efficiency: float
    stage_s: float
    step_s: float
    gather_overlap: float
    reduce_overlap: float
    overlap_slowdown: float
    host_link_efficiency: float
    host_memory_efficiency: float
    nvme_Bps: float
    context_bytes: float
    buffer_elements: float
    memory_overhead: float
    compute_W: float
    memory_W: float
    link_W: float
    awake_W: float
    wait_W: float
    host_link_W: float
    host_busy_W: float
    reference_W: float
    voltage_knee: float
    lowest_voltage: float
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.figures():
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
                raise InvalidValue(f"constant {name}", value, "a number of at least 0")

    @classmethod
    def figures(cls) -> tuple[str, ...]:
        """Return the names of the numbers."""
        return tuple(field.name for field in fields(cls) if field.name != "sources")


def _read(name: str, path: Path | None = None) -> dict[str, Any]:
    source = path or resources.files("tuner.models") / "data" / "constants" / f"{name}.toml"
    data = read_toml(source, f"constants {name!r}")
    check_keys(data, (*Constants.figures(), "sources", "like"), f"constants {name!r}")
    if "like" not in data:
        return data
    below = _read(str(data.pop("like")))
    sources = [*data.pop("sources", ()), *below.pop("sources", ())]
    return {**below, **data, "sources": sources}


def load_constants(name: str | Path) -> Constants:
    """Load constants by shipped name or by the path of a toml file (else InputError)."""
    path = Path(name) if str(name).endswith(".toml") else None
    data = _read(str(name), path)
    missing = [figure for figure in Constants.figures() if figure not in data]
    if missing:
        raise InputError(f"constants {str(name)!r} lack {', '.join(missing)}")
    return Constants(**{**data, "sources": tuple(data.get("sources", ()))})


@lru_cache(maxsize=64)
def constants_of(device: Device) -> Constants:
    """Return the constants of a device: from its own file if it exists, else those of its type."""
    shipped = resources.files("tuner.models") / "data" / "constants" / f"{device.name}.toml"
    return load_constants(device.name if names_a_file(shipped) else device.type)
