"""The hook in a process of a command that was started as it stands.

`entry/sitecustomize.py` loads it into every Python process below the command. Nothing happens until
the process has imported torch, and it becomes a rank when it takes an optimizer step: then it
connects to the agent and sends its rank and world, as torch.distributed has them. An error that
ends a process is sent, too; the agent looks at it if the command ends without training.
"""

import atexit
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from . import state, steps
from .link import Link
from .loopback import LAUNCHER, keep_agents_store
from .program import prepare, prepare_torch
from .source import PROGRAM
from .steps import place
from .torch_settings import is_installed

#: Environment variable with the path of the file that says what to do, or of the folder in which a
#: process of a command that is only measured counts its steps (`tally`).
ATTACH = "JOULEFRONT_ATTACH"
#: Place of a rank's number in its words.
_OF_RANK = re.compile(r"\{(?:local_)?rank\}")
#: Packages that take long to import.
_HEAVY = {"accelerate", "datasets", "deepspeed", "lightning", "pytorch_lightning", "transformers"}
#: Errors of a launcher whose rank failed: an effect, whose cause is the rank's.
_RELAYED = (
    *("ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "RayTaskError"),
    *("CalledProcessError", "TrainingFailedError", "WorkerGroupError"),
)


class Attachment:
    """Connection of this process to the agent, which is made when there is something to send."""

    def __init__(self, address: str) -> None:
        self._address, self._link = address, None  # type: str, Link | None
        self.began_s = time.time()
        self.environment = dict(os.environ)  # before the program changes it
        self.folder = os.getcwd()

    def announce(self) -> None:
        """Send that this process may train: it has imported torch."""
        with contextlib.suppress(OSError):
            Link(self._address, None).send(f"imports {os.getpid()} {json.dumps(sys.orig_argv)}")

    def connect(self) -> Link:
        """Return the link of this process as a rank; the first call reports its rank."""
        if self._link is None or self._link.owner != os.getpid():  # a fork has its own
            rank, world = place()
            self._link = Link(self._address, rank, world)
            atexit.register(self._end, self._link)
            if state.options.get("inspect"):
                state.seen["process"] = self.description(rank, world)
        return self._link

    def description(self, rank: int, world: int) -> dict[str, Any]:
        """Return how this process was started."""
        torch = sys.modules["torch"]
        return {
            "rank": rank,
            "world": world,
            "words": list(sys.orig_argv),
            "prefix": sys.prefix,
            "began_s": self.began_s,
            "cwd": self.folder,
            "environment": {n: text for n, text in self.environment.items() if n != PROGRAM},
            "program": json.loads(self.environment.get(PROGRAM, "{}")),
            "threads": torch.get_num_threads(),
            "cores": len(os.sched_getaffinity(0)),
            "imports": sorted(name for name in _HEAVY & {*sys.modules} if is_installed(name)),
        }

    def _end(self, link: Link) -> None:
        if link.owner == os.getpid():
            with contextlib.suppress(OSError):
                link.send("end")

    def report(self, error: BaseException) -> None:
        """Send an error that ends this process."""
        with contextlib.suppress(OSError):
            relayed = type(error).__name__ in _RELAYED
            if self._link is not None and self._link.owner == os.getpid():
                self._link.fail(error, effect=relayed)
            else:
                Link(self._address, None).fail(error, effect=relayed)


def attach(path: str) -> None:
    """Watch this process by the file at `path`, from its import of torch on."""
    with open(path, encoding="utf-8") as file:
        spec: Mapping[str, Any] = json.load(file)
    if address := spec.get("address"):
        state.attachment, state.probed = Attachment(address), True
        folder = os.path.dirname(address)
        steps.ImportHook((LAUNCHER,), lambda _, launcher: keep_agents_store(launcher, folder))
    prepare(spec.get("options") or {})
    words = (spec.get("options") or {}).get("words")
    changed = words is not None and _change_words(words["typed"], words["set"])
    if changed:
        _confirm(spec)
    confirm = spec if words is None else {}
    _report_lack_of_torch(str(spec.get("python") or ""))
    steps.ImportHook(("torch",), lambda _, torch: _torch_imported(torch, confirm))


def _confirm(spec: Mapping[str, Any]) -> None:
    # Leave a mark for the launch file: a rank trains as it says.
    if path := spec.get("confirm"):
        with open(path, "w", encoding="utf-8"):
            pass


def _change_words(typed: Sequence[str], changed: Sequence[str]) -> bool:
    """Give this process other arguments, if it is a rank that was started with the typed words.

    Python has read its own options already, and sys.argv holds the program and its arguments.
    Return True if it is such a rank.
    """
    own = program_words(sys.orig_argv)  # not their end: a launcher's words hold a rank's
    if not typed or len(own) != len(typed):
        return False
    numbers: set[str] = set()
    for mine, word in zip(own, typed, strict=True):
        pattern = r"(\d+)".join(map(re.escape, _OF_RANK.split(word)))
        found = re.fullmatch(pattern, mine)
        if found is None:
            return False
        numbers.update(found.groups())
    number = next(iter(numbers), "")
    sys.argv[1:] = [_OF_RANK.sub(number, word) for word in changed[first_argument(changed) :]]
    return True


def first_argument(words: Sequence[str]) -> int:
    """Return the place of the program's first argument in its words (`program_words`)."""
    return 2 if words[0] in ("-m", "-c") else 1


def program_words(command: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a Python process without the interpreter and its options.

    Python reads options up to the script, `-m` or `-c`; `-W` and `-X` take a value (python --help).
    """
    words = list(command[1:])
    while words and words[0].startswith("-") and words[0] not in ("-", "-m", "-c"):
        option = words.pop(0)
        if option in ("-W", "-X", "--check-hash-based-pycs") and words:
            words.pop(0)
        elif found := re.fullmatch(r"-[^-WXmc]*([mc])(.*)", option):  # -um MODULE, -mMODULE
            return (f"-{found[1]}", *filter(None, [found[2]]), *words)
    return tuple(words)


def _report_lack_of_torch(other: str) -> None:
    # A program that lacks torch runs in an interpreter that the user did not mean.
    attachment, plain = state.attachment, sys.excepthook
    if attachment is None:
        return

    def excepthook(kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            problem = f"{sys.executable}, the Python of the command, has no torch"
            also = f"; tuner runs in {other}" if other != sys.executable else ""
            attachment.report(state.NotAsRequested(f"{problem}{also}"))
        plain(kind, error, trace)

    sys.excepthook = excepthook


def _torch_imported(torch: Any, confirm: Mapping[str, Any]) -> None:
    # What cannot be observed is no reason to stop a program.
    with contextlib.suppress(Exception):
        prepare_torch(torch)
        _confirm(confirm)
    attachment = state.attachment
    if attachment is None:
        return
    attachment.announce()
    plain = sys.excepthook

    def excepthook(kind: Any, error: Any, trace: Any) -> None:
        attachment.report(error)
        plain(kind, error, trace)

    sys.excepthook = excepthook
