"""The driver's own fits take one thread."""

from __future__ import annotations

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

import tuner
from tuner.search import sampler


def threads() -> set[int]:
    np.linalg.eigvalsh(np.eye(3))  # loads the library
    return {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}


def test_a_search_plans_in_one_thread_and_gives_the_others_back(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[int]] = []
    plan = sampler.CandidateSampler.plan

    def watched(self, *args, **kwargs):
        seen.append(threads())
        return plan(self, *args, **kwargs)

    monkeypatch.setattr(sampler.CandidateSampler, "plan", watched)
    with threadpool_limits(2):
        before = threads()
        tuner.optimize(
            "opt-350m",
            cluster="a100-8",
            executor="simulated",
            search=tuner.SearchSettings(max_probes=2),
            runs_dir=tmp_path,
            report=False,
        )
        assert threads() == before
    assert seen
    assert set.union(*seen) == {1}
