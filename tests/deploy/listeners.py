"""The listening TCP sockets of a command and all that it starts, while it runs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def listeners(session: int) -> set[str]:
    """Return "address:port" of each listening TCP socket of a session's processes."""
    inodes = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(process.name)) == session:
                inodes |= {os.readlink(link) for link in (process / "fd").iterdir()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in inodes:
                host, port = columns[1].split(":")
                found.add(f"{_address(host)}:{int(port, 16)}")
    return found


def _address(text: str) -> str:
    """Return an address of /proc/net as it is usually written; "::ffff:" is left out."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    data = struct.pack(f"={len(words)}I", *words)
    kind = socket.AF_INET if len(data) == 4 else socket.AF_INET6
    return socket.inet_ntop(kind, data).removeprefix("::ffff:")


def watched(
    words: Sequence[str],
    env: Mapping[str, str],
    *,
    within_s: float,
    until: Callable[[set[str]], bool] = lambda seen: False,
) -> tuple[set[str], int | None, str]:
    """Start a command; return its listening sockets, its exit code and its output.

    It is killed after some time, or when `until` says so of the sockets; the code is then None.
    """
    seen, end_s = set[str](), time.monotonic() + within_s
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            words, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() < end_s and not until(seen):
                seen |= listeners(process.pid)
                time.sleep(0.2)
            code = process.poll()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return seen, code, output.read()
