"""State file of a twin node, which all processes on the node map, and the node's time."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from tests.twin import layout
from tests.twin.build import build

#: Environment variable that names the state file; a process with it and the libraries' folder on
#: LD_LIBRARY_PATH is on the twin node.
STATE = "JOULEFRONT_TWIN"


@functools.cache
def _control() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build().control))
    library.twin_layout.restype = ctypes.c_int64
    number, real, node = ctypes.c_int64, ctypes.c_double, ctypes.POINTER(layout.Node)
    library.twin_law_device_s.restype = library.twin_law_W.restype = real
    library.twin_layout.argtypes = [number]
    library.twin_stall.argtypes = [node, number, number]
    library.twin_reset_counter.argtypes = [node, number]
    library.twin_law_device_s.argtypes = [node, number, real]
    library.twin_law_W.argtypes = [node, number, real, real]
    sizes = [library.twin_layout(which) for which in (0, 1)]
    if sizes != [ctypes.sizeof(layout.Node), ctypes.sizeof(layout.Gpu)]:
        raise RuntimeError("tests.twin.layout does not mirror csrc/state.h")
    return library


class NodeState:
    """State file of a node that exists, mapped into this process."""

    def _open(self, path: Path) -> None:
        self.path, self.libraries, self._library = path, build(), _control()
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), ctypes.sizeof(layout.Node))
        self._state = layout.Node.from_buffer(self._map)

    @classmethod
    def of_environment(cls) -> Self:
        """Return the node on which this process is, made by another process."""
        node = cls.__new__(cls)
        node._open(Path(os.environ[STATE]))
        return node

    def clock(self) -> float:
        """Return the node's time, seconds."""
        return self._state.now_s if self._state.is_virtual else time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        if not self._state.is_virtual:
            time.sleep(seconds)
            return
        with self._locked():
            self._state.now_s += seconds

    @contextlib.contextmanager
    def _locked(self) -> Iterator[layout.Node]:
        """Return the state, up to date, while no other process can change it."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield self._state
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def _updated(self) -> Iterator[layout.Node]:
        with self._locked() as state:
            self._library.twin_update(ctypes.byref(state))
            yield state

    def close(self) -> None:
        """Release the state file."""
        del self._state
        with contextlib.suppress(BufferError):  # a caller keeps a part of it
            self._map.close()
        self._file.close()
