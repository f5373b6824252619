"""The living ranks of one probe: their events, and the commands that they take."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tuner.workload.hook import loopback
from tuner.workload.node.host import family
from tuner.workload.node.rank_messages import MAX_LINE_BYTES, Event, parsed


class ServerError(RuntimeError):
    """The fork server could not start, import or build."""

    def __init__(self, message: str, detail: str = "", *, kind: str = "") -> None:
        # detail: what it printed, or its traceback; kind: the name of the exception.
        super().__init__(f"{kind}: {message}" if kind else message)
        self.message, self.detail, self.kind = message, detail, kind


class NoReply(ServerError):
    """The fork server did not answer in time; whatever it does, no configuration has caused it."""


class Ranks(Protocol):
    """The ranks of one probe; `patience_s` is how long a cause may arrive after its effect.

    Where the ranks are those that were started, no others are to be told of.
    """

    size: int
    pids: tuple[int, ...]
    patience_s: float

    def next_event(self, timeout_s: float) -> Event | None:
        """Return the next event, or None after `timeout_s` seconds of silence."""

    def second_training(self, limit_s: float) -> str:
        """Return a sentence on processes that train after their ranks have ended, or ""."""
        return ""

    def describe(self) -> str:
        """Return a phrase on unexpected processes, or ""."""
        return ""

    def expects_more(self) -> bool:
        """Return True while a process that was not expected may still report as a rank."""
        return False

    def send(self, line: str) -> None:
        """Send a command to all ranks: "run N", "set JSON" or "quit"."""

    def kill(self) -> None:
        """End the ranks and all that they started."""


class RankGroup(Ranks):
    """The ranks of one probe on this node, whose processes a `RankServer` started."""

    patience_s = 1.0

    def __init__(
        self,
        server: Any,
        pids: Sequence[int],
        listener: socket.socket,
        *,
        first_rank: int = 0,
    ) -> None:
        self.size, self.pids = len(pids), tuple(pids)
        self._server, self._listener = server, listener
        self._rank_of = {pid: rank for rank, pid in enumerate(pids, first_rank)}
        self._own = frozenset(self._rank_of.values())  # ranks that may report; empty for any
        self._running = set(pids)
        self._links: dict[int, socket.socket] = {}
        self._buffers: dict[socket.socket, bytes] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._pending: deque[Event] = deque()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(server, selectors.EVENT_READ, self._exited)

    def next_event(self, timeout_s: float) -> Event | None:
        """Return the next event of a rank, or None after `timeout_s` seconds of silence."""
        deadline = time.monotonic() + timeout_s
        while not self._pending:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            for key, _ in self._selector.select(left):
                # Handling an exit reads every link and accepts who waits: what comes next in this
                # list may be closed by then, or have nothing left to read.
                if key.fileobj in self._selector.get_map():
                    handle: Callable[[Any], object] = key.data
                    handle(key.fileobj)
        return self._pending.popleft()

    def notice_exits(self) -> None:
        """Take exits that the server has told already, with its reply to the start.

        Its socket is not readable for them any more, so that nobody would hear of them.
        """
        self._exited(self._server)

    def receive_events(self, source: Any, events: Callable[[], Iterable[Event]]) -> None:
        """Add the events of other nodes' ranks: `events` is called when `source` is readable."""
        self._selector.register(
            source, selectors.EVENT_READ, lambda readable: self._pending.extend(events())
        )

    def send(self, line: str) -> None:
        """Send a command to all ranks. A rank that is gone does not raise an error here."""
        for link in self._links.values():
            with contextlib.suppress(OSError):  # its exit arrives as an event
                link.sendall(line.encode() + b"\n")

    def kill(self) -> None:
        """End the ranks and all that they started, and wait until the ranks are gone."""
        self._server.kill()
        deadline = time.monotonic() + 5.0
        while self._running and time.monotonic() < deadline:
            try:
                self._exited(self._server, timeout_s=0.2)
            except ServerError:
                break
        for link in self._links.values():
            link.close()
        self._selector.close()

    def _accept(self, listener: socket.socket) -> bool:
        try:
            link, _ = listener.accept()
        except BlockingIOError:
            return False
        self._buffers[link] = b""
        self._selector.register(link, selectors.EVENT_READ, self._received)
        return True

    def _received(self, link: socket.socket) -> None:
        try:
            chunk = link.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._selector.unregister(link)
            return
        buffer = self._buffers[link] + chunk
        *lines, self._buffers[link] = buffer.split(b"\n")
        for line in lines:
            message = parsed(line)  # a program may write to the socket itself
            if message is not None and (event := self._heard(link, message)) is not None:
                self._pending.append(event)
        if len(self._buffers[link]) > MAX_LINE_BYTES:
            self._buffers[link] = b""
            self._selector.unregister(link)

    def _heard(self, link: socket.socket, message: Event) -> Event | None:
        # Return a message as the event of a rank.
        if message.kind == "hello":
            return self._hello(link, message.rank, message.detail["pid"], message.detail["world"])
        rank = self._ranks.get(link)
        if rank is None and message.kind != "fail":
            return None
        return replace(message, rank=-1 if rank is None else rank)

    def _hello(self, link: socket.socket, rank: int, pid: int, world: int) -> Event | None:
        if self._own and rank not in self._own:
            return None
        self._links[rank], self._ranks[link] = link, rank
        self._rank_of[pid] = rank
        return Event("hello", rank)

    def _exited(self, server: Any, timeout_s: float = 0.0) -> None:
        for pid, code in server.exits(timeout_s):
            if pid in self._running:
                self._running.discard(pid)
                self._hear_the_rest()  # before its end is reported
                rank = self._rank_of[pid]
                self._pending.append(Event("exit", rank, detail={"code": code}))

    def _hear_the_rest(self) -> None:
        """Read what all have sent until now, those included who have only just connected."""
        with contextlib.suppress(OSError):
            while self._accept(self._listener):
                pass
        for link in list(self._buffers):
            with contextlib.suppress(OSError, RuntimeError, KeyError):
                while link in self._selector.get_map() and self._readable(link):
                    self._received(link)

    @staticmethod
    def _readable(link: socket.socket) -> bool:
        with selectors.DefaultSelector() as probe:
            probe.register(link, selectors.EVENT_READ)
            return bool(probe.select(0))


# The ranks of a command that was started as it stands.
#
# Nobody knows them before they report: a process below the command connects when it takes its first
# optimizer step, and says its rank and world.


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
        return f"process {self.pid} ({_shown(self.words)})"


def _shown(words: Sequence[str]) -> str:
    text = " ".join(shlex.join(words).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


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
    found: list[Process] = []
    members = family(server) if server else set()
    for _ in range(LOOKS):
        found = [each for each in map(_process, sorted(members)) if each is not None]
        # A process that ends leaves its children to the server, who then stand where nobody looked.
        if not members or (now := family(server)) <= members:
            break
        members = now
    return found


def _process(pid: int) -> Process | None:
    """Return a process; None if it has ended."""
    try:
        program = Path(f"/proc/{pid}/exe").resolve().name
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        if not words and _is_zombie(pid):
            return None
        # A process has no words for a moment while it starts another program (execve).
        found = Process(pid, tuple(words.split("\0")[:-1]) or (program,), program)
        if words and found.runs_python and (why := _why_hidden(found)):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found = replace(found, why_hidden=why, has_torch="/libtorch" in maps)
        return found
    except OSError:
        return None


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


#: Exit code of a rank that is gone without a word, which no launcher has told yet.
GONE = -255
#: Variables of ours in the environment of a command and its ranks.
OWN_VARIABLES = (
    *("JOULEFRONT_ATTACH", "BASH_ENV", "JOULEFRONT_BASH_ENV", "JOULEFRONT_LINES"),
    *(loopback.MEETING, loopback.OWN_STORE),
)
#: Once a rank has reported, the others have as long as it took, and at least this, seconds.
LEAST_PATIENCE_S = 20.0
#: The processes of a command are looked at this often, seconds.
POLL_S = 0.5
#: And so many times at once, at most, while new ones appear.
LOOKS = 10
#: Processes and errors of those that are no ranks, of which a command may report any number.
MOST_KEPT = 4096
#: A command that has ended may have left a training in the background: its Python and shells have
#: this long to import torch, and any other process to start them, seconds.
IMPORT_LIMIT_S, START_LIMIT_S = 60.0, 5.0


class CommandGroup(RankGroup):
    """Ranks below one command, whose process a `RankServer` started.

    Args:
        environment: of the command; a rank's facts say how its own differs.
        ranks: their number, if an earlier launch has shown it; else 1 until the first one reports.
    """

    def __init__(
        self,
        server: Any,
        pid: int,
        listener: socket.socket,
        *,
        environment: Mapping[str, str],
        ranks: int = 0,
    ) -> None:
        super().__init__(server, [pid], listener)
        self.size = ranks or 1
        self._command, self._environment = pid, environment
        self.pids = ()  # of the ranks that have reported
        self._own, self._rank_of, self._pid_of = frozenset(), {}, dict[int, int]()
        self._ended: set[int] = set()
        self._errors: list[Event] = []  # of processes that are no ranks
        self._alone = self._complained = False
        self._began_s, self._reported_s = time.monotonic(), 0.0
        self._importing: dict[int, list[str]] = {}  # words of processes that have imported torch
        self._polled_s = self._began_s
        self._left_s: float | None = None  # when the command ended, if it left processes
        self._hidden: Process | None = None  # the last one seen in which the hook is not
        self._living: Sequence[Process] = ()
        self._second = ""  # what trains after the first ranks have ended

    def next_event(self, timeout_s: float) -> Event | None:
        event = super().next_event(timeout_s)
        if event is None and not self._pid_of and time.monotonic() - self._polled_s > POLL_S:
            self._poll()
            event = self._pending.popleft() if self._pending else None
        return event or self._missing()

    def _poll(self) -> None:
        # Before the first rank reports, see what cannot train, or not be seen: nobody waits for it.
        self._polled_s = now_s = time.monotonic()
        self._living = living = below(self._server.pid)
        for each in living:
            if each.why_hidden and not (self._hidden and self._hidden.has_torch):
                self._hidden = each
        waits = any(Path(f"/proc/{pid}").exists() for pid in self._importing)
        if self._hidden is not None and self._hidden.has_torch and not waits:
            message = (
                f"{self._hidden} trains where nobody can see it: {self._hidden.why_hidden}; start "
                "it without that, or give tuner the command that trains inside"
            )
            self._pending.append(
                Event("fail", 0, detail={"evidence": "refusal", "message": message})
            )
        elif self._left_s is not None:
            limit_s = START_LIMIT_S
            if any(each.may_start_more for each in living):
                limit_s = IMPORT_LIMIT_S
            if not living or (now_s - self._left_s > limit_s and not waits):
                self._over(0)

    def _missing(self) -> Event | None:
        # Return a failure once ranks have not reported for long.
        first_s, count = self._reported_s, len(self._pid_of)
        if not count or count >= self.size or self._ended or self._complained:
            return None
        patience_s = max(LEAST_PATIENCE_S, first_s - self._began_s)
        if time.monotonic() - first_s < patience_s:
            return None
        self._complained = True
        message = (
            f"{count} of {self.size} ranks train on this machine: the command starts the others on "
            "other ones, which probes do on a Ray cluster (--ray ADDRESS, docs/clusters.md)"
        )
        return Event("fail", -1, detail={"evidence": "refusal", "message": message})

    def _hello(self, link: socket.socket, rank: int, pid: int, world: int) -> Event | None:
        others = [each for each in self._pid_of if each not in self._ended]
        if others and (self._pid_of.get(rank, pid) != pid or max(world, 1) != self.size):
            self._alone = True
            other = rank if rank in others else others[0]
            detail = {
                "evidence": "no group",
                "message": (
                    f"process {self._pid_of[other]} trains as rank {other} of {self.size}, and "
                    f"{pid} as rank {rank} of {max(world, 1)}: the command starts several "
                    "processes that make no process group"
                ),
            }
            return Event("fail", rank, detail=detail)
        if self._pid_of and not others:
            first, second = (
                shlex.join(self._importing.get(each, ["?"])[1:])[:80]
                for each in (*[*self._pid_of.values()][:1], pid)
            )
            self._second = (
                f"the command trains {first} to its end and then {second}; give tuner the one that "
                "is to be tuned"
            )
        self._ended.discard(rank)
        self.size = max(world, 1)
        self._reported_s = self._reported_s or time.monotonic()
        self._pid_of[rank] = pid
        self.pids = tuple(self._pid_of[rank] for rank in sorted(self._pid_of))
        return super()._hello(link, rank, pid, world)

    def second_training(self, limit_s: float) -> str:
        """Wait until the command ends, or trains again; return a sentence about that, or ""."""
        until_s = time.monotonic() + limit_s
        while self._command in self._running and not self._second and time.monotonic() < until_s:
            self.next_event(0.1)
        return self._second

    def describe(self) -> str:
        """Return which processes of the command may train, a phrase."""
        if self._pid_of:
            return ""
        if self._hidden is not None:
            return f", and nothing is seen of {self._hidden}: {self._hidden.why_hidden}"
        living = [each for each in self._living if each.runs_python] or self._living
        if living and not any(each.pid in self._importing for each in living):
            more = f" and {len(living) - 2} more" if len(living) > 2 else ""
            runs = " and ".join(map(str, living[:2]))
            return f", and {runs}{more} did not import torch"
        shown = dict.fromkeys(_shown(words[1:]) for words in self._importing.values())
        if not shown:
            return ", and no Python process of the command has imported torch"
        return f", and torch was imported by {', '.join(shown)}"

    def expects_more(self) -> bool:
        """Return True while a process with the words of a rank has not reported as one."""
        words = [self._importing.get(pid) for pid in self.pids]
        late = (
            pid for pid, own in self._importing.items() if pid not in self.pids and own in words
        )
        return any(Path(f"/proc/{pid}").exists() for pid in late)

    def _heard(self, link: socket.socket, message: Event) -> Event | None:
        if message.kind == "imports":
            if len(self._importing) < MOST_KEPT:
                self._importing[message.detail["pid"]] = message.detail["words"]
            return None
        event = super()._heard(link, message)
        if event is None:
            return None
        if event.rank < 0:  # it counts if the command ends without training
            self._errors = [*self._errors[: MOST_KEPT - 1], event]
            return None
        if event.kind == "end":
            self._ended.add(event.rank)
        if event.kind == "facts":
            if (process := event.detail.get("process")) is None:
                return None
            kept = {name: value for name, value in process.items() if name != "environment"}
            kept["variables"] = self._added(process["environment"])
            return replace(event, detail={**event.detail, "process": kept})
        return event

    def _added(self, own: Mapping[str, str]) -> dict[str, str]:
        # Return what the command has added to its environment, or changed, for a rank.
        before = without_entry(self._environment)
        return {
            name: value
            for name, value in without_entry(own).items()
            if name not in OWN_VARIABLES and before.get(name) != value
        }

    def _received(self, link: socket.socket) -> None:
        super()._received(link)
        rank = self._ranks.get(link)
        if rank is None or link in self._selector.get_map() or rank in self._ended:
            return
        self._ended.add(rank)
        self._pending.append(Event("exit", rank, detail={"code": GONE}))

    def _exited(self, server: Any, timeout_s: float = 0.0) -> None:
        for pid, code in server.exits(timeout_s):
            if pid != self._command or pid not in self._running:
                continue
            self._running.discard(pid)
            self._hear_the_rest()
            if code == 0 and self._left_training():
                self._left_s = time.monotonic()
                continue
            self._over(code)

    def _left_training(self) -> bool:
        self._living = below(self._server.pid)
        if self._pid_of:
            return any(each.pid in self.pids for each in self._living)
        return bool(self._living)

    def _over(self, code: int) -> None:
        if not self._pid_of:
            self._pending.extend(replace(event, rank=0) for event in self._errors)
        # Who has not reported by now will not, however many a rank has said there are.
        ranks = sorted({0, *self._pid_of})
        self.size = len(ranks)
        for rank in ranks:
            shown_code = code if rank == 0 and not self._alone else 0
            self._pending.append(Event("exit", rank, detail={"code": shown_code}))
