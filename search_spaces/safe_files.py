"""Files, folders and variables that other users must not reach, and writes that follow no link.

A run folder may come from another user. A link in it in place of a file must not lead a write to a
file elsewhere, so every file of this project is written here: as a new file that takes the old
one's place, or opened in place after it was found to be a regular file with one name.

A killed process leaves no temporary folder for good. Each is locked while the process that made it
lives; the kernel ends the lock, also after SIGKILL. Whoever makes the next one removes those of
this user that nobody has locked. A file in them tells them from folders that others named so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import secrets
import shlex
import shutil
import stat
import tempfile
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Self

from tuner.search_spaces.errors import InputError

#: Permissions of an executable script, before the umask.
SCRIPT_MODE = 0o700
#: File beside a run that was unpacked from an archive; it holds the archive's path.
ARCHIVED = ".joulefront-archive"
#: User that NFS shows as the owner of root's files.
_NOBODY_UID = 65_534


def _refusal(path: Path, code: int, why: str) -> OSError:
    return OSError(code, why, str(path))


def write_bytes(path: str | Path, data: bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """Replace a file in one step by a new one; a link in its place is replaced, not followed.

    OSError if a device, pipe or socket has this name.
    """
    path = Path(path)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            raise _refusal(path, errno.EISDIR, "it is a folder; name a file in it")
        if not stat.S_ISREG(kind):
            raise _refusal(path, errno.EINVAL, "it is not a regular file")
    draft = path.with_name(f".joulefront-{secrets.token_hex(6)}.new")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        try:
            with open(fd, "wb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
    except OSError as error:  # name the file, not its draft
        raise _refusal(path, error.errno or errno.EIO, error.strerror or str(error)) from error


def write_text(path: str | Path, text: str, *, mode: int = 0o666, durable: bool = False) -> None:
    """Write a text in UTF-8 as `write_bytes` does, with its line ends unchanged."""
    write_bytes(path, text.encode(), mode=mode, durable=durable)


def open_plain(path: str | Path, flags: int) -> int:
    """Open a regular file in place, or create it, and return its descriptor.

    `flags` are of `os.open`, for reading and writing; not O_TRUNC, which acts before the file is
    checked. OSError if it is a link, has a second name (a hard link) or is not a regular file.
    """
    path = Path(path)
    try:
        # For reading, too: a pipe without a reader would block.
        fd = os.open(path, flags | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refusal(path, errno.ELOOP, "it is a symbolic link; remove it") from error
        raise
    status = os.fstat(fd)
    regular = stat.S_ISREG(status.st_mode)
    if regular and status.st_nlink <= 1:
        return fd
    os.close(fd)
    if not regular:
        raise _refusal(path, errno.EINVAL, "it is not a regular file")
    why = "another name (a hard link) leads to it; replace it by a copy"
    raise _refusal(path, errno.EMLINK, why)


def open_to_read(path: str | Path) -> int:
    """Open a regular file for reading and return its descriptor; OSError if it is none.

    A pipe in a file's place, in a folder that came from another user, would wait for a writer.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise _refusal(Path(path), errno.EINVAL, "it is not a regular file")


def read_bytes(path: str | Path, most_bytes: int) -> bytes:
    """Read a regular file, one byte more than `most_bytes` at most."""
    with open(open_to_read(path), "rb") as file:
        return file.read(most_bytes + 1)


def read_text(file: Traversable, most_bytes: int = 64 * 2**20) -> str:
    """Read a regular file, or one of a package, as text in UTF-8, without Windows' mark.

    OSError if it is a pipe, a device or a folder; ValueError if it is larger, or not UTF-8.
    """
    if not isinstance(file, Path):
        return file.read_text(encoding="utf-8-sig")
    data = read_bytes(file, most_bytes)
    if len(data) > most_bytes:
        raise ValueError(f"it has more than {most_bytes // 2**20} MiB")
    return data.decode("utf-8-sig")


def make_folder(path: str | Path, *, inside: str | Path) -> None:
    """Make a folder inside of a run folder, and that; OSError if one on the way is a link.

    A link above the run folder or in its place is the user's.
    """
    folder = Path(inside)
    folder.mkdir(parents=True, exist_ok=True)
    for part in Path(path).relative_to(folder).parts:
        folder /= part
        if folder.is_symlink():
            raise _refusal(folder, errno.ELOOP, "it is a symbolic link; remove it")
        folder.mkdir(exist_ok=True)


def _foreign_owner(folder: Path) -> int | None:
    try:
        owners = [folder.lstat().st_uid, folder.stat().st_uid]
    except OSError:  # missing, or unreadable, which the write itself will report
        return None
    user = os.geteuid()
    own = (user, 0) if user else (user, _NOBODY_UID)
    return next((uid for uid in owners if uid not in own), None)


def _user(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return f"user {pwd.getpwuid(uid).pw_name}"
    return f"user {uid}"


def archive_of(run: str | Path) -> Path | None:
    """Return the archive that a run was unpacked from, if it was."""
    with contextlib.suppress(OSError, ValueError):
        return Path((Path(run).parent / ARCHIVED).read_text(encoding="utf-8"))
    return None


def require_own(run: str | Path) -> None:
    """Refuse to write to, or to start anything from, a run folder of another user or an archive.

    Such a user could put a link or a command in at any moment. Root's folders pass. The folder may
    be missing; that of all runs is refused where another user made it in a folder that every user
    can write to, such as /tmp. The InputError says how to copy it.
    """
    run = Path(run)
    if archive := archive_of(run):
        raise InputError(
            f"{archive} is an archive, so nothing is written to it or started from it; name "
            "another place for files, or unpack it first: "
            f"python -m zipfile -e {shlex.quote(str(archive))} runs"
        )
    owner = _foreign_owner(run)
    if owner is not None:
        raise InputError(
            f"{run} belongs to {_user(owner)}, so nothing is written to it or started from it; "
            f"make a copy of your own first: cp -r --no-preserve=ownership "
            f"{shlex.quote(str(run))} mine"
        )
    runs = run.parent
    with contextlib.suppress(OSError):
        owner = _foreign_owner(runs)
        if owner is not None and Path(os.path.abspath(runs)).parent.stat().st_mode & stat.S_IWOTH:
            raise InputError(
                f"{runs} was made by {_user(owner)} in a folder that every user can write to; "
                "choose another folder for runs (--runs-dir)"
            )


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


#: Environment variable that holds what `tuner --storage` takes.
STORAGE = "JOULEFRONT_STORAGE"
#: Variables that open doors to more than training needs.
_SECRETS = (STORAGE, "RAY_AUTH_TOKEN")


def refuse_sudo(environ: Mapping[str, str] = os.environ) -> None:
    """Raise InputError as root for another user, whose files and code root would start."""
    if os.geteuid() == 0 and environ.get("SUDO_UID", "0") != "0":
        raise InputError(
            "tuner runs as the user, not by sudo: start it again without sudo, and let zeusd or "
            "joulefront's guard set the clocks (tuner doctor prints the lines for an "
            "administrator); where everything shall run as root: env -u SUDO_UID tuner ..."
        )


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that ranks and their commands get."""
    return {name: value for name, value in environ.items() if name not in _SECRETS}


def private_folder(path: Path) -> None:
    """Make a folder that other users cannot enter, whatever the umask; leave one that exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    path.chmod(0o700)
