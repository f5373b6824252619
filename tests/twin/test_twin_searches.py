"""Clock searches of unmodified scripts on a twin node, against its laws (`csrc/physics.c`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.twin import TwinNode
from tests.twin.specimens import CORE_GPU
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.needs("cc"),
    pytest.mark.real,
    pytest.mark.quiet,
    pytest.mark.long,
    pytest.mark.timeout(1500),
]

SCRIPTS = Path(__file__).parents[1] / "scripts"
STEP_S = 0.1
#: Steps take as long whatever a script's sizes are: long beside what a rank computes on a core.
GPU = replace(CORE_GPU, step_s=STEP_S, micro_batch_s=0.0, sample_s=0.0)
DDP = ("torchrun", "--nproc-per-node", "2", f"{SCRIPTS}/plain_torch.py")
COMMANDS = {
    "DDP": DDP,
    "DeepSpeed": (
        *("deepspeed", "--num_gpus", "2", f"{SCRIPTS}/plain_deepspeed.py"),
        *("--deepspeed", "--deepspeed_config", "ds.json"),
    ),
    "Trainer": (
        *("torchrun", "--nproc-per-node", "2", f"{SCRIPTS}/hf_trainer.py", "--output_dir", "out"),
        *("--use_cpu", "True", "--max_steps", "1000000", "--per_device_train_batch_size", "2"),
        *("--save_strategy", "no", "--report_to", "none"),
    ),
}
DEEPSPEED = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 1},
}


@pytest.fixture
def node(twin_node: Callable[..., TwinNode]) -> TwinNode:
    return twin_node(GPU, replace(GPU, limit_W=350.0), virtual_time=False, cores=16)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, for the sockets in it."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "ds.json").write_text(json.dumps(DEEPSPEED))
        yield Path(name)


def search(
    node: TwinNode, folder: Path, command: Sequence[str], probes: int
) -> subprocess.Popen[str]:
    """Start a search of the clock for the least energy."""
    programs = str(Path(sys.executable).parent)
    environ = os.environ | node.environment() | {"JOULEFRONT_RUNS": str(folder / "runs")}
    return subprocess.Popen(
        [
            *("tuner", "optimize", "--executor", "inline", "--space", "clocks", "--json"),
            *("--max-probes", str(probes), "--steps", "1000000", "--minimize", "energy"),
            *("--first-step-limit", "20m"),  # DeepSpeed may build its communication first
            *("--name", "clocks", "--", *command),
        ],
        cwd=folder,
        env=environ | {"PATH": f"{programs}{os.pathsep}{environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def stands(node: TwinNode) -> list[tuple[object, float]]:
    return [(node.locked_MHz(gpu), node.limit_W(gpu)) for gpu in range(2)]


BEFORE = [(None, 400.0), (None, 350.0)]


def law(node: TwinNode, point: dict[str, Any]) -> tuple[float, float]:
    """Return the true seconds and joules of a step of both GPUs."""
    clock_MHz = point["configuration"]["live"].get("clock_MHz", max(GPU.clock_MHz))
    step_s = STEP_S * node.device_s(clock_MHz)
    return step_s, 2 * node.law_W(clock_MHz, 1.0) * step_s


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_recommended_clock_is_the_best_and_intervals_hold_the_truth(
    node: TwinNode, folder: Path, kind: str
) -> None:
    process = search(node, folder, COMMANDS[kind], probes=6)
    out, error = process.communicate()
    assert process.returncode == 0, error[-2000:]
    assert stands(node) == BEFORE
    assert node.late_s() < 1.0, "the ranks are too slow for the law to hold"
    answer = json.loads(out)
    recommendation = answer["recommendation"]
    assert recommendation["action"] == "train"
    _, chosen_J = law(node, {"configuration": recommendation["point"]})
    every_J = [
        law(node, {"configuration": {"live": {"clock_MHz": clock}}})[1] for clock in GPU.clock_MHz
    ]
    assert chosen_J <= 1.01 * min(every_J)
    _, today_J = law(node, {"configuration": {"live": {}}})
    told = recommendation["energy"]
    assert told["low"] <= chosen_J / today_J - 1 <= told["high"]
    outside = []
    assert len(answer["points"]) > 3
    for point in answer["points"]:
        for true, interval, unit in zip(
            law(node, point), ("time_interval_s", "energy_interval_kJ"), (1, 1000), strict=True
        ):
            low, high = (unit * end / answer["steps"] for end in point[interval])
            if not low <= true <= high:
                outside.append((point["configuration"]["live"], interval, low, true, high))
    assert outside == []


@pytest.mark.parametrize(
    ("who", "number"),
    [
        ("group", signal.SIGINT),
        ("group", signal.SIGTERM),
        ("driver", signal.SIGTERM),
        ("driver", signal.SIGKILL),
        ("group", signal.SIGKILL),
        ("rank", signal.SIGKILL),
    ],
)
def test_clocks_go_back_whatever_ends_the_search(
    node: TwinNode, folder: Path, who: str, number: signal.Signals
) -> None:
    process = search(node, folder, DDP, probes=4)
    try:
        wait_until(
            lambda: process.poll() is not None or (node.locked_MHz(0) and node.ranks(1)), 600
        )
        assert process.poll() is None, process.communicate()[1][-2000:]
        if who == "group":
            os.killpg(process.pid, number)
        elif who == "driver":
            process.send_signal(number)
        else:
            os.kill(node.ranks(1)[0], number)
        process.communicate(timeout=600 if who == "rank" else 60)
        wait_until(lambda: stands(node) == BEFORE)
        wait_until(lambda: not node.ranks(0) and not node.ranks(1))
        if who == "rank":  # which costs its probe alone
            assert process.returncode == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
