"""Frameworks that enter and leave a tuned block: transformers' Trainer, Lightning, Accelerate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainers import small_lightning, small_trainer
from tuner.deploy import frameworks
from tuner.online import agent
from tuner.online.agent import TunedBlock
from tuner.online.request import TuningOutcome
from tuner.workload.hook import online_marks, state

#: What an agent reports; on this machine nothing may be metered.
METRICS = {
    "joulefront/step_time_s": 0.5,
    "joulefront/power_W": 300.0,
    "joulefront/clock_MHz": 1200.0,
    "joulefront/saved_kJ": 4.5,
    "joulefront/slowdown": 0.02,
}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stand in for the agent alone: the steps that the real hook counted, at each block's end."""
    counted: list[int] = []

    class Agent:
        address = "/nowhere"

        def __init__(self, run: TunedBlock, *_: Any) -> None:
            self._run, self.ready = run, self

        def wait(self, timeout_s: float) -> None:
            self._run.metrics = METRICS

        def close(self, code: int) -> None:
            self._run.outcome = TuningOutcome(code, 0.05)

    plain = online_marks.end

    def end() -> None:
        counted.append(state.link.steps)
        plain()

    monkeypatch.setattr(online_marks, "end", end)
    monkeypatch.setattr(agent, "_Agent", Agent)
    return counted


@contextlib.contextmanager
def left() -> Iterator[None]:
    yield
    assert state.link is None


@pytest.mark.slow
@pytest.mark.real
def test_a_trainer_logs_what_was_saved_and_leaves_the_block_if_it_fails(
    steps: list[int], tmp_path: Path
) -> None:
    trainer, reporter = small_trainer(tmp_path, max_steps=3, logging_steps=1)
    reported = reporter.reported
    frameworks.tune_trainer(trainer, max_slowdown=0.05)
    with left():
        assert trainer.train().global_step == 3
    assert steps == [3]
    assert len(reported) >= 3
    for logs in reported[:3]:
        assert METRICS.items() <= logs.items()
        assert "loss" in logs
    assert METRICS.items() <= trainer.state.log_history[0].items()
    trainer.log({"after": 1.0})
    assert not METRICS.keys() & reported[-1].keys()
    reporter.fails = True
    with left(), pytest.raises(ZeroDivisionError):
        trainer.train()
    assert steps == [3, 1]


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("fails", [False, True])
def test_lightning_logs_what_was_saved_and_leaves_the_block_if_it_fails(
    steps: list[int], package: str, *, fails: bool
) -> None:
    lightning = pytest.importorskip(package)

    def at_step(number: int) -> None:
        if fails and number == 2:
            raise ZeroDivisionError

    callback = frameworks.lightning_callback(max_slowdown=0.05)
    trainer, fit = small_lightning(
        lightning, at_step, max_steps=4, logger=False, callbacks=[callback]
    )
    with left(), pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        fit()
    assert steps == [2 if fails else 4]
    assert callback.run.outcome.exit_code == fails
    logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
    assert {name: logged[name] for name in METRICS} == pytest.approx(METRICS)


def test_the_steps_of_an_accelerated_loop_are_counted(steps: list[int]) -> None:
    accelerate = pytest.importorskip("accelerate")
    import torch

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    with left(), agent.tuning() as run:
        for _ in range(6):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.randn(2, 4)).sum())
                optimizer.step()
                optimizer.zero_grad()
        assert run.metrics == METRICS
    assert steps == [3]
