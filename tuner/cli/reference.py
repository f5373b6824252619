"""Reference page of the command, made of its parser: `python -m tuner.cli.reference`.

`make docs` writes it to docs/cli.md. It goes through the parser's actions instead of argparse's
own help, whose layout depends on the terminal and on the version of Python.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence

from tuner.cli.main import command_parser

HEAD = """\
# Commands

<!-- Written by `make docs` from the parser; edit the help texts in tuner/cli instead. -->

```text
{description}

{epilog}
```
"""


def reference_page() -> str:
    """Return the page as Markdown."""
    parser = command_parser()
    page = HEAD.format(description=parser.description, epilog=(parser.epilog or "").strip())
    return page + "".join(
        f"\n{line}\n" for command in commands_of(parser) for line in _section(command)
    )


def commands_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of the commands, those of a family in its place."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from list(commands_of(command)) or [command]


def _section(parser: argparse.ArgumentParser) -> Iterator[str]:
    arguments, options, *groups = parser._action_groups
    words = [words_of(action) for action in arguments._group_actions]
    yield f"## {parser.prog}"
    yield f"`{' '.join([parser.prog, '[OPTIONS]', *words])}`"
    yield _sentence(parser.description or "")
    yield _list(arguments._group_actions + options._group_actions)
    for group in groups:
        yield f"### {_sentence(group.title or '').rstrip('.')}"
        if group.description:
            yield _sentence(group.description)
        yield _list(group._group_actions)


def _list(actions: Sequence[argparse.Action]) -> str:
    return "\n".join(
        f"- `{words_of(action)}`: {_escaped((action.help or '') % vars(action))}"
        for action in actions
        if not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS
    )


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


def _sentence(text: str) -> str:
    text = _escaped(text.strip())
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", '"')) else ".")


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*<])", r"\\\1", text)


if __name__ == "__main__":
    print(reference_page(), end="")
