"""Energy in a training's own log: transformers' Trainer, Lightning and Accelerate.

The metrics go wherever the framework logs (`report_to`, its loggers, its trackers). Their names say
what is charged and how it was found, such as `energy/gpu_J` or `energy/node_estimated_J`. They are
of the node on which the main process runs.
"""

from __future__ import annotations

import functools
import logging
import sys
from importlib import import_module
from typing import Any

from tuner.receipt.measure import open_node_meter
from tuner.search_spaces.errors import InputError
from tuner.workload.node.meters import Meter, MeterError, Reading

_LOG = logging.getLogger("tuner.callbacks")


class EnergyLog:
    """Energy of this node's devices since construction, as metrics for a log.

    Args:
        meter: by default the one that `tuner doctor` shows. InputError if none can be opened.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        self._meter = open_node_meter() if meter is None else meter
        info = self._meter.info
        self._name = f"energy/{info.scope}" + (f"_{info.mark}" if info.mark else "")
        self._opened = self._last = self._meter.read()
        self._last_step: int | None = None

    def metrics(self, step: int | None = None) -> dict[str, float]:
        """Return the joules since the start, and the power since the last call.

        With the number of the optimizer step also the joules a step since the last call with one.
        Empty if the meter fails.
        """
        try:
            now = self._meter.read()
        except MeterError as error:
            _LOG.warning("tuner: energy is not logged: %s", error)
            return {}
        found = {f"{self._name}_J": now.energy_J - self._opened.energy_J}
        if now.time_s > self._last.time_s:
            found[f"{self._name}_W"] = self._used_J(now) / (now.time_s - self._last.time_s)
        if step is not None and self._last_step is not None and step > self._last_step:
            found[f"{self._name}_J_per_step"] = self._used_J(now) / (step - self._last_step)
        self._last, self._last_step = now, step
        return found

    def _used_J(self, now: Reading) -> float:
        return now.energy_J - self._last.energy_J

    def close(self) -> None:
        """Release the meter."""
        self._meter.close()


def log_energy(owner: Any, meter: Meter | None = None) -> None:
    """Add energy to the logged values of a training; leave the rest as it is.

    Examples:
        ```text
        trainer = Trainer(...)  # of transformers, TRL or Lightning, or an Accelerator
        tuner.log_energy(trainer)
        trainer.train()
        ```

    Args:
        owner: a Trainer of transformers or derived from it, a Trainer of Lightning, or an
            Accelerator.
        meter: by default the one that `tuner doctor` shows.

    Raises:
        InputError: it is none of these, or no meter can be opened.
    """
    families = {kind.__module__.partition(".")[0] for kind in type(owner).__mro__}
    if families & {"lightning", "pytorch_lightning"}:
        owner.callbacks.append(_lightning_callback(meter))
    elif "accelerate" in families:
        _log_of_accelerator(owner, meter)
    elif "transformers" in families:
        _log_of_trainer(owner, meter)
    else:
        raise InputError(
            f"energy cannot be logged by a {type(owner).__name__}; give a Trainer of transformers "
            "or Lightning, or an Accelerator, or log tuner.EnergyLog().metrics(step) yourself"
        )


def _log_of_trainer(trainer: Any, meter: Meter | None) -> None:
    # A callback's metrics would come after those that report.
    if not trainer.is_world_process_zero():
        return
    energy, plain_log = EnergyLog(meter), trainer.log

    @functools.wraps(plain_log)
    def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        plain_log({**logs, **energy.metrics(trainer.state.global_step)}, *args, **kwargs)

    trainer.log = log


def _log_of_accelerator(accelerator: Any, meter: Meter | None) -> None:
    if not accelerator.is_main_process:
        return
    energy, plain_log = EnergyLog(meter), accelerator.log

    @functools.wraps(plain_log)
    def log(values: dict[str, Any], step: int | None = None, *args: Any, **kwargs: Any) -> None:
        plain_log({**values, **energy.metrics(step)}, step, *args, **kwargs)

    accelerator.log = log


def _lightning_callback(meter: Meter | None) -> Any:
    former = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
    base: Any = import_module("pytorch_lightning" if former else "lightning.pytorch").Callback

    class LogEnergy(base):
        def __init__(self) -> None:
            self._energy: EnergyLog | None = None
            self._step = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._step = trainer.global_step
            if trainer.is_global_zero and self._energy is None:
                self._energy = EnergyLog(meter)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *more: Any) -> None:
            step, every = trainer.global_step, max(1, trainer.log_every_n_steps)
            if self._energy is not None and step != self._step and step % every == 0:
                metrics = self._energy.metrics(step)
                pl_module.log_dict(metrics, on_step=True, on_epoch=False, rank_zero_only=True)
            self._step = step

    return LogEnergy()
