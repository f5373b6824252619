"""The launch files: what they say, that a shell reads them as meant, and that they train."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.deploy.listeners import watched
from tests.golden import prepared
from tests.support.commands import finished, write_program
from tests.support.results import NVML, point, small_result
from tests.support.scripts import CPU, GPU
from tuner.api import load_result
from tuner.deploy.launch_files import SYNTHETIC_STEPS, launch_of, write_launch_files
from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.workload.node.host import usable_cores
from tuner.workload.scripts.installed import build_kind

GPUS = Cluster("gpus", Device("A100", "cuda", 2**36, 1e14, 1e12, 60.0, 400.0), 2)


def job(name: str = "tiny-gpt", **changes: object) -> TrainingJob:
    return replace(load_job("tiny-gpt"), name=name, **changes)


def dry_run(folder: Path, file: str = "launch.sh", **environment: str) -> list[str]:
    """The command line that a launch script would start, as bash really splits it."""
    shown = write_program(
        folder / "show.py",
        f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n",
    )
    done = finished(
        ["bash", str(folder / file)],
        env={**os.environ, "PYTHON": str(shown), "SYNTHETIC": "1", **environment},
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    argv: list[str] = json.loads(done.stdout)
    return argv


def test_ops_are_found_where_the_probes_compiled_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first launch compiles for a minute in silence. A folder of the user's own stays."""
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    odd = tmp_path / 'a } "b" $HOME `c`'
    monkeypatch.setenv("XDG_CACHE_HOME", str(odd))
    write_launch_files((Configuration.of(micro_batch=2), job(), CPU), tmp_path / "best")
    shown = write_program(tmp_path / "show", '#!/bin/sh\nprintf %s "$TORCH_EXTENSIONS_DIR"\n')
    for more, expected in (
        ({}, str(odd / "joulefront" / "torch_extensions" / build_kind())),
        ({"TORCH_EXTENSIONS_DIR": "/mine"}, "/mine"),
    ):
        done = subprocess.run(
            ["bash", str(tmp_path / "best" / "launch.sh")],
            env={**os.environ, "PYTHON": str(shown), "SYNTHETIC": "1", **more},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == expected


@pytest.mark.parametrize(
    ("quotas", "threads"),
    [
        ({}, None),
        ({"": "max 100000", "/slice": "100000 100000"}, 1),
        ({"": "100000 100000", "/slice/job": "max 100000"}, 1),
        ({"/slice/job": "6400000 100000"}, None),
    ],
)
def test_threads_count_the_cores_that_were_granted(
    tmp_path: Path, quotas: dict[str, str], threads: int | None
) -> None:
    """By affinity and by the quotas of the control group, as the probes count them."""
    write_launch_files((Configuration.of(micro_batch=2), job(), GPUS), tmp_path / "best")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/slice/job\n")
    (tmp_path / "cgroup/slice/job").mkdir(parents=True)
    for group, quota in quotas.items():
        (tmp_path / f"cgroup{group}/cpu.max").write_text(f"{quota}\n")
    shown = write_program(tmp_path / "show", '#!/bin/sh\nprintf %s "$OMP_NUM_THREADS"\n')
    env = {**os.environ, "PYTHON": str(shown), "SYNTHETIC": "1"}
    env |= {"PROC": str(tmp_path / "proc"), "CGROUP": str(tmp_path / "cgroup")}
    env.pop("OMP_NUM_THREADS", None)
    done = finished(["bash", str(tmp_path / "best" / "launch.sh")], env=env)
    assert done.returncode == 0, done.stderr
    here = usable_cores(proc=tmp_path / "proc", cgroup=tmp_path / "cgroup")
    assert done.stdout == str(here)
    assert threads is None or here == threads


def test_files_of_a_configuration(tmp_path: Path) -> None:
    configuration = Configuration.of(data_parallel=2, micro_batch=2, zero_stage=1)
    paths = write_launch_files((configuration, job(), CPU), tmp_path / "best")
    names = {p.name for p in paths}
    assert names == {
        "ds_config.json",
        "job.json",
        "launch.sh",
        "loopback.py",
        "job.sbatch",
        "clocks.sh",
        "README.txt",
    }
    config = json.loads((tmp_path / "best" / "ds_config.json").read_text())
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 2
    assert config["zero_optimization"]["stage"] == 1
    assert TrainingJob.from_json(json.loads((tmp_path / "best" / "job.json").read_text())) == job()
    assert "left to the device" in (tmp_path / "best" / "clocks.sh").read_text()
    assert os.access(tmp_path / "best" / "launch.sh", os.X_OK)
    argv = dry_run(tmp_path / "best", STEPS="7")
    assert argv[0] == str(tmp_path / "best" / "loopback.py")
    assert argv[1:3] == ["-m", "torch.distributed.run"]
    assert {"--rdzv-backend=static", "--master-addr=127.0.0.1"} <= set(argv)
    assert "--nproc-per-node=2" in argv
    assert argv[-2:] == ["--steps", "7"]
    assert Path(argv[argv.index("--job") - 1]).is_file()
    assert dry_run(tmp_path / "best")[-1] == str(job().steps)


def listed(readme: Path) -> set[str]:
    return set(re.findall(r"^([\w.]+) {2,}\S", readme.read_text(), re.M))


def test_the_readme_lists_what_is_there_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "joulefront_hook").mkdir()  # of an earlier point, whose program needed it
    write_launch_files((Configuration.of(micro_batch=2), job(), CPU), tmp_path)
    written = {entry.name for entry in tmp_path.iterdir()} - {"README.txt", "joulefront_hook"}
    assert listed(tmp_path / "README.txt") == written


@pytest.mark.parametrize("run", ["measured", "script", "plan", "simulated"])
def test_the_readme_of_each_kind_of_run_lists_its_files(run: str, tmp_path: Path) -> None:
    prepared(tmp_path)
    result = load_result(run, runs_dir=tmp_path / "runs")
    for number, each in enumerate(result.front_points[:3]):
        out = tmp_path / str(number)
        write_launch_files(result, out, point=each.configuration)
        written = {entry.name for entry in out.iterdir()} - {"README.txt"}
        assert listed(out / "README.txt") == written, each.configuration.short


def test_a_long_run_on_synthetic_data_is_refused_until_the_program_is_the_users(
    tmp_path: Path,
) -> None:
    write_launch_files((Configuration.of(micro_batch=2), job(), CPU), tmp_path)
    assert job().steps > SYNTHETIC_STEPS
    environment = {**os.environ, "PYTHON": "/bin/true"}
    words = ["bash", str(tmp_path / "launch.sh")]
    refused = finished(words, env=environment)
    assert refused.returncode == 2
    assert "no script was given, so this trains SYNTHETIC DATA; put the command" in refused.stderr
    assert f"All {job().steps} steps of it: SYNTHETIC=1 ./launch.sh" in refused.stderr
    assert "SYNTHETIC DATA" in (tmp_path / "README.txt").read_text()
    text = (tmp_path / "launch.sh").read_text()
    own = re.sub(r"program=\(.*\)", "program=(mine.py)", text)
    (tmp_path / "launch.sh").write_text(own)
    assert dry_run(tmp_path)[-1] == "mine.py"
    write_launch_files((Configuration.of(micro_batch=2), job(), CPU), tmp_path, script=["mine.py"])
    assert "SYNTHETIC" not in (tmp_path / "launch.sh").read_text()
    assert "SYNTHETIC" not in (tmp_path / "README.txt").read_text()


def test_knobs_outside_the_json_reach_the_program(tmp_path: Path) -> None:
    configuration = Configuration.of(
        data_parallel=2, activation_checkpointing="full", sharding="fsdp2"
    )
    write_launch_files((configuration, job(), CPU), tmp_path)
    argv = dry_run(tmp_path)
    assert argv[argv.index("--activation_checkpointing") + 1] == "full"
    assert argv[argv.index("--sharding") + 1] == "fsdp2"


#: A python whose torch can bind each of 8 ranks to 4 cores or more.
BINDS = """#!{python}
import json, os, sys
if sys.argv[1] == "-c":
    import torch.numa.binding as binding
    sets = [set(range(12 - rank)) for rank in range(8)]
    choose = lambda *, gpu_index, numa_options: sets[gpu_index]
    binding._get_validated_logical_cpus_to_bind_to = choose
    code, sys.argv = sys.argv[2], sys.argv[2:]
    exec(code)
else:
    print(json.dumps([*sys.argv[1:], os.environ["OMP_NUM_THREADS"]]))
"""


def test_ranks_are_bound_as_they_were_measured(tmp_path: Path) -> None:
    offload = Configuration.of(data_parallel=8, zero_stage=2, optimizer_offload="cpu")
    write_launch_files((offload, job(), GPU), tmp_path)
    python = write_program(tmp_path / "python", BINDS.format(python=sys.executable))
    binds = {"PYTHON": str(python), "OMP_NUM_THREADS": "24"}
    argv = dry_run(tmp_path, **binds)
    assert "--numa-binding=exclusive" in argv
    assert argv[-1] == "5"  # threads: those of the rank with the fewest cores
    argv = dry_run(tmp_path, **binds, BIND="")
    assert "--numa-binding=exclusive" not in argv
    assert argv[-1] == "24"
    write_launch_files((Configuration.of(data_parallel=8), job(), GPU), tmp_path)
    assert "--numa-binding=exclusive" not in dry_run(tmp_path, **binds)


@pytest.mark.parametrize("lacks", ["", "import sys; sys.modules['torch.numa'] = None"])
def test_the_applied_job_starts_where_torch_cannot_bind_ranks(tmp_path: Path, lacks: str) -> None:
    """torchrun ends at once with --numa-binding where there is no GPU to ask, or before 2.9."""
    offload = Configuration.of(data_parallel=8, zero_stage=2, optimizer_offload="cpu")
    write_launch_files((offload, job(), GPU), tmp_path)
    python = write_program(
        tmp_path / "python",
        f"#!{sys.executable}\nimport json, sys\n{lacks}\n"
        "if sys.argv[1] == '-c':\n    code, sys.argv = sys.argv[2], sys.argv[2:]\n    exec(code)\n"
        "else:\n    print(json.dumps(sys.argv[1:]))\n",
    )
    numactl = tmp_path / "bin" / "numactl"
    numactl.parent.mkdir()
    write_program(numactl, "#!/bin/sh\n")
    path = f"{numactl.parent}{os.pathsep}{os.environ['PATH']}"
    assert "--numa-binding=exclusive" not in dry_run(tmp_path, PATH=path, PYTHON=str(python))


def test_live_settings_are_written_down(tmp_path: Path) -> None:
    configuration = Configuration.of(data_parallel=8, clock_MHz=1200)
    write_launch_files((configuration, job(), GPU), tmp_path)
    assert "1200MHz" in (tmp_path / "clocks.sh").read_text()
    assert "1200MHz" in (tmp_path / "README.txt").read_text()


def test_several_nodes(tmp_path: Path) -> None:
    configuration = Configuration.of(data_parallel=16)
    write_launch_files((configuration, job(global_batch=16), GPU), tmp_path)
    argv = dry_run(tmp_path, HEAD="node one", NODE_RANK="1")
    assert "--nnodes=2" in argv
    assert "--nproc-per-node=8" in argv
    assert {"--rdzv-backend=static", "--node-rank=1", "--master-addr=node one"} <= set(argv)
    assert "--node-rank=3" in dry_run(tmp_path, HEAD="node1", SLURM_NODEID="3")
    short = {**os.environ, "STEPS": "2"}
    refused = finished(["bash", tmp_path / "launch.sh"], env=short)
    assert refused.returncode != 0
    assert "set NODE_RANK" in refused.stderr
    refused = finished(["bash", tmp_path / "launch.sh"], env={**short, "NODE_RANK": "0"})
    assert refused.returncode != 0
    assert "set HEAD" in refused.stderr


@pytest.mark.parametrize("ranks", [3, 32])
def test_more_ranks_than_devices_is_said(ranks: int, tmp_path: Path) -> None:
    cluster = CPU if ranks == 3 else GPU
    with pytest.raises(InputError, match=f"{ranks} ranks"):
        write_launch_files(
            (Configuration.of(data_parallel=ranks), job(global_batch=ranks), cluster), tmp_path
        )


def test_a_batch_that_does_not_divide_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="global batch"):
        write_launch_files((Configuration.of(micro_batch=3), job(), CPU), tmp_path)


def test_a_result_brings_its_own_job_and_cluster(tmp_path: Path) -> None:
    best = point(Configuration.of(data_parallel=2), 100.0, 20.0, NVML)
    result = replace(small_result(), best=best, job=job(), cluster=CPU)
    assert launch_of(result) == (best.configuration, job(), CPU)
    assert write_launch_files(result, tmp_path)
    assert "--nproc-per-node=2" in dry_run(tmp_path)


def test_the_files_start_what_is_recommended(tmp_path: Path) -> None:
    result = replace(small_result(), job=job(), cluster=CPU)
    assert launch_of(result)[0] == result.best.configuration
    judge = replace(result.judged, failed=frozenset({result.best.configuration}))
    same = replace(result.baseline, configuration=result.best.configuration)
    unproven = replace(result, best=same, judge=replace(judge, points=(result.baseline, same)))
    assert launch_of(unproven)[0] == result.baseline.configuration
    assert launch_of(unproven, "best")[0] == result.best.configuration


def test_nothing_to_start_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="chose no configuration"):
        write_launch_files(replace(small_result(), best=None), tmp_path)
    with pytest.raises(InputError, match="names no training job"):
        write_launch_files(small_result(), tmp_path)


def test_slurm_starts_one_task_a_node_under_the_clocks(tmp_path: Path) -> None:
    launch = Configuration.of(data_parallel=16, clock_MHz=1200), job(global_batch=16), GPU
    write_launch_files(launch, tmp_path)
    text = (tmp_path / "job.sbatch").read_text()
    options = [line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8"} <= set(options)
    assert not any(option.startswith("--time") for option in options)
    # What Slurm would do, with its two commands stood in for.
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, script in (("scontrol", "echo node7; echo node8"), ("srun", 'echo "$HEAD $PWD $*"')):
        write_program(bin_folder / name, f"#!/usr/bin/env bash\n{script}\n")
    done = subprocess.run(
        ["bash", tmp_path / "job.sbatch"],
        env={
            **os.environ,
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_CPUS_ON_NODE": "96",
        },
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    head, folder, *words = done.stdout.split()
    assert (head, folder) == ("node7", str(tmp_path))
    assert words[-2:] == ["./clocks.sh", "./launch.sh"]


def test_slurm_is_asked_for_the_measured_time_and_more(tmp_path: Path) -> None:
    best = point(Configuration.of(data_parallel=2), 7200.0, 20.0, NVML)
    result = replace(small_result(), best=best, points=(best,), job=job(), cluster=CPU)
    write_launch_files(result, tmp_path, point="best")
    text = (tmp_path / "job.sbatch").read_text()
    upper_s = best.time_interval_s[1]
    asked = next(line for line in text.splitlines() if "--time=" in line).partition("=")[2]
    hours, minutes, _ = (int(part) for part in asked.split(":"))
    assert 1.25 * upper_s < 3600 * hours + 60 * minutes < 1.25 * upper_s + 1000
    unknown = replace(best, time_interval_s=(float("nan"), float("nan")))
    write_launch_files(replace(result, best=unknown, points=(unknown,)), tmp_path, point="best")
    assert "--time=" not in (tmp_path / "job.sbatch").read_text()


def test_another_point_can_be_written(tmp_path: Path) -> None:
    result = replace(small_result(), job=job(), cluster=CPU)
    for name in ("best", "baseline", "knee", "1", result.points[1].configuration.key):
        chosen = result.point(name)
        write_launch_files(result, tmp_path, point=name)
        config = json.loads((tmp_path / "ds_config.json").read_text())
        assert config["train_micro_batch_size_per_gpu"] == chosen.configuration.micro_batch
    with pytest.raises(InputError, match="measured point"):
        write_launch_files(result, tmp_path, point="99")


@pytest.mark.slow
@pytest.mark.real
def test_the_launch_script_trains(tmp_path: Path) -> None:
    configuration = Configuration.of(
        data_parallel=2, micro_batch=1, zero_stage=1, activation_checkpointing="full"
    )
    small = {**job().model, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    tiny = job(model=small, sequence_length=32, global_batch=4)
    write_launch_files((configuration, tiny, CPU), tmp_path)
    words = [
        str(tmp_path / "clocks.sh"),
        str(tmp_path / "launch.sh"),
    ]  # without a setting, as it is
    listening, code, output = watched(words, {**os.environ, "STEPS": "2"}, within_s=400)
    assert code == 0, output[-2000:]
    assert "step 0 loss" in output
    assert listening
    assert {address.rpartition(":")[0] for address in listening} == {"127.0.0.1"}
