"""Settings of a search: its limits, its stop rule, the length of its measurements.

A search ends when what is left to find would not repay the next probe. Without any limit it also
uses at most `DEFAULT_SHARE` of the training's energy, once `LEAST_LAUNCHES` launch settings are
measured, and makes at most `DEFAULT_PROBES` probes. As soon as the user gives one limit, it alone
holds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from tuner.search_spaces.options import check_options, option
from tuner.workload.records.probe import WindowPolicy

DEFAULT_PROBES = 40
DEFAULT_SHARE = 0.01
#: Launch settings before which a share of the training's energy does not end a search.
LEAST_LAUNCHES = 8
#: A search of this number of probes at most has none to spare for learning the space.
FEW_PROBES = 5
#: A probe of a simulated cluster may take as long as the steps of a large model (simulated
#: seconds).
SIMULATED_LIMIT_S = 3600.0


@dataclass(frozen=True)
class SearchSettings:
    """Limits and rules of a search."""

    probe_budget_kJ: float | None = option(
        None,
        "maximum energy of all probes of the search",
        unit="kJ",
        above=0,
        alias="probe-budget",
    )
    max_probes: int | None = option(
        None,
        "maximum number of probes, those of today's configuration and failed ones included "
        f"(default: {DEFAULT_PROBES} if the search has no other limit)",
        least=1,
    )
    search_s: float | None = option(
        None,
        "time limit of the search: start no probe that is expected to end later",
        unit="s",
        above=0,
        alias="search-time",
    )
    search_share: float | None = option(
        None,
        "maximum energy of the search as a share of today's training; it does not "
        f"end a search before {LEAST_LAUNCHES} launch settings are measured "
        f"(default: {100 * DEFAULT_SHARE:g}% if the search has no other limit)",
        unit="share",
        above=0,
        alias="search-share",
    )
    max_regret: float = option(
        0.02,
        "end the search of a recording when it is unlikely (under 10 %) that more than this share "
        "of the front's hypervolume, and more than the noise, is left to find; the search of a job "
        "ends when what is left would not repay the next probe over the training",
        least=0,
        keyword_only=True,
    )
    verify: bool = option(
        True, "launch the choice and today's configuration again until the choice is sure"
    )
    verify_share: float = option(
        1 / 4, "share of every limit that is reserved for verification", least=0, keyword_only=True
    )
    window: WindowPolicy = field(default_factory=WindowPolicy)
    time_limit_s: float | None = option(
        None,
        "kill a probe after this time (default: the limit of its first step and what its steps are "
        "predicted to take; shorter once some probes have ended)",
        unit="s",
        above=0,
        flag="probe-limit-s",
        alias="probe-limit",
    )
    first_step_limit_s: float | None = option(
        None,
        "treat a probe as hung if it makes no step within this time (default: 5min, three times "
        "what the inspection of the script took, or more if longer steps are predicted)",
        unit="s",
        above=0,
        alias="first-step-limit",
    )
    step_limit_s: float | None = option(
        None,
        "treat a probe as hung if a later step takes longer (default: 2min, or ten times what is "
        "predicted)",
        unit="s",
        above=0,
        alias="step-limit",
    )
    seed: int = option(0, "random seed", least=0)

    def __post_init__(self) -> None:
        check_options(self)

    def with_default_limits(self, *, simulated: bool = False) -> SearchSettings:
        """Return these settings with the default limits if they have none.

        Simulated probes use no energy, and may take longer.
        """
        settings = self
        if simulated:
            limit_s = max(self.time_limit_s or 0.0, SIMULATED_LIMIT_S)
            settings = replace(settings, time_limit_s=limit_s)
        if self.limits:
            return settings
        if simulated:
            return replace(settings, max_probes=DEFAULT_PROBES)
        return replace(settings, max_probes=DEFAULT_PROBES, search_share=DEFAULT_SHARE)

    @property
    def limits(self) -> dict[str, float]:
        """The limits that were given, by name."""
        values = {
            "probe_budget_kJ": self.probe_budget_kJ,
            "max_probes": self.max_probes,
            "search_s": self.search_s,
            "search_share": self.search_share,
        }
        return {name: value for name, value in values.items() if value is not None}

    def window_of(self, purpose: str) -> WindowPolicy:
        """Return the window of probes of this purpose: rough, but of a baseline that is not
        launched again."""
        return self.window if purpose == "baseline" and not self.verify else self.window.rough

    @property
    def kept_share(self) -> float:
        """Share of every limit that is reserved for verification."""
        return self.verify_share * self.verify

    @property
    def makes_few_probes(self) -> bool:
        """True if probes are so few that each is to improve the answer."""
        return self.max_probes is not None and self.max_probes <= FEW_PROBES

    @property
    def reserved_probes(self) -> int:
        """Number of `max_probes` that are reserved for verification: two at least, if there are
        more than four in all."""
        if self.max_probes is None or not self.verify or self.max_probes < 5:
            return 0
        return max(2, round(self.verify_share * self.max_probes))

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {
            **{f.name: getattr(self, f.name) for f in fields(self)},
            "window": asdict(self.window),
        }
