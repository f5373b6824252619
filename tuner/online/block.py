"""Block of a Python program that is tuned while it trains: `with tuner.tuning(): ...`.

Rank 0 starts the agent (`tuner.online.agent`) as a process of its own, which ends with the block
or with rank 0, and whose guard restores the clocks if it is killed. All ranks send the ends of
their steps to it and wait for nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Unpack

from tuner.online.agent import tune_training
from tuner.online.request import TuningOptions, TuningOutcome, TuningRequest
from tuner.search_spaces.errors import InputError
from tuner.workload.hook import watch
from tuner.workload.node.process_group import publish, published, rank_group
from tuner.workload.node.rank_server import control_socket

#: The longest that is waited for the agent at the start and at the end of a block, seconds.
START_S, END_S = 60.0, 40.0
_LOG = logging.getLogger("tuner.online")


@dataclass
class TunedBlock:
    """Training in a block, as its agent reports it; nothing is known on ranks other than 0.

    Attributes:
        metrics: latest step time, power, clock, saving and slowdown, with units in their names.
        outcome: what was saved, at which slowdown, with intervals; None until the block ends.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    outcome: TuningOutcome | None = None


class _Agent:
    # The agent's process, as rank 0 sees it.
    def __init__(self, block: TunedBlock, request: TuningRequest) -> None:
        self._block, self._max_slowdown = block, request.max_slowdown
        self.ready, self._closing = threading.Event(), False  # it reads the devices, or has ended
        listener, self.address, self._remove = control_socket()
        self._link, theirs = Pipe()
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            # -P: the working folder must not shadow our modules. A session of its own: an interrupt
            # is the program's.
            [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(listener.fileno())],
            pass_fds=[theirs.fileno(), listener.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        theirs.close()
        listener.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        with contextlib.suppress(OSError):
            self._link.send((request, os.getpid(), self.address))

    def _read(self) -> None:
        try:
            while self._block.outcome is None:
                message = self._link.recv()
                if isinstance(message, str):
                    _LOG.warning("tuner: %s", message)
                elif isinstance(message, TuningOutcome):
                    self._block.outcome = message
                else:
                    self._block.metrics = message
                    self.ready.set()
        except Exception:  # it ended, within a message or between two
            if not self._closing:
                _LOG.warning("tuner: the agent ended; the training goes on untuned")
        self.ready.set()

    def close(self, code: int) -> None:
        """End the agent, and keep its report; `code` is 1 if the block failed, else 0."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._link.send(code)
        self._reader.join(END_S)
        if self._reader.is_alive():
            self._process.kill()  # its guard restores the clocks
        ended = self._process.wait()
        self._reader.join()
        self._link.close()
        self._remove()
        why = f"the agent ended with exit code {ended}"
        untold = TuningOutcome(code, self._max_slowdown, ended="fault", problem=why)
        self._block.outcome = self._block.outcome or untold


def _agent(link: Connection[Any, Any], listener: socket.socket) -> None:
    request, parent, address = link.recv()
    codes: list[int] = []

    def send(message: str | dict[str, float] | TuningOutcome) -> None:
        with contextlib.suppress(OSError):  # the program is gone
            link.send(message)

    def ends() -> int | None:
        try:
            if not codes and link.poll():
                codes.append(link.recv())
        except (OSError, EOFError):
            codes.append(1)
        # Workers of the program may hold the other end open.
        return codes[0] if codes else 1 if os.getppid() != parent else None

    def start() -> Callable[[], int | None]:
        send({})  # lets the block begin
        return ends

    try:
        send(tune_training(start, listener, request, announce=send, report=send))
    finally:
        shutil.rmtree(Path(address).parent, ignore_errors=True)


_blocks = 0
_open = False


@contextlib.contextmanager
def tuning(**options: Unpack[TuningOptions]) -> Iterator[TunedBlock]:
    """Tune the clocks of this node's GPUs while a block of this program trains.

    The block's optimizer steps are seen without changes to it. At its end, or if this process or
    the agent dies, the clocks are as before. Where nothing can be tuned, the block runs untuned,
    and the outcome says why. Of several ranks, each enters the block, after their process group
    was made; rank 0 has the outcome.

    Examples:
        ```python
        with tuner.tuning(max_slowdown=0.05) as run:
            trainer.train()
        print(run.outcome.balance.saved_J)
        ```

    Args:
        options: `max_slowdown` (default: 0.05), or `deadline_s` and `budget_kJ` of the block, or
            `power_cap_W`; or as quantities with a unit (`deadline="8h"`). `steps`: number of the
            block's optimizer steps, if its framework does not say it. `follow_power`: a file, an
            address, or watts. `transfer`: the folder of a study or an earlier tuned training, to
            begin with; `keep`: where what is learned is kept, with a number added.

    Raises:
        InputError: the options contradict each other or cannot be read, a block is open already,
            or the ranks have no process group or are on several nodes.
    """
    global _blocks, _open
    request = TuningRequest.of(options)
    request.signal()  # which is read here first, where an error can be seen
    if _open:
        raise InputError("a block of tuner.tuning is open already; leave it first")
    rank, ranks, store = rank_group()
    owner, key = os.getpid(), f"joulefront/tuning/{_blocks}"
    _blocks += 1
    outer = sys.modules.get("joulefront_hook")
    if outer is not None and outer.state.link is not None:  # in a probe or `tuner run --tune`
        problem = "the program runs under tuner already"
        outcome = TuningOutcome(0, request.max_slowdown, ended="fixed", problem=problem)
        yield TunedBlock(outcome=outcome)
        return
    block = TunedBlock()
    agent, code = _Agent(block, request) if rank == 0 else None, 1
    try:
        _open = True
        if agent is not None:
            agent.ready.wait(START_S)
            if ranks > 1:
                publish(store, key, agent.address)
        watch.begin(agent.address if agent else published(store, key, START_S), rank)
        yield block
        code = 0
    finally:
        if os.getpid() == owner:  # a forked worker may unwind through here
            _open = False
            watch.end()
            if agent is not None:
                agent.close(code)


if __name__ == "__main__":
    _agent(Connection(int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2])))
