"""Sharding by torch itself (FSDP2, `torch.distributed.fsdp.fully_shard`) in place of DeepSpeed's.

Each block's parameters, gradients and optimizer states are sharded over the ranks; a block is
gathered before it runs, and its gradients are reduce-scattered as soon as they are complete. After
the forward pass its parameters are freed and gathered again for the backward pass, or kept. In a
hybrid (HSDP) the ranks are several groups, each with a whole copy of the state, and gradients are
also summed across the groups, once a step.

States are kept in fp32; a job in bf16 computes and gathers in bf16 and reduces in fp32, as
torchtitan's default policy does. Weights that are frozen (LoRA) are stored as they are computed.
"""

from typing import Any

import lora
import torch
from causal_lm import Filler, blocks_of, encoder_blocks_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def mesh_of(device: str, groups: int) -> DeviceMesh:
    """Return the mesh of all ranks: neighbours shard, groups of them repeat each other."""
    world = torch.distributed.get_world_size()
    if groups == 1:
        return init_device_mesh(device, (world,), mesh_dim_names=("shard",))
    shape = (groups, world // groups)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def policy_of(precision: str) -> MixedPrecisionPolicy:
    """Return the precision of computation and communication."""
    if precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard(
    model: Any, fill: Filler, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, reshard: bool
) -> None:
    """Fill a planned model and shard it, one block at a time, so that no rank holds all weights.

    A table and an output projection of their own are units beside the blocks. If they are one
    matrix they stay gathered from the forward to the backward pass. With `reshard` a block's
    gathered parameters are freed after its forward pass.
    """
    given: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    for block in (*blocks_of(model), *encoder_blocks_of(model)):
        fill(block)
        lora.cast_frozen(block, policy.param_dtype)
        fully_shard(block, reshard_after_forward=reshard, **given)
    fill(model)
    lora.cast_frozen(model, policy.param_dtype)
    model.tie_weights()
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if table.weight is not head.weight:
        fully_shard(table, reshard_after_forward=reshard, **given)
        fully_shard(head, reshard_after_forward=False, **given)
    fully_shard(model, reshard_after_forward=False, **given)


class Engine:
    """Replacement of DeepSpeed's engine for a model that torch has sharded.

    Of DeepSpeed's JSON, optimizer, clipping, micro-batch and accumulation hold.
    """

    def __init__(self, model: Any, settings: dict[str, Any], device: Any) -> None:
        self.device = torch.device(device)
        self._model = model
        self._micro_batch = settings["train_micro_batch_size_per_gpu"]
        self._accumulation = settings["gradient_accumulation_steps"]
        self._clipping = settings["gradient_clipping"]
        chosen = dict(settings["optimizer"]["params"])
        del chosen["torch_adam"]  # it is torch's anyhow
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, **chosen)
        self._taken = 0
        self._norm: torch.Tensor | None = None

    def __call__(self, **inputs: Any) -> Any:
        """Run the forward pass of a micro-batch."""
        return self._model(**inputs)

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches of a step."""
        return int(self._accumulation)

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of sequences of a micro-batch."""
        return int(self._micro_batch)

    def zero_optimization_stage(self) -> int:
        """Return 0: ZeRO shards nothing."""
        return 0

    def get_global_grad_norm(self) -> torch.Tensor | None:
        """Return the norm of the last step's gradient before it was clipped."""
        return self._norm

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a micro-batch; groups sum their gradients at the last one."""
        self._taken += 1
        self._model.set_requires_all_reduce(self._taken == self._accumulation)
        (loss / self._accumulation).backward()

    def step(self) -> None:
        """Update the weights after the last micro-batch of a step; before it, do nothing."""
        if self._taken < self._accumulation:
            return
        self._taken = 0
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._clipping)
        self._norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self._optimizer.step()
        self._optimizer.zero_grad()


def engine_of(
    model: Any,
    fill: Filler,
    settings: dict[str, Any],
    precision: str,
    device: str,
    *,
    reshard: bool,
    groups: int,
) -> Engine:
    """Fill, shard and return a planned model as an engine; each of `groups` holds a whole state."""
    mesh = mesh_of(torch.device(device).type, groups)
    shard(model, fill, mesh, policy_of(precision), reshard=reshard)
    return Engine(model, settings, device)
