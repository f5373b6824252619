"""Files of an answer: the report, and the launch files of the choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tuner.answer.answer import Answer
from tuner.answer.views import View
from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.plugins import shipped_module
from tuner.workload.records.probe import ProbeRecord


class FilesView(View):
    """View that writes the report and the launch files of the choice."""

    PROTOCOL = 1

    def write(self, run: RunFolder, answer: Answer, records: Sequence[ProbeRecord]) -> Answer:
        """Write report.html and the launch files; return the answer that names the report."""
        from tuner.deploy.launch_files import write_launch_files

        report: Any = shipped_module("tuner.display.report")
        if report is not None:
            answer = replace(answer, report_path=run.report)
            report.write_report(answer, run.report, records=records)
        if answer.best is not None and answer.about.get("job"):
            write_launch_files(answer, run.path / "best", inside=run.path)
        return answer


VIEW = FilesView()
