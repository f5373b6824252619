"""Basis of figures: of a study's probes, of a meter, or of a point."""

from __future__ import annotations

from enum import StrEnum


class Basis(StrEnum):
    """What figures rest on.

    Energy has a mark of its own besides (`MeterInfo.mark`): it may be estimated, or of a twin.
    """

    MEASURED = "measured"  #: probes that ran
    RECORDED = "recorded"  #: probes that ran before, from a trace, a table or past runs
    PREDICTED = "predicted"  #: the analytic models; nothing ran
