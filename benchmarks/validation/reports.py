"""Reports of trainings on one GPU, which ran or ran out, and what `tuner fit` says of each.

The table and its sources are in `benchmarks/data/single_gpu_reports.csv` and `.md`. Nothing of it
was used to fit the formulas. Those of fms-acceleration were collected after the formulas and the
programs' properties had been chosen (held out); the others were seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure
from benchmarks.validation.comparison import DATA, median_and_worst, models, rows_of, table
from tuner.models.analytic.model import AnalyticModel
from tuner.models.memory_margin import ALONE_BIAS, MemoryMargin
from tuner.planner.fit import LIKELY, SURE
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import LoRA, Program, TrainingJob

TABLE = DATA / "single_gpu_reports.csv"
#: What each source's program does that no column says: LitGPT's bf16-true keeps weights, gradients
#: and moments in bf16, and makes the loss in chunks.
PROGRAMS = {
    "litgpt": Program(pure_bf16=True, fused_loss=True, dropout="none"),
    "axolotl": Program(optimizer="adamw_8bit", dropout="none"),
    "stanford_alpaca": Program(dropout="none"),
    "fms": Program(dropout="none"),
}
#: Sources whose rows no formula and no property of a program was chosen on.
HELD_OUT = ("fms",)


@dataclass(frozen=True)
class Report:
    """One row of the table, with the probability of fitting that `tuner fit` states."""

    row: dict[str, str]
    probability: float
    predicted_bytes: float
    apart_bytes: float  # without the context, which no allocator counts

    @property
    def name(self) -> str:
        r = self.row
        size = f"{r['sequence_length']} x {r['micro_batch']}"
        return f"{r['source']}: {r['method']} of {r['model']}, {size}, on {r['device']}"

    @property
    def told(self) -> str:
        """What was said: right, wrong or not sure."""
        ran = self.row["outcome"] == "ran"
        if 1 - SURE < self.probability < SURE:
            return "not sure"
        return "right" if (self.probability >= SURE) == ran else "WRONG"

    @property
    def likelier_is_right(self) -> bool:
        """True if what is likelier by the stated probability is what happened."""
        return (self.probability >= LIKELY) == (self.row["outcome"] == "ran")

    @property
    def error(self) -> float | None:
        """Error of the predicted peak, without the context; None if none was measured."""
        stated = self.row["peak_GB"]
        return self.apart_bytes / (float(stated) * 1e9) - 1 if stated else None


def _lora(row: dict[str, str]) -> LoRA | None:
    if row["method"] == "full":
        return None
    return LoRA(int(row["rank"]), row["targets"], "nf4" if row["method"] == "qlora" else "none")


def memory_alone(
    row: Mapping[str, str],
    model: Mapping[str, Any],
    lora: LoRA | None,
    program: Program,
    cluster: Cluster,
) -> Mapping[str, float]:
    """Return the predicted bytes of the parts of a training on one GPU."""
    batch = int(row["micro_batch"])
    job = TrainingJob(
        row["model"],
        model,
        sequence_length=int(row["sequence_length"]),
        global_batch=batch,
        steps=1,
        lora=lora,
        program=program,
    )
    configuration = Configuration.of(
        data_parallel=1, micro_batch=batch, activation_checkpointing=row["checkpointing"]
    )
    return AnalyticModel(job, cluster).breakdown(configuration).memory


def judged(row: dict[str, str]) -> Report:
    """Return what `tuner fit` says of a report."""
    program, model = PROGRAMS[row["source"]], models()[row["model"]]
    if row["source"] == "fms":  # full fine-tuning was in 16 bits throughout
        program = replace(program, pure_bf16=row["method"] == "full")
    if row["source"] == "litgpt":
        # Its conversion copies the table of tokens into the head (convert_hf_checkpoint.py), and it
        # caps Gemma 2's scores outside of any fused kernel (litgpt/model.py).
        model = {**model, "tie_word_embeddings": False}
        program = replace(program, fused_attention=row["model"] != "gemma-2-9b")
    cluster = load_cluster(f"1x{row['device']}")
    parts = memory_alone(row, model, _lora(row), program, cluster)
    peak = sum(parts.values())
    margin = MemoryMargin(cluster.device.memory_bytes, bias=ALONE_BIAS)
    probability = float(margin.probability_of_fitting([peak])[0])
    return Report(row, probability, peak, peak - parts["context"])


def read_reports(path: Path = TABLE) -> list[Report]:
    return [judged(row) for row in rows_of(path)]


def compare() -> tuple[list[str], list[Figure]]:
    """Return the reports as lines, and how many were told right and wrong."""
    reports = read_reports()
    rows = [
        (
            report.name,
            f"{report.predicted_bytes / 1e9:.1f}",
            f"{report.probability:.2f}",
            report.row["outcome"],
            "" if report.error is None else f"{100 * report.error:+.0f} %",
            report.told,
        )
        for report in reports
    ]
    heads = ("report", "predicted GB", "probability", "what happened", "peak off", "told")
    told = [report.told for report in reports]
    held = [report.told for report in reports if report.row["source"] in HELD_OUT]
    errors = [report.error for report in reports if report.error is not None]
    return table(heads, rows), [
        Figure("fit_reports", len(told), "count"),
        Figure("fits_told_right", told.count("right"), "count"),
        Figure("fits_told_right_of_20", 20 * told.count("right") / len(told), "count"),
        Figure("fit_reports_held_out", len(held), "count"),
        Figure("fits_told_right_held_out", held.count("right"), "count"),
        Figure("told_not_sure", told.count("not sure"), "count"),
        Figure("told_wrong", told.count("WRONG"), "count"),
        Figure("likelier_right", sum(report.likelier_is_right for report in reports), "count"),
        *median_and_worst("reports_error_*", errors),
    ]
