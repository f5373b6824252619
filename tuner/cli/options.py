"""Parts shared by the commands: exit codes, answers, progress, and options made of dataclasses."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.search_spaces.fields import EXAMPLES, Option, declared_options, parse_quantity
from tuner.search_spaces.safe_files import STORAGE

if TYPE_CHECKING:
    from tuner.workload.scripts.command import Script
    from tuner.workload.scripts.user_code import FileStart

Made = TypeVar("Made")
OK, FAILED, BAD_INPUT, UNMET, INTERRUPTED = 0, 1, 2, 3, 130


def print_answer(
    args: argparse.Namespace, data: Any, lines: Sequence[str], *, fit: bool = True
) -> None:
    """Print the answer: the data as JSON with --json (a list as "items"), else the lines.

    They are fitted to a terminal without breaking a word: a path stays whole. Lines of a shell,
    which are copied, are printed as they are (`fit=False`).
    """
    if args.json:
        from tuner.search_spaces.fields import JSON_SCHEMA, strict_json

        body = data if isinstance(data, dict) else {"items": data}
        whole = strict_json({"schema": JSON_SCHEMA, **body})
        print(json.dumps(whole, indent=2, default=str))
    elif fit and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        for line in lines:
            _print_in_colour([*fitted(line, width)] or [""])
    else:
        print("\n".join(lines))


def fitted(line: str, width: int) -> list[str]:
    """Return a line in the width of a terminal, with nothing lost."""
    if len(line) <= width:
        return [line]
    columns = re.match(r"\s*(?:\S.*\s{2,})?", line)  # what does not fit stands below the last one
    indent = len(columns[0]) if columns and len(columns[0]) < 0.8 * width else 4
    wrapper = textwrap.TextWrapper(width, "", " " * indent, break_on_hyphens=False)
    wrapper.break_long_words = False
    return wrapper.wrap(line)


#: Styles of the rows of a table that begin with these words: what is recommended, and today.
_STYLES = {"> ": "bold green", "  today ": "cyan"}


def _print_in_colour(lines: Sequence[str]) -> None:
    from tuner.terminal import SafeStream, raw_stream, visible

    text = "\n".join(lines)
    style = next((style for mark, style in _STYLES.items() if text.startswith(mark)), "")
    if style and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.text import Text

        terminal = cast(TextIO, SafeStream(raw_stream(sys.stdout)))
        console = Console(file=terminal, soft_wrap=True)
        console.print(Text(visible(text), style=style))
    else:
        print(text)


@contextmanager
def progress(args: argparse.Namespace) -> Iterator[Any]:
    """Yield the receiver of progress events: a live view, a line printer, or None."""
    with _log_file(getattr(args, "log_file", None)):
        if args.quiet:
            yield None
            return
        from tuner.display.progress import shown

        with shown(plain=args.plain, verbose=getattr(args, "verbose", False)) as view:
            yield view


@contextmanager
def _log_file(path: str | None) -> Iterator[None]:
    if path is None:
        yield
        return
    import logging

    from tuner.display.progress import LOGGER

    try:
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write the log {path}: {error.strerror}") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger(LOGGER)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        handler.close()


def announcer(args: argparse.Namespace, before: str = "") -> Callable[[str], None]:
    """Return a receiver of sentences: it prints them to standard error unless --quiet is given."""

    def announce(sentence: str) -> None:
        if not args.quiet:
            print(before + sentence, file=sys.stderr, flush=True)

    return announce


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines of left-aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]


def add_storage(parser: Any, subject: str) -> None:
    """Add --storage."""
    parser.add_argument(
        "--storage",
        metavar="URL",
        default=os.environ.get(STORAGE) or None,
        help=f"{subject} (default: ${STORAGE}, which hides a password from other users, else the "
        "journal in the run)",
    )


def job_of_words(args: argparse.Namespace, subject: str) -> tuple[Any, Any, Any]:
    """Return job, cluster and configuration of a command that takes [JOB] KNOB=VALUE."""
    from tuner.problem.job_request import cluster_of
    from tuner.search_spaces.configuration import Configuration, Settings
    from tuner.search_spaces.job import load_job
    from tuner.search_spaces.knob_declarations import marked
    from tuner.search_spaces.knobs import split_words, values_of
    from tuner.search_spaces.space import changed_default

    jobs, knobs = split_words(args.what)
    if len(jobs) > 1:
        raise InputError(f"{jobs[1]!r} is a second job; {subject} takes one job and KNOB=VALUE")
    job = load_job(jobs[0] if jobs else None)
    values = values_of(knobs)
    cluster = cluster_of(args.cluster)
    chosen = changed_default(job, cluster, Configuration.of(values))
    return job, cluster, Configuration(Settings(marked(chosen.launch, ())), chosen.live)


def add_options(parser: Any, kind: type, *, only: Sequence[str] = ()) -> None:
    """Add the options that a dataclass declares (`tuner.search_spaces.fields`), or only some."""
    for item, declared in _on_command_line(kind, only):
        flag = (declared.flag or item.name).replace("_", "-")
        if declared.alias:
            text = f"{declared.help}, such as {EXAMPLES[declared.unit]}".replace("%", "%%")
            add_quantity(parser, declared.alias, item.name, declared.unit, text, item.default)
            continue
        text = declared.help + (f", in {declared.unit}" if declared.unit else "")
        if isinstance(item.default, bool):
            action = "store_true"
            if item.default:
                flag, action = f"no-{flag}", "store_false"
                text = declared.negated or f"do not {text}"
            parser.add_argument(f"--{flag}", dest=item.name, action=action, help=text)
            continue
        value, metavar = _VALUES.get(str(item.type).removesuffix(" | None"), (str, "NAME"))
        metavar = declared.metavar or metavar
        repeated: dict[str, Any] = {"default": item.default}
        if isinstance(item.default, tuple):
            repeated = {"action": "append", "default": []}
        elif item.default is not None:
            text += f" (default: {item.default})"
        parser.add_argument(
            f"--{flag}", dest=item.name, type=value, metavar=metavar, help=text, **repeated
        )


def add_quantity(
    parser: Any, name: str, dest: str, unit: str, text: str, default: Any = None
) -> None:
    """Add --NAME of a value with its unit."""
    parser.add_argument(
        f"--{name}", dest=dest, action=Quantity, unit=unit, help=text, default=default
    )


def made_of_options(
    args: argparse.Namespace, kind: type[Made], *, only: Sequence[str] = (), **more: Any
) -> Made:
    """Return the dataclass object of the options that were parsed; `more` are its other fields."""
    declared = _on_command_line(kind, only)
    try:
        return kind(**{item.name: getattr(args, item.name) for item, _ in declared}, **more)
    except InvalidValue as error:  # which names the field
        flags = {item.name: made.alias or made.flag or item.name for item, made in declared}
        subject = (
            f"--{flags[error.subject]}".replace("_", "-")
            if error.subject in flags
            else error.subject
        )
        raise InvalidValue(subject, error.value, error.legal) from error


def given_options(args: argparse.Namespace, kind: type, *, only: Sequence[str] = ()) -> list[str]:
    """Return the flags of the options whose value is not the default."""
    return [
        f"--{(declared.alias or declared.flag or item.name).replace('_', '-')}"
        for item, declared in _on_command_line(kind, only)
        if getattr(args, item.name) != item.default
    ]


class Quantity(argparse.Action):
    """Option whose value is a number with a unit."""

    def __init__(self, *args: Any, unit: str, **more: Any) -> None:
        super().__init__(*args, **{"metavar": METAVARS[unit], **more})
        self.unit = unit

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the quantity that was typed."""
        try:
            value = parse_quantity(str(values), self.unit)
        except InputError as error:
            raise argparse.ArgumentError(None, f"{option_string}: {error}") from error
        setattr(namespace, self.dest, value)


#: Placeholder of each kind of quantity.
METAVARS = {"s": "TIME", "kJ": "ENERGY", "W": "POWER", "share": "PERCENT"}
#: Parser and placeholder of each declared type.
_VALUES: dict[str, tuple[Callable[[str], Any], str]] = {
    "float": (float, "X"),
    "int": (int, "N"),
    "str": (str, "NAME"),
    "Path": (Path, "FILE"),
}


def _on_command_line(kind: type, only: Sequence[str]) -> list[tuple[Field[Any], Option]]:
    return [
        (item, declared)
        for item, declared in declared_options(kind)
        if not declared.keyword_only and (not only or item.name in only)
    ]


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add --script and the options that describe a user's script."""
    from tuner.workload.scripts.command import Script

    group = parser.add_argument_group("your own training script")
    group.add_argument(
        "--script",
        metavar="CMD",
        help='the command, e.g. "train.py --data DIR" or "torchrun ... train.py"; or put it after '
        "--, as it is",
    )
    add_options(group, Script)


def script_of(args: argparse.Namespace) -> Script | None:
    """Return the user's script, which may be a job script; None if the command names none."""
    from tuner.workload.scripts import SOCKET
    from tuner.workload.scripts.command import Script

    jobs = SOCKET.part("job script")
    named = jobs is not None and args.script is None and getattr(args, "job", None)
    if named and jobs.is_job_script(Path(args.job)):
        args.script, args.job = shlex.quote(args.job), None
    if args.script is not None:
        return made_of_options(args, Script, command=args.script)
    for flag in given_options(args, Script):
        raise InputError(f"{flag} is for --script; a job has its own")
    return None


def require_trust(args: argparse.Namespace, starts: Sequence[FileStart]) -> None:
    """Print the commands and settings of files; without --trust, require a yes at a terminal.

    What can run code needs --trust: a yes is typed too soon.
    """
    if not starts:
        return
    print("tuner: a file that you name starts or sets this, with your rights:", file=sys.stderr)
    print(*(f"  {start}" for start in starts), sep="\n", file=sys.stderr, flush=True)
    if args.trust:
        return
    if any(start.runs_code for start in starts):
        raise InputError("nothing was started, as this can run code; add --trust if you trust it")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InputError("nothing was started; add --trust if you trust what is listed")
    count = f"these {len(starts)} lines" if len(starts) > 1 else "this line"
    print(f"Start with {count}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InputError("nothing was started")
