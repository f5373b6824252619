"""Users' scripts as jobs: declared without a start, or inspected by a runner of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from tuner.problem.job_request import with_knobs
from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.knob_declarations import Knob
from tuner.workload.node.runner import LocalRunner
from tuner.workload.scripts import inspection
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.inspection import blank_job, inspect_script
from tuner.workload.scripts.script_facts import ScriptFacts
from tuner.workload.scripts.script_job import ScriptJob

#: A node of two cores with made-up figures.
CPU = Cluster("cpu", Device("core", "cpu", 2**33, 1e11, 1e10, 2.0, 15.0), devices_per_node=2)
#: Two nodes of eight GPUs, with made-up figures.
GPU = Cluster(
    "gpus", Device("H100", "cuda", 80 * 2**30, 1e15, 3e12, 70.0, 700.0), devices_per_node=8, nodes=2
)


def script_job(
    command: str, folder: Path, frame: ScriptFacts, knobs: Sequence[Knob | str] = (), **changes: Any
) -> ScriptJob:
    """Return the job of a command on two cores, as if it had been inspected.

    Args:
        command: as the user types it; train.py exists in `folder` afterwards.
    """
    (folder / "train.py").touch()
    script = with_knobs(Script(command, cwd=folder), knobs)
    job = ScriptJob(
        name="train",
        model={},
        sequence_length=0,
        global_batch=8,
        steps=100,
        words=script.words,
        cwd=str(folder),
        devices=2,
        frame=frame,
        launcher=script.launcher,
    )
    return replace(job, **changes).declares(script.knobs)


def on_every_device(script: Script, cluster: Cluster) -> ScriptJob:
    """Return the job of a command as if its launcher started a rank on every device of a node."""
    devices = cluster.devices_per_node
    with mock.patch.object(inspection, "ranks_today", return_value=devices):
        return blank_job(script, cluster)


@contextmanager
def inspected(
    script: Script, cluster: Cluster, runs: Path
) -> Iterator[tuple[LocalRunner, ScriptJob]]:
    """Inspect a script; give its job and a runner that probes it."""
    blank = blank_job(script, cluster)
    with closing(LocalRunner(blank, cluster, run_dir=runs)) as runner:
        job = inspect_script(script, blank, runner.run_for_job, cluster=cluster, folder=runs)
        runner.set_job(job)
        yield runner, job


#: What a rank tells of an optimizer of torch that loops over its parameters.
OPTIMIZER = {"kernel": "loop", "kernels": ["foreach", "fused"], "on_device": False}


def groups_of_steps(waited: float, updated: float) -> list[dict[str, Any]]:
    """Return what a rank tells of its first four steps, of a second each.

    `waited` and `updated` are the seconds of a step in the loader and in the optimizer.
    """
    return [
        {
            "drawn": [[0, 4, False]],
            "passes": 1,
            "shapes": [[4, 2]],
            "loss": 1.0 - number / 10,
            "took": 1.0,
            "waited": waited,
            "updated": updated,
            "indices": [number],
            "batches": [100 + number],
        }
        for number in range(4)
    ]
