"""Threads of a rank as the knob of scripts of which nothing else can be set."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import CPU, script_job
from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.job import load_job
from tuner.search_spaces.knob_declarations import Knob
from tuner.study.request import StudyRequest, _opened_by_an_edit, _why_batch_stays
from tuner.workload.node.platforms.cores import Cores
from tuner.workload.scripts.script_facts import ScriptFacts
from tuner.workload.scripts.script_job import ScriptJob, with_threads


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def job_of(folder: Path, threads: int, ranks: int = 1, *knobs: Knob) -> ScriptJob:
    frame = ScriptFacts(kind="torch", micro_batch=4, accumulation=1, counted=True, threads=threads)
    return replace(script_job("train.py", folder, frame, knobs), devices=ranks)


@pytest.mark.parametrize(
    ("threads", "ranks", "cores", "values"),
    [
        (8, 1, 8, (1, 2, 4, 8)),
        (6, 1, 6, (1, 3, 6)),
        (2, 2, 8, (1, 2, 4)),
        (1, 4, 4, None),  # each rank has one core
        (16, 1, 8, (1, 2, 4, 8, 16)),  # more than there are cores, as today
        (0, 1, 8, None),  # not observed
        (1, 1, 1, None),
    ],
)
def test_numbers_up_to_the_cores_of_a_rank(
    tmp_path: Path, threads: int, ranks: int, cores: int, values: tuple[int, ...] | None
) -> None:
    job = with_threads(job_of(tmp_path, threads, ranks), replace(CPU, devices_per_node=cores))
    assert (job and job.knobs[0].values) == values
    if job is not None:
        assert job.knobs[0].baseline == threads
        start = job.start(job.baseline, tmp_path / "probe")
        assert start.env["OMP_NUM_THREADS"] == str(threads)


def test_a_knob_of_the_users_for_the_same_variable_stands(tmp_path: Path) -> None:
    own = Knob("omp", (1, 2), how="env:OMP_NUM_THREADS")
    assert with_threads(job_of(tmp_path, 2, 1, own), replace(CPU, devices_per_node=8)) is None


@pytest.mark.parametrize(("variable", "found"), [("8", True), ("4", False), ("4,2", False)])
def test_a_program_that_sets_its_threads_itself_has_no_such_knob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, found: bool
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    job = with_threads(job_of(tmp_path, 8), replace(CPU, devices_per_node=8))
    assert (job is not None) is found


def test_gpus_have_other_knobs(tmp_path: Path) -> None:
    gpu = Device("H100", "cuda", 80 * 2**30, 1e15, 3e12, 70.0, 700.0)
    assert with_threads(job_of(tmp_path, 8), Cluster("gpus", gpu, devices_per_node=8)) is None


@pytest.mark.parametrize(
    ("threads", "expected"),
    [(1, [(0,), (1,), (2,), (3,)]), (2, [(0, 1), (2, 3)]), (4, [(0, 1, 2, 3)])],
)
def test_ranks_keep_to_as_many_cores_as_they_have_threads(
    threads: int, expected: list[tuple[int, ...]]
) -> None:
    platform = Cores()
    ranks = range(len(expected))
    assert [platform.rank_cores(rank, range(4), threads) for rank in ranks] == expected


FIXED = ScriptFacts(kind="torch", micro_batch=32, accumulation=1, counted=True)


def hint_of(folder: Path, frame: ScriptFacts = FIXED, **changes: Any) -> str:
    job = script_job("train.py", folder, frame, **{"global_batch": 32, "devices": 1, **changes})
    request = StudyRequest(job=job, cluster="a100-8")
    return "".join(_opened_by_an_edit(job, request))


def test_a_fixed_micro_batch_is_told_what_an_edit_would_open(tmp_path: Path) -> None:
    told = hint_of(tmp_path)
    assert told == (
        "no argument was found that sets its micro-batch of 32 ({micro_batch=32} in the command "
        "names one): with one and four lines of accumulation (docs/your-script.md#accumulation) "
        "others would be searched"
    )


def test_a_micro_batch_with_an_argument_is_not_called_fixed(tmp_path: Path) -> None:
    """Of an argument that was proven in the line before, the edit was "an argument for it"."""
    frame = replace(FIXED, keeps="micro_batch", ranks_stay="it makes no process group")
    job = script_job("train.py --batch {micro_batch=32}", tmp_path, frame, global_batch=32)
    (told,) = _opened_by_an_edit(replace(job, devices=1), StudyRequest(job=job, cluster="a100-8"))
    assert told.startswith("its micro-batch of 32 can be set, and nothing accumulates: four lines")


@pytest.mark.extra("tuner.models.job_prior", "tuner.search_spaces.model_reading")
def test_what_an_edit_would_open_is_told_with_what_the_models_expect_of_it(tmp_path: Path) -> None:
    known = load_job("opt-350m")
    expected = hint_of(tmp_path, model=known.model, sequence_length=known.sequence_length)
    found = expected.removeprefix(hint_of(tmp_path))
    assert re.match(r"; the models expect (up to \d+(\.\d+)? % less|no gain of them)", found), found


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch": 1},
        {"accumulation": 2},
        {"counted": False},
        {"owner": "transformers"},
        {"reads": ("micro_batch", "gradient_accumulation")},
        {"micro_batch_stays": "BatchNorm takes its statistics from each micro-batch"},
        {"unproven": "--batch_size 32 is left as today"},
    ],
)
def test_no_edit_is_told_where_it_opens_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert hint_of(tmp_path, replace(FIXED, **changes)) == ""


def test_why_a_fixed_batch_is_not_searched_is_told_once_with_the_threads(tmp_path: Path) -> None:
    """Two lines said that it was fixed, one with the threads and one with what an edit opens."""
    job = script_job("train.py", tmp_path, FIXED, global_batch=32, devices=1)
    request = StudyRequest(job=job, cluster="a100-8")
    (with_threads,) = _why_batch_stays(job, request, threads=True)
    assert with_threads == hint_of(tmp_path) + "; the threads of a rank are searched"
    assert _why_batch_stays(job, request, threads=False) == [hint_of(tmp_path)]


def test_an_argument_that_was_not_proven_is_left_once(tmp_path: Path) -> None:
    """ "Its batch stays as it is: --batch 1 is left as today" said it twice."""
    frame = replace(FIXED, unproven="--batch 1 is left as today: one sample cannot be split")
    job = script_job("train.py", tmp_path, frame, global_batch=5, devices=1)
    (told,) = _why_batch_stays(job, StudyRequest(job=job, cluster="a100-8"), threads=True)
    assert told.startswith("--batch 1 is left as today: one sample cannot be split (if it sets ")


def test_a_batch_that_no_edit_opens_is_told_only_with_the_threads(tmp_path: Path) -> None:
    job = script_job("train.py", tmp_path, replace(FIXED, micro_batch=1), global_batch=1, devices=1)
    request = StudyRequest(job=job, cluster="a100-8")
    (told,) = _why_batch_stays(job, request, threads=True)
    assert told.startswith("its batch stays as it is: ")
    assert told.endswith("; the threads of a rank are searched")
    assert _why_batch_stays(job, request, threads=False) == []
