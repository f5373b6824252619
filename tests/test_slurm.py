"""The Slurm script of docs/clusters.md, run with commands that write down how they are called."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "docs" / "tune.sbatch"

#: What stands on PATH; each writes a line to $CALLS. srun runs what it is given, as Slurm would.
FAKES = {
    "scontrol": 'printf "n1\\nn2\\nn3\\n"',
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "hostname": 'echo "fd00::7 10.0.0.7 192.168.0.7"',
    "ray": '[[ " $* " == *" --block "* ]] && exec sleep 60; exit 0',
    "python": 'n=$(cat "$CALLS.polls" 2>/dev/null || echo 0); echo $((n + 1)) > "$CALLS.polls"; '
    "echo $((n + 1))",
    "tuner": '[[ $1 == doctor ]] && exit 0; [[ -n "$TUNER_WAITS" ]] || exit "$TUNER_CODE"; '
    'trap "echo interrupted >> \\"$CALLS\\"; exit 130" INT; '
    "for _ in $(seq 600); do sleep 0.1; done",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in FAKES.items():
        fake = folder / name
        fake.write_text(f'#!/bin/bash\necho "{name} $*" | head -1 >> "$CALLS"\n{body}\n')
        fake.chmod(0o755)
    return {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_JOB_NAME": "night",
        "RAY_WAIT_S": "0.01",
        "TUNER_CODE": "0",
        "TUNER_WAITS": "",
    }


def calls(environment: dict[str, str]) -> list[str]:
    return Path(environment["CALLS"]).read_text().splitlines()


def test_ray_is_started_on_every_node_and_the_study_gets_its_address(
    environment: dict[str, str],
) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT), "qwen2.5-7b", "--budget-kJ", "9"],
        env=environment,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    made = calls(environment)
    head = [call for call in made if call.startswith("ray start --head")]
    assert head == [
        "ray start --head --node-ip-address=10.0.0.7 --port=6379 --include-dashboard=false --block"
    ]
    assert "ray start --address=10.0.0.7:6379 --block" in made
    others = [call for call in made if call.startswith("srun") and "--exclude" in call]
    assert len(others) == 1
    assert "--nodes=2 --ntasks=2 --exclude=n1" in others[0]
    assert "tuner doctor --ray 10.0.0.7:6379" in made
    assert "tuner optimize qwen2.5-7b --budget-kJ 9 --ray 10.0.0.7:6379 --name night" in made
    # All three nodes were there before the study began.
    began = next(i for i, call in enumerate(made) if call.startswith("tuner optimize"))
    assert sum(call.startswith("python") for call in made[:began]) == 3
    assert made[-1] == "ray stop"


def test_the_studys_exit_code_is_the_jobs(environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT)], env=environment | {"TUNER_CODE": "2"}, timeout=60, check=False
    )
    assert done.returncode == 2


def test_slurms_signal_before_the_end_interrupts_the_study(environment: dict[str, str]) -> None:
    job = subprocess.Popen(["bash", str(SCRIPT)], env=environment | {"TUNER_WAITS": "1"})
    began_s = time.monotonic()
    while not any(call.startswith("tuner optimize") for call in _sofar(environment)):
        assert time.monotonic() - began_s < 60
        time.sleep(0.05)
    time.sleep(0.3)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=60) == 130
    assert calls(environment)[-2:] == ["interrupted", "ray stop"]


def _sofar(environment: dict[str, str]) -> list[str]:
    path = Path(environment["CALLS"])
    return path.read_text().splitlines() if path.exists() else []


def test_the_page_shows_the_script_as_it_is() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    assert f"```text\n{SCRIPT.read_text(encoding='utf-8')}```\n" in page
