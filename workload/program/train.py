"""Built-in training program: a plain DeepSpeed script, as any user could have written it.

It builds a causal language model, or one of video and text, by `transformers` from a Hugging Face
configuration (random weights), feeds it synthetic samples and trains. It imports nothing of
joulefront: a probe starts it under the hook, `torchrun` starts it as it is. The samples of a step
depend on the seed and the step alone, not on how ranks share them, so every configuration trains
the same job.

    torchrun --nproc-per-node 2 train.py --job job.json --deepspeed_config ds_config.json --steps 20

What DeepSpeed's JSON cannot say are arguments: pipeline, sequence and expert degrees, sharding by
torch in place of DeepSpeed, and what happens to activations. Each is a module beside this one
(stages, ulysses, experts, fsdp2, ...).

Under a hook it marks the phases of a step: data, forward, backward, communication (what is left of
the gradients' reduction after the backward pass; in a pipeline, neighbours too) and optimizer. Of a
model of video and text: forward.encoder, forward.language, backward.language, backward.encoder.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from causal_lm import (
    Filler,
    Samples,
    Share,
    blocks_of,
    check_attention,
    compile_model,
    encoder_blocks_of,
    planned_model,
    reads_video,
)
from deepspeed.utils import groups
from host_activations import activations_on_host
from lora import trained

#: The first steps are all logged: they show that two configurations train the same job.
FIRST_STEPS = 5
#: Who shards the training state. FSDP2 frees gathered parameters after the forward pass, or not.
SHARDINGS = ("deepspeed", "fsdp2", "fsdp2_no_reshard")


def phase(name: str) -> None:
    """Report to the hook, if there is one, the part of the step that begins."""
    hook = sys.modules.get("joulefront_hook")
    if hook is not None:
        hook.phase(name)


def arguments_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line."""
    parser.add_argument("--job", required=True)
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--pipeline_parallel", type=int, default=1)
    parser.add_argument(
        "--pipeline_schedule", choices=("1f1b", "interleaved", "zero_bubble"), default="1f1b"
    )
    parser.add_argument("--virtual_stages", type=int, default=1)
    parser.add_argument("--sequence_parallel", type=int, default=1)
    parser.add_argument("--sequence_method", choices=("ulysses", "all_gather"), default="ulysses")
    parser.add_argument("--expert_parallel", type=int, default=1)
    parser.add_argument("--sharding", choices=SHARDINGS, default=SHARDINGS[0])
    parser.add_argument("--hsdp_replicas", type=int, default=1)
    parser.add_argument(
        "--activation_checkpointing", default="none", help="none, selective, every_K or full"
    )
    parser.add_argument("--activation_offload", choices=("none", "sync", "async"), default="none")
    parser.add_argument("--compilation", choices=("none", "regional", "full"), default="none")
    parser.add_argument("--steps", type=int, default=None, help="default: the job's steps")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    return parser.parse_args()


def initialize(job: dict[str, Any], settings: dict[str, Any], arguments: argparse.Namespace) -> Any:
    """Return the model under DeepSpeed, split by the arguments; import only their modules."""
    model = planned_model(job, arguments.activation_checkpointing)
    device, dtype = made_as(job, arguments, settings, model)
    if arguments.sharding != "deepspeed":
        return sharded_by_torch(model, job, settings, arguments, device)
    fill = Filler(model, job["seed"], device, dtype)
    if arguments.pipeline_parallel == 1 or arguments.expert_parallel > 1:
        stage = settings.get("zero_optimization", {}).get("stage")
        # Experts are taken out of whole layers, which DeepSpeed then refuses to shard.
        shard = stage == 3 and arguments.expert_parallel == 1
        give_weights(model, fill, settings if shard else None)
    # else: each stage fills its own layers
    if reads_video(job):
        import multimodal

        multimodal.prepare(model, phase)
    mpu = None
    if arguments.sequence_parallel > 1 or arguments.pipeline_parallel > 1:
        check_attention(model, job["sequence_length"])
    if arguments.expert_parallel > 1:
        import experts

        experts.spread(model, arguments.expert_parallel)
    if arguments.sequence_parallel > 1:
        gathers = arguments.sequence_method == "all_gather"
        method = importlib.import_module("context" if gathers else "ulysses")
        mpu = method.split_sequences(model, arguments.sequence_parallel)
    compile_model(model, arguments.compilation)
    if arguments.pipeline_schedule != "1f1b":
        import schedules

        return schedules.Engine(model, job, settings, fill, arguments, device, phase)
    if arguments.pipeline_parallel > 1:
        import stages

        model = stages.cut(model, arguments.pipeline_parallel, job, fill)
    parameters: Any = trained(model) if "lora" in job else model.parameters()
    if arguments.expert_parallel > 1:
        parameters = experts.parameter_groups(model)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=parameters, config=settings, mpu=mpu
    )
    if arguments.pipeline_parallel > 1:
        stages.mark_phases(engine, phase)
    else:
        mark_reduction(engine)
    return engine


def sharded_by_torch(
    model: Any,
    job: dict[str, Any],
    settings: dict[str, Any],
    arguments: argparse.Namespace,
    device: str,
) -> Any:
    """Return the planned model under FSDP2."""
    import fsdp2

    if reads_video(job):
        import multimodal

        multimodal.prepare(model, phase)
    compile_model(model, arguments.compilation)
    return fsdp2.engine_of(
        model,
        Filler(model, job["seed"], device),
        settings,
        job["precision"],
        device,
        reshard=arguments.sharding == "fsdp2",
        groups=arguments.hsdp_replicas,
    )


def made_as(
    job: dict[str, Any], arguments: argparse.Namespace, settings: dict[str, Any], model: Any
) -> tuple[str, torch.dtype | None]:
    """Return the device on which weights are made, and the precision in which they stay.

    A model that is split later, and would fill half of the GPU, is made on the host.
    """
    accelerator = deepspeed.accelerator.get_accelerator()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(job["precision"])
    if accelerator.device_name() == "cpu":
        return "cpu", None
    if "tensor_parallel" in settings or arguments.expert_parallel > 1:
        size = 2 if dtype else 4
        whole = size * sum(parameter.numel() for parameter in model.parameters())
        if whole > accelerator.total_memory() / 2:
            return "cpu", None
    return accelerator.device_name(arguments.local_rank), dtype


def give_weights(model: Any, fill: Filler, shard: dict[str, Any] | None) -> None:
    """Fill the whole model, one block at a time; under ZeRO-3 (`shard`) keep this rank's share."""
    if shard is not None:
        # Which ranks share a sequence is not known here, so the batch would not add up.
        shard = {name: value for name, value in shard.items() if name != "train_batch_size"}

    def share(module: Any) -> None:
        if shard is not None:
            # The ranks of a second copy (ZeRO++) become a group at the first call alone.
            near = groups._get_zero_param_intra_parallel_group()
            deepspeed.zero.Init(
                module=module, config_dict_or_path=shard, zero_param_parallel_group=near
            )

    for block in (*blocks_of(model), *encoder_blocks_of(model)):
        fill(block)
        share(block)
    fill(model)
    model.tie_weights()
    share(model)


def mark_reduction(engine: Any) -> None:
    """Mark the point of a backward pass from which it only waits for the gradients' reduction."""
    plain = engine.allreduce_gradients

    def reduce(*given: Any, **named: Any) -> Any:
        phase("communication")
        return plain(*given, **named)

    engine.allreduce_gradients = reduce


def plain_step(
    engine: Any,
    parts: Iterable[tuple[dict[str, Any], torch.Tensor]],
    arguments: argparse.Namespace,
    where: tuple[str, str],
) -> torch.Tensor:
    """Run one optimizer step; return this rank's mean loss."""
    accumulation, degree = engine.gradient_accumulation_steps(), arguments.sequence_parallel
    share = 1.0
    if degree > 1:
        import ulysses

        share = ulysses.loss_share(degree, engine.zero_optimization_stage())
    losses = []
    for micro, (inputs, targets) in enumerate(islice(parts, accumulation)):
        given = {
            name: value.to(engine.device) if torch.is_tensor(value) else value
            for name, value in inputs.items()
        }
        targets = targets.to(engine.device)
        phase("forward" + where[0])
        with activations_on_host(arguments.activation_offload):
            loss = engine(labels=targets, shift_labels=targets, **given).loss
        losses.append(loss.detach())
        phase("backward" + where[1])
        engine.backward(loss * share)
        if micro == accumulation - 1:
            phase("optimizer")
        engine.step()
        if micro < accumulation - 1:
            phase("data")
    return torch.stack(losses).mean()


def pipeline_step(
    engine: Any,
    parts: Iterable[tuple[dict[str, Any], torch.Tensor]],
    arguments: argparse.Namespace,
    where: tuple[str, str],
) -> torch.Tensor:
    """Run one optimizer step of a pipeline; return the mean loss, the same on all stages."""
    import stages

    if arguments.pipeline_schedule != "1f1b":
        return engine.train_batch(parts)
    with activations_on_host(arguments.activation_offload):
        return engine.train_batch(stages.fed(parts)).detach()


def main() -> None:
    """Train, and print the loss."""
    arguments = arguments_of(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    job = json.loads(Path(arguments.job).read_text())
    settings = json.loads(Path(arguments.deepspeed_config).read_text())

    if deepspeed.accelerator.get_accelerator().device_name() == "cpu":
        # Building DeepSpeed's shared-memory collective needs a compiler and half a minute at the
        # first start; gloo serves two ranks on one machine as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        deepspeed.accelerator.get_accelerator().set_device(arguments.local_rank)
    deepspeed.init_distributed()
    engine = initialize(job, settings, arguments)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    # Tensor ranks and sequence ranks of one replica are neighbours; stages lie a stride apart.
    tensor = settings.get("tensor_parallel", {}).get("autotp_size", 1)
    stride, stages = tensor * arguments.sequence_parallel, arguments.pipeline_parallel
    replicas = world // stride // stages
    share = Share(
        accumulation=settings["gradient_accumulation_steps"],  # the engine's may change meanwhile
        replicas=replicas,
        replica=rank // stride % replicas,
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        parts=arguments.sequence_parallel,
        part=rank % arguments.sequence_parallel,
        paired=arguments.sequence_method == "all_gather",
    )
    samples: Any = Samples(job, share)
    where = ("", "")
    if reads_video(job):
        import multimodal

        samples, where = multimodal.Samples(job, share), (".encoder", ".language")
    step_of: Callable[..., torch.Tensor] = pipeline_step if stages > 1 else plain_step
    for step in range(arguments.steps or job["steps"]):
        phase("data")
        loss = step_of(engine, samples.of_step(step), arguments, where)
        if step < FIRST_STEPS or step % arguments.log_every == 0:
            mean = loss / world
            torch.distributed.all_reduce(mean)
            norm = engine.get_global_grad_norm()
            if rank == 0:
                norm_text = "" if norm is None else f" gradient norm {float(norm):.6f}"
                print(f"step {step} loss {float(mean):.6f}{norm_text}", flush=True)
    # Without both, an interpreter sometimes aborts at its end under live collectives (torch 2.13).
    torch.distributed.barrier()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
