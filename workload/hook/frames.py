"""Patches of the frameworks that own a training loop: their batches, and no writing in a probe.

transformers, Lightning, Fabric and Accelerate are patched when the program imports them. Each gets
the micro-batch and accumulation that it takes by itself, and the program's own values are noted.
In a probe the methods that write checkpoints and logs do nothing.
"""

import contextlib
import gc
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from . import state, watching
from .steps import around

#: How deep the value of a checkpoint lies in what is saved, at most; number of copies of parameters
#: from which on data may be a model.
_DEPTH, _LEAST_COPIED = 3, 2


def own(**number: int) -> dict[str, int]:
    """Note a framework's own batch settings, and return those to use instead."""
    first = state.seen.setdefault("owned", dict(number))
    owned = state.options.get("owned") or {}
    return {name: owned.get(name, value) for name, value in first.items()}


def turn_arguments(transformers: Any) -> None:
    """Set micro-batch and accumulation in the arguments of transformers' Trainer."""

    @around(transformers.TrainingArguments, "__post_init__")
    def post_init(plain: Any, self: Any, /, *args: Any, **kwargs: Any) -> None:
        arguments = own(
            micro_batch=self.per_device_train_batch_size,
            gradient_accumulation=self.gradient_accumulation_steps,
        )
        self.per_device_train_batch_size = arguments["micro_batch"]
        self.gradient_accumulation_steps = arguments["gradient_accumulation"]
        if state.options.get("quiet"):
            self.report_to, self.push_to_hub = [], False
        plain(self, *args, **kwargs)


def _turn_trainer(lightning: Any) -> None:
    @around(lightning.Trainer, "__init__")
    def init(plain: Any, self: Any, /, *args: Any, **kwargs: Any) -> None:
        arguments = own(gradient_accumulation=kwargs.get("accumulate_grad_batches", 1))
        _require_own_ranks(kwargs.get("devices", "auto"))
        kwargs["accumulate_grad_batches"] = arguments["gradient_accumulation"]
        if state.options.get("quiet") and kwargs.get("logger") is not False:
            package = lightning.__name__.removesuffix(".trainer.trainer")
            kwargs["logger"] = importlib.import_module(f"{package}.loggers.logger").DummyLogger()
        plain(self, *args, **(kwargs | _ranks_started()))


def _turn_fabric(fabric: Any) -> None:
    @around(fabric.Fabric, "__init__")
    def init(plain: Any, self: Any, /, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **(kwargs | _ranks_started()))

    @around(fabric.Fabric, "_validate_launched")
    def launched(plain: Any, self: Any) -> None:
        if not self._launched:  # a script for `fabric run`, which is no part of a probe
            self.launch()
        plain(self)


def _require_own_ranks(devices: Any) -> None:
    if isinstance(devices, list | tuple):
        count = len(devices)
    elif devices in ("auto", -1, "-1", None):
        count = sys.modules["torch"].cuda.device_count()
    else:
        words = str(devices).split(",")  # "4" is a number of devices, "0,1" a list
        count = len(words) if len(words) > 1 else int(words[0]) if words[0].isdigit() else 1
    if state.attachment is not None:  # its own launching is part of the command
        return
    if state.options.get("inspect") and count > 1 and os.environ.get("WORLD_SIZE", "1") == "1":
        raise state.NotAsRequested(
            f"the script starts {count} ranks itself (Lightning's devices), in which no probe can "
            f"measure; start it with torchrun --nproc-per-node {count}"
        )


#: The phase, and what follows a compilation in a program that marks nothing: time of no phase.
COMPILATION, BETWEEN = "compilation", "boundary"


def mark_compilations(_: str, module: Any) -> None:
    """Mark compilations as a phase, given `torch._dynamo.callback`, if this torch has it.

    One runs inside the step that first needs it, and the agent keeps it out of windows.
    """
    handler = getattr(module, "callback_handler", None)
    if handler is None or not hasattr(handler, "register_start_callback"):
        return
    interrupted = [BETWEEN]

    def begins(_: Any) -> None:
        interrupted[0] = state.seen.get("phase", BETWEEN)
        state.mark(COMPILATION)

    def ends(_: Any) -> None:
        state.mark(interrupted[0])

    handler.register_start_callback(begins)
    handler.register_end_callback(ends)


def refuse_spawn() -> None:
    """Let a script that starts its own ranks end in a sentence: they would have no hook."""
    import torch.multiprocessing as processes

    def spawn(*args: Any, **kwargs: Any) -> Any:
        raise state.NotAsRequested(
            "the script starts its own ranks (torch.multiprocessing.spawn), in which no probe can "
            "measure; start them with torchrun"
        )

    processes.spawn = processes.start_processes = spawn


def _ranks_started() -> dict[str, Any]:
    if state.attachment is not None:
        return {}
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {"devices": local, "num_nodes": int(os.environ.get("WORLD_SIZE", "1")) // local}


def _turn_accelerator(accelerate: Any) -> None:
    signature = inspect.signature(accelerate.Accelerator.__init__)

    @around(accelerate.Accelerator, "__init__")
    def init(plain: Any, /, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(*args, **kwargs).arguments
        # transformers' Trainer brings its own accumulation, which is turned there.
        if (
            watching.owner() != "transformers"
            and arguments.get("gradient_accumulation_plugin") is None
        ):
            number = arguments.get("gradient_accumulation_steps", 1)
            state.seen.setdefault("accelerates", number)
            owned = state.options.get("owned") or {}
            arguments["gradient_accumulation_steps"] = int(
                owned.get("gradient_accumulation", number)
            )
        keywords = arguments.pop("kwargs", {})
        plain(**arguments, **keywords)

    @around(accelerate.Accelerator, "accumulate")
    def accumulate(plain: Any, /, *args: Any) -> Any:
        if "accelerates" in state.seen:  # its own only once it is called
            state.seen.setdefault("owned", {"gradient_accumulation": state.seen["accelerates"]})
        return plain(*args)


TURNED: dict[str, Callable[[Any], None]] = {
    "transformers.training_args": turn_arguments,
    "lightning.pytorch.trainer.trainer": _turn_trainer,
    "pytorch_lightning.trainer.trainer": _turn_trainer,
    "lightning.fabric.fabric": _turn_fabric,
    "accelerate.accelerator": _turn_accelerator,
}


def _nothing(*args: Any, **kwargs: Any) -> bool:
    return True


def silence(torch: Any) -> None:
    """Make a probe write no checkpoints, which take time that a step does not, and disk.

    What is saved before the first step to a file that does not exist yet is data that the program
    has prepared and will read again, in this start or in the user's own, unless it is a checkpoint:
    a model, an optimizer, the state of one, or copies of most of a model's parameters, however they
    are named, nested or cast.
    """

    @around(torch, "save")
    def save(plain: Any, /, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        # Its arguments have torch's names, by which programs call it.
        in_memory = not isinstance(f, str | os.PathLike)  # part of the program
        steps = state.link.steps if state.link is not None else 0
        if in_memory or not (steps or os.path.lexists(f) or _is_checkpoint(torch, obj)):
            plain(obj, f, *args, **kwargs)

    deepspeed = sys.modules.get("deepspeed")
    for name in ("save_checkpoint", "save_16bit_model", "save_fp16_model"):
        if deepspeed is not None and hasattr(deepspeed.DeepSpeedEngine, name):
            setattr(deepspeed.DeepSpeedEngine, name, _nothing)


def _is_checkpoint(torch: Any, value: Any) -> bool:
    # A model or an optimizer, the state of one, or a copy of what a model has learned. Data may be
    # of any kind, such as arrays that torch cannot take, and must not end the program.
    with contextlib.suppress(Exception):
        return _holds_a_model(torch, value)
    return False


def _holds_a_model(torch: Any, value: Any) -> bool:
    tensors: dict[tuple[int, ...], list[Any]] = {}
    for part in _parts(value):
        if isinstance(part, torch.nn.Module | torch.optim.Optimizer):
            return True
        if "_metadata" in getattr(part, "__dict__", ()):  # torch marks the state of a model by it
            return True
        if isinstance(part, Mapping) and {"state", "param_groups"} <= part.keys():
            return True
        with contextlib.suppress(ValueError, TypeError, RuntimeError):  # no plain one
            tensor = torch.from_numpy(part) if _is_array(part) else part
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensors.setdefault(tuple(tensor.shape), []).append(tensor.detach())
    return _copy_a_model(torch, tensors)


def _parts(value: Any, depth: int = 0) -> Iterator[Any]:
    # The value and what it holds; nothing of what is nested deeper than a checkpoint is.
    yield value
    if isinstance(value, Mapping):
        held: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple):
        held = value
    else:
        return
    if depth < _DEPTH:
        for each in held:
            yield from _parts(each, depth + 1)


def _copy_a_model(torch: Any, tensors: Mapping[tuple[int, ...], list[Any]]) -> bool:
    # Return True if tensors, by their shapes, hold copies of most of what some model has learned:
    # of its parameters that are not one number throughout, as those of a norm are at first. At
    # least two, since data may be a table that an embedding is made of.
    if sum(map(len, tensors.values())) < _LEAST_COPIED:
        return False
    copied: dict[int, bool | None] = {}  # by identity of a parameter; None: one number throughout
    for module in gc.get_objects():
        if not issubclass(type(module), torch.nn.Module):  # isinstance() would ask lazy objects
            continue
        found = []
        for parameter in module.parameters():
            if id(parameter) not in copied:
                copied[id(parameter)] = _is_copied(torch, parameter, tensors)
            found.append(copied[id(parameter)])
        learned = len(found) - found.count(None)
        if found.count(True) >= max(_LEAST_COPIED, learned / 2):
            return True
    return False


def _is_array(value: Any) -> bool:
    return type(value).__name__ == "ndarray" and value.dtype.kind == "f"


def _is_copied(
    torch: Any, parameter: Any, tensors: Mapping[tuple[int, ...], list[Any]]
) -> bool | None:
    try:
        plain = parameter.detach()
        if bool((plain == plain.flatten()[0]).all()):
            return None
        # A copy may be of another type and on another device.
        return any(
            torch.equal(plain.to(device=each.device, dtype=each.dtype), each)
            for each in tensors.get(tuple(plain.shape), ())
        )
    except (ValueError, RuntimeError, IndexError, NotImplementedError):  # without values, or here
        return False


WRITERS: dict[str, dict[str, tuple[str, ...]]] = {
    "transformers.trainer": {"Trainer": ("_save_checkpoint", "save_model", "save_state")},
    "transformers.modeling_utils": {"PreTrainedModel": ("save_pretrained",)},
    "accelerate.accelerator": {"Accelerator": ("save_state", "save_model", "init_trackers", "log")},
    "lightning.pytorch.trainer.trainer": {"Trainer": ("save_checkpoint",)},
    "pytorch_lightning.trainer.trainer": {"Trainer": ("save_checkpoint",)},
    "lightning.pytorch.cli": {"SaveConfigCallback": ("setup",)},  # into the logger's folder
    "pytorch_lightning.cli": {"SaveConfigCallback": ("setup",)},
    "lightning.fabric.fabric": {"Fabric": ("save",)},
}


#: Modules that write TensorBoard's events through a class of this name.
EVENTS = {
    "torch.utils.tensorboard.writer": "EventFileWriter",
    "tensorboardX.writer": "EventFileWriter",
}
#: Modules for which `stand_around` is called.
NAMES = frozenset({*TURNED, *WRITERS, *EVENTS})


class NoEvents:
    """Writer of TensorBoard's events that writes none, so that a probe is no run of the user's.

    It makes its folder, for programs write other files there. What is empty at the end goes again.
    """

    def __init__(self, folder: Any, *_: Any, **__: Any) -> None:
        self._folder = os.fspath(folder)
        if "://" not in self._folder:  # on no file system of this machine
            state.made_folders += _missing(self._folder)
            os.makedirs(self._folder, exist_ok=True)

    def get_logdir(self) -> str:
        """Return its folder."""
        return self._folder

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return _nothing


def _missing(folder: str) -> list[str]:
    # The folder and those above it that do not exist.
    found = []
    path = os.path.abspath(folder)
    while not os.path.lexists(path):
        found.append(path)
        path = os.path.dirname(path)
    return found


def stand_around(name: str, module: Any) -> None:
    """Patch a framework that was just imported, and silence it in a probe."""
    if name in EVENTS and state.options.get("quiet"):
        setattr(module, EVENTS[name], NoEvents)
    if name in TURNED:
        TURNED[name](module)
    for owner, methods in WRITERS.get(name, {}).items() if state.options.get("quiet") else ():
        for method in methods:
            if hasattr(getattr(module, owner, None), method):
                setattr(getattr(module, owner), method, _nothing)
