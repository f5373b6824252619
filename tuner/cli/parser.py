"""Parser of the command: errors in one sentence, help in two levels, commands by group."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from tuner.cli.options import BAD_INPUT, OK
from tuner.search_spaces.errors import UnknownName, did_you_mean

#: Environment variable of the folder of the runs.
RUNS = "JOULEFRONT_RUNS"
#: Folder of the runs if nothing names one.
RUNS_DIR = "runs"
#: Help of --point.
POINT = (
    "recommended, today, best (the choice), knee, a number of the front, or a configuration: "
    "'mb16 zero1'"
)

#: Keywords of `add_argument` by flag, or by what the help of a positional argument calls it.
_SHARED: dict[str, dict[str, Any]] = {
    "JOB": {"dest": "job", "nargs": "?", "help": "job file, or name of a built-in job"},
    "[JOB] KNOB=VALUE": {
        "dest": "what",
        "nargs": "*",
        "help": "job file or name; knobs to change",
    },
    "--cluster": {
        "default": "auto",
        "metavar": "NAME",
        "help": "a node such as 8xH100 or 2x4xL40S, a cluster's file or name, or auto for this "
        "machine (default: auto)",
    },
    "--space": {
        "metavar": "NAME",
        "help": "search space file or name (default: default; on several nodes and for models "
        "whose training states do not fit one device, large)",
    },
    "--today": {
        "dest": "baseline",
        "nargs": "+",
        "metavar": "FILE|KNOB=VALUE",
        "help": "what you run today: your DeepSpeed JSON and flags (default: plain data "
        "parallelism)",
    },
    "--knob": {
        "action": "append",
        "default": [],
        "metavar": "NAME=VALUE,...",
        "help": "knob of your own: 'compile=false,true' for {compile} in the command, "
        "'env:NCCL_ALGO=Ring,Tree', 'FILE.yaml:KEY=VALUE,...', 'deepspeed:KEY:int=5e7,5e8', "
        "'live:NAME=VALUE,...'; repeatable",
    },
    "--knobs": {
        "action": "append",
        "default": [],
        "metavar": "PACK|FILE",
        "help": "knobs declared together: a pack (tuner list knobs), framework for those of the "
        "recognised framework, or a TOML file; repeatable",
    },
    "--point": {
        "default": "recommended",
        "metavar": "POINT",
        "help": f"{POINT} (default: recommended)",
    },
    "--trust": {
        "action": "store_true",
        "help": "start what a driver, or a file of knobs or of a job, sets, without asking",
    },
    "--device-kind": {"metavar": "NAME", "help": "kind of device of the Ray cluster to use"},
    "--runs-dir": {"metavar": "DIR", "help": f"folder of the runs (default: ${RUNS}, else runs)"},
    "--quiet": {"action": "store_true", "help": "suppress progress output"},
}


def add_shared(parser: Any, *names: str) -> None:
    """Add arguments that several commands have, in this order.

    Args:
        names: flags, or what the help of a positional argument calls it.
    """
    for name in names:
        keywords = dict(_SHARED[name])
        if name == "--runs-dir":
            keywords["default"] = os.environ.get(RUNS) or RUNS_DIR
        if not name.startswith("-"):
            parser.add_argument(keywords.pop("dest"), metavar=name, **keywords)
        else:
            parser.add_argument(*(["-q"] if name == "--quiet" else []), name, **keywords)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence, and whose arguments come in any order.

    An abbreviated option would drop the unit from its name, so none is taken; `hint` is said of
    one word too many; "{command}" in it is the words that are not options.
    """

    def __init__(self, *, hint: str = "", **more: Any) -> None:
        standard = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**{**standard, **more})
        self._hint = hint
        self._first: Sequence[str] = ()
        #: Extra of each command that this installation leaves out.
        self.left_out: dict[str, str] = {}
        #: Sentences on plug-ins that are left out.
        self.notices: Sequence[str] = ()
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
        action: argparse.Action
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
            if "{command}" in hint:  # what was typed without --
                typed = [*filter(None, [getattr(found, "job", None)]), *unknown]
                starts = not unknown[0].startswith("-")
                hint = hint.replace("{command}", shlex.join(typed)) if starts else ""
            if options:
                hint = did_you_mean(options[0], self._option_string_actions) or hint
            self.error(f"unknown arguments: {' '.join(unknown)}{hint.rstrip('?')}")
        return found, unknown

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        # argparse says "invalid int value".
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            kinds: dict[Any, str] = {int: "a whole number, such as 20000", float: "a number"}
            if action.type not in kinds:
                raise
            flag = "/".join(action.option_strings) or str(action.metavar or action.dest)
            sentence = f"{flag}: {arg_string!r} must be {kinds[action.type]}"
            raise argparse.ArgumentError(None, sentence) from error

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # The error names the nearest choice, where argparse lists all of them.
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


#: Commands that `tuner --help` shows, by what they are for: a new user's first ones first.
GROUPS = {
    "begin": ("doctor", "run", "plan", "demo"),
    "tune": ("optimize", "fit", "replay"),
    "look": ("show", "choose", "explain", "compare"),
    "use": ("apply", "export", "import"),
    "more": ("runs", "list", "dev"),
}


class Commands:
    """Registry to which each module of this package adds its commands.

    Attributes:
        reserved: names that are refused to every command that is added from here on.
    """

    def __init__(self, parser: Parser, dest: str = "command") -> None:
        self.parser = parser
        self._whats: dict[str, str] = {}
        self.reserved: set[str] = set()
        self._parsers = parser.add_subparsers(
            dest=dest, metavar="COMMAND", prog=parser.prog, parser_class=Parser
        )

    def _parser(
        self, name: str, summary: str, *, hint: str = "", usage: str | None = None
    ) -> Parser:
        if name in self.reserved:
            raise ValueError(f"there is a command {name!r} already")
        added: Parser = self._parsers.add_parser(
            name, help=summary, description=summary, hint=hint, usage=usage
        )
        self._whats[name] = summary
        return added

    def command(
        self,
        name: str,
        run: Callable[[argparse.Namespace], int],
        summary: str,
        *,
        hint: str = "",
        usage: str | None = None,
    ) -> Parser:
        """Add a command; `run` takes its arguments and returns the exit code."""
        added = self._parser(name, summary, hint=hint, usage=usage)
        added.add_argument("--json", action="store_true", help="print the answer as JSON")
        added.set_defaults(run_command=run)
        return added

    def of_run(
        self, name: str, run: Callable[[argparse.Namespace], int], summary: str, **options: Any
    ) -> Parser:
        """Add a command about an existing run; the options are those of `command`."""
        added = self.command(name, run, summary, **options)
        added.add_argument(
            "run",
            nargs="?",
            metavar="RUN",
            help="name, folder or zip file of the run (default: the latest)",
        )
        add_shared(added, "--runs-dir")
        added.set_defaults(of_run=True)
        return added

    def family(self, name: str, summary: str) -> Commands:
        """Add a command that has commands of its own, and return their registry."""
        prog = f"{self.parser.prog} {name}"
        added = self._parser(name, summary, usage=f"{prog} COMMAND [OPTIONS]")

        def print_help(args: argparse.Namespace) -> int:
            added.print_help()
            return OK

        added.set_defaults(run_command=print_help)
        return Commands(added, dest=name)

    def leave_out(self, names: Sequence[str], extra: str) -> None:
        """Note commands whose extra is not installed."""
        self.parser.left_out.update(dict.fromkeys(names, extra))

    def describe(self, groups: Mapping[str, Sequence[str]]) -> None:
        """Add the commands to the parser's description, by group, as far as they are installed."""
        lines = [str(self.parser.description)]
        for title, names in groups.items():
            found = [name for name in names if name in self._whats]
            if found:
                lines += ["", f"{title}:", *(f"  {each:<11} {self._whats[each]}" for each in found)]
        self.parser.description = "\n".join(lines)


def take_latest(args: argparse.Namespace) -> None:
    """Note which run is meant where none is named: another folder has another latest one.

    The command prints `args.latest` at its end, or within its one sentence of an error.
    """
    if getattr(args, "quiet", False):
        return
    from tuner.problem.run_folder import find_run

    path = find_run(None, args.runs_dir).path.resolve()
    args.latest = f"no run is named; the latest in {path.parent} is {path.name!r}"


def print_latest(args: argparse.Namespace) -> None:
    """Print the selected run, once, before a command that may take long."""
    if args.latest:
        print(f"tuner: {args.latest}", file=sys.stderr)
    args.latest = ""
