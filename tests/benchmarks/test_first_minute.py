"""What the benchmark of the first minutes reads off a screen."""

from __future__ import annotations

import os
import sys

from benchmarks.first_minute import watch

PROGRAM = """
import sys
print("\\x1b[1m12:00:00 importing torch\\x1b[0m", file=sys.stderr)
print("12:00:01 This search: about 2 probes", file=sys.stderr)
print("12:00:02 p0000  mb4  1.0 s/step\\n  note: busy\\n12:00:03 p0001  mb8", file=sys.stderr)
print("2 cores\\n\\nKeep what you run today.\\n> today  1 s\\nReport: runs/r/report.html")
print("Predicted: more")
sys.exit(3)
"""


def test_lines_of_a_screen_are_counted() -> None:
    screen, code = watch([sys.executable, "-c", PROGRAM], dict(os.environ))
    assert code == 3
    assert screen.lines_before_first_probe == 2
    assert screen.answer == ["Keep what you run today.", "> today  1 s", "Report:"]
    assert 0 < screen.first_point_s <= screen.answer_s


def test_a_command_that_answers_nothing_has_no_times() -> None:
    screen, code = watch([sys.executable, "-c", "print('nothing')"], dict(os.environ))
    assert (code, screen.lines_before_first_probe) == (0, 0)
    assert screen.first_point_s != screen.first_point_s
    assert screen.answer_s != screen.answer_s
