"""Tools of `benchmarks.security`: the command as a user starts it, and outcomes of attacks."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: A user without rights and without an entry in /etc/passwd: "nobody" on most systems.
OTHER_UID = 65534
#: `tuner` as installed: no folder of the caller on the import path, unlike `python -c`.
_TUNER = [
    sys.executable,
    "-P",
    "-c",
    "import sys; from tuner.cli.main import main; sys.exit(main())",
]
#: A study of GPUs whose clocks can be set, in simulated time.
SIMULATED = ("optimize", "qwen2.5-7b", "--cluster", "a100-8", "--executor", "simulated")
SIMULATED += ("--no-verify", "--quiet")


@dataclass(frozen=True)
class Attempt:
    """One attack and its outcome.

    Attributes:
        what: the attack, a phrase.
        open: True if it worked, False if it did not, None if it was not tried here.
        note: what was seen, or why it was not tried.
    """

    what: str
    open: bool | None
    note: str = ""


@dataclass(frozen=True)
class Finding:
    """One group of findings of the security review.

    Attributes:
        number: its number in the review.
        name: a few words.
        attack: re-enacts it in an empty folder.
    """

    number: int
    name: str
    attack: Callable[[Path], Sequence[Attempt]]


def tried(what: str, worked: bool, note: str = "") -> Attempt:
    return Attempt(what, worked, note)


def not_tried(what: str, why: str) -> Attempt:
    return Attempt(what, None, why)


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a user's shell in which this checkout is installed."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", **more}


def tuner(
    words: Sequence[str],
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> subprocess.CompletedProcess[bytes]:
    """Run `tuner` in a folder and return its exit code and both streams, as bytes.

    Its process group is killed when it does not end in time; the exit code is then negative.
    """
    process = subprocess.Popen(
        [*_TUNER, *words],
        cwd=folder,
        env=env or environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
    return subprocess.CompletedProcess(words, process.returncode, out, err)


@functools.cache
def _made() -> Path:
    """Make the run that every attack copies; it is removed when this process ends.

    Raises:
        RuntimeError: the study failed.
    """
    folder = Path(tempfile.mkdtemp(prefix="joulefront-security-study-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    done = tuner([*SIMULATED, "--max-probes", "3", "--name", "study"], folder)
    if done.returncode:
        raise RuntimeError(f"tuner optimize failed: {done.stderr.decode(errors='replace')}")
    return folder / "runs" / "study"


def study(folder: Path, name: str = "study") -> Path:
    """Return a run of a simulated study in a folder's runs/.

    Raises:
        RuntimeError: the study failed.
    """
    return copied(_made(), folder, name)


def copied(run: Path, folder: Path, name: str = "study") -> Path:
    """Copy a run into a folder's runs/ and return the copy."""
    return Path(shutil.copytree(run, folder / "runs" / name, symlinks=True))


def as_other_user(function: Callable[[], bool]) -> bool | None:
    """Call a function in a child process of another user; None unless root runs this.

    An OSError in it counts as False: the attack was refused.
    """
    if os.geteuid() != 0:
        return None
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(OTHER_UID)
            os.setuid(OTHER_UID)
            code = 0 if function() else 1
        except OSError:
            pass
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def writable_by_others(folder: Path) -> bool:
    """Whether the modes let any user rename entries of this folder."""
    above = all(stat.S_IMODE(parent.stat().st_mode) & 0o001 for parent in folder.parents)
    mode = folder.stat().st_mode
    return above and bool(mode & 0o002) and not mode & stat.S_ISVTX
