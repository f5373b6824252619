"""Ranks of a command that is probed as it stands: what they and their launcher open."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.listeners import watched
from tests.workload.hook.test_attached import ENTRY
from tuner.workload import hook
from tuner.workload.node.rank_launch import reserved_port

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

#: Adds up ranks + 1, and shows what it listens at: a launcher gives it a session of its own.
RANK = f"""
import os, sys, torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) + dist.get_rank()
dist.all_reduce(total)
sys.path.append({str(Path(__file__).parents[3])!r})
from tests.deploy.listeners import listeners
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # whole, beside the other rank's
say("listens", *listeners(os.getsid(0)))
dist.barrier()
if "--fail-first" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(1)
say("sum", int(total), "of", dist.get_world_size())
"""
TORCHRUN = f"{shlex.quote(sys.executable)} -m torch.distributed.run"
SPAWNED = """
import os, torch.multiprocessing as mp
def rank(number):
    os.environ.update(RANK=str(number), WORLD_SIZE="2")
    exec(open("rank.py").read())
if __name__ == "__main__":
    mp.spawn(rank, nprocs=2)
"""


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


def opened(folder: Path, line: str) -> tuple[set[str], str]:
    """Run a line of the shell as a probe does; return the ports beyond loopback, and its output."""
    (folder / "rank.py").write_text(RANK)
    (folder / "spawned.py").write_text(SPAWNED)
    with socket.socket(socket.AF_UNIX) as agent:
        address = str(folder / "agent")
        agent.bind(address)
        agent.listen(64)
        order = folder / "attach.json"
        order.write_text(json.dumps({"address": address, "options": {}}))
        env = {**os.environ, hook.ATTACH: str(order), "PYTHONPATH": str(ENTRY)}
        words = ["bash", "-c", f"cd {shlex.quote(str(folder))}; {line}"]
        seen, code, output = watched(words, env, within_s=240)
    assert code == 0, output
    shown = [text.split()[1:] for text in output.splitlines() if text.startswith("listens")]
    seen.update(*shown)
    return {each for each in seen if not each.startswith(("127.", "::1:"))}, output


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, id=name, marks=mark)
        for name, mark, line in (
            ("c10d", pytest.mark.slow, f"{TORCHRUN} --nproc-per-node 2 rank.py"),
            (
                *("static", pytest.mark.long),
                f"{TORCHRUN} --master-port @PORT@ --nproc-per-node 2 rank.py",
            ),
            (
                *("restarted", pytest.mark.long),
                f"{TORCHRUN} --standalone --max-restarts 1 --nproc-per-node 2 rank.py --fail-first",
            ),
            (
                *("spawned", pytest.mark.slow),
                "MASTER_ADDR=localhost MASTER_PORT=@PORT@ python spawned.py",
            ),
        )
    ],
)
def test_nothing_of_one_node_listens_beyond_it(tmp_path: Path, port: int, line: str) -> None:
    beyond, output = opened(tmp_path, line.replace("@PORT@", str(port)))
    assert output.count("sum 3 of 2") == 2
    assert beyond == set()


@pytest.mark.long
def test_a_second_launch_at_the_same_port_does_not_meet_the_first(
    tmp_path: Path, port: int
) -> None:
    again = f"{TORCHRUN} --master-port {port} --nproc-per-node 2 rank.py"
    beyond, output = opened(tmp_path, f"{again}; {again}")
    assert output.count("sum 3 of 2") == 4
    assert beyond == set()


@pytest.mark.slow
def test_launchers_of_two_nodes_meet_as_they_would_alone(tmp_path: Path, port: int) -> None:
    place = f"--rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-id two"
    node = f"{TORCHRUN} --nnodes 2 {place} --nproc-per-node 1 rank.py"
    _, output = opened(tmp_path, f"{node} & {node}; wait")
    assert output.count("sum 3 of 2") == 2
