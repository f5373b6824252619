"""Reports of trainings on one GPU, which ran or ran out, and what `tuner fit` says of each.

The table and its sources are in `benchmarks/data/single_gpu_reports.csv` and `.md`. Nothing of it
was used to fit the formulas. Those of fms-acceleration were collected after the formulas and the
programs' properties had been chosen (held out); the others were seen.
"""

from __future__ import annotations

import csv
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure
from benchmarks.validation.comparison import table
from tuner.models.analytic.model import AnalyticModel
from tuner.models.memory_margin import ALONE_BIAS, MemoryMargin
from tuner.planner.fit import LIKELY, SURE
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import LoRA, Program, TrainingJob

DATA = Path(__file__).resolve().parents[1] / "data" / "single_gpu_reports.csv"


def _model(
    model_type: str, hidden: int, layers: int, heads: int, between: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": between,
        "vocab_size": vocab,
        **more,
    }


_GEMMA = {"vocab": 256_000, "head_dim": 256, "tie_word_embeddings": True}
#: Models of the table, by the sizes of their public configurations.
MODELS: dict[str, dict[str, Any]] = {
    "falcon-7b": {
        **{"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32},
        **{"num_attention_heads": 71, "vocab_size": 65024, "multi_query": True},
        **{"parallel_attn": True, "bias": False, "alibi": False},
    },
    "llama-2-70b": _model("llama", 8192, 80, 64, 28672, 32_000, num_key_value_heads=8),
    "powerlm-3b": _model("granite", 2304, 40, 36, 9216, 49_152, tie_word_embeddings=True),
    "gemma-2b": _model("gemma", 2048, 18, 8, 16384, num_key_value_heads=1, **_GEMMA),
    "gemma-7b": _model("gemma", 3072, 28, 16, 24576, num_key_value_heads=16, **_GEMMA),
    "gemma-2-9b": _model("gemma2", 3584, 42, 16, 14336, num_key_value_heads=8, **_GEMMA),
    "llama-2-7b": _model("llama", 4096, 32, 32, 11008, 32_000),
    "llama-3-8b": _model("llama", 4096, 32, 32, 14336, 128_256, num_key_value_heads=8),
    "mistral-7b": _model("mistral", 4096, 32, 32, 14336, 32_000, num_key_value_heads=8),
    "phi-2": _model("phi", 2560, 32, 32, 10240, 51_200),
    "phi-3": _model("phi3", 3072, 32, 32, 8192, 32_064, pad_token_id=0),
    "tiny-llama": _model("llama", 2048, 22, 32, 5632, 32_000, num_key_value_heads=4),
}
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
        """Description for tables."""
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


def judged(row: dict[str, str]) -> Report:
    """Return what `tuner fit` says of a report."""
    batch = int(row["micro_batch"])
    program, model = PROGRAMS[row["source"]], MODELS[row["model"]]
    if row["source"] == "fms":  # full fine-tuning was in 16 bits throughout
        program = replace(program, pure_bf16=row["method"] == "full")
    if row["source"] == "litgpt":
        # Its conversion copies the table of tokens into the head (convert_hf_checkpoint.py), and it
        # caps Gemma 2's scores outside of any fused kernel (litgpt/model.py).
        model = {**model, "tie_word_embeddings": False}
        program = replace(program, fused_attention=row["model"] != "gemma-2-9b")
    job = TrainingJob(
        row["model"],
        model,
        sequence_length=int(row["sequence_length"]),
        global_batch=batch,
        steps=1,
        lora=_lora(row),
        program=program,
    )
    configuration = Configuration.of(
        data_parallel=1, micro_batch=batch, activation_checkpointing=row["checkpointing"]
    )
    cluster = load_cluster(f"1x{row['device']}")
    parts = AnalyticModel(job, cluster).breakdown(configuration).memory
    peak = sum(parts.values())
    margin = MemoryMargin(cluster.device.memory_bytes, bias=ALONE_BIAS)
    probability = float(margin.probability_of_fitting([peak])[0])
    return Report(row, probability, peak, peak - parts["context"])


def read_reports(path: Path = DATA) -> list[Report]:
    """Return the reports of the table."""
    with path.open(newline="") as file:
        return [judged(row) for row in csv.DictReader(file)]


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
    errors = [abs(report.error) for report in reports if report.error is not None]
    return table(heads, rows), [
        Figure("fit_reports", len(told), "count"),
        Figure("fits_told_right", told.count("right"), "count"),
        Figure("fits_told_right_of_20", 20 * told.count("right") / len(told), "count"),
        Figure("fit_reports_held_out", len(held), "count"),
        Figure("fits_told_right_held_out", held.count("right"), "count"),
        Figure("told_not_sure", told.count("not sure"), "count"),
        Figure("told_wrong", told.count("WRONG"), "count"),
        Figure("likelier_right", sum(report.likelier_is_right for report in reports), "count"),
        Figure("reports_error_median", 100 * statistics.median(errors), "%"),
        Figure("reports_error_worst", 100 * max(errors), "%"),
    ]
