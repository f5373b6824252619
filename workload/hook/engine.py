"""A DeepSpeed configuration, and the engine that is made from it.

The settings of this launch are merged into the program's configuration, table by table; the rest
stays the program's. The engine then reports its steps, at accumulation boundaries only, and its
phases. The functions on dictionaries also serve outside a rank, for planning.
"""

import base64
import copy
import importlib
import inspect
import json
import math
import os
from collections.abc import Mapping
from typing import Any

from . import state, watching
from .steps import around, count_engine


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `overlay` merged in, table by table; None removes a key."""
    merged = dict(base)
    for key, value in overlay.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            below = merged.get(key)
            merged[key] = merge(below if isinstance(below, Mapping) else {}, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def micro_batches(config: Mapping[str, Any], replicas: int) -> tuple[int, int]:
    """Return (micro-batch, accumulation) of a DeepSpeed configuration; (0, 0) if unknown."""
    whole, micro, times = (config.get(name) for name in BATCH_KEYS)
    if any(value is not None and type(value) is not int for value in (whole, micro, times)):
        return 0, 0
    if micro is None:
        times = times or 1
        micro = (whole or 0) // (times * replicas)
    return (micro, times or (max(1, (whole or 0) // (micro * replicas)))) if micro else (0, 0)


def other_split(micro: int, times: int) -> tuple[int, int] | None:
    """Return the next split of the same samples into micro-batches, a smaller one where it is near.

    None for one sample in one pass.
    """
    if micro % 2 and times % 2 == 0:
        return micro * 2, times // 2
    if micro > 1:
        parts = _smallest_factor(micro)
        return micro // parts, times * parts
    parts = _smallest_factor(times)
    return (micro * parts, times // parts) if times > 1 else None


def _smallest_factor(number: int) -> int:
    return next((n for n in range(2, math.isqrt(number) + 1) if number % n == 0), number)


def split_differently(config: Mapping[str, Any], replicas: int) -> dict[str, Any]:
    """Return settings that split the same global batch differently; empty if there are none."""
    micro, times = micro_batches(config, replicas)
    other = other_split(micro, times) if micro else None
    return dict(zip(BATCH_KEYS, (None, *other), strict=True)) if other else {}


def parse_config(text: str) -> dict[str, Any]:
    """Parse a DeepSpeed configuration as DeepSpeed does: by hjson, else as JSON; or ValueError."""
    try:
        reader: Any = importlib.import_module("hjson")
    except ModuleNotFoundError:
        reader = json
    try:
        settings = reader.loads(text, object_pairs_hook=_each_once)
    except ValueError as error:
        if reader is not json or "stands twice" in str(error):
            raise
        raise ValueError(f"{error} (comments need hjson, which DeepSpeed installs)") from error
    if not isinstance(settings, dict):
        raise ValueError("it holds no object")
    return settings


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice")
    return table


def _read_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    given = arguments.get("config")
    given = arguments.get("config_params") if given is None else given
    if given is None:
        given = getattr(arguments.get("args"), "deepspeed_config", None)
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    if given is None:
        return {}
    if os.path.exists(given):
        with open(given, encoding="utf-8-sig") as file:
            return parse_config(file.read())
    return parse_config(base64.urlsafe_b64decode(given).decode())


def _wrap_initialize(deepspeed: Any) -> None:
    signature = inspect.signature(deepspeed.initialize)

    @around(deepspeed, "initialize")
    def initialize(plain: Any, /, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        config, model = _read_config(arguments), arguments.get("model")
        state.seen["engines"] = state.seen.get("engines", 0) + 1
        watching.counter.has_engine = True
        if not config or state.seen["engines"] > 1:
            return plain(*args, **kwargs)  # a second engine (a teacher, a critic) stays as it is
        _see_model(model, arguments, config)
        overlay = dict(state.options.get("deepspeed", {}))
        if state.options.get("alter") and not state.seen["owner"]:
            overlay |= split_differently(config, int(os.environ.get("WORLD_SIZE", "1")))
        switch = watching.with_switch(model)
        watching.set_checkpointing(switch, state.options.get("activation_checkpointing"))
        arguments = {**arguments, "config": merge(config, overlay)}
        arguments.pop("config_params", None)
        holder = arguments.get("args")
        path = getattr(holder, "deepspeed_config", None)
        if path is not None:  # DeepSpeed takes one of the two
            holder.deepspeed_config = None  # type: ignore[union-attr]
        try:
            made = plain(**arguments)
        finally:
            if path is not None:
                holder.deepspeed_config = path  # type: ignore[union-attr]
        engine = made[0]
        state.seen["micro_batch"] = engine.train_micro_batch_size_per_gpu()
        state.seen["accumulation"] = engine.gradient_accumulation_steps()
        state.seen["global_batch"] = engine.train_batch_size()
        state.seen["pipeline"] = hasattr(engine, "num_stages")
        state.seen["stages"] = getattr(engine, "num_stages", 1)
        watching.watch_ready(engine.module.parameters())
        return made


def _see_model(model: Any, arguments: Mapping[str, Any], config: dict[str, Any]) -> None:
    optimizer = arguments.get("optimizer")
    state.seen["config"], state.seen["owner"] = config, watching.owner()
    state.seen["client_optimizer"] = type(optimizer).__name__ if optimizer is not None else ""
    state.seen["training_data"] = arguments.get("training_data") is not None
    watching.see_switch(model)


def patch_deepspeed(deepspeed: Any) -> None:
    """Merge settings into the program's, and count steps at accumulation boundaries only."""
    engine = deepspeed.DeepSpeedEngine
    if getattr(engine, "_joulefront", False):
        return
    engine._joulefront = True
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        # Building DeepSpeed's shared-memory collective for a CPU needs a compiler and half a
        # minute at the first start; gloo, which it falls back to, serves as well.
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        module = importlib.import_module("deepspeed.accelerator.cuda_accelerator")
        allocate_cuda_memory(module.CUDA_Accelerator)
    _wrap_initialize(deepspeed)
    from deepspeed.runtime.pipe.engine import PipelineEngine

    counter = watching.counter
    count_engine(counter, engine, "step", lambda each: each.is_gradient_accumulation_boundary())
    count_engine(counter, PipelineEngine, "train_batch", lambda _: True)

    @around(engine, "step")
    def step(plain: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self.is_gradient_accumulation_boundary() and counter.follows("engine", self):
            state.mark_seen("optimizer")
        result = plain(self, *args, **kwargs)
        state.mark_seen("data")
        return result

    @around(engine, "forward")
    def forward(plain: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if "batch" not in state.seen:
            watching.see_batch((kwargs, args))
        state.mark_seen("forward")
        return plain(self, *args, **kwargs)

    @around(engine, "backward")
    def backward(plain: Any, /, *args: Any, **kwargs: Any) -> Any:
        state.mark_seen("backward")
        return plain(*args, **kwargs)

    whole = state.options.get("deepspeed", {}).get("zero_optimization", {}).get("stage", 3) == 3

    @around(deepspeed.zero.Init, "__init__")
    def init(plain: Any, /, *args: Any, **kwargs: Any) -> None:
        if not whole:
            kwargs["enabled"] = False
        # It reads the batch sizes before it joins the process group.
        elif "WORLD_SIZE" in os.environ and not deepspeed.comm.is_initialized():
            deepspeed.init_distributed()
        plain(*args, **kwargs)


def allocate_cuda_memory(accelerator: Any) -> None:
    """Have ZeRO 1 and 2 ask CUDA for the free memory, not NVML by CUDA_VISIBLE_DEVICES' entry."""

    def available_memory(self: Any, device_index: int | None = None) -> int:
        import torch

        return int(torch.cuda.mem_get_info(device_index)[0])

    accelerator.available_memory = available_memory
