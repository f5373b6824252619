"""The driver's own fits take one thread while probes use the cores, and all of them otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from tuner.problem.from_job import problem_of_job
from tuner.problem.problem import Problem
from tuner.study.blas_threads import beside_probes


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of_job("tiny-gpt", "cpu-2", "default", max_gpus=None)


def threads() -> set[int]:
    np.linalg.eigvalsh(np.eye(3))  # loads the library
    return {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}


def test_beside_probes_on_cores_it_is_one_thread(problem: Problem) -> None:
    before = threads()
    with beside_probes(problem, in_flight=1):
        assert threads() == {1}
    assert threads() == before


def test_otherwise_nothing_is_limited(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.study.blas_threads.ThreadpoolController", None)
    node = problem_of_job("opt-350m", "a100-8", "default", max_gpus=None, plan=True)
    for case, in_flight in ((problem, 0), (replace(problem, simulated=True), 1), (node, 1)):
        with beside_probes(case, in_flight):
            pass
