"""The first minutes of a new user: the search of `make run` at a terminal of 80 columns.

- `first_point_s`, `answer_s`: until a probe has ended, and until the answer and its report are
  there, from the command's start in an installed environment.
- `lines_before_first_probe`: lines with a time of day before that of the first probe.
- `answer_lines`: lines of the answer as they stand on the screen, up to its report.
- `others_share`: share of the cores that other processes used meanwhile; times of a busy machine
  say little, the lines do not depend on it.

Aims on two quiet cores: 15 and 150 s, 3 and 10 lines.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import ROOT, Figure, arguments, publish

#: Columns and lines of the terminal.
COLUMNS, LINES = 80, 40
_PROBE = re.compile(r"^\d\d:\d\d:\d\d p\d", re.M)


@dataclass
class Screen:
    """Output of a command at a terminal.

    Attributes:
        shown: standard error, where progress is.
        answered: standard output.
        first_point_s, answer_s: seconds from the start; NaN if it did not get there.
    """

    shown: str = ""
    answered: str = ""
    first_point_s: float = float("nan")
    answer_s: float = float("nan")

    @property
    def lines_before_first_probe(self) -> int:
        """Lines with a time of day before the first of a probe."""
        stamped = re.findall(r"^\d\d:\d\d:\d\d (p\d)?", self.shown, re.M)
        return next((i for i, probe in enumerate(stamped) if probe), len(stamped))

    @property
    def answer(self) -> list[str]:
        """Lines of the answer of the search, up to its report."""
        before, report, _ = self.answered.partition("\nReport: ")
        return [*before.rpartition("\n\n")[2].split("\n"), *([report.strip()] if report else [])]


def text_of(screen: bytes) -> str:
    """Return a screen's text without control sequences, a line for each that was drawn."""
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.decode(errors="replace"))
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _terminal() -> tuple[int, int]:
    # Both ends, the command's second.
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    return ours, theirs


def watch(command: Sequence[str], environment: Mapping[str, str]) -> tuple[Screen, int]:
    """Run a command at a terminal; return its screen and exit code."""
    (shown, stderr), (answered, stdout) = _terminal(), _terminal()
    began_s = time.monotonic()
    child = subprocess.Popen(
        command, stdin=stderr, stdout=stdout, stderr=stderr, cwd=ROOT, env=environment
    )
    os.close(stdout)
    os.close(stderr)
    raw, screen = {shown: b"", answered: b""}, Screen()
    ends = list(raw)
    while ends:
        for end in select.select(ends, [], [])[0]:
            try:
                chunk = os.read(end, 65536)
            except OSError:  # the last process has closed the terminal
                chunk = b""
            if not chunk:
                ends.remove(end)
                os.close(end)
                continue
            raw[end] += chunk
            now_s = time.monotonic() - began_s
            screen.shown, screen.answered = text_of(raw[shown]), text_of(raw[answered])
            if screen.first_point_s != screen.first_point_s and _PROBE.search(screen.shown):
                screen.first_point_s = now_s
            if screen.answer_s != screen.answer_s and "\nReport: " in screen.answered:
                screen.answer_s = now_s
    return screen, child.wait()


def _busy_s() -> tuple[float, float]:
    # Busy seconds of all cores, and those of this process's ended children.
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:4]
    times = os.times()
    ticks = sum(map(int, words)) / os.sysconf("SC_CLK_TCK")
    return ticks, times.children_user + times.children_system


def main() -> None:
    parser = arguments("the first minutes of a new user")
    parser.add_argument("--search", help="limits of the search, instead of the Makefile's")
    options = parser.parse_args()
    venv = Path(sys.prefix)
    given = [f"SEARCH={options.search}"] if options.search else []
    # -o: the environment is taken as it is.
    make = ["make", "-s", "-o", f"{venv}/.runnable", "run", f"VENV={venv}", *given]
    with tempfile.TemporaryDirectory() as runs:
        before, began_s = _busy_s(), time.monotonic()
        environment = {**os.environ, "JOULEFRONT_RUNS": runs, "TERM": "xterm-256color"}
        screen, code = watch(make, environment)
        after, seconds = _busy_s(), time.monotonic() - began_s
    if code:
        raise SystemExit(f"{screen.shown}\n{' '.join(make)} ended with {code}")
    print("\n".join(screen.answer))
    busy_s, own_s = (b - a for a, b in zip(before, after, strict=True))
    publish(
        [
            Figure("first_point_s", screen.first_point_s, "s"),
            Figure("answer_s", screen.answer_s, "s"),
            Figure("answer_lines", len(screen.answer), "count"),
            Figure("lines_before_first_probe", screen.lines_before_first_probe, "count"),
            Figure(
                "others_share", max(0, busy_s - own_s) / seconds / (os.cpu_count() or 1), "ratio"
            ),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
