"""Manual pages of the command, made of its parser: `python -m tuner.cli.manual DIR`.

One page for `tuner` and one for each command (`man tuner-optimize`), in the man macros of roff.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tuner.cli.main import command_parser
from tuner.cli.reference import commands_of, words_of

__all__ = ["manual_pages", "write_manual"]

SECTION = 1


def manual_pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    parser = command_parser()
    commands = list(commands_of(parser))
    pages = {f"tuner.{SECTION}": _page(_overview(parser, commands), "tuner")}
    for command in commands:
        name = command.prog.replace(" ", "-")
        pages[f"{name}.{SECTION}"] = _page(_command(command, name), name)
    return pages


def write_manual(folder: str | Path) -> list[Path]:
    """Write the pages into a folder, such as share/man/man1, and return their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in manual_pages().items():
        paths.append(folder / name)
        paths[-1].write_text(text, encoding="utf-8")
    return paths


def _page(lines: Iterator[str], name: str) -> str:
    head = f'.TH "{name.upper()}" "{SECTION}" "" "joulefront" "User Commands"'
    return "\n".join([head, *lines]) + "\n"


def _overview(
    parser: argparse.ArgumentParser, commands: Sequence[argparse.ArgumentParser]
) -> Iterator[str]:
    yield from (".SH NAME", f"tuner \\- {_text(parser.description or '')}")
    yield from (".SH SYNOPSIS", ".B tuner", r"\fICOMMAND\fR [\fIOPTIONS\fR]")
    yield ".SH COMMANDS"
    for command in commands:
        page = command.prog.replace(" ", "-")
        yield from (".TP", rf"\fB{_text(page)}\fR({SECTION})", _text(command.description or ""))
    yield from (".SH NOTES", ".nf", *map(_line, (parser.epilog or "").splitlines()), ".fi")


def _command(command: argparse.ArgumentParser, name: str) -> Iterator[str]:
    arguments, options, *groups = command._action_groups
    yield from (".SH NAME", f"{_text(name)} \\- {_text(command.description or '')}")
    words = " ".join(words_of(action) for action in arguments._group_actions)
    yield from (".SH SYNOPSIS", rf"\fB{_text(command.prog)}\fR [\fIOPTIONS\fR] {_text(words)}")
    yield ".SH OPTIONS"
    yield from _options([*arguments._group_actions, *options._group_actions])
    for group in groups:
        if group._group_actions:
            yield f'.SH "{_text(group.title or "").upper()}"'
            yield from _options(group._group_actions)
    yield from (".SH SEE ALSO", rf"\fBtuner\fR({SECTION})")


def _options(actions: Sequence[argparse.Action]) -> Iterator[str]:
    for action in actions:
        text = "print the options and exit"
        if not isinstance(action, argparse._HelpAction):
            text = (action.help or "") % vars(action)
        yield from (".TP", rf"\fB{_text(words_of(action))}\fR", _text(text))


def _text(text: str) -> str:
    """Return a paragraph in which roff sees no command."""
    return _line(re.sub(r"\s+", " ", text).strip())


def _line(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return f"\\&{text}" if text.startswith((".", "'")) else text


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tuner.cli.manual DIR")
    for written in write_manual(sys.argv[1]):
        print(written)
