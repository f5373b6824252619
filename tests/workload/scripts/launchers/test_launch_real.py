"""A pasted `accelerate launch`, really probed here, and really started again as it is written."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.commands import finished
from tests.support.scripts import inspected
from tuner.deploy.launch_files import write_launch_files
from tuner.search_spaces.configuration import Configuration
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.records.probe import ProbeRequest, WindowPolicy
from tuner.workload.scripts.command import Script

CLUSTER = detect_cluster()
SCRIPT = """
import argparse, os
import torch
from accelerate import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10**9)
steps = parser.parse_args().steps
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
print("PRECISION", os.environ["ACCELERATE_MIXED_PRECISION"], os.environ["MINE"], flush=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
done = 0
while done < steps:
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        done += accelerator.sync_gradients
        if done == steps:
            break
print("DONE on", accelerator.num_processes, accelerator.gradient_accumulation_steps, flush=True)
"""
FILE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU  # two cores here
mixed_precision: 'no'
num_machines: 1
num_processes: 2
"""


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.usefixtures("one_fork_server")
@pytest.mark.skipif(CLUSTER.devices_per_node < 2, reason="needs two cores")
def test_a_pasted_accelerate_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    repo, runs = tmp_path / "repo", tmp_path / "runs"
    repo.mkdir()
    (repo / "train.py").write_text(SCRIPT)
    (repo / "a.yaml").write_text(FILE)
    command = "MINE=1 accelerate launch --config_file a.yaml train.py --steps 1000000"
    script = Script(command, cwd=repo)
    cluster = replace(CLUSTER, devices_per_node=2)
    with inspected(script, cluster, runs) as (runner, job):
        assert job.launcher is not None
        assert (job.frame.owner, job.global_batch, job.baseline.data_parallel) == (
            "accelerate",
            16,
            2,
        )
        launch = Configuration.of({**job.baseline.launch, "data_parallel": 1}).launch
        quick = WindowPolicy(min_s=0.3, min_steps=3, max_s=0.5)
        record = runner.run(ProbeRequest("one", launch, window=quick, time_limit_s=60.0))
        log = (runs / "probes" / "one" / "rank0.log").read_text()
    assert record.ok, (record.failure, log[-1000:])
    assert "PRECISION no 1" in log
    # As it is written back: torchrun starts one process, which takes the same batch.
    words = tuple("3" if word == "1000000" else word for word in job.words)
    files = tmp_path / "best"
    write_launch_files((Configuration(launch), replace(job, words=words), cluster), files)
    done = finished(
        ["bash", str(files / "launch.sh")],
        env={**os.environ, "PYTHON": sys.executable},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "PRECISION no 1" in done.stdout
    assert "DONE on 1 4" in done.stdout
