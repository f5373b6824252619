"""The hook's entry into Python processes below a command that is started as it stands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tuner.workload import hook
from tuner.workload.hook import loopback
from tuner.workload.hook.torch_settings import is_installed

ENTRY = Path(hook.__file__).parent / "entry"
SHOW = "import json, sys; print(json.dumps(sys.argv[1:]))"


def run(folder: Path, words: list[str], order: dict[str, Any] | None, *paths: Path) -> str:
    file = folder / "attach.json"
    if order is not None:
        file.write_text(json.dumps(order))
    env = {
        **os.environ,
        hook.ATTACH: str(file),
        "PYTHONPATH": os.pathsep.join(map(str, (ENTRY, *paths))),
    }
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=True
    )
    assert not done.stderr
    return done.stdout


def test_a_program_may_import_the_hook_and_read_its_configuration(tmp_path: Path) -> None:
    order = {"options": {"configuration": {"micro_batch": 4}}}
    text = "import joulefront_hook as h; print(h.configuration()['micro_batch'])"
    assert run(tmp_path, ["-c", text], order) == "4\n"


def test_a_sitecustomize_of_the_users_own_runs_too(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys; sys.mine = 'own'")
    text = "import sys; print(sys.mine, 'joulefront_hook' in sys.modules)"
    assert run(tmp_path, ["-c", text], {"options": {}}, own) == "own True\n"


@pytest.mark.parametrize("text", [None, "{", "[]", '{"options": 3}'])
def test_a_broken_order_stops_no_program(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "attach.json").write_text(text)
    assert run(tmp_path, ["-c", "print('trains')"], None) == "trains\n"


def words(typed: list[str], changed: list[str]) -> dict[str, Any]:
    return {"options": {"words": {"typed": typed, "set": changed}}}


def test_a_module_gets_the_changed_arguments(tmp_path: Path) -> None:
    (tmp_path / "pkg.py").write_text(SHOW)
    order = words(["-m", "pkg", "-b4"], ["-m", "pkg", "-b8", "--accum=2"])
    assert run(tmp_path, ["-m", "pkg", "-b4"], order) == '["-b8", "--accum=2"]\n'


@pytest.mark.parametrize("command", [["-c", SHOW], [f"-c{SHOW}"], ["-u", "-c", SHOW]])
def test_a_program_given_as_a_string_gets_the_changed_arguments(
    tmp_path: Path, command: list[str]
) -> None:
    order = words(["-c", SHOW, "--bs", "4"], ["-c", SHOW, "--bs", "8", "--accum", "2"])
    shown = run(tmp_path, [*command, "--bs", "4"], order)
    assert json.loads(shown) == ["--bs", "8", "--accum", "2"]


def test_a_program_given_as_a_string_without_arguments_gets_some(tmp_path: Path) -> None:
    order = words(["-c", SHOW], ["-c", SHOW, "--bs", "8"])
    assert json.loads(run(tmp_path, ["-c", SHOW], order)) == ["--bs", "8"]


def test_a_program_read_from_the_input_gets_the_changed_arguments(tmp_path: Path) -> None:
    order = words(["-", "--bs", "4"], ["-", "--bs", "8"])
    (tmp_path / "attach.json").write_text(json.dumps(order))
    env = {**os.environ, hook.ATTACH: str(tmp_path / "attach.json"), "PYTHONPATH": str(ENTRY)}
    command = [sys.executable, "-", "--bs", "4"]
    done = subprocess.run(command, env=env, input=SHOW, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["--bs", "8"]


def test_numbers_of_ranks_stay_their_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHOW)
    typed = ["train.py", "--local_rank={local_rank}", "--bs=4"]
    order = words(typed, ["train.py", "--local_rank={local_rank}", "--bs=8"])
    shown = run(tmp_path, ["train.py", "--local_rank=3", "--bs=4"], order)
    assert shown == '["--local_rank=3", "--bs=8"]\n'


@pytest.mark.parametrize("own", [["other.py", "--bs", "4"], ["train.py", "--bs", "16"]])
def test_other_programs_of_the_command_keep_their_arguments(tmp_path: Path, own: list[str]) -> None:
    for name in ("train.py", "other.py"):
        (tmp_path / name).write_text(SHOW)
    order = words(["train.py", "--bs", "4"], ["train.py", "--bs", "8"])
    assert json.loads(run(tmp_path, own, order)) == own[1:]


@pytest.mark.parametrize("options", [["-u"], ["-W", "ignore", "-X", "dev", "-uB"], ["-Wignore"]])
def test_a_rank_may_be_started_with_options_of_python(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "train.py").write_text(SHOW)
    order = words(["train.py", "--bs", "4"], ["train.py", "--bs", "8"])
    assert run(tmp_path, [*options, "train.py", "--bs", "4"], order) == '["--bs", "8"]\n'


@pytest.mark.parametrize("rank", [["train.py", "--bs", "4"], ["-m", "train", "--bs", "4"]])
def test_a_launcher_whose_words_end_with_those_of_its_ranks_keeps_its_own(
    tmp_path: Path, rank: list[str]
) -> None:
    (tmp_path / "launcher.py").write_text(SHOW)
    order = words(rank, [*rank[:-1], "8"])
    typed = ["launcher.py", "--nproc_per_node", "2", *rank]
    assert json.loads(run(tmp_path, typed, order)) == typed[1:]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["datasets.py"], False),  # the program's own
        (["datasets/__init__.py"], False),
        (["datasets/train.txt", "data.py"], True),  # a folder is no package
        (["json.py"], True),
        ([], True),
    ],
)
def test_a_program_imports_its_own_namesake_of_a_package_that_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], expected: bool
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("datasets", "datasets.arrow", "datasetsx"):
        module = ModuleType(name)
        module.__file__ = f"/usr/lib/site-packages/{name}.py"
        monkeypatch.setitem(sys.modules, name, module)
    loopback.forget_namesakes(str(tmp_path))
    assert ("datasets" in sys.modules) is ("datasets.arrow" in sys.modules) is expected
    assert {"json", "datasetsx"} <= {*sys.modules}


def test_a_module_of_the_programs_own_is_no_package_that_takes_long_to_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, file in (
        ("datasets", "/home/me/datasets.py"),
        ("lightning", "/l/site-packages/l.py"),
    ):
        module = ModuleType(name)
        module.__file__ = file
        monkeypatch.setitem(sys.modules, name, module)
    assert is_installed("lightning")
    assert not is_installed("datasets")
