"""Peak bytes of a training step by torch's own count, without allocating anything.

The job's model is built of fake tensors (`FakeTensorMode`) and run forward and backward. A dispatch
mode counts the bytes of every storage from its creation until its last reference goes, so the peak
is that of a perfect allocator: no fragmentation, no CUDA context. Gradients exist from the start,
as they do from the second micro-batch on. States of the optimizer are counted by their definition
(`tuner.search_spaces.model_facts.model_state_parts`): no optimizer runs.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.figures import ROOT
from tuner.search_spaces.job import TrainingJob


@contextmanager
def program() -> Iterator[Any]:
    """The training program's module that builds models, imported as the program does."""
    folder = str(ROOT / "workload" / "program")
    sys.path.insert(0, folder)
    try:
        import causal_lm

        yield causal_lm
    finally:
        sys.path.remove(folder)


@dataclass(frozen=True)
class BatchCount:
    """Bytes of one micro-batch on one rank.

    Attributes:
        parameters, gradients: of the model; gradients are those of what is trained.
        kept: values kept at the end of the forward pass.
        peak: largest sum of all but parameters and gradients.
    """

    parameters: int
    gradients: int
    kept: int
    peak: int


def counter_of() -> Any:
    """Return a dispatch mode that counts live storages; torch is imported here."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    class Counter(TorchDispatchMode):
        """Count the bytes of live storages.

        Attributes:
            live, peak: bytes now and at most.
        """

        def __init__(self) -> None:
            super().__init__()
            self.live = self.peak = 0
            self._known: dict[int, int] = {}

        def add(self, tensor: Any) -> None:
            """Count a tensor's storage until it is freed, unless it is counted already."""
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._known:
                return
            self._known[key] = size
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._freed, key)

        def resized(self, storage: Any) -> None:
            """Count a storage anew that was resized in place, as FSDP2 frees what it gathered."""
            key = storage._cdata
            if key in self._known:
                self.live += storage.nbytes() - self._known[key]
                self._known[key] = storage.nbytes()
                self.peak = max(self.peak, self.live)

        def _freed(self, key: int) -> None:
            self.live -= self._known.pop(key)

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # its local part comes here next
            out = func(*args, **(kwargs or {}))
            for tensor in tree_iter(out):
                if isinstance(tensor, torch.Tensor):
                    self.add(tensor)
            return out

    return Counter()


def adapt(model: Any, job: TrainingJob, causal_lm: Any) -> None:
    """Add the adapters of a job with LoRA to its model, as the training program does."""
    if job.lora is not None:
        import lora  # type: ignore[import-not-found]

        lora.adapt(model, causal_lm.blocks_of(model), job.lora.to_table())


def count(job: TrainingJob, micro_batch: int, checkpointing: str) -> BatchCount:
    """Count one micro-batch of a job of text.

    Args:
        job: the job; its model is built by transformers with fused attention.
        micro_batch: number of sequences.
        checkpointing: as the knob.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    warnings.simplefilter("ignore")
    values = dict(job.model)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.use_cache = False
    kind = torch.float32 if job.precision == "fp32" else torch.bfloat16
    with program() as causal_lm, FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=kind)
        adapt(model, job, causal_lm)
        causal_lm.checkpoint_blocks(model, checkpointing)
        model.train()
        counter = counter_of()
        for tensor in (*model.parameters(), *model.buffers()):
            counter.add(tensor)
        parameters = counter.live
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
                counter.add(parameter.grad)
        states = counter.live
        tokens = torch.zeros((micro_batch, job.sequence_length), dtype=torch.long)
        counter.peak = counter.live
        with counter:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            kept = counter.live - states
            loss.backward()
        return BatchCount(parameters, states - parameters, kept, counter.peak - states)
