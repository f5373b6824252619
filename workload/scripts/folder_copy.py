"""Copies of a user's working folder for nodes that do not have it.

A copy stands at the same absolute path as the original, so that a command means the same on every
node. It is made only where nothing stands, or where an earlier copy does, which a file in it tells.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tuner.search_spaces.errors import InputError

__all__ = ["MARK", "packed", "unpacked"]

#: Lies in every copy, and names its files.
MARK = ".joulefront-copy"
#: A larger folder holds data or checkpoints, which belong on a shared file system.
_MOST_BYTES = 200_000_000
_LEFT_OUT = {".git", ".venv", "venv", "__pycache__", "node_modules", "wandb", "runs"}


def packed(folder: Path) -> bytes:
    """Return a folder's files as a compressed archive; what git ignores is left out.

    Raises:
        InputError: the folder is too large to copy, or cannot be read.
    """
    stream, size = io.BytesIO(), 0
    try:
        with tarfile.open(
            fileobj=stream, mode="w:gz", compresslevel=1, dereference=True
        ) as archive:
            for path in _files(folder):
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
    command = ["git", "-C", str(folder), "ls-files", "-coz", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not _LEFT_OUT & set(path.relative_to(folder).parts):
                yield path
        return
    for name in sorted(filter(None, listed.decode(errors="surrogateescape").split("\0"))):
        path = folder / name
        if path.is_file() and not _LEFT_OUT & set(Path(name).parts):
            yield path


def unpacked(archive: bytes, folder: Path) -> str:
    """Write a copy where there is none; return what prevents it, or "".

    A folder that is there and no copy is left as it is: the node has its own.
    """
    mark = folder / MARK
    try:
        if mark.is_file():  # logs of earlier runs may lie beside what was copied
            for name in mark.read_text(errors="surrogateescape").splitlines():
                (folder / name).unlink(missing_ok=True)
        elif folder.is_dir() and any(p.name not in _LEFT_OUT for p in folder.iterdir()):
            return ""
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            names = [name for name in files.getnames() if "\n" not in name]
            mark.write_text("\n".join(names), errors="surrogateescape")
            files.extractall(folder, filter="data")
    except (OSError, tarfile.TarError) as error:
        return f"{folder} cannot be copied there: {error}"
    return ""
