"""Sensitivity of the search to its constants: what is changed, and that it is changed back."""

from __future__ import annotations

from pathlib import Path

import pytest

import tuner.models.surrogate.gaussian_process as process
import tuner.search.acquisition as acquisition
import tuner.search.candidate_planner as planner
from benchmarks.search.sensitivity import Constant, changed, constants, main, scaled
from tuner.problem.settings import SamplerDesign
from tuner.testing.studies import write_table


def test_the_constants_are_found_where_they_are_defined() -> None:
    found = constants()
    assert Constant("tuner.search.acquisition", "SINGLE_DRAWS") in found
    # The sampler imports it, but does not define it.
    assert Constant("tuner.search.candidate_planner", "SINGLE_DRAWS") not in found
    assert Constant("SamplerDesign", "cost_weight") in found
    assert not {"LAUNCH", "LIVE", "MIXED", "extend_launches"} & {one.name for one in found}
    assert len(set(found)) == len(found)


def test_values_are_scaled_as_what_they_are() -> None:
    assert scaled(8, 0.5) == 4
    assert scaled(1, 0.5) == 1
    assert scaled(0.5, 2.0) == 1.0


def test_each_number_of_a_tuple_or_an_array_is_scaled_by_itself() -> None:
    shares = Constant("tuner.models.surrogate.kernel", "SHARES", 1)
    before = list(shares.whole)
    assert list(shares.scaled(2.0)) == pytest.approx([before[0], 2 * before[1], before[2]])
    assert list(shares.whole) == before
    few = Constant("tuner.models.surrogate.surrogates", "FEW", 0)
    assert few.scaled(0.5) == (few.whole[0] / 2, few.whole[1])
    assert {one.item for one in constants() if one.name == "FEW"} == {0, 1}


def test_a_constant_is_changed_wherever_it_is_imported_and_changed_back() -> None:
    constant = Constant("tuner.search.acquisition", "SINGLE_DRAWS")
    before = constant.value
    with changed(constant, 7):
        assert acquisition.SINGLE_DRAWS == planner.SINGLE_DRAWS == 7
    assert acquisition.SINGLE_DRAWS == planner.SINGLE_DRAWS == before


def test_a_constant_of_the_design_is_a_default_while_it_is_changed() -> None:
    with changed(Constant("SamplerDesign", "cost_weight"), 0.5):
        assert SamplerDesign().cost_weight == 0.5
        assert SamplerDesign().max_live == 8
    assert SamplerDesign().cost_weight == 1.0


def test_the_command_prints_a_line_for_each_constant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_table(tmp_path / "table")
    before = process.LENGTH_LOG_SD
    main([str(folder), "--only", "LENGTH_LOG_SD", "--jackknife", "1"])
    out = capsys.readouterr().out
    assert out.count("LENGTH_LOG_SD") == 1
    assert "figure sensitivity_length_log_sd_half_held_out" in out
    assert "figure sensitivity_length_log_sd_double_held_out" in out
    assert before == process.LENGTH_LOG_SD
