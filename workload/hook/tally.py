"""Light mode of the hook: counts of a program that is measured and otherwise left alone.

`entry/sitecustomize.py` loads this file and `steps`, under names of their own, where
JOULEFRONT_ATTACH names a folder. It waits for nothing and asks the device nothing. A process that
takes an optimizer step writes a small file in the folder and updates the numbers in it after each
step (`HEAD`). If that fails, it trains uncounted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import struct
import sys
import time
from typing import Any

from .steps import ImportHook, LoaderWatch, StepCounter, around, count_engine, place

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
    """File of the optimizer steps and samples of this process."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._owner, self._file, self._inode = 0, -1, 0
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

    def step_done(self) -> None:
        """Write that a step has ended."""
        now_s = time.monotonic()
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


def _count_samples(tally: Tally, module: Any) -> None:
    torch = sys.modules["torch"]

    def drawn_by(iterator: Any) -> DrawnSamples:
        drawn: DrawnSamples = iterator.__dict__.setdefault("_joulefront_drawn", DrawnSamples())
        return drawn

    def fetched(iterator: Any, index: Any, batch: Any) -> None:
        if torch.is_grad_enabled():  # else it is an evaluation
            samples = len(index) if hasattr(index, "__len__") else _UNKNOWN
            tally.drew(drawn_by(iterator), samples)

    def ended(iterator: Any) -> None:
        drawn_by(iterator).end()

    LoaderWatch(module._BaseDataLoaderIter, around, fetched=fetched, ended=ended)


def _count_optimizers(counter: StepCounter, module: Any) -> None:
    def stepped(optimizer: Any, *_: Any) -> None:
        if counter.takes(optimizer):
            counter.count("optimizer")

    module.register_optimizer_step_post_hook(stepped)


_PROGRAM = "joulefront_hook"
_WATCHED = (
    *("torch.optim.optimizer", "torch.utils.data.dataloader"),
    *("deepspeed.runtime.engine", "deepspeed.runtime.pipe.engine", _PROGRAM),
)


def _spec_of(name: str) -> Any:
    if name != _PROGRAM:
        return importlib.util.find_spec(name)
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__init__.py")
    return importlib.util.spec_from_file_location(name, here)


def begin(folder: str) -> None:
    """Count the steps of this process from here on, in a file in `folder`."""
    tally = Tally(folder)
    counter = StepCounter(tally.step_done)

    def imported(name: str, module: Any) -> None:
        # Another release of it may lack what is patched: the program runs all the same, uncounted.
        with contextlib.suppress(Exception):
            if name == "torch.optim.optimizer":
                _count_optimizers(counter, module)
            elif name == "torch.utils.data.dataloader":
                _count_samples(tally, module)
            elif name == "deepspeed.runtime.engine":
                count_engine(
                    counter,
                    module.DeepSpeedEngine,
                    "step",
                    lambda engine: engine.is_gradient_accumulation_boundary(),
                )
            elif name == "deepspeed.runtime.pipe.engine":
                count_engine(counter, module.PipelineEngine, "train_batch", lambda _: True)
            else:
                module.step = lambda: counter.count("program")

    ImportHook(_WATCHED, imported, _spec_of)
