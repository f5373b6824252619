"""`findings_open`: of the eleven findings of a review of clusters, those whose tests fail.

Each finding has tests that fail without its mend; the two about speed are figures of this package.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.cluster import lead, schedule
from benchmarks.figures import Figure
from benchmarks.source import ROOT

_STATES = "tests/executors/test_ray_states.py::"
#: Tests by the number of the finding.
TESTS = {
    1: [_STATES + "test_a_probe_whose_devices_others_hold_is_given_up_and_they_are_named_once"],
    2: ["tests/packaging/test_kuberay.py"],
    3: [_STATES + "test_each_reason_against_joining_is_the_one_that_is_said"],
    4: ["tests/deploy/test_slurm.py"],
    5: [_STATES + "test_nodes_that_do_not_answer_are_not_said_to_lack_devices"],
    6: [_STATES + "test_a_node_whose_imports_stall_is_set_aside_and_asked_again"],
    8: ["tests/executors/test_ray_autoscaling.py"],
    9: [_STATES + "test_what_ends_a_search_is_one_sentence_and_it_keeps_what_it_has"],
    10: ["tests/executors/test_ray_page.py"],
}
#: Figures that finding 7 and 11 are about, and the values from which they are closed.
MOST_LEAD_MS, LEAST_BUSY = 10.0, 75.0


def _passes(tests: list[str]) -> bool:
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "slow or not slow", *tests]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-1500:])
    return done.returncode == 0


def figures() -> list[Figure]:
    """Return the number of open findings, and print them."""
    measured = {f.name: f.value for f in (*lead.figures(), *schedule.figures())}
    closed = {number: _passes(tests) for number, tests in TESTS.items()}
    closed[7] = measured["nodes_busy"] >= LEAST_BUSY
    closed[11] = measured["lead_ms_1024_nodes"] <= MOST_LEAD_MS
    still = sorted(number for number, passes in closed.items() if not passes)
    print(f"open: {', '.join(map(str, still)) or 'none'}")
    return [Figure("findings_open", len(still), "count")]
