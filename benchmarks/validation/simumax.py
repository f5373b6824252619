"""Memory and step time of Megatron-LM: the analytic models on SimuMax's measurements on 8 B200.

Dense models alone (`benchmarks/data/simumax.md`): the models know no experts that are narrower than
a dense block, nor latent attention. The constants of B200 are set to the times of the 70B model
alone. What torch has allocated is compared, without the context.
SimuMax's own predictions of the same rows are judged likewise; it was made on these machines.
"""

from __future__ import annotations

import numpy as np

from benchmarks.figures import Figure
from benchmarks.validation.comparison import DATA, models, rows_of, table
from tuner.models.analytic.model import AnalyticModel, Program
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob

MODELS = ("llama3-70b", "llama3-405b")
MEGATRON = Program(
    sequence_sharded=True,
    fused_blocks=True,
    fp32_gradients=True,
    fused_loss=True,
    vocabulary_parallel_loss=True,
)


def _planned(row: dict[str, str], program: Program) -> tuple[AnalyticModel, Configuration]:
    # The model and the configuration of a row.
    tensor, pipeline, context, data = (int(row[name]) for name in ("tp", "pp", "cp", "dp"))
    job = TrainingJob(
        name="simumax",
        model={**models()[row["model"]], "num_hidden_layers": int(row["layers"])},
        sequence_length=int(row["sequence"]),
        global_batch=int(row["micro_batches"]) * data,
        steps=1,
    )
    configuration = Configuration.of(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        sequence_parallel=context,
        data_parallel=data,
        micro_batch=1,
        zero_stage=1,
    )
    return AnalyticModel(job, load_cluster("b200-8"), program=program), configuration


def predicted_ms(row: dict[str, str], program: Program) -> float:
    """Return the milliseconds of a step of a row."""
    model, configuration = _planned(row, program)
    return 1e3 * float(model.predict([configuration]).step_time_s[0])


def predicted_GiB(row: dict[str, str], program: Program) -> float:
    """Return the GiB that torch allocates on the fullest rank of a row."""
    model, configuration = _planned(row, program)
    found = model.predict([configuration]).memory_bytes[0] - model.constants.context_bytes
    return float(found) / 2**30


def compare() -> tuple[list[str], list[Figure]]:
    """Return the table of dense rows, one for each amount of memory, and the figures."""
    found = [row for row in rows_of(DATA / "simumax_b200.csv") if row["model"] in MODELS]
    rows, errors, plain, theirs = [], [], [], []
    # Steps of more micro-batches need the same memory, and were given the same measurement.
    for row in (row for row in found if row["micro_batches"] == "4"):
        real = float(row["real_alloc_gib"])
        said = predicted_GiB(row, MEGATRON)
        errors.append(said / real - 1)
        plain.append(predicted_GiB(row, Program()) / real - 1)
        theirs.append(float(row["perf_alloc_gib"]) / real - 1)
        rows.append((row["case"], f"{real:.1f}", f"{said:.1f}", f"{errors[-1]:+.1%}"))
    medians = {
        "simumax_memory_median": errors,
        "simumax_memory_median_as_deepspeed": plain,
        "simumax_memory_median_by_itself": theirs,
    }
    figures = [
        Figure(name, 100 * float(np.median(np.abs(each))), "%") for name, each in medians.items()
    ]
    for name, model in zip(("fitted", "held_out"), MODELS, strict=True):
        each = [row for row in found if row["model"] == model]
        off = [predicted_ms(row, MEGATRON) / float(row["real_ms"]) - 1 for row in each]
        error = 100 * float(np.abs(off).mean())
        figures.append(Figure(f"simumax_time_{name}_mean", error, "%"))
    worst = Figure("simumax_memory_worst", 100 * float(np.abs(errors).max()), "%")
    return table(("Megatron-LM on 8 B200", "GiB", "predicted", "error"), rows), [*figures, worst]
