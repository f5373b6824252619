"""Result of a study as users see it: an answer joined with its views."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from tuner.answer import parts
from tuner.answer.answer import Answer, choose_again
from tuner.answer.parts import as_json, without_probabilities
from tuner.display import advice
from tuner.display.text import answer_lines, choice_lines, explanation_lines
from tuner.problem.constraints import Constraints, LimitOptions
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.fields import JSON_SCHEMA
from tuner.search_spaces.plugins import extra_module
from tuner.search_spaces.safe_files import archive_of
from tuner.workload.records.probe import without_energy

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects as go

#: Names in the JSON of a result, in their order.
_IN_JSON = (
    *("name", "run_dir", "front", "points", "best", "headline", "saving_known"),
    *(
        "recommendation",
        "choice",
        "baseline",
        "spent",
        "steps",
        "limits",
        "request",
        "failures",
        "leave_one_out",
        "progress",
    ),
    *("stopped", "stop_reason", "verification", "predicted", "attainment", "baseline_name"),
    *("today", "about", "report", "plan"),
)


class AnotherChoice(parts.AnotherChoice):
    """A choice among the points of a run, which prints as text."""

    def __str__(self) -> str:
        return "\n".join(choice_lines(self))


class Explanation(parts.Explanation):
    """Explanation of a point, which prints as text."""

    def __str__(self) -> str:
        return "\n".join(explanation_lines(self))


@dataclass(frozen=True, repr=False)
class Result(Answer):
    """The answer of `tuner.optimize`, with its tables, figures and text.

    Attributes:
        best: the choice under the constraints; without any, what is better than the baseline in
            both energy and time. `recommendation` says whether it is sure enough to run it.
        steps: optimizer steps (or units of work) that the figures are of: those that make the
            solution, or 1 if the length of the training is unknown (null in the JSON).
        predicted: points never probed at their own setting that are likely on the front, by the
            surrogates (`source="predicted"`, no windows); never among `points` or `front_points`
            and never chosen. Fastest first.
    """

    @property
    def headline(self) -> str:
        """Recommendation, its saving and its certainty, in one sentence."""
        return advice.headline(self)

    @property
    def front(self) -> pandas.DataFrame:
        """The front as a table, fastest first, by the numbers that `point` takes; InputError if
        pandas is not installed (extra `notebook`)."""
        return _extra("export").front_frame(self)

    @property
    def table(self) -> pandas.DataFrame:
        """Every point with all its figures, fastest first; raises as `front`."""
        return _extra("export").frame(self)

    def plot(self, kind: str = "front") -> go.Figure:
        """Return one of the report's figures (`tuner.display.plots.figures`), whose `write_image`
        (kaleido) makes a PDF or SVG; UnknownName if there is none, or nothing to draw in it."""
        return _extra("plots").plot(self, kind)

    def to_csv(self, out: str | Path | None = None) -> Path:
        """Write the points as CSV and return the path (default: in the run's folder); InputError if
        the file cannot be written."""
        return _extra("export").write_csv(self, out)

    def choose(
        self, constraints: Constraints | None = None, **limits: Unpack[LimitOptions]
    ) -> AnotherChoice:
        """Choose among the measured points under other constraints; nothing is measured. InputError
        if nothing was, or if the slowdown is limited and the baseline was not measured."""
        asked = (constraints or Constraints()).limited(**limits)
        found = choose_again(self, asked)
        if not asked.given and self.best and found.point.configuration != self.best.configuration:
            found = replace(found, choice=replace(found.choice, sentence=self.headline))
        return AnotherChoice(**_fields(found))

    def explain(self, point: str | Configuration = "best") -> Explanation:
        """Explain a point: its time and energy by part and the effect of each knob."""
        comparison = extra_module("tuner.comparison.explain", "an explanation")
        return Explanation(**_fields(comparison.explain(self, point)))

    def _repr_html_(self) -> str:
        """Return the recommendation and the front as a table, for a notebook."""
        return _extra("report").result_html(self)

    def __str__(self) -> str:
        """Return the answer that `tuner optimize` ends with."""
        return "\n".join(answer_lines(self))

    def __repr__(self) -> str:
        """Return the name, the size of the front and the recommendation, in a few lines."""
        counts = f"{len(self.front_points)} of {len(self.points)} points on the front"
        return f"<Result {self.name}: {counts}. {self.headline or 'Nothing was measured.'}>"

    def to_json(self) -> dict[str, Any]:
        """Return everything but the windows and the fitted models as JSON values.

        docs/report.md describes them; `schema` rises if one changes its meaning or goes.
        """
        named = {
            "run_dir": str(archive_of(self.run_dir) or self.run_dir) if self.run_dir else None,
            "front": self.front_points,
            "steps": self.length,
            "stop_reason": self.stop,
            "report": str(self.report_path) if self.report_path else None,
            "today": self.today_facts,
        }
        values = {name: named[name] if name in named else getattr(self, name) for name in _IN_JSON}
        if self.plan is not None:
            values |= {n: getattr(self.plan, n) for n in ("parameter_count", "doubts")}
        data = as_json(values) if self.has_energy else without_energy(as_json(values))
        doubted = self.plan is not None and self.plan.doubts
        return {"schema": JSON_SCHEMA, **(without_probabilities(data) if doubted else data)}


def _extra(name: str) -> Any:
    return extra_module(f"tuner.display.{name}", "this view of a result")


def _fields(value: Any) -> dict[str, Any]:
    return {item.name: getattr(value, item.name) for item in fields(value)}
