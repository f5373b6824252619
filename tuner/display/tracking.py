"""Progress of a study as metrics in an experiment tracker, while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.study.callbacks import Progress


def metrics_of(event: Progress) -> dict[str, float]:
    """Return the metrics of a probe that ended, units in their names; empty for other events.

    Spent energy, number of probes, size of the front and its ends, and of the probe's windows the
    least energy and time of a step.
    """
    record = event.record
    if event.kind != "finished" or record is None:
        return {}
    metrics = {
        "spent_kJ": event.spent_kJ,
        "probes": float(event.probes),
        "front_points": float(len(event.front)),
        "failed": float(not record.ok),
    }
    if event.front:
        energies = [point.energy_to_solution_kJ for point in event.front]
        metrics["least_energy_to_solution_kJ"] = min(energies)
        metrics["least_time_to_solution_s"] = event.front[0].time_to_solution_s
    if record.measurements:
        metrics["energy_per_step_J"] = min(m.energy_per_step_J for m in record.measurements)
        metrics["step_time_s"] = min(m.step_time_s for m in record.measurements)
        metrics["power_W"] = max(m.power_W for m in record.measurements)
    return metrics


def track(tracker: Any, *, prefix: str = "joulefront/") -> Callable[[Progress], None]:
    """Return a receiver of progress events that logs each probe, for `on_progress=`.

    Args:
        tracker: a W&B run (`wandb.init()`), the module `mlflow` with an active run or any object
            with its `log_metrics`, or a TensorBoard `SummaryWriter`.

    Raises:
        InputError: the tracker is none of these.
    """
    send = _sender(tracker)

    def receive(event: Progress) -> None:
        metrics = metrics_of(event)
        if metrics:
            send({prefix + name: value for name, value in metrics.items()}, event.probes)

    return receive


def _sender(tracker: Any) -> Callable[[Mapping[str, float], int], None]:
    """Return a function that logs metrics at a step."""
    if callable(getattr(tracker, "log_metrics", None)):  # MLflow
        return lambda metrics, step: tracker.log_metrics(dict(metrics), step=step)
    if callable(getattr(tracker, "add_scalar", None)):  # TensorBoard

        def add(metrics: Mapping[str, float], step: int) -> None:
            for name, value in metrics.items():
                tracker.add_scalar(name, value, step)
            tracker.flush()

        return add
    if callable(getattr(tracker, "log", None)):  # W&B, which keeps an open step back by default
        return lambda metrics, step: tracker.log(dict(metrics), step=step, commit=True)
    raise InputError(
        f"cannot log to {type(tracker).__name__}; give a W&B run, the module mlflow, or a "
        "TensorBoard SummaryWriter"
    )
