"""The counter of steps: what is counted of several sources, engines and optimizers."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from tuner.workload import hook
from tuner.workload.hook.steps import LoaderWatch, StepCounter, around, count_engine


class Optimizer:
    """Optimizer of torch's kind: its steps are reported after they were made."""

    def __init__(self, counter: StepCounter) -> None:
        self._counter = counter

    def step(self) -> None:
        if self._counter.takes(self):
            self._counter.count("optimizer")


class Counted:
    """A counter and what it counted."""

    def __init__(self) -> None:
        self.steps = 0
        self.counter = StepCounter(self._step)

    def _step(self) -> None:
        self.steps += 1


@pytest.fixture
def counted() -> Counted:
    return Counted()


def test_of_two_optimizers_the_first_that_steps_is_counted(counted: Counted) -> None:
    generator, critic = Optimizer(counted.counter), Optimizer(counted.counter)
    for _ in range(3):
        for _ in range(5):
            critic.step()
        generator.step()
    assert (counted.steps, counted.counter.source) == (15, "optimizer")


def test_another_one_is_counted_once_the_first_is_gone(counted: Counted) -> None:
    for _ in range(3):  # a training of each fold
        optimizer = Optimizer(counted.counter)
        optimizer.step()
        optimizer.step()
        del optimizer
    assert counted.steps == 6


def test_a_skipped_step_chooses_the_optimizer_too(counted: Counted) -> None:
    skipped, other = Optimizer(counted.counter), Optimizer(counted.counter)
    assert counted.counter.takes(skipped)  # by a gradient scaler
    other.step()
    assert counted.steps == 0
    skipped.step()
    assert counted.steps == 1


def engine_of(counter: StepCounter, accumulation: int = 1) -> Any:
    class Engine:
        def __init__(self) -> None:
            self.optimizer, self.calls = Optimizer(counter), 0

        def step(self, *, fails: bool = False) -> str:
            self.calls += 1
            if fails:
                raise ValueError("overflow")
            if self.calls % accumulation == 0:
                self.optimizer.step()
            return "stepped"

    count_engine(counter, Engine, "step", lambda engine: (engine.calls + 1) % accumulation == 0)
    return Engine


def test_an_engine_is_counted_at_its_boundaries_and_not_its_optimizer(counted: Counted) -> None:
    engine = engine_of(counted.counter, accumulation=4)()
    assert [engine.step() for _ in range(12)] == ["stepped"] * 12
    assert (counted.steps, counted.counter.source) == (3, "engine")


def test_of_two_engines_one_is_counted(counted: Counted) -> None:
    made = engine_of(counted.counter)
    actor, critic = made(), made()
    for _ in range(3):
        actor.step()
        critic.step()
    assert counted.steps == 3


def test_a_failed_step_of_an_engine_counts_not_and_leaves_nothing(counted: Counted) -> None:
    engine = engine_of(counted.counter)()
    with pytest.raises(ValueError, match="overflow"):
        engine.step(fails=True)
    assert counted.steps == 0
    Optimizer(counted.counter).step()
    assert counted.steps == 1


def test_where_an_engine_was_made_no_torch_optimizer_is_counted(counted: Counted) -> None:
    counted.counter.has_engine = True
    Optimizer(counted.counter).step()
    assert counted.steps == 0


@pytest.mark.parametrize(("first", "second"), [("optimizer", "program"), ("program", "engine")])
def test_the_first_source_counts(counted: Counted, first: str, second: str) -> None:
    for _ in range(4):
        counted.counter.count(first)
        counted.counter.count(second)
    assert (counted.steps, counted.counter.source) == (4, first)
    counted.counter.forget()
    counted.counter.count(second)
    assert (counted.steps, counted.counter.source) == (5, second)


def test_batches_are_told_with_their_own_indices_though_workers_fetch_ahead() -> None:
    class Iterator:
        def __init__(self, ahead: int) -> None:
            self.indices = iter([[1, 2], [3, 4], [5]])
            self.ready: list[Any] = []
            self.ahead, self.over = ahead, False
            self._reset(self)

        def _reset(self, loader: Any) -> None:
            for _ in range(self.ahead):
                self.ready.append(self._next_index())

        def _next_index(self) -> Any:
            return next(self.indices)

        def __next__(self) -> str:
            if len(self.ready) <= self.ahead and not self.over:
                try:
                    self.ready.append(self._next_index())
                except StopIteration:
                    self.over = True
            if not self.ready:
                raise StopIteration
            return f"batch of {self.ready.pop(0)}"

    found: list[Any] = []
    LoaderWatch(
        Iterator,
        around,
        fetched=lambda _, index, batch: found.append((index, batch)),
        ended=lambda _: found.append("end"),
    )
    for ahead in (0, 1):
        found.clear()
        iterator = Iterator(ahead)
        for index in ([1, 2], [3, 4]):
            assert next(iterator) == f"batch of {index}"
            assert found[-1] == (index, f"batch of {index}")
    next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    assert found[-1] == "end"


@pytest.mark.extra("tuner.workload.hook.tally")
@pytest.mark.parametrize("name", ["steps", "tally", "entry/sitecustomize"])
def test_what_a_measured_command_loads_is_the_standard_library_alone(name: str) -> None:
    tree = ast.parse((Path(hook.__file__).parent / f"{name}.py").read_text())
    imported = {
        alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    froms = {
        (node.module or "").partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not node.level
    }
    assert imported | froms <= {*sys.stdlib_module_names}
    relative = {
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level
    }
    assert relative <= {"steps"}
