"""Activation offload to pinned host memory until the backward pass.

Both forms catch each tensor that autograd saves (`torch.autograd.graph.saved_tensors_hooks`) but
parameters and small ones. "sync" copies it out and back while the device waits, as torch's own
`save_on_cpu` does. "async" copies on a side stream while the device computes on: its memory is let
go when the copy is done, and it comes back while the one saved after it is still worked on.
"""

import contextlib
from collections import deque
from typing import Any

import torch

#: Below this a copy costs more than its bytes are worth.
SMALLEST_BYTES = 64 * 1024


def activations_on_host(
    mode: str, runtime: Any = torch.cuda
) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which to run a forward pass: mode "none", "sync" or "async"."""
    if mode == "none":
        return contextlib.nullcontext()
    offload = Blocking() if mode == "sync" else SideStream(runtime)
    return torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack)


def worth_moving(tensor: torch.Tensor) -> bool:
    """Return False for a parameter, a view of one, and a small tensor."""
    parameter = isinstance(tensor, torch.nn.Parameter) or isinstance(
        tensor._base, torch.nn.Parameter
    )
    return not parameter and tensor.numel() * tensor.element_size() >= SMALLEST_BYTES


def host_memory_for(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate host memory of a tensor's size, pinned if the tensor is on a GPU."""
    pin = tensor.device.type == "cuda"
    return torch.empty(tensor.size(), dtype=tensor.dtype, pin_memory=pin)


class Blocking:
    """Copies out and back while the device waits."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Copy a tensor to the host."""
        if not worth_moving(tensor):
            return tensor
        host = host_memory_for(tensor)
        host.copy_(tensor)
        return tensor.device, host

    def unpack(self, saved: Any) -> torch.Tensor:
        """Copy a saved tensor back to its device."""
        if isinstance(saved, torch.Tensor):
            return saved
        device, host = saved
        return host.to(device)


class SavedTensor:
    """Saved tensor: on its way out, on the host, or on its way back."""

    def __init__(
        self, host: torch.Tensor, tensor: torch.Tensor, before: "SavedTensor | None"
    ) -> None:
        self.host, self.device = host, tensor.device
        #: The device's own, while the copy out may still read it.
        self.tensor: torch.Tensor | None = tensor
        self.out: Any = None  # event: the copy out is done
        self.back: Any = None  # (tensor, event: it is there), once its way back has begun
        self.before = before  # saved just before: needed just after
        self.used = False

    def leave(self, out: Any) -> None:
        """Note the event after which the copy out is done."""
        self.out = out

    def free(self) -> torch.Tensor | None:
        """Let go of the device's own tensor, and return it if it was still held."""
        tensor, self.tensor = self.tensor, None
        return tensor

    def return_to_device(self, tensor: torch.Tensor, there: Any) -> None:
        """Note the tensor on the device, and the event after which it is there."""
        self.back = tensor, there

    def use(self) -> "tuple[torch.Tensor, Any, SavedTensor | None]":
        """Return the tensor on the device, its event, and the tensors saved just before."""
        tensor, there = self.back
        before, self.before, self.back, self.used = self.before, None, None, True
        return tensor, there, before


class SideStream:
    """Copies on a side stream, for one forward pass and its backward pass."""

    def __init__(self, runtime: Any) -> None:
        self._runtime, self._stream = runtime, runtime.Stream()
        self._leaving: deque[SavedTensor] = deque()
        self._last: SavedTensor | None = None

    def pack(self, tensor: torch.Tensor) -> Any:
        """Start to copy a tensor to the host."""
        if not worth_moving(tensor):
            return tensor
        saved = self._last = SavedTensor(host_memory_for(tensor), tensor, self._last)
        self._stream.wait_stream(self._runtime.current_stream())  # it must be computed first
        with self._runtime.stream(self._stream):
            saved.host.copy_(tensor, non_blocking=True)
        saved.leave(self._mark())
        self._leaving.append(saved)
        while self._leaving and self._leaving[0].out.query():
            self._leaving.popleft().free()
        return saved

    def unpack(self, saved: Any) -> torch.Tensor:
        """Return a saved tensor on its device, and start to copy the next one back."""
        if isinstance(saved, torch.Tensor):
            return saved
        self._fetch(saved)
        tensor, there, before = saved.use()
        if before is not None and not before.used:
            self._fetch(before)
        stream = self._runtime.current_stream()
        stream.wait_event(there)
        if tensor.is_cuda:
            # Made on the side stream: its memory is not to be used again before this one is done.
            tensor.record_stream(stream)
        return tensor

    def _fetch(self, saved: SavedTensor) -> None:
        if saved.back is not None:
            return
        tensor = saved.free()
        if tensor is None or saved.out.query():
            with self._runtime.stream(self._stream):
                tensor = torch.empty_like(saved.host, device=saved.device)
                tensor.copy_(saved.host, non_blocking=True)
        # else: it never left, for the copy out is still reading it.
        saved.return_to_device(tensor, self._mark())

    def _mark(self) -> Any:
        event = self._runtime.Event()
        event.record(self._stream)
        return event
