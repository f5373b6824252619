"""Words about the ranks of a job: a table of their devices and processes, and the stragglers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tuner.formatting import right_aligned
from tuner.workload.measure.stragglers import RankState, Straggler, sentence


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _throttled(state: RankState, behind: float | None) -> str:
    return ", ".join(f"{name} {_share(part)}" for name, part in state.throttled.items() if part)


#: Heading of each column, and its text; a column that is empty for all ranks is left out.
COLUMNS: Mapping[str, Callable[[RankState, float | None], str]] = {
    "rank": lambda state, behind: str(state.rank),
    "GPU": lambda state, behind: "" if state.device is None else str(state.device),
    "behind": lambda state, behind: _share(behind),
    "MHz": lambda state, behind: _number(state.clock_MHz),
    "W": lambda state, behind: _number(state.power_W),
    "°C": lambda state, behind: _number(state.temperature_C),
    "throttled": _throttled,
    "memory errors": lambda state, behind: _number(sum(state.faults.values()) or None),
    "nice": lambda state, behind: str(state.nice or ""),
    "computes": lambda state, behind: _share(state.busy),
    "waits for a core": lambda state, behind: _share(state.waiting),
    "held by quota": lambda state, behind: _share(state.held or None),
}


def ranks_lines(ranks: Sequence[RankState], stragglers: Sequence[Straggler]) -> list[str]:
    """Return the stragglers as sentences, and the table of all ranks; empty without stragglers."""
    if not stragglers:
        return []
    behind = {each.state.rank: each.behind for each in stragglers}
    rows = [[text(state, behind.get(state.rank)) for text in COLUMNS.values()] for state in ranks]
    shown = [at for at in range(len(COLUMNS)) if any(row[at] for row in rows)]
    table = [list(COLUMNS), *rows]
    return [
        *(f"Straggler: {sentence(each)}." for each in stragglers),
        *right_aligned([[row[at] for at in shown] for row in table], indent="  "),
    ]
