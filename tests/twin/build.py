"""Compile the twin's libraries with the machine's C compiler, once for each version of the source.

Two of them go into one folder, which a process that is to find them has on LD_LIBRARY_PATH; one is
preloaded into training processes, and one is the test's own.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
NVML = (
    "physics.c",
    "clients.c",
    "replay.c",
    "nvml_core.c",
    "nvml_read.c",
    "nvml_clocks.c",
    "nvml_health.c",
)


@dataclass(frozen=True)
class Libraries:
    """Where the compiled libraries are.

    Attributes:
        folder: holds libnvidia-ml.so.1 and libcuda.so.1, for LD_LIBRARY_PATH.
        control: the test's library, which reads the truth.
        rank: for LD_PRELOAD, slows training processes down to the clock of their GPU.
    """

    folder: Path
    control: Path
    rank: Path

    @property
    def nvml(self) -> Path:
        """The NVML library."""
        return self.folder / "libnvidia-ml.so.1"


def compiler() -> str | None:
    """Return the path of a C compiler; None without one."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    return None


@functools.cache
def build() -> Libraries:
    """Compile what is not in the cache yet, in about a second."""
    sources = sorted(SOURCES.iterdir())
    text = b"".join(path.read_bytes() for path in sources) + repr(FLAGS).encode()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = home / "joulefront" / "twin" / hashlib.sha256(text).hexdigest()[:16]
    found = Libraries(place / "lib", place / "libtwin-control.so", place / "libtwin-rank.so")
    if place.is_dir():
        return found
    cc = compiler()
    if cc is None:
        raise FileNotFoundError("the twin GPU node needs a C compiler (cc, gcc or clang)")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as half:
        made = Path(half) / "made"
        (made / "lib").mkdir(parents=True)
        for target, soname, names in (
            (made / "lib" / "libnvidia-ml.so.1", True, NVML),
            (made / "lib" / "libcuda.so.1", True, ("cuda.c",)),
            (made / "libtwin-rank.so", False, ("physics.c", "rank.c", "cores.c")),
            (made / "libtwin-control.so", False, ("physics.c", "clients.c", "control.c")),
        ):
            flags = [*FLAGS, f"-Wl,-soname,{target.name}"] if soname else FLAGS
            files = [str(SOURCES / name) for name in names]
            command = [cc, *flags, "-o", str(target), *files, "-lm", "-lpthread", "-ldl", "-lrt"]
            subprocess.run(command, check=True, capture_output=True, text=True)
        try:
            made.rename(place)
        except OSError:  # another process was faster
            if not place.is_dir():
                raise
    return found
