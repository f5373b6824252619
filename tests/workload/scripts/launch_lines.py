"""Launch lines as people keep them, and what is to be observed of each.

The launchers are stand-ins, and so is torch (`tests/workload/scripts/small_torch`), so that a line
takes half a second. Ranks and words of each line were written by hand.
"""

from __future__ import annotations

import os
import shlex
import stat
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from benchmarks.figures import ROOT
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import ProbeRecord, ProbeRequest
from tuner.workload.scripts.command import Observation, Script
from tuner.workload.scripts.observing import job_to_observe, observe_script
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
    "numactl": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
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

ONE, TWO = ("train.py", "--bs", "8"), ("ddp.py", "--bs", "8")
NOTED = "--note=it's a; {home}$x"
#: Commands that run the words behind them, all in one line: each must be passed through.
PREFIXES = (
    "time ionice -c 3 numactl --cpunodebind=0 --membind=0 stdbuf -oL nice -n 5 taskset -c 0 "
    "env -u FOO timeout 1h sudo -E xvfb-run -a nsys profile -o out apptainer exec --nv image.sif "
    "poetry run pixi run conda run -n env --no-capture-output"
)
#: Blocks of the shell around a command, likewise.
BLOCKS = (
    "test -f train.py && { while true; do for bs in 8; do python -u train.py --bs $bs; done; "
    "break; done; } 2> errors |& tee log || echo failed # the first try"
)
#: Lines that train, with the number of ranks and the words of the script, {home} for the home.
LINES: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("nohup torchrun --nproc_per_node 2 ddp.py --bs 8 > log 2>&1 &", 2, TWO),
    ("python train.py --bs 8 > log 2>&1 &", 1, ONE),
    ("setsid nohup python train.py --bs 8 > log 2>&1 < /dev/null & disown", 1, ONE),
    ("setsid bash -c 'python train.py --bs 8 &'", 1, ONE),
    ("stty -echo; python train.py --bs 8; stty echo", 1, ONE),
    ("script -qec 'python train.py --bs 8' /dev/null", 1, ONE),
    ("(sleep 0.4; python train.py --bs 8) > log & sleep 0.1", 1, ONE),
    ("source ./activate; cd . && python train.py --bs 8", 1, ONE),
    ("uv run --with accelerate accelerate launch train.py --bs 8", 1, ONE),
    ("uv run -m torch.distributed.run --nproc_per_node=2 ddp.py --bs 8", 2, TWO),
    (f"{PREFIXES} python train.py --bs 8", 1, ONE),
    (BLOCKS, 1, ONE),
    ("python -W ignore -X faulthandler -OO -s train.py --bs 8", 1, ONE),
    ("python -Wignore -m torch.distributed.launch --nproc_per_node 2 ddp.py --bs 8", 2, TWO),
    ("torchrun --nproc_per_node $(nvidia-smi -L | wc -l) ddp.py --bs 8", 2, TWO),
    ("torchrun --standalone --nnodes=1 --nproc_per_node=gpu ddp.py --bs 8", 2, TWO),
    ("torchrun --nproc_per_node 2 --no-python ./each.sh python ddp.py --bs 8", 2, TWO),
    ("accelerate launch --num_processes 2 ddp.py --bs 8", 2, TWO),
    ('python -c "import train"', 1, ("-c", "import train")),
    ("python - --bs 8 < train.py", 1, ("-", "--bs", "8")),
    (
        'srun -l --export ALL,NCCL_DEBUG=INFO --ntasks-per-node=2 bash -c "python ddp.py --bs 8"',
        2,
        TWO,
    ),
    ("mpirun -np 2 python ddp.py --bs 8", 2, TWO),
    (
        "deepspeed --hostfile one-host train.py --bs 8",
        1,
        ("train.py", "--local_rank={local_rank}", "--bs", "8"),
    ),
    ("bash -lc 'python train.py --bs 8'", 1, ONE),
    ("env OMP_NUM_THREADS=1 torchrun --nproc_per_node=$NGPU ddp.py --bs 8", 2, TWO),
    ("torchrun --nproc_per_node 2 -m ddp --bs 8", 2, ("-m", "ddp", "--bs", "8")),
    ("./train.py --bs 8", 1, ("./train.py", "--bs", "8")),
    ("python 'train.py' --bs=8 \"--note=it's a; $HOME\"'$x'", 1, ("train.py", "--bs=8", NOTED)),
    ("PYTHONPATH=.:$PYTHONPATH python train.py --bs 8", 1, ONE),
    ("export PYTHONPATH='a b:src'; python train.py --bs 8", 1, ONE),
    ("unset PYTHONPATH; python train.py --bs 8", 1, ONE),
    ("python -m train --bs 8", 1, ("-m", "train", "--bs", "8")),
    ("cd src && python t.py --bs 8", 1, ("t.py", "--bs", "8")),
    ("python <<X\nimport sys; sys.argv += ['--bs', '8']; import train\nX", 1, ()),
    ("bash -c 'set -euo pipefail; trap : EXIT; exec python train.py --bs 8'", 1, ONE),
    ("python train.py --bs 8 --ü 数 \"$(printf 'a\\nb')\"", 1, (*ONE, "--ü", "数", "a\nb")),
)
#: Lines of which no rank can be observed, and parts of the sentence that must say so.
REFUSED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("sleep 0.1", ("without an optimizer step, and no Python process",)),
    ("python -c 'import torch'", ("without an optimizer step, and torch was imported by",)),
    ("docker run --gpus=all image python train.py", ("(python train.py)", "was cleared")),
    ("env -i PATH=$PATH python train.py", ("(python train.py)", "environment was cleared")),
    ("python -sS train.py", ("(python -sS train.py)", "its option -sS keeps out")),
    ("P=PYTHON; env ${P}PATH=src python train.py", ("PYTHONPATH is replaced",)),
    (
        "python -c 'import torch, time; time.sleep(99)'",
        ("out of time", "and torch was imported by -c"),
    ),
    ("sleep 87.5", ("out of time after 0 optimizer steps", "(sleep 87.5)")),
    (
        "RANK=1 WORLD_SIZE=4 python ddp.py & sleep 0.5; python train.py",
        ("rank 0 of 1", "rank 1 of 4", "make no process group"),
    ),
    (
        "export WORLD_SIZE=4; RANK=0 python ddp.py & RANK=1 python ddp.py",
        ("2 of 4 ranks train on this machine", "--ray"),
    ),
)


def write_program(path: Path, text: str) -> None:
    """Write an executable file."""
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def make_place(where: Path) -> tuple[Path, dict[str, str]]:
    """Return the folder in which the lines start, with their programs, and their variables."""
    programs = where / "programs"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        write_program(programs / name, f"#!/bin/bash\n{text}\n")
    folder = where / "my work"
    (folder / "src").mkdir(parents=True)
    (folder / "torch").symlink_to(ROOT / "tests/workload/scripts/small_torch/torch")
    (folder / "src" / "torch").symlink_to(folder / "torch")
    for name in ("train.py", "ddp.py", "src/t.py"):
        write_program(folder / name, TRAIN)
    write_program(folder / "each.sh", '#!/bin/bash\nexec "$@"\n')
    (folder / "one-host").write_text("localhost slots=1\n")
    (folder / "activate").write_text("export VIRTUAL_ENV=env\n")
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    # A login shell begins with the system's PATH, and a user's profile adds his own.
    (where / ".bash_profile").write_text(f"export PATH={shlex.quote(path)}\n")
    return folder, {"PATH": path, "HOME": str(where), "NGPU": "2"}


def observe(folder: Path, line: str, *, limit_s: float = 60.0) -> Observation:
    """Return what is observed of a line that starts in a folder.

    Raises:
        InputError: no rank can be observed.
    """
    script = Script(line, cwd=folder)
    script.require_startable()
    runs = folder.parent / "run"
    with closing(LocalRunner(job_to_observe(script), CLUSTER, run_dir=runs)) as runner:

        def run(job: ScriptJob, request: ProbeRequest) -> ProbeRecord:
            limits = {"time_limit_s": limit_s, "first_step_limit_s": limit_s}
            return runner.run_for_job(job, replace(request, **limits))

        seen = observe_script(script, run, folder=runs, announce=lambda sentence: None)
    assert seen is not None
    assert seen.script.observation is not None
    return seen.script.observation


def folder_of(line: str, folder: Path) -> str:
    """Return the folder in which the ranks of a line work."""
    return str(folder / "src" if "cd src" in line else folder)
