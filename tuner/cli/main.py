"""The command `tuner`.

Each command is one function in `tuner.cli`, which imports what it needs when it runs, so that
`tuner --help` costs no more than argparse. Answers go to standard output, progress to standard
error. Bad input is one sentence and exit code 2; an interrupt is one sentence on how to go on and
exit code 130; a probe that failed is exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn, Self

from tuner.cli.command_table import add_commands
from tuner.cli.options import BAD_INPUT, FAILED, INTERRUPTED, OK
from tuner.cli.parser import GROUPS, Commands, Parser, print_latest, take_latest
from tuner.search_spaces.errors import InputError, NothingToTry
from tuner.search_spaces.plugins import is_left_out, not_installed
from tuner.search_spaces.safe_files import refuse_sudo
from tuner.terminal import OUTPUT, visible_streams

# Interrupts of a command: Ctrl-C, and a polite kill by `kill`, `timeout`, or a scheduler.
#
# The first one raises KeyboardInterrupt, after which the command cleans up. What sends it often
# sends it twice: `timeout` to its child and then to its child's group, Slurm to the processes of a
# job and to the job script, which passes it on. So one that comes soon after the first is the same
# request. A later one ends the process at once.


#: Signals that interrupt a command.
SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Time after the first interrupt in which any other is the same request, seconds.
SAME_REQUEST_S = 2.0

_ONCE_MORE = b"tuner: cleaning up; Ctrl-C once more ends at once, without that\n"
_AT_ONCE = b"tuner: ended at once, without cleaning up; the same command continues\n"


class Interrupts:
    """Handling of the interrupts of one command, a context manager of the main thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_s: float | None = None
        self._before: dict[int, Any] = {}
        self._ended = self._has_warned = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        if self._first_s is None:
            self._put_back()

    def _handle(self, number: int, _: FrameType | None) -> None:
        now_s = self._clock()
        if self._first_s is None:
            self._first_s = now_s
            raise KeyboardInterrupt
        if now_s - self._first_s < SAME_REQUEST_S:
            if number == signal.SIGINT and not (self._ended or self._has_warned):
                self._has_warned = True
                _print_line(_ONCE_MORE)  # an impatient person may have typed it
            return
        if self._ended:  # the process does something else, or is about to end
            self._put_back()
            signal.raise_signal(number)
            return
        # Nothing depends on this process's own clean-up: ranks and agents end when it is gone, the
        # guard puts clocks back, and every finished probe is on disk.
        _print_line(_AT_ONCE)
        os._exit(INTERRUPTED)

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _print_line(line: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(2, line)


EXIT_CODES = """\
exit codes:
  0    success
  1    failure: a probe that failed, a study that measured nothing, a machine that lacks something
  2    bad input; one sentence on standard error says what is allowed
  3    answered, but no configuration meets the limits of the training job, or it does not fit
  130  interrupted; every finished probe is kept, and the message says how to continue

Answers go to standard output (with --json as JSON), progress to standard error.
"""

#: Commands that a user's program may follow, after `--`.
_WITH_PROGRAM = (["run"], ["optimize"], ["fit"], ["plan"], ["dev", "probe"])


def command_parser(word: str = "") -> Parser:
    """Return the parser of `tuner` with every command, or with those beside the command `word`."""
    parser = Parser(
        prog="tuner",
        description="Tunes the configuration of a training job for energy and time together.",
        epilog=EXIT_CODES,
        usage="tuner COMMAND [OPTIONS]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=Version, help="print the version and exit")
    commands = Commands(parser)
    plugins = add_commands(commands, word=word)
    parser.notices = plugins.left_out
    commands.describe({**GROUPS, "plug-ins": [*plugins.found]})
    return parser


class Version(argparse.Action):
    """Option that prints the versions of joulefront and Python, and where it is installed."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{"nargs": 0, "default": argparse.SUPPRESS, **more})

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Print the version and exit."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            release = version("joulefront")
        except PackageNotFoundError:  # a source tree on PYTHONPATH
            release = "(not installed)"
        folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        print(f"joulefront {release}, Python {sys.version.split()[0]}, {folder}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: see `EXIT_CODES`.

    Control characters in what it prints are shown as text (`tuner.terminal`).
    """
    with visible_streams():
        try:
            try:
                return _main(argv)
            finally:
                sys.stdout.flush()  # of --help and --version, too
        except OSError as error:
            if error.filename != OUTPUT:
                raise
            print(f"tuner: the output cannot be written: {error.strerror}", file=sys.stderr)
            return FAILED


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = command_parser(*words[:1])
    program: list[str] = []
    if "--" in words and any(words[: len(c)] == c for c in _WITH_PROGRAM):
        cut = words.index("--")  # the user's program follows
        words, program = words[:cut], words[cut + 1 :]
    for notice in parser.notices:
        print(f"tuner: {notice}", file=sys.stderr)
    if words and words[0] in parser.left_out:
        error = not_installed(f"tuner {words[0]}", parser.left_out[words[0]])
        print(f"tuner: {error}", file=sys.stderr)
        return BAD_INPUT
    ignored = [n for n in SIGNALS if signal.getsignal(n) == signal.SIG_IGN]
    args = parser.parse_args(
        words, argparse.Namespace(program=program, ignored_signals=ignored, latest="")
    )
    if args.command is None:
        parser.print_help()
        return OK
    with Interrupts():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        refuse_sudo()
        if args.program and hasattr(args, "script"):
            if args.script is not None:
                raise InputError("give the script's command once: after -- or by --script")
            args.script = shlex.join(args.program)
        alone = args.program or any(getattr(args, each, None) for each in ("tune", "follow_power"))
        if getattr(args, "of_run", False) and args.run is None and not alone:
            take_latest(args)
            if args.command == "run":
                print_latest(args)
        code: int = args.run_command(args)
        print_latest(args)
        sys.stdout.flush()
        return code
    except NothingToTry as error:
        print(f"tuner: {error}", file=sys.stderr)
        return FAILED
    except InputError as error:
        latest = f" ({args.latest})" if args.latest else ""
        print(f"tuner: {error}{latest}", file=sys.stderr)
        return BAD_INPUT
    except ModuleNotFoundError as error:
        if not is_left_out(error):
            raise
        part = not_installed(f"tuner {args.command}", str(error.name))
        print(f"tuner: {part}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt as error:
        run, message = getattr(error, "run", None), "interrupted"
        if run is not None:
            message += f"; every finished probe is in {run.path}, and the same command with --name "
            message += f"{run.name} continues from there"
        print(f"tuner: {message}", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if error.filename in (None, OUTPUT):  # no file that the user named: ours to mend
            raise
        print(f"tuner: cannot use {error.filename}: {error.strerror}", file=sys.stderr)
        return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
