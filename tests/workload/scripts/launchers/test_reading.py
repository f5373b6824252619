"""Pasted commands, read by the real parsers of torch, DeepSpeed and Accelerate."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scripts.environment import Unavailable, make_environment
from tests.support.launchers import answer_here
from tests.support.scripts import CPU
from tests.support.scripts import GPU as TWO_NODES
from tuner.cli.main import main
from tuner.search_spaces.errors import InputError
from tuner.workload.scripts import launchers
from tuner.workload.scripts.command import Script, read_command
from tuner.workload.scripts.inspection import blank_job
from tuner.workload.scripts.launchers import vendor
from tuner.workload.scripts.script_facts import Launcher
from tuner.workload.scripts.script_job import ScriptJob

GPU = replace(TWO_NODES, nodes=1)
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU  # eight of them
mixed_precision: bf16
num_machines: 1
num_processes: 4
"""
ZERO = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 2
  offload_optimizer_device: cpu
mixed_precision: bf16
num_machines: 1
num_processes: 4
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A folder with a script, outside any Slurm allocation and with no threads set."""
    (tmp_path / "train.py").touch()
    (tmp_path / "a.yaml").write_text(ACCELERATE)
    (tmp_path / "zero.yaml").write_text(ZERO)
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # where accelerate's default file would be
    for name in ("OMP_NUM_THREADS", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    if "bogus" not in request.node.name:  # that one asks an interpreter of its own
        monkeypatch.setattr(launchers, "_reply", answer_here)
    return tmp_path


def read(command: str, folder: Path) -> tuple[tuple[str, ...], Launcher]:
    script = Script(command, cwd=folder)
    assert script.launcher is not None
    return script.words, script.launcher


# ---- torchrun


@pytest.mark.parametrize(
    ("arguments", "processes", "script"),
    [
        ("--nproc_per_node 8 train.py --lr 1", 8, ["train.py", "--lr", "1"]),
        ("--nproc-per-node=auto --standalone train.py", 0, ["train.py"]),
        (
            "--nproc-per 2 --nnodes 1:1 --rdzv-backend c10d -m pkg.train x",
            2,
            ["-m", "pkg.train", "x"],
        ),
        ("train.py --nproc_per_node 3", 1, ["train.py", "--nproc_per_node", "3"]),
    ],
)
def test_torchrun(arguments: str, processes: int, script: list[str]) -> None:
    answer = vendor.torchrun(arguments.split())
    assert (answer["processes"], answer["script"]) == (processes, script)
    # As torchrun does: one thread a rank if there are several and the user set none.
    assert answer["env"].get("OMP_NUM_THREADS") == (None if processes == 1 else "1")
    assert answer["env"]["ROLE_WORLD_SIZE"] == "{world_size}"


def test_the_deprecated_launcher_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="write torchrun in its place"):
        read("python -m torch.distributed.launch --nproc-per-node 2 train.py", folder)


def test_a_pasted_torchrun_becomes_the_job(folder: Path) -> None:
    words, launcher = read("FOO=1 torchrun --nproc-per-node 4 train.py --x {micro_batch=4}", folder)
    assert words == ("train.py", "--x", "{micro_batch=4}")
    assert launcher.words == ("torchrun", "--nproc-per-node", "4")
    assert launcher.env["FOO"] == "1"
    command = "FOO=1 python3 -m torch.distributed.run --nproc-per-node 4 train.py"
    script = Script(command, cwd=folder)
    job = blank_job(script, GPU)
    assert (job.devices, job.baseline.data_parallel) == (4, 4)  # not all eight
    start = job.start(job.baseline, folder / "probe")
    assert start.environment(5, 8, 1)["ROLE_RANK"] == "5"
    assert start.environment(5, 8, 1)["FOO"] == "1"
    again = ScriptJob.from_json(json.loads(json.dumps(job.to_json())))
    assert again == job
    assert again.launcher == job.launcher
    assert again.launcher is not None
    assert again.launcher.env == script.launcher.env
    with pytest.raises(InputError, match="torchrun would start 4 processes, and this node has 2"):
        blank_job(script, CPU)
    with pytest.raises(InputError, match="nodes is 2, and torchrun starts on 1"):
        blank_job(script, GPU, nodes=2)


def test_a_core_keeps_to_one_thread(folder: Path) -> None:
    job = blank_job(Script("torchrun --nproc-per-node 2 train.py", cwd=folder), CPU)
    assert "OMP_NUM_THREADS" not in job.start(job.baseline, folder / "probe").env


def test_a_job_without_a_launcher_is_written_as_before(folder: Path) -> None:
    job = blank_job(Script("train.py", cwd=folder), CPU)
    assert "launcher" not in job.to_json()
    assert ScriptJob.from_json(job.to_json()) == job


# ---- deepspeed


@pytest.mark.parametrize(
    ("arguments", "processes", "script"),
    [
        ("--num_gpus 4 train.py --deepspeed", 4, ["--local_rank={local_rank}", "--deepspeed"]),
        ("--num_gpus=2 --no_local_rank train.py", 2, []),
        ("train.py", 0, ["--local_rank={local_rank}"]),
        ("--include localhost:0,1,2 train.py", 3, ["--local_rank={local_rank}"]),
        ("--include localhost train.py", 0, ["--local_rank={local_rank}"]),
    ],
)
def test_deepspeed(arguments: str, processes: int, script: list[str]) -> None:
    answer = vendor.deepspeed(["--hostfile=/dev/null", *arguments.split()])
    assert (answer["processes"], answer["script"]) == (processes, ["train.py", *script])


def test_deepspeed_starts_a_module() -> None:
    answer = vendor.deepspeed(["--module", "--num_gpus", "1", "pkg.train", "x"])
    assert answer["script"] == ["-m", "pkg.train", "--local_rank={local_rank}", "x"]
    cores = ["--bind_cores_to_rank", "--bind_core_list", "0-3,8"]
    assert vendor.deepspeed([*cores, "t.py"])["binding"] == "cores:0-3,8"
    assert vendor.deepspeed([*cores[:1], "t.py"])["binding"] == "cores:"
    assert vendor.torchrun(["--numa-binding", "node", "t.py"])["binding"] == "numa:node"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--include localhost:2,3 train.py", "CUDA_VISIBLE_DEVICES"),
        ("--include a@b train.py", "several nodes"),
        ("--exclude localhost:0 train.py", "CUDA_VISIBLE_DEVICES"),
        ("--autotuning run train.py", "search of its own"),
        ("--no_python train.sh", "another program"),
    ],
)
def test_deepspeed_options_that_would_falsify_the_figures(arguments: str, sentence: str) -> None:
    with pytest.raises(vendor.Refused, match=sentence):
        vendor.deepspeed(arguments.split())


def test_a_hostfile_of_two_nodes(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=4\nb slots=4\n")
    both = vendor.deepspeed(["--hostfile", str(hosts), "train.py"])
    assert (both["nodes"], both["processes"], both["env"]["CROSS_SIZE"]) == (2, 4, "2")
    one = vendor.deepspeed(["--hostfile", str(hosts), "--num_nodes", "1", "train.py"])
    assert one["nodes"] == 1
    hosts.write_text("a slots=4\nb slots=2\n")
    with pytest.raises(vendor.Refused, match="different numbers of slots"):
        vendor.deepspeed(["--hostfile", str(hosts), "train.py"])


# ---- accelerate


def test_accelerate_with_its_file(folder: Path) -> None:
    words, launcher = read("accelerate launch --config_file a.yaml train.py --x 1", folder)
    assert words == ("train.py", "--x", "1")
    assert (launcher.kind, launcher.processes) == ("accelerate", 4)
    assert launcher.env["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert launcher.env["OMP_NUM_THREADS"] == "1"


def test_accelerate_with_deepspeed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    arguments = ["--config_file", "zero.yaml", "--num_processes", "2", "train.py"]
    answer = vendor.accelerate(arguments)
    assert answer["processes"] == 2  # the option goes before the file
    env = answer["env"]
    assert env["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert env["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"
    assert env["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == "cpu"
    assert (
        env["ACCELERATE_CONFIG_DS_FIELDS"] == "zero_stage,offload_optimizer_device,mixed_precision"
    )


def test_accelerate_with_fsdp2_and_parallelism() -> None:
    answer = vendor.accelerate(
        shlex.split(
            "--use_fsdp --fsdp_version 2 --num_processes 4 --fsdp_reshard_after_forward true "
            "--use_parallelism_config --parallelism_config_tp_size 2 train.py"
        )
    )
    env = answer["env"]
    assert (env["FSDP_VERSION"], env["PARALLELISM_CONFIG_TP_SIZE"]) == ("2", "2")
    assert answer["processes"] == 4


def test_accelerate_without_several_gpus_starts_one_process() -> None:
    answer = vendor.accelerate(["--cpu", "--num_processes", "2", "train.py"])
    assert answer["processes"] == 1
    assert "accelerate starts 1 process" in answer["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--multi_gpu --num_processes 15 --num_machines 2 train.py", "not a multiple of the 2"),
        ("--multi_gpu --num_processes 2 --gpu_ids 2,3 train.py", "CUDA_VISIBLE_DEVICES"),
        ("--no_python --num_processes 1 train.sh", "another program"),
    ],
)
def test_accelerate_options_that_would_falsify_the_figures(arguments: str, sentence: str) -> None:
    with pytest.raises(vendor.Refused, match=sentence):
        vendor.accelerate(arguments.split())


# ---- srun


@pytest.mark.parametrize(
    ("command", "processes", "script"),
    [
        ("srun -n 4 --gpus-per-node=4 python train.py --n 3", 4, ("train.py", "--n", "3")),
        ("srun -N1 --ntasks-per-node 4 -p gpu -u python -u train.py", 4, ("train.py",)),
        ("srun -lu --exclusive --nodes=1 -n2 --cpu-bind=none python -m pkg", 2, ("-m", "pkg")),
        ("srun --exclusive python train.py", 1, ("train.py",)),
        ("srun -N 1 env A=b python train.py", 1, ("train.py",)),
        # srun starts one task, which starts the ranks.
        ("srun -N 1 --ntasks-per-node=1 torchrun --nproc-per-node 4 train.py", 4, ("train.py",)),
    ],
)
def test_srun(command: str, processes: int, script: tuple[str, ...], folder: Path) -> None:
    words, launcher = read(command, folder)
    assert (words, launcher.processes) == (script, processes)
    typed = tuple(command.replace("A=b", "A={env:A}").split())
    assert launcher.words + launcher.script == typed


def test_a_task_of_srun_knows_its_number(folder: Path) -> None:
    job = blank_job(Script("srun -n 2 python train.py", cwd=folder), GPU)
    env = job.start(job.baseline, folder / "probe").environment(1, 2, 1)
    assert (env["SLURM_PROCID"], env["SLURM_LOCALID"], env["SLURM_NTASKS"]) == ("1", "1", "2")


def test_ranks_of_a_launcher_are_told_of_the_task_that_is_their_launcher(folder: Path) -> None:
    """Scripts under `srun torchrun` name files by SLURM_PROCID, the number of the node."""
    command = "srun -N2 --ntasks-per-node=1 torchrun --nnodes 2 --nproc-per-node 4 train.py"
    job = blank_job(Script(command, cwd=folder), replace(GPU, devices_per_node=4), nodes=2)
    env = job.start(job.baseline, folder / "probe").environment(5, 8, 1, 1)
    told = {name: env[f"SLURM_{name}"] for name in ("PROCID", "LOCALID", "NODEID", "NTASKS")}
    assert told == {"PROCID": "1", "LOCALID": "0", "NODEID": "1", "NTASKS": "2"}


def test_what_srun_sets_for_its_tasks(folder: Path) -> None:
    command = "srun -n 2 -c 6 --export=ALL,A=b --cpu-bind=cores python train.py"
    launcher = read(command, folder)[1]
    assert (launcher.env["A"], launcher.env["SLURM_CPUS_PER_TASK"]) == ("{env:A}", "6")
    assert launcher.notes == ("srun --cpu-bind is not applied in probes",)
    (note,) = read("srun --export=A=b,HOME torchrun train.py", folder)[1].notes
    assert "keep the whole environment" in note


def test_srun_in_an_allocation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NNODES", "1")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    assert read("srun python train.py", folder)[1].processes == 4
    monkeypatch.setenv("SLURM_NNODES", "2")
    launcher = read("srun python train.py", folder)[1]
    assert (launcher.nodes, launcher.processes) == (2, 4)


# ---- several nodes

HOSTS = "h.txt"
TWO_NODES = [
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint a:29400 train.py",
    "torchrun --nnodes=2 --node_rank 0 --master_addr a --nproc_per_node 8 train.py",
    "accelerate launch --multi_gpu --num_machines 2 --num_processes 16 --machine_rank 0 "
    "--main_process_ip a --main_process_port 29500 train.py",
    f"deepspeed --hostfile {HOSTS} train.py",
    "srun -N2 --ntasks-per-node=8 python train.py",
    "srun --nodes=2 -n 16 python train.py",
    "srun -n 16 --ntasks-per-node=8 python train.py",
    "srun -N2 --ntasks-per-node=1 torchrun --nnodes 2 --nproc-per-node 8 train.py",
]


@pytest.mark.parametrize("command", TWO_NODES)
def test_a_launcher_of_two_nodes(command: str, folder: Path) -> None:
    (folder / HOSTS).write_text("a slots=8\nb slots=8\n")
    script = Script(command, cwd=folder)
    assert script.launcher is not None
    assert (script.launcher.nodes, script.launcher.processes) == (2, 8)
    job = blank_job(script, GPU, nodes=2)
    assert (job.devices, job.baseline.data_parallel) == (16, 16)
    assert ScriptJob.from_json(json.loads(json.dumps(job.to_json()))) == job
    env = job.start(job.baseline, folder / "probe").environment(9, 16, 1, 1)
    ranks = {"GROUP_RANK", "CROSS_RANK", "SLURM_NODEID"} & set(env)
    assert ranks
    assert {env[name] for name in ranks} == {"1"}
    with pytest.raises(InputError, match=f"--ray ADDRESS -- {command[:12]}"):
        blank_job(script, GPU)
    with pytest.raises(InputError, match=r"nodes is 3, and .* starts on 2"):
        blank_job(script, GPU, nodes=3)


def test_each_node_has_a_rank_on_every_device(folder: Path) -> None:
    script = Script("torchrun --nnodes 2 --nproc-per-node 4 train.py", cwd=folder)
    with pytest.raises(InputError, match="4 of 8 possible processes on each of 2 nodes"):
        blank_job(script, GPU, nodes=2)


def test_an_elastic_number_of_nodes_is_told(folder: Path) -> None:
    launcher = read("torchrun --nnodes 1:4 --nproc-per-node 8 train.py", folder)[1]
    assert launcher.nodes == 4
    assert launcher.notes == ("torchrun: --nnodes 1:4 may shrink, and probes take 4 nodes",)


# ---- LLaMA-Factory and Axolotl


def test_llamafactory(folder: Path) -> None:
    words, launcher = read("llamafactory-cli train a.yaml learning_rate=1e-4", folder)
    assert words == ("-m", "llamafactory.launcher", "a.yaml", "learning_rate=1e-4")
    assert launcher.processes == 0
    assert launcher.env["TORCH_NCCL_AVOID_RECORD_STREAMS"] == "1"
    assert read("NPROC_PER_NODE=2 llamafactory-cli train a.yaml", folder)[1].processes == 2


def test_the_second_schema_of_llamafactory_has_a_launcher_of_its_own(folder: Path) -> None:
    words, launcher = read("USE_V1=1 llamafactory-cli sft a.yaml", folder)
    assert words == ("-m", "llamafactory.v1.launcher", "a.yaml")
    assert launcher.kind == "llamafactory"


@pytest.mark.parametrize(
    ("command", "processes", "script"),
    [
        (
            "tune run --nproc_per_node 4 lora_finetune_distributed --config a.yaml batch_size=2",
            4,
            ("-m", "recipes.lora_finetune_distributed", "--config", "a.yaml", "batch_size=2"),
        ),
        (
            "tune run --standalone --nproc_per_node=2 train.py --config a.yaml",
            2,
            ("train.py", "--config", "a.yaml"),
        ),
        (
            "tune run full_finetune_single_device --config a.yaml",
            1,
            ("-m", "recipes.full_finetune_single_device", "--config", "a.yaml"),
        ),
        ("swift sft --model m", 1, ("-m", "swift.cli.sft", "--model", "m")),
        ("NPROC_PER_NODE=8 swift sft --model m", 8, ("-m", "swift.cli.sft", "--model", "m")),
    ],
)
def test_torchtune_and_swift(
    command: str, processes: int, script: tuple[str, ...], folder: Path
) -> None:
    words, launcher = read(command, folder)
    assert (words, launcher.processes) == (script, processes)
    assert launcher.kind in ("torchtune", "swift")
    typed = command.removeprefix("NPROC_PER_NODE=8 ")
    assert " ".join((*launcher.words, *launcher.script)) == typed


def test_axolotl(folder: Path) -> None:
    command = "axolotl train a.yaml --debug -- --multi_gpu --num_processes 2"
    words, launcher = read(command, folder)
    assert words == ("-m", "axolotl.cli.train", "a.yaml", "--debug")
    assert (launcher.kind, launcher.processes) == ("axolotl", 2)
    assert " ".join((*launcher.words, *launcher.script)) == command


# ---- what is refused


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("torchrun --bogus train.py", "torchrun: unrecognized arguments: --bogus"),
        ("torchrun --no-python train.sh", "another program than Python's"),
        ("torchrun --nproc-per-node 2 nowhere.py", "no script 'nowhere.py'"),
        ("accelerate launch --config_file nofile.yaml train.py", "nofile.yaml` does not exist"),
        ("accelerate config", "only `accelerate launch` trains"),
        ("mpirun -n 2 python train.py", "mpirun starts ranks itself"),
        ("srun", "followed by a command"),
        ("srun --nodes=2 -n 5 python train.py", "5 tasks over 2 nodes"),
        ("srun -N2 torchrun --nproc-per-node 2 train.py", "2 nodes and torchrun asks for 1"),
        ("srun -n x python train.py", "not a number of tasks"),
        ("srun -n 2 --gpus-per-task=1 python train.py", "its own GPU alone"),
        ("srun -n 2 --gpu-bind=closest python train.py", "its own GPU alone"),
        ("srun ./run.sh", "paste the command"),
        (
            "srun --ntasks-per-node=2 torchrun --nproc-per-node 2 train.py",
            "give --ntasks-per-node=1",
        ),
        ("CUDA_VISIBLE_DEVICES=1 python train.py", "goes before tuner"),
        ("env -i python train.py", "env -i is not read"),
        ("axolotl train a.yaml --launcher torchrun", "write what it starts, e.g. torchrun"),
        ("axolotl preprocess a.yaml", "only `axolotl train` trains"),
        ("llamafactory-cli chat a.yaml", "only `llamafactory-cli train` trains"),
        ("llamafactory-cli dpo a.yaml", "only `llamafactory-cli train` trains"),
        ("tune cp full x", "only `tune run` trains"),
        ("tune run --nnodes 1", "followed by a recipe"),
        ("swift rlhf --rlhf_type dpo", "only `swift sft` trains"),
    ],
)
def test_what_cannot_be_honoured_is_one_sentence(command: str, sentence: str, folder: Path) -> None:
    with pytest.raises(InputError, match=sentence) as raised:
        _ = Script(command, cwd=folder).words
    assert "\n" not in str(raised.value)


def test_the_command_after_two_dashes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    runs = ["--runs-dir", str(folder / "runs")]
    given = ["--", "torchrun", "--nproc-per-node", "100000", "train.py", "--x", "a b"]
    assert main(["dev", "probe", *runs, *given]) == 2
    assert "torchrun would start 100000 processes" in capsys.readouterr().err
    assert main(["dev", "probe", "--script", "train.py", *runs, *given]) == 2
    assert "after -- or by --script" in capsys.readouterr().err
    assert main(["optimize", "tiny-gpt", *runs, *given]) == 2
    assert "either the job" in capsys.readouterr().err
    assert main(["optimize", "--dry-run", *runs, *given]) == 0
    assert "torchrun --nproc-per-node 100000 train.py --x 'a b'" in capsys.readouterr().out
    assert main(["optimize", "--dry-run", *runs, "--", "torchrun", "--nnodes=2", "train.py"]) == 2
    said = capsys.readouterr().err
    assert "tuner optimize --ray ADDRESS -- torchrun --nnodes=2 train.py" in said


# ---- TRL, in an environment of its own


@pytest.fixture
def with_trl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter that has TRL beside the project's packages."""
    try:
        return make_environment(tmp_path_factory.mktemp("trl") / "environment", ["trl==1.16.0"], [])
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.long
def test_trl(folder: Path, with_trl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # read in an interpreter of its own
    monkeypatch.setattr(sys, "executable", str(with_trl))
    (folder / "sft.yaml").write_text(
        "model_name_or_path: m\ndataset_name: d\nper_device_train_batch_size: 4\nuse_cpu: true\n"
    )
    command = "trl sft --config sft.yaml --accelerate_config zero2 --num_processes 2 --max_steps 9"
    words, launcher = read(command, folder)
    assert (launcher.kind, launcher.processes) == ("trl", 2)
    assert Path(words[0]).name == "sft.py"
    assert words[1:] == ("--config", "sft.yaml", "--max_steps", "9")
    assert launcher.words == ("trl",)
    assert launcher.script == tuple(command.split()[1:])
    assert launcher.env["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"
    with pytest.raises(InputError, match="trl: "):
        read("trl env", folder)


@pytest.mark.parametrize(
    "options", ["-N 0", "--nodes=00", "-N 999999999999999999999", "-n ²", "--ntasks=0"]
)
def test_numbers_that_srun_cannot_mean_are_refused(tmp_path: Path, options: str) -> None:
    with pytest.raises(InputError, match="is not a number of"):
        read_command(shlex.split(f"srun {options} python train.py"), tmp_path)
