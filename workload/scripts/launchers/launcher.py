"""The launcher in front of a user's script: what it says, kept with the job of the script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tuner.search_spaces.errors import InputError

#: Variable in front of a command.
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
#: Place of a value that is not kept; `${env:NAME}` is OmegaConf's own.
TAKEN = re.compile(r"(?<!\$)\{env:([A-Za-z_]\w*)\}")


def names_taken(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the variables that stand in texts for values that are not kept."""
    return tuple(dict.fromkeys(name for text in texts for name in TAKEN.findall(text)))


@dataclass(frozen=True)
class Launcher:
    """Launcher of a pasted command.

    Attributes:
        kind: name of its `Kind`, or "" for a command with nothing but variables in front of it.
        words: its own words as typed, up to the script, without variables in front.
        processes: ranks that it would start on a node; 0 for one on each device.
        env: what it sets for the ranks; `{rank}`, `{local_rank}`, `{node_rank}` and
            `{world_size}` stand for values that differ from rank to rank.
        assigned: the variables written in front of the command (`NAME=VALUE torchrun ...`); a
            value that is not kept is `{env:NAME}` (`tuner.workload.scripts.launchers.secrets`).
        notes: what joulefront leaves out, one sentence each.
        binding: how it binds ranks to cores (`tuner.workload.node.vendor_binding`), or "".
    """

    kind: str
    words: tuple[str, ...] = ()
    script: tuple[str, ...] = ()
    processes: int = 0
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    assigned: Mapping[str, str] = field(default_factory=dict, hash=False)
    config: str = ""
    notes: tuple[str, ...] = ()
    nodes: int = 1
    binding: str = ""

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON."""
        usual = {"nodes": 1, "binding": ""}
        return {n: value for n, value in asdict(self).items() if usual.get(n, ...) != value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Launcher:
        """Read what `to_json` wrote; InputError if it is no launcher."""
        try:
            lists = {name: tuple(data.get(name, ())) for name in ("words", "script", "notes")}
            return cls(**{**data, **lists})
        except (TypeError, ValueError) as error:
            raise InputError(f"this is not the launcher of a script: {error}") from error
