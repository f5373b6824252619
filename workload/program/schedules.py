"""Pipeline schedules by torch: interleaved 1F1B and zero bubble, over virtual stages.

The layers are those of `stages`, cut into `pipeline_parallel` x `virtual_stages` parts of equal
numbers of blocks; part k runs on rank k modulo the degree (Narayanan et al. 2021, arXiv
2104.04473). torch.distributed.pipelining runs the schedule; optimizer, clipping and the reduction
over replicas are here, as DeepSpeed's pipeline engine has one schedule and one part a rank. Ranks
of one part are neighbours, as in DeepSpeed's layout.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from stages import Fill, layers_of, loss_of
from torch import distributed as dist
from torch.distributed import pipelining

SCHEDULES = {
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}


class Engine:
    """Parts of the model on this rank, their optimizer, and the schedule that runs them."""

    def __init__(
        self,
        model: Any,
        job: dict[str, Any],
        settings: dict[str, Any],
        fill: Fill,
        arguments: Namespace,
        device: str,
        phase: Callable[[str], None],
    ) -> None:
        degree, virtual = arguments.pipeline_parallel, arguments.virtual_stages
        self.device = torch.device(device)
        self._phase, self._count = phase, settings["gradient_accumulation_steps"]
        self._micro_batch = settings["train_micro_batch_size_per_gpu"]
        self._clip, self._norm = settings["gradient_clipping"], torch.zeros(())
        self._pipeline, self._replicas, self._ends = _groups(degree)
        place, parts = dist.get_group_rank(self._pipeline, dist.get_rank()), degree * virtual
        layers = layers_of(model, job, fill)
        self._stages = []
        for number in range(place, parts, degree):
            here = _part(len(layers), parts, number, blocks=len(model.get_decoder().layers))
            module = torch.nn.Sequential(*(_built(layers[i]) for i in here))
            module.to(self.device, _PRECISIONS[job["precision"]])
            stage = pipelining.PipelineStage(
                module, number, parts, self.device, group=self._pipeline
            )
            self._stages.append(_marked(stage, phase))
        self._tables = [
            table.weight
            for stage in self._stages
            for table in stage.submod
            if getattr(table, "shared", False)
        ]
        self._own = [p for stage in self._stages for p in stage.submod.parameters()]
        # The copy of a shared table on the last rank is counted once.
        self._counted = [p for p in self._own if place == 0 or p not in set(self._tables)]
        # In fp32, as DeepSpeed keeps the weights that its optimizer updates.
        self._updated = [p.detach().float().requires_grad_() for p in self._own]
        chosen = settings["optimizer"]["params"]
        self._optimizer = torch.optim.AdamW(
            self._updated,
            lr=chosen["lr"],
            betas=tuple(chosen["betas"]),
            eps=chosen["eps"],
            weight_decay=chosen["weight_decay"],
            fused=self.device.type == "cuda",
        )
        schedule = SCHEDULES[arguments.pipeline_schedule]
        self._schedule = schedule(self._stages, self._count, loss_fn=loss_of)
        self._first, self._last = place == 0, place == degree - 1

    def train_micro_batch_size_per_gpu(self) -> int:
        return int(self._micro_batch)

    def get_global_grad_norm(self) -> float:
        """Return the gradient norm of the last step, before clipping."""
        return float(self._norm)

    def train_batch(self, parts: Any) -> torch.Tensor:
        """Run one optimizer step; return the mean loss, the same on all ranks of the pipeline."""
        micro_batches = [next(parts) for _ in range(self._count)]
        tokens = torch.cat([given["input_ids"] for given, _ in micro_batches]).to(self.device)
        targets = torch.cat([wanted for _, wanted in micro_batches]).to(self.device)
        losses: list[torch.Tensor] = []
        extra: dict[str, Any] = {"target": targets, "losses": losses} if self._last else {}
        self._schedule.step(*((tokens,) if self._first else ()), return_outputs=False, **extra)
        self._phase("communication")
        loss = torch.stack(losses).mean().detach() if self._last else torch.zeros(())
        loss = loss.to(self.device, torch.float32)
        dist.all_reduce(loss, group=self._pipeline)
        self._reduce()
        self._phase("optimizer")
        self._optimizer.step()
        with torch.no_grad():
            for parameter, updated in zip(self._own, self._updated, strict=True):
                parameter.copy_(updated)
                parameter.grad = updated.grad = None
        return loss

    def _reduce(self) -> None:
        for weight in self._tables:
            dist.all_reduce(weight.grad, group=self._ends)
        replicas = dist.get_world_size(self._replicas)
        for parameter, updated in zip(self._own, self._updated, strict=True):
            updated.grad = parameter.grad.float()
            if replicas > 1:
                dist.all_reduce(updated.grad, group=self._replicas)
                updated.grad /= replicas
        counted = set(self._counted)
        squares = [
            updated.grad.square().sum()
            for parameter, updated in zip(self._own, self._updated, strict=True)
            if parameter in counted
        ]
        square = torch.stack(squares).sum() if squares else torch.zeros((), device=self.device)
        dist.all_reduce(square, group=self._pipeline)
        self._norm = square.sqrt()
        share = torch.clamp(self._clip / (self._norm + 1e-6), max=1.0)
        for updated in self._updated:
            updated.grad *= share


_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _groups(degree: int) -> tuple[Any, Any, Any]:
    replicas, rank = dist.get_world_size() // degree, dist.get_rank()
    columns = [[s * replicas + r for s in range(degree)] for r in range(replicas)]
    rows = [[s * replicas + r for r in range(replicas)] for s in range(degree)]
    mine = []
    for kind in (columns, rows, [[column[0], column[-1]] for column in columns]):
        groups = [dist.new_group(ranks) for ranks in kind]  # every rank makes every group
        mine.append(next((g for g, r in zip(groups, kind, strict=True) if rank in r), None))
    return mine[0], mine[1], mine[2]


class SharedTokenTable(torch.nn.Module):
    """Token table that both ends of the pipeline hold, in its role at this end."""

    shared = True

    def __init__(self, table: Any, run: Callable[..., torch.Tensor] | None) -> None:
        super().__init__()
        self.table, self._run = table, run

    @property
    def weight(self) -> torch.nn.Parameter:
        return self.table.weight

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.table(given) if self._run is None else self._run(self.table, given)


def _built(layer: LayerSpec) -> torch.nn.Module:
    module = layer.build()
    return (
        SharedTokenTable(module, layer.forward_fn) if isinstance(layer, TiedLayerSpec) else module
    )


def _part(layers: int, parts: int, number: int, *, blocks: int) -> range:
    each, more = divmod(blocks, parts)
    ends = [0]
    for part in range(parts):
        ends.append(ends[-1] + each + (part >= parts - more))
    before = layers - blocks - 2  # norm and head come after the blocks
    first = 0 if number == 0 else before + ends[number]
    last = layers if number == parts - 1 else before + ends[number + 1]
    return range(first, last)


def _marked(stage: Any, phase: Callable[[str], None]) -> Any:
    passes = {
        "forward_one_chunk": "forward",
        "backward_one_chunk": "backward",
        "backward_weight_one_chunk": "backward",
    }

    def marked(run: Callable[..., Any], name: str) -> Callable[..., Any]:
        def one(*given: Any, **named: Any) -> Any:
            phase(name)
            out = run(*given, **named)
            phase("communication")
            return out

        return one

    for method, name in passes.items():
        setattr(stage, method, marked(getattr(stage, method), name))
    return stage
