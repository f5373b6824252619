"""ray_train.json: what it holds, and that Ray Train's own classes take it and train by it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.own_ray import OwnRay
from tests.support.scripts import CPU, GPU, script_job
from tests.support.studies import modelled_study
from tuner.cli.main import main
from tuner.deploy.launch_files import Launch, write_launch_files
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.workload.scripts.script_facts import ScriptFacts

FRAME = ScriptFacts(kind="torch", micro_batch=4, accumulation=2, counted=True)
COMMAND = "--bs {micro_batch=4} --accum {gradient_accumulation=2}"

#: Trains by the file as the page of the documentation shows it, and prints what a worker sees.
TRAINS = """
import json, os
import ray.train
from ray.train.torch import TorchTrainer

def loop(config):
    import joulefront_hook, torch
    seen = {"config": config, "world": ray.train.get_context().get_world_size()}
    seen["threads"], seen["hook"] = torch.get_num_threads(), dict(joulefront_hook.configuration())
    open("FOLDER/seen.json", "w").write(json.dumps(seen))

os.chdir("FOLDER")
answer = json.load(open("ray_train.json"))
ray.init(address=os.environ["JF_ADDRESS"], log_to_driver=False)
TorchTrainer(
    loop,
    train_loop_config={"lr": 0.1, **answer["train_loop_config"]},
    scaling_config=ray.train.ScalingConfig(**answer["scaling_config"]),
    run_config=ray.train.RunConfig(storage_path=os.getcwd(), **answer["run_config"]),
).fit()
"""


def written(launch: Launch, folder: Path) -> dict[str, Any]:
    paths = write_launch_files(launch, folder, ray_train=True)
    assert folder / "ray_train.json" in paths
    assert "ray_train.json" in (folder / "README.txt").read_text()
    answer: dict[str, Any] = json.loads((folder / "ray_train.json").read_text())
    return answer


def built_in(**changes: Any) -> TrainingJob:
    return replace(load_job("tiny-gpt"), **changes)


def test_gpus_batch_and_deepspeed_of_the_configuration(tmp_path: Path) -> None:
    configuration = Configuration.of(data_parallel=16, micro_batch=2, zero_stage=1, clock_MHz=900)
    answer = written((configuration, built_in(global_batch=64), GPU), tmp_path)
    assert answer["scaling_config"] == {
        "num_workers": 16,
        "use_gpu": True,
        "placement_strategy": "PACK",
    }
    loop = answer["train_loop_config"]
    assert (loop["micro_batch"], loop["gradient_accumulation"], loop["zero_stage"]) == (2, 2, 1)
    assert loop["deepspeed"]["zero_optimization"]["stage"] == 1
    assert "clock_MHz" not in loop
    # The variables of the built-in program, which keeps off the network, are not the user's.
    assert answer["run_config"]["worker_runtime_env"]["env_vars"] == {}


def test_ranks_of_one_node_stay_on_one(tmp_path: Path) -> None:
    answer = written((Configuration.of(data_parallel=4), built_in(), GPU), tmp_path)
    assert answer["scaling_config"]["placement_strategy"] == "STRICT_PACK"


def test_nodes_that_ray_train_would_fill_otherwise_are_refused(tmp_path: Path) -> None:
    """12 ranks were measured as 6 and 6; Ray would place 8 and 4."""
    launch = Configuration.of(data_parallel=12, micro_batch=1), built_in(global_batch=12), GPU
    with pytest.raises(InputError, match="6 ranks on each of 2 nodes of 8 devices; choose a"):
        write_launch_files(launch, tmp_path / "new", ray_train=True)
    assert list(tmp_path.iterdir()) == []
    write_launch_files((Configuration.of(data_parallel=4), built_in(), GPU), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError, match="6 ranks on each of 2 nodes"):
        write_launch_files(launch, tmp_path, ray_train=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.usefixtures("launchers_here")
def test_threads_and_variables_of_a_script(tmp_path: Path) -> None:
    job = script_job(
        f"NCCL_ALGO=Ring SECRET_TOKEN=hide torchrun --nproc_per_node 2 train.py {COMMAND}",
        tmp_path,
        replace(FRAME, threads=3),
        global_batch=16,
    )
    cluster = replace(CPU, devices_per_node=6)
    answer = written((Configuration.parse("dp2 mb2"), job, cluster), tmp_path / "files")
    assert answer["scaling_config"]["resources_per_worker"] == {"CPU": 3}
    assert not answer["scaling_config"]["use_gpu"]
    assert answer["run_config"]["worker_runtime_env"]["env_vars"]["NCCL_ALGO"] == "Ring"
    assert "hide" not in (tmp_path / "files" / "ray_train.json").read_text()
    loop = answer["train_loop_config"]
    assert (loop["data_parallel"], loop["gradient_accumulation"]) == (2, 4)


@pytest.mark.usefixtures("launchers_here")
def test_a_batch_that_is_not_known_has_no_accumulation(tmp_path: Path) -> None:
    facts = ScriptFacts(kind="torch")
    job = script_job("torchrun --nproc_per_node 2 train.py", tmp_path, facts, global_batch=0)
    answer = written((Configuration.parse("dp2"), job, CPU), tmp_path / "files")
    assert answer["train_loop_config"] == {"data_parallel": 2}


def test_apply_writes_it_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = modelled_study(tmp_path, max_probes=3).run_dir
    for words, there in (([], False), (["--ray-train"], True)):
        out = tmp_path / f"files{there}"
        assert main(["apply", str(run), "--out", str(out), *words]) == 0
        assert (out / "ray_train.json").exists() is there
        assert ("ray_train.json" in capsys.readouterr().out) is there


@pytest.mark.ray
@pytest.mark.real
@pytest.mark.slow
def test_ray_train_trains_by_it(tmp_path: Path) -> None:
    """The hook reaches Ray's workers, too: what it sets on a framework is set on them."""
    pytest.importorskip("pyarrow")  # which ray.train imports
    pytest.importorskip("ray.train")
    frame = replace(FRAME, reads=("micro_batch", "gradient_accumulation"))
    job = script_job("train.py", tmp_path, frame, launcher=None, devices=1)
    job = replace(job, line="python train.py", folder=str(tmp_path))
    files = tmp_path / "files"
    answer = written((Configuration.parse("dp1 mb2"), job, replace(CPU, devices_per_node=1)), files)
    with OwnRay.started() as ray:
        process = ray.python(TRAINS.replace("FOLDER", str(files)))
        _, errors = process.communicate(timeout=250)
    assert process.returncode == 0, errors[-3000:]
    worker = json.loads((files / "seen.json").read_text())
    assert worker["config"] == {"lr": 0.1, **answer["train_loop_config"]}
    assert (worker["world"], worker["threads"]) == (1, 1)
    assert (worker["hook"]["micro_batch"], worker["hook"]["gradient_accumulation"]) == (2, 4)
    assert (files / "attached").exists()  # as launch.sh asks for
