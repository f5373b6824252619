"""Launches that a failure closes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.studies import METER, measured
from tuner.search.evidence import Observations
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import Failure, ProbeRecord, ProbeRequest

EVERY = [Configuration.of(data_parallel=ranks, micro_batch=m) for ranks in (1, 2) for m in (1, 2)]
CANDIDATES = Candidates.from_configurations(EVERY)


def record_of(candidate: int, kind: str = "") -> ProbeRecord:
    request = ProbeRequest(f"p{candidate:04d}", EVERY[candidate].launch)
    if not kind:
        return ProbeRecord(request, (measured(),), METER)
    return ProbeRecord(request, (), METER, Failure(kind, "as planned"))


def failed_launches(*records: ProbeRecord) -> set[int]:
    return Observations.of(records, (), CANDIDATES, np.arange(4)).failed_launches


@pytest.mark.parametrize(
    ("kind", "closed"),
    [("crash", {0}), ("alone", {2, 3}), ("ended", {0, 1, 2, 3}), ("node", set())],
)
def test_a_failure_closes_what_it_blames(kind: str, closed: set[int]) -> None:
    assert failed_launches(record_of(0, kind)) == closed


def test_a_faster_configuration_that_ends_too_early_closes_itself_alone() -> None:
    assert failed_launches(record_of(1), record_of(2, "ended")) == {2}
