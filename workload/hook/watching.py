"""Observation of the program while it trains: its steps, its first batch, its model.

Each step that `counter` counts is observed and reported to the agent. Until the first step the
calls of modules are watched too. A program that does not train as requested raises
`NotAsRequested`.
"""

import contextlib
import inspect
import os
import sys
from collections.abc import Iterable
from typing import Any

from . import state, torch_settings
from .batch_counts import GROUPS, StepCounts, tensors
from .link import Link
from .steps import StepCounter


def step() -> None:
    """Report an optimizer step. Only for programs whose steps the hook cannot see by itself."""
    counter.count("program")


def _counted() -> None:
    source = state.seen["counts"] = counter.source
    _observe()
    if state.attachment is not None:
        state.link = state.attachment.connect()
    if state.link is not None:
        tuned = not state.options.get("watch")  # a training that is only watched is the user's
        if isinstance(state.link, Link) and state.link.owner != os.getpid():
            return _refuse_child(state.link)
        if state.link.steps == 0 and source != "program" and tuned and not state.attachment:
            _check_ranks()
        state.link.step_done()


#: Counter of this process's steps.
counter = StepCounter(_counted)


def _observe() -> None:
    watched, counts = state.seen.get("watched"), state.seen.get("counted")
    if "length" not in state.seen and state.options.get("inspect"):
        state.seen["length"] = stated_length()
    if watched is not None and not state.seen.get("first_step"):
        state.seen["first_step"] = True
        watched.first_step()
    if counts is not None:
        counts.attempt()
        if counts.over and watched is not None:
            watched.end()


def _refuse_child(link: Link) -> None:
    # Refuse a training in a process that the program has forked; beside its own it counts not.
    if link.steps:
        return
    error = state.NotAsRequested(
        "the script trains in processes that it starts itself (multiprocessing.Process), in which "
        "no probe can measure; start its ranks with torchrun"
    )
    link.fail(error)
    raise error


def _check_ranks() -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    together = 1
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        together, state.seen["grouped"] = distributed.get_world_size(), True
    if together != world and "horovod" not in sys.modules:
        raise state.IndependentRanks(
            f"of {world} ranks each trains {'alone' if together == 1 else f'with {together}'}: the "
            "script makes no process group of all ranks that were started (without a launcher it "
            "is tuned as one process)"
        )


def patch_torch(torch: Any) -> None:
    """Count the steps of the first torch optimizer if no DeepSpeed engine counts them."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        if counter.takes(optimizer):
            rates = state.seen.setdefault("rates", [])
            if state.options.get("inspect") and len(rates) < GROUPS:
                rates.append(_settings_of(optimizer))
            if "owner" not in state.seen:
                state.seen["owner"] = owner()
                state.seen["steps_of"] = describe(optimizer)
                state.seen["optimizer"] = torch_settings.of_optimizer(optimizer)
            grouped = (p for group in optimizer.param_groups for p in group["params"])
            watch_ready(p for p in grouped if p.grad is not None)
            counter.count("optimizer")
        elif counter.source == "optimizer":
            if (counts := state.seen.get("counted")) is not None:
                counts.other_stepped()
            others = state.seen.setdefault("others", {}) if state.options.get("inspect") else None
            if others is not None and id(optimizer) not in others:
                others[id(optimizer)] = describe(optimizer)

    register_optimizer_step_post_hook(stepped)


def watch_ready(parameters: Iterable[Any]) -> None:
    """Report the first parameter's complete gradient to the agent; not in a pipeline.

    The backward pass reaches it last, before gradients are averaged over the ranks: the last rank
    to get there is the one for which all others wait.
    """
    link = state.link
    if link is None or "ready" in state.seen or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return
    if state.seen.get("pipeline"):
        return
    first = next((p for p in parameters if p.requires_grad and p.is_leaf), None)
    if first is not None and hasattr(first, "register_post_accumulate_grad_hook"):
        state.seen["ready"] = True
        first.register_post_accumulate_grad_hook(lambda parameter: link.ready())


def describe(optimizer: Any) -> str:
    """Return the kind of a torch optimizer and the numbers that it trains, for people."""
    try:
        numbers = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    except Exception:  # parameters that are not there yet, or of a kind of the program's own
        return type(optimizer).__name__
    return f"{type(optimizer).__name__} of {numbers:,} parameters"


def _settings_of(optimizer: Any) -> list[float]:
    found: list[float] = []
    for group in optimizer.param_groups:
        for name in sorted(group):
            values = group[name] if isinstance(group[name], list | tuple) else [group[name]]
            if name != "params":
                found += [float(v) for v in values if type(v) in (int, float)]
                found += [float(v) for v in values if getattr(v, "numel", lambda: 0)() == 1]
    return found


#: Modules that hold a training loop or stand between it and the optimizer, the outermost first.
_OWNERS = {
    "transformers.trainer": "transformers",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "accelerate": "accelerate",
}


def owner() -> str:
    """Return the framework that calls and thus owns the batches; empty for the program itself."""
    found = set()
    frame = inspect.currentframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        found |= {owner for owner in _OWNERS if name == owner or name.startswith(f"{owner}.")}
        frame = frame.f_back
    return next((name for owner, name in _OWNERS.items() if owner in found), "")


def stated_length() -> dict[str, Any]:
    """Return the steps that the calling framework's own object states, and its name; {} if none."""
    frame = inspect.currentframe()
    while frame is not None:
        holder = frame.f_locals.get("self")
        for kind in type(holder).__mro__:  # TRL's trainers, and those of users, are derived
            module, steps, counted = str(getattr(kind, "__module__", "")), 0, None
            with contextlib.suppress(Exception):  # no evidence
                if module.startswith("transformers.trainer"):
                    counted = getattr(holder, "state", None)
                    steps = getattr(counted, "max_steps", 0)
                elif ".trainer.trainer" in module and "lightning" in module:
                    counted = holder
                    steps = holder.estimated_stepping_batches  # type: ignore[union-attr]
            if isinstance(steps, int) and steps > 0:
                done = getattr(counted, "global_step", 0)
                resumed = {"done": done} if isinstance(done, int) and 0 < done < steps else {}
                return {"steps": steps, "by": module.partition(".")[0], **resumed}
        frame = frame.f_back
    return {}


class Forwards:
    """Watcher of module calls in the first optimizer steps, for programs without DeepSpeed.

    Of the outermost modules that are called before the first step, the one with the most parameters
    is the model (a loss may be a module too). Models with frozen statistics are trained in
    evaluation mode, so that mode is not asked.
    """

    def __init__(self, torch: Any, counts: StepCounts | None = None) -> None:
        self._module = owner = torch.nn.Module
        self._plain = plain = owner.__call__
        self._counts, self._over, self._is_counted = counts, False, False
        self._models: dict[int, tuple[int, Any]] = {}  # by identity: parameters, module
        self._shapes: dict[int, tuple[list[int], bool]] = {}  # of the first call

        def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or state.seen.get("engines"):
                return plain(module, *args, **kwargs)
            if not torch.is_grad_enabled():
                return plain(module, *args, **kwargs)
            owner.__call__ = plain  # what is called inside is not the outermost
            try:
                self._called(module, (kwargs, args))
                return plain(module, *args, **kwargs)
            finally:
                if not self._over:
                    owner.__call__ = call

        owner.__call__ = call

    def _called(self, module: Any, inputs: Any) -> None:
        shape, tokens = _shape_of(inputs)
        # What has no parameters (a loss, the transform of a sample) takes no batch of the model's.
        if self._counts is not None and next(iter(module.parameters()), None) is not None:
            self._counts.forward(shape)
        if self._is_counted or id(module) in self._models:
            return
        size = sum(parameter.numel() for parameter in module.parameters())
        self._models[id(module)], self._shapes[id(module)] = (size, module), (shape, tokens)
        set_checkpointing(with_switch(module), state.options.get("activation_checkpointing"))

    def modules(self) -> list[Any]:
        """Return the outermost modules that were called before the first step."""
        return [module for _, module in self._models.values()]

    def first_step(self) -> None:
        """Record the model and the shape of its first batch; go on as long as calls are counted."""
        self._is_counted = True
        if self._models and not state.seen.get("engines"):
            name = max(self._models, key=lambda key: self._models[key][0])
            see_switch(self._models[name][1])
            if state.options.get("inspect"):
                torch = sys.modules["torch"]
                state.seen["backend"] = torch_settings.of_backend(torch, self._models[name][1])
            if "batch" not in state.seen:
                state.seen["batch"], state.seen["tokens"] = self._shapes[name]
        self._models.clear()
        if self._counts is None:
            self.end()

    def end(self) -> None:
        """Stop watching."""
        self._over, self._module.__call__ = True, self._plain


def see_batch(inputs: Any) -> None:
    """Note the shape of the first batch, and refuse it if its size is not the requested one."""
    state.seen["batch"], state.seen["tokens"] = _shape_of(inputs)
    wanted, batch = state.options.get("micro_batch"), state.seen["batch"]
    if wanted and batch and batch[0] != wanted:
        raise state.NotAsRequested(
            f"the program's batches hold {batch[0]} samples where micro_batch is {wanted}"
        )


def _shape_of(inputs: Any) -> tuple[list[int], bool]:
    first = next((t for t in tensors(inputs) if len(t.shape) > 0), None)
    if first is None:
        return [], False
    return list(first.shape), str(first.dtype) in ("torch.int64", "torch.int32")


def with_switch(module: Any) -> Any:
    """Return the outermost part of a model with transformers' checkpointing switch, or None."""
    for part in module.modules() if hasattr(module, "modules") else ():
        if getattr(part, "supports_gradient_checkpointing", False) and hasattr(
            part, "gradient_checkpointing_enable"
        ):
            return part
    return None


def _compiled(module: Any) -> bool:
    every = list(module.modules()) if hasattr(module, "modules") else []
    parts = [  # by torch.compile, and by Module.compile
        each
        for each in every
        if type(each).__name__ == "OptimizedModule" or getattr(each, "_compiled_call_impl", None)
    ]
    inside = {id(parameter) for part in parts for parameter in part.parameters()}
    return bool(parts) and 2 * len(inside) > sum(1 for _ in module.parameters())


def see_switch(module: Any) -> None:
    """Note the model's own configuration, its switch for checkpointing, and compiled parts."""
    part = with_switch(module)
    state.seen["compiled"] = _compiled(module)
    state.seen["can_checkpoint"] = part is not None
    state.seen["checkpoints"] = bool(getattr(part, "is_gradient_checkpointing", False))
    carrier = module if hasattr(getattr(module, "config", None), "to_dict") else part
    if hasattr(getattr(carrier, "config", None), "to_dict"):
        state.seen["model"] = carrier.config.to_dict()


def set_checkpointing(model: Any, mode: str | None) -> None:
    """Turn a transformers model's own activation checkpointing on or off."""
    if model is None:
        return
    if mode == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif mode == "none" and getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()
