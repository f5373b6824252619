"""How right `tuner fit` is: torch's own counts, and published runs that ran or ran out of memory.

Printed for each job, micro-batch and checkpointing are the bytes that torch counts
(`benchmarks.validation.torch_memory`) beside the predicted ones without context and communication,
with the model's states sharded over eight ranks by ZeRO-3; the same under FSDP2, where what is
gathered is counted too (`benchmarks.validation.torch_fsdp`); the same of jobs with LoRA; and for
each published run the predicted peak, the verdict and, where the source states one, the measured
peak. What the models were fitted on: the `context_bytes` of GH200 are fitted to 12 plans of
OPT-350M, which are not in this table; the published runs are held out. The forms of the
activations' terms follow papers and torch's counts.

`--reports` prints instead what is said of people's trainings on one GPU that ran or ran out
(`benchmarks.validation.reports`).
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from benchmarks.figures import Figure, arguments, publish
from benchmarks.validation import reports
from benchmarks.validation.comparison import table
from benchmarks.validation.ran import Ran, read_runs, verdict
from benchmarks.validation.torch_fsdp import fsdp_bytes
from benchmarks.validation.torch_memory import BatchCount, count
from tuner.models.analytic.model import AnalyticModel
from tuner.planner.fit import LIKELY
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import LoRA, TrainingJob, load_job
from tuner.search_spaces.model_facts import job_state_bytes

#: (job, micro-batch, checkpointing) of torch's counts.
CASES = (
    *[("opt-350m", b, c) for b, c in ((1, "none"), (8, "none"), (1, "full"), (8, "full"))],
    *[("qwen2.5-7b", b, c) for b, c in ((1, "none"), (4, "none"), (1, "full"), (4, "every_2"))],
    *[("olmoe-1b-7b", b, c) for b, c in ((1, "none"), (4, "full"))],
    *[(name, 1, "selective") for name in ("opt-350m", "qwen2.5-7b", "olmoe-1b-7b")],
    *[("tiny-gpt", b, c) for b, c in ((8, "none"), (8, "full"))],
)
#: (job, micro-batch, checkpointing, sharding, groups of HSDP) of torch's counts under FSDP2.
FSDP_CASES = (
    ("qwen2.5-7b", 1, "full", "fsdp2", 1),
    ("qwen2.5-7b", 1, "none", "fsdp2", 2),
    ("qwen2.5-7b", 1, "full", "fsdp2_no_reshard", 1),
    ("opt-350m", 1, "full", "fsdp2_no_reshard", 4),
    ("olmoe-1b-7b", 1, "none", "fsdp2", 1),
    ("tiny-gpt", 8, "none", "fsdp2", 1),
)
#: (job, micro-batch, checkpointing, LoRA) of torch's counts with frozen weights.
LORA_CASES = (
    ("qwen2.5-7b", 1, "none", LoRA(16)),
    ("qwen2.5-7b", 1, "selective", LoRA(16)),
    ("qwen2.5-7b", 4, "full", LoRA(64, "all-linear")),
    ("qwen2.5-7b", 4, "none", LoRA(16, "all-linear")),
    ("opt-350m", 8, "none", LoRA(16)),
    ("olmoe-1b-7b", 1, "none", LoRA(16)),
    ("tiny-gpt", 8, "none", LoRA(8, "all-linear")),
)
#: Ranks over which the states are sharded beside torch's counts.
RANKS = 8


def torch_bytes(job: TrainingJob, counted: BatchCount) -> float:
    """Return the bytes of one of `RANKS` ranks under ZeRO-3 by torch's count.

    Sharded states by their definition, and what else was alive at the peak.
    """
    return job_state_bytes(job, 3, RANKS) + counted.peak


def predicted_apart(
    job: TrainingJob, micro_batch: int, checkpointing: str, **sharding: str | int
) -> float:
    """Return the predicted bytes of the same: without context and communication.

    With the knobs of `sharding`, FSDP2's, communication is included: torch counts it.
    """
    size = replace(job, global_batch=RANKS * micro_batch)
    said = AnalyticModel(size, load_cluster("a100-8")).breakdown(
        Configuration.of(
            sharding or {"zero_stage": 3},
            data_parallel=RANKS,
            micro_batch=micro_batch,
            activation_checkpointing=checkpointing,
        )
    )
    left_out = ("context",) if sharding else ("context", "communication")
    return sum(value for name, value in said.memory.items() if name not in left_out)


def errors_of_runs(runs: list[Ran]) -> tuple[list[str], list[float], int, int]:
    """Return (lines, errors of measured peaks, false yes, false no) of published runs."""
    rows, errors, wrong = [], [], {True: 0, False: 0}
    for run in runs:
        predicted = run.predicted_bytes()
        chance = run.probability(predicted)
        says_yes = chance >= LIKELY
        wrong[says_yes] += says_yes != run.ran
        off = ""
        if run.peak_bytes is not None:
            errors.append(predicted / run.peak_bytes - 1)
            off = f"{run.peak_bytes / 1e9:.1f} ({100 * errors[-1]:+.1f} %)"
        rows.append(
            (
                run.name,
                f"{predicted / 1e9:.1f}",
                f"{run.cluster.device.memory_bytes / 1e9:.1f}",
                off,
                f"{verdict(chance)} ({chance:.2f})",
                run.row["outcome"] + ("" if says_yes == run.ran else "  WRONG"),
            )
        )
    heads = ("published run", "GB", "of", "measured", "tuner fit", "what happened")
    return table(heads, rows), errors, wrong[True], wrong[False]


def main() -> None:
    parser = arguments(__doc__, "fit")
    parser.add_argument("--reports", action="store_true", help="reports of one GPU alone")
    args = parser.parse_args()
    if args.reports:
        lines, figures = reports.compare()
        print("\n".join(lines), flush=True)
        publish(figures, args.json)
        return
    rows, counted_errors = [], []
    for name, micro_batch, checkpointing in CASES:
        job = load_job(name)
        truth = torch_bytes(job, count(job, micro_batch, checkpointing))
        said = predicted_apart(job, micro_batch, checkpointing)
        counted_errors.append(said / truth - 1)
        rows.append(_row(f"{name} mb{micro_batch} ckpt-{checkpointing}", truth, said))
    heads = ("torch GB", "predicted", "off")
    print("\n".join(table(("dp8 zero3", *heads), rows)), "\n", flush=True)
    rows, fsdp_errors = [], []
    for name, micro_batch, checkpointing, sharding, groups in FSDP_CASES:
        job, reshard = load_job(name), sharding == "fsdp2"
        truth = fsdp_bytes(
            job, micro_batch, checkpointing, ranks=RANKS, groups=groups, reshard=reshard
        )
        knobs: dict[str, str | int] = {"sharding": sharding, "hsdp_replicas": groups}
        said = predicted_apart(job, micro_batch, checkpointing, **knobs)
        fsdp_errors.append(said / truth - 1)
        case = f"{name} mb{micro_batch} ckpt-{checkpointing} {sharding} hsdp{groups}"
        rows.append(_row(case, truth, said))
    print("\n".join(table(("dp8 fsdp2", *heads), rows)), "\n", flush=True)
    lines, lora_errors = _with_lora()
    print("\n".join(lines), "\n", flush=True)
    lines, errors, false_yes, false_no = errors_of_runs(read_runs())
    print("\n".join(lines), flush=True)
    both = [abs(error) for error in (*counted_errors, *fsdp_errors, *errors)]
    publish(
        [
            Figure("fit_bytes_error_median", 100 * statistics.median(both), "%"),
            Figure("fit_bytes_error_worst", 100 * max(both), "%"),
            Figure("fit_torch_error_median", 100 * _median(counted_errors), "%"),
            Figure("fit_fsdp_error_median", 100 * _median(fsdp_errors), "%"),
            Figure("fit_lora_error_median", 100 * _median(lora_errors), "%"),
            Figure("fit_published_error_median", 100 * _median(errors), "%"),
            Figure("fit_false_yes", false_yes, "count"),
            Figure("fit_false_no", false_no, "count"),
        ],
        args.json,
    )


def _with_lora() -> tuple[list[str], list[float]]:
    """Return (lines, errors) of jobs with frozen weights, under ZeRO-3 and once under FSDP2."""
    rows, errors = [], []
    for name, micro_batch, checkpointing, lora in LORA_CASES:
        job = replace(load_job(name), lora=lora)
        truth = torch_bytes(job, count(job, micro_batch, checkpointing))
        said = predicted_apart(job, micro_batch, checkpointing)
        errors.append(said / truth - 1)
        case = f"{name} {lora.targets} rank {lora.rank} mb{micro_batch} ckpt-{checkpointing}"
        rows.append(_row(case, truth, said))
    job = replace(load_job("qwen2.5-7b"), lora=LoRA(16, "all-linear"))
    truth = fsdp_bytes(job, 1, "full", ranks=RANKS)
    said = predicted_apart(job, 1, "full", sharding="fsdp2", hsdp_replicas=1)
    errors.append(said / truth - 1)
    rows.append(_row("qwen2.5-7b all-linear rank 16 mb1 ckpt-full fsdp2", truth, said))
    return table(("dp8 LoRA", "torch GB", "predicted", "off"), rows), errors


def _row(case: str, truth: float, said: float) -> tuple[str, ...]:
    """Return a line of a table of torch's count and the prediction."""
    off = f"{100 * (said / truth - 1):+.1f} %"
    return case, f"{truth / 1e9:.2f}", f"{said / 1e9:.2f}", off


def _median(errors: list[float]) -> float:
    return statistics.median(abs(error) for error in errors)


if __name__ == "__main__":
    main()
