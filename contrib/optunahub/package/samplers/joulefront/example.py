"""Find the front of energy and time of a simulated job: batch sizes by power limits."""

from __future__ import annotations

from pathlib import Path

import optuna
import optunahub


LAUNCH = {"batch_size": [16, 32, 64, 128, 256]}
LIVE = {"power_limit_W": [100, 150, 200, 250]}


def measure(batch_size: int, power_limit_W: int) -> tuple[float, float]:
    """Return joules and seconds of one epoch."""
    power_W = min(power_limit_W, 60 + 35 * batch_size**0.3)
    time_s = (80 + 2000 / batch_size + batch_size / 10) * (250 / power_W) ** 0.6
    return power_W * time_s, time_s


if __name__ == "__main__":
    registry = Path(__file__).resolve().parents[2]
    module = optunahub.load_local_module("samplers/joulefront", registry_root=str(registry))
    sampler = module.LaunchAwareSampler(LAUNCH, LIVE, seed=0)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
    for _ in range(10):
        trial = study.ask(sampler.distributions())
        study.tell(trial, measure(**trial.params))
    for best in study.best_trials:
        print(best.params, best.values)
