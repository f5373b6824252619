"""launch.sh of commands that were read and not observed: as typed, by torchrun, or by srun."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.commands import finished
from tests.support.scripts import GPU as NODES
from tuner.deploy.launch_files import write_launch_files
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.knob_declarations import Knob
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.inspection import blank_job
from tuner.workload.scripts.script_facts import Launcher, ScriptFacts
from tuner.workload.scripts.script_job import ScriptJob

GPU = replace(NODES, nodes=1)
CONFIG = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
DEEPSPEED = ScriptFacts(
    "deepspeed", config=CONFIG, micro_batch=4, accumulation=1, follows=True, measured=True
)
TRAINER = ScriptFacts(
    "torch",
    "transformers",
    micro_batch=4,
    accumulation=1,
    measured=True,
    can_checkpoint=True,
    turns=("micro_batch", "gradient_accumulation"),
)
OTHER = Configuration.of(data_parallel=2, micro_batch=2)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launchers_here: None) -> Path:
    """A user's repository."""
    (tmp_path / "train.py").touch()
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


def job_of(command: str, folder: Path, frame: ScriptFacts) -> ScriptJob:
    blank = blank_job(Script(command, cwd=folder), GPU)
    return replace(blank, global_batch=16, steps=100, frame=frame)


def written(job: ScriptJob, to: Configuration, folder: Path) -> str:
    """Return launch.sh."""
    files = write_launch_files((to, job, GPU), folder / "best")
    assert all(path.exists() for path in files)
    return (folder / "best" / "launch.sh").read_text()


def started(text: str) -> str:
    """Return the command that launch.sh becomes."""
    (line,) = [line for line in text.splitlines() if line.startswith("exec ")]
    return line.removeprefix("exec ")


def by_torchrun(job: ScriptJob, folder: Path) -> tuple[list[str], str]:
    """Return the ranks' words below `OTHER`, and the whole launch.sh."""
    text = written(job, OTHER, folder)
    line = started(text)
    assert "-m torch.distributed.run" in line
    assert "--nproc-per-node=2" in line
    (line,) = [line for line in text.splitlines() if line.startswith("program=")]
    return shlex.split(line.removeprefix("program=(").removesuffix(")")), text


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc_per_node 4 --rdzv-backend c10d train.py --ds ds.json 'a b'",
        "python3 -m torch.distributed.run --nproc-per-node=4 -m train --ds ds.json",
        "deepspeed --num_gpus 4 train.py --deepspeed_config ds.json",
        "accelerate launch --multi_gpu --num_processes 4 train.py --ds ds.json",
        "srun -u --ntasks-per-node=4 python -u train.py --ds ds.json",
        "srun --nodes=1 torchrun --nproc-per-node 4 train.py --ds ds.json",
        "NCCL_ALGO=Ring torchrun --nproc-per-node 4 train.py --ds ds.json",
    ],
)
def test_the_command_is_started_as_typed(command: str, folder: Path) -> None:
    job = job_of(command, folder, DEEPSPEED)
    assert job.baseline.data_parallel == 4
    typed = command.removeprefix("NCCL_ALGO=Ring ")
    text = written(job, job.baseline, folder)
    assert typed in text.splitlines()
    assert "joulefront_hook" not in text
    other = written(job, Configuration.of(data_parallel=4, micro_batch=2), folder)
    assert typed in other.splitlines()
    assert ("export NCCL_ALGO=Ring" in other) is (typed != command)
    assert "joulefront_hook/entry" in other
    order = json.loads((folder / "best" / "attach.json").read_text())["options"]
    config = str((folder / "best" / "ds_config.json").resolve())
    assert tuple(order["words"]["typed"]) == job.words
    assert order["words"]["set"] == [config if w == "ds.json" else w for w in job.words]
    rendered = json.loads(Path(config).read_text())
    assert rendered["train_micro_batch_size_per_gpu"] == 2
    assert rendered["gradient_accumulation_steps"] == 2


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc_per_node 4 train.py --ds ds.json",
        "torchrun --nproc-per=4 train.py --ds ds.json",
        "deepspeed --include localhost:0,1,2,3 train.py --ds ds.json",
        "deepspeed train.py --ds ds.json",
        "srun --ntasks-per-node=1 torchrun --nproc-per-node 4 train.py --ds ds.json",
    ],
)
def test_another_number_of_ranks_is_torchruns(command: str, folder: Path) -> None:
    job = job_of(command, folder, DEEPSPEED)
    words, text = by_torchrun(job, folder)
    config = str((folder / "best" / "ds_config.json").resolve())
    own = [config if word == "ds.json" else word for word in job.words]
    hooked = command.startswith("deepspeed")  # which gives each rank its number as an argument
    assert words == [*words[: 2 * hooked], *own]
    assert ("joulefront_hook" in text) is hooked
    rendered = json.loads(Path(config).read_text())
    assert rendered["train_micro_batch_size_per_gpu"] == 2


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "srun -n4 -N1 python train.py X",
            "srun -n4 -N1 --nodes=1 --ntasks=2 --ntasks-per-node=2 python train.py X",
        ),
        (
            "srun -n 4 -m block --container-image=a+b python -u train.py X",
            "srun -n 4 -m block --container-image=a+b --nodes=1 --ntasks=2 --ntasks-per-node=2 "
            "python -u train.py X",
        ),
        (
            "srun -n 4 ./train.py X",
            f"srun -n 4 --nodes=1 --ntasks=2 --ntasks-per-node=2 {sys.executable} ./train.py X",
        ),
    ],
)
def test_another_number_of_sruns_tasks(command: str, expected: str, folder: Path) -> None:
    job = job_of(command.replace("X", "--ds ds.json"), folder, DEEPSPEED)
    text = written(job, OTHER, folder)
    config = str((folder / "best" / "ds_config.json").resolve())
    words = shlex.split(started(text))
    assert words == shlex.split(expected.replace("X", f"--ds {config}"))
    # Its own parser reads it as it was meant.
    again = Script(shlex.join(words), cwd=folder)
    assert again.launcher.processes == 2
    assert again.words == tuple(config if word == "ds.json" else word for word in job.words)
    batch = (folder / "best" / "job.sbatch").read_text()
    assert "#SBATCH --ntasks-per-node=2" in batch
    assert "exec ./clocks.sh ./launch.sh" in batch


def test_a_declared_variable_is_exported(folder: Path) -> None:
    knob = Knob("algo", ("Ring", "Tree"), how="env:NCCL_ALGO")
    command = "NCCL_ALGO=Ring torchrun --nproc-per-node 4 train.py --ds ds.json"
    script = Script(command, cwd=folder, knobs=(knob,))
    job = replace(blank_job(script, GPU), global_batch=16, frame=DEEPSPEED)
    other = Settings({**job.baseline.launch, "algo": "Tree"})
    text = written(job, Configuration(other), folder)
    assert "torchrun --nproc-per-node 4 train.py --ds ds.json" in text.splitlines()
    assert "NCCL_ALGO=Tree" in text
    assert "NCCL_ALGO=Ring" not in text
    assert "ROLE_RANK" not in text


def test_a_value_that_is_not_kept_stays_a_variable(folder: Path) -> None:
    job = job_of(
        "torchrun --nproc-per-node 4 train.py --api-key=abc123 --ds ds.json", folder, DEEPSPEED
    )
    text = written(job, job.baseline, folder)
    assert "abc123" not in text
    assert 'train.py --api-key="${ARG_API_KEY}"' in text


# ---- launchers with arguments of their own, whose changed command is torchrun's

FILE = """\
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
mixed_precision: 'bf16'
num_machines: 1
num_processes: 4
use_cpu: false
"""
SECTION = """\
deepspeed_config:
  zero_stage: 2
  gradient_accumulation_steps: 1
"""


def test_accelerates_variables_go_to_torchrun(folder: Path) -> None:
    (folder / "a.yaml").write_text(FILE.format(kind="DEEPSPEED") + SECTION)
    command = "NCCL_ALGO=Ring accelerate launch --config_file a.yaml train.py --x"
    frame = replace(DEEPSPEED, owner="accelerate", config={"zero_optimization": {"stage": 2}})
    job = job_of(command, folder, frame)
    words, text = by_torchrun(job, folder)
    assert words[1:] == ["run", "train.py", "--x"]
    assert "NCCL_ALGO=Ring" in text
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE=2" in text
    assert "ROLE_RANK" not in text
    assert "TORCHELASTIC" not in text
    assert "# torchrun starts what accelerate would" in text
    options = json.loads((folder / "best" / "options.json").read_text())
    assert options["deepspeed"]["zero_optimization"]["stage"] == 0


@pytest.mark.parametrize(
    ("command", "module", "micro_batch"),
    [
        (
            "NPROC_PER_NODE=4 llamafactory-cli train f.yaml",
            "llamafactory.launcher",
            "per_device_train_batch_size",
        ),
        (
            "axolotl train f.yaml -- --multi_gpu --num_processes 4",
            "axolotl.cli.train",
            "micro_batch_size",
        ),
    ],
)
def test_the_modules_of_trainers_read_a_changed_file(
    command: str, module: str, micro_batch: str, folder: Path
) -> None:
    (folder / "f.yaml").write_text(f"{micro_batch}: 4  # fits\ngradient_accumulation_steps: 1\n")
    job = job_of(command, folder, TRAINER)
    assert command.removeprefix("NPROC_PER_NODE=4 ") in written(job, job.baseline, folder)
    words, _ = by_torchrun(job, folder)
    file = (folder / "best" / "f.yaml").resolve()
    assert words == ["-m", module, str(file)]
    assert file.read_text().startswith(
        f"{micro_batch}: 2  # fits\ngradient_accumulation_steps: 4\n"
    )


def test_trls_script_is_started_under_the_hook(folder: Path) -> None:
    """As `trl sft` is read where TRL is installed (tests/workload/scripts/launchers)."""
    command = "trl sft --config sft.yaml --num_processes 4"
    launcher = Launcher("trl", ("trl",), tuple(command.split()[1:]), 4, {"A": "b"})
    job = replace(job_of("train.py --config sft.yaml", folder, TRAINER), launcher=launcher)
    job = replace(job, devices=4)
    assert command in written(job, job.baseline, folder).splitlines()
    words, text = by_torchrun(job, folder)
    assert words[1:] == ["run", "train.py", "--config", "sft.yaml"]
    assert "A=b" in text


# ---- the hook


@pytest.mark.parametrize(
    "command", ["torchrun --nproc-per-node 4 -m train", "deepspeed --num_gpus 4 train.py"]
)
def test_the_hook_stands_before_the_script(command: str, folder: Path) -> None:
    job = job_of(command, folder, TRAINER)
    words, text = by_torchrun(job, folder)
    # The script gets the rank as it did from its launcher, from the hook.
    hook = str((folder / "best" / "joulefront_hook" / "__main__.py").resolve())
    assert words == [hook, "run", *job.words]
    options = json.loads((folder / "best" / "options.json").read_text())
    assert options["owned"] == {"micro_batch": 2, "gradient_accumulation": 4}
    assert "JOULEFRONT_OPTIONS=" in text


@pytest.mark.slow  # imports torch and DeepSpeed
def test_the_hook_takes_sruns_numbers(folder: Path) -> None:
    (folder / "train.py").write_text("import sys; print('ARGUMENTS', *sys.argv[1:])\n")
    job = job_of("srun -n 4 python train.py {rank}/{world_size}", folder, TRAINER)
    words = shlex.split(started(written(job, OTHER, folder)))
    clean = {name: text for name, text in os.environ.items() if not name.endswith("RANK")}
    task = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2"}
    options = {"JOULEFRONT_OPTIONS": str(folder / "best" / "options.json")}
    done = finished(
        [sys.executable, *words[words.index("python") + 1 :]],
        env={**clean, **task, **options},
        cwd=folder,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ARGUMENTS 1/2" in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint a:29400 train.py --ds ds.json",
        "srun -N2 -n 16 --ntasks-per-node=8 python train.py --ds ds.json",
        "srun -N2 --ntasks-per-node=1 torchrun --nnodes 2 --nproc-per-node 8 train.py --ds ds.json",
        "deepspeed --hostfile h.txt train.py --ds ds.json",
    ],
)
def test_a_command_of_two_nodes(command: str, folder: Path) -> None:
    (folder / "h.txt").write_text("a slots=8\nb slots=8\n")
    cluster = NODES
    blank = blank_job(Script(command, cwd=folder), cluster, nodes=2)
    job = replace(blank, global_batch=64, steps=100, frame=DEEPSPEED)

    def again(**changed: int) -> tuple[str, str]:
        to = Configuration(Settings({**job.baseline.launch, **changed}))
        write_launch_files((to, job, cluster), folder / "best")
        return (folder / "best" / "launch.sh").read_text(), (
            folder / "best" / "job.sbatch"
        ).read_text()

    itself = command.startswith(("srun", "deepspeed"))
    for micro_batch in (4, 2):
        text, batch = again(micro_batch=micro_batch)
        assert command in text.splitlines()
        assert ("# Start it on each of its nodes" in text) is not itself
        assert "#SBATCH --nodes=2" in batch
        assert ("exec ./clocks.sh" in batch) is itself
    text, batch = again(data_parallel=4)
    assert "#SBATCH --nodes=1" in batch
    if "python" in command:
        assert "--nodes=1 --ntasks=4 --ntasks-per-node=4 python" in started(text)
    else:
        assert "--nnodes=1" in started(text)
        assert "--nproc-per-node=4" in started(text)
        assert "exec srun" in batch  # on the node, as any launch.sh
