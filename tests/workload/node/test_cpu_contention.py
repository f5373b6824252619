"""A window on shared cores says who else used them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tuner.workload.node.host import CpuContention, busy_ticks

STAT = "cpu  9 0 9 9 0 0 0\ncpu0 {0} 0 0 0 0 0 0 0 0 0\ncpu1 {1} 0 0 0 0 0 0 0 0 0\nintr 1\n"
TICK = os.sysconf("SC_CLK_TCK")


def write(folder: Path, cpu0: int, cpu1: int, own: int) -> None:
    (folder / "stat").write_text(STAT.format(cpu0, cpu1))
    (folder / "77").mkdir(exist_ok=True)
    (folder / "77" / "stat").write_text(f"77 (a (b) c) R {' 0' * 10} {own} 0 0 0\n")


def test_only_the_wanted_cores_count(tmp_path: Path) -> None:
    write(tmp_path, 5, 7, 0)
    assert busy_ticks([1], tmp_path / "stat") == {1: 7}
    assert busy_ticks([0, 1, 9], tmp_path / "stat") == {0: 5, 1: 7}


@pytest.mark.parametrize(("others", "said"), [(0, False), (15, False), (60, True)])
def test_others_are_what_the_ranks_did_not_use(tmp_path: Path, others: int, said: bool) -> None:
    write(tmp_path, 0, 0, 0)
    watch = CpuContention([77], [0, 1], proc=tmp_path)
    write(tmp_path, TICK, others * TICK // 100, TICK)  # in one second of two cores
    share = watch.share(1.0)
    assert share == pytest.approx(others / 200, abs=0.01)
    assert (share > 0.10) == said


def test_a_process_that_ended_is_no_error(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, 0)
    watch = CpuContention([77, 99], [0, 1], proc=tmp_path)
    (tmp_path / "77" / "stat").unlink()
    assert 0.0 <= watch.share(1.0) <= 1.0


def test_a_real_neighbour_is_noticed() -> None:
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\n"
    spin += "while True: pass"
    other = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    watch = CpuContention([os.getpid()], [core])
    mine = CpuContention([os.getpid(), other.pid], [core])
    time.sleep(1.0)
    with_it, without_it = mine.share(), watch.share()
    other.kill()
    other.wait()
    assert without_it > 0.2
    assert with_it < without_it
