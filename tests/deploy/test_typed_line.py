"""launch.sh of an observed command: what the user typed, with the hook where something changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.commands import finished
from tests.support.scripts import CPU, script_job
from tuner.deploy.launch_files import write_launch_files
from tuner.search_spaces.configuration import Configuration
from tuner.workload import hook
from tuner.workload.scripts.script_facts import ScriptFacts
from tuner.workload.scripts.script_job import ScriptJob

FRAME = ScriptFacts(kind="torch", micro_batch=4, accumulation=2, counted=True)
COMMAND = "--bs {micro_batch=4} --accum {gradient_accumulation=2}"
#: A program that shows its arguments, and imports something that is named torch.
SHOW = "import json, sys, torch; print(json.dumps(sys.argv[1:]))"


def job_of(folder: Path, line: str, typed: tuple[str, ...] = (), **changes: object) -> ScriptJob:
    job = script_job(f"train.py {COMMAND}", folder, FRAME, launcher=None, devices=1)
    frame = replace(FRAME, given=typed)
    (folder / "train.py").write_text(SHOW)
    (folder / "torch.py").write_text("")
    return replace(job, line=line, folder=str(folder), frame=frame, **changes)  # type: ignore[arg-type]


def launched(
    job: ScriptJob, name: str, folder: Path, **env: str
) -> subprocess.CompletedProcess[str]:
    out = folder / "files"
    launch = (Configuration.parse(name), job, replace(CPU, devices_per_node=1))
    write_launch_files(launch, out)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {n: text for n, text in os.environ.items() if n != "PYTHONPATH"}
    return finished([out / "launch.sh"], env={**environ, "PATH": path, **env}, cwd="/")


def test_todays_configuration_is_the_command_as_typed(tmp_path: Path) -> None:
    job = job_of(tmp_path, f"python train.py {COMMAND} | cat; echo end")
    done = launched(job, "dp1 mb4", tmp_path)
    assert done.stdout == '["--bs", "4", "--accum", "2"]\nend\n'
    assert not (tmp_path / "files" / "attach.json").exists()
    assert "JOULEFRONT" not in (tmp_path / "files" / "launch.sh").read_text()


def test_placeholders_of_the_line_are_filled_in(tmp_path: Path) -> None:
    job = job_of(tmp_path, f"nice python train.py {COMMAND} > out.txt; cat out.txt")
    done = launched(job, "dp1 mb2", tmp_path)
    assert (done.returncode, done.stdout) == (0, '["--bs", "2", "--accum", "4"]\n')


def test_arguments_that_were_proven_reach_the_rank_through_the_hook(tmp_path: Path) -> None:
    typed = ("train.py", "--bs", "4", "--accum", "2")
    job = job_of(tmp_path, "bash -c 'python train.py --bs 4 --accum 2'", typed)
    done = launched(job, "dp1 mb8", tmp_path)
    assert (done.returncode, done.stdout) == (0, '["--bs", "8", "--accum", "1"]\n')


def test_a_launch_below_another_command_that_is_watched_takes_its_own_settings(
    tmp_path: Path,
) -> None:
    typed = ("train.py", "--bs", "4", "--accum", "2")
    line = "module && bash -c 'module && PYTHONPATH=src python train.py --bs 4 --accum 2'"
    (tmp_path / "site.sh").write_text("module() { echo module; }\n")
    entry = Path(hook.__file__).parent / "entry"
    (tmp_path / "order.json").write_text(json.dumps({"options": {}}))
    env = {
        "PYTHONPATH": str(entry),
        hook.ATTACH: str(tmp_path / "order.json"),
        "BASH_ENV": str(entry / "bash_env"),
        "JOULEFRONT_BASH_ENV": str(tmp_path / "site.sh"),
    }
    done = launched(job_of(tmp_path, line, typed), "dp1 mb8", tmp_path, **env)
    assert done.returncode == 3, done.stderr  # the variable in front of Python hides the hook
    line = line.replace("PYTHONPATH=src", "nice")
    done = launched(job_of(tmp_path, line, typed), "dp1 mb8", tmp_path, **env)
    assert (done.returncode, done.stdout) == (0, 'module\nmodule\n["--bs", "8", "--accum", "1"]\n')
    assert done.stderr == ""


@pytest.mark.parametrize("options", ["-I", "-S", "-E"])
def test_a_program_without_the_hook_does_not_pass_for_the_recommended_one(
    tmp_path: Path, options: str
) -> None:
    typed = ("train.py", "--bs", "4", "--accum", "2")
    line = f"python {options} train.py --bs 4 --accum 2"
    done = launched(job_of(tmp_path, line, typed), "dp1 mb8", tmp_path)
    assert done.returncode == 3
    assert "no rank took the settings" in done.stderr


def test_a_failing_command_keeps_its_exit_status(tmp_path: Path) -> None:
    job = job_of(tmp_path, f"python train.py {COMMAND} && exit 7")
    assert launched(job, "dp1 mb2", tmp_path).returncode == 7
    assert launched(job, "dp1 mb4", tmp_path).returncode == 7


def test_a_value_that_is_not_kept_is_a_variable_of_the_line(tmp_path: Path) -> None:
    job = job_of(tmp_path, f"TOKEN={{env:TOKEN}} python train.py {COMMAND} --key $TOKEN")
    assert launched(job, "dp1 mb4", tmp_path).returncode != 0
    done = launched(job, "dp1 mb4", tmp_path, TOKEN="secret")
    assert json.loads(done.stdout)[-2:] == ["--key", "secret"]
    assert "secret" not in (tmp_path / "files" / "launch.sh").read_text()
