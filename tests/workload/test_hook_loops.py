"""Lengths that are read from the live frames of a program."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.workload.hook import source, watching
from tuner.workload.hook.loops import Loops

numbers = itertools.count()


class Stop(Exception):
    """The program has shown enough."""


@pytest.fixture(autouse=True)
def parsers() -> Iterator[None]:
    plain = argparse.ArgumentParser.parse_known_args
    source.watch_arguments()
    yield
    argparse.ArgumentParser.parse_known_args = plain  # type: ignore[method-assign]
    source._parsed.clear()


HEAD = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("-b", "--batch-size", type=int, default=8)
p.add_argument("--eval-batch-size", type=int, default=8)
p.add_argument("--accum", type=int, default=4)
p.add_argument("--max-steps", type=int, default=100)
p.add_argument("--endless", type=int, default=-1)
p.add_argument("--epochs", type=int, default=3)
args = p.parse_args([])
batches = [0] * 50
"""


def run(folder: Path, body: str, names: dict[str, Any]) -> None:
    path = folder / f"program{next(numbers)}.py"
    path.write_text(HEAD + dedent(body))
    with contextlib.suppress(Stop):
        exec(compile(path.read_text(), str(path), "exec"), {"__name__": "program", **names})


def steps_of(folder: Path, body: str, fetches: int = 1, steps: int = 4) -> int | None:
    """Run a program whose `step()` is an optimizer's; return the steps that its loops tell."""
    loops, found = Loops(), dict[str, Any]()
    done = itertools.count(1)

    def step() -> None:
        found.clear()
        found.update(loops.step(sys._getframe(1), fetches, 50))
        if next(done) == steps:
            raise Stop

    run(folder, body, {"step": step})
    return found.get("steps")


@pytest.mark.parametrize(
    ("body", "fetches", "steps"),
    [
        # a loop over batches, epochs around it, an accumulation, a guard before the step
        ("for b in batches: step()", 1, 50),
        ("for e in range(args.epochs):\n    for b in batches:\n        step()", 1, 150),
        (
            "for i, b in enumerate(batches * 4):\n"
            "    if (i + 1) % args.accum == 0:\n        step()",
            *(4, 50),
        ),
        (  # an uneven last step of an epoch, which may be none
            "for i, b in enumerate(range(403), start=1):\n"
            "    if i % args.accum and i < 403:\n        continue\n    step()",
            *(4, None),
        ),
        (  # and where it does not matter
            "n = 0\nfor e in range(args.epochs):\n    for i, b in enumerate(range(403)):\n"
            "        if (i + 1) % args.accum == 0:\n            step()\n            n += 1\n"
            "        if n >= args.max_steps: break\n    if n >= args.max_steps: break",
            *(4, 100),
        ),
        (
            "for i, b in enumerate(batches):\n    if (i + 1) % args.accum == 0:\n        step()",
            *(4, None),
        ),
        ("for b in zip(range(20), batches): step()", 1, 20),
        # a counter that is compared: before the step, behind it, in a class, in another function
        ("n = 0\nwhile n < args.max_steps:\n    n += 1\n    step()", 1, 100),
        ("n = 0\nwhile n <= args.max_steps:\n    step()\n    n += 1", 1, 101),
        ("n = 0\nwhile True:\n    if n == args.max_steps: break\n    step()\n    n += 1", 1, 100),
        ("n = 0\nwhile True:\n    step()\n    n += 1\n    if n >= args.max_steps: break", 1, 100),
        ("n = 0\nwhile True:\n    step()\n    if n >= args.max_steps: break\n    n += 1", 1, 101),
        ("n = 0\nwhile True:\n    step()\n    n += 1\n    if args.max_steps < n: break", 1, 101),
        ("n = 0\nwhile True:\n    step(); n += 1\n    if n >= args.max_steps: break", 1, 100),
        ("n = 0\nwhile n < args.max_steps: n += 1; step()", 1, 100),
        (
            "class T:\n    n = 0\n    def one(self):\n        step()\n        self.n += 1\n"
            "    def fit(self):\n        while self.n < args.max_steps:\n            self.one()\n"
            "T().fit()",
            *(1, 100),
        ),
        # the shorter of two ends, and one that is turned off
        (
            "n = 0\nfor e in range(9):\n    for b in batches:\n        step()\n        n += 1\n"
            "        if n >= args.max_steps: break\n    if n >= args.max_steps: break",
            *(1, 100),
        ),
        (
            "n = 0\nfor e in range(args.epochs):\n    for b in batches:\n        step()\n"
            "        n += 1\n        if args.endless > 0 and n >= args.endless: break",
            *(1, 150),
        ),
        ("for i, b in enumerate(batches):\n    step()\n    if i >= 9: break", 1, 10),
        (
            "import math\nfor b in batches:\n    step()\n    if math.isnan(b): break",
            *(1, 50),
        ),
        # micro-batches
        (
            "n = 0\nwhile n < args.max_steps:\n    n += 1\n    if n % 4 == 0:\n        step()",
            *(4, 25),
        ),
        # ---- unknown
        ("while True: step()", 1, None),
        ("n = 0\nwhile n != args.endless:\n    step()\n    n += 1", 1, None),
        ("import time\nend = time.time() + 9\nwhile time.time() < end: step()", 1, None),
        (
            "best = 1\nfor b in batches:\n    step()\n    best -= .1\n    if best < 0: break",
            1,
            None,
        ),
        ("for b in iter(batches): step()", 1, 50),
        ("for b in (x for x in batches): step()", 1, None),
        ("def f():\n    for b in batches: yield b\nfor b in f(): step()", 1, None),
        ("for b in range(2_000_000):\n    step()", 1, 2_000_000),
        ("step(); step(); step(); step()", 1, None),  # no loop
        (  # a counter that begins again
            "for e in range(9):\n    n = 0\n    while True:\n        step()\n        n += 1\n"
            "        if n >= args.max_steps: break",
            *(1, None),
        ),
        (
            "stop = False\nfor b in batches:\n    step()\n    stop = b > 0\n    if stop: break",
            1,
            None,
        ),
        ("for i, b in enumerate(batches):\n    if i % 4 == 0 or b: step()", 3, None),
    ],
)
def test_the_number_of_steps(tmp_path: Path, body: str, fetches: int, steps: int | None) -> None:
    assert steps_of(tmp_path, body, fetches) == steps


def test_uneven_epochs_tell_about_how_many(tmp_path: Path) -> None:
    loops, found = Loops(), dict[str, Any]()
    done = itertools.count(1)

    def step() -> None:
        found.update(loops.step(sys._getframe(1), 4, 50))
        if next(done) == 4:
            raise Stop

    body = "for e in range(args.epochs):\n    for b in batches:\n        step()"
    run(tmp_path, body, {"step": step})
    assert found == {"about": 36}


def test_two_steps_tell_no_length(tmp_path: Path) -> None:
    assert steps_of(tmp_path, "for b in batches: step()", steps=2) is None


def test_nothing_of_the_program_is_called(tmp_path: Path) -> None:
    """A property or a method of its own may do anything."""
    body = """
    class Config:
        @property
        def steps(self): raise SystemExit("called")
        def __len__(self): return 7
    config, n = Config(), 0
    while n < config.steps if False else n < 5:
        step()
        n += 1
        if n == getattr(config, "x", 9): break
    """
    assert steps_of(tmp_path, body) is None


def test_a_trainer_of_the_users_own_tells_the_length_as_the_one_it_is_made_of() -> None:
    plain = type("Trainer", (), {"__module__": "transformers.trainer"})

    class Mine(plain):  # type: ignore[valid-type, misc]
        state = SimpleNamespace(max_steps=90)

        def train(self) -> dict[str, Any]:
            return watching.stated_length()

    assert Mine().train() == {"steps": 90, "by": "transformers"}
    Mine.state.max_steps = -1  # not known yet
    assert Mine().train() == {}
