"""Copies of a user's working folder for nodes that do not have it.

A copy stands at the same absolute path as the original, so that a command means the same on every
node. It is made only where nothing stands, or where an earlier copy of this user's does: a list in
the user's cache names its files, since a list in the folder could come from anybody.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import socket
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import require_own, write_bytes

#: A larger folder holds data or checkpoints, which belong on a shared file system.
_MOST_BYTES = 200_000_000
_LEFT_OUT = {".git", ".venv", "venv", "__pycache__", "node_modules", "wandb", "runs"}
#: What is likely to hold secrets, and is no part of a program.
_LEFT_OUT |= {".ssh", ".aws", ".gnupg", ".kube", ".docker", ".huggingface", ".netrc", ".pgpass"}
_SECRET = re.compile(r"\.env(\..*|rc)?|.*\.(pem|key|p12|pfx)|id_(rsa|dsa|ecdsa|ed25519)(\..*)?")


def packed(folder: Path) -> bytes:
    """Return a folder's files as a compressed archive, but what git ignores and likely secrets.

    InputError if the folder is too large, cannot be read, or a link leads out of it.
    """
    stream, size = io.BytesIO(), 0
    try:
        with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as archive:
            for path in _files(folder):
                if path.is_symlink() and not (
                    path.resolve().is_relative_to(folder.resolve())
                    and not os.path.isabs(os.readlink(path))
                ):
                    raise InputError(
                        f"{path} is a link that leads out of {folder}, so --sync does not follow "
                        "it; put a copy in its place, or list it in .gitignore"
                    )
                size += path.stat().st_size
                if size > _MOST_BYTES:
                    raise InputError(
                        f"{folder} holds more than {_MOST_BYTES // 10**6} MB, too much to copy to "
                        "every node; put it on a shared file system, or list its data in .gitignore"
                    )
                archive.add(path, path.relative_to(folder), recursive=False)
    except OSError as error:
        raise InputError(f"{folder} cannot be copied to other nodes: {error}") from error
    return stream.getvalue()


def _files(folder: Path) -> Iterator[Path]:
    # Without the program that the folder's .git/config may name as its fsmonitor.
    git = ["git", "-c", "core.fsmonitor=", "-C", str(folder)]
    command = [*git, "ls-files", "-coz", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
        names = sorted(filter(None, listed.decode(errors="surrogateescape").split("\0")))
        found = [folder / name for name in names]
    except (OSError, subprocess.SubprocessError):
        found = sorted(folder.rglob("*"))
    for path in found:
        parts = path.relative_to(folder).parts
        secret = any(_SECRET.fullmatch(part) for part in parts)
        if path.is_file() and not secret and not _LEFT_OUT & set(parts):
            yield path


def _list_of(folder: Path) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    # Machines may share a home folder.
    name = hashlib.sha256(f"{socket.gethostname()}:{folder}".encode()).hexdigest()[:32]
    return Path(cache) / "joulefront" / "copies" / name


def unpacked(archive: bytes, folder: Path) -> str:
    """Write a copy where there is none; return what prevents it, or ""."""
    listed = _list_of(folder)
    try:
        require_own(folder)
        names: list[str] = []
        if listed.is_file():
            made, *names = listed.read_text(errors="surrogateescape").split("\n")
            if not folder.is_dir() or made != str(folder.stat().st_ino):
                names = []  # it is another folder by now
        if not names and folder.is_dir() and any(p.name not in _LEFT_OUT for p in folder.iterdir()):
            return ""
        for name in names:  # logs of earlier runs may lie beside what was copied
            path = folder / name
            inside = not os.path.isabs(name)
            if inside and path.parent.resolve() == folder.resolve() / Path(name).parent:
                path.unlink(missing_ok=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)  # what was closed to others stays so
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            names = [name for name in files.getnames() if "\n" not in name]
            listed.parent.mkdir(parents=True, exist_ok=True)
            text = "\n".join([str(folder.stat().st_ino), *names])
            write_bytes(listed, text.encode(errors="surrogateescape"))
            files.extractall(folder, filter="data")
    except InputError as error:
        return str(error)
    except (OSError, tarfile.TarError) as error:
        return f"{folder} cannot be copied there: {error}"
    return ""
