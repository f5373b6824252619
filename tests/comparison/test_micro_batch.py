"""View of a search of the micro-batch alone: the largest safe one, and what is beyond it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.results import NVML, failed, point, result_of
from tuner.display.text import answer_lines
from tuner.result import Result
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job
from tuner.search_spaces.space import load_space

GIB = 2**30
CLUSTER = load_cluster("a100-8")
LIMIT = CLUSTER.device.memory_bytes
JOB = replace(load_job("opt-350m"), global_batch=192)
#: Seconds of the training at each micro-batch of today's launch: a dip at 24, the best at 32.
TIMES = {8: 100.0, 16: 90.0, 24: 110.0, 32: 70.0}


def launch(size: int) -> dict[str, int]:
    return {"data_parallel": 2, "micro_batch": size}


def searched(times=None, shares=None, failures=(), cluster=CLUSTER) -> Result:
    """Return a result whose points take these times and shares of the GPU's memory."""
    times = times or TIMES
    shares = {size: size / 100 for size in times} if shares is None else shares
    points = [
        replace(
            point(Configuration.of(launch(size)), time_s, 300.0, NVML),
            peak_memory_bytes=int(shares[size] * LIMIT) if size in shares else None,
        )
        for size, time_s in times.items()
    ]
    result = result_of("small", points, points[0], best=0)
    return replace(result, job=JOB, cluster=cluster, failures=tuple(failures))


def lost(kind: str, size: int, **more: int):
    return failed(f"p{size}", kind, "no", "", **{**launch(size), **more})


def line(result: Result) -> str:
    """Return the line of the view in the answer of a result, "" without one."""
    found = [each for each in answer_lines(result) if "of the memory" in each]
    assert len(found) < 2
    return "".join(found)


@pytest.mark.parametrize(
    ("failures", "shares", "safe", "beyond"),
    [
        ((), None, 32, "no larger one was tried"),
        ((lost("out_of_memory", 48),), None, 32, "48 ran out of memory"),
        # it was measured once and ran out of memory in another launch: growth after the warm-up
        ((lost("out_of_memory", 24),), None, 16, "24 ran out of memory"),
        ((lost("crash", 48),), None, 32, "48 failed"),
        ((lost("cancelled", 48),), None, 32, "no larger one was tried"),
        ((), {8: 0.2, 16: 0.5, 24: 0.9, 32: 0.91}, 24, "32 leaves less"),
        ((), {8: 0.2, 16: 0.3}, 16, "24 leaves less"),
    ],
)
def test_the_largest_safe_one_was_measured_with_a_margin(failures, shares, safe, beyond) -> None:
    text = line(searched(shares=shares, failures=failures))
    assert text.startswith("Largest micro-batch that leaves 10 % of the memory, of those measured:")
    assert f" {safe}, peak " in text
    assert text.endswith(f"; {beyond}.")


def test_the_peak_stands_beside_the_limit() -> None:
    limit = f"{LIMIT / GIB:.1f}"
    assert f": 32, peak {0.32 * LIMIT / GIB:.1f} of {limit} GiB; " in line(searched())


def test_the_whole_batch_of_a_rank_has_nothing_beyond_it() -> None:
    found = searched({32: 90.0, 96: 70.0}, {32: 0.2, 96: 0.5})
    assert line(found).endswith("; it is a rank's whole batch.")


def test_on_cores_the_ranks_share_the_hosts_memory() -> None:
    cluster = load_cluster("cpu-2")
    cluster = replace(cluster, host_memory_bytes=8 * GIB)
    found = searched({8: 9.0, 16: 8.0}, {8: GIB / LIMIT, 16: GIB / LIMIT}, cluster=cluster)
    assert "peak 1.0 of 4.0 GiB" in line(found)


def test_none_is_called_safe_without_a_peak_or_with_all_of_the_memory() -> None:
    full = {8: 0.95, 16: 0.96, 24: 0.97, 32: 0.99}
    for shares in ({}, full):
        assert line(searched(shares=shares)).startswith("No micro-batch that leaves 10 % of the")


def test_nothing_is_said_where_it_is_not_the_question() -> None:
    other = lost("out_of_memory", 48, zero_stage=3)
    assert line(searched(failures=(other,))) == ""
    assert line(searched({8: 50.0})) == ""
    assert line(searched(cluster=None)) == ""
    assert line(replace(searched(), points=())) == ""
    predicted = tuple(replace(each, source="predicted") for each in searched().points)
    assert line(replace(searched(), points=predicted)) == ""


def test_the_space_varies_the_micro_batch_alone_and_keeps_the_batch_even() -> None:
    job = replace(load_job("opt-350m"), global_batch=24)
    found = load_space("micro-batch").candidates(job, CLUSTER)
    launches = [each.launch for each in found.configurations]
    ranks = {int(each["data_parallel"]) for each in launches}
    assert len(ranks) == 1
    assert {24 % (int(each["micro_batch"]) * min(ranks)) for each in launches} == {0}
    assert (
        len({tuple((k, v) for k, v in each.items() if k != "micro_batch") for each in launches})
        == 1
    )
