"""The user's command, tuned with the watching hook in front of its script; nothing else changes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tuner.online.agent import tune_training
from tuner.online.metrics import Metrics
from tuner.online.outcome import TuningOutcome
from tuner.online.request import TuningRequest
from tuner.search_spaces.errors import InputError
from tuner.workload import hook
from tuner.workload.hook.watch import ADDRESS
from tuner.workload.node.rank_server import control_socket
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.launchers import read_command

#: Launchers that start a script of the user's on this node.
LAUNCHERS = ("", "torchrun", "launch", "deepspeed", "accelerate")


def watched(words: Sequence[str], cwd: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command with the hook in front of its script, and the variables in front of it.

    Raises:
        InputError: there is no script, or its launcher starts it on other nodes or by itself.
    """
    Script(shlex.join(words), cwd=cwd).words  # noqa: B018 - refuses a script that does not exist
    script, launcher = read_command(words, cwd)
    prefix, assigned = [sys.executable], {}
    if launcher is not None:
        if launcher.kind not in LAUNCHERS or launcher.nodes > 1:
            what = f"{launcher.nodes} nodes" if launcher.nodes > 1 else launcher.kind
            raise InputError(
                f"--tune cannot tune a job of {what}: name a plain script, or one started by "
                "torchrun, deepspeed or accelerate on one node"
            )
        assigned = dict(launcher.assigned)
        if launcher.words:
            prefix, script = list(launcher.words), launcher.script
            if prefix[-1] in ("-m", "--module"):
                prefix, script = prefix[:-1], ("-m", *script)
    path = Path(hook.__file__).resolve().parent / "__main__.py"
    return [*prefix, str(path), "watch", *script], assigned


def tune(
    command: Sequence[str],
    request: TuningRequest,
    *,
    metrics: Metrics | None = None,
    say: Callable[[str], None] = lambda sentence: None,
    output: int | None = None,
) -> TuningOutcome:
    """Run a training command to its end and tune the clocks of this node's devices meanwhile.

    Its standard output goes to the file descriptor `output`, by default this process's own.

    Raises:
        InputError: the command or the target of power cannot be read.
    """
    words, assigned = watched(command, Path.cwd())
    listener, address, remove = control_socket()

    def start() -> Callable[[], int | None]:
        try:
            environ = {**os.environ, **assigned, ADDRESS: address}
            return subprocess.Popen(words, env=environ, stdout=output).poll
        except OSError as error:
            raise InputError(f"{words[0]} cannot be started: {error}") from error

    try:
        return tune_training(start, listener, request, metrics=metrics, say=say)
    finally:
        remove()
