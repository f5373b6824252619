"""The guard of root, installed on a twin node."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.twin import TwinNode
from tuner.workload.node.clocks import guard
from tuner.workload.node.clocks.own_guard import NAME


def installed_guard(node: TwinNode) -> Path:
    """Return a copy of the guard whose devices and files are those of a twin node.

    No variable changes them: what the guard of root locks and reads may not be its caller's choice.
    """
    text = Path(guard.__file__).read_text(encoding="utf-8")
    for path, own in (
        (guard.DEVICE, f"{node.path}.gpu{{}}"),
        (guard.NOTE, f"{node.path}.notes/{{}}"),
        (guard.CONFIGURED, f"{node.path}.configured.json"),
    ):
        if text.count(f'"{path}"') != 1:
            raise RuntimeError(f"the guard names {path} more than once")
        text = text.replace(f'"{path}"', repr(own))
    program = Path(f"{node.path}.guard.py")
    program.write_text(text, encoding="utf-8")
    return program


def guards_of(agent: int) -> list[int]:
    """Return the guards of one agent, by the names of their processes."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and (folder / "comm").read_text() == f"{NAME}{agent}\n":
                found.append(int(folder.name))
    return found
