"""Words that users read: how many, how many for one thing, and how much help there is.

- `docs_words`, `readme_words`: words of `docs` with the changelog, and of the README.
- `terms_for_today`: how many of `TERMS` name the configuration that the user runs today, in the
  help of every command, in the text that commands print (the golden outputs but their JSON, tables
  and scripts), in the report's page, and in the docs for users (README, `docs` without `develop`).
  Code is left out of the docs: names of the Python API and of files are not prose. Each other term
  than today's is listed above the figures, with how often each place has it.
- `help_lines_optimize`: lines of `tuner optimize --help` at 80 columns.
- `commands`: commands that `tuner --help` shows.

Aims: 30,000, 900, 1, 60 and 16.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout, suppress
from io import StringIO
from unittest import mock

from benchmarks.figures import ROOT, Figure, arguments, publish
from benchmarks.size import docs_words
from tuner.cli.main import command_parser, main
from tuner.cli.reference import commands_of

_THING = r"(configuration|setting|setup|command|launch)s?"
#: Terms for the configuration of today, each with how it is found.
TERMS = {
    "today": r"\btoday('s)?\b",
    "baseline": r"\bbaselines?\b",
    **{
        word: rf"\b{word} {_THING}\b"
        for word in ("current", "present", "existing", "original", "reference", "starting")
    },
    "status quo": r"\bstatus quo\b",
}
#: Files of the golden outputs that are no prose.
_NO_PROSE = (".json", ".csv", ".sh", ".toml", ".py", ".sbatch")


def help_of(*words: str) -> str:
    """Return what a command prints with these words."""
    out = StringIO()
    with mock.patch.dict("os.environ", COLUMNS="80"), redirect_stdout(out), suppress(SystemExit):
        main(words)
    return out.getvalue()


def prose(page: str) -> str:
    """Return a page of Markdown without its code."""
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", page, flags=re.M | re.S)


def printed(golden: str) -> str:
    """Return the text of golden outputs without JSON and files that are no prose."""
    kept = []
    for block in re.split(r"^(?=\$ )", golden, flags=re.M):
        if block.partition("\n")[0].endswith("--json"):
            continue
        for part in re.split(r"^(?=== )", block, flags=re.M):
            name = part.partition("\n")[0]
            if not (name.startswith("== ") and name.endswith(_NO_PROSE)):
                kept.append(part)
    return "".join(kept)


def places() -> Iterator[tuple[str, str]]:
    """Yield each place that users read, with its text."""
    for command in commands_of(command_parser()):
        flag = "--help-all" if "--help-all" in command.format_help() else "--help"
        yield f"{command.prog} {flag}", help_of(*command.prog.split()[1:], flag)
    for path in sorted((ROOT / "tests/golden/outputs").glob("*.txt")):
        yield f"outputs/{path.name}", printed(path.read_text(encoding="utf-8"))
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for path in pages:
        if "develop" not in path.parts:
            yield str(path.relative_to(ROOT)), prose(path.read_text(encoding="utf-8"))


def terms_in(text: str) -> Mapping[str, int]:
    """Return how often a text has each of `TERMS`."""
    counts = {term: len(re.findall(found, text, re.I)) for term, found in TERMS.items()}
    return {term: count for term, count in counts.items() if count}


def figures() -> list[Figure]:
    """Return the figures, and print where other terms than today's are."""
    seen = {"today"}
    for place, text in places():
        found = terms_in(text)
        seen |= found.keys()
        others = [f"{count} x {term}" for term, count in found.items() if term != "today"]
        if others:
            print(f"{place}: {', '.join(others)}")
    commands = re.findall(r"^  [a-z]+ +\S", help_of("--help").partition("options:")[0], re.M)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return [
        Figure("docs_words", docs_words(), "words"),
        Figure("readme_words", len(readme.split()), "words"),
        Figure("terms_for_today", len(seen), "count"),
        Figure("help_lines_optimize", help_of("optimize", "--help").count("\n"), "lines"),
        Figure("commands", len(commands), "count"),
    ]


if __name__ == "__main__":
    publish(figures(), arguments(__doc__.splitlines()[0]).parse_args().json)
