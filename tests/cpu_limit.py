"""Limit on the CPU seconds of a test of the everyday suite, which `make test` runs.

A test above the limit is marked slow, or pytest warns of it; with `--above-cpu-limit fail` it
fails. CPU seconds of the test's process and of the children that it waited for are counted, not
time on the clock, so other programs on the machine take none of them. They slow each one down by
what they share, caches and threads of a core: the limit is scaled by how long a fixed loop takes
here, measured when a test exceeds it. What several tests share is not charged to the first of them:
fixtures, and packages that it imports.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from statistics import median

import pytest

#: CPU seconds of a test from which on it must be marked slow, where `_loop_s` takes `REFERENCE_S`.
LIMIT_S = 3.0
#: CPU seconds of the loop, at least, on a core of the machine on which tests were marked. Under 37
#: runnable processes on two cores it takes 1.3 times as long in the median, and a search 1.7 times
#: as long: it leaves the caches between its turns, and the loop does not.
REFERENCE_S = 0.013
#: A test may take this many times the limit, because a search suffers more than the loop does: CI
#: fails, and a machine that is busy for a moment must not fail it.
MARGIN = 2.0
#: Marks of tests without a limit.
UNLIMITED = ("slow", "long", "all_knobs")
#: Packages that take seconds to import.
HEAVY = ("torch", "transformers", "deepspeed", "ray", "sklearn", "pandas", "plotly", "lightning")


def cpu_s() -> float:
    """Return the CPU seconds of this process and of the children that it waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _loop_s() -> float:
    began = time.process_time()
    sum(n * n % 7 for n in range(200_000))
    return time.process_time() - began


def slowness(loops_s: list[float]) -> float:
    """Return how many times as long as on the reference a CPU second's work takes here."""
    return max(1.0, median(loops_s) / REFERENCE_S)


def excess(spent_s: float, slower: float, limit_s: float) -> str:
    """Return a sentence if a test took more than it may, else an empty one."""
    most_s = limit_s * slower * MARGIN
    if not limit_s or spent_s <= most_s:
        return ""
    return (
        f"the test took {spent_s:.1f} CPU seconds, above {most_s:.1f} on this machine: mark it slow"
        " or make it cheaper (pytest --cpu-limit 0 sets no limit)"
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-limit",
        type=float,
        default=LIMIT_S,
        metavar="SECONDS",
        help=f"CPU seconds of a test that is not marked slow (default: {LIMIT_S:g}; 0: no limit)",
    )
    parser.addoption(
        "--above-cpu-limit",
        choices=("warn", "fail"),
        default="warn",
        help="what a test above the limit does (default: warn)",
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Name a test that passed, and took more CPU seconds than it may."""
    imported, began_s = _imported(), cpu_s()
    outcome = yield
    spent_s, limit_s = cpu_s() - began_s, float(item.config.getoption("--cpu-limit"))
    if outcome.excinfo or spent_s <= limit_s or imported != _imported():
        return
    if any(map(item.get_closest_marker, UNLIMITED)):
        return
    why = excess(spent_s, slowness([_loop_s() for _ in range(9)]), limit_s)
    if why and item.config.getoption("--above-cpu-limit") == "fail":
        outcome.force_exception(pytest.fail.Exception(why, pytrace=False))
    elif why:
        item.warn(pytest.PytestWarning(f"{item.nodeid}: {why}"))


def _imported() -> set[str]:
    return {name for name in HEAVY if name in sys.modules}
