"""Access control of Ray: a private cluster for a study, and the exposure of one that is joined.

Any process that passes the token check of a Ray cluster can run code as the cluster's owner. A
cluster that is started here therefore has a token of its own, listens on the loopback interface
only, and keeps its files in a folder that only its owner can enter.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import site
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuner.cluster.ray_private import on_loopback, reload_authentication, requires_token
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import SHORT_PREFIX, TemporaryFolder
from tuner.workload.node.host import ends_as_one

#: Folder that holds the package `tuner`: site-packages, or a checkout.
PACKAGES_FOLDER = Path(__file__).resolve().parents[2]
_TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
#: Unless the user chose otherwise: Ray lowers the priority of its workers, and ranks inherit it, so
#: a measurement would yield to every other process of the machine. Its memory monitor would end the
#: agent where offload fills the host's memory; without it the kernel ends a rank. Ray
#: before 2.60 warns, on the user's screen, of the environment that `place_agent` sets for actors.
_DEFAULTS = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
#: The path of a socket holds 107 bytes, and ours and Ray's names below the parent folder
#: (jf_XXXXXXXX/r/session_DATE_TIME_PID/sockets/plasma_store) take up to 78 of them.
_LONGEST_PARENT_BYTES = 29


def private_folder() -> TemporaryFolder:
    """Return a new folder that only its owner can enter, for the files of one Ray."""
    parent = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if len(os.fsencode(parent)) > _LONGEST_PARENT_BYTES:
        parent = "/tmp"
    try:
        # Its mode is 0700. Ray opens its own folders to all users, so they must lie below it.
        return TemporaryFolder(parent=parent, prefix=SHORT_PREFIX)
    except OSError as error:
        raise InputError(
            f"no folder for Ray's files can be made in {parent}: {error.strerror}; set TMPDIR to a "
            "folder that you may write to, or run with --executor inline"
        ) from error


@contextlib.contextmanager
def starting(folder: str | Path) -> Iterator[dict[str, Any]]:
    """Yield options for `ray.init` that start a Ray which only this process can enter.

    The environment and the current folder are changed for the duration of the context, because
    Ray hands both to its workers; the token remains in the memory of this process afterwards.
    """
    # Workers start in another folder. An empty entry would be the current one.
    paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    variables = {name: os.environ.get(name, value) for name, value in _DEFAULTS.items()} | {
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths)),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    if ends_as_one() and "RAY_memory_monitor_refresh_ms" not in os.environ:
        del variables["RAY_memory_monitor_refresh_ms"]  # the kernel would end the study, too
    before = {name: os.environ.get(name) for name in (*variables, "RAY_AUTH_TOKEN_PATH")}
    try:
        os.environ.update(variables)
        os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
        reload_authentication()
        with on_loopback(), contextlib.chdir(import_folder()):
            yield {"_temp_dir": str(Path(folder, "r")), "include_dashboard": False}
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def import_folder() -> Path:
    """Return a folder from which the workers of a cluster may import.

    Ray puts the driver's current folder first on their import path.
    """
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    is_installed = PACKAGES_FOLDER in [Path(folder).resolve() for folder in folders]
    return PACKAGES_FOLDER / "tuner" / "templates" if is_installed else PACKAGES_FOLDER


def foreign_package(folder: str | Path | None = None) -> str:
    """Return a phrase for a package `tuner` that this process imports from elsewhere, or ""."""
    expected = PACKAGES_FOLDER if folder is None else Path(folder).resolve()
    spec = importlib.util.find_spec("tuner")
    found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    if found is None or found.parent.parent != expected:
        return (
            f"it would import 'tuner' from {found or 'nowhere'} instead of {expected}; rename or "
            "remove that package, or take its folder off PYTHONPATH"
        )
    return ""


def exposures() -> tuple[str, ...]:
    """Return the ways in which others can enter the Ray of this process, one sentence each."""
    if not requires_token():
        return (
            "the Ray cluster requires no token: anyone who can reach its ports over the network "
            "can run code on it as its owner; to require one, start Ray on every node "
            "with RAY_AUTH_MODE=token and the token of `ray get-auth-token --generate`",
        )
    if os.environ.get("RAY_AUTH_TOKEN"):
        return ()
    try:
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
        mode = path.stat().st_mode & 0o777
    except (OSError, RuntimeError):
        return ()
    if not mode & 0o077:
        return ()
    return (
        f"other users of the machine may read Ray's token {path} (mode {mode:04o}) and can then "
        f"run code on the cluster as its owner; protect it with chmod 600 {path}",
    )


def strip_token() -> None:
    """Remove Ray's token from the environment, so that ranks do not inherit it."""
    for name in _TOKEN_VARIABLES:
        os.environ.pop(name, None)
