"""Parts shared by the commands: exit codes, answers, progress, and options made of dataclasses."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import textwrap
from argparse import SUPPRESS
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from tuner.cli.arguments import add_shared
from tuner.search_spaces.errors import InputError, UnknownName, did_you_mean
from tuner.search_spaces.options import Option, declared_options
from tuner.search_spaces.units import EXAMPLES, parse_quantity
from tuner.workload.node.rights import STORAGE

if TYPE_CHECKING:
    from tuner.workload.scripts.command import Script

Made = TypeVar("Made")
OK, FAILED, BAD_INPUT, UNMET, INTERRUPTED = 0, 1, 2, 3, 130


def answer(args: argparse.Namespace, data: Any, lines: Sequence[str], *, fit: bool = False) -> None:
    """Print the answer: the data as JSON with --json, else the lines.

    With `fit` they fit into a terminal: they hold no commands or files to copy.
    """
    if args.json:
        from tuner.search_spaces.typed import strict_json

        print(json.dumps(strict_json(data), indent=2, default=str))
    elif fit and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        print("\n".join(part for line in lines for part in fitted(line, width)))
    else:
        print("\n".join(lines))


def fitted(line: str, width: int) -> list[str]:
    """Return a line in the width of a terminal, with nothing lost."""
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)


@contextmanager
def progress(args: argparse.Namespace) -> Iterator[Any]:
    """Yield the receiver of progress events: a live view, a line printer, or None."""
    with _log_file(getattr(args, "log_file", None)):
        if args.quiet:
            yield None
            return
        from tuner.display.live import LiveView, can_be_live
        from tuner.display.progress import ProgressPrinter

        verbose = getattr(args, "verbose", False)
        if args.plain or not can_be_live(sys.stderr):
            yield ProgressPrinter(verbose=verbose)
            return
        with LiveView(verbose=verbose) as view:
            yield view


@contextmanager
def _log_file(path: str | None) -> Iterator[None]:
    """Append what a search does to a file, by Python's logging; nothing if there is no path."""
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


def say_of(args: argparse.Namespace, before: str = "") -> Callable[[str], None]:
    """Return a receiver of sentences that prints them to standard error, unless --quiet is given.

    Args:
        before: printed before each sentence.
    """

    def say(sentence: str) -> None:
        if not args.quiet:
            print(before + sentence, file=sys.stderr, flush=True)

    return say


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines of left-aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]


def storage_of(args: argparse.Namespace) -> str | None:
    """Return the URL of the study's database; None for the journal.

    Every user of the machine can read a command line, so a URL with a password is given in a file
    or in the environment.

    Raises:
        InputError: the file named by "@FILE" cannot be read, or holds no single line.
    """
    given = args.storage or os.environ.get(STORAGE) or None
    if given is None or not given.startswith("@"):
        return given
    try:
        lines = Path(given[1:]).read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"cannot read the storage URL from {given[1:]}: {reason}") from error
    if len(lines) != 1:
        raise InputError(f"{given[1:]} must hold the storage URL alone, on one line")
    return lines[0]


def add_storage(parser: Any, what: str) -> None:
    """Add --storage, to be read by `storage_of`."""
    parser.add_argument(
        "--storage",
        metavar="URL|@FILE",
        help=f"{what}, or a file that holds it, if it has a password (default: ${STORAGE}, else "
        "the journal in the run)",
    )


def job_of_words(args: argparse.Namespace, what: str) -> tuple[Any, Any, Any]:
    """Return job, cluster and configuration of a command that takes [JOB] KNOB=VALUE."""
    from tuner.problem.from_job import cluster_of
    from tuner.search_spaces.baseline import changed_default
    from tuner.search_spaces.changed_training import marked
    from tuner.search_spaces.configuration import Configuration, Settings
    from tuner.search_spaces.job import load_job
    from tuner.search_spaces.short_names import split_words, values_of

    jobs, knobs = split_words(args.what)
    if len(jobs) > 1:
        raise InputError(f"{jobs[1]!r} is a second job; {what} takes one job and KNOB=VALUE")
    job = load_job(jobs[0] if jobs else None)
    values = values_of(knobs)
    cluster = cluster_of(args.cluster)
    chosen = changed_default(job, cluster, Configuration.of(values))
    return job, cluster, Configuration(Settings(marked(chosen.launch, ())), chosen.live)


def add_options(parser: Any, kind: type, *, only: Sequence[str] = ()) -> None:
    """Add the options that a dataclass declares (`tuner.search_spaces.options`).

    Args:
        only: names of fields; all that the command line has if empty.
    """
    for item, declared in _on_command_line(kind, only):
        flag = (declared.flag or item.name).replace("_", "-")
        if declared.alias:
            text = f"{declared.help}, such as {EXAMPLES[declared.unit]}".replace("%", "%%")
            add_quantity(parser, declared.alias, f"--{flag}", item.name, declared.unit, text)
            continue
        text = declared.help + (f", in {declared.unit}" if declared.unit else "")
        if isinstance(item.default, bool):
            if item.default:
                flag, action, text = f"no-{flag}", "store_false", f"do not {text}"
            else:
                action = "store_true"
            parser.add_argument(f"--{flag}", dest=item.name, action=action, help=text)
            continue
        value, metavar = _VALUES[str(item.type).removesuffix(" | None")]
        if item.default is not None:
            text += f" (default: {item.default})"
        parser.add_argument(
            f"--{flag}",
            dest=item.name,
            type=value,
            default=item.default,
            metavar=declared.metavar or metavar,
            help=text,
        )


def add_quantity(parser: Any, name: str, bare: str, dest: str, unit: str, text: str) -> None:
    """Add --NAME of a value with its unit; the flag of a bare number in that unit is hidden."""
    for flag, shown in {bare: SUPPRESS, f"--{name}": text}.items():
        parser.add_argument(flag, dest=dest, action=Quantity, unit=unit, help=shown)


def made_of_options(
    args: argparse.Namespace, kind: type[Made], *, only: Sequence[str] = (), **more: Any
) -> Made:
    """Return the dataclass object of the options that were parsed; `more` are its other fields.

    Raises:
        InputError: a value is not allowed.
    """
    values = {item.name: getattr(args, item.name) for item, _ in _on_command_line(kind, only)}
    return kind(**values, **more)


def given_options(args: argparse.Namespace, kind: type, *, only: Sequence[str] = ()) -> list[str]:
    """Return the flags of the options whose value is not the default."""
    return [
        f"--{(declared.flag or item.name).replace('_', '-')}"
        for item, declared in _on_command_line(kind, only)
        if getattr(args, item.name) != item.default
    ]


class Quantity(argparse.Action):
    """Value with a unit; an option whose own name ends in the unit also takes a bare number.

    Args:
        unit: the unit of the value that is stored (`tuner.search_spaces.units`).
    """

    def __init__(self, *args: Any, unit: str, **more: Any) -> None:
        super().__init__(*args, **{"metavar": METAVARS[unit], **more})
        self.unit = unit

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        """Store the quantity that was typed."""
        bare = (option_string or "").endswith(f"-{self.unit}")
        try:
            value = parse_quantity(str(values), self.unit, bare=bare)
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
    """Return the user's script; None if the command names none.

    Raises:
        InputError: an option of a script is given without a script.
    """
    from tuner.workload.scripts.command import Script

    if args.script is not None:
        return made_of_options(args, Script, command=args.script)
    for flag in given_options(args, Script):
        raise InputError(f"{flag} is for --script; a job has its own")
    return None


def on_data(job: Any, data: str | None) -> Any:
    """Return a job, or the one of this name or path, with a file of tokens; as given without."""
    if data is None:
        return job
    from dataclasses import replace

    from tuner.search_spaces.job import TrainingJob, load_job, token_file

    loaded = job if isinstance(job, TrainingJob) else load_job(job)
    return replace(loaded, data=token_file(data))


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence, and whose arguments come in any order.

    An abbreviated option would drop the unit from its name, so none is taken.

    Args:
        hint: what to say of one word too many.
    """

    def __init__(self, *, hint: str = "", **more: Any) -> None:
        standard = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**{**standard, **more})
        self._hint = hint
        self._first: Sequence[str] = ()
        self._mixing = False  # inside argparse's own two passes over mixed arguments
        # "-5kJ" is a value too, so that the error names what is wrong with it.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def show_first(self, names: Sequence[str], *examples: str) -> None:
        """Let --help show examples and these arguments alone, and --help-all every one."""
        self._first, self._examples = names, examples
        self.add_argument("--help-all", action=HelpAll, nargs=0, help="show every option")

    def format_help(self) -> str:
        """Return the help; a list of commands is in its description (`Commands.describe`)."""
        self.usage = self.usage or usage_of(self)
        for action in self._subparsers._group_actions if self._subparsers else ():
            action.help = SUPPRESS
        if not self._first:
            return super().format_help()
        named = {
            name: each for each in self._actions for name in each.option_strings or [each.dest]
        }
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, ())
        formatter.add_text(self.description)
        formatter.start_section("examples")
        formatter.add_text("\n".join(self._examples))
        formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([named[name] for name in (*self._first, "--help-all")])
        formatter.end_section()
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but report unknown arguments with the command's own name."""
        if self._mixing:
            return super().parse_known_args(args, namespace)
        if self._subparsers is not None:
            found, unknown = super().parse_known_args(args, namespace)
        else:
            self._mixing = True
            try:
                found, unknown = super().parse_known_intermixed_args(args, namespace)
            finally:
                self._mixing = False
        if unknown:
            options = [word.partition("=")[0] for word in unknown if word.startswith("--")]
            hint = f"; {self._hint}" if self._hint else ""
            if options:
                hint = did_you_mean(options[0], self._option_string_actions) or hint
            self.error(f"unknown arguments: {' '.join(unknown)}{hint.rstrip('?')}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise an error with the nearest choice, where argparse lists all of them."""
        if action.choices is not None and value not in action.choices:
            kind = str(action.metavar or action.dest).lower()
            raise argparse.ArgumentError(None, str(UnknownName(kind, str(value), action.choices)))


class HelpAll(argparse.Action):
    """Option that prints the help with every option."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Print it and exit."""
        parser._first = ()  # type: ignore[attr-defined]
        parser.print_help()
        parser.exit()


def words_of(action: argparse.Action) -> str:
    """Return an argument as it is typed, with its placeholder."""
    flag = ", ".join(action.option_strings)
    if action.nargs == 0:
        return flag
    value = action.metavar or ",".join(map(str, action.choices or ())) or action.dest.upper()
    value = {"?": f"[{value}]", "*": f"[{value} ...]", "+": f"{value} [{value} ...]"}.get(
        str(action.nargs), str(value)
    )
    return f"{flag} {value}".strip()


def usage_of(parser: argparse.ArgumentParser) -> str:
    """Return the command line in one line, without its options."""
    words = [words_of(each) for each in parser._actions if not each.option_strings]
    return " ".join([parser.prog, "[OPTIONS]", *words])


#: Commands that `tuner --help` shows, by what they are for.
GROUPS = {
    "tune": ("optimize", "plan", "fit", "demo"),
    "look": ("show", "choose", "explain", "compare"),
    "use": ("apply", "run", "export", "import"),
    "more": ("runs", "list", "doctor", "dev"),
}


class Commands:
    """Registry to which each module of this package adds its commands.

    Args:
        dest: name of the attribute that keeps which command was typed.
    """

    def __init__(self, parser: argparse.ArgumentParser, dest: str = "command") -> None:
        self.parser = parser
        self._whats: dict[str, str] = {}
        self._parsers = parser.add_subparsers(
            dest=dest, metavar="COMMAND", prog=parser.prog, parser_class=Parser
        )

    def _parser(self, name: str, what: str, hint: str = "") -> Parser:
        added: Parser = self._parsers.add_parser(name, help=what, description=what, hint=hint)
        self._whats[name] = what
        return added

    def command(
        self, name: str, run: Callable[[argparse.Namespace], int], what: str, *, hint: str = ""
    ) -> Parser:
        """Add a command; `run` takes its arguments and returns the exit code."""
        added = self._parser(name, what, hint)
        added.add_argument("--json", action="store_true", help="print the answer as JSON")
        added.set_defaults(run_command=run)
        return added

    def of_run(
        self, name: str, run: Callable[[argparse.Namespace], int], what: str, *, hint: str = ""
    ) -> Parser:
        """Add a command about an existing run."""
        added = self.command(name, run, what, hint=hint)
        added.add_argument(
            "run", nargs="?", metavar="RUN", help="name or folder of the run (default: the latest)"
        )
        add_shared(added, "--runs-dir")
        added.set_defaults(of_run=True)
        return added

    def family(self, name: str, what: str) -> Commands:
        """Add a command that has commands of its own, and return their registry."""
        added = self._parser(name, what)
        added.usage = f"{added.prog} COMMAND [OPTIONS]"

        def print_help(args: argparse.Namespace) -> int:
            added.print_help()
            return OK

        added.set_defaults(run_command=print_help)
        return Commands(added, dest=name)

    def describe(self, groups: Mapping[str, Sequence[str]]) -> None:
        """Add the commands to the parser's description, by group."""
        lines = [str(self.parser.description)]
        for title, names in groups.items():
            lines += ["", f"{title}:", *(f"  {name:<11} {self._whats[name]}" for name in names)]
        self.parser.description = "\n".join(lines)


def print_latest(args: argparse.Namespace) -> None:
    """Print which run is meant where none is named: another folder has another latest one."""
    if getattr(args, "quiet", False):
        return
    from tuner.problem.run_folder import find_run

    path = find_run(None, args.runs_dir).path.resolve()
    print(f"tuner: no run is named; the latest in {path.parent} is {path.name!r}", file=sys.stderr)
