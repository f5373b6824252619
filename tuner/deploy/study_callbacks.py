"""Callbacks that show a study and its result: report, launch files, dashboard."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tuner.problem.run_folder import RunFolder
from tuner.results.result import Result
from tuner.storage import storage_trouble
from tuner.study.callbacks import Callback, OpenStudy, Progress
from tuner.workload.probe import ProbeRecord

if TYPE_CHECKING:
    from tuner.display.dashboard import Follower


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
    """Keeps the study's page in optuna-dashboard up to date."""

    def __init__(self) -> None:
        self._open: tuple[OpenStudy, Follower] | None = None  # a plan opens no study

    def opened(self, study: OpenStudy) -> None:
        from tuner.display.dashboard import Follower

        self._open = study, Follower(study.recorder.study, study.so_far)

    def happened(self, event: Progress) -> None:
        if event.record is not None and self._open is not None:
            study, follower = self._open
            with storage_trouble(study.recorder.where):
                follower(event.probes)

    def answered(self, result: Result, records: Sequence[ProbeRecord]) -> Result:
        from tuner.display.dashboard import publish

        if self._open is not None:
            recorder = self._open[0].recorder
            with storage_trouble(recorder.where):
                publish(recorder.study, result, records)
        return result
