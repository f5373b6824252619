"""A caller of the clock guard of root, with messages of its own choice, on a twin GPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.guards import installed_guard
from tests.twin import TwinGpu, TwinNode

GPU = "GPU-twin"
BEFORE = (None, None, 350.0)
#: The longest that the guard may take to restore, seconds.
RESTORE_S = 20.0


def foreign_node(folder: Path, name: str) -> TwinNode:
    """Return a node whose GPU only root may set."""
    gpu = TwinGpu(uuid=GPU, limit_W=350.0, memory_MHz=(405, 1593))
    return TwinNode(folder / name, [gpu], root=False, virtual_time=False)


def stands(node: TwinNode) -> tuple[object, ...]:
    """Return the lock, the memory's lock and the power limit of the GPU."""
    return (node.locked_MHz(), node.memory_locked_MHz(), node.limit_W())


def left_wrong(node: TwinNode) -> str:
    """Return what still differs from the beginning when the guard has had its time, or ""."""
    end_s = time.monotonic() + RESTORE_S
    while stands(node) != BEFORE and time.monotonic() < end_s:
        time.sleep(0.02)
    return "" if stands(node) == BEFORE else f"left {stands(node)}, before {BEFORE}"


class Caller:
    """One end of the guard's socket, with messages of the caller's choice."""

    def __init__(self, own: socket.socket) -> None:
        self.socket = own
        self.socket.settimeout(60.0)

    @classmethod
    def of(cls, path: Path) -> Caller:
        """Return a caller that is connected to a unit."""
        own = socket.socket(socket.AF_UNIX)
        own.connect(str(path))
        return cls(own)

    def query(self, **message: Any) -> dict[str, Any]:
        """Send a message and return the answer; {} if the guard ended."""
        return self.announce(json.dumps(message).encode())

    def announce(self, line: bytes) -> dict[str, Any]:
        """Send a line, whatever it is, and return the answer."""
        self.socket.sendall(line + b"\n")
        return self.answer()

    def answer(self) -> dict[str, Any]:
        said = b""
        while not said.endswith(b"\n"):
            if not (piece := self.socket.recv(65536)):
                return {}
            said += piece
        reply: dict[str, Any] = json.loads(said)
        return reply

    def set(self, what: str, *values: Any, **more: Any) -> str:
        """Set one thing and return the refusal, or ""."""
        reply = self.query(verb="set", gpu=GPU, what=what, values=values, **more)
        return str(reply.get("error", ""))


@contextlib.contextmanager
def started(
    node: TwinNode, *, program: Path | None = None, **how: Any
) -> Iterator[tuple[Caller, subprocess.Popen[bytes]]]:
    """Start a guard as a child that inherits from this process, and end it."""
    environ = os.environ | node.environment() | {"JOULEFRONT_TWIN_ROOT": "1"}
    ours, theirs = socket.socketpair()
    with theirs:
        words = [sys.executable, "-IS", str(program or installed_guard(node))]
        how = {"stderr": subprocess.DEVNULL} | how
        guard = subprocess.Popen(words, stdin=theirs, env=environ, **how)
    try:
        yield Caller(ours), guard
    finally:
        ours.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(RESTORE_S)
        if guard.poll() is None:
            guard.send_signal(signal.SIGCONT)
            guard.kill()
            guard.wait()
