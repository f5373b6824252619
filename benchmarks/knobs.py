"""The knobs on offer: those that run on a CPU, and those that need CUDA.

Each value of each launch knob is set in a real probe of two ranks (groups of HSDP: of four), and
loss and gradient norm of the first five steps are compared with plain data parallelism from the
same seed: a knob must not change what is trained. Values that need CUDA, or something that this
machine lacks, are listed with the reason and with the tests of their code. With `--all`, every
configuration that the space `cpu-all` offers at two ranks is run (about three seconds each).
"""

from __future__ import annotations

import re
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, arguments, publish
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.search_spaces.rules import broken_rules, unrunnable
from tuner.search_spaces.space import load_space
from tuner.workload.node.machine import detect_cluster
from tuner.workload.node.ops import cannot_build
from tuner.workload.node.runner import LocalRunner
from tuner.workload.probe import ProbeRequest, WindowPolicy

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

#: How the code of a value is tested where the value itself cannot be run.
_TESTED: dict[tuple[str, Value], str] = {
    ("optimizer_offload", "async"): "its settings are read by DeepSpeed's own schema",
    ("optimizer_offload", "nvme"): "its settings are read by DeepSpeed's own schema",
    ("parameter_offload", "nvme"): "its settings are read by DeepSpeed's own schema",
    ("activation_offload", "sync"): "it trains the same on a CPU with the rule set aside",
    ("activation_offload", "async"): "a fake plays the streams and events",
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

    def differs(self, other: Told) -> tuple[float, float]:
        """The greatest difference in loss, and in norm as a share of it (0 where one has none)."""
        losses = max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))
        norms = (abs(a / b - 1) for a, b in zip(self.norms, other.norms, strict=False))
        return losses, max(norms, default=0.0)


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
        self._runner.turn_to(job)  # the server imports the frameworks once, for all jobs
        name, self._count = f"probe{self._count}", self._count + 1
        # Whole steps: what few micro-batches train on is not what the reference does.
        window = replace(QUICK, micro_batches=False)
        record = self._runner.run(ProbeRequest(name, configuration.launch, window=window))
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


def main() -> None:
    parser = arguments("every knob: offered, run on a CPU, or CUDA only")
    parser.add_argument("--all", action="store_true", help="run all that cpu-all offers, too")
    options = parser.parse_args()
    # Ranks may share a core.
    cluster = replace(detect_cluster(), devices_per_node=4, nodes=1)
    cuda = replace(load_cluster("h100-32"), nvme_path="/nvme")
    counts = {"run": 0, "cuda": 0, "elsewhere": 0}
    worst_loss = worst_norm = 0.0
    failed = tried = 0
    with tempfile.TemporaryDirectory() as folder:
        cluster = replace(cluster, nvme_path=folder)
        trainer = Trainer(Path(folder), cluster)
        print(f"{'knob':26} {'value':16} {'offered':8} CPU ranks", flush=True)
        for name, value in values():
            sparse = name == "expert_parallel"
            job = small_sparse_job() if sparse else small_dense_job()
            if value == "every_8":
                job = replace(job, name="deep", model={**job.model, "num_hidden_layers": 8})
            asked = configuration_with(name, value)
            refused = [*broken_rules(asked, job, cluster), *unrunnable(asked, job)]
            offered = not broken_rules(asked, job, cuda) and not unrunnable(asked, job)
            lacks = cannot_build("async_io") if value == "nvme" else ""
            tested = f" (tested: {_TESTED[name, value]})" if (name, value) in _TESTED else ""
            if refused:
                counts["cuda"] += offered
                result = f"CUDA only: {refused[0]}{tested}"
            elif lacks:
                counts["elsewhere"] += 1
                result = f"not on this machine: {lacks}{tested}"
            else:
                expected, began = trainer.reference(job), time.monotonic()
                loss, norm = trainer.train(job, asked).differs(expected)
                worst_loss, worst_norm = max(worst_loss, loss), max(worst_norm, norm)
                counts["run"] += 1
                took_s = time.monotonic() - began
                result = f"run in {took_s:.1f} s; loss differs by {loss:.0e}, norm by {norm:.0e}"
            print(f"{name:26} {value!s:16} {'yes' if offered else 'no':8} {result}", flush=True)
        if options.all:
            job = small_dense_job()
            two = replace(cluster, devices_per_node=2)
            for asked in load_space("cpu-all").candidates(job, two):
                tried += 1
                try:
                    loss, norm = trainer.train(job, asked).differs(trainer.reference(job))
                except (RuntimeError, ValueError) as error:
                    failed += 1
                    print(f"failed: {error}", flush=True)
                    continue
                worst_loss, worst_norm = max(worst_loss, loss), max(worst_norm, norm)
            print(f"{tried} configurations of cpu-all run, {failed} failed", flush=True)
        trainer.close()
    figures = [
        Figure("knob_values_run_on_cpu", counts["run"], "count"),
        Figure("knob_values_cuda_only", counts["cuda"], "count"),
        Figure("knob_values_not_on_this_machine", counts["elsewhere"], "count"),
        Figure("worst_loss_difference", worst_loss, "nats"),
        Figure("worst_gradient_norm_difference", worst_norm, "ratio"),
    ]
    if options.all:
        figures += [
            Figure("configurations_run", tried, "count"),
            Figure("configurations_failed", failed, "count"),
        ]
    publish(figures, options.json)


if __name__ == "__main__":
    main()
