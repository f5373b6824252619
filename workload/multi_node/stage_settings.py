"""Live settings with one value per pipeline stage, split by node and joined again.

Stages are equal blocks of ranks and nodes are equal blocks of ranks, so a node holds whole stages,
or a stage spans whole nodes, or neither. A node is told one value where all its ranks want the
same, and else one a rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tuner.search_spaces.configuration import Settings


def settings_of_part(live: Settings, part: int, parts: int) -> Settings:
    """Return the settings for node `part` of `parts`.

    Args:
        live: one value for all, or a tuple with one a stage.
    """
    return Settings({name: _part(value, part, parts) for name, value in live.items()})


def _part(value: Any, part: int, parts: int) -> Any:
    if not isinstance(value, tuple):
        return value
    # The shortest list of equal blocks that both stages and nodes divide.
    count = math.lcm(len(value), parts)
    blocks = [value[i * len(value) // count] for i in range(count)]
    mine = blocks[part * count // parts : (part + 1) * count // parts]
    return mine[0] if len(set(mine)) == 1 else tuple(mine)


def joined_settings(live: Settings, done: Sequence[Settings]) -> Settings:
    """Return the settings applied on all nodes together, in the form of the request.

    Args:
        done: what each node set, in order; where nodes set one value differently, the first's.
    """
    joined: dict[str, Any] = {}
    for name, asked in live.items():
        told = [settings.get(name) for settings in done]
        if not isinstance(asked, tuple):
            joined[name] = told[0]
            continue
        length = math.lcm(*(len(value) if isinstance(value, tuple) else 1 for value in told))
        row = [
            (value[i * len(value) // length] if isinstance(value, tuple) else value)
            for value in told
            for i in range(length)
        ]
        joined[name] = tuple(row[stage * len(row) // len(asked)] for stage in range(len(asked)))
    return Settings(joined)
