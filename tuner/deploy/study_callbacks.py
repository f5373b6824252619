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
    callbacks: tuple[Callback, ...] = (ReportCallback(run), LaunchFilesCallback(run))
    if importlib.util.find_spec("optuna_dashboard") is None:
        return callbacks
    return (*callbacks, DashboardCallback(run))


class ReportCallback(Callback):
    """Writes report.html at the end."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run

    def answered(self, result: Result, records: Sequence[ProbeRecord]) -> Result:
        from tuner.display.report import write_report

        result = replace(result, report_path=self._run.report)
        write_report(result, self._run.report, records=records)
        return result


class LaunchFilesCallback(Callback):
    """Writes the launch files of the choice at the end."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run

    def answered(self, result: Result, records: Sequence[ProbeRecord]) -> Result:
        if result.best is not None and result.about.get("job"):
            from tuner.deploy.launch_files import write_launch_files
            from tuner.search_spaces.safe_files import make_folder

            make_folder(self._run.path / "best", inside=self._run.path)
            write_launch_files(result, self._run.path / "best")
        return result


class DashboardCallback(Callback):
    """Keeps the study's page in optuna-dashboard up to date."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._study: OpenStudy | None = None
        self._follower: Follower | None = None

    def opened(self, study: OpenStudy) -> None:
        from tuner.display.dashboard import Follower

        self._study = study
        self._follower = Follower(study.recorder.study, study.so_far)

    def finished(self, event: Progress) -> None:
        record, study, follower = event.record, self._study, self._follower
        if record is not None and study is not None and follower is not None:
            with storage_trouble(study.recorder.where):
                follower(record, event.probes)

    def answered(self, result: Result, records: Sequence[ProbeRecord]) -> Result:
        from tuner.display.dashboard import publish

        study = self._study
        if study is not None:
            with storage_trouble(study.recorder.where):
                publish(study.recorder.study, result, records)
        return result
