"""A block of a Python program that is tuned: real small trainings, on the twin GPU node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tuner
from tests.online.test_agent import ROOT, TORCHRUN, gpus
from tests.waiting import wait_until
from tuner.workload.hook import state

TRAIN = Path(__file__).with_name("train_block.py")
__all__ = ["gpus"]


def environment(**more: str) -> dict[str, str]:
    """The twin takes a process for a rank by LOCAL_RANK."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def locked(gpus: Any) -> list[int | None]:
    return [gpus.locked_MHz(each) for each in range(2)]


def test_limits_that_contradict_each_other_start_nothing() -> None:
    for limits, said in (
        ({"deadline": "1h", "max_slowdown": 0.05}, "leave one out"),
        ({"max_slowdown": 5.0}, "below 1"),
        ({"steps": 3}, "steps"),
        ({"follow_power": "none-such"}, "none-such cannot be read"),
        ({"follow_power": 300.0, "deadline": "1h"}, "keeps its target alone"),
        ({"follow_power": -3.0}, "not a target"),
        ({"transfer": "none-such"}, "none-such holds no"),
    ):
        with pytest.raises(tuner.InputError, match=said), tuner.tuning(**limits):  # type: ignore[arg-type]
            raise AssertionError
    with pytest.raises(TypeError, match="no argument 'dedline'"), tuner.tuning(dedline="1h"):  # type: ignore[call-arg]
        raise AssertionError


def test_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would start an agent of its own."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(tuner.InputError, match="init_process_group"), tuner.tuning():
        raise AssertionError


def test_in_a_probe_or_a_tuned_command_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hook:
        class state:
            link = object()

    monkeypatch.setitem(sys.modules, "joulefront_hook", Hook())  # type: ignore[arg-type]
    with tuner.tuning() as run:
        assert run.outcome is not None
    assert run.outcome.problem == "the program runs under tuner already"
    assert state.link is None


def test_where_nothing_is_metered_the_block_runs_and_its_error_comes_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ZeroDivisionError), tuner.tuning(max_slowdown=0.05) as run:  # noqa: PT012
        with pytest.raises(tuner.InputError, match="open already"), tuner.tuning():
            raise AssertionError
        assert run.outcome is None
        _ = 1 / 0
    assert run.outcome is not None
    assert run.outcome.exit_code == 1
    assert run.outcome.ended in ("unmetered", "fixed", "")
    assert run.metrics == {}
    assert state.link is None
    if run.outcome.ended:
        assert "the training goes on" in caplog.text
    with tuner.tuning() as again:
        pass
    assert again.outcome is not None
    assert again.outcome.exit_code == 0


@pytest.mark.needs("cc")
@pytest.mark.real
@pytest.mark.quiet
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_save_energy_one_after_the_other_and_clocks_go_back(gpus: Any, ranks: int) -> None:
    launch = [str(TORCHRUN), "--nproc-per-node", "2"] if ranks > 1 else [sys.executable]
    done = subprocess.run(
        [*launch, str(TRAIN), "500", "0"],
        env=environment(LOCAL_RANK="0", **gpus.environment()),
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr
    outcome, short = (json.loads(each) for each in done.stdout.splitlines() if each[0] == "{")
    assert (outcome["ended"], outcome["exit_code"]) == ("", 0)
    assert 470 <= outcome["steps"] <= 500
    assert sum(outcome["seconds_at"][1:]) > 2
    assert outcome["kept"]
    assert len(outcome["seen"]) > 5
    assert all(each["joulefront/power_W"] > 0 for each in outcome["seen"])
    assert len({each["joulefront/clock_MHz"] for each in outcome["seen"]}) > 1
    assert [each["rank"] for each in outcome["ranks"]] == ([0, 1] if ranks > 1 else [])
    assert 0 < short["steps"] <= 30
    assert locked(gpus) == [None, None]


@pytest.mark.needs("cc")
@pytest.mark.real
@pytest.mark.quiet
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_block_begins_with_what_another_learned_and_one_follows_a_target(
    gpus: Any, tmp_path: Path
) -> None:
    def trained(options: dict[str, Any], steps: int) -> tuple[dict[str, Any], str]:
        more = {"LOCAL_RANK": "0", "OPTIONS": json.dumps(options), **gpus.environment()}
        done = subprocess.run(
            [sys.executable, str(TRAIN), str(steps), "0"],
            env=environment(**more),
            capture_output=True,
            text=True,
            timeout=380,
        )
        assert done.returncode == 0, done.stderr
        outcome = next(line for line in done.stdout.splitlines() if line.startswith("{"))
        return json.loads(outcome), done.stderr

    keep = tmp_path / "tuned"
    first, _ = trained({"max_slowdown": 0.08, "keep": str(keep)}, 500)
    assert Path(first["record"]) == tmp_path / "tuned-1"
    again, said = trained({"max_slowdown": 0.08, "transfer": first["record"]}, 150)
    assert "is not used" not in said
    assert again["record"] is None
    tried = max(range(1, len(first["settings"])), key=first["seconds_at"].__getitem__)
    assert again["relative"][tried] == pytest.approx(first["relative"][tried], rel=0.03)
    power_W = first["balance"]["energy_J"] / first["balance"]["seconds"]
    following, _ = trained({"follow_power": 0.8 * power_W}, 200)
    (period,) = following["periods"]
    assert period["target_W"] == pytest.approx(0.8 * power_W, rel=1e-3)
    assert period["energy_J"] / period["seconds"] < 0.85 * power_W
    assert locked(gpus) == [None, None]


def block(gpus: Any, output: Path) -> subprocess.Popen[bytes]:
    with output.open("w") as file:
        return subprocess.Popen(
            [sys.executable, str(TRAIN), "800", "0"],
            env=environment(LOCAL_RANK="0", **gpus.environment()),
            stdout=file,
            stderr=file,
        )


@pytest.mark.needs("cc")
@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_clocks_go_back_if_the_training_is_killed(gpus: Any, tmp_path: Path) -> None:
    training = block(gpus, tmp_path / "out")
    try:
        wait_until(lambda: locked(gpus)[0], 120, tmp_path / "out")
    finally:
        training.send_signal(signal.SIGKILL)
        training.wait()
    wait_until(lambda: locked(gpus) == [None, None])


@pytest.mark.needs("cc")
@pytest.mark.real
@pytest.mark.quiet
@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_training_goes_on_if_the_agent_is_killed(gpus: Any, tmp_path: Path) -> None:
    training = block(gpus, tmp_path / "out")
    try:
        wait_until(lambda: locked(gpus)[0], 120, tmp_path / "out")
        (agent,) = Path(f"/proc/{training.pid}/task/{training.pid}/children").read_text().split()
        assert b"tuner.online.agent" in Path(f"/proc/{agent}/cmdline").read_bytes()
        os.kill(int(agent), signal.SIGKILL)
        wait_until(lambda: locked(gpus) == [None, None])
        wait_until(lambda: '"ended"' in (tmp_path / "out").read_text(), 150, tmp_path / "out")
    finally:
        training.kill()
        training.wait()
    said = (tmp_path / "out").read_text()
    assert "the agent ended; the training goes on untuned" in said
    (outcome,) = (json.loads(line) for line in said.splitlines() if line.startswith("{"))
    assert (outcome["ended"], outcome["exit_code"]) == ("fault", 0)
    assert "-9" in outcome["problem"]
