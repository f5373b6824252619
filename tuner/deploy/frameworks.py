"""Tuning by frameworks that own the training loop; their own loggers get step time, power, saving.

A program with a loop of its own, on Accelerate too, logs `TunedBlock.metrics` itself.
"""

from __future__ import annotations

import functools
import sys
from contextlib import ExitStack
from importlib import import_module
from typing import Any, Unpack

from tuner.online.agent import TunedBlock, tuning
from tuner.online.request import TuningOptions


def tune_trainer(trainer: Any, **options: Unpack[TuningOptions]) -> None:
    """Let transformers' Trainer, or one derived from it, tune its training in `train()`.

    What it logs, to W&B, MLflow or TensorBoard, gets `TunedBlock.metrics`. A callback would not be
    told of a training that fails, nor come before those that report. The options are those of
    `tuner.tuning`.
    """
    plain_train, plain_log = trainer.train, trainer.log
    running: list[TunedBlock] = []

    @functools.wraps(plain_train)
    def train(*args: Any, **kwargs: Any) -> Any:
        with tuning(**options) as run:
            running[:] = [run]
            try:
                return plain_train(*args, **kwargs)
            finally:
                running.clear()

    @functools.wraps(plain_log)
    def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        metrics = running[0].metrics if running else {}
        plain_log({**logs, **metrics}, *args, **kwargs)

    trainer.train, trainer.log = train, log


def lightning_callback(**options: Unpack[TuningOptions]) -> Any:
    """Return a callback for Lightning's Trainer that tunes each `fit()`.

    `TunedBlock.metrics` are logged by the module; the callback's `run` is the `TunedBlock`. The
    options are those of `tuner.tuning`.
    """
    former = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
    base: Any = import_module("pytorch_lightning" if former else "lightning.pytorch").Callback

    class TuneWhileTraining(base):
        run: TunedBlock | None = None

        def __init__(self) -> None:
            self._open = ExitStack()

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.run = self._open.enter_context(tuning(**options))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *more: Any) -> None:
            if self.run is not None and self.run.metrics:
                pl_module.log_dict(self.run.metrics, rank_zero_only=True)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self._open.close()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._open.__exit__(type(exception), exception, exception.__traceback__)

    return TuneWhileTraining()
