"""The sentence of a search of the micro-batch alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tuner.display.micro_batch import micro_batch_sentence
from tuner.results.result import Result
from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.space import load_space
from tuner.testing.studies import METER, modelled_study
from tuner.workload.probe import Failure, ProbeRecord, ProbeRequest

DEVICE = Device("H100", "cuda", 80 * 10**9, 1e15, 3e12, 70.0, 700.0)
GPU = Cluster("gpus", DEVICE, devices_per_node=8)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return modelled_study(tmp_path_factory.mktemp("runs"), max_probes=3)


def result_of(study: Result, peaks_GB: dict[int, float | None], *failed: tuple[int, str]) -> Result:
    points = tuple(
        replace(
            study.points[0],
            configuration=Configuration(Settings(micro_batch=size)),
            peak_memory_bytes=None if peak is None else int(peak * 1e9),
        )
        for size, peak in peaks_GB.items()
    )
    failures = tuple(
        ProbeRecord(
            ProbeRequest(f"p{size:04d}", Settings(micro_batch=size)),
            (),
            METER,
            Failure(kind, "no"),
        )
        for size, kind in failed
    )
    return replace(study, points=points, failures=failures, cluster=GPU)


def test_the_largest_is_told_with_what_it_leaves(study: Result) -> None:
    result = result_of(study, {1: 10, 4: 60}, (16, "out_of_memory"), (8, "out_of_memory"))
    assert micro_batch_sentence(result) == (
        "Largest micro-batch that was measured: 4, with 20.0 of 80.0 GB of its device to spare "
        "(25%); 8 runs out of memory."
    )


def test_a_crash_of_another_kind_says_nothing_of_memory(study: Result) -> None:
    result = result_of(study, {1: 10, 4: None}, (8, "crash"))
    assert micro_batch_sentence(result) == "Largest micro-batch that was measured: 4."


def test_another_search_has_no_such_sentence(study: Result, tmp_path: Path) -> None:
    assert micro_batch_sentence(result_of(study, {4: 10})) == ""
    both = result_of(study, {1: 10, 4: 60})
    other = replace(both.points[0], configuration=Configuration.of(micro_batch=2, zero_stage=2))
    assert micro_batch_sentence(replace(both, points=(*both.points, other))) == ""


def test_the_space_changes_the_micro_batch_alone() -> None:
    space = load_space("micro-batch")
    assert [name for name, choice in space.choices.items() if "baseline" not in str(choice)] == [
        "micro_batch"
    ]
