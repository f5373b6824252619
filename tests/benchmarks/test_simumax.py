"""Predicted memory of Megatron-LM's ranks against SimuMax's measurements."""

from __future__ import annotations

from benchmarks.validation.simumax import compare


def test_what_megatron_does_with_memory_is_predicted_and_what_deepspeed_does_is_not_it() -> None:
    lines, figures = compare()
    value = {figure.name: figure.value for figure in figures}
    assert len(lines) == 16
    assert value["simumax_memory_median"] < 3
    assert value["simumax_time_held_out_mean"] < 6  # 41 % too short by constants of other GPUs
    assert value["simumax_memory_median_as_deepspeed"] > 2 * value["simumax_memory_median"]
