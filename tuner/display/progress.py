"""Progress events of a study: as plain lines, for a terminal and a log file alike, and as metrics.

One line a probe: time of day, probe, configuration, what was measured, cost, count, front, time
left. With `verbose`, also why each probe was chosen, each window, and the front as a table. The
same lines go to the logger `LOGGER` of Python's logging, for programs that configure one.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, TextIO, cast

from tuner.answer.parts import Point
from tuner.formatting import Units, common_mark, counted, duration, label, number, short
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.study.events import Progress
from tuner.terminal import SafeStream, VisibleStream, raw_stream, visible
from tuner.workload.records.probe import ProbeRecord, ProbeRequest

#: Logger that gets the lines of a search.
LOGGER = "tuner.search"


class ProgressPrinter:
    """Prints events as plain lines."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        verbose: bool = False,
        now: Callable[[], str] = lambda: time.strftime("%H:%M:%S"),
    ) -> None:
        self._now, self._lines = now, EventLines(verbose)
        self._stream: TextIO | None = stream or sys.stderr

    def __call__(self, event: Progress) -> None:
        if self._stream is None:
            return
        try:
            stamp = self._now()
            for line in self._lines(event):  # a continued line belongs to the one above
                stamped = line if line.startswith(" ") else f"{stamp} {line}"
                print(stamped, file=self._stream, flush=True)
        except BrokenPipeError:  # the reader is gone (`tuner optimize 2>&1 | head`)
            self._stream = None


class ProgressLogger:
    """Passes events to Python's logging, failures as warnings, and then to other receivers."""

    def __init__(self, *receivers: Callable[[Progress], None] | None) -> None:
        self._receivers = [receiver for receiver in receivers if receiver is not None]
        self._lines = EventLines(verbose=True)
        self._logger = logging.getLogger(LOGGER)

    def __call__(self, event: Progress) -> None:
        if self._logger.isEnabledFor(logging.INFO):
            failed = event.record is not None and event.record.failed
            level = logging.WARNING if failed else logging.INFO
            for line in self._lines(event):
                self._logger.log(level, "%s", line)
        for receiver in self._receivers:
            receiver(event)


class EventLines:
    """Lines of events, which remember the front and the notes that were shown."""

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose
        self._front: tuple[Configuration, ...] = ()
        self._noted: set[str] = set()
        self._mark = ""

    def __call__(self, event: Progress) -> list[str]:
        if event.kind == "note":
            step = re.match(r"p\d+ continues with ", event.message)
            return [] if (step or event.detail) and not self._verbose else [event.message]
        if event.kind == "started" and event.request is not None:
            return self._started(event, event.request) if self._verbose else []
        if event.record is not None:
            return (self._finished if self._verbose else self._one_line)(event, event.record)
        return []

    def _one_line(self, event: Progress, record: ProbeRecord) -> list[str]:
        # What a probe found in one line, and each kind of note the first time.
        request, mark = record.request, label(record.meter.mark)
        names = [name for name in event.varying if name in request.launch]
        parts = [request.probe_id, short(Configuration(request.launch), names)]
        if record.measurements:
            parts += _measured(record)
        if record.failure is not None:
            parts.append(record.failure.outcome)
        parts.append(duration(record.wall_s))
        parts.append(f"{event.probes}" + (f"/{event.max_probes}" if event.max_probes else ""))
        front = tuple(point.configuration for point in event.front)
        new = len(set(front) - set(self._front))
        self._front = front
        parts.append(f"front {len(front)}" + (f", {new} new" if new else ""))
        # The mark of estimated energies stands where it changes: nodes may differ in their meters.
        lines = ["  ".join(parts) + (mark if mark != self._mark else "")]
        self._mark = mark
        if record.failure is not None:
            lines.append(f"  {record.failure.message}")
        for measurement in record.measurements:
            for flag in measurement.flags:
                kind = re.sub(r"[\d.,]+", "#", flag)
                if kind not in self._noted:
                    self._noted.add(kind)
                    lines.append(f"  note: {flag}")
        return lines

    def _started(self, event: Progress, request: ProbeRequest) -> list[str]:
        names = [name for name in event.varying if name in request.launch]
        visits = [live.short for live in request.live if live]
        text = f"{request.probe_id} probing {short(Configuration(request.launch), names)}"
        if visits:
            text += f" at {'; '.join(visits)}"
        return [f"{text}  ({event.message or request.purpose})"]

    def _finished(self, event: Progress, record: ProbeRecord) -> list[str]:
        estimated = label(record.meter.mark)
        lines = []
        for m in record.measurements:
            live = f" at {m.live.short}" if m.live else ""
            energy = record.meter.shown(
                f", {number(m.power_W)} W, {number(m.energy_per_step_J)} J a step{estimated}"
            )
            lines.append(
                f"{record.request.probe_id} {record.meter.basis}{live} "
                f"{number(m.step_time_s)} s a step{energy}"
                + (f"  [{'; '.join(m.flags)}]" if m.flags else "")
            )
        if record.failure is not None:
            failure = record.failure
            lines.append(f"{record.request.probe_id} {failure.outcome}: {failure.message}")
        units = Units.for_values([event.probe_budget_kJ or event.spent_kJ], [])
        limit_kJ = event.probe_budget_kJ
        budget = f" of {units.energy_text(limit_kJ)}" if limit_kJ is not None else ""
        count = f" of at most {event.max_probes}" if event.max_probes is not None else ""
        spent = f", {units.energy_text(event.spent_kJ)} spent{budget}{estimated}"
        lines.append(
            f"  {counted(event.probes, 'probe')}{count}{record.meter.shown(spent)}; "
            f"this one {number(record.wall_s)} s, its launch {number(record.launch_s)} s"
        )
        from tuner.display.text import brief_front_lines  # imports SciPy: once there are figures

        front = tuple(point.configuration for point in event.front)
        if front != self._front:
            self._front = front
            lines.append(f"  front so far, {len(front)} point{'s' * (len(front) != 1)}:")
            names = [n for n in event.varying if any(n in (*c.launch, *c.live) for c in front)]
            lines += ["    " + line for line in brief_front_lines(event.front, names)]
        return lines


def _measured(record: ProbeRecord) -> list[str]:
    # Clocks, step times and joules of a probe's windows, as ranges.
    windows = record.measurements
    lives = list(dict.fromkeys(m.live.short for m in windows if m.live))
    if len(lives) > 1:
        named = [m.live.short for m in windows if m.live]
        numbers = sorted({int(n) for text in named for n in re.findall(r"\d+", text)})
        same = len({re.sub(r"\d+", "", text) for text in named}) == 1
        alone = same and all(len(re.findall(r"\d+", text)) == 1 for text in named)
        unit = re.sub(r"\d+", "", named[0])
        lives = [
            f"{numbers[0]}..{numbers[-1]}{unit}" if alone else f"{lives[0]}, ...",
            f"{len(lives)} settings",
        ]
    steps = f"{_span([m.step_time_s for m in windows])} s/step"
    unit_kJ = Units.for_values([m.energy_per_step_J / 1000 for m in windows], [])
    joules = [m.energy_per_step_J / 1000 / unit_kJ.kJ for m in windows]
    energy = record.meter.shown(f"{_span(joules)} {unit_kJ.energy}/step")
    return [*lives, steps, *filter(None, [energy])]


def _span(values: list[float]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low}-{high}"


def metrics_of(event: Progress) -> dict[str, float]:
    """Return the metrics of a probe that ended, units in their names; empty for other events."""
    record = event.record
    if event.kind != "finished" or record is None:
        return {}
    metrics = {
        "spent_kJ": event.spent_kJ,
        "probes": float(event.probes),
        "front_points": float(len(event.front)),
        "failed": float(record.failed),
    }
    if event.front:
        energies = [point.energy_to_solution_kJ for point in event.front]
        metrics["least_energy_to_solution_kJ"] = min(energies)
        metrics["least_time_to_solution_s"] = event.front[0].time_to_solution_s
    if record.measurements:
        metrics["energy_per_step_J"] = min(m.energy_per_step_J for m in record.measurements)
        metrics["step_time_s"] = min(m.step_time_s for m in record.measurements)
        metrics["power_W"] = max(m.power_W for m in record.measurements)
    return {name: value for name, value in record.meter.known(metrics).items() if value is not None}


def track(tracker: Any, *, prefix: str = "joulefront/") -> Callable[[Progress], None]:
    """Return a receiver of progress events that logs each probe, for `on_progress=`.

    Args:
        tracker: a W&B run (`wandb.init()`), the module `mlflow` with an active run or any object
            with its `log_metrics`, or a TensorBoard `SummaryWriter`.
    """
    send = _sender(tracker)

    def receive(event: Progress) -> None:
        metrics = metrics_of(event)
        if metrics:
            send({prefix + name: value for name, value in metrics.items()}, event.probes)

    return receive


def _sender(tracker: Any) -> Callable[[Mapping[str, float], int], None]:
    if callable(getattr(tracker, "log_metrics", None)):  # MLflow
        return lambda metrics, step: tracker.log_metrics(dict(metrics), step=step)
    if callable(getattr(tracker, "add_scalar", None)):  # TensorBoard

        def add(metrics: Mapping[str, float], step: int) -> None:
            for name, value in metrics.items():
                tracker.add_scalar(name, value, step)
            tracker.flush()

        return add
    if callable(getattr(tracker, "log", None)):  # W&B, which keeps an open step back by default
        return lambda metrics, step: tracker.log(dict(metrics), step=step, commit=True)
    raise InputError(
        f"cannot log to {type(tracker).__name__}; give a W&B run, the module mlflow, or a "
        "TensorBoard SummaryWriter"
    )


# View of a running study that stays in place, for a person at a terminal.
#
# Drawn with Rich on standard error: the used share of the limits, the probes in flight with their
# phase, place and duration, and the front so far as a small plot. Events, failures too, scroll
# above it in the same plain lines as in a log file (`tuner.display.progress`), so only the phases
# are in the view alone, and the view is erased at its end.


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
