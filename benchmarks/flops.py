"""FLOPs and parameter counts against DeepSpeed's profiler, torch's counter, and built models.

Each job's model is built by the training program and run forward once on the job's own samples,
under both counters; a full-size model is built without weights (torch's meta device). The count of
joulefront covers matrix products, as torch's does; DeepSpeed's adds norms, activations and softmax,
which are under 0.4 % even of the small test models.

All of them count the whole square of attention's scores. What a fused kernel executes under the
causal mask is less, and what the analytic models charge; `executed` is that share of the count.

Known errors of the two counters, and the remedies here (DeepSpeed 0.19.8, torch 2.13):
- DeepSpeed replaces functions of torch.nn.functional by counting ones. transformers runs a layer's
  experts by one grouped product (`torch.nn.functional.grouped_mm`), which is not among them: of
  OLMoE's test model it misses all experts, 19 % of the pass. With transformers' "eager" experts
  (the same products one by one) it counts them; `as_it_comes` is the difference.
- torch's counter has no formula for the fused attention of a CPU and skips it, 6 to 13 % of the
  test models' pass; with the plain products (`SDPBackend.MATH`) it counts them.
"""

from __future__ import annotations

import statistics
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, arguments, publish
from tuner.models.analytic.compute import CAUSAL_SHARE
from tuner.search_spaces.job import TrainingJob, job_names, load_job
from tuner.search_spaces.model_facts import facts_of

#: Samples of one forward pass.
SAMPLES = 2


@dataclass(frozen=True)
class Count:
    """One pass of one job, counted by others.

    Attributes:
        job: its name.
        ours: `ModelFacts.forward_flops`.
        deepspeed: the profiler's FLOPs of a forward pass, everything that it knows.
        products: the profiler's multiply-accumulates twice: matrix products and convolutions alone.
        torch: `torch.utils.flop_counter`, which counts matrix products at the dispatcher.
        torch_step: the same of a forward and a backward pass.
        ours_step: `ModelFacts.flops`.
        as_it_comes: the profiler's of the model as transformers runs it, experts grouped.
        executed: share of ours that a fused attention kernel executes under the causal mask.
    """

    job: str
    ours: float
    deepspeed: float
    products: float
    torch: float
    torch_step: float
    ours_step: float
    as_it_comes: float
    executed: float

    def off(self, name: str) -> float:
        """Our distance from another count, as a share of it."""
        mine = self.ours_step if name == "torch_step" else self.ours
        return float(mine / getattr(self, name) - 1)


@contextmanager
def program() -> Iterator[Any]:
    """The training program's module that builds models, imported as the program does."""
    folder = str(Path(__file__).parents[1] / "workload" / "program")
    sys.path.insert(0, folder)
    try:
        import causal_lm

        yield causal_lm
    finally:
        sys.path.remove(folder)


def built(job: TrainingJob, *, weights: bool = True) -> Any:
    """The job's model; without weights it takes no memory and can only be asked for its shapes."""
    with program() as causal_lm:
        make = causal_lm.build_model if weights else causal_lm.planned_model
        return make(job.to_json(), "none")


def inputs_of(job: TrainingJob) -> dict[str, Any]:
    """The first micro-batch of the job's first step."""
    job = replace(job, global_batch=SAMPLES)
    with program() as causal_lm:
        share = causal_lm.Share(accumulation=1, replicas=1, replica=0, micro_batch=SAMPLES)
        samples: Any = causal_lm.Samples
        if job.frames:
            import multimodal

            samples = multimodal.Samples
        inputs, _ = next(samples(job.to_json(), share).of_step(0))
    if job.frames:
        inputs["pixel_values_videos"] = inputs["pixel_values_videos"].float()
    return dict(inputs)


def profiled(model: Any, inputs: dict[str, Any]) -> tuple[float, float]:
    """DeepSpeed's (FLOPs, FLOPs of matrix products and convolutions) of one forward pass."""
    import torch
    from deepspeed.profiling.flops_profiler import FlopsProfiler

    profiler = FlopsProfiler(model)
    profiler.start_profile()
    try:
        with torch.no_grad():
            model(**inputs)
        return float(profiler.get_total_flops()), 2.0 * profiler.get_total_macs()
    finally:
        profiler.end_profile()


def counted(job: TrainingJob, model: Any, inputs: dict[str, Any]) -> Count:
    """Run the model under each counter."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    deepspeed, products = profiled(model, inputs)
    as_it_comes = deepspeed
    if facts_of(job).experts:
        model.set_experts_implementation("eager")
        deepspeed, products = profiled(model, inputs)
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            logits = model(**inputs).logits
        with FlopCounterMode(display=False) as backward:
            logits.float().square().mean().backward()
    return Count(
        job.name,
        facts_of(job).forward_flops(SAMPLES, job.sequence_length, job.frames),
        deepspeed,
        products,
        float(forward.get_total_flops()),
        float(forward.get_total_flops() + backward.get_total_flops()),
        facts_of(job).flops(SAMPLES, job.sequence_length, job.frames),
        as_it_comes,
        executed_share(job),
    )


def executed_share(job: TrainingJob) -> float:
    """The share of the counted FLOPs of a forward pass that fused causal attention executes."""
    facts = facts_of(job)
    skipped = (1 - CAUSAL_SHARE) * facts.attention_flops(SAMPLES, job.sequence_length)
    return 1 - skipped / facts.forward_flops(SAMPLES, job.sequence_length, job.frames)


def parameters_off(job: TrainingJob, model: Any) -> int:
    """Our count of parameters, adapters included, less the model's own."""
    facts = facts_of(job)
    ours = facts.parameters + (facts.lora.parameters if facts.lora else 0)
    return ours - sum(p.numel() for p in model.parameters())


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--job", action="append", help="only this job, or these (default: all)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    jobs = [load_job(name) for name in options.job or job_names()]
    counts: list[Count] = []
    wrong = 0
    print(f"{'job':14}{'parameters':>16}{'theirs':>16}{'executed, %':>13}")
    for job in jobs:
        off = parameters_off(job, built(job, weights=False))
        wrong += off != 0
        ours = facts_of(job).parameters
        share = 100 * executed_share(job)
        print(f"{job.name:14}{ours:16,d}{ours - off:16,d}{share:13.1f}", flush=True)
    names = ("deepspeed", "products", "torch", "torch_step", "as_it_comes")
    print("\nhow far ours is from theirs, %")
    print(f"{'job':14}{'forward FLOPs':>14}" + "".join(f"{name:>13}" for name in names))
    for job in jobs:
        if job.name.startswith("tiny"):
            count = counted(job, built(job), inputs_of(job))
            counts.append(count)
            cells = "".join(f"{100 * count.off(name):13.2f}" for name in names)
            print(f"{job.name:14}{count.ours:14.4g}{cells}", flush=True)
    figures = [Figure("parameter_counts_wrong", wrong, "count")]
    for name in names if counts else ():
        away = [100 * abs(count.off(name)) for count in counts]
        figures += [
            Figure(f"flops_off_{name}_median", statistics.median(away), "%"),
            Figure(f"flops_off_{name}_worst", max(away), "%"),
        ]
    publish(figures, options.json)


if __name__ == "__main__":
    main()
