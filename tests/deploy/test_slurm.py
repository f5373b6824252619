"""The script docs/tune.sbatch, run with commands that write down how they are called.

`test_real_slurm.py` runs it under a real Slurm.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "tune.sbatch"

#: What stands on PATH; each writes a line to $CALLS. srun runs what it is given, as Slurm would.
FAKES = {
    "scontrol": 'printf "n1\\nn2\\nn3\\n"',
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "mkdir": "exit 0",  # the nodes would each have a /tmp of their own
    "rm": "exit 0",
    "hostname": 'echo "fd00::7 10.0.0.7 192.168.0.7"',
    "ray": "[[ $1 == get-auth-token ]] && { [[ $NO_TOKEN ]] && exit 2; "
    "/bin/mkdir -p ~/.ray; echo key > ~/.ray/auth_token; exit; }; "
    '[[ " $* " == *" --block "* ]] && exec sleep 60; exit 0',
    "python": 'n=$(cat "$CALLS.polls" 2>/dev/null || echo 0); echo $((n + 1)) > "$CALLS.polls"; '
    "echo $((n + 1))",
    "tuner": '[[ $1 == doctor ]] && exit 0; [[ -n "$TUNER_WAITS" ]] || exit "$TUNER_CODE"; '
    'trap "echo interrupted >> \\"$CALLS\\"; exit 130" INT TERM; '
    "for _ in $(seq 600); do sleep 0.1; done",
}


def write_fakes(top: Path, fakes: dict[str, str], **variables: str) -> dict[str, str]:
    """Write the commands below a folder; return the variables with which they are found."""
    folder = top / "bin"
    folder.mkdir()
    for name, body in fakes.items():
        fake = folder / name
        fake.write_text(f'#!/bin/bash\necho "{name} $*" | head -1 >> "$CALLS"\n{body}\n')
        fake.chmod(0o755)
    return {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(top / "calls"),
        "HOME": str(top),
        "NO_TOKEN": "",
        "TUNER_CODE": "0",
        "TUNER_WAITS": "",
        **variables,
    }


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    job = {
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_JOB_NAME": "night",
        "SLURM_CPUS_ON_NODE": "96",
    }
    return write_fakes(tmp_path, FAKES, RAY_WAIT_S="0.01", **job)


def calls(environment: dict[str, str]) -> list[str]:
    path = Path(environment["CALLS"])
    return path.read_text().splitlines() if path.exists() else []


def test_the_studys_exit_code_is_the_jobs(environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT)], env=environment | {"TUNER_CODE": "2"}, timeout=60, check=False
    )
    assert done.returncode == 2


def test_the_token_is_private(environment: dict[str, str], tmp_path: Path) -> None:
    # An earlier version of the script, or Ray itself, left it readable.
    (tmp_path / ".ray").mkdir(mode=0o755)
    (tmp_path / ".ray" / "auth_token").touch(mode=0o644)
    subprocess.run(["bash", str(SCRIPT)], env=environment, timeout=60, check=True)
    assert (tmp_path / ".ray").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600


def test_second_day_5_ray_gets_all_cores_of_each_node(environment: dict[str, str]) -> None:
    subprocess.run(["bash", str(SCRIPT)], env=environment, timeout=60, check=True)
    steps = [call for call in calls(environment) if call.startswith("srun") and "bash -c" in call]
    assert len(steps) == 2
    for step in steps:
        assert "--cpu-bind=none --cpus-per-task=96 --mem=0 " in step


def test_without_a_token_nothing_is_started(environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT)], env=environment | {"NO_TOKEN": "1"}, timeout=60, check=False
    )
    assert done.returncode == 1
    assert not [call for call in calls(environment) if call.startswith(("ray start", "tuner"))]


def test_nodes_are_counted_without_the_modules_of_the_submit_folder(
    environment: dict[str, str],
) -> None:
    subprocess.run(["bash", str(SCRIPT)], env=environment, timeout=60, check=True)
    counts = [call for call in calls(environment) if call.startswith("python")]
    assert counts
    assert all(call.startswith("python -P -c ") for call in counts)
