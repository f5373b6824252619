"""The one file of ours inside a training process: standard library only, a script and a module.

It stands between the node agent and the training program. As a *fork server* (`hook.py serve FD`)
it imports the heavy frameworks once, before anything touches a device, and forks each rank from
there, so that only the first probe pays for them. Inside a *rank* it counts whole optimizer steps,
tells the agent of each, and halts at the boundaries the agent names: it finishes the device's work,
says "boundary", and goes on when told. The training program itself need know nothing of it.

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
import ctypes
import fcntl
import functools
import importlib
import inspect
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

# Ordinary exceptions that mean "no memory left", by name: torch cannot be imported here.
_OOM_TYPES = {"OutOfMemoryError", "MemoryError"}
_PEER_WORDS = ("gloo", "nccl", "closed by peer", "connection reset", "broken pipe")
_OOM_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory")


# ---------------------------------------------------------------- inside a rank


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
        if self.steps == 1:
            _silence_frameworks()
            if _options.get("inspect"):
                self.send("facts " + json.dumps(_facts(), default=str))
        if self.steps < self._until:
            self.send(f"step {self.steps} {time.monotonic():.7f}")
            return
        _finish_device_work()
        self.send(f"at {self.steps} {time.monotonic():.7f}")
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
        elif isinstance(error, WrongBatch) or (self.starting and _raised_by_framework(error)):
            kind = "refused"
        message = f"{type(error).__name__}: {text.strip().splitlines()[0] if text.strip() else ''}"
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
    """Mark that a part of the step (data, forward, backward, optimizer, ...) begins now."""
    if _link is not None:
        _link.send(f"phase {name} {time.monotonic():.7f}")


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


class WrongBatch(ValueError):
    """The program's batches are not those of the configuration: it would measure another one."""


def _count(source: str) -> None:
    """Count a step. The first source that reports one is the one that counts: the DeepSpeed engine,
    the first torch optimizer, or the program itself, which may all report the same step."""
    if _seen.setdefault("counts", source) == source and _link is not None:
        _link.step_done()


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


def _owner() -> str:
    """The framework that calls, where it is not the program itself: it owns the batches then."""
    frame = inspect.currentframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "")).split(".")[0]
        if name in ("transformers", "accelerate", "lightning", "pytorch_lightning"):
            return name
        frame = frame.f_back
    return ""


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
    first = next((t for t in _tensors(inputs) if len(t.shape) > 0), None)
    _seen["batch"] = list(first.shape) if first is not None else []
    _seen["tokens"] = first is not None and str(first.dtype) in ("torch.int64", "torch.int32")
    wanted = _options.get("micro_batch")
    if wanted and _seen["batch"] and _seen["batch"][0] != wanted:
        raise WrongBatch(
            f"the program's batches hold {_seen['batch'][0]} samples where micro_batch is {wanted}"
        )


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
        _set_checkpointing(model, _options.get("activation_checkpointing"))
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
    able = getattr(model, "supports_gradient_checkpointing", False)
    _seen["can_checkpoint"] = bool(able) and hasattr(model, "gradient_checkpointing_enable")
    _seen["checkpoints"] = bool(getattr(model, "is_gradient_checkpointing", False))
    if hasattr(getattr(model, "config", None), "to_dict"):
        _seen["model"] = model.config.to_dict()


def _set_checkpointing(model: Any, mode: str | None) -> None:
    """Turn a transformers model's own activation checkpointing on or off."""
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
            result = plain(self, *args, **kwargs)
            _seen["inside_engine"] = False
            if counts:
                _count("engine")
            return result

        setattr(owner, name, run)

    stepping(engine, "step", lambda self: self.is_gradient_accumulation_boundary())
    stepping(PipelineEngine, "train_batch", lambda self: True)
    plain_forward = engine.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "batch" not in _seen:
            _see_batch((kwargs, args))
        return plain_forward(self, *args, **kwargs)

    engine.forward = forward
    zero = _options.get("deepspeed", {}).get("zero_optimization", {})
    if zero.get("stage", 3) != 3:
        plain_init = deepspeed.zero.Init.__init__

        def without_partition(self: Any, *args: Any, **kwargs: Any) -> None:
            plain_init(self, *args, **{**kwargs, "enabled": False})

        deepspeed.zero.Init.__init__ = without_partition


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


_WRITERS = (
    ("transformers.trainer", "Trainer", ("_save_checkpoint", "save_model", "save_state")),
    ("transformers.modeling_utils", "PreTrainedModel", ("save_pretrained",)),
    ("accelerate.accelerator", "Accelerator", ("save_state", "save_model")),
    ("lightning.pytorch.trainer.trainer", "Trainer", ("save_checkpoint",)),
    ("pytorch_lightning.trainer.trainer", "Trainer", ("save_checkpoint",)),
)


def _silence_frameworks() -> None:
    """The same for frameworks that the program imported, at the first step: none saves earlier."""
    if not _options.get("quiet"):
        return
    for module, name, methods in _WRITERS:
        writer = getattr(sys.modules.get(module), name, None)
        for method in methods:
            if writer is not None and hasattr(writer, method):
                setattr(writer, method, _nothing)


_PRIVATE = ("asked", "optimizer", "engine", "inside_engine")


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


def _run_rank(spec: dict[str, Any]) -> NoReturn:
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


# ---------------------------------------------------------------- the fork server


def _die_with_parent() -> None:
    """Linux: be killed when the parent ends, however it ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _become_rank(spec: dict[str, Any], group: int) -> NoReturn:
    """In the forked child: leave everything of the server behind."""
    os.setpgid(0, group)
    _die_with_parent()
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(spec["env"])
    os.chdir(spec["cwd"])
    if spec.get("cpus"):
        os.sched_setaffinity(0, spec["cpus"])
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if memory runs out, the kernel ends a rank rather than the agent
    except OSError:
        pass
    if spec.get("fresh"):
        os.execve(
            sys.executable,
            [sys.executable, "-P", os.path.abspath(__file__), "rank", json.dumps(spec)],
            dict(spec["env"]),
        )
    _run_rank(spec)


def _prepare(request: dict[str, Any]) -> dict[str, Any]:
    """Import modules and load DeepSpeed ops, so that ranks forked later find them done."""
    began = time.monotonic()
    for name in request.get("imports", ()):
        importlib.import_module(name)
    for name in request.get("optional", ()):
        # In another release of the framework it may be elsewhere; the rank then imports it itself.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in request.get("ops", ()):
        _load_op(name)
    torch = sys.modules.get("torch")
    used = torch is not None and torch.cuda.is_initialized()
    return {"prepared_s": time.monotonic() - began, "device_touched": bool(used)}


def _load_op(name: str) -> None:
    """Build and load one DeepSpeed op, alone on this machine.

    A process killed while it builds leaves a lock behind that every later build waits on for ever.
    Under our own lock no other build of ours is alive, so a lock that is found is such a relic.
    """
    from deepspeed.ops import op_builder

    folder = os.environ["TORCH_EXTENSIONS_DIR"]
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "joulefront.lock"), "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for parent, _, files in os.walk(folder):
            if "lock" in files:
                os.unlink(os.path.join(parent, "lock"))
        builder = getattr(op_builder, name)()
        builder.load(verbose=False)
    # DeepSpeed's CPU Adam asks what processor this is each time it is made, which takes a second of
    # two processes' time. The answer does not change: forked ranks inherit it.
    with contextlib.suppress(ImportError):
        cpuinfo = importlib.import_module("cpuinfo")
        known = cpuinfo.get_cpu_info()
        cpuinfo.get_cpu_info = lambda: dict(known)  # type: ignore[attr-defined]


class ForkServer:
    """Serves one agent over one socket until the socket closes; then nothing of it is left."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""
        self._groups: dict[int, list[int]] = {}  # process group -> living pids

    def _send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def serve(self) -> None:
        # Not tied to the parent by PR_SET_PDEATHSIG: that watches the *thread* that started us,
        # which may be a short-lived one. The closing socket says that the agent is gone.
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's to handle
        try:
            while True:
                watched: list[Any] = [self._connection, wake_read]
                ready, _, _ = select.select(watched, [], [])
                if wake_read in ready:
                    os.read(wake_read, 4096)
                    self._reap()
                if self._connection in ready:
                    chunk = self._connection.recv(65536)
                    if not chunk:
                        return
                    self._buffer += chunk
                    while b"\n" in self._buffer:
                        line, self._buffer = self._buffer.split(b"\n", 1)
                        self._handle(json.loads(line))
        finally:
            for group in self._groups:
                _kill_group(group)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._send({"exit": pid, "code": os.waitstatus_to_exitcode(status)})

    def _handle(self, request: dict[str, Any]) -> None:
        try:
            if request["op"] == "prepare":
                self._send(_prepare(request))
            elif request["op"] == "spawn":
                self._send({"spawned": self._spawn(request["ranks"])})
        except Exception as error:
            self._send(
                {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            )

    def _spawn(self, specs: list[dict[str, Any]]) -> dict[str, Any]:
        group, pids = 0, []
        for spec in specs:
            pid = os.fork()
            if pid == 0:
                try:
                    _become_rank(spec, group)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(70)
            group = group or pid
            with contextlib.suppress(OSError):  # the child did it first, or is gone
                os.setpgid(pid, group)
            pids.append(pid)
        self._groups[group] = pids
        return {"group": group, "pids": pids}


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["serve"]:
        ForkServer(socket.socket(fileno=int(arguments[1]))).serve()
    elif arguments[:1] == ["rank"]:
        _run_rank(json.loads(arguments[1]))
    elif arguments[:1] == ["run"] and len(arguments) > 1:
        with open(os.environ["JOULEFRONT_OPTIONS"], encoding="utf-8") as file:
            _prepare_program(json.load(file))
        mine = {name: os.environ[name.upper()] for name in ("rank", "local_rank", "world_size")}
        words = arguments[1:]
        for name, value in mine.items():
            words = [word.replace(f"{{{name}}}", value) for word in words]
        _run_program(words)
    else:
        print("hook.py serve FD | rank SPEC | run SCRIPT ...", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
