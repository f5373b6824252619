"""Parts of the receipt: trainings, energy between readings, shares of devices, text, Slurm."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.receipt.conftest import UserFolder
from tests.support.commands import write_program
from tuner.receipt.command import joules, receipt_lines, seconds
from tuner.receipt.measure import receipt_file
from tuner.receipt.receipt import (
    DeviceShare,
    DeviceTotals,
    EnergyCurve,
    RankCount,
    Receipt,
    Training,
    TrainingShare,
    comment_of,
    own_energy_J,
    read_counts,
    trainings_of,
    write_comment,
)
from tuner.search_spaces.errors import InputError
from tuner.workload.hook.tally import HEAD
from tuner.workload.node.host import CommandCores
from tuner.workload.node.meters import Reading
from tuner.workload.records.probe import MeterInfo, PowerSample


def rank(number: int = 0, world: int = 1, parent: int = 1, *, first_s: float = 10.0) -> RankCount:
    return RankCount(
        *(number, world, 100 + number, parent, ("train.py",)), 11, first_s, first_s + 20, 88, 8
    )


# ---- trainings


def test_ranks_of_one_parent_are_one_training() -> None:
    ranks = [rank(number, 4, first_s=10 + number / 10) for number in range(4)]
    (training,) = trainings_of(ranks)
    assert training.lead is ranks[0]
    assert training.samples == 4 * 80


def test_a_second_launch_of_the_same_ranks_is_a_second_training() -> None:
    found = trainings_of([rank(0, 2), rank(1, 2), rank(0, 2, first_s=50), rank(1, 2, first_s=51)])
    assert [[each.first_s for each in training.ranks] for training in found] == [[10, 10], [50, 51]]


def test_launches_of_two_parents_at_once_are_two_trainings() -> None:
    found = trainings_of([rank(0, 2, 7), rank(0, 2, 8), rank(1, 2, 8), rank(1, 2, 7)])
    assert [{each.parent for each in training.ranks} for training in found] == [{7}, {8}]


def test_processes_without_a_group_train_apart() -> None:
    assert len(trainings_of([rank(), rank()])) == 2


def test_unknown_samples_stay_unknown() -> None:
    ranks = (rank(0, 2), replace(rank(1, 2), samples=math.nan))
    assert math.isnan(Training(ranks).samples)
    assert math.isnan(Training((replace(rank(), samples=8),)).samples)  # none after the first step


FACTS = {"rank": 0, "world": 1, "pid": 5, "parent": 1, "words": ["a"]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 100,
        *(
            HEAD.pack(2, 4.0, 5.0, 0.0, 0.0) + text.encode()
            for number in ("Infinity", "-Infinity", "1e999", "1" * 400, "[" * 50_000)
            for text in [json.dumps({**FACTS, "rank": "?"}).replace('"?"', number)]
        ),
        HEAD.pack(0, 1.0, 1.0, 0.0, 0.0) + json.dumps(FACTS).encode(),
        HEAD.pack(2, math.nan, 1.0, 0.0, 0.0) + json.dumps(FACTS).encode(),
        HEAD.pack(2, 5.0, 4.0, 0.0, 0.0) + json.dumps(FACTS).encode(),
        HEAD.pack(2, 4.0, 5.0, 0.0, 0.0) + b"[]",
        HEAD.pack(2, 4.0, 5.0, 0.0, 0.0) + json.dumps({**FACTS, "rank": None}).encode(),
        HEAD.pack(1e300, 4.0, 5.0, 0.0, 0.0) + json.dumps(FACTS).encode(),
        HEAD.pack(2, 0.5, 5.0, 0.0, 0.0) + json.dumps(FACTS).encode(),  # before the start
        HEAD.pack(2, 4.0, 1e12, 0.0, 0.0) + json.dumps(FACTS).encode(),  # in the future
        HEAD.pack(2, 4.0, 5.0, 0.0, 0.0) + json.dumps({**FACTS, "world": 10**30}).encode(),
        HEAD.pack(2, 4.0, 5.0, 0.0, 0.0) + json.dumps({**FACTS, "rank": 1}).encode(),
        HEAD.pack(2, 4.0, 5.0, 0.0, 0.0) + json.dumps({**FACTS, "words": [5]}).encode(),
    ],
)
def test_a_file_without_counts_is_left_out(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "odd").write_bytes(data)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    good = HEAD.pack(2, 4.0, 5.0, 16.0, 8.0) + json.dumps(FACTS).encode()
    (tmp_path / "good").write_bytes(good)
    assert [count.steps for count in read_counts(tmp_path, began_s=1.0)] == [2]


def test_of_many_files_of_counts_the_newest_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.receipt.receipt._MOST_FILES", 3)
    for number in range(9):
        data = HEAD.pack(number + 1, 4.0, 5.0, 16.0, 8.0) + json.dumps(FACTS).encode()
        (tmp_path / f"f{number}").write_bytes(data)
        os.utime(tmp_path / f"f{number}", (number, number))
    assert {count.steps for count in read_counts(tmp_path)} == {7, 8, 9}


# ---- energy and devices


def test_energy_between_two_readings_lies_on_their_line() -> None:
    curve = EnergyCurve(Reading(10.0, 1000.0))
    curve.add(Reading(12.0, 1400.0))
    curve.add(Reading(14.0, 1500.0))
    assert [curve.energy_at(t) for t in (9.0, 10.0, 11.0, 13.0, 15.0)] == [0, 0, 200, 450, 500]
    assert (curve.time_s, curve.energy_J) == (4.0, 500.0)


def test_a_moment_beyond_the_last_reading_is_asked_again() -> None:
    curve = EnergyCurve(Reading(0.0, 0.0))
    assert curve.energy_at(1.0) == 0.0
    curve.add(Reading(2.0, 100.0))
    assert curve.energy_at(1.0) == 50.0


def test_energies_of_moments_long_ago_are_kept_as_long_as_they_are_wanted() -> None:
    curve = EnergyCurve(Reading(0.0, 0.0))
    for second in range(1, 2000):
        curve.add(Reading(float(second), 10.0 * second))
        assert curve.energy_at(1.0) == 10.0 or second < 1
        curve.forget({1.0})


def test_powers_of_devices_add_up_to_the_counters() -> None:
    totals = DeviceTotals(0.0, tells_devices=True)
    for second in (1.0, 2.0):
        extra = {"gpu0_power_W": 300.0, "gpu1_power_W": 100.0, "gpu0_utilisation": 1.0}
        extra |= {"gpu1_utilisation": 0.5 * (second - 1), "gpu0_throttle_power": second - 1}
        totals.add(PowerSample(second, 400.0, extra))
    first, second = totals.shares(mean_W=440.0)
    assert (first.name, first.mean_W, first.idle, first.throttled) == ("GPU 0", 330.0, 0.0, 0.5)
    assert (second.mean_W, second.idle) == (110.0, 0.75)
    assert math.isnan(second.throttled)


def test_a_single_gpu_has_its_whole_power() -> None:
    totals = DeviceTotals(0.0, tells_devices=True)
    totals.add(PowerSample(1.0, 90.0, {"utilisation": 0.25, "throttle_hw": 1.0}))
    (only,) = totals.shares(100.0)
    assert (only.mean_W, only.idle, only.throttled) == (100.0, 0.75, 1.0)


def test_without_a_sample_no_device_is_known() -> None:
    assert DeviceTotals(0.0, tells_devices=True).shares(100.0) == ()


# ---- text


SHARE = TrainingShare(("train.py",), 1, 1, 1201, 64.0, 1200.0, 12_000.0, 38_400.0)
RECEIPT = Receipt(
    state="ended",
    command=("python", "train.py"),
    host="node7",
    started="2026-11-26T10:00:00+00:00",
    began_s=0.0,
    time_s=1300.0,
    energy_J=13_000.0,
    meter=MeterInfo("nvml", "gpu", "NVML total-energy counter of 2 GPUs"),
    exit_code=0,
    first_step_energy_J=640.0,
    trainings=(SHARE,),
    devices=(DeviceShare("GPU 0", 6.0, 0.1, 0.02), DeviceShare("GPU 1", 4.0, 0.3, 0.0)),
)


def test_the_receipt_as_text() -> None:
    assert receipt_lines(RECEIPT, Path("runs/energy.json")) == [
        "Receipt of python train.py on node7",
        "  energy      13.0 kJ (GPUs, metered: NVML total-energy counter of 2 GPUs)",
        "  time        22 min, exit code 0",
        "  first step  after 64 s and 640 J, which stand apart",
        "  steps       1,201, 10.0 J and 1.00 s a step, 0.312 J a sample",
        "  power       10.0 W on average: GPU 0 6.00 W, GPU 1 4.00 W",
        "  devices     20 % idle and 1.0 % throttled of the time",
        "  file        runs/energy.json",
    ]


def test_the_part_of_a_command_stands_beside_the_figure_of_a_node_that_others_used() -> None:
    shared = replace(RECEIPT, core_share=0.5, own_energy_J=6_600.0)
    (line,) = set(receipt_lines(shared)) - set(receipt_lines(RECEIPT))
    assert line == "  by itself   about 6.60 kJ: 50 % of the cores' busy time was its own"
    assert receipt_lines(replace(shared, core_share=0.95)) == receipt_lines(RECEIPT)


def _write_proc(
    proc: Path, busy: int, threads: list[tuple[int, int]], child_ticks: int = 0
) -> None:
    # A node of the cores of this process, all `busy` ticks each, and process 7 with one child, 8.
    cores = "".join(f"cpu{core} {busy} 0 0 0 0 0 0\n" for core in sorted(os.sched_getaffinity(0)))
    (proc / "stat").write_text(f"cpu 0 0 0 0 0 0 0\n{cores}intr 0\n")
    for pid, ticks in ((7, 30), (8, child_ticks)):
        for task, (ran_ns, waited_ns) in enumerate(threads):
            folder = proc / str(pid) / "task" / str(task)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "schedstat").write_text(f"{ran_ns} {waited_ns} 5\n")
            (folder / "children").write_text("8 " if pid == 7 and not task else "")
        text = f"{pid} (a b) R 1 {'0 ' * 9}{ticks} 0 5 5 0\n"
        (proc / str(pid) / "stat").write_text(text)


def test_the_share_of_a_command_is_its_processor_time_of_that_of_all(tmp_path: Path) -> None:
    count = len(os.sched_getaffinity(0))
    _write_proc(tmp_path, 1000, [(1, 1)])
    cores = CommandCores(proc=tmp_path)
    _write_proc(tmp_path, 1200, [(3, 1), (3, 1)], child_ticks=60)
    cores.look(7)
    assert cores.used_s == pytest.approx(1.1)  # 40 and 70 ticks
    assert cores.share == pytest.approx(1.1 / (2 * count))
    assert cores.waited == 0.25
    cores.look(7, used_s=1.0)  # it has ended
    assert cores.share == pytest.approx(1 / (2 * count))
    curve = EnergyCurve(Reading(0.0, 0.0))
    curve.add(Reading(10.0, 100.0))
    expected_J = 4 * 10 * 0.75 + 60 / (2 * count)
    assert own_energy_J(curve, cores, idle_W=4.0) == pytest.approx(expected_J)


def test_ticks_of_a_moment_tell_no_share(tmp_path: Path) -> None:
    _write_proc(tmp_path, 1000, [(1, 1)])
    cores = CommandCores(proc=tmp_path)
    cores.look(7)
    assert math.isnan(cores.share)


def test_a_single_step_has_no_figures_a_step() -> None:
    once = replace(SHARE, steps=1, time_s=0.0, energy_J=0.0, samples=math.nan)
    (line,) = [
        each for each in receipt_lines(replace(RECEIPT, trainings=(once,))) if "steps" in each
    ]
    assert line == "  steps       1"


def test_what_is_unknown_is_left_out() -> None:
    nothing = replace(
        RECEIPT, trainings=(), devices=(), state="running", exit_code=None, notes=("Seen.",)
    )
    lines = receipt_lines(nothing)
    assert [line.split()[0] for line in lines[1:-1]] == ["energy", "time", "power"]
    assert lines[2].endswith("still running")
    assert lines[-1] == "Seen."
    assert nothing.to_json()["steps"] == 0


@pytest.mark.parametrize(
    ("energy_J", "text"),
    [
        (0.00024, "0.000240 J"),
        (9.806, "9.81 J"),
        (999.9, "1,000 J"),
        (12_345, "12.3 kJ"),
        (3.6e6, "1.00 kWh"),
    ],
)
def test_joules_in_the_unit_of_their_size(energy_J: float, text: str) -> None:
    assert joules(energy_J) == text


def test_seconds_in_the_unit_of_their_size() -> None:
    assert [seconds(t) for t in (0.0004, 0.5, 2.0, 61.0, 600.0)] == [
        *("0.400 ms", "500 ms", "2.00 s", "61 s", "10 min")
    ]


# ---- the file


def test_a_receipt_may_be_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "energy.json"
    path.write_text(json.dumps(RECEIPT.to_json(), indent=1))
    assert receipt_file(str(path), tmp_path, ["true"]) == path


def test_two_receipts_of_one_second_have_two_folders(tmp_path: Path) -> None:
    files = {receipt_file(None, tmp_path, ["python", "a b/train.py"]) for _ in range(5)}
    assert len(files) == 5
    assert all(file.parent.name.startswith("train-") for file in files)


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no receipt"):
        receipt_file(str(tmp_path), tmp_path, ["true"])


# ---- Slurm


def fake_slurm(folder: Path, *, comment: str = "(null)", update: str = "") -> dict[str, str]:
    """Write scontrol and squeue, and return the variables of a job."""
    folder.mkdir()
    scripts = {
        "scontrol": f'#!/bin/sh\nprintf "%s\\n" "$@" >>{folder}/calls\n{update}\n',
        "squeue": f'#!/bin/sh\necho "{comment}"\n',
    }
    for name, text in scripts.items():
        write_program(folder / name, text)
    return {"SLURM_JOB_ID": "77", "PATH": f"{folder}:{os.environ['PATH']}"}


def test_the_comment_is_one_line_of_figures() -> None:
    assert comment_of(RECEIPT) == (
        "energy_J=13000 scope=gpu meter=metered time_s=1300.0 mean_W=10 steps=1201 "
        "J_per_step=10.0 J_per_sample=0.312"
    )


def test_the_job_gets_the_comment(tmp_path: Path) -> None:
    environ = fake_slurm(tmp_path / "bin")
    assert write_comment(RECEIPT, environ).startswith(
        "The comment of Slurm job 77 is now: energy_J"
    )
    calls = (tmp_path / "bin" / "calls").read_text().splitlines()
    assert calls == ["update", "JobId=77", f"Comment={comment_of(RECEIPT)}"]


def test_a_comment_of_the_users_own_stays_in_front(tmp_path: Path) -> None:
    environ = fake_slurm(tmp_path / "bin", comment="paper 3") | {"SLURM_NNODES": "2"}
    assert f"now: paper 3; node=node7 {comment_of(RECEIPT)}" in write_comment(RECEIPT, environ)


@pytest.mark.parametrize(
    ("update", "environ", "sentence"),
    [
        ("echo slurm_update error: Access denied; exit 1", {}, "error: Access denied"),
        ("exit 4", {}, "exit code 4"),
        ("", {"SLURM_JOB_ID": ""}, "this is no Slurm job"),
        ("", {"PATH": "/nowhere"}, "scontrol is not on the PATH"),
    ],
)
def test_a_comment_that_is_not_written_is_said(
    tmp_path: Path, update: str, environ: dict[str, str], sentence: str
) -> None:
    said = write_comment(RECEIPT, fake_slurm(tmp_path / "bin", update=update) | environ)
    assert said.startswith("--slurm-comment wrote nothing")
    assert sentence in said


def test_slurm_comment_on_the_command_line(user: UserFolder, tmp_path: Path) -> None:
    environ = fake_slurm(tmp_path / "bin")
    done = user.measure("true", options=("--slurm-comment",), env=environ)
    assert "The comment of Slurm job 77 is now: energy_J=" in done.err
    without = user.measure("true", options=("--slurm-comment",), env={"SLURM_JOB_ID": ""})
    assert (without.code, "this is no Slurm job" in without.err) == (0, True)
