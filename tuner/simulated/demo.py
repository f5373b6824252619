"""`tuner demo`: a search on a simulated GPU node, played through the live view in 20 seconds."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tuner.cli.options import OK, print_answer
from tuner.cli.parser import Commands, add_shared

if TYPE_CHECKING:
    from tuner.study.events import Progress

#: What is played, and how long it takes, seconds.
JOB, CLUSTER, PROBES, PLAYED_S = "opt-350m", "a100-8", 14, 20.0
#: Time that the demonstration gives away for energy: without a limit, nothing that takes longer is
#: recommended.
MAX_SLOWDOWN = 0.15
LABEL = f"demo: {JOB} on 8 simulated A100, at most 15 % slower; nothing was measured"


class Pace:
    """Receiver that passes events on at an even pace, and the simulated time that has passed.

    The probes take `played_s` seconds together; 0 waits for nothing.
    """

    def __init__(
        self,
        played_s: float = PLAYED_S,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.notify: Callable[[Progress], None] = lambda event: None
        self._clock, self._sleep = clock, sleep
        self._each_s = played_s / PROBES
        self._walls_s: list[float] = []
        self._due_s: float | None = None  # when the probe in flight is to end
        self._flying = False

    def __call__(self, event: Progress) -> None:
        """Pass an event on; wait while a probe is in flight."""
        if event.record is not None:
            self._walls_s.append(event.record.wall_s)
            self._flying = False
        self.notify(event)
        if event.kind == "started":
            begun_s = self._clock() if self._due_s is None else self._due_s
            self._due_s = begun_s + self._each_s
            self._flying = True
            self._sleep(max(0.0, self._due_s - self._clock()))

    def show_on(self, receiver: Callable[[Progress], None]) -> None:
        """Send each further event to a receiver, at its time."""
        self.notify = receiver

    def simulated_s(self) -> float:
        """Return the seconds that the simulated cluster has spent so far."""
        passed_s = sum(self._walls_s)
        if self._flying and self._due_s is not None and self._each_s:
            share = 1 - (self._due_s - self._clock()) / self._each_s
            usual_s = statistics.median(self._walls_s) if self._walls_s else 90.0
            passed_s += min(max(share, 0.0), 1.0) * usual_s
        return passed_s


@contextmanager
def played(args: argparse.Namespace) -> Iterator[Any]:
    """Yield the receiver of progress events: a paced live view, or a line printer."""
    from tuner.display.progress import LiveView, ProgressPrinter, can_be_live

    if not can_be_live(sys.stderr):
        yield ProgressPrinter()
        return
    pace = Pace(args.seconds)
    with LiveView(clock=pace.simulated_s, lines=False, title=LABEL) as view:
        pace.show_on(view)
        yield pace


def _demo(args: argparse.Namespace) -> int:
    from tuner.api import optimize
    from tuner.display.text import answer_lines
    from tuner.problem.run_folder import new_name
    from tuner.problem.settings import SearchSettings

    with played(args) as on_progress:
        result = optimize(
            JOB,
            cluster=CLUSTER,
            search=SearchSettings(max_probes=PROBES),
            max_slowdown=MAX_SLOWDOWN,
            executor="simulated",
            name=new_name("demo", args.runs_dir),
            runs_dir=args.runs_dir,
            progress=False,
            on_progress=on_progress,
        )
    print_answer(args, result.to_json(), [f"{LABEL}.", "", *answer_lines(result)])
    return OK


def add(commands: Commands) -> None:
    """Add the command of this module."""
    demo = commands.command(
        "demo", _demo, "play a search on a simulated GPU node in 20 seconds; nothing is measured"
    )
    text = f"how long the probes play at a terminal (default: {PLAYED_S:g})"
    demo.add_argument("--seconds", type=float, default=PLAYED_S, metavar="N", help=text)
    add_shared(demo, "--runs-dir")
