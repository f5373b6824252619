"""Peak memory of QLoRA, compared with measured runs on an RTX 4080.

Eleven runs of Qwen2.5 models with PEFT, transformers and bitsandbytes (`benchmarks/data/qlora.md`).
That embeddings, norms and head are fp32 follows from PEFT's source; the further copy of the logits
was chosen on nine of these rows, so they are seen. The run without checkpointing and that without
quantization chose nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.figures import Figure
from benchmarks.validation.comparison import DATA, median_and_worst, models, rows_of, table
from benchmarks.validation.reports import memory_alone
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.job import LoRA, Program

PROGRAM = Program(optimizer="adamw_8bit", dropout="none")


@dataclass(frozen=True)
class Run:
    row: dict[str, str]

    @property
    def name(self) -> str:
        """Model and what differs between its runs."""
        r = self.row
        each = f"{r['model']}, {r['quantization']}, {r['sequence_length']} x {r['micro_batch']}"
        return f"{each}, checkpointing {r['checkpointing']}"

    @property
    def measured_GiB(self) -> float:
        """Largest number of allocated bytes, without the context."""
        return float(self.row["peak_GiB"])

    def predicted_GiB(self, program: Program = PROGRAM) -> float:
        """Return the peak that the models predict, without the context."""
        lora = LoRA(16, quantization=self.row["quantization"])
        cluster = replace(load_cluster("a100-8"), devices_per_node=1)
        parts = memory_alone(self.row, models()[self.row["model"]], lora, program, cluster)
        return (sum(parts.values()) - parts["context"]) / 2**30


def read_runs() -> list[Run]:
    return [Run(row) for row in rows_of(DATA / "qlora_runs.csv")]


def compare() -> tuple[list[str], list[Figure]]:
    runs = read_runs()
    errors = [run.predicted_GiB() / run.measured_GiB - 1 for run in runs]
    rows = [
        (run.name, f"{run.measured_GiB:.2f}", f"{run.predicted_GiB():.2f}", f"{100 * error:+.1f} %")
        for run, error in zip(runs, errors, strict=True)
    ]
    heads = ("run", "measured GiB", "predicted", "error")
    return table(heads, rows), median_and_worst("qlora_memory_*", errors)
