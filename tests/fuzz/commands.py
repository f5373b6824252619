"""Kinds of bad input to whole commands: their words, and the files and folders that they name.

The words of a command are drawn from its own parser, so that a new option is tried as well. What
would wait, measure or serve is left out: those options are tried by tests of their own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz.kinds import (
    CSV,
    Kind,
    Try,
    bent_launch,
    command,
    keep_run,
    make_program,
    parser,
    shipped,
)
from tests.fuzz.kinds import KINDS as OF_FILES
from tests.fuzz.mutate import Draw, as_toml, bent_file, torn
from tests.support.shapes import NASTY

#: What a person might type where something else is wanted.
TYPED = (
    *(str(each) for each in NASTY if isinstance(each, str | int | float) and each != 10**400),
    *("5%", "-5%", "1e400%", "2h", "-1h", "1e9999h", "0s", "nanh", "inf", "5 kWh", "-1kWh", "8"),
    *("dp2 mb4", "dp99999999999999999999 mb1", "dp2 dp2", "mb0", "#1", "today", "best", "knee"),
    *("recommended", "kept", "./runs/kept", "train.py", "tiny-gpt", "a100-8", "cpu-2", "/", "~"),
    *("a=b", "live:x=1,2", "env:A=1,2", "env:=1", "env:A B=1,2", "{micro_batch=1}", "{", "'", "-"),
    *("--", "-x", "--json", "é", "\u202e", "=1+1", "@/etc/hostname", "@", "sqlite:///x.db", "auto"),
    *("sqlite:////nonexistent/x.db", "mysql://x", "127.0.0.1:1", "x" * 300, ".", "runs", "csv"),
    *("zip", "energy", "time", "cost", "simulated", "inline", "t.csv", "default", "home"),
)
#: Commands that answer at once, each with words that make it so.
COMMANDS: dict[str, tuple[str, ...]] = {
    "show": (), "choose": (), "explain": (), "compare": (), "apply": (), "export": (),
    "import": (), "runs": (), "list": (), "fit": ("--cluster", "cpu-2"),
    "plan": ("--cluster", "cpu-2"), "optimize": ("--dry-run", "--cluster", "cpu-2"),
}  # fmt: skip
#: Options that wait for a cluster or a database elsewhere, or write where the user says.
_LEFT_OUT = {"--ray", "--help", "--help-all", "--executor", "--storage", "--log-file", "--verbose"}


def _drawn_words(name: str, draw: Draw) -> list[str]:
    subparsers = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    mine = {name: each for a in subparsers for name, each in a.choices.items()}[name]
    actions = [a for a in mine._actions if not {*a.option_strings} & _LEFT_OUT]
    named = [a for a in actions if a.option_strings]
    words: list[str] = []
    for action in (a for a in actions if not a.option_strings):
        many = draw.choice((0, 1, 1, 2)) if action.nargs in ("*", "+") else draw.choice((0, 1, 1))
        for _ in range(many):
            sound = action.choices and draw.random() < 0.8
            usual = [*action.choices] if sound and action.choices else ["kept", "tiny-gpt", *TYPED]
            words.append(str(draw.choice(usual)))
    for action in draw.choices(named, k=draw.choice((0, 1, 1, 2, 3))):
        words.append(draw.choice(action.option_strings))
        if action.nargs != 0:
            words += draw.choices(TYPED, k=1 if action.nargs is None else draw.choice((1, 2)))
    return [word.replace("\0", "") for word in words]


def _command_lines(folder: Path) -> Try:
    run = keep_run(folder)
    make_program(folder)
    (folder / "t.csv").write_bytes(CSV)

    def one(draw: Draw) -> None:
        name = draw.choice([*COMMANDS])
        words = _drawn_words(name, draw)
        if not run.exists():  # it was removed by name, as asked
            keep_run(folder)
        command(name, *COMMANDS[name], *words)

    return one


def _imports(folder: Path) -> Try:
    rows = [line.split(b",") for line in CSV.splitlines()]

    def one(draw: Draw) -> None:
        mine = [list(row) for row in rows]
        for _ in range(draw.choice((0, 1, 1, 2, 4))):
            row = draw.choice(mine)
            row[draw.randrange(len(row))] = draw.choice(TYPED).encode(errors="replace")
        data = b"\n".join(b",".join(row) for row in mine) + b"\n"
        (folder / "t.csv").write_bytes(torn(data, draw) if draw.random() < 0.4 else data)
        knobs = draw.choice(("mb,clock_MHz", "mb", "clock_MHz,mb,", "mb,mb", "time_s"))
        try:
            command(
                *("import", "t.csv", "--time-column", "time_s", "--energy-column", "energy_J"),
                *("--knobs", knobs, "--name", "imported"),
            )
        finally:
            shutil.rmtree(folder / "runs" / "imported", ignore_errors=True)

    return one


def _pasted(folder: Path) -> Try:
    make_program(folder)

    def one(draw: Draw) -> None:
        words = bent_launch(draw)
        asked = draw.choice((["optimize", "--dry-run", "--executor", "inline"], ["fit"]))
        command(*asked, "--cluster", "cpu-2", "--", *words)

    return one


def _exports(folder: Path) -> Try:
    run = keep_run(folder)
    study = tomllib.loads((run / "study.toml").read_text())
    trace = (run / "trace" / "probes.jsonl").read_bytes()

    def one(draw: Draw) -> None:
        bent_file(run / "study.toml", study, as_toml, draw)
        (run / "trace" / "probes.jsonl").write_bytes(
            torn(trace, draw) if draw.random() < 0.5 else trace
        )
        to, redact = draw.choice(("csv", "zip")), draw.choice(((), ("--redact",)))
        # Drawn before, for the archive's length differs from one time to the next.
        reader = draw.choice(("show", "choose", "replay", "compare"))
        places = draw.of(st.randoms(use_true_random=True))
        archive = folder / "out.zip"
        try:
            command("export", "kept", "--to", to, "--out", f"out.{to}", *redact)
            if archive.is_file():
                archive.write_bytes(torn(archive.read_bytes(), places))
                command(reader, "out.zip")
        finally:
            archive.unlink(missing_ok=True)

    return one


def _simulated(folder: Path) -> Try:
    """A whole search by the model, with files and limits that may not fit it."""
    (job,) = shipped("jobs", "tiny-gpt")

    def one(draw: Draw) -> None:
        bent_file(folder / "job.toml", job, as_toml, draw)
        option = draw.choice(("", "--deadline", "--budget"))
        limits = (option, draw.choice(TYPED)) if option else ()
        try:
            command(
                *("optimize", "job.toml", "--cluster", "cpu-2", "--executor", "simulated"),
                *("--max-probes", "1", "--no-verify", "--quiet", "--name", "simulated", *limits),
            )
        finally:
            shutil.rmtree(folder / "runs" / "simulated", ignore_errors=True)

    return one


#: What may be in the place of a file: a pipe, a folder, links to itself, to an endless device and
#: outside, nothing, no bytes, and a file that cannot be read.
_ODD: tuple[Callable[[Path], object], ...] = (
    os.mkfifo,
    os.mkdir,
    lambda path: os.symlink(path.name, path),
    lambda path: os.symlink("/dev/zero", path),
    lambda path: os.symlink("/etc/hostname", path),
    lambda path: None,
    lambda path: path.touch(),
    lambda path: path.touch(mode=0),
)
_ASKED: tuple[tuple[str, ...], ...] = (
    ("show", "kept"), ("show", "kept", "--html", "--out", "report.html"), ("runs",),
    ("runs", "stop", "kept"), ("choose", "kept", "--minimize", "energy"), ("explain", "kept"),
    ("compare", "kept"), ("apply", "kept", "--out", "best"), ("runs", "--json"),
    ("export", "kept", "--to", "csv", "--out", "kept.csv"),
    ("export", "kept", "--to", "zip", "--out", "kept.zip"),
)  # fmt: skip
_FILES = (
    *("study.toml", "study.journal", "trace/probes.jsonl", ".lock", "trace/.reserve", "stop"),
    *("plan.json", "trace/power/p0000.csv.gz", "trace", "probes", "best", "report.html"),
    *("table/table.toml", "trace/power", "."),
)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def _odd_files(folder: Path) -> Try:
    """A file of a run is something else: a pipe would be waited for, and a link followed."""
    run = keep_run(folder)

    def one(draw: Draw) -> None:
        path = Path(os.path.normpath(run / draw.choice(_FILES)))
        _remove(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        draw.choice(_ODD)(path)
        try:
            command(*draw.choice(_ASKED))
        finally:
            _remove(run)
            keep_run(folder)

    return one


KINDS: tuple[Kind, ...] = (
    *OF_FILES,
    Kind("command lines", _command_lines, 2.0),
    Kind("imported CSV", _imports, 0.5),
    Kind("pasted commands", _pasted, 0.5),
    Kind("exports", _exports, 0.5),
    Kind("simulated searches", _simulated, 0.3),
    Kind("odd files in a run", _odd_files, 2.0),
)
