"""The rows and the judgement of `benchmarks.validation.energaizer`."""

from __future__ import annotations

import pytest

from benchmarks.validation.energaizer import (
    Workload,
    after_one_J,
    compare,
    power_waiting_errors,
    predicted,
    read_workloads,
)

WORKLOADS = read_workloads()


def test_every_pass_has_its_clocks_and_six_have_estimates() -> None:
    assert len(WORKLOADS) == 20
    assert sum(len(each.energy_J) for each in WORKLOADS) == 217
    assert sum(bool(each.estimated_J) for each in WORKLOADS) == 6
    for each in WORKLOADS:
        assert set(each.estimated_J) <= set(each.energy_J) == set(each.time_s)


def test_a_choice_is_judged_by_the_clocks_that_were_tried() -> None:
    one = Workload(("gpt2", "bf16", 1, 128), energy_J={510: 3.0, 600: 2.0, 690: 1.0, 780: 1.5})
    assert one.steps_off(one.energy_J) == 0
    assert one.steps_off({510: 1.0, 600: 2.0, 690: 3.0, 780: 4.0}) == 2


def test_a_busy_pass_slows_with_the_clock_and_one_that_waits_for_its_host_does_not() -> None:
    passes = {each.key: each for each in WORKLOADS}
    busy = predicted(passes["large", "bf16", 32, 512])[0]
    waiting = predicted(passes["gpt2", "bf16", 8, 128])[0]
    assert min(busy, key=busy.__getitem__) > 800
    assert min(waiting, key=waiting.__getitem__) == 510


def test_one_launch_of_a_slow_device_does_not_make_it_wait_for_its_host() -> None:
    slower = next(each for each in WORKLOADS if each.key == ("qwen2-1p5b", "bf16", 1, 4096))
    assert slower.steps_off(after_one_J(slower)) <= 1


def test_passes_wait_whose_time_tokens_do_not_change() -> None:
    found = power_waiting_errors()
    assert ("gpt2", "bf16", 1, 128) in found
    assert ("gpt2", "bf16", 32, 1024) not in found
    assert len(found) == 18
    assert max(map(abs, found.values())) < 0.4


@pytest.mark.long
def test_the_figures_are_printed_under_their_names() -> None:
    lines, figures = compare()
    assert len(lines) == 21
    assert {figure.name for figure in figures} >= {
        "energaizer_clock_within_a_step",
        "energaizer_clock_one_launch",
        "power_waiting_error",
        "energaizer_six_by_its_own_estimate",
    }
