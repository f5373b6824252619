"""Every code block of the documentation runs, page by page, each page in a folder of its own.

A comment before a block, `<!-- test: A => B; C => D -->`, says what the test writes instead, so
that a page may speak of 20 probes and its test makes 2. Blocks that are not run are output, marked
`text`, or parts of files, marked `toml` or `json`, which must at least parse; `sh` is the
installation, which the test stands on already.

A block after `<!-- file: NAME -->` is a file that the reader saves. A `text` block after
`<!-- output -->` is what the block before it prints, and after `<!-- output: N lines -->` its first
N lines. `python -m tests.test_docs PAGE.md ...` writes them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

import tuner
from benchmarks.reference import commands_of
from tests.golden.__main__ import KERNEL
from tests.support.commands import finished
from tests.support.windows import program
from tuner.cli.main import command_parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
#: Time that a plan took, which is the machine's.
_DURATION = r"in (less than 1|\d+) s\b"
#: Pages whose blocks start training processes, and the page whose blocks run with everyday tests.
TRAINING = {"quickstart-laptop", "your-script"}
LONG_TRAINING = {"tune-while-training"}
EVERYDAY = {"index"}
TRAINS = (pytest.mark.real, pytest.mark.timeout(1800))
FENCE = re.compile(
    r"(?:<!-- test: (?P<swaps>.*?) -->\n)?(?:<!-- file: (?P<file>\S+) -->\n)?"
    r"(?P<output><!-- output(?:: (?P<lines>\d+) lines)? -->\n)?"
    r"^```(?P<kind>\w*)\n(?P<code>.*?)^```$",
    re.M | re.S,
)
RUN = ("bash", "python")
PARSED = ("toml", "json", "sh", "text")


@dataclass(frozen=True)
class Block:
    page: str
    kind: str
    code: str
    line: int
    file: str | None
    output: bool
    lines: int | None

    def printed(self, text: str) -> str:
        """The part of an output that the block shows."""
        shown = [line.rstrip() for line in text.strip("\n").splitlines()]
        return "\n".join(shown[: self.lines]) + "\n"


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        code = match["code"]
        for swap in filter(None, re.split(r";\s*", match["swaps"] or "")):
            old, _, new = swap.partition(" => ")
            assert old in code, f"{path.name}: the block does not hold {old!r}"
            code = code.replace(old, new)
        line = text.count("\n", 0, match.start("code")) + 1
        lines = int(match["lines"]) if match["lines"] else None
        kind, file, output = match["kind"], match["file"], bool(match["output"])
        found.append(Block(path.stem, kind, code, line, file, output, lines))
    return found


def run_page(path: Path, folder: Path) -> list[tuple[Block, str]]:
    """Run the blocks of a page; return those that show an output, each with what was printed."""
    programs = [Path(sys.executable).parent]
    if path.stem in TRAINING:
        programs.insert(0, program(folder / ".programs"))
    environment = {
        **os.environ,
        **KERNEL,
        "COLUMNS": "100",
        "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
    }
    printed, shown = "", []
    for block in blocks_of(path):
        if block.output:
            shown.append((block, block.printed(printed)))
        if block.file:
            (folder / block.file).write_text(block.code, encoding="utf-8")
        if block.file or block.kind not in RUN:
            continue
        command = (
            ["bash", "-euo", "pipefail", "-c", block.code]
            if block.kind == "bash"
            else [sys.executable, "-c", block.code]
        )
        done = finished(command, cwd=folder, env=environment, timeout=900)
        assert done.returncode == 0, (
            f"{path.name}, line {block.line}, exit code {done.returncode}:\n{block.code}\n"
            f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        )
        printed = done.stdout
    return shown


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_every_block_says_what_it_is(path: Path) -> None:
    for block in blocks_of(path):
        assert block.kind in (*RUN, *PARSED), f"{path.name}, line {block.line}: {block.kind!r}"
        if block.kind == "toml":
            tomllib.loads(block.code)
        if block.kind == "sh":
            subprocess.run(["bash", "-n", "-c", block.code], check=True)
        if block.kind == "json":
            json.loads(block.code)
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    hidden = [
        line for line in text.splitlines() if re.match(r"    (tuner|python|make|import) ", line)
    ]
    assert not hidden, f"{path.name} has commands outside of a fenced block: {hidden[:3]}"


def pages(stems: set[str], *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(p, marks=marks, id=p.stem) for p in PAGES if p.stem in stems]


@pytest.mark.parametrize(
    "path",
    [
        *pages(EVERYDAY),
        *pages({p.stem for p in PAGES} - TRAINING - LONG_TRAINING - EVERYDAY, pytest.mark.slow),
        *pages(TRAINING, pytest.mark.slow, *TRAINS),
        *pages(LONG_TRAINING, pytest.mark.long, *TRAINS),
    ],
)
def test_blocks_run_and_print_what_is_shown(path: Path, tmp_path: Path) -> None:
    for block, printed in run_page(path, tmp_path):
        shown, here = (re.sub(_DURATION, "in N s", text) for text in (block.code, printed))
        assert shown == here, f"{path.name}, line {block.line}: write it anew"


COMMAND = re.compile(r"^tuner (?:.*\\\n)*.*(?:\n  .*)*", re.M)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_commands_that_are_only_shown_are_commands(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They need GPUs or another's scripts, but their options must exist."""
    for block in blocks_of(path):
        if block.kind not in ("text", "sh"):
            continue
        for found in COMMAND.findall(block.code):
            text = re.sub(r"\$\w+|\"\$\w+\"", "X", found.replace("\\\n", " "))
            words = shlex.split(text, comments=True)
            words = words[1 : words.index("&") if "&" in words else None]
            if "..." in words or "--" in words or any(word.isupper() for word in words[:1]):
                continue
            try:
                command_parser().parse_args(words)
            except SystemExit:
                pytest.fail(f"{path.name}, line {block.line}: {capsys.readouterr().err}")


def test_every_message_of_the_troubleshooting_page_is_in_the_source() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    source = "".join(
        path.read_text(encoding="utf-8")
        for top in ("tuner", "workload", "search_spaces", "models")
        for path in sorted((ROOT / top).rglob("*.py"))
    )
    joined = re.sub(r"\"\s*\n\s*f?\"", "", source)  # a sentence may be several literals
    assert len(quoted) > 15
    assert not [sentence for sentence in quoted if sentence not in joined]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the docs extra")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = finished(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    page = (site / "api" / "index.html").read_text(encoding="utf-8")
    assert "budget_kJ" in page
    # Nothing is fetched from elsewhere when a page is read.
    for path in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|link)[^>]+(?:src|href)=\"(https?://[^\"]+)", path.read_text("utf-8")
        )
        assert not [url for url in loaded if "rel=canonical" not in url], path


def test_the_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert not [name for name in tuner.__all__ if f"::: tuner.{name}\n" not in page]


@pytest.mark.parametrize(
    "declared",
    [tuner.Constraints, tuner.SearchSettings, tuner.WindowPolicy],
    ids=lambda c: c.__name__,
)
def test_the_api_page_has_every_field_with_its_option_or_its_meaning(declared: type) -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    (optimize,) = (c for c in commands_of(command_parser()) if c.prog == "tuner optimize")
    flags = {action.dest: action.option_strings[:1] for action in optimize._actions}
    for each in fields(declared):
        if (option := each.metadata.get("option")) is None:
            assert f"| `{each.name}` |" in page
            continue
        if flag := flags.get(each.name) if declared is not tuner.WindowPolicy else None:
            row = f"| `{each.name}` | `{flag[0]}` |"  # docs/cli.md explains it
        else:
            unit = f", in {option.unit}" if option.unit else ""
            default = f"{each.default:.3g}" if type(each.default) is float else repr(each.default)
            row = f"| `{each.name}` | {option.help}{unit} (default: `{default}`) |"
        assert row in page, f"docs/api.md lacks this row:\n{row}"


def write(path: Path) -> None:
    """Replace the outputs that a page shows by what its blocks print."""
    text = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for block, printed in run_page(path, Path(folder)):
            text = text.replace(f"```text\n{block.code}```", f"```text\n{printed}```", 1)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name))


def _named_files(page: str) -> list[str]:
    # Of the table of the core: a file without a folder stands beside the one before it.
    found = []
    for row in re.findall(r"^\| [^|]+ \| ([^|]*\.py`[^|]*) \|", page, re.M):
        folder = ""
        for name in re.findall(r"`([\w/]+\.py)`", row):
            folder = name.rpartition("/")[0] if "/" in name else folder
            found.append(name if "/" in name else f"{folder}/{name}")
    return found


def _modules_to_begin_with(page: str) -> list[str]:
    # Of the table of packages, which are parts of `tuner` or links in it.
    rows = re.findall(r"^\| `([\w.]+)`[^|]* \| [^|]*\? \| ([^|]*) \|$", page, re.M)
    names = ((package, name) for package, cell in rows for name in re.findall(r"`(\w+)`", cell))
    return [f"tuner/{package.replace('.', '/')}/{name}" for package, name in names]


def test_the_architecture_page_names_files_that_there_are() -> None:
    page = (ROOT / "docs" / "develop" / "architecture.md").read_text(encoding="utf-8")
    files, modules = _named_files(page), _modules_to_begin_with(page)
    assert len(files) > 20
    assert len(modules) > 50
    assert [name for name in files if not (ROOT / name).is_file()] == []
    gone = [n for n in modules if not ((ROOT / n).exists() or (ROOT / f"{n}.py").exists())]
    assert gone == ["tuner/result/Result"]  # a class
