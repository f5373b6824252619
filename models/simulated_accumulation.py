"""Simulated windows of steps of few micro-batches, by the analytic model of a smaller batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from tuner.models.analytic.model import AnalyticModel
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.accumulation import accumulation_plan, steps_take_too_long
from tuner.workload.measure.accumulated import LEAST_STEPS, SHARES
from tuner.workload.measure.accumulation_fit import AccumulationPoint, fit_accumulation
from tuner.workload.probe import Measurement, WindowPolicy


@dataclass(frozen=True)
class ShortSteps:
    """Predicted steps of fewer micro-batches.

    Attributes:
        own: micro-batches of the job's own step.
        accumulations: micro-batches of the steps that are measured.
        power_shares: power of each, as a share of the whole step's.
    """

    own: int
    accumulations: tuple[int, ...]
    step_times_s: tuple[float, ...]
    power_shares: tuple[float, ...]

    @property
    def before_s(self) -> float:
        """Seconds of the step that decides whether whole steps are too long."""
        return self.step_times_s[-1]

    def measure(
        self,
        policy: WindowPolicy,
        draw: np.random.Generator,
        *,
        time_noise: float,
        step_noise: float,
        power_noise: float,
        power_W: float,
    ) -> Measurement:
        """Draw windows of each, and return the measurement of the whole step from them."""
        # As between repeats, from which both are known: what slows a window slows all of a visit.
        slower = 1 + time_noise * float(draw.standard_normal())
        now_W = power_W * (1 + power_noise * float(draw.standard_normal()))
        points = []
        for share, k, step_s, power_share in zip(
            SHARES, self.accumulations, self.step_times_s, self.power_shares, strict=True
        ):
            steps = max(LEAST_STEPS, math.ceil(share * policy.min_s / step_s))
            spread = np.clip(1 + step_noise * draw.standard_normal(steps), 0.5, 2.0)
            times = step_s * slower * spread
            rse = float(times.std(ddof=1) / times.mean() / math.sqrt(steps)) or math.nan
            mean_s = float(times.mean())
            points.append(AccumulationPoint(k, steps, mean_s, rse, now_W * power_share))
        estimate = fit_accumulation(points, self.own)
        window_s = math.fsum(p.steps * p.step_time_s for p in points)
        return Measurement(
            live=Settings(),
            steps=sum(p.steps for p in points),
            window_s=window_s,
            step_time_s=estimate.step_time_s,
            step_time_se_s=estimate.step_time_se_s,
            energy_J=math.fsum(p.steps * p.step_time_s * p.power_W for p in points),
            power_W=estimate.power_W,
            power_se_W=math.hypot(estimate.power_se_W, power_noise * estimate.power_W),
            accumulation=estimate.fit,
        )


def short_steps(
    model: object, configuration: Configuration, policy: WindowPolicy, step_time_s: float
) -> ShortSteps | None:
    """Return the steps that a probe measures in place of whole ones; None if it measures those.

    Args:
        model: predicts the cluster; only the analytic model predicts other accumulations.
        step_time_s: time of a whole step on the cluster, which may be slower than the model's: the
            short steps are slower alike.
    """
    if not policy.micro_batches or not isinstance(model, AnalyticModel):
        return None
    plan = accumulation_plan(configuration, model.job)
    if not plan.measured or not steps_take_too_long(step_time_s, policy.min_steps, policy.min_s):
        return None
    launch = {n: v for n, v in configuration.launch.items() if n != "global_batch"}
    same = Configuration(Settings(launch), configuration.live)
    share = configuration.micro_batch * configuration.data_parallel
    figures = [
        AnalyticModel(
            replace(model.job, global_batch=k * share, steps_at={}, noise_scale=0.0, min_steps=0),
            model.cluster,
            constants=model.constants,
        ).predict([same])
        for k in (*plan.measured, plan.own)
    ]
    slower = step_time_s / float(figures[-1].step_time_s[0])
    whole_W = float(figures[-1].power_W[0])
    return ShortSteps(
        own=plan.own,
        accumulations=plan.measured,
        step_times_s=tuple(slower * float(f.step_time_s[0]) for f in figures[:-1]),
        power_shares=tuple(float(f.power_W[0]) / whole_W for f in figures[:-1]),
    )
