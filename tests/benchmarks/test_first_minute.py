"""The benchmark of the first minute: what it reads from a terminal, and what `make run` tunes."""

from __future__ import annotations

import os
from dataclasses import replace

from benchmarks.figures import ROOT
from benchmarks.first_minute import MOMENTS, watch
from tuner.search_spaces.cluster import load_cluster
from tuner.testing.studies import problem_of_job

EXAMPLE = ROOT / "examples" / "laptop"
TODAY = [EXAMPLE / "ds_config.json", "activation_checkpointing=full"]


def test_a_screen_has_the_moments_at_which_something_appeared() -> None:
    words = "test -t 1 && printf prepa; sleep 0.1; echo ring; sleep 0.2; echo front so far; exit 3"
    screen = watch(["sh", "-c", words], dict(os.environ))
    assert screen.code == 3
    assert set(screen.moments) == set(MOMENTS) - {"answer_s"}
    assert 0.1 <= screen.moments["first_picture_s"] < screen.moments["first_point_s"]


def test_the_example_has_room_for_the_probes_of_make_run() -> None:
    problem = problem_of_job(
        EXAMPLE / "job.toml", "cpu-2", EXAMPLE / "space.toml", baseline=TODAY, max_gpus=None
    )
    assert len(problem.candidates.launches) >= 16
    assert problem.baseline is not None
    today = dict(problem.baseline.launch)
    assert (today["zero_stage"], today["micro_batch"], today["data_parallel"]) == (3, 1, 2)
    assert today["activation_checkpointing"] == "full"
    # CPU Adam, which takes a minute to compile, is not in the space.
    assert {c.launch.get("optimizer_offload", "none") for c in problem.candidates} == {"none"}


def test_the_example_fits_a_machine_of_more_cores_than_its_batch() -> None:
    many = replace(load_cluster("cpu-2"), devices_per_node=64)
    problem = problem_of_job(
        EXAMPLE / "job.toml", many, EXAMPLE / "space.toml", baseline=TODAY, max_gpus=None
    )
    assert problem.baseline is not None
    assert problem.baseline.data_parallel == 8


def test_lines_before_a_probe_and_the_answer_are_read_from_a_screen() -> None:
    shown = "search\r\n\x1b[2K12:00:01 importing\r\n12:00:02 This search: 3 probes\r\n"
    words = (
        f"printf '{shown}12:00:09 p0000  1 s\\n' >&2; printf 'ready\\n\\nTrain\\n> row\\nReport: r'"
    )
    screen = watch(["sh", "-c", words], dict(os.environ))
    assert screen.lines_before_first_probe == 2
    assert screen.answer_lines == ["Train", "> row", "Report:"]
