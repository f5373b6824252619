"""Use from a training repository that has packages with the names of our folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.environments import clean_environment, run

OWN = ("models", "search_spaces", "tests", "workload")

TRAIN = """
import argparse

import models
import torch
import workload
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--accumulation", type=int, default=2)
args = parser.parse_args()
torch.distributed.init_process_group("gloo")
net = DistributedDataParallel(torch.nn.Linear(*models.SIZE))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
while True:
    for _ in range(args.accumulation):
        net(torch.randn(args.batch_size, workload.INPUTS)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

TUNE = """
import json

import models, search_spaces, tests, workload
import tuner, tuner.models, tuner.search_spaces, tuner.workload

packages = (models, search_spaces, tests, workload)
packages += (tuner, tuner.models, tuner.search_spaces, tuner.workload)
answer = {"files": {package.__name__: package.__file__ for package in packages}}
if PROBES:
    result = tuner.optimize(
        tuner.Script(
            "torchrun --nproc-per-node 2 train.py --batch-size {micro_batch=4} "
            "--accumulation {gradient_accumulation=2}",
            global_batch=16,
        ),
        executor="inline",
        search=tuner.SearchSettings(
            max_probes=PROBES,
            verify=False,
            window=tuner.WindowPolicy(min_s=0.3, min_steps=3, max_s=0.5),
        ),
        name="tuned",
    )
    answer |= {"probes": result.spent.probes, "points": len(result.points)}
print("ANSWER", json.dumps(answer))
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A training repository with packages models, search_spaces, tests and workload of its own."""
    folder = tmp_path / "repository"
    for name, text in {**dict.fromkeys(OWN, ""), "models": "SIZE = (8, 1)\n", "tools": ""}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(text)
    (folder / "workload" / "__init__.py").write_text("INPUTS = 8\n")
    (folder / "train.py").write_text(TRAIN)
    return folder


def as_script(installed: Path, repository: Path, code: str) -> str:
    """Return the output of `python tune.py`."""
    (repository / "tune.py").write_text(code)
    return run([installed / "bin" / "python", "tune.py"], repository, timeout=800)


def as_module(installed: Path, repository: Path, code: str) -> str:
    """Return the output of `python -m tools.tune`."""
    (repository / "tools" / "tune.py").write_text(code)
    return run([installed / "bin" / "python", "-m", "tools.tune"], repository, timeout=800)


def in_notebook(installed: Path, repository: Path, code: str) -> str:
    """Return the output of a cell in a kernel of the environment, started in the repository."""
    jupyter_client = pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    from jupyter_client.kernelspec import KernelSpecManager

    kernels = repository.parent / "kernels"
    (kernels / "installed").mkdir(parents=True)
    words = [str(installed / "bin" / "python"), "-m", "ipykernel_launcher", "-f"]
    (kernels / "installed" / "kernel.json").write_text(
        json.dumps({"argv": [*words, "{connection_file}"], "language": "python"})
    )
    kernel = jupyter_client.KernelManager(
        kernel_name="installed",
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(kernels)]),
        connection_file=str(kernels / "connection.json"),
    )
    outputs: list[dict[str, Any]] = []
    kernel.start_kernel(cwd=str(repository), env=clean_environment(repository))
    client = kernel.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=120)
        reply = client.execute_interactive(
            code, timeout=800, output_hook=lambda message: outputs.append(message["content"])
        )
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(content["text"] for content in outputs if content.get("name") == "stdout")


WAYS = [as_script, as_module, in_notebook]
Way = Callable[[Path, Path, str], str]


def answer_of(way: Way, installed: Path, repository: Path, probes: int) -> dict[str, Any]:
    out = way(installed, repository, f"PROBES = {probes}\n{TUNE}")
    (line,) = [line for line in out.splitlines() if line.startswith("ANSWER ")]
    answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
    (packages,) = installed.glob("lib/*/site-packages")
    ours = {name: packages / "tuner" / name for name in OWN if name != "tests"}
    assert answer["files"] == {
        **{name: str(repository / name / "__init__.py") for name in OWN},
        **{f"tuner.{name}": str(folder / "__init__.py") for name, folder in ours.items()},
        "tuner": str(packages / "tuner" / "__init__.py"),
    }
    return answer


@pytest.mark.parametrize("way", WAYS)
def test_both_are_imported(way: Way, installed: Path, repository: Path) -> None:
    answer_of(way, installed, repository, probes=0)


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "way", [*(pytest.param(way, marks=pytest.mark.long) for way in WAYS[:2]), in_notebook]
)
def test_a_script_of_the_repository_is_tuned(way: Way, installed: Path, repository: Path) -> None:
    answer = answer_of(way, installed, repository, probes=2)
    assert answer["probes"] == 2
    assert answer["points"] >= 1
    assert (repository / "runs" / "tuned" / "report.html").is_file()
    assert (repository / "runs" / "tuned" / "best" / "launch.sh").is_file()
