"""View of a result: units, marks, roles and sentences, worked out once for every rendering.

The text, the page, the notebook, the figures and the dashboard take what they show from here, and
only lay it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from tuner.answer.answer import Answer
from tuner.answer.choice import as_shown, ratios_to
from tuner.answer.parts import Point
from tuner.formatting import (
    Units,
    change,
    common_mark,
    counted,
    duration,
    energy_text,
    label,
    number,
    percent,
    varying_knobs,
)
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.knob_declarations import CHANGED, MARK, changed_training
from tuner.workload.records.probe import Basis, ProbeRecord, of_energy


@dataclass(frozen=True)
class BasisWords:
    """Words that depend on the basis of a study's figures.

    Attributes:
        found: participle of a figure, "measured" or "predicted".
        subject: what the figures are, beside the name of the job.
        untried: a configuration without a probe.
        notice: sentence that a page begins with; "" if there is nothing to say.
        spent, spent_section: headings of the search's cost on a tile and of a section.
        spent_time, windows: headings of the search's time and of its windows.
    """

    found: str
    subject: str
    untried: str
    notice: str
    spent: str
    spent_section: str
    spent_time: str
    windows: str


_MEASURED = BasisWords(
    found="measured",
    subject="measured",
    untried="Never measured",
    notice="",
    spent="Search spent",
    spent_section="What the search spent",
    spent_time="Wall-clock time",
    windows="Windows measured",
)
WORDS = {
    Basis.MEASURED: _MEASURED,
    Basis.RECORDED: replace(_MEASURED, subject="from a recording"),
    Basis.PREDICTED: BasisWords(
        found="predicted",
        subject="predicted, nothing was measured",
        untried="Not tried",
        notice=(
            "A prediction: every figure is the analytic models', nothing was measured. The "
            "commands tuner fit and python -m benchmarks.published print their known error."
        ),
        spent="A real search would take",
        spent_section="What a real search would take",
        spent_time="Time on the cluster",
        windows="Windows simulated",
    ),
}


_DEGREES = ("tensor_parallel", "pipeline_parallel", "expert_parallel")


def figure_texts(point: Point, units: Units) -> tuple[str, str, str]:
    """Return a point's time, energy and power with their units; "" for unknown ones."""
    return (
        units.time_text(point.time_to_solution_s, units.digits),
        point.meter.shown(units.energy_text(point.energy_to_solution_kJ, units.digits)),
        point.meter.shown(f"{number(point.power_W)} W"),
    )


def failures_of(result: Answer) -> list[ProbeRecord]:
    """Return the probes that failed, without those that the user cancelled, first baselines, and
    trainings that were too short."""
    return [
        record
        for record in result.failures
        if record.failure is not None and record.failed
        if not record.failure.was_cancelled and record not in result.replaced_baselines
    ]


def too_short_of(result: Answer) -> list[ProbeRecord]:
    """Return the probes whose training was over before they were complete."""
    return [record for record in result.failures if not record.failed]


@dataclass(frozen=True)
class View:
    """Result with the values that its renderings share."""

    result: Answer

    @cached_property
    def points(self) -> Sequence[Point]:
        """Every point but those that were never tried; some of them twice."""
        named = (point for point in (self.result.best, self.result.baseline) if point is not None)
        return [*self.result.points, *self.result.front_points, *named]

    @cached_property
    def units(self) -> Units:
        return Units.of(self.points)

    def pairs(self, points: Iterable[Point]) -> list[tuple[Point, Point]]:
        """Return points with the baseline's before each, where they are compared with it."""
        rivals = [(self.result.judged.rival(point), point) for point in points]
        return [(rival, point) for rival, point in rivals if rival is not None]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Knobs in which points differ."""
        return varying_knobs(point.configuration for point in self.points)

    @cached_property
    def front(self) -> frozenset[Configuration]:
        return frozenset(point.configuration for point in self.result.front_points)

    @cached_property
    def mark(self) -> str:
        """Mark of the energies: "twin", "estimated", or "" if all were metered."""
        failed = [record.meter for record in self.result.failures]
        return common_mark([point.meter for point in self.points] + failed)

    def shown(self, energy: str) -> str:
        """Return a text about energy or power, or "" for a study of time alone."""
        return energy if self.result.has_energy else ""

    @property
    def estimated(self) -> str:
        """The mark to follow an energy, " (estimated)", or ""."""
        return label(self.mark)

    def ratios(self, point: Point) -> tuple[float, float] | None:
        """Return a point's energy and time over the baseline's, as both are shown.

        None without a baseline, for the baseline itself, and where no saving is known.
        """
        rival = self.result.judged.rival(point) if self.result.saving_known else None
        return None if rival is None else ratios_to(as_shown(rival), as_shown(point))

    def is_today(self, point: Point) -> bool:
        return point.configuration == self.result.today_configuration

    def role(self, point: Point) -> str:
        """Return "recommended" or "promising" for such a point, else ""."""
        advice = self.result.recommendation
        if advice is None:
            return ""
        if point.configuration == advice.point.configuration:
            return "recommended"
        promising = advice.promising
        return "promising" if promising and point.configuration == promising.configuration else ""

    def changes(self, point: Point) -> tuple[str, str]:
        """Return "24 % less energy" and "3 % more time" against the baseline.

        Both are "" where there are no `ratios`.
        """
        found = self.ratios(point)
        if found is None:
            return "", ""
        energy, time = found
        return (
            self.shown(change(energy, 1, "less energy", "more energy")),
            change(time, 1, "less time", "more time"),
        )

    @cached_property
    def basis(self) -> Basis:
        """Basis of the figures; predicted for a plan and a study on a simulated cluster."""
        failed = [record.meter for record in self.result.failures]
        if Basis.PREDICTED in {m.basis for m in (*(p.meter for p in self.points), *failed)}:
            return Basis.PREDICTED
        return Basis.RECORDED if self.result.job is None else Basis.MEASURED

    @property
    def words(self) -> BasisWords:
        """Words for the basis of the figures."""
        return WORDS[self.basis]

    @property
    def surrogates(self) -> str:
        """Sentence on the surrogates' errors; "" if there were too few measurements."""
        if (loo := self.result.leave_one_out) is None:
            return ""
        power = self.shown(f" and {percent(loo.power_error)} of power")
        return (
            f"Surrogates, leave-one-out: median error {percent(loo.time_error)} of step time"
            f"{power}."
        )

    @property
    def unit_of_work(self) -> str:
        """Name of one of the steps: "optimizer step", or a recorded table's "epoch"."""
        return str(self.result.about.get("unit_of_work", "optimizer step"))

    @property
    def notices(self) -> str:
        """Notices of the limits of the study's comparison; "" if there are none."""
        return " ".join(filter(None, (self._changed_training, self._parallelism)))

    @property
    def _changed_training(self) -> str:
        job, points = self.result.job, self.result.points
        knobs = job.knobs if job is not None else ()
        found = (changed_training(point.configuration.launch, knobs) for point in points)
        values = sorted({value for each in found for value in each})
        if not values:
            return ""
        return (
            f"Points marked {CHANGED}={MARK} learn something else than today "
            f"({', '.join(values)}), and may need more steps or reach another loss: their time "
            "and energy are for the same number of steps."
        )

    @property
    def _parallelism(self) -> str:
        # For a study of the built-in program that measured a model that is split.
        job = self.result.job
        if job is None or not job.trains_synthetic_data or self.basis is Basis.PREDICTED:
            return ""
        splits = any(
            isinstance(degree := point.configuration.get(name), int) and degree > 1
            for point in self.result.points
            for name in _DEGREES
        )
        if not splits:
            return ""
        return (
            "Measured with the built-in training program, transformers under DeepSpeed: how "
            "tensor, pipeline and expert parallelism rank against ZeRO is that of this program, "
            "and may be different in another."
        )

    @property
    def spent(self) -> str:
        """Energy of the search: in the unit of the points, or in its own if that is far from it."""
        units, spent_kJ = self.units, self.result.spent.energy_kJ
        alike = self.result.length is not None and 0.01 <= spent_kJ / units.kJ < 1e4
        return units.energy_text(spent_kJ) if alike else energy_text(spent_kJ)

    @property
    def spent_line(self) -> str:
        """Cost of the search and its payback; for past runs, that nothing was spent."""
        spent = self.result.spent
        if self.result.points and not spent.energy_kJ and not spent.time_s:
            return self.payback
        if self.basis is Basis.PREDICTED:
            text = f"A real search like this would take about {duration(spent.time_s)} and "
            text += f"{self.spent} of the cluster, in {counted(spent.probes, 'probe')}."
            return f"{text} {self.payback}".rstrip()
        energy = self.shown(f"{self.spent}{self.estimated} and ")
        probes = counted(spent.probes, "probe")
        text = f"Spent: {energy}{duration(spent.time_s)} in {probes}"
        if self.failed_in_passing:
            text += f" ({self.failed_in_passing} failed)"
        return f"{text}, repaid {self._repaid}." if self._repaid else f"{text}."

    @property
    def failed_in_passing(self) -> int:
        """Number of failed probes if most others did not fail, so that the answer hardly depends on
        them; else 0."""
        spent = self.result.spent
        if self.basis is Basis.PREDICTED or not (spent.energy_kJ or spent.time_s):
            return 0  # the line of what was spent counts no failures there
        failed = len(failures_of(self.result))
        tried = {point.configuration for point in self.result.points}
        return failed if 2 * failed < spent.probes and len(tried) > 1 else 0

    @property
    def payback(self) -> str:
        """Sentence on when the savings repay the search; "" where nothing is saved."""
        if self.result.points and self.result.spent.energy_kJ == 0:
            return "Nothing was spent on a search."
        return f"The savings repay the search {self._repaid}." if self._repaid else ""

    @property
    def _repaid(self) -> str:
        steps, share = self.result.spent.payback_steps, self.result.spent.payback_share
        advice = self.result.recommendation
        if (
            (advice is not None and advice.action == "keep")
            or steps is None
            or not math.isfinite(steps)
        ):
            return ""
        if share is not None and share > 1:
            return f"after {number(share)} runs of the whole job"
        of_job = "" if share is None else f" ({percent(share)} of the job)"
        amount = f"{math.ceil(steps):,}" if steps >= 10 else number(steps)
        return f"after {amount} {self.unit_of_work}s{of_job}"


# Columns of every table of points: each figure with its heading, unit and text.
#
# A new column is a row here, and its place in the tables that are to show it. Files have columns of
# their own (`_FILE`), and JSON has the fields of `Point`.


Text = Callable[[View, Point], str]


@dataclass(frozen=True)
class Column:
    """Column of tables that people read.

    Attributes:
        name: heading of a table in text.
        figure: without the unit.
        below: what a page shows below it: the 90 % interval, or the peak.
        metered: the mark of the meter follows it, e.g. "(estimated)".
    """

    name: str
    heading: str
    figure: Text
    unit: Callable[[Units], str] = lambda units: ""
    below: Text = lambda view, point: ""
    metered: bool = False

    def text(self, view: View, point: Point) -> str:
        """Return the figure with its unit."""
        return f"{self.figure(view, point)} {self.unit(view.units)}".rstrip()

    def title(self, units: Units) -> str:
        unit = self.unit(units)
        return f"{self.heading} ({unit})" if unit else self.heading


def _peak(view: View, point: Point) -> str:
    return "" if point.peak_power_W is None else f"peak {number(point.peak_power_W)}"


def _memory(view: View, point: Point) -> str:
    peak = point.peak_memory_bytes
    return f"{number(peak / 2**30)} GiB" if peak else "unknown"


TIME = Column(
    "time",
    "Time",
    lambda view, point: number(point.time_to_solution_s / view.units.s),
    lambda units: units.time,
    lambda view, point: view.units.interval_text(point.time_interval_s, view.units.s),
)
ENERGY = Column(
    "energy",
    "Energy",
    lambda view, point: number(point.energy_to_solution_kJ / view.units.kJ),
    lambda units: units.energy,
    lambda view, point: view.units.interval_text(point.energy_interval_kJ, view.units.kJ),
    metered=True,
)
POWER = Column(
    "power", "Power", lambda _, point: number(point.power_W), lambda _: "W", _peak, metered=True
)
ON_FRONT = Column("on front", "P(non-dominated)", lambda _, point: percent(point.p_nondominated))
MEMORY = Column("peak memory", "Peak memory", _memory)

#: Those of a table in text, of a page, of a notebook, of a hover label.
TEXT = (TIME, ENERGY, POWER, ON_FRONT)
PAGE, NOTEBOOK = (ENERGY, TIME, POWER, ON_FRONT, MEMORY), (ENERGY, TIME, POWER, ON_FRONT)
HOVER = (ENERGY, TIME, POWER, ON_FRONT)
#: Those whose intervals are columns of their own in a table in text.
WITH_INTERVAL = (TIME, ENERGY)


def energy_columns(table: Sequence[Column], view: View) -> list[Column]:
    """Return the columns of a table that have figures: of time alone, no metered ones."""
    return [column for column in table if view.result.has_energy or not column.metered]


#: Columns of a file by name, with its unit. By the name, too, those of energy are left out of a
#: study of time alone (`of_energy`).
_FILE: Mapping[str, Callable[[View, Point], Any]] = {
    "energy_to_solution_kJ": lambda view, p: p.energy_to_solution_kJ,
    "energy_low_kJ": lambda view, p: p.energy_interval_kJ.low,
    "energy_high_kJ": lambda view, p: p.energy_interval_kJ.high,
    "time_to_solution_s": lambda view, p: p.time_to_solution_s,
    "time_low_s": lambda view, p: p.time_interval_s.low,
    "time_high_s": lambda view, p: p.time_interval_s.high,
    "power_W": lambda view, p: p.power_W,
    "p_nondominated": lambda view, p: p.p_nondominated,
    "on_front": lambda view, p: p.configuration in view.front,
    "chosen": lambda view, p: (
        view.result.best is not None and p.configuration == view.result.best.configuration
    ),
    "baseline": lambda view, p: view.is_today(p),
    "source": lambda view, p: p.source,
    "windows": lambda view, p: p.windows,
    "peak_memory_GB": lambda view, p: (
        None if p.peak_memory_bytes is None else p.peak_memory_bytes / 1e9
    ),
    "energy_scope": lambda view, p: p.meter.scope,
    "energy_from": lambda view, p: p.meter.source,
    "energy_estimated": lambda view, p: p.meter.estimated,
    "energy_twin": lambda view, p: p.meter.twin,
    "flags": lambda view, p: "; ".join(p.flags),
}


def file_columns(view: View) -> dict[str, Callable[[Point], Any]]:
    """Return the columns of a file by name."""
    metered = view.result.has_energy
    names = (name for name in _FILE if metered or not of_energy(name))
    return {name: partial(_FILE[name], view) for name in names}
