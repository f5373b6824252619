"""Socket of views: additions of an extra to the answer of a run, as lines and as files.

A view is an object of a class derived from `AnswerExtra`, which overrides what it adds. Those of
this package stand in the table of the socket; another distribution brings one by an entry point of
the group `joulefront.views`. (`tuner.display.view.View` is an answer with its figures as shown.)
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.search_spaces.plugins import Socket
from tuner.workload.records.probe import ProbeRecord

if TYPE_CHECKING:
    from tuner.answer.answer import Answer
    from tuner.problem.run_folder import RunFolder


class AnswerExtra:
    """Base of views, which adds nothing.

    A class derived from it states the version of the protocol that it follows as `PROTOCOL`.
    """

    def opening_lines(self, answer: Answer) -> list[str]:
        """Return lines above the recommendation."""
        return []

    def answer_lines(self, answer: Answer) -> list[str]:
        """Return lines below the recommendation."""
        return []

    def summary_lines(self, answer: Answer) -> list[str]:
        """Return lines at the end of the summary of `tuner show`."""
        return []

    def write(self, run: RunFolder, answer: Answer, records: Sequence[ProbeRecord]) -> Answer:
        """Write files of an answer into its run; return the answer that names them."""
        return answer


SOCKET = Socket(
    "joulefront.views",
    "view",
    1,
    ("opening_lines", "answer_lines", "summary_lines", "write"),
    {
        "plan": "tuner.planner.text:VIEW",
        "micro-batch": "tuner.comparison.explain:VIEW",
        "files": "tuner.deploy.launch_files:VIEW",
    },
)


class _PluginView(AnswerExtra):
    """A view of another distribution, whose failures do not take the answer with them."""

    PROTOCOL = 1

    def __init__(self, name: str, view: AnswerExtra) -> None:
        self._name, self._view = name, view

    def _lines(self, method: str, answer: Answer) -> list[str]:
        try:
            return [str(line) for line in getattr(self._view, method)(answer)]
        except Exception as error:
            fault = f"{method}() failed ({type(error).__name__}: {str(error)[:200]})"
            return [f"The view {self._name!r} adds nothing: {fault}."]

    def opening_lines(self, answer: Answer) -> list[str]:
        return self._lines("opening_lines", answer)

    def answer_lines(self, answer: Answer) -> list[str]:
        return self._lines("answer_lines", answer)

    def summary_lines(self, answer: Answer) -> list[str]:
        return self._lines("summary_lines", answer)

    def write(self, run: RunFolder, answer: Answer, records: Sequence[ProbeRecord]) -> Answer:
        try:
            return self._view.write(run, answer, records)
        except Exception as error:
            warnings.warn(
                f"the view {self._name!r} wrote nothing: {type(error).__name__}: {error}",
                stacklevel=2,
            )
            return answer


def views() -> Sequence[AnswerExtra]:
    """Return the views of this installation."""
    plugins = [_PluginView(name, view) for name, view in SOCKET.plugins.found.items()]
    return [*SOCKET.parts, *plugins]


def view_named(name: str) -> Any:
    """Return a shipped view, whose own methods read runs of its kind.

    Raises:
        InputError: this installation leaves its extra out.
    """
    return SOCKET.needed(name, f"a {name}")
