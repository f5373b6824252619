"""A Ray cluster of this machine, beside which programs are started that join it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.support.commands import finished

BIN = Path(sys.executable).parent
#: Limit on the start of a node's processes, seconds.
_START_S = 120


class OwnRay:
    """A Ray cluster of this machine that asks for a token, and its processes.

    Each node has one CPU and as many GPUs as Ray is told, which nobody looks for.
    """

    def __init__(self, folder: Path, gpus: int = 0, **variables: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self._port}"
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64},
            **{"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"},
            "RAY_raylet_start_wait_time_s": str(_START_S),  # on a busy machine
            **variables,
        }
        self.folder, self._gpus, self._nodes = folder, gpus, 0

    def _start(self) -> None:
        port, folder = f"--port={self._port}", f"--temp-dir={self.folder}"
        self._add("--head", port, "--include-dashboard=false", folder)

    def add_node(self) -> None:
        """Start another node, with an address of its own."""
        self._add(f"--address={self.address}")

    def _add(self, *words: str) -> None:
        self._nodes += 1
        has = ["--num-cpus=1", f"--num-gpus={self._gpus}"]
        has += [f"--node-ip-address=127.0.0.{self._nodes}"]
        done = finished(
            [BIN / "ray", "start", *has, *words], timeout=2 * _START_S, env=self.environment
        )
        if done.returncode:
            raise RuntimeError(f"Ray does not start: {done.stdout}{done.stderr}")

    @classmethod
    @contextlib.contextmanager
    def started(cls, gpus: int = 0, **variables: str) -> Iterator[OwnRay]:
        """Start one, and kill its processes at the end."""
        with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # names of sockets
            made = cls(Path(folder), gpus, **variables)
            try:
                made._start()
                yield made
            finally:
                made.kill()

    def kill(self) -> None:
        """Kill its processes and what they started, and wait until they are gone."""
        killed = self.processes()
        for process in tuple(killed):
            with contextlib.suppress(psutil.Error):
                process.suspend()  # what it would start now would not be found
                killed += process.children(recursive=True)
        for process in killed:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(killed, timeout=10)

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Its processes, or those of one program of Ray's."""
        # The server of Ray's clients knows the port alone, not the folder.
        own = re.compile(rf"{re.escape(str(self.folder))}|^--address=.*:{self._port}$")
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or [""]
            if any(own.search(word) for word in words) and name in words[0]:
                found.append(process)
        return found

    def python(self, program: str, **variables: str) -> subprocess.Popen[str]:
        """Start a program of Python beside it."""
        return subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.environment, "JF_ADDRESS": self.address, **variables},
        )
