"""The findings of a study of parallelism and SM clock on A100; nothing was fitted to it.

Its figures are plots without numbers. Data-parallel plans depend more on the clock than pipelines,
whose stages can be slowed inside the bubble.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from tuner.models.analytic.model import AnalyticModel, Program
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job

CLUSTER = load_cluster("a100-40gb-8")
CLOCKS_MHZ = [clock for clock in CLUSTER.clocks_MHz if clock >= 240]
#: (data, pipeline and tensor parallelism, micro-batch) as in the study's Figure 5.
PLANS = ((4, 1, 2, 1), (2, 2, 2, 1), (2, 2, 2, 2), (1, 4, 2, 4))


@dataclass(frozen=True)
class Sweep:
    """One plan over clocks, the highest one last."""

    data_parallel: int
    time_s: np.ndarray
    energy_J: np.ndarray

    def slowdown(self, saved: float, of: Sweep) -> float:
        """The least slowdown at which a share of another sweep's energy at full clock is saved."""
        enough = self.energy_J <= (1 - saved) * of.energy_J[-1]
        return float(self.time_s[enough].min() / of.time_s[-1] - 1)


def sweep(global_batch: int, clocks: list[Any], *plan: int) -> Sweep:
    job = load_job("opt-350m")
    model = {**job.model, "word_embed_proj_dim": 1024}  # as Megatron trains it
    job = replace(job, global_batch=global_batch, model=model)
    # Megatron-DeepSpeed's attention stores its scores.
    models = AnalyticModel(job, CLUSTER, program=Program(fused_attention=False))
    names = ("data_parallel", "pipeline_parallel", "tensor_parallel", "micro_batch")
    knobs = dict(zip(names, plan, strict=True))
    said = models.predict([Configuration.of(**knobs, clock_MHz=clock) for clock in clocks])
    return Sweep(plan[0], said.step_time_s, said.step_time_s * said.power_W)


@pytest.fixture(scope="module")
def sweeps() -> dict[tuple[int, ...], tuple[Sweep, Sweep | None]]:
    """Each plan at one clock and, if it is a pipeline, at a clock a stage."""
    clocks = CLOCKS_MHZ[::-4][::-1]
    found = {}
    for plan in PLANS:
        stages, apart = plan[1], None
        if stages > 1:
            each = list(product(clocks[::-3] if stages > 2 else clocks, repeat=stages))
            each = list(dict.fromkeys([*each, *((clock,) * stages for clock in clocks)]))
            apart = sweep(1024, each, *plan)
        found[plan] = sweep(1024, clocks, *plan), apart
    return found


def test_energy_has_a_valley_over_the_clock_and_time_and_power_are_monotone() -> None:
    one = sweep(256, CLOCKS_MHZ, 1, 1, 1, 1)
    assert 0 < one.energy_J.argmin() < len(CLOCKS_MHZ) - 1
    assert (np.diff(one.energy_J / one.time_s) > 0).all()
    assert (np.diff(one.time_s) < 0).all()


def test_the_data_parallel_plan_is_the_fastest_and_feels_the_clock_most(sweeps) -> None:
    fastest = min(PLANS, key=lambda plan: sweeps[plan][0].time_s[-1])
    assert fastest[1] == 1
    slowdowns = {}
    for plan, (together, apart) in sweeps.items():
        slowdowns[plan] = (apart or together).slowdown(0.1, together)
    assert all(slowdowns[fastest] > slowdowns[plan] for plan in PLANS if plan[1] > 1)


def test_clocks_by_stage_save_energy_inside_the_bubble_at_no_time(sweeps) -> None:
    for together, apart in sweeps.values():
        if apart is not None:
            free = apart.time_s <= 1.002 * together.time_s[-1]
            assert apart.energy_J[free].min() < 0.99 * together.energy_J[-1]


def test_a_slower_pipeline_needs_less_than_the_fastest_plan(sweeps) -> None:
    data = min((together for together, _ in sweeps.values()), key=lambda each: each.time_s[-1])
    staged = [apart for _, apart in sweeps.values() if apart is not None]
    pipeline = min(staged, key=lambda each: each.energy_J.min())
    assert pipeline.energy_J.min() < data.energy_J[-1]
    # Its curve passes below the data-parallel one's at equal time, too.
    envelope_J = np.interp(pipeline.time_s, data.time_s[::-1], data.energy_J[::-1])
    within = pipeline.time_s <= data.time_s.max()
    assert (pipeline.energy_J < envelope_J)[within].any()
