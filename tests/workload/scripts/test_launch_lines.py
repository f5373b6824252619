"""Launch lines as people keep them: what is observed of each, with launchers that are stand-ins.

`small_torch` stands in for torch, so that a line takes half a second.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from tuner.search_spaces.errors import InputError
from tuner.workload.node.machine import detect_cluster
from tuner.workload.node.runner import LocalRunner
from tuner.workload.probe import ProbeRecord, ProbeRequest
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.observation import Observation
from tuner.workload.scripts.observing import observe_script, observed_job
from tuner.workload.scripts.script_job import ScriptJob

CLUSTER = replace(detect_cluster(), devices_per_node=2)
TRAIN = """\
#!/usr/bin/env python
import argparse, os, torch
parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=16)
own, rest = parser.parse_known_args()
if "WORLD_SIZE" in os.environ:
    torch.distributed.init_process_group()
model, optimizer = torch.nn.Module(), torch.optim.SGD()
for step in range(10**9):
    model(torch.Tensor(own.bs))
    torch.autograd.backward()
    optimizer.step()
"""
#: What the programs do with their arguments, and with the environment.
PROGRAMS = {
    "uv": 'shift; while [[ $1 == --* ]]; do shift 2; done; [[ $1 == -m ]] && set -- python "$@"\n'
    '[[ $1 == *.py ]] && set -- python "$@"; exec "$@"',
    "poetry": 'shift; exec "$@"',
    "pixi": 'shift; exec "$@"',
    "conda": "shift; while [[ $1 == -* ]]; do [[ $1 == -n ]] && shift; shift; done\n"
    'export CONDA_DEFAULT_ENV=env; exec "$@"',
    "sudo": 'while [[ $1 == -* ]]; do shift; done; exec "$@"',
    "apptainer": 'shift; while [[ $1 == -* ]]; do shift; done; shift; exec "$@"',
    "docker": 'shift; while [[ $1 == -* ]]; do shift; done; shift; exec env -i PATH="$PATH" "$@"',
    "nsys": 'shift 3; exec "$@"',
    "xvfb-run": 'shift; export DISPLAY=:99; exec "$@"',
    "nvidia-smi": "echo GPU 0; echo GPU 1",
    "torchrun": 'exec python -m torch.distributed.run "$@"',
    "accelerate": "shift; n=1; [[ $1 == --num_processes ]] && n=$2 && shift 2\n"
    '(( n == 1 )) && exec python "$@"; exec torchrun --nproc_per_node $n "$@"',
    "srun": "n=1; while [[ $1 == -* ]]; do\n"
    "case $1 in --ntasks*) n=${1#*=};; --export) shift;; -n) n=$2; shift;; esac; shift; done\n"
    "for ((i = 0; i < n; i++)); do\n"
    'SLURM_PROCID=$i SLURM_NTASKS=$n RANK=$i WORLD_SIZE=$n "$@" & done; wait',
    "mpirun": "n=$2; shift 2; for ((i = 0; i < n; i++)); do\n"
    'OMPI_COMM_WORLD_RANK=$i RANK=$i WORLD_SIZE=$n "$@" & done; wait',
    "deepspeed": "n=2; while [[ $1 == -* ]]; do case $1 in\n"
    '--num_gpus) n=$2;; --hostfile) n=$(sed -n "s/.*slots=//p" $2);; esac; shift 2; done\n'
    "script=$1; shift; for ((i = 0; i < n; i++)); do\n"
    'RANK=$i WORLD_SIZE=$n python -u $script --local_rank=$i "$@" & done; wait',
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        _write_program(programs / name, f"#!/bin/bash\n{text}\n")
    path = [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(path))
    monkeypatch.setenv("NGPU", "2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    folder = tmp_path / "my work"
    (folder / "src").mkdir(parents=True)
    (folder / "torch").symlink_to(Path(__file__).with_name("small_torch") / "torch")
    (folder / "src" / "torch").symlink_to(folder / "torch")
    for name in ("train.py", "ddp.py", "src/t.py"):
        _write_program(folder / name, TRAIN)
    _write_program(folder / "each.sh", '#!/bin/bash\nexec "$@"\n')
    (folder / "one-host").write_text("localhost slots=1\n")
    (folder / "activate").write_text("export VIRTUAL_ENV=env\n")
    monkeypatch.chdir(folder)
    return folder


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def observe(folder: Path, line: str, *, limit_s: float = 60.0) -> Observation:
    script = Script(line, cwd=folder)
    script.require_startable()
    runs = folder.parent / "run"
    with closing(LocalRunner(observed_job(script), CLUSTER, run_dir=runs)) as runner:

        def run(job: ScriptJob, request: ProbeRequest) -> ProbeRecord:
            limits = {"time_limit_s": limit_s, "first_step_limit_s": limit_s}
            return runner.run_of(job, replace(request, **limits))

        seen = observe_script(script, run, folder=runs, say=lambda sentence: None)
    assert seen is not None
    assert seen.script.observation is not None
    return seen.script.observation


ONE, TWO = ("train.py", "--bs", "8"), ("ddp.py", "--bs", "8")


@pytest.mark.parametrize(
    ("line", "ranks", "words"),
    [
        ("nohup torchrun --nproc_per_node 2 ddp.py --bs 8 > log 2>&1 &", 2, TWO),
        ("python train.py --bs 8 > log 2>&1 &", 1, ONE),
        ("setsid nohup python train.py --bs 8 > log 2>&1 < /dev/null & disown", 1, ONE),
        ("(sleep 0.4; python train.py --bs 8) > log & sleep 0.1", 1, ONE),
        ("python -u train.py --bs 8 2>&1 | tee log", 1, ONE),
        ("source ./activate; cd . && python train.py --bs 8", 1, ONE),
        ("uv run train.py --bs 8", 1, ONE),
        ("uv run --with accelerate accelerate launch train.py --bs 8", 1, ONE),
        ("uv run -m torch.distributed.run --nproc_per_node=2 ddp.py --bs 8", 2, TWO),
        ("conda run -n env --no-capture-output python train.py --bs 8", 1, ONE),
        ("poetry run python train.py --bs 8", 1, ONE),
        ("pixi run python train.py --bs 8", 1, ONE),
        ("time python train.py --bs 8", 1, ONE),
        ("numactl --cpunodebind=0 --membind=0 python train.py --bs 8", 1, ONE),
        ("stdbuf -oL nice -n 5 taskset -c 0 python train.py --bs 8", 1, ONE),
        ("sudo -E python train.py --bs 8", 1, ONE),
        ("env -u FOO python train.py --bs 8", 1, ONE),
        ("python -W ignore -X faulthandler -OO -s train.py --bs 8", 1, ONE),
        ("python -Wignore -m torch.distributed.launch --nproc_per_node 2 ddp.py --bs 8", 2, TWO),
        ("torchrun --nproc_per_node=$NGPU ddp.py --bs 8", 2, TWO),
        ("torchrun --nproc_per_node $(nvidia-smi -L | wc -l) ddp.py --bs 8", 2, TWO),
        ("torchrun --standalone --nnodes=1 --nproc_per_node=gpu ddp.py --bs 8", 2, TWO),
        ("torchrun --nproc_per_node 2 --no-python ./each.sh python ddp.py --bs 8", 2, TWO),
        ("accelerate launch --num_processes 2 ddp.py --bs 8", 2, TWO),
        ("apptainer exec --nv image.sif python train.py --bs 8", 1, ONE),
        ("nsys profile -o out python train.py --bs 8", 1, ONE),
        ("xvfb-run -a python train.py --bs 8", 1, ONE),
        ('python -c "import train"', 1, ("-c", "import train")),
        ("python - --bs 8 < train.py", 1, ("-", "--bs", "8")),
        ('srun -l --ntasks-per-node=2 bash -c "python ddp.py --bs 8"', 2, TWO),
        ("srun --ntasks=2 --export ALL,NCCL_DEBUG=INFO python ddp.py --bs 8", 2, TWO),
        ("mpirun -np 2 python ddp.py --bs 8", 2, TWO),
        (
            "deepspeed --hostfile one-host train.py --bs 8",
            1,
            ("train.py", "--local_rank={local_rank}", "--bs", "8"),
        ),
        ("python train.py --bs 8 # the first try", 1, ONE),
        ("./train.py --bs 8", 1, ("./train.py", "--bs", "8")),
        ("python 'train.py' --bs=8 \"--note=it's a; $HOME\"'$x'", 1, None),
        ("PYTHONPATH=.:$PYTHONPATH python train.py --bs 8", 1, ONE),
        ("PYTHONPATH=src python train.py --bs 8", 1, ONE),
        ("export PYTHONPATH='a b:src'; python train.py --bs 8", 1, ONE),
        ("python -m train --bs 8", 1, ("-m", "train", "--bs", "8")),
        ("cd src && python t.py --bs 8", 1, ("t.py", "--bs", "8")),
        ("python <<X\nimport sys; sys.argv += ['--bs', '8']; import train\nX", 1, ()),
        ("for bs in 8; do python train.py --bs $bs; done", 1, ONE),
        ("bash -c 'set -euo pipefail; trap : EXIT; exec python train.py --bs 8'", 1, ONE),
        ("python train.py --bs 8 --ü 数 \"$(printf 'a\\nb')\"", 1, (*ONE, "--ü", "数", "a\nb")),
    ],
)
def test_a_line_shows_the_ranks_that_it_starts(
    place: Path, line: str, ranks: int, words: tuple[str, ...] | None
) -> None:
    seen = observe(place, line)
    if words is None:
        words = ("train.py", "--bs=8", f"--note=it's a; {os.environ['HOME']}$x")
    assert (seen.ranks, seen.words) == (ranks, words)
    assert seen.folder == str(place / "src" if "cd src" in line else place)


def test_what_a_line_adds_to_python_path_belongs_to_its_ranks(place: Path) -> None:
    assert observe(place, "PYTHONPATH=src python train.py").variables == {"PYTHONPATH": "src"}


@pytest.mark.parametrize(
    ("line", "sentences"),
    [
        ("sleep 0.1", ["without an optimizer step, and no Python process"]),
        ("python -c 'import torch'", ["without an optimizer step, and torch was imported by"]),
        ("docker run --gpus=all image python train.py", ["(python train.py)", "was cleared"]),
        ("env -i PATH=$PATH python train.py", ["(python train.py)", "environment was cleared"]),
        ("python -sS train.py", ["(python -sS train.py)", "its option -sS keeps out"]),
        ("P=PYTHON; env ${P}PATH=src python train.py", ["PYTHONPATH is replaced"]),
        (
            "python -c 'import torch, time; time.sleep(99)'",
            ["out of time", "and torch was imported by -c"],
        ),
        ("sleep 87.5", ["out of time after 0 optimizer steps", "(sleep 87.5)"]),
        (
            "RANK=1 WORLD_SIZE=4 python ddp.py & sleep 0.5; python train.py",
            ["rank 0 of 1", "rank 1 of 4", "make no process group"],
        ),
        (
            "export WORLD_SIZE=4; RANK=0 python ddp.py & RANK=1 python ddp.py",
            ["2 of 4 ranks train on this machine", "--ray"],
        ),
    ],
)
def test_a_line_that_trains_nothing_to_be_seen_ends_in_a_sentence(
    place: Path, monkeypatch: pytest.MonkeyPatch, line: str, sentences: list[str]
) -> None:
    monkeypatch.setattr("tuner.workload.node.command_group.LEAST_PATIENCE_S", 1.5)
    with pytest.raises(InputError) as error:
        observe(place, line, limit_s=4.0)
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
        monkeypatch.setattr(f"tuner.workload.node.command_group.{limit}", 0.5)
    began = time.monotonic()
    with pytest.raises(InputError, match="without an optimizer step"):
        observe(place, "setsid bash -c 'sleep 397.5; :' &")
    assert time.monotonic() - began < 20
    assert not _running("397.5")


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
