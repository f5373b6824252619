"""The processes below a command that was started as it stands, as /proc shows them."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.workload.node.host import family

#: Longest text of a process's words in a sentence.
_SHOWN = 100
_PYTHON = re.compile(r"python[\d.]*t?d?")
_SHELL = re.compile(r"(ba|da|z|k|a)?sh")
#: The marks of the entry of the hook in an environment.
_ENTRY, _FOLDER = b"JOULEFRONT_ATTACH", b"/hook/entry"


@dataclass(frozen=True)
class Process:
    """A living process below a command.

    Attributes:
        why_hidden: why the hook is not in an interpreter of Python, a phrase; "" if it is.
        has_torch: True for a hidden one that has loaded torch's library.
    """

    pid: int
    words: tuple[str, ...]
    program: str
    why_hidden: str = ""
    has_torch: bool = False

    @property
    def runs_python(self) -> bool:
        """True if it is an interpreter of Python."""
        return bool(_PYTHON.fullmatch(self.program))

    @property
    def may_start_more(self) -> bool:
        """True if it is Python or a shell, which may yet start a training."""
        return self.runs_python or bool(_SHELL.fullmatch(self.program))

    def __str__(self) -> str:
        text = " ".join(shlex.join(self.words).split())
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        return f"process {self.pid} ({shown})"


def option_without_hook(words: Sequence[str]) -> str:
    """Return the option of a Python command by which it reads no PYTHONPATH or sitecustomize."""
    rest = list(words[1:])
    while rest and rest[0].startswith("-") and rest[0] != "-":
        option = rest.pop(0)
        if option in ("-W", "-X", "--check-hash-based-pycs"):
            rest = rest[1:]
        elif found := re.match(r"-[a-zA-Z]*", option):
            flags = re.split(r"[mcWX]", found[0])[0]
            if any(flag in flags for flag in "ISE"):
                return option
            if re.search(r"[mc]", found[0]):
                break
    return ""


def below(server: int) -> list[Process]:
    """Return the living processes below a server, in the order of their numbers."""
    found = []
    for pid in sorted(family(server)) if server else ():
        with contextlib.suppress(OSError):  # it has ended
            program = Path(f"/proc/{pid}/exe").resolve().name
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            if not words and _is_zombie(pid):
                continue
            # A process has no words for a moment while it starts another program (execve).
            each = Process(pid, tuple(words.split("\0")[:-1]) or (program,), program)
            if words and each.runs_python and (why := _why_hidden(each)):
                maps = Path(f"/proc/{pid}/maps").read_text()
                each = replace(each, why_hidden=why, has_torch="/libtorch" in maps)
            found.append(each)
    return found


def _is_zombie(pid: int) -> bool:
    """Return True if a process has ended with its exit code unread."""
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "Z"


def _why_hidden(process: Process) -> str:
    if option := option_without_hook(process.words):
        return f"its option {option} keeps out what PYTHONPATH names"
    own = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    if not any(each.startswith(_ENTRY) for each in own):
        return "its environment was cleared, as by env -i, sudo or a container"
    path = next((each for each in own if each.startswith(b"PYTHONPATH=")), b"")
    if _FOLDER not in path:
        return "PYTHONPATH is replaced; PYTHONPATH=FOLDER:$PYTHONPATH adds to it"
    return ""


def without_entry(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment whose PYTHONPATH does not hold the entry of the hook."""
    path = environment.get("PYTHONPATH", "").split(os.pathsep)
    kept = os.pathsep.join(each for each in path if not each.endswith(_FOLDER.decode()))
    return {**environment, "PYTHONPATH": kept}


def with_entry(line: str, entry: str) -> str:
    """Return a line for the shell in which the entry of the hook stands first on PYTHONPATH.

    A line may set that anew, `PYTHONPATH=src python train.py`.
    """
    return re.sub(r"(?<![\w$}])PYTHONPATH=", f"PYTHONPATH={shlex.quote(entry)}{os.pathsep}", line)
