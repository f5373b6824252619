"""Step time, power and memory of any configuration, from first principles and data sheets.

A step is compute (which the SM clock scales), memory traffic, collectives over the links they
cross, the pipeline's bubble and offload traffic (none of which the clock scales). Power is an idle
share plus what each part of the step draws while it is busy. The figures are a prior, not a truth:
the surrogates fit its scale to measurements and learn the rest (`models.surrogate`). All candidates
are computed at once with NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from search_spaces.cluster import Cluster
from search_spaces.configuration import Configuration
from search_spaces.job import TrainingJob
from search_spaces.model_facts import ModelFacts, facts_of, flops_per_step, model_state_bytes

__all__ = ["AnalyticModel", "Prediction", "Prior"]

#: Best share of the peak that a large matrix product reaches, and the fixed time of one kernel:
#: x / (0.95 peak) + t0 follows Calculon's stepped curve (.95 at 128 GFLOP, .9 at 16, .6 at 1 on an
#: A100; systems/a100_80g.json). t0 on a CPU is the framework's dispatch of one operator.
MATRIX_EFFICIENCY = 0.95
KERNEL_S = {"cuda": 2e-6, "cpu": 3e-5}
#: Large products a layer (q, k, v, o, gate, up, down, and attention's two), each with about as many
#: small kernels; forward once, backward twice.
PRODUCTS_A_LAYER = 9
#: Share of the stated bandwidth that a stream reaches: HBM .9 for large transfers, NVLink .65,
#: network .9 (Calculon systems/*.json).
MEMORY_EFFICIENCY, LINK_EFFICIENCY, NETWORK_EFFICIENCY = 0.9, 0.65, 0.9
#: Bytes a parameter that one Adam step moves: fp32 weight, two moments and gradient read, three
#: written (4 x 4 + 3 x 4).
ADAM_BYTES = 28.0
#: Host memory bandwidth of one node, bytes per second, shared by its ranks' host optimizers. An
#: estimate between a two-socket DDR5 server (about 400 GB/s) and what CPU Adam reaches of it.
HOST_MEMORY_BPS = 2e11
#: Share of the backward pass that gradient traffic hides behind; gloo on a CPU hides none.
OVERLAP = {"cuda": 0.5, "cpu": 0.0}
#: Bytes a rank holds before any model: CUDA and NCCL contexts (Sailor, SOSP'25: 2 to 5 GB with
#: buffers); on a CPU the interpreter with torch.
CONTEXT_BYTES = {"cuda": 2.0e9, "cpu": 6e8}
#: DeepSpeed's default bucket, elements (reduce_bucket_size, allgather_bucket_size).
BUCKET_ELEMENTS = 5e8
#: Share of (max - idle) power that a device draws while it does nothing but this.
BUSY_POWER = {"compute": 0.9, "memory": 0.6, "link": 0.3, "wait": 0.1}
#: Voltage is flat below this share of the highest clock and rises linearly above it; the lowest
#: voltage is this share of the highest (Schoonhoven et al. 2022, "Going green", model form; Afzal
#: et al. 2026, arXiv 2607.00819, transition frequency). P = P_static + kappa V^2 f.
VOLTAGE_KNEE, LOWEST_VOLTAGE = 0.7, 0.75


@dataclass(frozen=True)
class Prediction:
    """What configurations are predicted to do; arrays of one figure a configuration.

    Attributes:
        step_time_s: seconds of one optimizer step.
        power_W: average power of the whole job, watts.
        memory_bytes: peak of the fullest rank's device, bytes.
    """

    step_time_s: np.ndarray
    power_W: np.ndarray
    memory_bytes: np.ndarray


@runtime_checkable
class Prior(Protocol):
    """Anything that predicts before a measurement: the surrogates' mean."""

    def predict(self, configurations: Sequence[Configuration]) -> Prediction: ...


def _integers(configurations: Sequence[Configuration], name: str) -> np.ndarray:
    return np.array([configuration.get(name) for configuration in configurations], dtype=float)


def _is(configurations: Sequence[Configuration], name: str, *values: str) -> np.ndarray:
    return np.array([configuration.get(name) in values for configuration in configurations])


def _live(configurations: Sequence[Configuration], name: str, default: float) -> np.ndarray:
    """A live knob; the mean over stages where there is one value a stage."""
    found = [configuration.get(name) for configuration in configurations]
    return np.array([default if v is None else np.mean(v) for v in found], dtype=float)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Step:
    """The parts of one step at the highest clock, seconds a device, before pipelining."""

    compute: np.ndarray
    memory: np.ndarray
    link: np.ndarray
    bubble: np.ndarray  # slots of a pipeline over useful slots, at least 1
    host: np.ndarray  # exposed offload


class AnalyticModel:
    """Predicts step time, power and memory of a job on a cluster.

    Args:
        job: what is trained.
        cluster: what it runs on.

    Raises:
        InputError: the job's model lacks a size (from `facts_of`).
    """

    def __init__(self, job: TrainingJob, cluster: Cluster) -> None:
        self.job, self.cluster = job, cluster
        self.facts: ModelFacts = facts_of(job)
        fp32 = job.precision == "fp32"
        self._element = 4.0 if fp32 else 2.0
        # TF32 runs at half the bf16 rate (156 of 312 TFLOP/s on A100, 494 of 989 on H100: NVIDIA
        # data sheets); a CPU's stated peak is taken for what its job uses.
        halved = fp32 and cluster.device.type == "cuda"
        self._peak_flops = cluster.device.peak_flops / (2.0 if halved else 1.0)

    def predict(self, configurations: Sequence[Configuration]) -> Prediction:
        """Step time, power and memory; arrays of shape (len(configurations),).

        Raises:
            InvalidValue: a degree is not an integer.
        """
        step = self._step(configurations)
        device = self.cluster.device
        top = float(max(device.clocks_MHz, default=device.default_clock_MHz or 1))
        clock = _live(configurations, "clock_MHz", float(device.default_clock_MHz or top)) / top
        limit = _live(configurations, "power_limit_W", device.max_W)
        # A device that would draw more than its limit lowers its own clock: bisect for it.
        low, high = np.full(len(clock), 0.1), clock.copy()
        for _ in range(12):
            middle = 0.5 * (low + high)
            above = self._device_power(step, middle) > limit
            high, low = np.where(above, middle, high), np.where(above, low, middle)
        clock = np.where(self._device_power(step, clock) > limit, low, clock)
        return Prediction(
            step_time_s=self._time(step, clock),
            power_W=self._job_power(configurations, self._device_power(step, clock)),
            memory_bytes=self.memory_bytes(configurations),
        )

    # -- time --------------------------------------------------------------------------------

    def _degrees(self, configurations: Sequence[Configuration]) -> dict[str, np.ndarray]:
        names = {
            "d": "data_parallel",
            "t": "tensor_parallel",
            "p": "pipeline_parallel",
            "u": "sequence_parallel",
            "e": "expert_parallel",
            "b": "micro_batch",
            "z": "zero_stage",
        }
        degrees = {short: _integers(configurations, name) for short, name in names.items()}
        degrees["m"] = np.maximum(1.0, self.job.global_batch / (degrees["b"] * degrees["d"]))
        return degrees

    def _bandwidth(self, span: np.ndarray) -> np.ndarray:
        """Bytes per second a device over a group that spans so many consecutive devices."""
        cluster = self.cluster
        # A machine that states no link (a CPU) talks through its own memory: write and read.
        link = LINK_EFFICIENCY * (cluster.link_Bps or cluster.device.memory_bandwidth_Bps / 2)
        network = NETWORK_EFFICIENCY * (cluster.network_Bps or link)
        return np.where(span > cluster.devices_per_node, network, link)

    def _step(self, configurations: Sequence[Configuration]) -> _Step:
        job, facts, device = self.job, self.facts, self.cluster.device
        g = self._degrees(configurations)
        d, t, p, u, b, z, m = (g[name] for name in "dtpubzm")
        checkpointed = _is(configurations, "activation_checkpointing", "full")
        ranks = d * t * p * u
        layers = facts.layers / p
        passes = np.where(checkpointed, 4.0, 3.0)  # forward 1, backward 2, recomputation 1 more

        # Compute: FLOPs at the matrix rate, plus a fixed time a kernel, each micro-batch.
        flops = flops_per_step(job) * passes / 3.0 / ranks
        kernels = m * passes * layers * 2 * PRODUCTS_A_LAYER
        compute = flops / (MATRIX_EFFICIENCY * self._peak_flops) + kernels * KERNEL_S[device.type]

        # Memory: weights each pass of each micro-batch, activations once written and once read a
        # pass (34 bytes a token and hidden unit in 16 bits: Korthikanti et al. 2022, arXiv
        # 2205.05198), Adam's states once a step.
        parameters = facts.parameters / (t * p)
        active = facts.active_parameters / (t * p)
        tokens = b * job.sequence_length / u
        token_layer = tokens * facts.hidden * self._element
        bandwidth = MEMORY_EFFICIENCY * device.memory_bandwidth_Bps
        replicas = d * u
        adam = ADAM_BYTES * parameters / np.where(z >= 1, replicas, 1.0)
        on_host = _is(configurations, "optimizer_offload", "cpu", "async")
        traffic = m * passes * (active * self._element + 2 * 17 * token_layer * layers / t)
        memory = (traffic + np.where(on_host, 0.0, adam)) / bandwidth

        # Collectives. Data parallelism and ZeRO, elements a step: 2 Psi for stages 0 and 1,
        # (m + 1) Psi for stage 2, which reduces every micro-batch, 3 m Psi for stage 3, which
        # gathers the parameters twice as well (DeepSpeed engine.py: no_sync is refused
        # for stages 2 and 3).
        volume = np.select([z <= 1, z == 2], [np.full_like(m, 2.0), m + 1], 3 * m)
        bytes_d = volume * parameters * self._element * (replicas - 1) / replicas
        link_d = bytes_d / self._bandwidth(replicas * t)
        hidden = OVERLAP[device.type] * compute * 2 / passes
        link = np.maximum(0.0, link_d - hidden)
        # Tensor parallelism: two all-reduces a layer forward, two backward, two more to recompute
        # (Megatron-LM, arXiv 1909.08053); 2 (t-1)/t of the message each.
        reduces = np.where(checkpointed, 6.0, 4.0)
        link = link + m * layers * reduces * 2 * (t - 1) / t * token_layer / self._bandwidth(t)
        # Ulysses: all-to-all of q, k, v and o a layer and pass (arXiv 2309.14509).
        turns = np.where(checkpointed, 3.0, 2.0)
        link = link + m * layers * turns * 4 * (u - 1) / u * token_layer / t / self._bandwidth(
            u * t
        )
        # Experts: tokens out and back a layer and pass, to each expert that they visit.
        e = g["e"]
        link = link + m * layers * turns * 2 * max(facts.experts_per_token, 1) * (
            e - 1
        ) / e * token_layer / self._bandwidth(e)
        # Pipeline: one activation and one gradient a boundary and micro-batch.
        crossing = np.where(p > 1, 2.0 * m * token_layer / t, 0.0)
        link = link + crossing / self._bandwidth(ranks)

        return _Step(
            compute=compute,
            memory=memory,
            link=link,
            bubble=(m + p - 1) / m,  # 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)
            host=self._host(configurations, g, compute, token_layer * layers / t),
        )

    def _host(
        self,
        configurations: Sequence[Configuration],
        g: dict[str, np.ndarray],
        compute: np.ndarray,
        layer_bytes: np.ndarray,
    ) -> np.ndarray:
        """Seconds a step that offload adds: gradients down, Adam on the host, parameters up."""
        cluster = self.cluster
        if cluster.device.type == "cpu":  # device and host are one memory
            return np.zeros(len(compute))
        link = 0.9 * (cluster.host_link_Bps or 2.5e10)
        share = self.facts.parameters / (g["t"] * g["p"])
        share = share / np.where(g["z"] >= 1, g["d"] * g["u"], 1.0)
        ranks = np.minimum(g["d"] * g["t"] * g["p"] * g["u"], cluster.devices_per_node)
        transfer = 2 * share * self._element / link
        adam = ADAM_BYTES * share * ranks / HOST_MEMORY_BPS
        synchronous = _is(configurations, "optimizer_offload", "cpu")
        asynchronous = _is(configurations, "optimizer_offload", "async")
        # Asynchronously (SuperOffload) all but the last bucket hides behind the backward pass.
        behind = np.maximum(0.0, transfer + adam - compute * 2 / 3) + 0.1 * transfer
        host = np.where(synchronous, transfer + adam, np.where(asynchronous, behind, 0.0))
        kept = np.where(_is(configurations, "activation_checkpointing", "full"), 2.0, 34.0) / 2
        moved = 2 * g["m"] * kept * layer_bytes / link
        now = _is(configurations, "activation_offload", "sync")
        later = _is(configurations, "activation_offload", "async")
        return host + np.where(now, moved, np.where(later, np.maximum(0.0, moved - compute), 0.0))

    @staticmethod
    def _time(step: _Step, clock: np.ndarray) -> np.ndarray:
        """T(f) = T_m + T_c f_max / f; `clock` is f / f_max."""
        return (step.compute / clock + step.memory + step.link) * step.bubble + step.host

    # -- power -------------------------------------------------------------------------------

    def _device_power(self, step: _Step, clock: np.ndarray) -> np.ndarray:
        """Average watts of one busy device: idle, plus each part's draw by its share of time."""
        device = self.cluster.device
        total = self._time(step, clock)
        rise = np.clip((clock - VOLTAGE_KNEE) / (1 - VOLTAGE_KNEE), 0.0, None)
        voltage = LOWEST_VOLTAGE + (1 - LOWEST_VOLTAGE) * rise
        shares = {
            "compute": step.compute / clock / total,
            "memory": step.memory / total,
            "link": step.link / total,
        }
        busy = sum(shares.values())
        draw = (
            BUSY_POWER["compute"] * shares["compute"] * voltage**2 * clock
            + BUSY_POWER["memory"] * shares["memory"]
            + BUSY_POWER["link"] * shares["link"]
            + BUSY_POWER["wait"] * (1 - busy)
        )
        return np.asarray(device.idle_W + (device.max_W - device.idle_W) * draw)

    def _job_power(self, configurations: Sequence[Configuration], each: np.ndarray) -> np.ndarray:
        """Watts of the job: its devices, and whole nodes where the node is what is metered."""
        cluster = self.cluster
        ranks = np.array([configuration.world_size for configuration in configurations])
        nodes = np.ceil(ranks / cluster.devices_per_node)
        power = ranks * each + nodes * cluster.host_W
        if cluster.device.type == "cpu":  # a CPU's counter is the whole package's
            power = power + (nodes * cluster.devices_per_node - ranks) * cluster.device.idle_W
        return np.asarray(power)

    # -- memory ------------------------------------------------------------------------------

    def memory_bytes(self, configurations: Sequence[Configuration]) -> np.ndarray:
        """Peak bytes on the device of the fullest rank: states, activations, logits, buffers."""
        job, facts = self.job, self.facts
        g = self._degrees(configurations)
        d, t, p, u, b, z, m = (g[name] for name in "dtpubzm")
        replicas = d * u
        parameters = facts.parameters / (t * p)
        states = np.select(
            [z == stage for stage in range(4)],
            [model_state_bytes(parameters, stage, replicas, job.precision) for stage in range(4)],
        )
        # What offload takes away: fp32 weights and moments (12 bytes a parameter; 8 in fp32).
        moments = (8.0 if job.precision == "fp32" else 12.0) * parameters
        off = _is(configurations, "optimizer_offload", "cpu", "async")
        states = states - np.where(off, moments / np.where(z >= 1, replicas, 1.0), 0.0)

        # Activations a layer: s b h (34 + 5 a s / h) bytes in 16 bits (Korthikanti et al. 2022),
        # without the 5 a s / h where attention is fused; 2 s b h where all are recomputed, plus
        # one live layer. 1F1B keeps min(m, p) micro-batches on the first stage.
        token_hidden = b * job.sequence_length / u * facts.hidden * self._element / 2
        checkpointed = _is(configurations, "activation_checkpointing", "full")
        each = np.where(checkpointed, 2.0, 34.0 / t) * token_hidden
        moved = _is(configurations, "activation_offload", "sync", "async")
        kept = np.where(moved, 2.0, facts.layers / p * np.minimum(m, p)) * each
        live = 34.0 / t * token_hidden
        # Logits and their gradient in fp32, and the 16-bit copy: 10 bytes a token and entry.
        logits = 10.0 * b * job.sequence_length / u * facts.vocab / t
        bucket = np.minimum(BUCKET_ELEMENTS, parameters) * self._element
        gathered = np.where(z == 3, np.minimum(facts.largest_layer * 2.0, parameters), 0.0)
        buffers = np.where(z >= 1, 2 * bucket, bucket) + gathered * self._element
        context = CONTEXT_BYTES[self.cluster.device.type]
        return np.asarray(states + kept + live + logits + buffers + context)
