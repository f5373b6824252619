"""Launches with torch's CUDA build; as a program it runs one in this process: FOLDER CASE.

That process and its children have torch's CUDA build, and the twin's NVML and CUDA driver. Runner,
fork server and ranks take the path of a node with GPUs, up to the ranks' own cuInit.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.figures import ROOT
from tests.support.commands import finished
from tests.support.scripts import on_every_device
from tests.twin import TwinGpu, TwinNode
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.rank_group import RankGroup
from tuner.workload.node.rank_server import (
    PRELOAD_OPTIONAL,
    PREPARE,
    RankServer,
    RankSpec,
    control_socket,
)
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import INSPECTIONS, ProbeRequest, WindowPolicy
from tuner.workload.scripts.command import _FRAMEWORKS, Script

#: Commands in the folder of the tests' scripts.
SCRIPTS = {
    "DeepSpeed script": "plain_deepspeed.py --deepspeed --deepspeed_config ds.json",
    "Trainer script": "hf_trainer.py --output_dir out --per_device_train_batch_size 4",
    "Lightning script": "lightning_module.py",
}
CASES = ("built-in program", *SCRIPTS, "preloads")
#: What users' scripts have imported before ranks are forked.
FRAMEWORKS = ("triton", "triton.language", *sorted({n for m in _FRAMEWORKS.values() for n in m}))
H100 = TwinGpu(name="NVIDIA H100 80GB HBM3", compute=(9, 0))
FIRST_USE = """
import torch
try:
    torch.cuda.init()
except Exception as error:
    print("first use:", error)
"""
REFUSED = "Cannot re-initialize CUDA in forked subprocess"


@dataclass
class Launched:
    """What a case started, and how far it came.

    Attributes:
        ranks: process ids of the ranks.
        bad_forks: imports after which torch refuses CUDA in a forked rank.
        why: the fork server's reason not to fork ranks; empty if there is none.
        versions: of the packages.
        touches: number of calls that started the CUDA driver in another process than a rank.
        reached: number of ranks that called cuInit themselves.
    """

    ranks: list[int] = field(default_factory=list)
    bad_forks: list[str] = field(default_factory=list)
    why: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    touches: int = 0
    reached: int = 0

    def watch(self, server: RankServer) -> None:
        """Note the ranks that a fork server starts from here on."""
        plain = server.spawn

        def spawn(specs: Sequence[RankSpec], listener: Any) -> RankGroup:
            group = plain(specs, listener)
            self.ranks += group.pids
            return group

        server.spawn = spawn  # type: ignore[method-assign]

    def fork(self, server: RankServer, folder: Path, after: str) -> None:
        """Fork a rank that uses CUDA for the first time, whatever the server thinks of forking."""
        program, log = folder / "first_use.py", folder / f"{after}.log"
        program.write_text(FIRST_USE)
        listener, address, remove = control_socket()
        env = server.env | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        del env["PYTORCH_NVML_BASED_CUDA_CHECK"]
        spec = RankSpec((str(program),), env, str(log), str(folder), address)
        try:
            group = server.spawn([spec], listener)
            while (event := group.next_event(60.0)) is None or event.kind != "exit":
                pass
        finally:
            remove()
        self.bad_forks += [after] * (REFUSED in log.read_text())


def _probe(job: TrainingJob, request: ProbeRequest, folder: Path) -> Launched:
    """Run a probe as a node with GPUs does, and fork one more rank."""
    found = Launched()
    with closing(LocalRunner(job, detect_cluster(), run_dir=folder / "run")) as runner:
        server = runner.node.server
        found.watch(server)
        runner.run(request)
        found.fork(server, folder, "its imports")
        found.why = server.fork_unsafe
    return found


def _built_in(folder: Path) -> Launched:
    launch, window = Settings(data_parallel=2, micro_batch=1), WindowPolicy(min_s=1, max_s=2)
    return _probe(load_job("tiny-gpt"), ProbeRequest("p", launch, window=window), folder)


def _script(name: str, folder: Path) -> Launched:
    """Start a script as its inspection does."""
    work = folder / "work"
    shutil.copytree(ROOT / "tests" / "scripts", work)
    lightning = work / "lightning_module.py"
    lightning.write_text(lightning.read_text().replace('"cpu"', '"gpu"'))
    config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
    (work / "ds.json").write_text(json.dumps(config))
    blank = on_every_device(Script(SCRIPTS[name], cwd=work), detect_cluster())
    launch, window = blank.baseline.launch, WindowPolicy()
    return _probe(blank, ProbeRequest("i", launch, window=window, purpose=INSPECTIONS[0]), folder)


def _preloads(folder: Path) -> Launched:
    """Import each optional module in turn, and fork a rank after it."""
    found = Launched()
    with closing(RankServer(needs=("torch",), env={"DS_ACCELERATOR": "cuda"})) as server:
        server._optional = ()
        server.start()
        found.watch(server)
        for name in ("torch", "deepspeed", *PRELOAD_OPTIONAL, *FRAMEWORKS):
            answer = server._request_reply(
                {**PREPARE, "optional": [name], "devices": True}, timeout_s=120
            )
            found.why = found.why or answer["fork_unsafe"]
            found.fork(server, folder, name)
    return found


def launch(case: str, packages: Path) -> Launched:
    """Run one case of `CASES` with the packages of a folder in front of this environment's.

    Raises:
        RuntimeError: the case did not end by itself.
    """
    with tempfile.TemporaryDirectory() as name:
        node = TwinNode(Path(name) / "node", [H100, H100], virtual_time=False, cuda_driver=13000)
        env = os.environ | node.environment()
        del env["LD_PRELOAD"]  # it would hold ranks back to the speed of a GPU
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(packages)])
        with closing(node):
            words = (sys.executable, "-m", __name__, name, case)
            done = finished(words, env=env, cwd=ROOT, timeout=300.0)
            touching = [pid for pid, _ in node.cuda_touches()]
        if done.returncode:
            raise RuntimeError(f"{case}: {done.stdout[-500:]}{done.stderr[-1500:]}")
        found = Launched(**json.loads((Path(name) / "launched.json").read_text()))
    found.touches = sum(pid not in found.ranks for pid in touching)
    found.reached = len(set(found.ranks).intersection(touching))
    return found


def main() -> int:
    folder, case = Path(sys.argv[1]), sys.argv[2]
    # On a twin, but its ranks are to use CUDA.
    patch("tuner.workload.node.platforms.nvidia.on_twin", lambda *_: False).start()
    if case in SCRIPTS:
        found = _script(case, folder)
    else:
        found = {"built-in program": _built_in, "preloads": _preloads}[case](folder)
    packages = ("torch", "triton", "deepspeed", "transformers")
    found.versions = {name: importlib.metadata.version(name) for name in packages}
    (folder / "launched.json").write_text(json.dumps(vars(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
