"""Users' scripts really looked at and really probed, unmodified, on ranks of this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tuner.deploy.launch_files import write_launch_files
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import ProbeRecord, ProbeRequest, WindowPolicy
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.inspection import blank_job, inspect_script
from tuner.workload.scripts.script_job import ScriptJob

CLUSTER = detect_cluster()
pytestmark = [
    pytest.mark.real,
    pytest.mark.usefixtures("one_fork_server"),
    pytest.mark.skipif(CLUSTER.devices_per_node < 2, reason="needs two cores"),
]
CLUSTER = replace(CLUSTER, devices_per_node=2)
QUICK = WindowPolicy(min_s=0.3, min_steps=3, max_s=0.5)
SCRIPTS = Path(__file__).parents[2] / "scripts"


class Bench:
    """One fork server for all of them, and a folder that stands for the user's repository."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.records: list[ProbeRecord] = []
        script = Script("plain_deepspeed.py", cwd=SCRIPTS)
        self.runner = LocalRunner(blank_job(script, CLUSTER), CLUSTER, run_dir=runs)

    def look(self, command: str, cwd: Path, ranks: int = 2, **told: object) -> ScriptJob:
        shutil.rmtree(self.runs / "probes" / "inspection", ignore_errors=True)
        if ranks > 1 and "nproc" not in command:
            command = f"torchrun --nproc-per-node {ranks} {command}"
        script = Script(command, cwd=cwd, **told)
        blank = blank_job(script, CLUSTER)
        self.runner.set_job(blank)
        return inspect_script(script, blank, self._run, cluster=CLUSTER, folder=self.runs)

    def _run(self, job: ScriptJob, request: ProbeRequest) -> ProbeRecord:
        self.records.append(self.runner.run_for_job(job, request))
        return self.records[-1]

    def probe(self, job: ScriptJob, name: str, **knobs: object) -> tuple[ProbeRecord, str]:
        """The record of one probe, and what rank 0 printed."""
        self.runner.set_job(job)
        launch = Configuration.of({**job.baseline.launch, **knobs}).launch
        record = self.runner.run(ProbeRequest(name, launch, window=QUICK, time_limit_s=60.0))
        return record, (self.runs / "probes" / name / "rank0.log").read_text()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("runs"))
    yield bench
    bench.runner.close()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A user's repository with a DeepSpeed configuration."""
    folder = tmp_path / "repo"
    shutil.copytree(SCRIPTS, folder)
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        # Not installed here: a probe that did not turn it off would fail.
        "tensorboard": {"enabled": True, "output_path": str(tmp_path / "tb")},
    }
    (folder / "ds.json").write_text(json.dumps(config))
    return folder


def printed_config(log: str) -> dict[str, object]:
    found = re.search(r"^CONFIG (.*)$", log, re.M)
    assert found is not None, log[-2000:]
    return dict(json.loads(found[1]))


DEEPSPEED = "plain_deepspeed.py --deepspeed --deepspeed_config ds.json --print-config"


@pytest.mark.slow
def test_an_unmodified_deepspeed_script(bench: Bench, repo: Path) -> None:
    before = sorted(path.name for path in repo.iterdir())
    job = bench.look(DEEPSPEED, repo)
    assert (job.frame.kind, job.frame.follows, job.global_batch) == ("deepspeed", True, 16)
    assert job.frame.client_optimizer == "AdamW"
    assert job.baseline == Configuration.of(data_parallel=2, micro_batch=4, zero_stage=0)
    record, log = bench.probe(job, "zero2", micro_batch=2, zero_stage=2)
    assert record.ok, (record.failure, log[-1000:])
    config = printed_config(log)
    assert config["zero_optimization"] == {"stage": 2}
    assert config["train_batch_size"] == 16
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 4
    # The engine's calls are the phases of a program that marks none.
    phases = record.measurements[0].phases_s
    assert set(phases) == {"data", "forward", "backward", "optimizer"}
    # Alone the same steps are taken: of the same batch in all.
    record, log = bench.probe(job, "alone", data_parallel=1, micro_batch=8, zero_stage=0)
    assert record.ok, (record.failure, log[-1000:])
    assert printed_config(log)["gradient_accumulation_steps"] == 2
    # No checkpoint, no log of an experiment, nothing else in the user's folder.
    assert sorted(path.name for path in repo.iterdir()) == before


@pytest.mark.slow
def test_a_script_that_owns_its_batches(bench: Bench, repo: Path) -> None:
    job = bench.look(f"{DEEPSPEED} --batch-size 4", repo)
    assert not job.frame.follows
    assert "{micro_batch=4}" in job.offers["micro_batch"].why
    placed = bench.look(f"{DEEPSPEED} --batch-size {{micro_batch=4}}", repo)
    assert placed.offers["micro_batch"].turned
    record, log = bench.probe(placed, "placed", micro_batch=8)
    assert record.ok, (record.failure, log[-1000:])
    # Were it offered all the same, the probe would say that it measured another configuration.
    wrong = replace(job, frame=replace(job.frame, follows=True, measured=True))
    record, _ = bench.probe(wrong, "wrong", micro_batch=2)
    assert record.failure is not None
    assert record.failure.kind == "refused"
    assert "batches hold 4 samples where micro_batch is 2" in record.failure.message


@pytest.mark.slow
def test_a_plain_torch_script(bench: Bench, repo: Path) -> None:
    job = bench.look(
        "plain_torch.py --batch-size {micro_batch=4} --accumulation {gradient_accumulation=2}", repo
    )
    assert (job.frame.kind, job.global_batch) == ("torch", 16)
    turned = {name for name, offer in job.offers.items() if offer.turned}
    assert turned == {"data_parallel", "micro_batch"}
    record, log = bench.probe(job, "torch", micro_batch=2, data_parallel=1)
    assert record.ok, (record.failure, log[-1000:])
    assert "optimizer step 3 of 2 x 8" in log
    # One optimizer step each was counted, not one a micro-batch.
    steps = 1 + record.environment["warm_up_steps"] + record.measurements[0].steps
    assert f"optimizer step {steps - 1} of" in log
    assert f"optimizer step {steps + 1} of" not in log
    assert not (repo / "model.pt").exists()


@pytest.mark.slow
def test_a_script_that_asks_for_its_configuration(bench: Bench, repo: Path, tmp_path: Path) -> None:
    job = bench.look("asks.py", repo)
    assert job.frame.kind == "program"
    assert job.frame.reads == ("activation_checkpointing",)
    assert job.offers["activation_checkpointing"].turned
    for mode in ("none", "full"):
        record, log = bench.probe(job, f"asks-{mode}", activation_checkpointing=mode)
        assert record.ok, (record.failure, log[-1000:])
        assert f"checkpointing {mode == 'full'}" in log
    # Without joulefront the same file runs as ever; the launch files give it what was chosen.
    chosen = Configuration.of({**job.baseline.launch, "activation_checkpointing": "full"})
    write_launch_files((chosen, job, CLUSTER), tmp_path / "best")
    order = json.loads((tmp_path / "best" / "attach.json").read_text())
    assert order["options"]["configuration"]["activation_checkpointing"] == "full"


@pytest.mark.slow
def test_stages_are_turned_by_one_line(bench: Bench, repo: Path) -> None:
    (repo / "model.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100, '
        '"num_hidden_layers": 4, "num_attention_heads": 4}'
    )
    job = bench.look("own_stages.py", repo, model_config=repo / "model.json")
    assert (job.frame.kind, job.frame.stages) == ("pipeline", 1)
    assert job.offers["pipeline_parallel"].turned
    record, log = bench.probe(job, "stages", pipeline_parallel=2, data_parallel=1, micro_batch=2)
    assert record.ok, (record.failure, log[-1000:])
    assert "2 stages, 2 x " in log  # a launch starts with few micro-batches


@pytest.mark.slow
def test_launch_files_train_as_chosen(bench: Bench, repo: Path, tmp_path: Path) -> None:
    """The user's logger is theirs again outside a probe, so here it is turned off in their file."""
    config = json.loads((repo / "ds.json").read_text())
    (repo / "ds.json").write_text(json.dumps({**config, "tensorboard": {"enabled": False}}))
    job = bench.look(f"{DEEPSPEED} --epochs 2", repo)
    chosen = Configuration.of(data_parallel=2, micro_batch=2, zero_stage=1)
    write_launch_files((chosen, job, CLUSTER), tmp_path / "best")
    done = subprocess.run(
        [tmp_path / "best" / "launch.sh"],
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert printed_config(done.stdout)["zero_optimization"] == {"stage": 1}
    assert "loss" in done.stdout
    assert (repo / "checkpoint.pt").exists()  # a real run saves


@pytest.mark.slow
def test_under_the_hook_a_script_has_modules_of_its_own(tmp_path: Path) -> None:
    """Started by its path, as `launch.sh` does; they may be named as the hook's own."""
    (tmp_path / "train.py").touch()
    blank = blank_job(Script("train.py", cwd=tmp_path), CLUSTER)
    job = replace(blank, frame=replace(blank.frame, reads=("zero_stage",)))
    write_launch_files((job.baseline, job, CLUSTER), tmp_path / "best")
    hook = tmp_path / "best" / "joulefront_hook"
    names = [path.stem for path in hook.glob("[a-z]*.py")]
    assert len(names) > 3
    for name in [*names, "hook", "workload"]:
        (tmp_path / f"{name}.py").write_text(f"mine = {name!r}\n")
    (tmp_path / "train.py").write_text(
        "import importlib, sys\nimport joulefront_hook\n"
        f"for name in {[*names, 'hook', 'workload']!r}:\n"
        "    assert importlib.import_module(name).mine == name\n"
        f"assert {str(hook)!r} not in sys.path\n"
        "print('stage', joulefront_hook.configuration()['zero_stage'])\n"
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "best").symlink_to(tmp_path / "best")
    done = subprocess.run(
        [sys.executable, tmp_path / "other/best/joulefront_hook/__main__.py", "run", "train.py"],
        env={
            **os.environ,
            **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
            "JOULEFRONT_OPTIONS": str(tmp_path / "best" / "options.json"),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "stage 0" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "new_interpreter", [False, pytest.param(True, marks=pytest.mark.long)], ids=["forked", "fresh"]
)
def test_a_repository_with_models_and_workload_of_its_own(
    bench: Bench, tmp_path: Path, new_interpreter: bool
) -> None:
    for package, name, text in (
        ("models", "net", "import torch\ndef build():\n    return torch.nn.Linear(8, 1)\n"),
        (
            "workload",
            "data",
            "import torch\ndef batches():\n    return torch.utils.data.TensorDataset("
            "torch.randn(64, 8), torch.randn(64, 1))\n",
        ),
    ):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / f"{name}.py").write_text(text)
    shutil.copy(SCRIPTS / "own_packages.py", tmp_path / "train.py")
    bench.runner.node = replace(bench.runner.node, new_interpreter=new_interpreter)
    try:
        job = bench.look("train.py", tmp_path)
        assert (job.global_batch, job.baseline.micro_batch, job.frame.follows) == (8, 2, True)
        record, log = bench.probe(job, f"own-{new_interpreter}", zero_stage=3, micro_batch=1)
    finally:
        bench.runner.node = replace(bench.runner.node, new_interpreter=False)
    assert record.ok, (record.failure, log[-1000:])
    assert "stage 3" in log


@pytest.mark.slow
def test_a_transformers_model_brings_its_sizes_and_its_switch(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(
        "import deepspeed, torch\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "deepspeed.init_distributed()\n"
        "torch.manual_seed(0)\n"
        "net = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, vocab_size=64,\n"
        "    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))\n"
        "config = {'train_batch_size': 4, 'optimizer':\n"
        "    {'type': 'AdamW', 'params': {'lr': 1e-3, 'torch_adam': True}}}\n"
        "engine, *_ = deepspeed.initialize(\n"
        "    model=net, model_parameters=net.parameters(), config=config)\n"
        "print('checkpointing', net.is_gradient_checkpointing, flush=True)\n"
        "for _ in range(10**6):\n"
        "    ids = torch.randint(64, (engine.train_micro_batch_size_per_gpu(), 16))\n"
        "    engine.backward(engine(input_ids=ids, labels=ids).loss)\n"
        "    engine.step()\n"
    )
    job = bench.look("train.py", tmp_path, steps=50)
    assert (job.model["hidden_size"], job.sequence_length) == (32, 16)
    assert job.assumed == ()
    record, log = bench.probe(job, "switch", activation_checkpointing="full", micro_batch=1)
    assert record.ok, (record.failure, log[-1000:])
    assert "checkpointing True" in log
    from tuner.models.analytic.model import AnalyticModel

    told = AnalyticModel(job, CLUSTER).predict([job.baseline])
    assert told.step_time_s[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "deepspeed",
    [False, pytest.param(True, marks=pytest.mark.long)],  # as unmodified DeepSpeed is
    ids=["torch", "deepspeed"],
)
def test_an_unmodified_transformers_trainer(bench: Bench, repo: Path, deepspeed: bool) -> None:
    pytest.importorskip("accelerate")
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "zero_optimization": {"stage": 1},  # transformers insists on the section
    }
    (repo / "auto.json").write_text(json.dumps(auto))
    command = (
        "hf_trainer.py --output_dir out --use_cpu --save_steps 2 --max_steps 100000 "
        "--report_to tensorboard --per_device_train_batch_size 4 --gradient_accumulation_steps 2"
    )
    job = bench.look(command + " --deepspeed auto.json" * deepspeed, repo)
    assert job.frame.owner == "transformers"
    assert (job.global_batch, job.sequence_length) == (16, 16)
    assert (job.frame.micro_batch, job.frame.accumulation) == (4, 2)
    assert job.steps == 100_000  # as its state says
    assert (job.frame.measured, job.frame.counted) == (deepspeed, not deepspeed)
    turned = {name for name, offer in job.offers.items() if offer.turned}
    zero = {"zero_stage", "zero_hpz_partition_size", "optimizer_offload", "parameter_offload"}
    states = zero if deepspeed else set()
    driven = {"data_parallel", "micro_batch", "activation_checkpointing", "compilation"}
    assert turned == driven | states
    knobs = {"zero_stage": 2} if deepspeed else {"data_parallel": 1}
    # A batch of another size than was asked for would have been refused.
    record, log = bench.probe(
        job, f"trainer-{deepspeed}", micro_batch=2, activation_checkpointing="full", **knobs
    )
    assert record.ok, (record.failure, log[-1000:])
    assert not any((repo / "out").glob("checkpoint-*"))


@pytest.mark.slow
def test_an_unmodified_lightning_script(bench: Bench, repo: Path) -> None:
    """On a CPU Lightning's own choice is one rank, so each of two would train alone."""
    pytest.importorskip("lightning")
    before = sorted(path.name for path in repo.iterdir())
    job = bench.look("lightning_module.py", repo)
    assert (job.frame.owner, job.frame.turns) == ("lightning", ("gradient_accumulation",))
    assert (job.global_batch, job.baseline.micro_batch, job.frame.accumulation) == (16, 4, 2)
    assert job.frame.sources["accumulation"] == "lightning's arguments"
    assert {name for name, offer in job.offers.items() if offer.turned} == {"data_parallel"}
    record, log = bench.probe(job, "lightning", data_parallel=1)
    assert record.ok, (record.failure, log[-1000:])
    # No logs, no checkpoints.
    assert sorted(path.name for path in repo.iterdir()) == before


@pytest.mark.slow
def test_an_unmodified_accelerate_script(bench: Bench, repo: Path) -> None:
    """Its logger is not installed here: a probe that did not turn it off would fail."""
    pytest.importorskip("accelerate")
    before = sorted(path.name for path in repo.iterdir())
    job = bench.look("bare_accelerate.py", repo)
    assert (job.frame.owner, job.frame.turns) == ("accelerate", ("gradient_accumulation",))
    assert (job.global_batch, job.baseline.micro_batch) == (16, 4)
    record, log = bench.probe(job, "accelerate", data_parallel=1)
    assert record.ok, (record.failure, log[-1000:])
    assert "step 3 of 4" in log
    assert sorted(path.name for path in repo.iterdir()) == before


#: It never draws fewer than 8, whatever it is asked for.
CLAMPED = """
import argparse, torch
from torch.utils.data import DataLoader, TensorDataset
p = argparse.ArgumentParser()
p.add_argument("-b", type=int)
p.add_argument("-a", type=int)
args = p.parse_args()
torch.distributed.init_process_group("gloo")
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
while True:
    for i, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(4000, 4)), max(8, args.b))):
        net(x).mean().backward()
        if (i + 1) % args.a == 0:
            optimizer.step()
"""


@pytest.mark.slow
def test_a_batch_that_does_not_follow_its_argument_costs_a_failed_probe(
    bench: Bench, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(CLAMPED)
    command = "torchrun --nproc-per-node 1 train.py -b {micro_batch=8} -a {gradient_accumulation=2}"
    job = bench.look(command, tmp_path)
    assert (job.global_batch, job.frame.counted) == (16, True)
    record, _ = bench.probe(job, "larger", micro_batch=16)
    assert record.ok, record.failure
    record, _ = bench.probe(job, "smaller", micro_batch=4)
    assert record.failure is not None
    assert record.failure.message == (
        "each rank trains 8 samples x 4 backward passes a step where 4 x 4 are to be measured"
    )
    assert not record.measurements


ALONE = """
import torch
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
while True:
    net(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_script_without_a_process_group_is_one_process(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ALONE)
    with pytest.raises(InputError, match="of 2 ranks each trains alone"):
        bench.look("train.py", tmp_path)
    (record,) = bench.records[-1:]
    assert record.failure is not None
    assert record.failure.kind == "alone"
    job = bench.look("train.py", tmp_path, ranks=1)
    assert (job.devices, job.baseline.data_parallel) == (1, 1)
    assert (job.global_batch, job.steps) == (0, None)  # no loader, nothing named
    record, _ = bench.probe(job, "one")
    assert record.ok, record.failure
