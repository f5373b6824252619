"""The account that executes the training code, and what it and others may read.

Clocks and some meters need root, a training script does not. Under `sudo`, or where the user names
an account, the fork server and with it every rank starts as that account
(`subprocess.Popen(user=...)`: setgroups, setgid and setuid before exec). Metering, clocks and all
files but the ranks' logs stay with the agent, so the account can change nothing that root reads or
writes later.
"""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError, InvalidValue

__all__ = ["RUN_AS", "STORAGE", "RunAs", "private_folder", "run_as"]

#: Environment variable that names the account: a user name, a UID, or UID:GID.
RUN_AS = "JOULEFRONT_RUN_AS"
#: Environment variable that holds what `tuner --storage` takes.
STORAGE = "JOULEFRONT_STORAGE"
#: Variables of root's that open doors to more than training needs.
_SECRETS = (STORAGE, "RAY_AUTH_TOKEN")
_ALLOWED = "the name of a user, a UID, or UID:GID"


@dataclass(frozen=True)
class RunAs:
    """An account that executes training code.

    Attributes:
        uid, gid: its user and primary group.
        groups: its supplementary groups.
        name: its name; the UID where the system knows none.
        home: its home folder; "/" where the system knows none.
    """

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str
    home: str

    @property
    def options(self) -> dict[str, Any]:
        """Options of `subprocess.Popen` by which a process starts as the account."""
        return {"user": self.uid, "group": self.gid, "extra_groups": self.groups}

    def environment(self, of_root: Mapping[str, str]) -> dict[str, str]:
        """Return root's environment as the account's: its names, and none of root's secrets."""
        kept = {name: value for name, value in of_root.items() if name not in _SECRETS}
        return {**kept, "HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def require_access(self, *paths: Path, python: str = sys.executable) -> None:
        """Check that the account can run the interpreter and read files or list folders.

        Raises:
            InputError: it cannot, or this process may not become the account.
        """
        code = "import os, sys; print([p for p in sys.argv[1:] if not os.access(p, os.R_OK)])"
        try:
            done = subprocess.run(
                [python, "-I", "-S", "-c", code, *map(str, paths)],
                **self.options,
                cwd="/",
                check=False,
                capture_output=True,
                text=True,
            )
        except OSError as error:
            raise InputError(
                f"training cannot run as user {self.name!r}: {python} cannot be started as that "
                f"user ({error.strerror}); install Python and joulefront where the user can read "
                "them, or name another user with --run-as"
            ) from error
        if done.stdout.strip() != "[]":
            what = f"read {done.stdout.strip()}" if done.returncode == 0 else f"run {python}"
            raise InputError(
                f"training cannot run as user {self.name!r}, who cannot {what}; choose a "
                "--runs-dir and an installation that the user can read, or another user with "
                "--run-as"
            )

    def admit(self, path: Path) -> None:
        """Let the account read a file or folder of root's, through its primary group if need be."""
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            status = os.fstat(handle)
            mode = stat.S_IMODE(status.st_mode)
            needs = 0o5 if stat.S_ISDIR(status.st_mode) else 0o4
            if status.st_uid == os.geteuid() and mode & needs != needs:
                os.fchown(handle, -1, self.gid)
                os.fchmod(handle, mode | needs << 3)
        finally:
            os.close(handle)

    def give_log(self, path: Path) -> None:
        """Make an empty file that the account may write to, in a folder that it may not change."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        try:
            os.fchown(handle, self.uid, self.gid)
        finally:
            os.close(handle)


def run_as(environ: Mapping[str, str] = os.environ) -> RunAs | None:
    """Return the account that is to execute training code; None if it is this process's own.

    It is the one that JOULEFRONT_RUN_AS (`--run-as`) names, else the one that called `sudo`
    (SUDO_UID and SUDO_GID). Root without either stays root, as in a container.

    Raises:
        InputError: there is no such account, or this process may not become another one.
    """
    asked, source = environ.get(RUN_AS), "--run-as"
    if not asked and os.geteuid() == 0 and environ.get("SUDO_UID"):
        group = environ.get("SUDO_GID")
        asked = environ["SUDO_UID"] + (f":{group}" if group else "")
        source = "SUDO_UID:SUDO_GID"
    if not asked:
        return None
    found = _account(asked, source)
    if found.uid == os.geteuid():
        return None
    if os.geteuid() != 0:
        raise InputError(
            f"training can run as user {found.name!r} only if tuner runs as root; leave --run-as "
            f"({RUN_AS}) out"
        )
    return found


def _account(asked: str, source: str) -> RunAs:
    """Look an account up.

    Raises:
        InvalidValue: there is no such user, or it has no group.
    """
    user, colon, group = asked.partition(":")
    try:
        entry = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
    except (KeyError, OverflowError):
        entry = None
    if (entry is None and not (user.isdecimal() and colon)) or (
        colon and not (group.isdecimal() and user.isdecimal())
    ):
        raise InvalidValue(source, asked, _ALLOWED + "; a UID without an account needs its GID")
    uid = entry.pw_uid if entry else int(user)
    gid = int(group) if colon else entry.pw_gid  # type: ignore[union-attr]
    if max(uid, gid) >= 2**32 - 1:
        raise InvalidValue(source, asked, _ALLOWED)
    if entry is None:
        return RunAs(uid, gid, (gid,), user, "/")
    groups = tuple(os.getgrouplist(entry.pw_name, gid))
    return RunAs(uid, gid, groups, entry.pw_name, entry.pw_dir)


def private_folder(path: Path) -> None:
    """Make a folder that other users cannot enter, whatever the umask; leave one that exists.

    Raises:
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    path.chmod(0o700)
