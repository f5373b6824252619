"""The Ray executor with a simulated cluster: many nodes, many probes, one driver.

A raylet of this machine claims the devices of many nodes; leases, actors and records are Ray's own,
and only the answers are simulated.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.commands import finished

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_sixty_four_nodes_answer_a_thousand_probes() -> None:
    done = finished(
        [
            sys.executable,
            "-m",
            "benchmarks.cluster.ray_driver",
            "--probes",
            "1000",
            "--raylets",
            "2",
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = dict(re.findall(r"^figure (\S+) (\S+) ", done.stdout, flags=re.MULTILINE))
    assert float(figures["probes"]) == 1000
    # Every setting of every probe that did not fail is measured; simulated launches may not fit.
    assert float(figures["measurements"]) > 4000
    assert float(figures["most_submitted_at_once"]) >= 64
    # Between 100 and the last measurement, records come and go: nothing of them stays.
    early, late = float(figures["driver_memory_at_100_MiB"]), float(figures["driver_memory_MiB"])
    assert late < early + 40
