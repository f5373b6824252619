"""Temporary folders that a killed process does not leave for good.

Each is locked while the process that made it lives; the kernel ends the lock, also after SIGKILL.
Whoever makes the next one removes those of this user that nobody has locked. A file in them tells
them from folders that others named so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Self

#: Beginnings of the names of such folders, and the file in them.
PREFIX, SHORT_PREFIX = "joulefront_", "jf_"
MARK = ".joulefront-temporary"


class TemporaryFolder:
    """New folder that only its owner can enter, until `remove` or the end of the process."""

    def __init__(self, *, parent: str | None = None, prefix: str = PREFIX) -> None:
        parent = parent or tempfile.gettempdir()
        remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._lock = _locked(self.path)
        (self.path / MARK).touch(mode=0o600)

    def remove(self) -> None:
        """Remove the folder with all that it holds. May be called twice."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def remove_abandoned(parent: str) -> None:
    """Remove the temporary folders of this user whose processes have ended."""
    try:
        names = [name for name in os.listdir(parent) if name.startswith((PREFIX, SHORT_PREFIX))]
    except OSError:
        return
    for name in names:
        try:
            if not Path(parent, name, MARK).is_file():
                continue
        except PermissionError:  # another user's: nobody else may enter it
            continue
        lock = _locked(Path(parent, name))
        if lock is not None:
            shutil.rmtree(Path(parent, name), ignore_errors=True)
            os.close(lock)


def _locked(folder: Path) -> int | None:
    # The descriptor of a folder of this user that is locked now; None if another process has it.
    with contextlib.suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            opened, named = os.fstat(lock), os.lstat(folder)
            own = opened.st_uid == os.geteuid() and stat.S_ISDIR(named.st_mode)
            if own and (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino):
                return lock
        os.close(lock)
    return None
