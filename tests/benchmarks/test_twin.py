"""Clocks and energy of twin GPUs, as the governor and the receipt have them, beside the truth."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.receipt import cpu_s, receipt_error
from benchmarks.twin.clocks import delivered_clock_error

pytestmark = pytest.mark.needs("cc")


def test_delivered_clocks_are_near_the_truth() -> None:
    assert max(abs(delivered_clock_error(seed)) for seed in range(12)) < 0.02


def test_the_time_of_a_thread_that_has_ended_stays_counted() -> None:
    line = "import threading as t, time as c; b = t.Thread(target=lambda: sum(range(5_000_000)))"
    code = f"{line}; b.start(); b.join(); print(c.process_time(), flush=True); input()"
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        own_s = float(child.stdout.readline())
        while len([*Path(f"/proc/{child.pid}/task").iterdir()]) > 1:
            time.sleep(0.01)
        assert own_s <= cpu_s(child.pid) < own_s + 0.05
        child.communicate("\n")


@pytest.mark.slow
@pytest.mark.quiet
def test_a_receipt_is_close_to_the_exact_energy() -> None:
    assert abs(receipt_error(1, 3.0)) < 0.005
