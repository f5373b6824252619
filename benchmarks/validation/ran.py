"""Published runs that ran or ran out of memory, and what the models say of each.

Nothing here was used to fit the models: it is all held out. The table and its sources are in
`benchmarks/data/published_runs.csv` and `.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.validation.comparison import DATA, models, rows_of
from tuner.models.analytic.model import AnalyticModel, Program
from tuner.models.memory_margin import MemoryMargin
from tuner.models.prior import Prediction
from tuner.planner.fit import LIKELY, SURE
from tuner.search_spaces.cluster import Cluster, Device, load_cluster, load_device
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import LoRA, TrainingJob

TABLE = DATA / "published_runs.csv"

#: Sailor's Megatron-DeepSpeed (third_party/Megatron-DeepSpeed of its repository). Its launch
#: scripts ask for neither fp16 nor bf16, so it trains in fp32, with TF32 products in NVIDIA's
#: container. Its attention stores the scores and drops none, and OPT drops no values at all.
#: DeepSpeed keeps another copy of the parameters (simulations/runtime_simulator.py).
SAILOR = Program(
    fused_attention=False, tf32=True, dropout="none", copies=1, vocabulary_parallel_loss=True
)

#: As scripts/finetune_guanaco_65b.sh of QLoRA's repository.
QLORA = LoRA(64, "all-linear", "nf4-double")


@dataclass(frozen=True)
class Ran:
    """One published run.

    Attributes:
        row: the row of the table.
    """

    row: dict[str, str]

    @property
    def name(self) -> str:
        r = self.row
        return f"{r['source']}: {r['model']} {r['configuration']} on {r['gpus']} {r['device']}"

    @property
    def ran(self) -> bool:
        """True if it ran, False if it ran out of memory."""
        return self.row["outcome"] == "ran"

    @property
    def peak_bytes(self) -> int | None:
        """Measured peak; None if none is stated or it is distrusted."""
        stated = self.row["peak_bytes"]
        return int(stated) if stated and "distrusted" not in self.row["note"] else None

    @property
    def configuration(self) -> Configuration:
        return Configuration.parse(self.row["configuration"])

    @property
    def cluster(self) -> Cluster:
        """The machine, with the host memory of a DGX of its time."""
        r = self.row
        node = int(r["devices_per_node"])
        return replace(
            load_cluster("a100-8" if r["source"] != "sailor" else "gh200-32"),
            name=r["device"],
            device=_device(r["device"]),
            devices_per_node=node,
            nodes=-(-int(r["gpus"]) // node),
            host_memory_bytes=1_500_000_000_000,
        )

    @property
    def job(self) -> TrainingJob:
        """The job; only what decides memory is stated."""
        r = self.row
        return TrainingJob(
            name=r["model"],
            model=models()[r["model"]],
            sequence_length=int(r["sequence_length"]),
            global_batch=int(r["global_batch"]),
            steps=1,
            precision="fp32" if r["source"] == "sailor" else "bf16",
            lora=QLORA if r["source"] == "qlora" else None,
        )

    @property
    def program(self) -> Program:
        """What the training program does that no knob states."""
        if self.row["source"] == "sailor":
            # GPTNeoModelPipe drops values after attention and MLP, and ends with a norm.
            return replace(SAILOR, dropout="hidden", logits=False)
        if self.row["source"] == "qlora":
            # qlora.py casts adapters to bf16, and its optimizer is paged_adamw_32bit.
            # With --bf16 it casts embeddings and head back to bf16.
            return Program(
                fused_attention=False,
                pure_bf16=True,
                optimizer="adamw_32bit",
                frozen_16bit=True,
            )
        return Program(fused_attention=self.row["attention"] == "fused")

    @property
    def step_time_s(self) -> float | None:
        """Measured time of a step; None if none is stated."""
        stated = self.row["step_time_s"]
        return float(stated) if stated else None

    def predicted_bytes(self) -> float:
        """Return the peak that the models predict."""
        return float(self._predicted().memory_bytes[0])

    def predicted_s(self) -> float:
        """Return the time of a step that the models predict."""
        return float(self._predicted().step_time_s[0])

    def _predicted(self) -> Prediction:
        blocks = [int(part) for part in self.row["blocks"].split("-") if part]
        model = AnalyticModel(
            self.job,
            self.cluster,
            program=self.program,
            partitions={len(blocks): blocks} if blocks else None,
        )
        return model.predict([self.configuration])

    def probability(self, predicted_bytes: float) -> float:
        """Return the probability of fitting that `tuner fit` would state."""
        margin = MemoryMargin(self.cluster.device.memory_bytes)
        return float(margin.probability_of_fitting([predicted_bytes])[0])


def _device(name: str) -> Device:
    if name != "V100-32GB":
        return load_device(name)
    return replace(load_device("V100-SXM2-16GB"), name=name, memory_bytes=2**35)


def read_runs(path: Path = TABLE) -> list[Ran]:
    return [Ran(row) for row in rows_of(path)]


def verdict(probability: float) -> str:
    """Return what `tuner fit` says at this probability."""
    if probability >= SURE:
        return "fits"
    if probability >= LIKELY:
        return "probably fits"
    return "may not fit" if probability > 1 - SURE else "does not fit"
