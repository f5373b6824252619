"""Launches that a failure closes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tuner.search.observations import Observation, Observations
from tuner.search_spaces.configuration import Configuration

EVERY = [Configuration.of(data_parallel=ranks, micro_batch=m) for ranks in (1, 2) for m in (1, 2)]


@pytest.mark.parametrize(
    ("kind", "closed"),
    [("crash", {0}), ("alone", {2, 3}), ("ended", {0, 1, 2, 3}), ("node", set())],
)
def test_a_failure_closes_what_it_blames(kind: str, closed: set[int]) -> None:
    encoding = cast("Any", SimpleNamespace(configurations=EVERY))
    seen = Observations(encoding, np.arange(4))
    seen._add_failure(0, {"failure": kind})
    assert seen.failed_launches == closed


def test_a_faster_configuration_that_ends_too_early_closes_itself_alone() -> None:
    encoding = cast("Any", SimpleNamespace(configurations=EVERY))
    seen = Observations(encoding, np.arange(4))
    seen.measured.append(Observation(1, EVERY[1], 1.0, 1.0, 0.0, 0.0))
    seen._add_failure(2, {"failure": "ended"})
    assert seen.failed_launches == {2}
