"""Reference page of the command, made of its parser: `python -m tuner.cli.reference`.

`make docs` writes it to docs/cli.md. It goes through the parser's actions instead of argparse's
own help, whose layout depends on the terminal and on the version of Python.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from tuner.cli.main import command_parser
from tuner.cli.parser import HelpAll, usage_of, words_of

HEAD = """\
# Commands

<!-- Written by `make docs` from the parser; edit the help texts in tuner/cli instead. -->

```text
{description}

{epilog}
```
"""


def reference_page() -> str:
    """Return the page as Markdown; what several commands have is explained once, at the end."""
    parser = command_parser()
    page = HEAD.format(description=parser.description, epilog=(parser.epilog or "").strip())
    commands = list(commands_of(parser))
    counts = Counter(line for command in commands for line in _lines(command._actions))
    shared = [line for line, number in counts.items() if number > 1]
    sections = [line for command in commands for line in _section(command, shared)]
    sections += ["## Arguments of several commands", "\n".join(shared)]
    return page + "".join(f"\n{line}\n" for line in sections)


def commands_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of the commands, those of a family in its place."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from list(commands_of(command)) or [command]


def _section(parser: argparse.ArgumentParser, shared: Collection[str]) -> Iterator[str]:
    yield f"## {parser.prog}"
    yield f"`{parser.usage or usage_of(parser)}`"
    yield _sentence(parser.description or "")
    first, options, *groups = parser._action_groups
    own = [
        (group, [line for line in _lines(group._group_actions) if line not in shared])
        for group in (first, options, *groups)
    ]
    if lines := own[0][1] + own[1][1]:
        yield "\n".join(lines)
    for group, lines in own[2:]:
        if lines:
            yield f"### {_sentence(group.title or '').rstrip('.')}"
            yield "\n".join(lines)
    if others := [
        line.partition("`:")[0][2:] + "`" for line in _lines(parser._actions) if line in shared
    ]:
        yield f"[Explained below](#arguments-of-several-commands): {', '.join(others)}."


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
