"""Steps of few micro-batches in place of whole ones: when, which, and how errors come out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.job import load_job
from tuner.testing.scripted_ranks import ScriptedClock, ScriptedMeter, ScriptedRanks
from tuner.workload.hook import frames, live_knobs, state
from tuner.workload.node.measure.accumulated_step import (
    AccumulationPoint,
    choose_accumulation,
    fit_accumulation,
    measure_accumulated,
)
from tuner.workload.node.measure.measurement import measurement
from tuner.workload.node.measure.statistics import Z90, Window
from tuner.workload.node.measure.window import Conductor
from tuner.workload.records.accumulation import (
    AccumulationPlan,
    accumulation_plan,
    steps_take_too_long,
)
from tuner.workload.records.probe import Failure, Measurement, WindowPolicy
from tuner.workload.scripts.script_facts import ScriptFacts
from tuner.workload.scripts.script_job import ScriptJob

JOB = replace(load_job(), global_batch=128)


@pytest.mark.parametrize(
    ("knobs", "measured"),
    [
        ({"data_parallel": 2, "micro_batch": 1}, (1, 2, 4)),
        ({"data_parallel": 2, "micro_batch": 1, "optimizer_offload": "cpu"}, (2, 4, 8)),
        ({"data_parallel": 1, "pipeline_parallel": 4}, (4, 8, 16)),  # as many as are in flight
        ({"data_parallel": 8, "pipeline_parallel": 4}, (4, 6, 8)),
        ({"data_parallel": 32, "micro_batch": 1}, ()),  # four a step: nothing would be saved
    ],
)
def test_finding_10_accumulations_suit_the_configuration(
    knobs: dict[str, object], measured: tuple[int, ...]
) -> None:
    plan = accumulation_plan(Configuration.of({"micro_batch": 1, **knobs}), JOB)
    assert plan.measured == measured
    assert not measured or plan.own >= 2 * measured[-1]


def test_finding_10_where_it_cannot_be_done_one_sentence_says_so() -> None:
    late = Configuration.of(data_parallel=1, micro_batch=1, optimizer_offload="async")
    assert "asynchronous" in accumulation_plan(late, JOB).why_whole
    by_torch = Configuration.of(data_parallel=2, micro_batch=1, sharding="fsdp2")
    assert "FSDP2" in accumulation_plan(by_torch, JOB).why_whole
    script = ScriptJob(
        name="mine", model={}, sequence_length=0, global_batch=64, steps=9, precision="fp32"
    )
    one = Configuration.of(data_parallel=1, micro_batch=1)
    for frame, possible in (
        (ScriptFacts(kind="deepspeed"), True),
        (ScriptFacts(kind="torch", owner="transformers"), True),
        (ScriptFacts(kind="deepspeed", owner="accelerate"), False),
        (ScriptFacts(kind="torch"), False),
    ):
        why = replace(script, frame=frame).why_accumulation_stays
        plan = accumulation_plan(one, replace(script, frame=frame), why)
        assert bool(plan.measured) == possible
        assert plan.why_whole.startswith("whole steps are measured") != possible


def test_finding_10_whole_steps_are_measured_up_to_two_windows() -> None:
    assert not steps_take_too_long(3.3, min_steps=3, min_s=5.0)
    assert steps_take_too_long(3.4, min_steps=3, min_s=5.0)


def points_of(draw: np.random.Generator, noise: float) -> list[AccumulationPoint]:
    """Windows of T = 0.3 + 0.2 k and 400 W for accumulation, 200 W for what occurs once."""
    points = []
    for k, steps in ((1, 5), (2, 3), (4, 5), (4, 5), (2, 3), (1, 5)):
        true_s = 0.3 + 0.2 * k
        times = true_s * (1 + noise * draw.standard_normal(steps))
        watts = (0.3 * 200 + 0.2 * k * 400) / true_s * (1 + 0.005 * draw.standard_normal())
        rse = float(times.std(ddof=1) / times.mean() / math.sqrt(steps))
        points.append(AccumulationPoint(k, steps, float(times.mean()), rse, watts, 0.005))
    return points


def test_finding_10_the_line_is_found_and_its_errors_include_the_extrapolation() -> None:
    draw = np.random.default_rng(1)
    exact = fit_accumulation(points_of(draw, 1e-9), 128)
    assert exact.step_time_s == pytest.approx(0.3 + 0.2 * 128)
    assert exact.fit.once_s == pytest.approx(0.3)
    assert exact.fit.each_J == pytest.approx(80, rel=0.05)
    assert exact.fit.is_linear
    assert sum(exact.weights) == pytest.approx(1)
    near, far = (fit_accumulation(points_of(np.random.default_rng(2), 0.02), n) for n in (4, 128))
    assert far.step_time_se_s / far.step_time_s > 1.5 * near.step_time_se_s / near.step_time_s


def test_finding_10_intervals_cover_the_whole_step() -> None:
    draw = np.random.default_rng(3)
    true_s, true_W = 0.3 + 0.2 * 128, (0.3 * 200 + 0.2 * 128 * 400) / (0.3 + 0.2 * 128)
    hits = []
    for _ in range(400):
        found = fit_accumulation(points_of(draw, 0.03), 128)
        hits.append(abs(found.step_time_s - true_s) <= Z90 * found.step_time_se_s)
        hits.append(abs(found.power_W - true_W) <= Z90 * found.power_se_W)
    assert 0.85 <= np.mean(hits) <= 0.98


def test_windows_of_a_busy_machine_never_make_a_step_of_no_time() -> None:
    """Steps that got shorter by further micro-batches: proportional, and hardly known."""
    took = zip((1, 2, 4), (0.30, 0.25, 0.12), strict=True)
    points = [AccumulationPoint(k, 3, time_s, 0.02, 50.0, 0.01) for k, time_s in took]
    estimate = fit_accumulation(points, 64)
    assert 64 * 0.12 / 4 < estimate.step_time_s < 64 * 0.30
    assert estimate.step_time_se_s > 0.3 * estimate.step_time_s
    assert estimate.power_W == pytest.approx(50.0)


def test_a_line_needs_two_accumulations() -> None:
    with pytest.raises(ValueError, match="two accumulations"):
        fit_accumulation([AccumulationPoint(2, 3, 1.0, 0.01, 100.0)] * 2, 16)


def window(
    step_s: float = 0.2,
    policy: WindowPolicy | None = None,
    competitors: tuple[tuple[float, float], ...] = (),
) -> Window:
    clock = ScriptedClock()
    ranks = ScriptedRanks(
        clock,
        lambda n: step_s * (1 + 0.01 * math.sin(7 * n)),
        accumulation=1,
        once_s=0.3,
        marks=("forward",),
    )
    conductor = Conductor(
        ranks,  # type: ignore[arg-type]
        deadline_s=1e6,
        explain_exit=lambda rank, code: Failure("crash", ""),
        clock=clock,
    )
    conductor.first_step()
    assert conductor.micro_batches == 1
    meter = ScriptedMeter(clock, lambda now_s: 300.0)
    found = measure_accumulated(
        conductor,
        meter,
        policy or WindowPolicy(),
        (1, 2, 4),
        128,
        micro_batch_s=step_s,
        samples=meter.samples,
        competitors=competitors,
    )
    assert conductor.accumulation == 1
    return found


def test_finding_10_a_visit_costs_windows_and_not_whole_steps() -> None:
    found = window()
    whole_s = 0.3 + 0.2 * 128
    assert found.step_time_s == pytest.approx(whole_s, rel=0.01)
    assert found.power_W == pytest.approx(300.0, rel=0.01)
    assert found.phases_s["forward"] == pytest.approx(whole_s, rel=0.03)
    # Whole steps would take 3 x 25.9 s.
    assert found.length_s == pytest.approx(sum(part.length_s for part in found.parts))
    assert found.length_s < 20.0
    assert found.energy_J == pytest.approx(300.0 * found.length_s, rel=0.01)


def test_a_beaten_step_is_measured_once() -> None:
    strict = WindowPolicy(target_se=1e-6)
    whole_s = 0.3 + 0.2 * 128
    assert len(window(policy=strict).parts) > 3
    beaten = window(policy=strict, competitors=((whole_s / 2, 150.0 * whole_s),))
    assert (len(beaten.parts), beaten.beaten_by) == (3, (whole_s / 2, 150.0 * whole_s))
    # Faster alone is not better.
    other = window(policy=strict, competitors=((whole_s / 2, 500.0 * whole_s),))
    assert other.beaten_by is None
    assert len(other.parts) > 3


def test_finding_10_the_record_holds_what_was_measured() -> None:
    policy = WindowPolicy()
    made = measurement(Settings(), window(policy=policy), policy)
    assert isinstance(made, Measurement)
    assert made.accumulation is not None
    assert made.accumulation.accumulation == 128
    assert set(made.accumulation.micro_batches) == {1.0, 2.0, 4.0}
    assert made.step_times_s == ()
    assert made.energy_per_step_J == pytest.approx(300.0 * made.step_time_s, rel=0.01)
    again = Measurement.from_json(json.loads(json.dumps(made.to_json())))
    assert again.accumulation == made.accumulation
    old = made.to_json()
    del old["accumulation"]
    assert Measurement.from_json(old).accumulation is None


def test_finding_10_a_bent_line_is_flagged() -> None:
    policy, bent = WindowPolicy(), window()
    assert bent.estimate is not None
    fit = replace(bent.estimate.fit, curvature=-0.2, curvature_se=0.01)
    made = measurement(Settings(), replace(bent, estimate=replace(bent.estimate, fit=fit)), policy)
    assert any("not linear in the number of micro-batches: -20.0 %" in flag for flag in made.flags)


@pytest.mark.parametrize(
    ("taken", "micro_batch_s", "left_at", "short", "why"),
    [
        (1, 0.2, 1, (1, 2, 4), ""),
        (1, 0.02, 128, (), ""),  # three whole steps take 7.7 s
        (0, 0.2, 128, (), "whole steps are measured: the program decides on its accumulation"),
        (128, 0.2, 128, (), "whole steps are measured: the program decides on its accumulation"),
    ],
)
def test_finding_10_a_launch_decides_by_one_step_of_the_largest(
    taken: int, micro_batch_s: float, left_at: int, short: tuple[int, ...], why: str
) -> None:
    conductor = SimpleNamespace(micro_batches=taken, accumulation=0)
    conductor.run = lambda steps: (micro_batch_s * conductor.accumulation,) * steps
    conductor.set_accumulation = lambda number: setattr(conductor, "accumulation", number)
    plan = AccumulationPlan(128, (1, 2, 4))
    found = choose_accumulation(conductor, plan, WindowPolicy())  # type: ignore[arg-type]
    assert (conductor.accumulation, found.measured) == (left_at, short)
    assert found.why_whole == why


class Engine:
    """Batches of a DeepSpeed engine."""

    def __init__(self) -> None:
        self._config = SimpleNamespace(train_batch_size=6, gradient_accumulation_steps=1)
        self.dp_world_size, self.micro_steps = None, 5  # as under an mpu that does not tell it

    def train_batch_size(self) -> int:
        return int(self._config.train_batch_size)

    def gradient_accumulation_steps(self) -> int:
        return int(self._config.gradient_accumulation_steps)


def test_finding_10_the_hook_sets_an_engine_and_counts_what_it_takes() -> None:
    steering, engine = live_knobs.Steering(4), Engine()
    steering.engine(engine)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (24, 4)
    assert engine.micro_steps == 0
    steering.engine_took(engine, 4)
    steering.engine_took(Engine(), 9)  # of another engine, such as a teacher
    assert (steering.taken(), steering.taken()) == (4, 0)
    steering.set(1)
    assert engine.train_batch_size() == 6


def test_finding_10_the_trainer_asks_for_the_micro_batches_of_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Trainer:
        class args:
            gradient_accumulation_steps = 16

        def get_batch_samples(self, batches: object, count: int) -> int:
            return count

        def training_step(self) -> None:
            pass

    class module:
        pass

    module.Trainer = Trainer  # type: ignore[attr-defined]
    monkeypatch.setattr(state, "steering", live_knobs.Steering(2))
    frames.steer_trainer(module)
    trainer = Trainer()
    assert trainer.get_batch_samples([], 16) == 2
    assert Trainer.args.gradient_accumulation_steps == 2
    trainer.training_step()
    assert state.steering.taken() == 1
    state.steering.set(16)
    assert trainer.get_batch_samples([], 2) == 16
