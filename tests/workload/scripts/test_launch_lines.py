"""Launch lines as people keep them: what is observed of each, with launchers that are stand-ins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from tests.waiting import wait_until
from tests.workload.scripts.launch_lines import (
    LINES,
    ONE,
    REFUSED,
    folder_of,
    make_place,
    observe,
    write_program,
)
from tuner.search_spaces.errors import InputError


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder, variables = make_place(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(("line", "ranks", "words"), LINES)
def test_a_line_shows_the_ranks_that_it_starts(
    place: Path, line: str, ranks: int, words: tuple[str, ...]
) -> None:
    seen = observe(place, line)
    words = tuple(word.replace("{home}", str(place.parent)) for word in words)
    assert (seen.ranks, seen.words, seen.folder) == (ranks, words, folder_of(line, place))


def test_what_a_line_adds_to_python_path_belongs_to_its_ranks(place: Path) -> None:
    assert observe(place, "PYTHONPATH=src python train.py").variables == {"PYTHONPATH": "src"}


@pytest.mark.parametrize(("line", "sentences"), REFUSED)
def test_a_line_that_trains_nothing_to_be_seen_ends_in_a_sentence(
    place: Path, monkeypatch: pytest.MonkeyPatch, line: str, sentences: tuple[str, ...]
) -> None:
    monkeypatch.setattr("tuner.workload.node.rank_group.LEAST_PATIENCE_S", 4.0)
    limit_s = 5.0 if "out of time" in sentences[0] else 60.0
    with pytest.raises(InputError) as error:
        observe(place, line, limit_s=limit_s)
    for sentence in sentences:
        assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_python_that_lacks_torch_is_named_with_ours(place: Path) -> None:
    (place / "torch").unlink()
    with pytest.raises(InputError) as error:
        observe(place, f"{sys._base_executable} -s train.py")  # type: ignore[attr-defined]
    assert "the Python of the command, has no torch" in str(error.value)
    assert sys.executable in str(error.value)


def test_a_command_that_leaves_a_daemon_ends_with_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("START_LIMIT_S", "IMPORT_LIMIT_S"):
        monkeypatch.setattr(f"tuner.workload.node.rank_group.{limit}", 0.5)
    began = time.monotonic()
    with pytest.raises(InputError, match="without an optimizer step"):
        observe(place, "setsid bash -c 'sleep 397.5; :' &")
    assert time.monotonic() - began < 120
    assert not _running("397.5")


def test_nothing_of_a_command_is_left_running(place: Path) -> None:
    observe(place, "setsid sleep 300.25 & (setsid nohup sleep 300.25 &); python train.py")
    assert not _running("300.25")


def _running(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if word.encode() in words and b"pytest" not in words:
            found.append(path.parent.name)
    return found


def test_a_preparation_may_run_without_the_hook(place: Path) -> None:
    (place / "prepare.py").write_text(dedent("import time; time.sleep(1)"))
    assert observe(place, "python -I prepare.py; python train.py --bs 8").words == ONE


LOOP = """
model, optimizer = torch.nn.Module(), torch.optim.SGD()
while True:
    model(torch.Tensor(8))
    optimizer.step()
"""
FORKS = """
import os, torch
for rank in range(2):
    if os.fork() == 0:
        torch.distributed.init_process_group("gloo", rank, 2)
        optimizer = torch.optim.SGD()
        while True:
            optimizer.step()
os.wait()
"""
STARTS_ANEW = """
import os, sys
if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv, "--again"])
import torch
"""
CHANGES_ALL = """
import os, sys
os.environ.clear()
os.makedirs("out")
os.chdir("out")
sys.argv[1:] = ["changed"]
import torch
"""
FEW_STEPS = "import torch\noptimizer = torch.optim.SGD()\nfor i in range(3): optimizer.step()\n"


def test_ranks_that_are_forked_are_seen(place: Path) -> None:
    (place / "p.py").write_text(FORKS)
    seen = observe(place, "python p.py")
    assert (seen.ranks, seen.why_as_it_stands) == (2, "the script starts its ranks itself")


def test_a_program_that_starts_itself_anew_is_seen_as_it_ends_up(place: Path) -> None:
    (place / "p.py").write_text(STARTS_ANEW + LOOP)
    seen = observe(place, "python p.py")
    assert (seen.words, seen.variables) == (("p.py", "--again"), {"AGAIN": "1"})


def test_what_a_program_changes_of_itself_is_not_how_it_was_started(place: Path) -> None:
    (place / "p.py").write_text(CHANGES_ALL + LOOP)
    seen = observe(place, "A=1 python p.py x")
    assert (seen.words, seen.folder, seen.variables) == (("p.py", "x"), str(place), {"A": "1"})


def test_a_program_that_looks_for_torch_before_it_imports_it_is_seen(place: Path) -> None:
    looks = "import importlib.util\nimportlib.util.find_spec('torch')\nimport torch"
    (place / "p.py").write_text(f"{looks}{LOOP}")
    assert observe(place, "python p.py").ranks == 1


def test_a_second_optimizer_is_no_second_training(place: Path) -> None:
    loop = LOOP.replace("while", "other = torch.optim.SGD()\nwhile") + "    other.step()\n"
    (place / "p.py").write_text(f"import torch{loop}")
    assert observe(place, "python p.py").ranks == 1


def test_hundreds_of_variables_and_much_output_are_no_obstacle(place: Path) -> None:
    (place / "p.py").write_text(f"import torch{LOOP}")
    line = "export $(for i in {1..300}; do echo V$i=$i; done); yes 0123456789 | head -c 100000000;"
    seen = observe(place, f"{line} python p.py {'x' * 20000}")
    assert len(seen.variables) == 300
    assert seen.words == ("p.py", "x" * 20000)


def test_a_training_after_another_is_told(place: Path) -> None:
    (place / "few.py").write_text(FEW_STEPS)
    with pytest.raises(InputError, match=r"trains few\.py to its end and then train\.py"):
        observe(place, "python few.py; python train.py --bs 8")


def test_work_after_a_short_training_is_no_second_one(place: Path) -> None:
    (place / "few.py").write_text(FEW_STEPS)
    assert observe(place, "python few.py; python -c 'import torch'").words == ("few.py",)


@pytest.mark.parametrize(
    "start", ["python $program", "exec python $program", "python $program & wait"]
)
def test_a_strict_job_script_runs_as_its_shell_runs_it(place: Path, start: str) -> None:
    head = "#!/bin/bash\nset -euo pipefail\ntrap 'echo end' EXIT\nmodule() { :; }\nmodule purge\n"
    head += "program='train.py --bs 8'\n"
    write_program(place / "job.sh", f"{head}source ./activate\nexport PYTHONPATH=src\n{start}\n")
    seen = observe(place, "bash job.sh")
    assert seen.words == ("train.py", "--bs", "8")
    assert seen.variables == {"VIRTUAL_ENV": "env", "PYTHONPATH": "src"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_command_whose_observer_is_killed(
    place: Path, number: signal.Signals
) -> None:
    mark = f"{500 + int(number)}.25"
    (place / "p.py").write_text(f"import time\nopen('begun', 'w')\ntime.sleep({mark})\n")
    command = f"(setsid sleep {mark} &); python p.py {mark}"
    tuner = [sys.executable, "-m", "tuner.cli", "optimize", "--executor", "inline", "--"]
    with subprocess.Popen(
        [*tuner, "bash", "-c", command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:
        wait_until((place / "begun").exists)
        process.send_signal(number)
        process.wait(120)
    wait_until(lambda: not _running(mark))


@pytest.mark.parametrize(
    ("steps", "goes_on"),
    [([], False), pytest.param(["--steps", "100"], True, marks=pytest.mark.slow)],
)
def test_a_deadline_without_a_length_is_refused_after_one_look(
    place: Path, steps: list[str], goes_on: bool
) -> None:
    tuner = [sys.executable, "-m", "tuner.cli", "optimize", "--executor", "inline"]
    command = [*tuner, "--deadline", "2h", *steps, "--first-step-limit", "5s"]
    done = subprocess.run(
        [*command, "--", "python", "-c", f"import torch{LOOP}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    assert ("add --steps" not in done.stderr) is goes_on
    assert done.stderr.count("starting your command") == 1
