"""Length and precision of the windows of probes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tuner.search_spaces.options import check_options, option

#: A window that is measured to `WindowPolicy.search_se` may be this short, seconds; NVML counters
#: update about every 100 ms and read low in windows under 2 s (docs/measuring.md).
SEARCH_MIN_S = 3.0


@dataclass(frozen=True)
class WindowPolicy:
    """Length and precision of the measurement of a live setting."""

    #: 5 s are stable on NVML (ML.ENERGY blog; see docs/measuring.md).
    min_s: float = option(5.0, "shortest window", unit="s", least=0)
    min_steps: int = option(3, "smallest number of whole optimizer steps in a window", least=0)
    max_s: float = option(
        15.0, "end the window after this even if the target is missed", unit="s", least=0
    )
    target_se: float = option(
        0.01, "relative standard error of step time and of power that ends the window", least=0
    )
    settle_s: float = option(
        1.0, "run at a new live setting before the window opens", unit="s", least=0
    )
    idle_s: float = option(
        0.3, "measure the idle power before the ranks start; 0 for not at all", unit="s", least=0
    )
    micro_batches: bool = option(
        True,
        "where whole steps take longer than two windows, measure steps of few micro-batches and "
        "extrapolate to the job's accumulation",
    )
    check_drift: bool = option(
        True, "with several live settings, visit the first one again at the end"
    )
    search_se: float = option(
        0.05,
        "relative standard error that ends a window of the search",
        least=0,
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def rough(self) -> WindowPolicy:
        """The policy of a measurement to `search_se`; this one where that is no less precise."""
        if self.search_se <= self.target_se:
            return self
        return replace(self, min_s=min(self.min_s, SEARCH_MIN_S), target_se=self.search_se)
