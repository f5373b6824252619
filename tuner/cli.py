"""The command `tuner`.

Each command is one function in `tuner.commands`, which imports what it needs when it runs, so that
`tuner --help` costs no more than argparse. Answers go to standard output, progress to standard
error. Bad input is one sentence and exit code 2; an interrupt is one sentence on how to go on and
exit code 130; a probe that failed is exit code 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from search_spaces.errors import InputError
from tuner.commands import names, probing, runs, study
from tuner.commands.shared import BAD_INPUT, INTERRUPTED, OK, Commands, Parser

__all__ = ["command_parser", "main"]


def command_parser() -> argparse.ArgumentParser:
    """The parser of `tuner` with every command."""
    parser = Parser(
        prog="tuner",
        description="Tunes the configuration of a training job for energy and time together.",
    )
    commands = Commands(parser)
    for module in (study, probing, runs, names):
        module.add(commands)
    return parser


def _interrupted(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 (a failed probe), 2 (bad input) or 130."""
    parser = command_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return OK
    before = signal.signal(signal.SIGTERM, _interrupted)  # a polite kill cleans up as Ctrl-C does
    try:
        code: int = args.run_command(args)
        sys.stdout.flush()
        return code
    except InputError as error:
        print(f"tuner: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt as error:
        run = getattr(error, "run", None)
        if run is not None:
            print(
                f"tuner: interrupted; every finished probe is in {run.path}, and the same command "
                f"with --name {run.name} goes on from there",
                file=sys.stderr,
            )
        else:
            print("tuner: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone; nothing is left to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
