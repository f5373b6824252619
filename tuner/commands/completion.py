"""`tuner completion`: a script that lets the shell complete commands and options."""

from __future__ import annotations

import argparse
import copy

from search_spaces.errors import InputError
from tuner.commands.shared import OK, Commands, answer

SHELLS = ("bash", "zsh")


def _completion(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise InputError(
            "shtab is not installed; install it with pip install 'joulefront[terminal]'"
        ) from error

    parser = copy.copy(args.parser)
    parser.prog = "tuner"
    script = shtab.complete(parser, args.shell)
    answer(args, {"shell": args.shell, "script": script}, [script])
    return OK


def add(commands: Commands) -> None:
    """The command of this module."""
    what = 'a script for your shell: eval "$(tuner completion bash)"'
    completion = commands.command("completion", _completion, what)
    completion.set_defaults(parser=commands.parser)
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash or zsh")
