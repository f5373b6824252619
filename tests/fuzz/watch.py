"""A place for one kind of input, and the writes of this process that leave it.

The folder is the current one, the home, the temporary and the runs folder of all that is tried
there. An audit hook of the interpreter sees every file that this process opens for writing, makes,
moves or removes; what a child leaves is found by looking into the folder around.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

#: Memory as a folder: thousands of small files a minute are no business of a disk.
SHARED_MEMORY = Path("/dev/shm")
#: Events of a change, with the places of the paths in their arguments.
_CHANGES = {
    "os.mkdir": (0,), "os.rename": (0, 1), "os.remove": (0,), "os.rmdir": (0,), "os.link": (1,),
    "os.symlink": (1,), "os.truncate": (0,), "os.chmod": (0,), "os.chown": (0,),
    "shutil.rmtree": (0,),
}  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: Folders and beginnings of paths that any program may write to.
_FREE = ("/proc/self/", "/dev/null", "/dev/tty", "/dev/pts/", "pipe:", "socket:", "anon_inode:")


class Place:
    """Folder of one kind of input.

    Attributes:
        folder: what is tried works here.
        outside: paths outside that this process wrote to, each once.
    """

    def __init__(self, top: Path) -> None:
        self._top = top
        self.folder = top / "inside" / "here"
        for name in ("home", "temporary", "runs"):
            (self.folder / name).mkdir(parents=True)
        self.outside: dict[str, None] = {}

    @property
    def environment(self) -> dict[str, str]:
        """Variables of all that is tried in it."""
        here = self.folder
        return {
            "HOME": str(here / "home"),
            "TMPDIR": str(here / "temporary"),
            "JOULEFRONT_RUNS": str(here / "runs"),
            # Names of models must not be looked up anywhere.
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(here / "home" / "hf"),
            "MPLCONFIGDIR": str(here / "home" / "matplotlib"),
        }

    def note(self, path: Any) -> None:
        """Note a path that is being changed, if it is outside."""
        if isinstance(path, int) or not path:
            return
        # Its folder is resolved, and not a link of this name, which a change would replace.
        text = os.fsdecode(path)
        real = os.path.join(os.path.realpath(os.path.dirname(text) or "."), os.path.basename(text))
        if real.startswith((f"{self._top}/", *_FREE)) or "__pycache__" in real:
            return
        self.outside[real] = None

    def left_outside(self) -> list[str]:
        """Return what lies around the folder, or bears the name that hostile values would make."""
        found = [path for path in self._top.iterdir() if path.name != "inside"]
        found += [path for path in (self._top / "inside").iterdir() if path.name != "here"]
        found += [*self._top.rglob("pwned")]
        return [*self.outside, *map(str, found)]


_watching: list[Place] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _watching:
        return
    place = _watching[-1]
    if event == "open":
        path, _, flags = args
        if isinstance(flags, int) and flags & _WRITES:
            place.note(path)
    elif event in _CHANGES:
        for at in _CHANGES[event]:
            # Relative to another folder than the current one: by a descriptor, so within a tree.
            if args[-1] in (-1, None) or not isinstance(args[-1], int) or event == "os.chmod":
                place.note(args[at])


@contextlib.contextmanager
def watched_place() -> Iterator[Place]:
    """Make a place, be in it, and see what is written outside."""
    if not hasattr(_audit, "installed"):
        sys.addaudithook(_audit)
        _audit.installed = True  # type: ignore[attr-defined]
    memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="joulefront-fuzz-", dir=memory) as name:
        place = Place(Path(os.path.realpath(name)))
        with (
            mock.patch.dict(os.environ, place.environment),
            mock.patch.object(tempfile, "tempdir", None),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # an answer of infinite figures is one
            os.chdir(place.folder)
            _watching.append(place)
            try:
                yield place
            finally:
                _watching.pop()
                os.chdir(before)
                _make_removable(place.folder)


def _make_removable(folder: Path) -> None:
    for root, names, _ in os.walk(folder):
        for each in names:
            path = os.path.join(root, each)
            if not os.path.islink(path) and not os.stat(path).st_mode & stat.S_IRWXU:
                os.chmod(path, 0o700)
