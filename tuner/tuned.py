"""What `optimize`, `replay` and `load_result` hand to the user: the result, and what can be done
with it. Tables, figures, exports and explanations are made by modules that know `tuner.result`, so
they are asked for here and not there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_spaces.configuration import Configuration
from tuner.result import Result

if TYPE_CHECKING:
    import pandas

    from tuner.explain import Explanation

__all__ = ["TunedResult"]


@dataclass(frozen=True)
class TunedResult(Result):
    """A `Result` that shows, draws, exports and explains itself."""

    @classmethod
    def of(cls, result: Result) -> TunedResult:
        return cls(**{each.name: getattr(result, each.name) for each in fields(Result)})

    @property
    def front(self) -> pandas.DataFrame:
        """The front, fastest first: one row a point, one column a knob (see `tuner.export.rows`).

        Raises:
            InputError: pandas is not installed; the extra `notebook` brings it.
        """
        from tuner.export import frame

        return frame(self, self.front_points)

    @property
    def table(self) -> pandas.DataFrame:
        """Every point, fastest first, in the columns of `front`.

        Raises:
            InputError: pandas is not installed; the extra `notebook` brings it.
        """
        from tuner.export import frame

        return frame(self)

    def plot(self, kind: str = "front", *, backend: str = "plotly") -> Any:
        """One of the report's figures.

        Args:
            kind: "front", "live", "hypervolume", "probes", ... (see `tuner.plots.figures`).
            backend: "plotly" for a `plotly.graph_objects.Figure`, or "matplotlib" for a
                `matplotlib.figure.Figure` of the same data, for papers.

        Raises:
            UnknownName: there is no such figure, or this result has nothing to draw in it.
            InputError: matplotlib is wanted and not installed.
        """
        from tuner.plots import plot

        return plot(self, kind, backend=backend)

    def export(self, to: str, out: str | Path | None = None) -> Path:
        """Write the result as "csv", "parquet", "t4", "wandb" or "mlflow"; the path written.

        Args:
            to: the format.
            out: the file or folder; in the run's folder when not given.

        Raises:
            InputError: the format is unknown, or a package that it needs is not installed.
        """
        from tuner.export import export_result

        return export_result(self, to, out)

    def explain(self, point: str | Configuration = "best") -> Explanation:
        """Where a point's time and energy go, which knob bought what, which guidelines hold here.

        Args:
            point: as `point`.

        Raises:
            UnknownName: there is no such point.
        """
        from tuner.explain import explain

        return explain(self, point)

    def _repr_html_(self) -> str:
        """What a notebook shows of a result: the choice, and the front as a table."""
        from tuner.showing.notebook import result_html

        return result_html(self)
