"""Words that users read: how many, how many for one thing, and how much help there is.

The recorded runs are those of tests/golden/recorded.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path
from unittest import mock

from benchmarks.figures import ROOT, Figure, arguments, publish
from benchmarks.reference import commands_of
from benchmarks.size import docs_words
from tests.golden import NAMES, prepared
from tuner.cli.main import command_parser, main
from tuner.doctor.catalog import KINDS
from tuner.search_spaces.cluster import device_names
from tuner.search_spaces.knobs import KNOBS, word_knob
from tuner.study import load

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


#: Commands whose answers are laid out for a terminal; RUN is a recorded run, OUT a new folder.
SHOWN = (
    "show RUN",
    "choose RUN",
    "choose RUN --minimize energy",
    "choose RUN --max-slowdown 10% --power-cap 5W",
    "compare RUN",
    "explain RUN",
    "apply RUN --out OUT",
)
#: Those that read no run.
OTHERS = (
    "plan opt-350m --cluster a100-8 --max-slowdown 15% --name first --runs-dir RUNS",
    "fit opt-350m --cluster a100-8",
    "doctor",
    "runs --runs-dir RUNS",
    *(f"list {kind}" for kind in KINDS),
)


class Terminal(StringIO):
    """Output that is a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(*words: str) -> str:
    """Return what a command shows on a terminal of 80 columns."""
    out, plain = Terminal(), {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    with mock.patch.dict("os.environ", plain), redirect_stdout(out), redirect_stderr(StringIO()):
        main(words)
    return out.getvalue()


def shown_answers() -> Iterator[tuple[str, str]]:
    """Yield each command of `SHOWN` for each recorded run, and of `OTHERS`, with its screen."""
    # A result is computed once, not once for each command.
    with (
        tempfile.TemporaryDirectory() as work,
        mock.patch.object(load, "answer_of_run", cache(load.answer_of_run)),
    ):
        prepared(Path(work))
        runs = ("--runs-dir", f"{work}/runs")
        for command in OTHERS:
            yield command, on_terminal(*command.replace("RUNS", runs[1]).split())
        for run in NAMES:
            for command in SHOWN:
                words = command.replace("RUN", run).replace("OUT", f"{work}/out").split()
                yield f"{' '.join(words[:4])}", on_terminal(*words, *runs)


def too_wide(text: str) -> list[str]:
    """Return the lines over 80 columns that could have been broken."""
    return [line for line in text.splitlines() if len(line) > 80 and " " in line.strip()]


def unexplained(text: str) -> set[str]:
    """Return the knobs whose short names a text has without saying what they stand for."""
    words = [word.strip("(),;:.") for word in text.split()]
    # A GB200 is a device, and no global batch.
    words = [word for word in words if word not in device_names()]
    known = [(word, knob[0]) for word in words if (knob := word_knob(word))]
    known = [(word, name) for word, name in known if any(KNOBS[name].affixes)]  # not "deepspeed"
    flat = " ".join(words)
    return {name for _, name in known} - {name for word, name in known if f"{word} = " in flat}


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
    wide, undefined = 0, 0
    for command, text in shown_answers():
        lines, names = too_wide(text), unexplained(text)
        wide, undefined = wide + len(lines), undefined + len(names)
        for line in lines:
            print(f"{command}: {len(line)} columns: {line}")
        if names:
            print(f"{command}: not explained: {', '.join(sorted(names))}")
    commands = re.findall(r"^  [a-z]+ +\S", help_of("--help").partition("options:")[0], re.M)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return [
        Figure("docs_words", docs_words(), "words"),
        Figure("readme_words", len(readme.split()), "words"),
        Figure("terms_for_today", len(seen), "count"),
        Figure("help_lines_optimize", help_of("optimize", "--help").count("\n"), "lines"),
        Figure("commands", len(commands), "count"),
        Figure("width_over_80", wide, "lines"),
        Figure("undefined_words_in_answer", undefined, "count"),
    ]


if __name__ == "__main__":
    publish(figures(), arguments(__doc__, "words").parse_args().json)
