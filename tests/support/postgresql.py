"""A PostgreSQL server of the test's own, from Debian's package, stopped and started at will."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

PASSWORD = "s3cret:pass@word"
QUOTED = "s3cret%3Apass%40word"


def binaries() -> Path | None:
    """Return the folder of initdb and postgres, or None if PostgreSQL is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    here = shutil.which("initdb")
    return Path(here).resolve().parent if here else None


def why_not() -> str:
    """Return the reason why no server can be started and asked here; empty if one can."""
    return "" if binaries() and find_spec("psycopg2") else "no PostgreSQL or no psycopg2"


class Server:
    """One server with a database "joulefront", run by an unprivileged user, on loopback alone."""

    def __init__(self, folder: Path) -> None:
        found = binaries()
        assert found is not None
        self._bin, self._data = found, folder / "data"
        # PostgreSQL refuses to run as root.
        self._user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        if self._user is not None:
            os.chown(folder, self._user.pw_uid, self._user.pw_gid)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        secret = folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        words = ["--auth=scram-sha-256", "--username=tuner", f"--pwfile={secret}", "--no-sync"]
        self._run("initdb", "-D", str(self._data), *words)
        self.start()
        self._sql("CREATE DATABASE joulefront")

    @property
    def url(self) -> str:
        return f"postgresql://tuner:{QUOTED}@127.0.0.1:{self.port}/joulefront"

    def _demote(self) -> Callable[[], None] | None:
        user = self._user
        if user is None:
            return None

        def demote() -> None:
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)

        return demote

    def _run(self, program: str, *words: str) -> None:
        done = subprocess.run(
            [str(self._bin / program), *words],
            preexec_fn=self._demote(),
            cwd=self._data.parent,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stderr}")

    def _sql(self, statement: str) -> None:
        import psycopg2

        with contextlib.closing(
            psycopg2.connect(
                host="127.0.0.1",
                port=self.port,
                user="tuner",
                password=PASSWORD,
                dbname="postgres",
            )
        ) as connection:
            connection.autocommit = True
            connection.cursor().execute(statement)

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories="
        options += " -c fsync=off"
        log = str(self._data.parent / "log")
        self._run("pg_ctl", "-D", str(self._data), "-w", "-l", log, "-o", options, "start")

    def stop(self) -> None:
        """Stop at once: connections break, as when the machine is restarted."""
        self._run("pg_ctl", "-D", str(self._data), "-w", "-m", "immediate", "stop")


@contextlib.contextmanager
def postgresql() -> Iterator[Server]:
    """Run a server, and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="joulefront-pg-") as name:
        server = Server(Path(name))
        try:
            yield server
        finally:
            with contextlib.suppress(RuntimeError):
                server.stop()
