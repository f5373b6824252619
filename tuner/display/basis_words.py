"""Words of a study for the basis of its figures: measured, recorded or predicted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tuner.workload.records.probe import Basis


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
