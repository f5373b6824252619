"""View of a running study that stays in place, for a person at a terminal.

Drawn with Rich on standard error: the used share of the limits, the probes in flight with their
phase, place and duration, and the front so far as a small plot. Events, failures too, scroll
above it in the same plain lines as in a log file (`tuner.display.progress`), so only the phases are
in the view alone, and the view is erased at its end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, TextIO, cast

from tuner.answer.parts import Point
from tuner.display.progress import EventLines, ProgressPrinter
from tuner.formatting import Units, common_mark, duration, label, short
from tuner.search_spaces.configuration import Configuration
from tuner.study.callbacks import Progress
from tuner.terminal import SafeStream, VisibleStream, raw_stream, visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

#: Points from which on a plot of them shows more than their number does.
_PLOTTED = 3
#: Characters of columns whose text can be long.
_WIDEST = {"node": 24, "phase": 32}


def can_be_live(stream: TextIO) -> bool:
    """Return True if the stream is a terminal that moves its cursor and Rich is installed."""
    import importlib.util

    if not stream.isatty() or os.environ.get("TERM", "") in ("", "dumb"):
        return False
    return importlib.util.find_spec("rich") is not None


def small_plot(points: Sequence[Point], width: int = 46, height: int = 9) -> list[str]:
    """Return a plot of the points, an o for each; empty without points."""
    from tuner.display.text import ascii_plot  # imports SciPy: once there are figures

    marks = [(point, "o") for point in points]
    return ascii_plot(marks, points, Units.of(points), width=width, height=height) if marks else []


class LiveView:
    """Shows events in place; a context manager, called with each event.

    What happened also scrolls above in `lines`, or, if `verbose`, each step of a probe.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        lines: bool = True,
        verbose: bool = False,
        title: str = "search",
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        terminal = cast(TextIO, SafeStream(raw_stream(sys.stderr), may_fail=True))
        self._console = console or Console(file=terminal)
        self._clock, self._began_s, self._title = clock, clock(), title
        above: Any = _UpperLines(self._console)
        self._lines = ProgressPrinter(above, verbose=verbose) if lines else None
        self._lock = threading.Lock()
        self._last: Progress | None = None
        self._front: tuple[Point, ...] = ()
        self._flying: dict[str, tuple[Progress, float]] = {}
        self._live = Live(
            console=self._console,
            get_renderable=self.picture,
            refresh_per_second=2,
            transient=True,
            redirect_stdout=False,
        )

    def __enter__(self) -> LiveView:
        before = sys.stderr
        self._live.start()
        if sys.stderr is not before:  # Rich shows it above the view, and obeys the codes in it
            sys.stderr = cast(TextIO, VisibleStream(sys.stderr, may_fail=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, event: Progress) -> None:
        with self._lock:
            if event.kind != "note":
                self._last = event
            if event.kind == "started" and event.request is not None:
                self._flying[event.request.probe_id] = (event, self._clock())
            elif event.record is not None:
                self._flying.pop(event.record.request.probe_id, None)
                self._front = event.front
        if self._lines is not None:
            self._lines(event)

    def picture(self) -> RenderableType:
        """Draw the current view."""
        from rich.console import Group
        from rich.rule import Rule
        from rich.text import Text

        with self._lock:
            last, flying = self._last, dict(self._flying)
            front = self._front
        parts: list[RenderableType] = [Rule(self._title, style="dim", align="left")]
        if last is None:
            return Group(*parts, Text(f"preparing, {self._clock() - self._began_s:.0f} s"))
        parts.append(self._budget(last))
        parts.append(self._in_flight(flying))
        if front:
            estimated = label(common_mark(p.meter for p in front))
            count = f"{len(front)} point{'s' * (len(front) != 1)}"
            metered = all(p.meter.has_energy for p in front)
            caption = f"energy{estimated} over time" if metered else "by time"
            parts.append(Text(f"front so far: {count}, {caption}", style="bold"))
            plot = small_plot(front) if metered and len(front) >= _PLOTTED else []
            parts += [Text(line, style="cyan", no_wrap=True) for line in plot]
        return Group(*parts)

    def _budget(self, last: Progress) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        grid = Table.grid(padding=(0, 2))
        estimated = label(last.meter.mark if last.meter else "")
        most_kJ = last.probe_budget_kJ
        units = Units.for_values([most_kJ or last.spent_kJ], [])
        most = "" if most_kJ is None else f" of {units.energy_text(most_kJ)}"
        probes = f"{last.probes}" + (f" of {last.max_probes}" if last.max_probes else "")
        energy = f"{units.energy_text(last.spent_kJ)}{most}{estimated}"
        energy = last.meter.shown(energy) if last.meter else energy
        whole = "" if last.search_s is None else f" of {duration(last.search_s)}"
        passed = f"{duration(self._clock() - self._began_s)}{whole}"
        for name, used, limit, phrase in (
            ("probes", last.probes, last.max_probes, probes),
            ("energy", last.spent_kJ, most_kJ, energy),
            ("time", last.elapsed_s, last.search_s, passed),
        ):
            if not phrase:
                continue
            bar = ProgressBar(total=limit, completed=used, width=30) if limit else ""
            grid.add_row(name, bar, phrase)
        return grid

    def _in_flight(self, flying: dict[str, tuple[Progress, float]]) -> Table | str:
        from rich.table import Table
        from rich.text import Text

        if not flying:
            return "no probe in flight"
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        # Rich narrows columns that may wrap, and only then the others.
        for name in ("in flight", "for", "phase", "node", "launch setting"):
            fixed = name != "launch setting"
            table.add_column(name, no_wrap=fixed, max_width=_WIDEST.get(name))
        for probe_id, (event, since_s) in flying.items():
            request = event.request
            assert request is not None
            names = [name for name in event.varying if name in request.launch]
            launch = short(Configuration(request.launch), names)
            places = event.places() if event.places is not None else {}
            phase = event.phase(probe_id) if event.phase is not None else ""
            visits = f"{len(request.live)} setting{'s' * (len(request.live) != 1)}"
            table.add_row(
                probe_id,
                f"{self._clock() - since_s:.0f} s",
                Text(visible(phase or visits)),
                Text(visible(places.get(probe_id, "") or "this node")),
                Text(visible(launch), no_wrap=True, overflow="ellipsis"),
            )
        return table


class _UpperLines:
    # A stream whose lines appear above the view.

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> None:
        if text.strip("\n"):
            self._console.print(visible(text.rstrip("\n")), markup=False, highlight=False)

    def flush(self) -> None:
        pass


@contextmanager
def shown(
    *, plain: bool = False, verbose: bool = False
) -> Iterator[Callable[[Progress], None] | None]:
    """Yield a receiver that shows a search on standard error.

    At a terminal it is a view that stays in place, in a notebook a bar with the last line, and
    elsewhere, or if `plain`, a line a probe; `verbose` makes it a line a step of a probe.
    """
    if plain or not can_be_live(sys.stderr):
        printer = ProgressPrinter(verbose=verbose)
        yield printer if plain or not _in_notebook() else NotebookBar()
        return
    with LiveView(verbose=verbose) as view:
        yield view


def _in_notebook() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


class NotebookBar:
    """Shows a search in a notebook's cell: a bar of its probes, and the last line below."""

    def __init__(self) -> None:
        from IPython.display import display

        self._lines = EventLines(verbose=False)
        self._shown = display({"text/plain": "preparing"}, raw=True, display_id=True)

    def __call__(self, event: Progress) -> None:
        lines = self._lines(event)
        if lines:
            most = f' max="{event.max_probes}"' if event.max_probes else ""
            bar = f'<progress style="width:100%"{most} value="{event.probes}"></progress>'
            html = f"{bar if event.max_probes else ''}<pre>{escape(lines[0])}</pre>"
            self._shown.update({"text/plain": lines[0], "text/html": html}, raw=True)
