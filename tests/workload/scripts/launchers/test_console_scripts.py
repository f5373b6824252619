"""A command that a package installs is read as its module."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.scripts import CPU
from tuner.workload.scripts.command import Script, read_command
from tuner.workload.scripts.inspection import blank_job

NODE = replace(CPU, devices_per_node=4)
ENTRIES = """[console_scripts]
litgpt = litgpt.__main__:main
lit-flat = litgpt.flat:main
lit-package = litgpt.inner:main
lit-bare = litgpt:main
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with commands, and an empty folder to start them in."""
    site, cwd = tmp_path / "site", tmp_path / "cwd"
    told = site / "litgpt-0.5.13.dist-info"
    for folder in (told, site / "litgpt" / "inner", cwd):
        folder.mkdir(parents=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: litgpt\nVersion: 0.5.13\n")
    (told / "entry_points.txt").write_text(ENTRIES)
    package = site / "litgpt"
    for name in ("__init__.py", "__main__.py", "inner/__init__.py", "inner/__main__.py"):
        (package / name).write_text("raise SystemExit('imported')\n")
    (package / "flat.py").write_text("def main(): ...\nif __name__ == '__main__':\n    main()\n")
    monkeypatch.syspath_prepend(str(site))
    return cwd


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("litgpt finetune_lora base --devices 2", "-m litgpt finetune_lora base --devices 2"),
        ("lit-flat --x 1", "-m litgpt.flat --x 1"),
        ("lit-package", "-m litgpt.inner"),
        ("lit-bare", "-m litgpt"),
        ("nowhere-installed x", "nowhere-installed x"),
        ("python litgpt", "litgpt"),
    ],
)
def test_an_installed_command_is_its_module(command: str, words: str, installed: Path) -> None:
    assert read_command(shlex.split(command), installed) == (tuple(words.split()), None)


def test_a_file_of_that_name_goes_first(installed: Path) -> None:
    (installed / "litgpt").touch()
    assert read_command(["litgpt", "x"], installed)[0] == ("litgpt", "x")


def test_srun_starts_it_as_a_module(installed: Path) -> None:
    words, launcher = read_command(shlex.split("srun -n 2 litgpt pretrain x"), installed)
    assert words == ("-m", "litgpt", "pretrain", "x")
    assert launcher is not None
    assert (launcher.words, launcher.script) == (("srun", "-n", "2", "python"), words)


def test_its_framework_is_recognised_and_set(installed: Path) -> None:
    command = (
        "NCCL_ALGO=Ring litgpt finetune_full base --devices 4 --train.global_batch_size 32 "
        "--train.micro_batch_size 2"
    )
    job = blank_job(Script(command, cwd=installed), NODE)
    assert job.driver is not None
    assert (job.driver.title, job.global_batch) == ("litgpt 0.5.13", 32)
    assert job.words[:3] == ("-m", "litgpt", "finetune_full")
