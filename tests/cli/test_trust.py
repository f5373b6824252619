"""What files make run is shown, and asked for, before anything of it starts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from tuner.cli.main import main
from tuner.problem.file_starts import of_driver, of_files
from tuner.search_spaces.declared import pack_names
from tuner.workload.scripts.frameworks import load_drivers, shipped_drivers
from tuner.workload.scripts.frameworks.driver import read_driver

DATA = Path(__file__).resolve().parents[1] / "data"
KNOB = """
[{section}knobs.library]
values = ["/y.so"]
how = "env:LD_PRELOAD"
"""
DRIVER = """
framework = "mine"
[recognise]
imports = ["torch"]
[probe.env]
NCCL_NET_PLUGIN = "/x.so"
"""


class Started(Exception):
    """What would have started."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def started(*args: Any, **more: Any) -> None:
        raise Started

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tuner.api.search_for", started)
    monkeypatch.setattr("tuner.deploy.train.train", started)
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / "knobs.toml").write_text(KNOB.format(section=""))
    (tmp_path / "driver.toml").write_text(DRIVER)
    (tmp_path / "job.toml").write_text(
        'name = "mine"\nsequence_length = 64\nglobal_batch = 8\nsteps = 100\n'
        '[model]\nconfig = "tiny-gpt"\n'
        '[knobs.plugin]\nvalues = ["/x.so"]\nhow = "env:NCCL_TUNER_PLUGIN"\n'
    )
    return tmp_path


ASKED = [
    (["tiny-gpt", "--knobs", "knobs.toml"], "library: LD_PRELOAD=/y.so"),
    (["--framework", "driver.toml", "--", "train.py"], "mine: NCCL_NET_PLUGIN=/x.so"),
    (["job.toml"], "plugin: NCCL_TUNER_PLUGIN=/x.so"),
]


@pytest.mark.parametrize(("words", "shown"), ASKED)
def test_without_a_terminal_trust_is_an_option(
    words: list[str], shown: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["optimize", *words]) == 2
    error = capsys.readouterr().err
    assert shown in error
    assert "add --trust" in error
    with pytest.raises(Started):
        main(["optimize", "--trust", *words])
    assert shown in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["y\n", "YES\n", "\n", "n\n", "yellow\n", ""])
def test_at_a_terminal_a_yes_is_needed(
    answer: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = io.StringIO(answer)
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", typed)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    words = ["optimize", *ASKED[0][0]]
    if answer.strip().lower() in ("y", "yes"):
        with pytest.raises(Started):
            main(words)
    else:
        assert main(words) == 2
        assert capsys.readouterr().err.endswith("nothing was started\n")


@pytest.mark.parametrize(
    "words",
    [
        ["tiny-gpt", *(word for name in pack_names() for word in ("--knobs", name))],
        ["tiny-gpt", "--knob", "env:NCCL_ALGO=Ring,Tree"],
        ["tiny-gpt", "--knobs", "knobs.toml", "--executor", "simulated"],
        ["--knobs", "framework", "--", "train.py"],
    ],
)
def test_what_is_shipped_typed_or_not_started_is_not_asked_about(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Started):
        main(["optimize", *words])
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("words", "shown"), ASKED)
def test_a_dry_run_shows_it_and_asks_nothing(
    words: list[str], shown: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["optimize", "--dry-run", *words]) == 0
    said = capsys.readouterr()
    assert shown in said.out
    assert "[y/N]" not in said.err


def test_a_shipped_driver_is_ours_and_a_changed_one_is_not(tmp_path: Path) -> None:
    for driver in shipped_drivers():
        assert not list(of_driver(driver))
        assert not list(of_driver(read_driver(dict(driver.table), "a copy")))
    wrapped = next(driver for driver in shipped_drivers() if driver.wrapper)
    table = {**wrapped.table, "wrapper": {**wrapped.table["wrapper"], "search": ["evil.{module}"]}}
    assert any("evil.{module}" in phrase for phrase in of_driver(read_driver(table, "x")))


def test_what_a_driver_sets_by_its_knobs_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "d.toml"
    path.write_text(
        'framework = "mine"\n[recognise]\nimports = ["torch"]\n'
        '[knobs.micro_batch]\nkey = "env:PYTHONPATH"\n'
        '[knobs.compilation.levels.none]\n"a.b" = "call:evil:Class"\n"env:LD_PRELOAD" = "/x.so"\n'
        '[declared.more]\nkey = "env:BASH_ENV"\nvalues = ["/x.sh"]\n'
    )
    shown = "\n".join(of_driver(*load_drivers(path)))
    for part in ("PYTHONPATH=", "call:evil:Class", "LD_PRELOAD=/x.so", "BASH_ENV=/x.sh"):
        assert part in shown
    assert of_files([], path, None) == shown.splitlines()
