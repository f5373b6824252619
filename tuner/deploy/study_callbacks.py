"""Callbacks that show a study and its result: report, launch files, dashboard."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tuner.problem.run_folder import RunFolder
from tuner.results.result import Result
from tuner.storage import storage_trouble
from tuner.study.callbacks import Callback, OpenStudy
from tuner.workload.probe import ProbeRecord

if TYPE_CHECKING:
    from tuner.study.recorder import StudyRecorder


def report_callbacks(run: RunFolder) -> tuple[Callback, ...]:
    """Return the callbacks that write the report, the launch files and the dashboard's page."""
    if importlib.util.find_spec("optuna_dashboard") is None:
        return (ReportCallback(run),)
    return (ReportCallback(run), DashboardCallback())


class ReportCallback(Callback):
    """Writes report.html at the end, and the launch files of the choice."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run

    def answered(self, result: Result, records: Sequence[ProbeRecord]) -> Result:
        from tuner.deploy.launch_files import write_launch_files
        from tuner.display.report import write_report
        from tuner.search_spaces.safe_files import make_folder

        result = replace(result, report_path=self._run.report)
        write_report(result, self._run.report, records=records)
        if result.best is not None and result.about.get("job"):
            make_folder(self._run.path / "best", inside=self._run.path)
            write_launch_files(result, self._run.path / "best")
        return result


class DashboardCallback(Callback):
    """Publishes the figures and the choice on the study's page in optuna-dashboard."""

    def __init__(self) -> None:
        self._recorder: StudyRecorder | None = None  # a plan opens no study

    def opened(self, study: OpenStudy) -> None:
        self._recorder = study.recorder

    def answered(self, result: Result, records: Sequence[ProbeRecord]) -> Result:
        from tuner.display.dashboard import publish

        if self._recorder is not None:
            with storage_trouble(self._recorder.where):
                publish(self._recorder.study, result, records)
        return result
