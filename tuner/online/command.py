"""The user's command with the watching hook in front of its script; nothing else is changed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tuner.search_spaces.errors import InputError
from tuner.workload import hook
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
            raise InputError(
                f"--tune does not start {launcher.kind or 'this launcher'} jobs of "
                f"{launcher.nodes} nodes; it tunes torchrun, deepspeed and accelerate jobs and "
                "plain scripts on one node"
            )
        assigned = dict(launcher.assigned)
        if launcher.words:
            prefix, script = list(launcher.words), launcher.script
            if prefix[-1] in ("-m", "--module"):
                prefix, script = prefix[:-1], ("-m", *script)
    path = Path(hook.__file__).resolve().parent / "__main__.py"
    return [*prefix, str(path), "watch", *script], assigned
