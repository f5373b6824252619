"""Peak bytes of a step under FSDP2 by torch's own count, of one of many ranks, on one machine.

The training program shards a model of fake tensors over a process group of torch's fake backend,
whose collectives allocate as real ones do and move nothing. Two micro-batches run, so that reduced
gradients exist at the second one's peak. Everything but the optimizer's states is counted, as
`benchmarks.validation.torch_memory` counts; those are added by their definition (Adam's two moments
in fp32, on the shard). On a CPU torch frees the input of a block's reduction at once; on a GPU it
holds it until the next block's, which the count therefore lacks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.validation.torch_memory import adapt, counter_of, program
from tuner.search_spaces.job import TrainingJob


def fsdp_bytes(
    job: TrainingJob,
    micro_batch: int,
    checkpointing: str,
    *,
    ranks: int,
    groups: int = 1,
    reshard: bool = True,
) -> float:
    """Return the peak bytes of one rank under FSDP2, without a context.

    Args:
        job: the job, of text.
        micro_batch: number of sequences.
        checkpointing: as the knob.
        ranks: data-parallel ranks.
        groups: groups of HSDP.
        reshard: gathered parameters are freed after the forward pass.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    warnings.simplefilter("ignore")
    values = dict(job.model)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.use_cache = False
    counter = counter_of()
    with program() as causal_lm, _fake_ranks(ranks), _resizing(counter):
        import fsdp2  # type: ignore[import-not-found]

        mesh = fsdp2.mesh_of("cpu", groups)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            adapt(model, job, causal_lm)
            causal_lm.checkpoint_blocks(model, checkpointing)
            model.train()
            policy = fsdp2.policy_of(job.precision)
            fsdp2.shard(model, lambda *modules: None, mesh, policy, reshard=reshard)
            parameters = list(model.parameters())
            for parameter in (p for p in parameters if p.requires_grad):
                counter.add(parameter.to_local())
            moments = 2 * counter.live
            for parameter in (p for p in parameters if not p.requires_grad):
                counter.add(parameter.to_local())
            model.set_requires_all_reduce(False)
            tokens = torch.zeros((micro_batch, job.sequence_length), dtype=torch.long)
            for _ in range(2):
                counter.peak = counter.live
                with counter:
                    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            return float(counter.peak + moments)


@contextmanager
def _fake_ranks(ranks: int) -> Iterator[None]:
    """Make a process group of so many ranks, of which this process is the first."""
    import torch
    import torch.distributed._tools.fake_collectives  # collectives of fake tensors
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def _resizing(counter: Any) -> Iterator[None]:
    """Let a counter know of storages that are resized in place."""
    import torch

    plain = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> None:
        plain(storage, size)
        counter.resized(storage)

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]
