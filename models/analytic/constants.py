"""Constants of the analytic models, with the job and cluster that every term reads.

`data/constants/*.toml` has one file of constants per device kind, and `cuda.toml` and `cpu.toml`
for all others; a file names the one that it modifies (`like`) and gives reasons (`sources`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.data_files import check_keys, read_toml
from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.search_spaces.job import Program, StateBytes, TrainingJob
from tuner.search_spaces.model_facts import ModelFacts, facts_of, widens
from tuner.search_spaces.typed_json import names_a_file

#: Tensor-core peak in bf16 over the fp32 peak without tensor cores, for a device whose file does
#: not state the latter: 16 on A100, 15 on H100, 8 on V100, 4 on A40 (NVIDIA data sheets).
TENSOR_OVER_FP32 = 16.0
#: Peak of TF32 products as a share of the bf16 peak, on Ampere and Hopper (NVIDIA data sheets).
TF32_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Shares of a data sheet that a training step reaches, fixed times, and shares of power."""

    matrix_efficiency: float  # share of the stated peak that a large matrix product reaches
    # share of the stated peak that fused attention reaches, of the FLOPs that it executes.
    attention_efficiency: float
    # fixed seconds of one matrix product at the highest clock (it scales with it); with the share
    # above this is Calculon's stepped curve of efficiency over size.
    product_s: float
    # seconds that dispatching one operator adds to a step in an eager program; the host's, so no SM
    # clock changes it.
    operator_s: float
    compiled_operator_s: float  # the same in a program that compiles its model
    # operators of that time that the recomputation of one block adds to those that it repeats: its
    # random states are saved and restored, and autograd is entered again.
    recompute_operators: float
    dispatch_hidden: float  # 0 adds dispatch to the device's work, 1 hides the smaller of both
    memory_efficiency: float  # share of the stated memory bandwidth that a stream reaches
    bandwidth_clock: float  # below this share of the highest clock the SMs cannot keep memory busy
    # link_efficiency, link_latency_s: inside a node: share of the stated bandwidth, and seconds of
    # each of a collective's rounds.
    link_efficiency: float
    link_latency_s: float
    # network_efficiency, network_latency_s: the same between nodes.
    network_efficiency: float
    network_latency_s: float
    # share of a link's or network's bandwidth that the reduction of gradients at the end of a step
    # reaches.
    reduce_efficiency: float
    reduce_over_network: float  # share of that which is left if the reduction crosses nodes
    # share of the network's bandwidth that a stage's activation reaches.
    transfer_efficiency: float
    stage_s: float  # seconds that schedule and exchange of shapes cost per micro-batch and stage
    step_s: float  # seconds of every optimizer step that nothing else explains (loop, clipping)
    gather_overlap: float  # share of compute that ZeRO-3's gathering and reducing hides behind
    reduce_overlap: float  # share of the backward pass that ZeRO 0 to 2's reducing hides behind
    # compute behind which a collective hides takes longer by this share of what is hidden.
    overlap_slowdown: float
    # host_link_efficiency, host_memory_efficiency: shares of the bandwidth of the link to host
    # memory and of host memory that are reached.
    host_link_efficiency: float
    host_memory_efficiency: float
    nvme_Bps: float  # bytes per second of a node's drives, for reading and writing
    context_bytes: float  # memory of a rank without a model: context, libraries, workspaces
    buffer_elements: float  # elements of DeepSpeed's reduction and gathering buckets
    memory_overhead: float  # share that fragmentation adds to activations
    # power that full-rate matrix arithmetic adds at the highest clock, as a share of the device's
    # `reference_W` (uncapped: it may exceed the limit).
    compute_W: float
    # memory_W, link_W: power that full use of memory and of the links adds, likewise.
    memory_W: float
    link_W: float
    # power that a device adds at the highest clock while it runs a program, likewise.
    awake_W: float
    # power that the spinning kernels of a collective or a pipeline's bubble add to that at the
    # highest clock, likewise.
    wait_W: float
    host_link_W: float  # power that moving data to host memory adds, likewise
    # power that a host optimizer adds to a node while it runs, watts per device.
    host_busy_W: float
    # watts that the shares are of; 0 takes the device's limit less its idle power.
    reference_W: float
    voltage_knee: float  # share of the highest clock up to which the voltage is flat
    lowest_voltage: float  # the flat voltage as a share of the highest
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


def _file(name: str) -> Traversable:
    return resources.files("tuner.models") / "data" / "constants" / f"{name}.toml"


def _read(name: str, path: Path | None = None) -> dict[str, Any]:
    data = read_toml(path or _file(name), f"constants {name!r}")
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
    if missing := [figure for figure in Constants.figures() if figure not in data]:
        raise InputError(f"constants {str(name)!r} lack {', '.join(missing)}")
    return Constants(**{**data, "sources": tuple(data.get("sources", ()))})


@lru_cache(maxsize=64)
def constants_of(device: Device) -> Constants:
    """Return the constants of a device: from its own file if it exists, else those of its type."""
    return load_constants(device.name if names_a_file(_file(device.name)) else device.type)


def origin_of(device: Device) -> str:
    """Return where a device's constants come from: published, scaled, guessed or estimated.

    Published are those that were set to published measurements of such devices; scaled those of all
    NVIDIA GPUs, shares of the figures of the data sheet; guessed the same on another vendor's GPUs.
    """
    if names_a_file(_file(device.name)):
        return "published"
    return {"cuda": "scaled", "cpu": "estimated"}.get(device.type, "guessed")


@dataclass(frozen=True)
class Setup:
    """Job on a cluster."""

    job: TrainingJob
    cluster: Cluster
    constants: Constants
    program: Program

    @cached_property
    def facts(self) -> ModelFacts:
        """Sizes of the job's model."""
        return facts_of(self.job)

    @cached_property
    def peak_flops(self) -> float:
        """Peak of the job's precision on one device, FLOP/s.

        PyTorch multiplies fp32 matrices without tensor cores unless the program allows TF32
        (torch.backends.cuda.matmul.allow_tf32 is False by default), and the training program does
        not. A CPU's stated peak is assumed to be that of the job's precision.
        """
        device = self.cluster.device
        if self.job.precision != "fp32" or not device.is_gpu:
            return device.peak_flops
        if self.program.tf32:
            return TF32_SHARE * device.peak_flops
        return device.fp32_flops or device.peak_flops / TENSOR_OVER_FP32

    @cached_property
    def element(self) -> float:
        """Bytes of an activation, a gradient or a communicated parameter."""
        return 4.0 if self.job.precision == "fp32" else 2.0

    @cached_property
    def widened(self) -> Setup:
        """Setup whose element is that of the values between the layers."""
        job = replace(self.job, program=self.program)
        if not widens(job):
            return self
        # No optimizer of pure bf16 is known in fp32, and none matters between the layers.
        plain = replace(self.job, precision="fp32", program=replace(self.program, pure_bf16=False))
        return replace(self, job=plain)

    @property
    def states(self) -> StateBytes:
        """Bytes of weights, gradients and optimizer states per trained parameter."""
        return self.program.state_bytes(self.job.precision)

    @property
    def updated_element(self) -> float:
        """Bytes of a weight that the optimizer updates, and of a gradient that FSDP2 reduces."""
        return 2.0 if self.program.pure_bf16 else 4.0

    @property
    def bandwidth_Bps(self) -> float:
        """Memory bandwidth that a stream reaches on one device, bytes per second."""
        return self.constants.memory_efficiency * self.cluster.device.memory_bandwidth_Bps

    @property
    def flops_per_s(self) -> float:
        """Rate that a large matrix product reaches on one device, FLOP/s."""
        return self.constants.matrix_efficiency * self.peak_flops

    @property
    def host_link_Bps(self) -> float:
        """Bandwidth reached to host memory, bytes per second, of 25 GB/s if none is stated."""
        return self.constants.host_link_efficiency * (self.cluster.host_link_Bps or 2.5e10)
