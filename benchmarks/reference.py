"""Reference page of the command, made of its parser: `python -m benchmarks.reference`.

`make docs` writes it to docs/cli.md. It goes through the parser's actions instead of argparse's
own help, whose layout depends on the terminal and on the version of Python.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tuner.cli.main import command_parser
from tuner.cli.parser import HelpAll, words_of

HEAD = """\
# Commands

<!-- Written by `make docs` from the parser; edit the help texts in tuner/cli instead. -->

Every command with its options. `tuner COMMAND --help` shows the options that are needed first, with examples.

```text
{epilog}
```
"""  # noqa: E501 - one paragraph a line, as in every page


def reference_page() -> str:
    """Return the page as Markdown; options that several commands share stand once, at the end."""
    parser = command_parser()
    commands = list(commands_of(parser))
    shared = SharedArguments.of(commands)
    page = HEAD.format(epilog=(parser.epilog or "").strip())
    sections = [line for command in commands for line in _section(command, shared)]
    sections += ["## Arguments of several commands", "\n".join(shared.single)]
    for title, lines in shared.groups.items():
        sections += [f"### {_title(title)}", "\n".join(lines)]
    return page + "".join(f"\n{line}\n" for line in sections)


@dataclass(frozen=True)
class SharedArguments:
    """Arguments that several commands share: whole groups by their title, and single ones."""

    groups: Mapping[str, Sequence[str]]
    single: Sequence[str]
    of_every_command: Collection[str]

    @classmethod
    def of(cls, commands: Sequence[argparse.ArgumentParser]) -> SharedArguments:
        """Return the groups and arguments that more than one of these commands has."""
        groups = Counter(
            (group.title or "", tuple(_lines(group._group_actions)))
            for command in commands
            for group in command._action_groups[2:]
        )
        whole = {title: lines for (title, lines), number in groups.items() if number > 1}
        counts = Counter(line for command in commands for line in _lines(command._actions))
        grouped = {line for lines in whole.values() for line in lines}
        single = [line for line, number in counts.items() if number > 1 and line not in grouped]
        every = {line for line in single if counts[line] == len(commands)}
        return cls(whole, single, every)

    def explained(self) -> set[str]:
        """Return every line that is explained at the end of the page."""
        return {*self.single, *(line for lines in self.groups.values() for line in lines)}


def commands_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of the commands, those of a family in its place."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from list(commands_of(command)) or [command]


def _section(parser: argparse.ArgumentParser, shared: SharedArguments) -> Iterator[str]:
    yield f"## {parser.prog}"
    if parser.usage:  # else the arguments below are all of it
        yield f"`{parser.usage}`"
    yield _sentence(parser.description or "")
    later, taken, elsewhere = shared.explained(), set[str](), []
    own: list[str] = []
    titled = []
    for group in parser._action_groups:
        lines = _lines(group._group_actions)
        if shared.groups.get(group.title or "") == tuple(lines):
            elsewhere.append(f"[{group.title}](#{_anchor(group.title or '')})")
            taken.update(lines)
        elif group in parser._action_groups[:2]:
            own += [line for line in lines if line not in later]
        elif rest := [line for line in lines if line not in later]:
            titled += [f"### {_title(group.title or '')}", "\n".join(rest)]
    if own:
        yield "\n".join(own)
    yield from titled
    elsewhere += [
        re.sub(r"(--[\w-]+).*", r"\1", line.partition("`:")[0][2:]) + "`"
        for line in _lines(parser._actions)
        if line in later and line not in taken and line not in shared.of_every_command
    ]
    if elsewhere:
        yield f"[Also](#arguments-of-several-commands): {', '.join(elsewhere)}."


def _title(text: str) -> str:
    return _sentence(text).rstrip(".")


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def _lines(actions: Sequence[argparse.Action]) -> list[str]:
    return [
        f"- `{words_of(action)}`: {_escaped((action.help or '') % vars(action))}"
        for action in actions
        if not isinstance(action, argparse._HelpAction | HelpAll)
        and action.help != argparse.SUPPRESS
    ]


def _sentence(text: str) -> str:
    text = _escaped(text.strip())
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", '"')) else ".")


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*<])", r"\\\1", text)


if __name__ == "__main__":
    print(reference_page(), end="")
