"""Live knobs of the user in the files that start a job: the hook sets them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.scripts import CPU, script_job
from tuner.deploy.launch_files import write_launch_files
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InvalidValue
from tuner.search_spaces.knob_declarations import Knob
from tuner.workload.scripts.script_facts import ScriptFacts
from tuner.workload.scripts.script_job import ScriptJob

WORKERS = Knob("workers", (0, 2), live=True)


def job_in(folder: Path, *, launcher: bool = False) -> ScriptJob:
    before = f"{sys.executable} -m torch.distributed.run --nproc_per_node 2 " if launcher else ""
    frame = ScriptFacts("torch", micro_batch=4, accumulation=1, live={"workers": 0})
    return script_job(f"{before}train.py --depth 2", folder, frame, (WORKERS,))


@pytest.mark.usefixtures("launchers_here")
@pytest.mark.parametrize("launcher", [False, True])
def test_launch_files_set_the_chosen_values(tmp_path: Path, launcher: bool) -> None:
    job = job_in(tmp_path, launcher=launcher)
    live = Settings(workers=2, clock_MHz=1000)
    out = tmp_path / "best"
    write_launch_files((Configuration(job.baseline.launch, live), job, CPU), out)
    file = "attach.json" if launcher else "options.json"
    order = json.loads((out / file).read_text())
    assert (order["options"] if launcher else order)["live"] == {"workers": 2}
    text = (out / "launch.sh").read_text()
    assert f"joulefront_hook/{'entry' if launcher else '__main__.py'}" in text
    assert "workers" not in (out / "clocks.sh").read_text()
    assert "1000MHz" in (out / "clocks.sh").read_text()
    assert "# Live settings: 1000MHz;" in text


def test_a_value_that_the_knob_does_not_have_is_refused(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    at = replace(job.baseline, live=Settings(workers=5))
    with pytest.raises(InvalidValue, match="workers"):
        write_launch_files((at, job, CPU), tmp_path / "best")
