"""The one file of ours inside a training process: standard library only, a script and a module.

It stands between the node agent and the training program, in each rank that `fork_server.py` forks.
It counts whole optimizer steps, tells the agent of each, and halts at the boundaries the agent
names: it finishes the device's work, says "boundary", and goes on when told. The training program
itself need know nothing of it.

The program may use it all the same: `import joulefront_hook` gives this module, `configuration()`
says what it is started under, `phase(name)` marks the part of a step that begins, and `step()`
counts a step where neither DeepSpeed nor a torch optimizer takes one. A program that asks nothing
gets the configuration through what it passes to `deepspeed.initialize`. Outside a probe,
`hook.py run SCRIPT ...` starts a script with the same settings and counts nothing.

Wire (a line of text each way, over a Unix socket):
    rank to agent   hello RANK PID · step N T · at N T · phase NAME T · facts JSON · peak JSON ·
                    fail JSON · end
    agent to rank   run N (go on until N steps are done) · quit
T is CLOCK_MONOTONIC, which all processes of a node share.
"""

import base64
import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import json
import os
import resource
import runpy
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

# Ordinary exceptions that mean "no memory left", by name: torch cannot be imported here.
_OOM_TYPES = {"OutOfMemoryError", "MemoryError"}
_PEER_WORDS = ("gloo", "nccl", "closed by peer", "connection reset", "broken pipe")
_OOM_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory")


# ---------------------------------------------------------------- inside a rank


class Marks:
    """When the phases of steps began, on CLOCK_MONOTONIC, by the clock of what runs them.

    On a CUDA device the host runs ahead, so a mark is an event on the stream. Events are read once
    they lie behind, against one that was recorded at the last boundary, where the device had
    nothing to do and both clocks could be read at once: nothing waits for the device in a step.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, Any]] = deque()
        self._reference: tuple[Any, float] | None = None  # an event, and when it was
        self.used = False  # a program that marks nothing is told of no waits either

    def add(self, name: str) -> None:
        self.used = True
        self._waiting.append((name, _device_event() or time.monotonic()))

    def lines(self) -> str:
        """A line for the agent of each mark that is known by now."""
        lines = []
        while self._waiting:
            name, at = self._waiting[0]
            if not isinstance(at, float):
                if self._reference is None or not at.query():
                    break
                event, then_s = self._reference
                at = then_s + event.elapsed_time(at) / 1000
            self._waiting.popleft()
            lines.append(f"phase {name} {at:.7f}\n")
        return "".join(lines)

    def all_lines(self, at_s: float) -> str:
        """The same at a boundary, where the device is idle; what follows is a wait."""
        event = _device_event()
        if event is not None:
            event.synchronize()
            now_s = time.monotonic()
            # The first boundary ends the first step: there is no earlier reference to read by.
            self._reference = self._reference or (event, now_s)
            told = self.lines()
            self._reference = event, now_s
        else:
            told = self.lines()
        return f"{told}phase boundary {at_s:.7f}\n"


class Link:
    """A rank's line to its agent, and the count of its optimizer steps."""

    def __init__(self, address: str, rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(address)
        self._buffer = b""
        self.steps = 0
        # The first step is free: only after it is there anything to wait for.
        self._until = 1
        self.starting = True
        self.marks = Marks() if rank == 0 else None  # the agent keeps one rank's
        self.send(f"hello {rank} {os.getpid()}")

    def send(self, line: str) -> None:
        self._socket.sendall(line.encode() + b"\n")

    def _receive(self) -> str:
        while b"\n" not in self._buffer:
            chunk = self._socket.recv(4096)
            if not chunk:
                os._exit(3)  # the agent is gone; so is the reason to train
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line.decode()

    def step_done(self) -> None:
        """One optimizer step is done on this rank; waits here if the agent named this boundary."""
        self.steps += 1
        self.starting = False
        if self.steps == 1 and _options.get("inspect"):
            self.send("facts " + json.dumps(_facts(), default=str))
        if self.steps < self._until:
            told = self.marks.lines() if self.marks and self.marks.used else ""
            self.send(f"{told}step {self.steps} {time.monotonic():.7f}")
            return
        _finish_device_work()
        at_s = time.monotonic()
        told = self.marks.all_lines(at_s) if self.marks and self.marks.used else ""
        self.send(f"{told}at {self.steps} {at_s:.7f}")
        words = self._receive().split()
        if words[0] == "quit":
            self.leave()
        self._until = int(words[1])

    def leave(self) -> None:
        """Say what was used and end at once: interpreters with live collectives may abort."""
        self.send("peak " + json.dumps(_peaks()))
        self.send("end")
        _exit(0)

    def fail(self, error: BaseException) -> None:
        kind = "crash"
        text = str(error)
        names = {cls.__name__ for cls in type(error).__mro__}
        if names & _OOM_TYPES or any(word in text.lower() for word in _OOM_WORDS):
            kind = "out_of_memory"
        elif isinstance(error, NotAsAsked) or (self.starting and _raised_by_framework(error)):
            kind = "refused"
        lines = text.strip().splitlines() or [""]
        told = " ".join(lines[:3]) if lines[0].endswith(":") else lines[0]  # a list follows
        message = f"{type(error).__name__}: {told}"
        # A rank whose peer died fails in a collective: an effect, not the cause.
        effect = any(word in text.lower() for word in _PEER_WORDS)
        self.send("fail " + json.dumps({"kind": kind, "message": message[:2000], "effect": effect}))


def _raised_by_framework(error: BaseException) -> bool:
    """True where DeepSpeed itself refused, rather than the program having failed."""
    if type(error).__name__ not in (
        "AssertionError",
        "ValueError",
        "NotImplementedError",
        "DeepSpeedConfigError",
        "ValidationError",
    ):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return any(f"{os.sep}deepspeed{os.sep}" in frame.filename for frame in frames)


_link: Link | None = None
#: What the agent wants of this launch: see `workload.script.Start.options`.
_options: dict[str, Any] = {}
#: What was seen of the program: how it is built, for `_facts`.
_seen: dict[str, Any] = {}


# ---------------------------------------------------------------- what the program may ask


class _Asked(dict[str, Any]):
    """The configuration, which notes the knobs that the program reads."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def configuration() -> dict[str, Any]:
    """What this process is started under, by knob name; empty where nobody tunes.

    Every launch knob is there, its default included, and `gradient_accumulation`. A knob that the
    program reads here is one that it turns, so the search may offer it.
    """
    if "asked" not in _seen:
        _seen["asked"] = _Asked(_options.get("configuration", {}))
    asked: dict[str, Any] = _seen["asked"]
    return asked


def step() -> None:
    """One optimizer step is done. Only for programs whose steps the hook cannot see by itself."""
    _count("program")


def phase(name: str) -> None:
    """Mark that a part of the step (data, forward, backward, optimizer, ...) begins now.

    A name is one word, or a part and where it runs: `forward.encoder`. It costs some microseconds.
    A program that marks nothing has the calls of its DeepSpeed engine marked.
    """
    _seen["marks_itself"] = True
    _mark(name)


def _mark(name: str) -> None:
    if _link is not None and _link.marks is not None:
        _link.marks.add(name)


def _seen_phase(name: str) -> None:
    """Mark what the engine is called for, unless the program marks its steps itself. A pipeline's
    engine calls itself, and not for all that it does."""
    if not _seen.get("marks_itself") and not _seen.get("pipeline"):
        _mark(name)


def _device_event() -> Any:
    """An event recorded on the CUDA stream now; None where no device is in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _finish_device_work() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _peaks() -> dict[str, int]:
    """Peak memory of this rank, bytes: on the device where there is one, and on the host."""
    peaks = {"host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        peaks["device_bytes"] = torch.cuda.max_memory_reserved()
    return peaks


def _exit(code: int) -> NoReturn:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


# ---------------------------------------------------------------- around the program


class NotAsAsked(ValueError):
    """The program does not train what the configuration says: another one would be measured."""


def _count(source: str) -> None:
    """Count a step. The first source that reports one is the one that counts: the DeepSpeed engine,
    the first torch optimizer, or the program itself, which may all report the same step."""
    if _seen.setdefault("counts", source) != source:
        return
    watched = _seen.pop("watched", None)
    if watched is not None:
        watched.end()
    if _link is not None:
        if _link.steps == 0 and source != "program":
            _check_ranks()
        _link.step_done()


def _check_ranks() -> None:
    """Make sure that all ranks train one model."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    together = 1
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        together = distributed.get_world_size()
    if together != world and "horovod" not in sys.modules:
        raise NotAsAsked(
            f"of {world} ranks each trains {'alone' if together == 1 else f'with {together}'}: the "
            "script makes no process group of all ranks that were started"
        )


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `overlay` laid over it, table by table; None takes a key away."""
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


_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def micro_batches(config: Mapping[str, Any], replicas: int) -> tuple[int, int]:
    """(micro-batch, accumulation) that a DeepSpeed configuration means on `replicas` replicas.

    (0, 0) where it does not say: transformers fills "auto" in from its own arguments.
    """
    whole, micro, times = (config.get(name) for name in _BATCH_KEYS)
    if any(value is not None and type(value) is not int for value in (whole, micro, times)):
        return 0, 0
    if micro is None:
        times = times or 1
        micro = (whole or 0) // (times * replicas)
    return (micro, times or (max(1, (whole or 0) // (micro * replicas)))) if micro else (0, 0)


def split_differently(config: Mapping[str, Any], replicas: int) -> dict[str, Any]:
    """Settings that keep the global batch in other micro-batches; empty where there are none.

    A program whose batches then change in size takes it from DeepSpeed, and any other does not.
    """
    micro, times = micro_batches(config, replicas)
    if micro and micro % 2 == 0:
        parts = (None, micro // 2, times * 2)
    elif micro and times % 2 == 0:
        parts = (None, micro * 2, times // 2)
    else:
        return {}
    return dict(zip(_BATCH_KEYS, parts, strict=True))


#: Modules that hold a training loop or stand between it and the optimizer, the outermost first.
_OWNERS = {
    "transformers.trainer": "transformers",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "accelerate": "accelerate",
}


def _owner() -> str:
    """The framework that calls, where it is not the program itself: it owns the batches then."""
    found = set()
    frame = inspect.currentframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        found |= {owner for owner in _OWNERS if name == owner or name.startswith(f"{owner}.")}
        frame = frame.f_back
    return next((name for owner, name in _OWNERS.items() if owner in found), "")


def _tensors(value: Any) -> Iterator[Any]:
    """Every tensor in nested inputs, token ids first."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=lambda name: name != "input_ids"):
            yield from _tensors(value[key])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _see_batch(inputs: Any) -> None:
    """Note the shape of the first batch, and refuse one of another size than was asked for."""
    _seen["batch"], _seen["tokens"] = _shape_of(inputs)
    wanted = _options.get("micro_batch")
    if wanted and _seen["batch"] and _seen["batch"][0] != wanted:
        raise NotAsAsked(
            f"the program's batches hold {_seen['batch'][0]} samples where micro_batch is {wanted}"
        )


def _shape_of(inputs: Any) -> tuple[list[int], bool]:
    """The shape of the first tensor in nested inputs, and whether it holds token ids."""
    first = next((t for t in _tensors(inputs) if len(t.shape) > 0), None)
    if first is None:
        return [], False
    return list(first.shape), str(first.dtype) in ("torch.int64", "torch.int32")


class _FirstForwards:
    """Watches the calls of modules until the first optimizer step, where DeepSpeed is not there to.

    Of the outermost modules that are called in training, the one with the most parameters is the
    model (a loss may be a module too): its calls are the micro-batches of a step.
    """

    def __init__(self, torch: Any) -> None:
        self._module = owner = torch.nn.Module
        self._plain = plain = owner.__call__
        self._over = False
        self._models: dict[int, tuple[int, Any]] = {}  # by identity: parameters, module
        self._calls: dict[int, list[tuple[list[int], bool]]] = {}

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or _seen.get("engines"):
                return plain(module, *args, **kwargs)
            if not module.training or not torch.is_grad_enabled():
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
        if id(module) not in self._models:
            size = sum(parameter.numel() for parameter in module.parameters())
            self._models[id(module)] = size, module
            _set_checkpointing(_with_switch(module), _options.get("activation_checkpointing"))
        self._calls.setdefault(id(module), []).append(_shape_of(inputs))

    def end(self) -> None:
        """The first step is done: tell what was seen, and be gone."""
        self._over, self._module.__call__ = True, self._plain
        if not self._models or _seen.get("engines"):
            return
        name = max(self._models, key=lambda key: self._models[key][0])
        model, calls = self._models[name][1], self._calls[name]
        _see_switch(model)
        _seen["forwards"] = len(calls)
        if "batch" not in _seen:
            _seen["batch"], _seen["tokens"] = calls[0]
        wanted = _options.get("micro_batch")
        if wanted and _seen["batch"] and _seen["batch"][0] != wanted:
            raise NotAsAsked(
                f"the program's batches hold {_seen['batch'][0]} samples where micro_batch is "
                f"{wanted}"
            )


def _with_switch(module: Any) -> Any:
    """The outermost part of a model that has transformers' switch for checkpointing; or None."""
    for part in module.modules() if hasattr(module, "modules") else ():
        if getattr(part, "supports_gradient_checkpointing", False) and hasattr(
            part, "gradient_checkpointing_enable"
        ):
            return part
    return None


def _see_switch(module: Any) -> None:
    """Note the model's own configuration, and its switch for checkpointing."""
    part = _with_switch(module)
    _seen["can_checkpoint"] = part is not None
    _seen["checkpoints"] = bool(getattr(part, "is_gradient_checkpointing", False))
    carrier = module if hasattr(getattr(module, "config", None), "to_dict") else part
    if hasattr(getattr(carrier, "config", None), "to_dict"):
        _seen["model"] = carrier.config.to_dict()


def _read_config(told: Mapping[str, Any]) -> dict[str, Any]:
    """What the program passes to `deepspeed.initialize` as its configuration."""
    given = told.get("config")
    given = told.get("config_params") if given is None else given
    if given is None:
        given = getattr(told.get("args"), "deepspeed_config", None)
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    if given is None:
        return {}
    if os.path.exists(given):
        with open(given, encoding="utf-8") as file:
            return dict(json.load(file))
    return dict(json.loads(base64.urlsafe_b64decode(given)))


def _wrap_initialize(plain: Any) -> Any:
    """`deepspeed.initialize` that lays the settings of this launch over what it is given."""
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        told = signature.bind(*args, **kwargs).arguments
        config, model = _read_config(told), told.get("model")
        _seen["engines"] = _seen.get("engines", 0) + 1
        if not config or _seen["engines"] > 1:
            return plain(*args, **kwargs)  # a second engine (a teacher, a critic) stays as it is
        _see_model(model, told, config)
        overlay = dict(_options.get("deepspeed", {}))
        if _options.get("alter") and not _seen["owner"]:
            overlay |= split_differently(config, int(os.environ.get("WORLD_SIZE", "1")))
        _set_checkpointing(_with_switch(model), _options.get("activation_checkpointing"))
        told = {**told, "config": merge(config, overlay)}
        told.pop("config_params", None)
        holder = told.get("args")
        path = getattr(holder, "deepspeed_config", None)
        if path is not None:  # DeepSpeed takes one of the two
            holder.deepspeed_config = None  # type: ignore[union-attr]
        try:
            made = plain(**told)
        finally:
            if path is not None:
                holder.deepspeed_config = path  # type: ignore[union-attr]
        engine = made[0]
        _seen["micro_batch"] = engine.train_micro_batch_size_per_gpu()
        _seen["accumulation"] = engine.gradient_accumulation_steps()
        _seen["global_batch"] = engine.train_batch_size()
        _seen["pipeline"] = hasattr(engine, "num_stages")
        _seen["stages"] = getattr(engine, "num_stages", 1)
        return made

    return initialize


def _see_model(model: Any, told: Mapping[str, Any], config: dict[str, Any]) -> None:
    optimizer = told.get("optimizer")
    _seen["config"], _seen["owner"] = config, _owner()
    _seen["client_optimizer"] = type(optimizer).__name__ if optimizer is not None else ""
    _seen["training_data"] = told.get("training_data") is not None
    _see_switch(model)


def _set_checkpointing(model: Any, mode: str | None) -> None:
    """Turn a transformers model's own activation checkpointing on or off."""
    if model is None:
        return
    if mode == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif mode == "none" and getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()


def _patch_deepspeed(deepspeed: Any) -> None:
    """Lay settings over what the program gives, and count steps at accumulation boundaries only."""
    engine = deepspeed.DeepSpeedEngine
    if getattr(engine, "_joulefront", False):
        return
    engine._joulefront = True
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        # Building DeepSpeed's shared-memory collective for a CPU needs a compiler and half a
        # minute at the first start; gloo, which it falls back to, serves as well.
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.initialize = _wrap_initialize(deepspeed.initialize)
    from deepspeed.runtime.pipe.engine import PipelineEngine

    def stepping(owner: Any, name: str, ends_step: Any) -> None:
        plain = getattr(owner, name)

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts = ends_step(self) and _seen.setdefault("engine", id(self)) == id(self)
            # The torch optimizer inside would report the same step.
            _seen["inside_engine"] = True
            if counts and name == "step":
                _seen_phase("optimizer")
            result = plain(self, *args, **kwargs)
            _seen["inside_engine"] = False
            if counts:
                _count("engine")
            if name == "step":
                _seen_phase("data")
            return result

        setattr(owner, name, run)

    stepping(engine, "step", lambda self: self.is_gradient_accumulation_boundary())
    stepping(PipelineEngine, "train_batch", lambda self: True)
    plain_forward = engine.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "batch" not in _seen:
            _see_batch((kwargs, args))
        _seen_phase("forward")
        return plain_forward(self, *args, **kwargs)

    engine.forward = forward
    plain_backward = engine.backward

    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        _seen_phase("backward")
        return plain_backward(self, *args, **kwargs)

    engine.backward = functools.wraps(plain_backward)(backward)
    zero = _options.get("deepspeed", {}).get("zero_optimization", {})
    if zero.get("stage", 3) != 3:
        plain_init = deepspeed.zero.Init.__init__

        def without_partition(self: Any, *args: Any, **kwargs: Any) -> None:
            plain_init(self, *args, **{**kwargs, "enabled": False})

        deepspeed.zero.Init.__init__ = without_partition
    else:
        deepspeed.zero.Init.__init__ = _after_group(deepspeed, deepspeed.zero.Init.__init__)


def _after_group(deepspeed: Any, plain_init: Any) -> Any:
    """`deepspeed.zero.Init` that sees all ranks.

    It reads the batch sizes before it joins the process group, as if it were alone; transformers on
    a CPU has not joined DeepSpeed to the group by then, and the sizes are refused.
    """

    def with_group(self: Any, *args: Any, **kwargs: Any) -> None:
        if "WORLD_SIZE" in os.environ and not deepspeed.comm.is_initialized():
            deepspeed.init_distributed()
        plain_init(self, *args, **kwargs)

    return with_group


def _patch_torch(torch: Any) -> None:
    """Count the steps of the first torch optimizer, where no DeepSpeed engine counts them."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        if _seen.get("inside_engine") or _seen.get("engines"):
            return
        if _seen.setdefault("optimizer", id(optimizer)) == id(optimizer):
            if "owner" not in _seen:
                _seen["owner"] = _owner()
            _count("optimizer")

    register_optimizer_step_post_hook(stepped)


def _nothing(*args: Any, **kwargs: Any) -> bool:
    """Stands for what a probe leaves out."""
    return True


def _silence(torch: Any) -> None:
    """A probe writes no checkpoints: they cost time that a step does not, and disk."""
    plain_save = torch.save

    def save(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(file, str | os.PathLike):  # in memory: part of the program
            plain_save(value, file, *args, **kwargs)

    torch.save = save
    deepspeed = sys.modules.get("deepspeed")
    for name in ("save_checkpoint", "save_16bit_model", "save_fp16_model"):
        if deepspeed is not None and hasattr(deepspeed.DeepSpeedEngine, name):
            setattr(deepspeed.DeepSpeedEngine, name, _nothing)


_WRITERS: dict[str, dict[str, tuple[str, ...]]] = {
    "transformers.trainer": {"Trainer": ("_save_checkpoint", "save_model", "save_state")},
    "transformers.modeling_utils": {"PreTrainedModel": ("save_pretrained",)},
    "accelerate.accelerator": {"Accelerator": ("save_state", "save_model", "init_trackers", "log")},
    "lightning.pytorch.trainer.trainer": {"Trainer": ("save_checkpoint",)},
    "pytorch_lightning.trainer.trainer": {"Trainer": ("save_checkpoint",)},
    "lightning.fabric.fabric": {"Fabric": ("save",)},
}


def _silence_module(name: str, module: Any) -> None:
    """The same for a framework."""
    for owner, methods in _WRITERS.get(name, {}).items():
        for method in methods:
            if hasattr(getattr(module, owner, None), method):
                setattr(getattr(module, owner), method, _nothing)


# ---------------------------------------------------------------- frameworks that own the loop


class _WhenImported:
    """Calls `then(name, module)` for each of some modules: at once, or when it is imported."""

    def __init__(self, names: Iterable[str], then: Callable[[str, Any], None]) -> None:
        self._names, self._then = set(names), then
        for name in sorted(self._names & set(sys.modules)):
            self._names.discard(name)
            then(name, sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._names:
            return None
        self._names.discard(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            plain = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                plain(module)
                self._then(name, module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _own(**said: int) -> dict[str, int]:
    """Note what a framework is told of its batches, and give what it is to be told instead.

    `micro_batch` or `gradient_accumulation`, as far as this framework takes them by itself.
    """
    first = _seen.setdefault("owned", dict(said))
    return {name: (_options.get("owned") or {}).get(name, value) for name, value in first.items()}


def _turn_arguments(transformers: Any) -> None:
    """transformers' Trainer takes micro-batch and accumulation from its arguments."""
    plain = transformers.TrainingArguments.__post_init__

    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        told = _own(
            micro_batch=self.per_device_train_batch_size,
            gradient_accumulation=self.gradient_accumulation_steps,
        )
        self.per_device_train_batch_size = told["micro_batch"]
        self.gradient_accumulation_steps = told["gradient_accumulation"]
        if _options.get("quiet"):
            self.report_to, self.push_to_hub = [], False
        plain(self, *args, **kwargs)

    transformers.TrainingArguments.__post_init__ = post_init


def _turn_trainer(lightning: Any) -> None:
    """Lightning's Trainer takes the accumulation, and trains on the ranks that were started."""
    plain = lightning.Trainer.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        told = _own(gradient_accumulation=kwargs.get("accumulate_grad_batches", 1))
        kwargs["accumulate_grad_batches"] = told["gradient_accumulation"]
        if _options.get("quiet") and kwargs.get("logger") is not False:
            package = lightning.__name__.removesuffix(".trainer.trainer")
            kwargs["logger"] = importlib.import_module(f"{package}.loggers.logger").DummyLogger()
        plain(self, *args, **(kwargs | _ranks_started()))

    lightning.Trainer.__init__ = init


def _turn_fabric(fabric: Any) -> None:
    plain = fabric.Fabric.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **(kwargs | _ranks_started()))

    fabric.Fabric.__init__ = init
    check = fabric.Fabric._validate_launched

    def launched(self: Any) -> None:
        if not self._launched:  # a script for `fabric run`, which is no part of a probe
            self.launch()
        check(self)

    fabric.Fabric._validate_launched = launched


def _ranks_started() -> dict[str, Any]:
    """Lightning's words for the ranks that torchrun or the agent started."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {"devices": local, "num_nodes": int(os.environ.get("WORLD_SIZE", "1")) // local}


def _turn_accelerator(accelerate: Any) -> None:
    """Accelerate's accumulation is the script's own, where it trains under `accumulate`."""
    owner = accelerate.Accelerator
    plain_init, plain_accumulate = owner.__init__, owner.accumulate
    signature = inspect.signature(plain_init)

    @functools.wraps(plain_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        told = signature.bind(self, *args, **kwargs).arguments
        told.pop("self")
        # transformers' Trainer brings its own accumulation, which is turned there.
        if _owner() != "transformers" and told.get("gradient_accumulation_plugin") is None:
            said = told.get("gradient_accumulation_steps", 1)
            told |= {"gradient_accumulation_steps": _own_accelerate(said)}
        keywords = told.pop("kwargs", {})
        plain_init(self, **told, **keywords)

    def accumulate(self: Any, *models: Any) -> Any:
        if "accelerates" in _seen:
            _seen.setdefault("owned", {"gradient_accumulation": _seen["accelerates"]})
        return plain_accumulate(self, *models)

    owner.__init__, owner.accumulate = init, accumulate


def _own_accelerate(said: int) -> int:
    """What is in force instead of `said`; it is Accelerate's only once `accumulate` is called."""
    _seen.setdefault("accelerates", said)
    return int((_options.get("owned") or {}).get("gradient_accumulation", said))


_TURNED: dict[str, Callable[[Any], None]] = {
    "transformers.training_args": _turn_arguments,
    "lightning.pytorch.trainer.trainer": _turn_trainer,
    "pytorch_lightning.trainer.trainer": _turn_trainer,
    "lightning.fabric.fabric": _turn_fabric,
    "accelerate.accelerator": _turn_accelerator,
}


def _stand_around(name: str, module: Any) -> None:
    """A framework was imported: turn what it owns, and silence it in a probe."""
    if name in _TURNED:
        _TURNED[name](module)
    if _options.get("quiet"):
        _silence_module(name, module)


_PRIVATE = ("asked", "optimizer", "engine", "inside_engine", "watched", "accelerates")


def _facts() -> dict[str, Any]:
    """What the first step showed of how the program is built."""
    named = {k: v for k, v in _seen.items() if k not in _PRIVATE}
    asked = _seen.get("asked")
    return {**named, "reads": sorted(asked.read) if asked is not None else []}


def _prepare_program(options: Mapping[str, Any]) -> None:
    """Stand around the program that is about to start, as `options` say."""
    _options.clear()
    _options.update(options)
    _seen.clear()
    sys.modules["joulefront_hook"] = sys.modules[__name__]
    import torch

    _patch_torch(torch)
    if _link is not None or options.get("activation_checkpointing"):
        _seen["watched"] = _FirstForwards(torch)
    _WhenImported(_WRITERS.keys() | _TURNED.keys(), _stand_around)
    # A plain torch program may live without DeepSpeed.
    with contextlib.suppress(ModuleNotFoundError):
        import deepspeed

        _patch_deepspeed(deepspeed)
    if options.get("quiet"):
        _silence(torch)


def _run_program(argv: list[str]) -> None:
    """The program as `__main__`, as `python SCRIPT ...` or `python -m MODULE ...` would run it."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = argv
    path = os.path.abspath(argv[0])
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")


def run_rank(spec: dict[str, Any]) -> NoReturn:
    """Become a rank: environment, link, then the training program as `__main__`."""
    global _link
    _link = Link(spec["address"], int(spec["env"]["RANK"]))
    try:
        torch = sys.modules.get("torch")
        if torch is not None and "OMP_NUM_THREADS" in spec["env"]:
            # A forked rank read OMP_NUM_THREADS before it was set for it.
            torch.set_num_threads(int(spec["env"]["OMP_NUM_THREADS"]))
        _prepare_program(spec.get("options") or {})
        _run_program(list(spec["argv"]))
        _link.send("end")
    except SystemExit as stop:
        _link.send("end")
        _exit(stop.code if isinstance(stop.code, int) else int(stop.code is not None))
    except BaseException as error:
        traceback.print_exc()
        _link.fail(error)
        _exit(1)
    _exit(0)


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["rank"]:
        run_rank(json.loads(arguments[1]))
    elif arguments[:1] == ["run"] and len(arguments) > 1:
        with open(os.environ["JOULEFRONT_OPTIONS"], encoding="utf-8") as file:
            _prepare_program(json.load(file))
        mine = {name: os.environ[name.upper()] for name in ("rank", "local_rank", "world_size")}
        words = arguments[1:]
        for name, value in mine.items():
            words = [word.replace(f"{{{name}}}", value) for word in words]
        _run_program(words)
    else:
        print("hook.py rank SPEC | run SCRIPT ...", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
