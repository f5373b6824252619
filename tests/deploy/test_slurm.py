"""The script docs/tune.sbatch, run with commands that write down how they are called.

`test_real_slurm.py` runs it under a real Slurm.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import finished, write_program

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "tune.sbatch"

#: What stands on PATH; each writes a line to $CALLS. srun runs what it is given, as Slurm would.
FAKES = {
    "scontrol": 'printf "n1\\nn2\\nn3\\n"',
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "mkdir": "exit 0",  # the nodes would each have a /tmp of their own
    "rm": "exit 0",
    "hostname": 'echo "$ADDRESSES"',
    "ray": "[[ $1 == get-auth-token ]] && { [[ $NO_TOKEN ]] && exit 2; "
    "/bin/mkdir -p ~/.ray; echo key > ~/.ray/auth_token; exit; }; "
    '[[ " $* " == *" --block "* ]] && exec sleep 60; exit 0',
    # Ray's nodes: as many as were started, but for those that do not join.
    "python": 'n=$(grep -c "^ray start" "$CALLS"); echo $((n < JOINED ? n : JOINED))',
    "tuner": '[[ $1 == doctor ]] && exit 0; [[ -n "$TUNER_WAITS" ]] || exit "$TUNER_CODE"; '
    'trap "echo interrupted >> \\"$CALLS\\"; exit 130" INT TERM; echo waits >> "$CALLS"; '
    "for _ in $(seq 600); do sleep 0.1; done",
}


def write_fakes(top: Path, fakes: dict[str, str], **variables: str) -> dict[str, str]:
    """Write the commands below a folder; return the variables with which they are found."""
    folder = top / "bin"
    folder.mkdir()
    for name, body in fakes.items():
        write_program(
            folder / name, f'#!/bin/bash\necho "{name} $*" | head -1 >> "$CALLS"\n{body}\n'
        )
    return {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(top / "calls"),
        "HOME": str(top),
        "NO_TOKEN": "",
        "TUNER_CODE": "0",
        "TUNER_WAITS": "",
        "ADDRESSES": "fd00::7 10.0.0.7 192.168.0.7",
        "JOINED": "3",
        **variables,
    }


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    job = {
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_JOB_NAME": "night",
        "SLURM_JOB_CPUS_PER_NODE": "96(x2),64",
    }
    return write_fakes(tmp_path, FAKES, RAY_WAIT_S="0.2", **job)


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


def ray_starts(environment: dict[str, str]) -> list[str]:
    return [call for call in calls(environment) if call.startswith("srun") and "bash -c mk" in call]


def test_ray_gets_all_cores_of_each_node(environment: dict[str, str]) -> None:
    """Nodes with unlike cores, too: with one number for all, srun starts none."""
    subprocess.run(["bash", str(SCRIPT)], env=environment, timeout=60, check=True)
    steps = ray_starts(environment)
    assert len(steps) == 3
    for name, cores in (("n1", 96), ("n2", 96), ("n3", 64)):
        (step,) = [step for step in steps if f"--nodelist={name} " in step]
        assert f"--cpu-bind=none --cpus-per-task={cores} --mem=0 " in step


@pytest.mark.parametrize(
    "addresses", ["127.0.1.1\n10.0.0.7 172.17.0.1", "::1 127.0.0.1 127.0.1.1 10.0.0.7", "10.0.0.7"]
)
def test_a_head_whose_name_stands_on_loopback_is_reached_by_the_others(
    environment: dict[str, str], addresses: str
) -> None:
    """Debian writes 127.0.1.1 beside a host's own name; each node then joined itself."""
    subprocess.run(
        ["bash", str(SCRIPT)], env=environment | {"ADDRESSES": addresses}, timeout=60, check=True
    )
    steps = ray_starts(environment)
    assert sum("--node-ip-address=10.0.0.7 " in step for step in steps) == 1
    assert sum("--address=10.0.0.7:" in step for step in steps) == 2


def test_a_head_without_an_address_is_one_sentence(environment: dict[str, str]) -> None:
    done = finished(["bash", str(SCRIPT)], env=environment | {"ADDRESSES": "127.0.1.1"}, timeout=60)
    assert done.returncode == 1
    assert "n1 has no IPv4 address that other nodes reach" in done.stderr
    assert not ray_starts(environment)


@pytest.mark.parametrize(("fewest", "code"), [({}, 1), ({"FEWEST_NODES": "2"}, 0)])
def test_nodes_that_do_not_join_end_the_job(
    environment: dict[str, str], fewest: dict[str, str], code: int
) -> None:
    """The study ran on one node of four, and the job had ended well."""
    done = finished(
        ["bash", str(SCRIPT)],
        env=environment | {"JOINED": "2", "RAY_WAIT_S": "0.04", **fewest},
        timeout=60,
    )
    assert done.returncode == code
    assert ("2 of 3 nodes joined Ray" in done.stderr) == bool(code)
    assert any(call.startswith("tuner optimize") for call in calls(environment)) != bool(code)


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
