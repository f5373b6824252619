"""Settings of torch that change no training: a loader's workers, the kernels of an optimizer, how
gradients are cleared, which kernels cuDNN takes, and compilation of the model.

A launch sets them (`state.options["torch"]`) in each loader that is read for training and each
optimizer that knows them. An inspection notes today's, and what is needed to compare it with
another one: how long the program waits for them, and digests of the batches.
"""

import os
import random
import sys
import zlib
from collections.abc import Mapping
from typing import Any

from . import state
from .steps import around

#: Arguments of a loader that are set: the processes that read ahead, how far, and whether their
#: batches lie in memory that a device reads by itself.
LOADER = ("num_workers", "prefetch_factor", "pin_memory")
#: How an optimizer updates its parameters: one by one, in lists, in one kernel. Keys of its groups.
KERNELS = ("foreach", "fused")
#: Torch's kind of a loader that reads single items by their numbers; a stream has an order of its
#: own, and each worker would read all of it.
_ITEMS = 0
#: Folders of installed packages.
_INSTALLED = ("site-packages", "dist-packages")
#: Numbers of a tensor that its digest holds.
_NUMBERS = 2**16


def set_chosen(torch: Any) -> None:
    """Have the program train with the settings of this launch."""
    chosen: Mapping[str, Any] = state.options.get("torch") or {}
    loader = {name: chosen[name] for name in LOADER if name in chosen}
    if loader:

        @around(torch.utils.data.DataLoader, "_get_iterator")
        def get_iterator(plain: Any, of: Any) -> Any:
            if torch.is_grad_enabled():  # not that of an evaluation
                _set_loader(of, loader)
            return plain(of)

    if kernel := str(chosen.get("optimizer_kernel", "")):
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(lambda of, *_: set_kernel(of, kernel))
    if chosen.get("cudnn_benchmark"):
        torch.backends.cudnn.benchmark = True
    if chosen.get("compile"):
        compile_after_first_step(torch)
    if chosen.get("set_to_none") or state.options.get("inspect"):
        for kind in (torch.optim.Optimizer, torch.nn.Module):
            _watch_zeroes(kind, clear=bool(chosen.get("set_to_none")))


def _watch_zeroes(kind: Any, *, clear: bool) -> None:
    # Gradients that are filled with zeros, and not dropped, are written once more in each step.
    @around(kind, "zero_grad")
    def zero_grad(plain: Any, of: Any, set_to_none: bool = True) -> Any:
        state.seen["zeroes"] = state.seen.get("zeroes", False) or not (set_to_none or clear)
        return plain(of, set_to_none=set_to_none or clear)


def compile_after_first_step(torch: Any) -> None:
    """Compile the outermost modules that the program calls before its first optimizer step.

    In place, so that names of parameters stay, and with torch's own random numbers. The first step
    runs as it stands, for until then a program may change its model.
    """
    from torch.nn.modules import module as of_modules
    from torch.optim.optimizer import register_optimizer_step_post_hook

    found: dict[int, Any] = {}
    depth = 0

    def entered(module: Any, _: Any) -> None:
        nonlocal depth
        depth += 1
        trained = depth == 1 and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if trained and any(each.requires_grad for each in module.parameters()):
            found[id(module)] = module

    def left(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    def stepped(*_: Any) -> None:
        if not found:
            return
        for handle in handles:
            handle.remove()
        from torch._inductor import config

        config.fallback_random = True
        for module in found.values():
            module.compile()
        found.clear()
        state.seen["compiles"] = True

    handles = [
        of_modules.register_module_forward_pre_hook(entered),
        of_modules.register_module_forward_hook(left, always_call=True),
    ]
    # It stays: torch goes through the hooks of a step while it calls them.
    register_optimizer_step_post_hook(stepped)


def of_backend(torch: Any, module: Any) -> dict[str, bool]:
    """Return what cuDNN is set to, and whether a model has convolutions."""
    cudnn = torch.backends.cudnn
    kind = torch.nn.modules.conv._ConvNd
    return {
        "benchmark": bool(cudnn.benchmark),
        "deterministic": bool(cudnn.deterministic or torch.are_deterministic_algorithms_enabled()),
        "convolutions": any(isinstance(each, kind) for each in module.modules()),
    }


def _set_loader(loader: Any, chosen: Mapping[str, Any]) -> None:
    if getattr(loader, "_dataset_kind", None) != _ITEMS:
        return
    loader.num_workers = workers = chosen.get("num_workers", loader.num_workers)
    ahead = chosen.get("prefetch_factor", loader.prefetch_factor)
    loader.prefetch_factor = (ahead or 2) if workers else None  # 2 is torch's own
    loader.pin_memory = chosen.get("pin_memory", loader.pin_memory)


def set_kernel(optimizer: Any, kernel: str) -> None:
    """Have a torch optimizer update its parameters by another kernel, if it has that."""
    tables = [getattr(optimizer, "defaults", {}), *optimizer.param_groups]
    if kernel == "fused" and any(_some_begin(optimizer, group) for group in tables[1:]):
        kernel = "loop"
    flags = {name: name == kernel for name in KERNELS if name in tables[0]}
    if all(table.get(name) is flag for table in tables for name, flag in flags.items()):
        return
    if kernel not in (*flags, "loop") or not of_optimizer(optimizer):
        return
    optimizer.defaults.update(flags)  # of groups that are added later, too
    for group in optimizer.param_groups:
        group.update(flags)
        for parameter in group["params"] if kernel == "fused" else ():
            counted = optimizer.state.get(parameter, {}).get("step")
            if hasattr(counted, "to"):  # of a checkpoint: the fused kernel counts on the device
                optimizer.state[parameter]["step"] = counted.to(parameter.device).float()


def _some_begin(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Return True if some parameters of SGD's have a momentum in this step and others not yet.

    The fused kernel takes all or none; a part of the model may have its first gradient late.
    """
    if not group.get("momentum") or "dampening" not in group:
        return False
    states = (optimizer.state.get(p, {}) for p in group["params"] if p.grad is not None)
    return len({each.get("momentum_buffer") is None for each in states}) > 1


def of_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return how a torch optimizer updates its parameters, and how else it could; {} if unknown."""
    groups, defaults = optimizer.param_groups, getattr(optimizer, "defaults", {})
    parameters = [each for group in groups for each in group["params"]]
    known = [name for name in KERNELS if name in defaults]
    if not known or not parameters:
        return {}
    if any(group.get(name) for group in groups for name in ("capturable", "differentiable")):
        return {}
    if not all(each.is_floating_point() for each in parameters):
        return {}
    on_device = all(each.is_cuda for each in parameters)
    own = "foreach" if on_device and "foreach" in known else "loop"
    found = {_kernel(group, own) for group in groups}
    if len(found) > 1:
        return {}
    return {"kernel": found.pop(), "kernels": known, "on_device": on_device}


def _kernel(group: Mapping[str, Any], own: str) -> str:
    for name in reversed(KERNELS):
        if group.get(name):
            return name
    return "loop" if group.get("foreach") is False else own


def of_loader(iterator: Any, batch: Any) -> dict[str, Any]:
    """Return the settings of the loader that an iterator is of."""
    first = next(_tensors(batch), None)
    return {
        "num_workers": getattr(iterator, "_num_workers", 0),
        "prefetch_factor": getattr(iterator, "_prefetch_factor", None),
        "items": getattr(iterator, "_dataset_kind", None) == _ITEMS,
        "own_sampler": _own_sampler(iterator),
        "batch_on_device": bool(getattr(first, "is_cuda", False)),
        "pin_memory": bool(getattr(iterator, "_pin_memory", False)),
    }


def is_installed(module: str) -> bool:
    """Return True if an imported module is of an installed package, and not the program's own."""
    file = str(getattr(sys.modules.get(module), "__file__", None) or "")
    return any(f"{os.sep}{name}{os.sep}" in file for name in _INSTALLED)


def _own_sampler(iterator: Any) -> str:
    # A class of the program's own may follow its training, and workers draw from it ahead.
    sampler = getattr(iterator, "_index_sampler", None)
    while sampler is not None:
        kind = type(sampler)
        made_of_code = kind.__module__ != "builtins" or hasattr(sampler, "gi_frame")
        if made_of_code and not is_installed(kind.__module__):
            return kind.__name__
        sampler = getattr(sampler, "sampler", getattr(sampler, "batch_sampler", None))
    return ""


def digest(batch: Any) -> int | None:
    """Return a digest of all tensors of a batch; None if it holds none that can be read."""
    found: int | None = None
    try:
        for tensor in _tensors(batch):
            if hasattr(tensor, "detach"):
                flat = tensor.detach().cpu().flatten()
                part = flat[:: max(1, flat.numel() // _NUMBERS)].contiguous()
                read = part.view(sys.modules["torch"].uint8).numpy().tobytes()
            else:  # numpy's
                flat = tensor.reshape(-1)
                read = flat[:: max(1, flat.size // _NUMBERS)].tobytes()
            found = zlib.crc32(read, found or 0)
    except Exception:  # of a kind of the program's own
        return None
    return found


def _tensors(value: Any, depth: int = 0) -> Any:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        yield value
    elif depth > 8 or isinstance(value, str | bytes | int | float):
        return
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each, depth + 1)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from _tensors(each, depth + 1)
    elif hasattr(value, "__dict__"):  # a class of the program's own, or of a library
        yield from _tensors(vars(value), depth + 1)


def how_read(iterator: Any, index: Any) -> str:
    """Return what the items of a batch depend on: "number" if on nothing but their numbers,
    "random" if on the global generators too, which a worker seeds anew, else "".

    The items are read twice in this process, with those generators in the same state. A dataset
    with a generator of its own draws on, and so it would in each worker: all of them would draw the
    same numbers, in every epoch again.
    """
    before = _generators()
    try:
        read = []
        for _ in range(2):
            _set_generators(before)
            read.append(digest(_batch_of(iterator, index)))
        if None in read or read[0] != read[1]:
            return ""
        return "number" if _generators() == before else "random"
    except Exception:
        return ""
    finally:
        _set_generators(before)


def _generators() -> tuple[Any, ...]:
    of_numpy: tuple[Any, ...] | None = None
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        of_numpy = name, keys.tolist(), *rest
    return sys.modules["torch"].get_rng_state().tolist(), random.getstate(), of_numpy


def _set_generators(states: tuple[Any, ...]) -> None:
    of_torch, of_random, of_numpy = states
    torch = sys.modules["torch"]
    torch.set_rng_state(torch.tensor(of_torch, dtype=torch.uint8))
    random.setstate(of_random)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


def _batch_of(iterator: Any, index: Any) -> Any:
    dataset = iterator._dataset
    if not getattr(iterator, "_auto_collation", True):
        return iterator._collate_fn(dataset[index])
    together = getattr(dataset, "__getitems__", None)
    items = together(index) if together else [dataset[number] for number in index]
    return iterator._collate_fn(items)
