"""Light mode of the hook: counts of a program that is measured and otherwise left alone.

`entry/sitecustomize.py` loads this file, by itself and under a name of its own, where
JOULEFRONT_ATTACH names a folder. It changes nothing that the program computes, waits for nothing
and asks the device nothing. A process that takes an optimizer step writes a small file in the
folder and updates the numbers in it after each step (`HEAD`). If that fails, it trains uncounted.

The first of these that steps is counted: a DeepSpeed engine, a torch optimizer (and another one
once that is gone), the program by `joulefront_hook.step()`.

The command's Python may be older than ours: this file runs on 3.8.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import struct
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

#: Beginning of a file: steps, times of the end of the first and of the last one (CLOCK_MONOTONIC),
#: and samples drawn at the latest and at the first step, NaN if unknown. A line of JSON follows.
HEAD = struct.Struct("=5d")
_UNKNOWN = float("nan")


class DrawnSamples:
    """Samples that an iterator of a loader drew since the last step; kept with the iterator."""

    def __init__(self) -> None:
        self.samples, self.trains = 0.0, False

    def add(self, samples: float) -> None:
        """Add those of a batch; NaN if their number is unknown."""
        self.samples += samples

    def taken(self) -> float:
        """Return them for a step, and begin again."""
        samples, self.samples = self.samples, 0.0
        self.trains = self.trains or samples != 0
        return samples

    def end(self) -> None:
        """Forget them if the iterator ends before any step came: it was one of an evaluation."""
        if not self.trains:
            self.samples = 0.0


class Tally:
    """Counter of the optimizer steps and samples of this process."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._owner, self._file, self._inode = 0, -1, 0
        self._source, self._inside = "", 0
        self._optimizer: weakref.ref[Any] | None = None
        self._begin()

    def _begin(self) -> None:
        self._steps, self._first_s, self._first_samples = 0, 0.0, _UNKNOWN
        self._samples = 0.0
        self._drawn: list[DrawnSamples] = []

    def drew(self, drawn: DrawnSamples, samples: float) -> None:
        """Note a batch of an iterator; NaN if the number of its samples is unknown."""
        if not drawn.samples:
            self._drawn.append(drawn)
        drawn.add(samples)

    def _samples_of_step(self) -> float:
        total = sum(drawn.taken() for drawn in self._drawn)
        self._drawn.clear()
        return total

    def stepped(self, optimizer: Any) -> None:
        """Count a step of a torch optimizer, unless an engine takes it or another one counts."""
        if self._inside:
            return
        counting = self._optimizer() if self._optimizer is not None else None
        if counting is None:
            self._optimizer = weakref.ref(optimizer)
        elif counting is not optimizer:
            return
        self.count("optimizer")

    def engine_step(self, plain: Callable[..., Any], counts: bool, *args: Any, **named: Any) -> Any:
        """Run a step of an engine and count it if it `counts`."""
        self._inside += 1
        try:
            result = plain(*args, **named)
        finally:
            self._inside -= 1
        if counts and not self._inside:
            self.count("engine")
        return result

    def count(self, source: str) -> None:
        """Count a step, from the first source that reports one."""
        now_s = time.monotonic()
        self._source = self._source or source
        if source != self._source:
            return
        try:
            if self._owner != os.getpid():
                if self._owner:  # a fork counts its own steps
                    self._begin()
                self._open(now_s)
            if self._file < 0:
                return
            self._steps += 1
            self._samples += self._samples_of_step()
            samples = self._samples or _UNKNOWN
            if self._steps == 1:
                self._first_s, self._first_samples = now_s, samples
            if os.fstat(self._file).st_ino != self._inode:  # the program has closed it
                self._file = -1
                return
            head = HEAD.pack(self._steps, self._first_s, now_s, samples, self._first_samples)
            os.pwrite(self._file, head, 0)
        except Exception:  # what cannot be counted is no reason to stop a training
            self._file = -1

    def _open(self, now_s: float) -> None:
        import json

        self._owner, self._file = os.getpid(), -1
        rank, world = place()
        facts = {
            "rank": rank,
            "world": world,
            "pid": self._owner,
            "parent": os.getppid(),
            "words": list(getattr(sys, "orig_argv", [sys.executable, *sys.argv])),
        }
        path = os.path.join(self._folder, f"{self._owner}-{now_s:.6f}")
        text = HEAD.pack(0, now_s, now_s, _UNKNOWN, _UNKNOWN) + json.dumps(facts).encode()
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(file, text + b"\n")
        self._file, self._inode = file, os.fstat(file).st_ino


def place() -> tuple[int, int]:
    """Return rank and world of this process: torch.distributed's, Horovod's, or one alone."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        return horovod.rank(), horovod.size()
    return 0, 1


def _count_optimizers(tally: Tally, module: Any) -> None:
    module.register_optimizer_step_post_hook(lambda optimizer, *_: tally.stepped(optimizer))


def _wrap(owner: Any, name: str, function: Callable[..., Any]) -> None:
    plain = getattr(owner, name)

    @functools.wraps(plain)  # some read the signature
    def run(*args: Any, **named: Any) -> Any:
        return function(plain, *args, **named)

    setattr(owner, name, run)


def _count_engine(tally: Tally, module: Any) -> None:
    def step(plain: Any, engine: Any, *args: Any, **named: Any) -> Any:
        counts = bool(engine.is_gradient_accumulation_boundary())
        return tally.engine_step(plain, counts, engine, *args, **named)

    _wrap(module.DeepSpeedEngine, "step", step)


def _count_pipeline(tally: Tally, module: Any) -> None:
    def train_batch(plain: Any, *args: Any, **named: Any) -> Any:
        return tally.engine_step(plain, True, *args, **named)

    _wrap(module.PipelineEngine, "train_batch", train_batch)


def _count_samples(tally: Tally, module: Any) -> None:
    kind, torch = module._BaseDataLoaderIter, sys.modules["torch"]

    def next_index(plain: Any, iterator: Any) -> Any:
        index = plain(iterator)
        # With workers, indices are handed out ahead of their batches, in the same order.
        samples = len(index) if hasattr(index, "__len__") else _UNKNOWN
        iterator.__dict__.setdefault("_joulefront_sizes", deque()).append(samples)
        return index

    def reset(plain: Any, iterator: Any, *args: Any, **named: Any) -> Any:
        iterator.__dict__["_joulefront_sizes"] = deque()
        return plain(iterator, *args, **named)

    def next_batch(plain: Any, iterator: Any) -> Any:
        drawn = iterator.__dict__.setdefault("_joulefront_drawn", DrawnSamples())
        try:
            batch = plain(iterator)
        except StopIteration:
            drawn.end()
            raise
        sizes = iterator.__dict__.get("_joulefront_sizes")
        if sizes:
            samples = sizes.popleft()
            if torch.is_grad_enabled():  # else it is an evaluation
                tally.drew(drawn, samples)
        return batch

    _wrap(kind, "_next_index", next_index)
    _wrap(kind, "_reset", reset)
    _wrap(kind, "__next__", next_batch)


def _count_program(tally: Tally, module: Any) -> None:
    module.step = lambda: tally.count("program")


_WATCHED = {
    "torch.optim.optimizer": _count_optimizers,
    "torch.utils.data.dataloader": _count_samples,
    "deepspeed.runtime.engine": _count_engine,
    "deepspeed.runtime.pipe.engine": _count_pipeline,
    "joulefront_hook": _count_program,
}


class _Imports:
    # Calls a function of `_WATCHED` once its module is executed.

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._finding: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find the spec of a watched module, with its function called after its execution."""
        if name not in _WATCHED or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = _spec_of(name)
        finally:
            self._finding.discard(name)
        if spec is None or spec.loader is None:
            return spec
        plain, then = spec.loader.exec_module, _WATCHED[name]

        def exec_module(module: Any) -> None:
            plain(module)
            try:
                then(self._tally, module)
            except Exception:  # another release of it: the program runs all the same, uncounted
                return

        spec.loader.exec_module = exec_module
        return spec


def _spec_of(name: str) -> Any:
    if name != "joulefront_hook":
        return importlib.util.find_spec(name)
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__init__.py")
    return importlib.util.spec_from_file_location(name, here)


def begin(folder: str) -> None:
    """Count the steps of this process from here on, in a file in `folder`."""
    sys.meta_path.insert(0, _Imports(Tally(folder)))
