"""The built-in training program: a plain DeepSpeed script, as any user could have written it.

It builds a causal language model by `transformers` from a Hugging Face configuration (random
weights), feeds it synthetic tokens and trains. It imports nothing of joulefront: a probe starts it
under the hook, `torchrun` starts it as it is. The tokens of a step depend on the seed and the step
alone, not on how ranks share them, so every configuration trains the same job.

    torchrun --nproc-per-node 2 train.py --job job.json --deepspeed_config ds_config.json --steps 20

What DeepSpeed's JSON cannot say are arguments: pipeline, sequence and expert degrees, and what
happens to activations. Each is a module beside this one (stages, ulysses, experts, ...).
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from causal_lm import build_model, check_attention, tokens_of_step
from host_activations import activations_on_host

#: The first steps are all logged: they show that two configurations train the same job.
FIRST_STEPS = 5


def phase(name: str) -> None:
    """Tell the hook, where there is one, which part of the step begins."""
    hook = sys.modules.get("joulefront_hook")
    if hook is not None:
        hook.phase(name)


def arguments_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--job", required=True)
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--pipeline_parallel", type=int, default=1)
    parser.add_argument("--sequence_parallel", type=int, default=1)
    parser.add_argument("--expert_parallel", type=int, default=1)
    parser.add_argument("--activation_checkpointing", default="none", help="none, every_K or full")
    parser.add_argument("--activation_offload", choices=("none", "sync", "async"), default="none")
    parser.add_argument("--steps", type=int, default=None, help="default: the job's steps")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    return parser.parse_args()


def initialize(job: dict[str, Any], settings: dict[str, Any], arguments: argparse.Namespace) -> Any:
    """The model under DeepSpeed, split as the arguments say; only what is asked for is imported."""
    model = build_model(job, arguments.activation_checkpointing)
    mpu = None
    if arguments.sequence_parallel > 1 or arguments.pipeline_parallel > 1:
        check_attention(model, job["sequence_length"])
    if arguments.expert_parallel > 1:
        import experts

        experts.spread(model, arguments.expert_parallel)
    if arguments.sequence_parallel > 1:
        import ulysses

        mpu = ulysses.split_sequences(model, arguments.sequence_parallel)
    if arguments.pipeline_parallel > 1:
        import stages

        model = stages.cut(model, arguments.pipeline_parallel)
    parameters: Any = model.parameters()
    if arguments.expert_parallel > 1:
        parameters = experts.parameter_groups(model)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=parameters, config=settings, mpu=mpu
    )
    return engine


def plain_step(
    engine: Any, parts: Iterator[tuple[torch.Tensor, torch.Tensor]], arguments: argparse.Namespace
) -> torch.Tensor:
    """One optimizer step; this rank's mean loss."""
    accumulation, degree = engine.gradient_accumulation_steps(), arguments.sequence_parallel
    given: dict[str, Any] = {}
    share = 1.0
    if degree > 1:
        import ulysses

        share = ulysses.loss_share(degree, engine.zero_optimization_stage())
    losses = []
    for micro, (inputs, targets) in enumerate(parts):
        inputs, targets = inputs.to(engine.device), targets.to(engine.device)
        if degree > 1:
            length = inputs.shape[1]
            first = torch.distributed.get_rank() % degree * length
            given["position_ids"] = torch.arange(first, first + length, device=engine.device)[None]
        phase("forward")
        with activations_on_host(arguments.activation_offload):
            loss = engine(input_ids=inputs, labels=targets, shift_labels=targets, **given).loss
        losses.append(loss.detach())
        phase("backward")
        engine.backward(loss * share)
        if micro == accumulation - 1:
            phase("optimizer")
        engine.step()
    return torch.stack(losses).mean()


def pipeline_step(
    engine: Any, parts: Iterator[tuple[torch.Tensor, torch.Tensor]], arguments: argparse.Namespace
) -> torch.Tensor:
    """One optimizer step of a pipeline; the mean loss, which DeepSpeed tells all stages."""
    with activations_on_host(arguments.activation_offload):
        return engine.train_batch(parts).detach()


def main() -> None:
    arguments = arguments_of(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    job = json.loads(Path(arguments.job).read_text())
    settings = json.loads(Path(arguments.deepspeed_config).read_text())

    if deepspeed.accelerator.get_accelerator().device_name() == "cpu":
        # Building DeepSpeed's shared-memory collective needs a compiler and half a minute at the
        # first start; gloo serves two ranks on one machine as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    engine = initialize(job, settings, arguments)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    # Tensor ranks and sequence ranks of one replica are neighbours; stages lie a stride apart.
    tensor = settings.get("tensor_parallel", {}).get("autotp_size", 1)
    stride, stages = tensor * arguments.sequence_parallel, arguments.pipeline_parallel
    replicas = world // stride // stages
    replica = rank // stride % replicas
    part = rank % arguments.sequence_parallel
    step_of: Callable[..., torch.Tensor] = pipeline_step if stages > 1 else plain_step
    micro_batch = engine.train_micro_batch_size_per_gpu()
    accumulation = engine.gradient_accumulation_steps()
    length = job["sequence_length"] // arguments.sequence_parallel
    for step in range(arguments.steps or job["steps"]):
        phase("data")
        tokens = tokens_of_step(job, step).view(accumulation, replicas, micro_batch, -1)
        own = tokens[:, replica, :, part * length : (part + 1) * length + 1]
        parts = ((own[m, :, :-1], own[m, :, 1:].contiguous()) for m in range(accumulation))
        loss = step_of(engine, parts, arguments)
        if step < FIRST_STEPS or step % arguments.log_every == 0:
            mean = loss / world
            torch.distributed.all_reduce(mean)
            norm = engine.get_global_grad_norm()
            if rank == 0:
                told = "" if norm is None else f" gradient norm {float(norm):.6f}"
                print(f"step {step} loss {float(mean):.6f}{told}", flush=True)
    # Without both, an interpreter sometimes aborts at its end under live collectives (torch 2.13).
    torch.distributed.barrier()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
