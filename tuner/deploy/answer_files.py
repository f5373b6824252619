"""Files of an answer: the report, and the launch files of the choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tuner.answer.answer import Answer
from tuner.problem.run_folder import RunFolder
from tuner.workload.records.probe import ProbeRecord


def write_answer(run: RunFolder, result: Answer, records: Sequence[ProbeRecord]) -> Answer:
    """Write report.html and the launch files of the choice; return the result that names them."""
    from tuner.deploy.launch_files import write_launch_files
    from tuner.display.report import write_report

    result = replace(result, report_path=run.report)
    write_report(result, run.report, records=records)
    if result.best is not None and result.about.get("job"):
        write_launch_files(result, run.path / "best", inside=run.path)
    return result
