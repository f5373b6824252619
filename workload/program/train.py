"""The built-in training program: a plain DeepSpeed script, as any user could have written it.

It builds a causal language model by `transformers` from a Hugging Face configuration (random
weights), feeds it synthetic tokens and trains. It imports nothing of joulefront: a probe starts it
under the hook, `torchrun` starts it as it is. The tokens of a step depend on the seed and the step
alone, not on how ranks share them, so every configuration trains the same job.

    torchrun --nproc-per-node 2 train.py --job job.json --deepspeed_config ds_config.json --steps 20
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from transformers import AutoConfig, AutoModelForCausalLM


def phase(name: str) -> None:
    """Tell the hook, where there is one, which part of the step begins."""
    hook = sys.modules.get("joulefront_hook")
    if hook is not None:
        hook.phase(name)


def build_model(job: dict[str, Any], activation_checkpointing: str) -> torch.nn.Module:
    values = dict(job["model"])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.use_cache = False
    # The same seed on every rank and for every configuration: the same weights.
    torch.manual_seed(job["seed"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if activation_checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


def tokens_of_step(job: dict[str, Any], step: int) -> torch.Tensor:
    """One step's tokens, (global_batch, sequence_length), the same on all ranks."""
    generator = torch.Generator().manual_seed(job["seed"] * 1_000_003 + step)
    shape = (job["global_batch"], job["sequence_length"])
    return torch.randint(job["model"]["vocab_size"], shape, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", required=True)
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--activation_checkpointing", choices=("none", "full"), default="none")
    parser.add_argument("--steps", type=int, default=None, help="default: the job's steps")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    arguments = parser.parse_args()
    job = json.loads(Path(arguments.job).read_text())
    settings = json.loads(Path(arguments.deepspeed_config).read_text())

    if deepspeed.accelerator.get_accelerator().device_name() == "cpu":
        # Building DeepSpeed's shared-memory collective needs a compiler and half a minute at the
        # first start; gloo serves two ranks on one machine as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    model = build_model(job, arguments.activation_checkpointing)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings
    )
    rank, replicas = torch.distributed.get_rank(), torch.distributed.get_world_size()
    micro_batch = engine.train_micro_batch_size_per_gpu()
    accumulation = engine.gradient_accumulation_steps()
    for step in range(arguments.steps or job["steps"]):
        phase("data")
        tokens = tokens_of_step(job, step).view(accumulation, replicas, micro_batch, -1)
        loss_sum = 0.0
        for micro in range(accumulation):
            batch = tokens[micro, rank].to(engine.device)
            phase("forward")
            loss = engine(input_ids=batch, labels=batch).loss
            loss_sum += loss.detach()
            phase("backward")
            engine.backward(loss)
            if micro == accumulation - 1:
                phase("optimizer")
            engine.step()
        if step % arguments.log_every == 0:
            mean = loss_sum / accumulation / replicas
            torch.distributed.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {float(mean):.4f}", flush=True)
    # Without both, an interpreter sometimes aborts at its end under live collectives (torch 2.13).
    torch.distributed.barrier()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
