"""Real trainings under `tuner run -- COMMAND`: their steps, and losses as without it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.receipt.conftest import ROOT, Measured, UserFolder
from tests.support.commands import finished

PROGRAMS = ROOT / "tests" / "online"
BIN = Path(sys.executable).parent


@dataclass
class OfTorch(UserFolder):
    """Folder of a user who has torch."""

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of a command."""
        return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def plain(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the words without tuner."""
        return finished(words, cwd=self.path, env=self.environment, timeout=200)

    def same_output(self, *words: str) -> Measured:
        """Run the words with tuner and without, and compare what they print."""
        done, plain = self.measure(*words), self.plain(*words)
        assert (done.code, done.out) == (plain.returncode, plain.stdout)
        return done


@pytest.fixture
def torch_user(tmp_path: Path) -> OfTorch:
    return OfTorch(tmp_path)


LOADED = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(60, 4))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers={workers})
for fold in range(2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (x,) in loader:
        loss = model(x).pow(2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        print(repr(loss.item()))
    with torch.no_grad():
        for (x,) in loader:
            model(x)
"""


@pytest.mark.parametrize(
    "workers", [pytest.param(0, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.slow)]
)
def test_samples_of_a_loader_and_steps_of_each_fold(torch_user: OfTorch, workers: int) -> None:
    (torch_user.path / "train.py").write_text(LOADED.format(workers=workers))
    (training,) = torch_user.same_output(sys.executable, "train.py").receipt["trainings"]
    assert training["steps"] == 16
    assert training["samples"] == 2 * 60 - 8


@pytest.mark.real
@pytest.mark.slow
def test_two_ranks_of_torchrun_are_one_training(torch_user: OfTorch) -> None:
    words = ["--standalone", "--nproc-per-node", "2", str(PROGRAMS / "train.py"), "30", "0.01"]
    done = torch_user.same_output(str(BIN / "torchrun"), *words)
    (training,) = done.receipt["trainings"]
    assert (training["ranks"], training["world"], training["steps"]) == (2, 2, 30)
    assert done.note("--samples N")


# DeepSpeed would compile its collective for CPUs for a minute; it falls back to gloo.
ENGINE = """
import deepspeed, deepspeed.ops, torch
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed()
layers = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
model = torch.nn.Sequential(*layers)
groups = [{"params": list(each.parameters())} for each in layers]
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 3,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
for _ in range(12):
    engine.backward(engine(torch.randn(4, 8)).sum())
    engine.step()
# A rank that leaves first lets gloo end the other in one of four runs, with tuner and without.
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.real
@pytest.mark.slow
def test_deepspeed_counts_whole_steps(torch_user: OfTorch) -> None:
    (torch_user.path / "engine.py").write_text(ENGINE)
    words = [str(BIN / "deepspeed"), "--no_local_rank", "--num_gpus", "2", "engine.py"]
    done = torch_user.measure(*words, env={"DS_ACCELERATOR": "cpu"})
    assert done.code == 0, done.err
    (training,) = done.receipt["trainings"]
    assert (training["ranks"], training["steps"]) == (2, 4)


SPAWNS = """
import torch, torch.distributed as dist, torch.multiprocessing as mp

def train(rank, folder):
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(9):
        optimizer.zero_grad(); model(torch.randn(8, 4)).sum().backward(); optimizer.step()
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    import os
    mp.spawn(train, (os.getcwd(),), nprocs=2)
"""


@pytest.mark.real
@pytest.mark.slow
def test_ranks_that_a_program_spawns_are_one_training(torch_user: OfTorch) -> None:
    (torch_user.path / "spawns.py").write_text(SPAWNS)
    done = torch_user.measure(sys.executable, "spawns.py")
    assert done.code == 0, done.err
    (training,) = done.receipt["trainings"]
    assert (training["ranks"], training["world"], training["steps"]) == (2, 2, 9)
