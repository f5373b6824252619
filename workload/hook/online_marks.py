"""Marks of a training that is tuned while it runs: each step's end, sent and never waited for.

The training is the user's own: nothing of it is changed but the live knobs that it registers, and
if the agent is gone, or does not keep up, marks are lost and the training goes on.

    rank to agent   hello RANK PID · length STEPS · knobs JSON (present values) · step N TIME ·
                    ready N TIME · in/out N TIME (a stage's work) · at N (waiting) · late N ·
                    set JSON (as read back)
    agent to rank   stop N (wait after step N) · set JSON (values of live knobs) · go
"""

import contextlib
import functools
import json
import os
import socket
from typing import Any

from . import engine, state, steps, watching
from .link import DeviceTimes, finish_device_work

#: Environment variable with the path of the agent's socket.
ADDRESS = "JOULEFRONT_WATCH"
#: Longest wait at a boundary for what the agent sets, seconds.
WAIT_S = 30.0
#: Steps in which the work of a pipeline's stages is timed, and the methods that do it.
STAGED_STEPS = 5
STAGES, CHUNKS = "torch.distributed.pipelining.stage", ("forward", "backward", "backward_weight")


class Watch:
    """Connection of a rank to the agent that tunes while it trains."""

    def __init__(self, address: str, rank: int) -> None:
        self.steps = 0
        self._times = DeviceTimes()
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._owner, self._received, self._stop = os.getpid(), b"", 0
        try:
            self._socket.connect(address)
        except OSError:
            self._socket = None
        self._send(f"hello {rank} {os.getpid()}\n")

    def mark(self, name: str) -> None:
        """Ignore the start of a phase."""

    def ready(self) -> None:
        """Note that this rank's own share of the step is done."""
        if self._socket is not None and os.getpid() == self._owner:
            self._times.add(f"ready {self.steps + 1}")

    def chunk(self, edge: str) -> None:
        """Note, in the first steps, that a pipeline stage begins ("in") or ends ("out") to compute
        its share of a micro-batch."""
        if self.steps < STAGED_STEPS and self._socket is not None and os.getpid() == self._owner:
            self._times.add(f"{edge} {self.steps + 1}")

    def step_done(self) -> None:
        """Count an optimizer step and send the ends of steps that the device has reached."""
        self.steps += 1
        if self._socket is None or os.getpid() != self._owner:
            return
        if self.steps == 1 and (length := watching.stated_length()):
            self._send(f"length {length['steps'] - length.get('done', 0)}\n")
        if self.steps == 1 and (present := state.present_values()):
            self._send(f"knobs {json.dumps(present, default=str)}\n")
        self._times.add(f"step {self.steps}")
        # The first time reads the device's clock, for which it must be idle once.
        self._send(self._times.all_lines() if self.steps == 1 else self._times.lines())
        while stop := self._line(wait=False):
            self._stop = int(stop.removeprefix("stop ")) if stop.startswith("stop ") else 0
        if self._stop and self.steps >= self._stop:
            self._change()

    def _change(self) -> None:
        # Wait at the boundary that was asked for, and set what the agent says, until it says go.
        # The others do not wait for a rank that is past it.
        stop, self._stop = self._stop, 0
        if self.steps > stop:
            self._send(f"late {stop}\n")
            return
        finish_device_work()
        self._send(f"at {stop}\n")
        while (line := self._line(wait=True)).startswith("set "):
            values_read = state.set_values(json.loads(line.removeprefix("set ")))
            self._send(f"set {json.dumps(values_read, default=str)}\n")

    def _line(self, *, wait: bool) -> str:
        while self._socket is not None and b"\n" not in self._received:
            try:
                self._socket.settimeout(WAIT_S if wait else 0.0)
                if not (received := self._socket.recv(4096)):
                    return ""
                self._received += received
            except OSError:
                return ""
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        """Send the last values, and end the connection."""
        if self._socket is not None and os.getpid() == self._owner:
            self._send(self._times.lines())
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, lines: str) -> None:
        for line in lines.splitlines(keepends=True):
            if self._socket is None:
                return
            try:
                self._socket.send(line.encode(), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                self._socket.close()
                self._socket = None


def watch_program() -> None:
    """Count the optimizer steps of the program that this process runs next, and send each."""
    if address := os.environ.pop(ADDRESS, ""):
        begin(address, int(os.environ.get("RANK", "0")))


def begin(address: str, rank: int) -> None:
    """Count the optimizer steps of this process from here on, and send each."""
    first = not state.options.get("watch")
    state.options.clear()
    state.seen.clear()
    watching.counter.forget()
    state.options["watch"] = True
    state.link = Watch(address, rank)
    if first:
        steps.ImportHook(("torch.optim.optimizer", "deepspeed", STAGES), _patch)


def end() -> None:
    """Send nothing any more."""
    if isinstance(state.link, Watch):
        state.link.close()
    state.link = None


def _patch(name: str, module: Any) -> None:
    # What cannot be counted is not tuned; it is no reason to stop a training.
    with contextlib.suppress(Exception):
        if name == "deepspeed":
            engine.patch_deepspeed(module)
            methods = module.runtime.pipe.engine.PipelineEngine._INSTRUCTION_MAP
            for kind in methods:
                if kind.__name__ in ("ForwardPass", "BackwardPass"):
                    methods[kind] = _timed(methods[kind])
        elif name == STAGES:
            stage = module._PipelineStageBase
            for method in (f"{chunk}_one_chunk" for chunk in CHUNKS):
                setattr(stage, method, _timed(getattr(stage, method)))
        else:
            import torch

            watching.patch_torch(torch)


def _timed(plain: Any) -> Any:
    @functools.wraps(plain)
    def timed(*args: Any, **kwargs: Any) -> Any:
        link = state.link
        if not isinstance(link, Watch):
            return plain(*args, **kwargs)
        link.chunk("in")
        try:
            return plain(*args, **kwargs)
        finally:
            link.chunk("out")

    return timed
