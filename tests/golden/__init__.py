"""Golden outputs: what every command that reads a run folder prints for eight recorded runs.

`recorded` holds the folders: `measured` (the built-in program on two cores), `script` (a script
under torchrun), `simulated`, `plan`, `failures` (four kinds), `refuted` (nothing survived its
verification), and replays of a made-up `table` and of `cpu-table` (tests/data/cpu-tiny-gpt).
`outputs/NAME.txt` holds the commands with their text, JSON and exit code, the files of `tuner
apply` and `tuner export`, and the words of the report's page and of the notebook's table.

A difference is reviewed, then accepted with `python -m tests.golden --write [NAME ...]`. Paths,
versions, times of day and the host are left out, and figures of JSON keep six digits.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import shutil
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

from tuner.cli.main import main
from tuner.display.report import result_html
from tuner.planner import plan
from tuner.problem import problem
from tuner.study import load

__all__ = ["NAMES", "OUTPUTS", "outputs", "prepared"]

HERE = Path(__file__).parent
OUTPUTS = HERE / "outputs"
NAMES = tuple(sorted(path.name for path in (HERE / "recorded").iterdir()))
#: Commands whose text and whose JSON are kept; RUN is the run, OUT a new folder.
BOTH = (
    "show RUN",
    "choose RUN --minimize energy",
    "choose RUN --max-slowdown 10% --power-cap 5W",
    "compare RUN",
    "explain RUN",
    "compare failures RUN",
    "apply RUN --out OUT",
)
TEXT = (
    "export RUN --to csv --out OUT/points.csv",
    "show RUN --html --out OUT/report.html",
)
#: What differs between two machines or two days.
_VARYING = (
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?(\+00:00|Z)?)?"), "TIME"),
    (re.compile(r"joulefront \d+\.\d+\.\d+\S*"), "joulefront VERSION"),
    (re.compile(r"(compiled_ops|installed_python)=\S+"), r"\1=PATH"),
)

_LONG = re.compile(r"\b\d+\.\d{5,}(e[+-]?\d+)?\b")


class _Words(HTMLParser):
    """The words of a page, one element a line, without scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._hidden and data.strip():
            self.lines.append(" ".join(data.split()))


def words_of(page: str) -> str:
    """Return the words of an HTML page."""
    parser = _Words()
    parser.feed(page)
    return "\n".join(parser.lines)


def rounded(value: Any) -> Any:
    """Return a value of JSON with six digits a figure."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else value


def _lines(value: Any, seen: set[str], depth: int = 0, name: str = "") -> Iterator[str]:
    """Yield the lines of a value of JSON: what fits stands on one line, named tables only once."""
    line = json.dumps(value, ensure_ascii=False)
    figures = isinstance(value, list) and all(isinstance(part, float | int) for part in value)
    label = (value.get("short_name") or value.get("name")) if isinstance(value, dict) else None
    if label and line in seen:
        line = f"as above: {label}"
    elif len(line) > 200 and isinstance(value, dict | list) and not figures:
        seen.add(line)
        yield " " * depth + name
        parts = value.items() if isinstance(value, dict) else (("-", part) for part in value)
        for key, part in parts:
            yield from _lines(part, seen, depth + 1, f"{key} ")
        return
    yield " " * depth + name + line


def _readable(text: str) -> str:
    return "\n".join(_lines(rounded(json.loads(text)), set()))


def _file_text(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".html":
        return words_of(text)
    if path.suffix == ".json":
        return _readable(text)
    return text


def _without_machine(text: str, work: Path) -> str:
    """Return a text without the paths, times and long figures of one run of the commands."""
    for path, label in ((work, "WORK"), (HERE.parent, "TESTS"), (HERE.parents[1], "ROOT")):
        text = text.replace(str(path), label)
    for pattern, label in _VARYING:
        text = pattern.sub(label, text)
    return _LONG.sub(lambda figure: f"{float(figure[0]):.6g}", text)


def prepared(work: Path) -> None:
    """Copy the run folders to `work/runs` and unpack them, with the paths of this machine."""
    shutil.copytree(HERE / "recorded", work / "runs")
    for packed in (work / "runs").rglob("*.gz"):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    for study in (work / "runs").glob("*/study.toml"):
        text = study.read_text(encoding="utf-8")
        study.write_text(text.replace("@TESTS", str(HERE.parent)), encoding="utf-8")


def _said(command: str, name: str, work: Path, *, as_json: bool) -> str:
    """Return what a command prints and writes, and its exit code where it is not 0."""
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    words = command.replace("RUN", name).replace("OUT", str(out)).split()
    words += ["--runs-dir", str(work / "runs"), *(["--json"] if as_json else [])]
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(words)
    text = _without_machine(output.getvalue(), work)
    if as_json and text:
        text = _readable(text)
    parts = [text.rstrip(), errors.getvalue().rstrip(), f"exit code {code}" if code else ""]
    if not as_json:
        every = (path for path in out.rglob("*") if path.is_file())
        written = sorted(path for path in every if path.suffix != ".py")  # copies of modules
        parts += [f"== {p.relative_to(out)}\n{_file_text(p).rstrip()}" for p in written]
    head = f"$ tuner {command.replace('RUN', name)}{' --json' if as_json else ''}"
    return "\n".join([head, *(part for part in parts if part)])


def outputs(name: str, work: Path) -> str:
    """Return every output for one run.

    Args:
        name: of the run.
        work: an empty folder to work in.
    """
    prepared(work)
    said = []
    releases = dict.fromkeys(problem.versions(), "VERSION")
    with (
        # A result is computed once, not once for each command.
        mock.patch.object(load, "answer_of_run", cache(load.answer_of_run)),
        # Which Python and packages are installed here is no part of an answer.
        mock.patch.object(problem, "versions", return_value=releases),
        mock.patch.object(plan, "versions", return_value=releases),
    ):
        result = load.answer_of_run(load.RunFolder(work / "runs" / name))
        for command in BOTH:
            said += [_said(command, name, work, as_json=flag) for flag in (False, True)]
        said += [_said(command, name, work, as_json=False) for command in TEXT]
        said.append(f"$ notebook\n{words_of(result_html(result))}")
    return _without_machine("\n\n".join(said) + "\n", work)
