"""Trainings of a few steps under one fork server, each compared with plain data parallelism."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import ProbeRequest, WindowPolicy

#: Long enough for five steps to be logged.
QUICK = WindowPolicy(min_s=0.1, min_steps=5, max_s=0.5)
STEP = re.compile(r"^step ([0-4]) loss ([\d.]+)(?: gradient norm ([\d.]+))?", re.M)
REFERENCE: dict[str, Any] = {"data_parallel": 2, "micro_batch": 2, "zero_stage": 1}

#: What a value of a knob needs beside itself.
_WITH: dict[tuple[str, Value], dict[str, Any]] = {
    ("sequence_method", "all_gather"): {"sequence_parallel": 2},
    ("pipeline_schedule", "interleaved"): {"pipeline_parallel": 2, "virtual_stages": 2},
    ("pipeline_schedule", "zero_bubble"): {"pipeline_parallel": 2},
    ("virtual_stages", 2): {"pipeline_parallel": 2, "pipeline_schedule": "zero_bubble"},
    ("expert_parallel", 2): {"data_parallel": 2},
    ("sharding", "fsdp2"): {"data_parallel": 2},
    ("sharding", "fsdp2_no_reshard"): {"data_parallel": 2},
    ("hsdp_replicas", 2): {"data_parallel": 4, "micro_batch": 1, "sharding": "fsdp2"},
    ("optimizer_offload", "cpu"): {"data_parallel": 2, "zero_stage": 2},
    ("optimizer_offload", "async"): {"data_parallel": 2, "zero_stage": 3},
    ("optimizer_offload", "nvme"): {"data_parallel": 2, "zero_stage": 3},
    ("parameter_offload", "cpu"): {"data_parallel": 2, "zero_stage": 3},
    ("parameter_offload", "nvme"): {"data_parallel": 2, "zero_stage": 3},
}


@dataclass(frozen=True)
class Told:
    """What rank 0 logged of its first five steps.

    Attributes:
        losses: five mean losses.
        norms: five gradient norms; empty where DeepSpeed keeps none (fp32 at ZeRO 0).
    """

    losses: list[float]
    norms: list[float]

    @classmethod
    def of(cls, log: Path) -> Told:
        """Read rank 0's log.

        Raises:
            ValueError: it does not tell of five steps.
        """
        steps = STEP.findall(log.read_text())
        if len(steps) != 5:
            raise ValueError(f"{log} tells of {len(steps)} of the first five steps")
        return cls([float(loss) for _, loss, _ in steps], [float(n) for _, _, n in steps if n])


def small_dense_job() -> TrainingJob:
    """The default job, reduced to what two shared cores train in a few seconds."""
    job = load_job("tiny-gpt")
    model = {**job.model, "hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 1024}
    return replace(job, sequence_length=64, model=model)


def small_sparse_job() -> TrainingJob:
    """OLMoE's twin, with weights wide enough for the gradient to be clipped, as the dense one's."""
    job = load_job("tiny-olmoe")
    return replace(job, model={**job.model, "initializer_range": 0.1})


class Trainer:
    """Trains jobs for a few steps under one fork server; each job's reference once."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self._folder, self._cluster = folder, cluster
        self._references: dict[str, Told] = {}
        self._count = 0
        self._runner = LocalRunner(small_dense_job(), cluster, run_dir=folder)

    def train(self, job: TrainingJob, configuration: Configuration) -> Told:
        """Train for a few steps.

        Raises:
            RuntimeError: the probe failed; the message says why.
        """
        self._runner.set_job(job)  # the server imports the frameworks once, for all jobs
        name, self._count = f"probe{self._count}", self._count + 1
        record = self._runner.run(ProbeRequest(name, configuration.launch, window=QUICK))
        if record.failure is not None:
            raise RuntimeError(f"{configuration.key}: {record.failure.message}")
        return Told.of(self._folder / "probes" / name / "rank0.log")

    def reference(self, job: TrainingJob) -> Told:
        """Plain data parallelism over two ranks at ZeRO 1."""
        if job.name not in self._references:
            self._references[job.name] = self.train(job, Configuration.of(REFERENCE))
        return self._references[job.name]

    def close(self) -> None:
        self._runner.close()


def values() -> list[tuple[str, Value]]:
    """Every launch knob's values but the default: 2 for numbers, which is what two ranks can do.

    The global batch is none of them: another one trains another job.
    """
    found: list[tuple[str, Value]] = []
    for knob in KNOBS.values():
        if knob.kind == "launch" and knob.default is not None:
            choices = knob.choices or (2,)
            found += [(knob.name, value) for value in choices if value != knob.default]
    return found


def configuration_with(name: str, value: Value) -> Configuration:
    knobs: dict[str, Any] = {"micro_batch": 2, **_WITH.get((name, value), {}), name: value}
    if name in ("micro_batch", "zero_stage", "compilation") or name.startswith("activation"):
        knobs["data_parallel"] = 2
    return Configuration.of(knobs)
