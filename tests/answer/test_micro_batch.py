"""The answer of a search of the micro-batch: fastest, largest safe, and what is beyond it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.results import NVML, failed, point, result_of
from tuner.answer.micro_batch import doublings
from tuner.display.text import answer_lines
from tuner.result import Result
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job
from tuner.search_spaces.space import Candidates, load_space

GIB = 2**30
CLUSTER = load_cluster("a100-8")
LIMIT = CLUSTER.device.memory_bytes
JOB = replace(load_job("opt-350m"), global_batch=192)
#: Seconds of the training at each micro-batch of today's launch: a dip at 24, the best at 32.
TIMES = {8: 100.0, 16: 90.0, 24: 110.0, 32: 70.0}


def test_todays_micro_batch_is_doubled_before_smaller_ones_are_tried() -> None:
    every = [Configuration.of(micro_batch=size) for size in (1, 2, 3, 4, 6, 8, 12, 24)]
    candidates = Candidates.from_configurations(every)
    assert [each.micro_batch for each in doublings(candidates, every[2])] == [6, 12, 24]
    assert [each.micro_batch for each in doublings(candidates, every[7])] == []
    assert [each.micro_batch for each in doublings(candidates, every[0])] == [2, 4, 8]


def launch(size: int) -> dict[str, int]:
    return {"data_parallel": 2, "micro_batch": size}


def searched(times=None, shares=None, failures=(), space="micro-batch", cluster=CLUSTER) -> Result:
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
    about = {**result.about, "space": {"name": space}}
    return replace(result, about=about, job=JOB, cluster=cluster, failures=tuple(failures))


def lost(kind: str, size: int, **more: int):
    return failed(f"p{size}", kind, "no", "", **{**launch(size), **more})


def test_the_fastest_is_the_best_measured_and_not_the_last_before_a_dip() -> None:
    found = searched().micro_batch
    assert found is not None
    assert (found.fastest.size, found.fastest.accumulation) == (32, 3)
    assert found.fastest.samples_per_s == pytest.approx(192 * searched().steps / 70)
    assert found.fastest.J_per_sample == pytest.approx(300 * 70 / searched().steps / 192)
    assert found.fastest.time.relative == pytest.approx(-0.3)
    assert found.today.size == 8


@pytest.mark.parametrize(
    ("failures", "shares", "safe", "beyond"),
    [
        ((), None, 32, ("not_tried", None)),
        ((lost("out_of_memory", 48),), None, 32, ("out_of_memory", 48)),
        # it was measured once and ran out of memory in another launch: growth after the warm-up
        ((lost("out_of_memory", 24),), None, 16, ("out_of_memory", 24)),
        ((lost("crash", 48),), None, 32, ("failed", 48)),
        ((lost("cancelled", 48),), None, 32, ("not_tried", None)),
        # another launch than today's ran out of memory
        ((lost("out_of_memory", 16, zero_stage=3),), None, 32, ("not_tried", None)),
        ((), {8: 0.2, 16: 0.5, 24: 0.9, 32: 0.91}, 24, ("margin", 32)),
        ((), {8: 0.95, 16: 0.96, 24: 0.97, 32: 0.99}, None, ("margin", 8)),
        ((), {8: 0.2, 16: 0.3}, 16, ("margin", 24)),
    ],
)
def test_the_largest_safe_one_was_measured_with_a_margin(failures, shares, safe, beyond) -> None:
    found = searched(shares=shares, failures=failures).micro_batch
    assert (found.largest_safe.size if found.largest_safe else None) == safe
    assert (found.beyond, found.beyond_size) == beyond


def test_the_margin_is_that_of_the_largest_safe_one() -> None:
    found = searched().micro_batch
    assert found.limit_bytes == LIMIT
    assert found.margin_bytes == pytest.approx(0.68 * LIMIT, rel=1e-6)
    assert found.margin_share == pytest.approx(0.68, rel=1e-6)


def test_the_whole_batch_of_a_rank_has_nothing_beyond_it() -> None:
    found = searched({32: 90.0, 96: 70.0}, {32: 0.2, 96: 0.5}).micro_batch
    assert (found.beyond, found.fastest.accumulation) == ("whole_batch", 1)


def test_on_cores_the_ranks_share_the_hosts_memory() -> None:
    cluster = load_cluster("cpu-2")
    cluster = replace(cluster, host_memory_bytes=8 * GIB)
    found = searched({8: 9.0}, {8: GIB / LIMIT}, cluster=cluster).micro_batch
    assert found.limit_bytes == 4 * GIB
    assert found.margin_bytes == pytest.approx(3 * GIB, abs=2)


def test_without_a_peak_or_a_limit_nothing_is_called_safe() -> None:
    for result in (searched(shares={}), searched(cluster=None)):
        assert result.micro_batch.largest_safe is None
        assert "unknown, as the memory of a rank" in "\n".join(answer_lines(result))


def test_only_its_own_space_is_answered_and_only_what_was_measured() -> None:
    assert searched(space="default").micro_batch is None
    assert replace(searched(), points=()).micro_batch is None
    predicted = tuple(replace(each, source="predicted") for each in searched().points)
    assert replace(searched(), points=predicted).micro_batch is None


def test_the_answer_and_its_json_say_the_same() -> None:
    result = searched(failures=(lost("out_of_memory", 48),))
    text = "\n".join(answer_lines(result))
    assert "Fastest micro-batch measured: 32 x accumulation 3, " in text
    assert "Largest safe micro-batch measured: 32, peak " in text
    assert "(68 %) left; 48 ran out of memory." in text
    data = result.to_json()["micro_batch"]
    assert (data["fastest"]["size"], data["largest_safe"]["size"]) == (32, 32)
    assert "Fastest" not in "\n".join(answer_lines(searched(space="default")))


def test_today_as_the_fastest_is_named_as_todays() -> None:
    text = "\n".join(answer_lines(searched({8: 50.0, 16: 60.0})))
    assert "Fastest micro-batch measured: 8 x accumulation 12" in text
    assert ": today's." in text
    alone = "\n".join(answer_lines(searched({8: 50.0})))
    assert ": today's, and no other micro-batch was measured." in alone


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
