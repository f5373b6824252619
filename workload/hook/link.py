"""The rank's connection to its agent: steps, phase marks, the end, and the waits between.

One `Link` counts the optimizer steps of its rank and reports each (the package's docstring
describes the lines). `DeviceTimes` holds the ends of steps and the phase marks until the device has
reached them.
"""

import contextlib
import errno
import itertools
import json
import os
import resource
import socket
import sys
import time
import traceback
from collections import deque
from typing import Any, NoReturn

from . import state
from .batch_counts import GROUPS

# Ordinary exceptions that mean "no memory left", by name: torch cannot be imported here.
_OOM_TYPES = {"OutOfMemoryError", "MemoryError"}
_PEER_WORDS = ("gloo", "nccl", "closed by peer", "connection reset", "broken pipe")
_OOM_WORDS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)
# Also of semaphores and shared memory: /dev/shm is full.
_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_SPACE_WORDS = tuple(os.strerror(number).lower() for number in _SPACE_ERRORS)
# cuBLAS and cuDNN cannot be set up on a full device (pytorch issue 128601), but fail so for other
# reasons, too: it is memory only if this share of the device or less is free.
_SETUP_WORDS = ("cublas_status_not_initialized", "cudnn_status_not_initialized")
_FULL_SHARE = 0.05
#: The hook's own folder.
_HERE = os.path.dirname(__file__)
_FRAMES = 16  # of an error that the agent is told
# Errors of CUDA that no configuration causes: the device is damaged, taken or not ready.
_HARDWARE_WORDS = (
    "ecc error",
    "hardware error",
    "hardware stack error",
    "busy or unavailable",
    "no cuda gpus",
    "no cuda-capable device",
    "no hip gpus",
    "system not yet initialized",
    "gpu is lost",
    "fallen off the bus",
)


class DeviceTimes:
    """Times of phase marks and step ends, on CLOCK_MONOTONIC, by the clock of the device.

    On a CUDA device the host runs ahead, so each is an event on the stream. Events are read once
    they lie behind, against one that was recorded at the last boundary, where the device had
    nothing to do and both clocks could be read at once: nothing waits for the device in a step.
    Without a device the host's clock is the device's.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, Any]] = deque()
        self._reference: tuple[Any, float] | None = None  # an event, and when it was
        self._device: int | None = None  # the one that holds this rank's tensors, once one does

    def add(self, line: str) -> None:
        """Record that the device reaches the point of `line` now; its time is appended."""
        self._waiting.append((line, self._event() or time.monotonic()))

    def _event(self) -> Any:
        if not (cuda := _cuda_in_use()):
            return None
        if self._device is None:  # looked up once: reading the allocator takes some 0.1 ms a device
            self._device = next(iter(_devices_with_tensors(cuda)), None)
            if self._device is None:
                return None
        event = cuda.Event(enable_timing=True)
        # The current device need not be this rank's, and recording there would start a context.
        event.record(cuda.current_stream(self._device))
        return event

    def lines(self) -> str:
        """Return the lines for the agent whose times are known, in their order."""
        lines = []
        while self._waiting:
            line, at = self._waiting[0]
            if not isinstance(at, float):
                if self._reference is None or not at.query():
                    break
                event, then_s = self._reference
                at, passed = then_s + event.elapsed_time(at) / 1000, at
                # From one event to the next: the milliseconds are single precision.
                self._reference = passed, at
            self._waiting.popleft()
            lines.append(f"{line} {at:.7f}\n")
        return "".join(lines)

    def all_lines(self) -> str:
        """Return the remaining lines at a boundary, where the device is idle."""
        event = self._event()
        if event is None:
            return self.lines()
        event.synchronize()
        now_s = time.monotonic()
        # The first boundary ends the first step: there is no earlier reference to read by.
        self._reference = self._reference or (event, now_s)
        report = self.lines()
        self._reference = event, now_s
        return report


class Link:
    """Connection of a rank to its agent, and the count of its optimizer steps."""

    def __init__(self, address: str, rank: int | None, world: int | None = None) -> None:
        # rank: None for a process that is no rank, and only reports its error; world: of a rank
        # that the agent did not start.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(address)
        self._buffer = b""
        self.steps, self.owner = 0, os.getpid()
        # The first step is free: only after it is there anything to wait for.
        self._until = 1
        self.starting = True
        self._times = DeviceTimes()
        self._reports_phases = rank == 0  # the agent keeps one rank's
        self._phases = False  # a program that marks nothing is told of no waits either
        if rank is not None:
            self.send(f"hello {rank} {self.owner}" + (f" {world}" if world else ""))

    def send(self, line: str) -> None:
        self._socket.sendall(line.encode() + b"\n")

    def mark(self, name: str) -> None:
        """Mark the start of a phase of the step."""
        if self._reports_phases:
            self._phases = True
            self._times.add(f"phase {name}")

    def ready(self) -> None:
        """Note that this rank's own share of the step is done."""
        self._times.add(f"ready {self.steps + 1}")

    def _receive(self) -> str:
        while b"\n" not in self._buffer:
            chunk = self._socket.recv(4096)
            if not chunk:
                os._exit(3)  # the agent is gone; so is the reason to train
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line.decode()

    def step_done(self) -> None:
        """Count an optimizer step of this rank; wait here if the agent named this boundary."""
        self.steps += 1
        self.starting = False
        inspects = state.options.get("inspect") and self.steps <= GROUPS
        told = state.options.get("counts") or state.options.get("compares")
        if inspects or (told and self.steps == GROUPS):
            facts = {**state.facts(), "live": state.present_values()}
            self.send("facts " + json.dumps(facts, default=str))
        if self.steps < self._until:
            self._times.add(f"step {self.steps}")
            if report := self._times.lines():
                self.send(report[:-1])
            return
        finish_device_work()
        at_s = time.monotonic()
        report = self._times.all_lines()
        if self._phases:
            report += f"phase boundary {at_s:.7f}\n"
        self.send(f"{report}at {self.steps} {at_s:.7f}")
        line = self._receive()
        while line.startswith("set "):
            values_read = state.set_values(json.loads(line.removeprefix("set ")))
            self.send("set " + json.dumps(values_read, default=str))
            line = self._receive()
        if line == "quit":
            self.leave()
        self._until = int(line.split()[1])

    def leave(self) -> None:
        """Report the peaks and end at once: interpreters with live collectives may abort."""
        self.send("peak " + json.dumps(_peaks()))
        self.send("end")
        end_process(0)

    def fail(self, error: BaseException, *, effect: bool = False) -> None:
        """Report an error to the agent, with its evidence (`workload.records.probe.FAILURES`).

        Args:
            effect: it follows from another process's error.
        """
        evidence = "error"
        text = str(error)
        if _lacks_memory(error):
            evidence = "no memory"
        elif _lacks_space(error):
            evidence = "no space"
        elif _is_of_hardware(text):
            evidence = "hardware"
        elif isinstance(error, state.IndependentRanks):
            evidence = "no group"
        elif _raised_by_hook(error):
            evidence = "hook"
        elif _lacks_rank(error):
            evidence = "no rank"
        elif isinstance(error, state.NotAsRequested) or (
            self.starting and _raised_by_framework(error)
        ):
            evidence = "refusal"
        lines = text.strip().splitlines() or [""]
        message = " ".join(lines[:3]) if lines[0].endswith(":") else lines[0]  # a list follows
        if not isinstance(error, state.NotAsRequested):
            message = f"{type(error).__name__}: {message}"
        # A rank whose peer died fails in a collective: an effect, not the cause.
        effect = effect or (
            evidence not in ("no memory", "no space", "hardware")
            and any(word in text.lower() for word in _PEER_WORDS)
        )
        report = {"evidence": evidence, "message": message[:2000], "effect": effect}
        self.send("fail " + json.dumps({**report, "frames": _frames(error)}))


def _frames(error: BaseException) -> list[str]:
    # Innermost first; of a file in a package its path in there, else its own name.
    shown = []
    for frame in reversed(traceback.extract_tb(error.__traceback__)[-_FRAMES:]):
        packages, _, path = frame.filename.rpartition(f"site-packages{os.sep}")
        shown.append(f"{path if packages else os.path.basename(path)}:{frame.name}")
    return shown


def _lacks_memory(error: BaseException) -> bool:
    text = str(error).lower()
    if {cls.__name__ for cls in type(error).__mro__} & _OOM_TYPES:
        return True
    if any(word in text for word in _OOM_WORDS):
        return True
    if not any(word in text for word in _SETUP_WORDS) or not (cuda := _cuda_in_use()):
        return False
    try:
        free, total = cuda.mem_get_info()
    except Exception:  # the device does not answer any more: the error stays what it says
        return False
    return free <= _FULL_SHARE * total


def _lacks_space(error: BaseException | None) -> bool:
    # The writer of torch.save tells it only by the error that it was handling.
    while error is not None:
        if isinstance(error, OSError) and error.errno in _SPACE_ERRORS:
            return True
        if any(words in str(error).lower() for words in _SPACE_WORDS):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _lacks_rank(error: BaseException) -> bool:
    # Return True if torch or DeepSpeed looked for the rank that a launcher would have set.
    if "RANK" in os.environ:
        return False
    rendezvous = os.path.join("torch", "distributed", "rendezvous.py")
    return any(
        frame.filename.endswith(rendezvous) or frame.name == "mpi_discovery"  # DeepSpeed's
        for frame in traceback.extract_tb(error.__traceback__)
    )


def _raised_by_hook(error: BaseException) -> bool:
    """Return True if the hook's own code failed.

    Not what it refuses (`raise`), what it calls for the program (`plain`), what the program asks of
    it (`state`), and what a file or a library of the program lacks.
    """
    kinds = (AttributeError, NameError, TypeError, LookupError, ArithmeticError, AssertionError)
    if not isinstance(error, kinds):
        return False
    frames = reversed(traceback.extract_tb(error.__traceback__))
    last = itertools.dropwhile(lambda frame: frame.name == "__getattr__", frames)
    own = list(itertools.takewhile(lambda frame: os.path.dirname(frame.filename) == _HERE, last))
    if not own or os.path.basename(own[-1].filename) == "state.py":
        return False
    line = own[0].line or ""
    return not line.startswith("raise ") and "plain" not in line


def _is_of_hardware(text: str) -> bool:
    text = text.lower()
    of_device = any(word in text for word in ("cuda", "hip error", "nccl", "gpu"))
    return of_device and any(words in text for words in _HARDWARE_WORDS)


def _raised_by_framework(error: BaseException) -> bool:
    # Return True if DeepSpeed itself refused, rather than the program having failed.
    if type(error).__name__ not in (
        "AssertionError",
        "ValueError",
        "NotImplementedError",
        "DeepSpeedConfigError",
        "ValidationError",
    ):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return any(f"{os.sep}deepspeed{os.sep}" in frame.filename for frame in frames)


def _cuda_in_use() -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return torch.cuda


def _devices_with_tensors(cuda: Any) -> list[int]:
    # Return the devices with this rank's tensors: asking another's work would start a context.
    try:
        return [index for index in range(cuda.device_count()) if cuda.memory_reserved(index) > 0]
    except Exception:  # an allocator of the program's own may not tell
        return [cuda.current_device()]


def _own_devices(cuda: Any) -> list[int]:
    return _devices_with_tensors(cuda) or [cuda.current_device()]


def finish_device_work() -> None:
    """Wait until this rank's devices have nothing left to do."""
    if cuda := _cuda_in_use():
        for index in _own_devices(cuda):
            cuda.synchronize(index)


def _peaks() -> dict[str, int]:
    peaks = {"host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if cuda := _cuda_in_use():
        reserved = [cuda.max_memory_reserved(index) for index in _own_devices(cuda)]
        peaks["device_bytes"] = max(reserved)
    return peaks


def end_process(code: int) -> NoReturn:
    """End at once, after flushing the output; folders made for nothing go."""
    for folder in sorted(state.made_folders, key=len, reverse=True):  # the inner ones first
        with contextlib.suppress(OSError):  # not empty: of the program
            os.rmdir(folder)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
