"""What is published: the models held against it, and the errors that are kept beside them."""

from __future__ import annotations

import functools
from itertools import permutations
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.validation import jupiter, mpt, qlora, sailor, sfttrainer, simumax, unseen
from benchmarks.validation.comparison import (
    DATA,
    median_and_worst,
    models,
    quantiles,
    rows_of,
    table,
)
from tests.support.traces import TRACES
from tuner.models.analytic.constants import constants_of
from tuner.models.analytic.model import (
    error_parts,
    known_error_lines,
    known_errors,
)
from tuner.planner.evaluate import forecast
from tuner.planner.text import breakdown_lines, cost_lines
from tuner.search_spaces.cluster import load_device
from tuner.search_spaces.job import load_job

ROOT = Path(__file__).resolve().parents[2]
SHARED = TRACES.parent
PLANS = SHARED / "published" / "sailor" / "plans.csv"


def figures(comparison: sailor.Comparison) -> dict[str, float]:
    return {figure.name: figure.value for figure in comparison.figures}


@pytest.mark.traces
def test_sailors_plans_are_predicted_in_time_memory_and_order() -> None:
    plans = sailor.read_plans(PLANS)
    constants = constants_of(load_device("GH200-96GB"))
    said = [plan.predict(constants) for plan in plans]
    time = [t / plan.time_s - 1 for (t, _), plan in zip(said, plans, strict=True)]
    memory = [m / plan.memory_bytes - 1 for (_, m), plan in zip(said, plans, strict=True)]
    for errors, aim in ((time, 0.08), (memory, 0.10)):
        median, _, worst = quantiles(errors)
        assert median < aim
        assert worst < 0.20
    for (a, p), (b, q) in permutations(zip(said, plans, strict=True), 2):
        if q.time_s > 1.1 * p.time_s:
            assert b[0] > a[0]


@pytest.mark.traces
def test_a_plan_is_predicted_without_itself() -> None:
    """The plan with most bubbles, from a fit that never saw a pipeline of four on 16 GPUs."""
    plans = sailor.read_plans(PLANS)
    held = [plan for plan in plans if plan.row["pp"] == "4"]
    constants = sailor.fit([plan for plan in plans if plan not in held])
    for plan in held:
        seconds, memory = plan.predict(constants)
        assert seconds == pytest.approx(plan.time_s, rel=0.2)
        assert memory == pytest.approx(plan.memory_bytes, rel=0.2)


@pytest.mark.traces
@pytest.mark.long
def test_the_known_errors_are_those_of_a_fresh_run() -> None:
    unseen_models = figures(unseen.compare(ROOT / "benchmarks" / "data" / "gh200_multimodal.csv"))
    plans = sailor.compare(SHARED)
    held_out = ("leave-one-out", "one program", "one tensor-parallel degree")
    assert [words for words in held_out if words not in plans.summary] == []
    found = {**figures(plans), **figures(_jupiter())}
    found |= {f"{name}_error": value for name, value in unseen_models.items()}
    gh200, jupiter_ = "GH200-96GB", "GH200-96GB-JUPITER"
    names = {
        (gh200, "step time"): "sailor_time_held_out",
        (gh200, "peak memory"): "sailor_memory_held_out",
        (gh200, "step time of an unseen model"): "published_unseen_sailor_time",
        (gh200, "peak memory of an unseen model"): "published_unseen_memory",
        (jupiter_, "step time of an unseen model"): "published_unseen_jupiter_time",
        (gh200, "power of a module"): "jupiter_module_power_W",
        (gh200, "energy of a run"): "jupiter_energy_kJ",
        (jupiter_, "TFLOP/s"): "jupiter_tflops_per_gpu",
    }
    checks = {
        (check.devices[0], check.what): check
        for kind in (gh200, jupiter_)
        for check in known_errors(load_device(kind))
    }
    assert set(checks) == set(names)
    for key, check in checks.items():
        median, worst = (found[f"{names[key]}_{which}_error"] for which in ("median", "worst"))
        assert 100 * check.median == pytest.approx(median, abs=0.1)
        assert 100 * check.worst == pytest.approx(worst, abs=0.1)


def test_the_known_errors_of_a100_and_h100_are_those_of_the_shipped_constants() -> None:
    cases = {
        "": lambda row: True,
        "activation_checkpointing none": lambda row: row["checkpointing"] == "none",
        "activation_checkpointing full": lambda row: row["checkpointing"] == "full",
        "sequences above 8,192 tokens": lambda row: int(row["sequence_length"]) > 8192,
    }
    for device in mpt.LINKS:
        constants = constants_of(load_device(device))
        off = [
            (run.row, run.predicted_s(constants) / run.measured_s - 1)
            for run in mpt.read_runs()
            if run.device == device
        ]
        checks = known_errors(load_device(device))
        assert {check.case for check in checks} == set(cases)
        for check in checks:
            here = [error for row, error in off if cases[check.case](row)]
            median, _, worst = quantiles(here)
            assert check.median == pytest.approx(median, abs=0.001)
            assert check.worst == pytest.approx(worst, abs=0.001)
            assert check.against.startswith(f"{len(here)} ")
            assert not check.case or check.case in check.sentence


def test_a_model_is_predicted_from_the_others_on_its_device() -> None:
    """A few runs of three models predict a fourth, by three constants of the device."""
    runs = [
        run
        for run in mpt.read_runs()
        if run.device == "H100-SXM-80GB" and run.row["sequence_length"] in ("1024", "8192")
    ]
    others = [run for run in runs if run.model in ("1b", "3b", "13b")]
    constants = mpt.fit(others)
    off = [run.predicted_s(constants) / run.measured_s - 1 for run in runs if run.model == "7b"]
    assert len(others) == 5
    assert quantiles(off)[2] < 0.12


def test_every_model_that_a_table_names_is_described_and_no_other() -> None:
    tables = ("published_runs", "single_gpu_reports", "sfttrainer_runs", "qlora_runs")
    named = {row["model"] for name in tables for row in rows_of(DATA / f"{name}.csv")}
    assert {*models()} == {*named, *simumax.MODELS, "qwen3-30b-a3b"}


@functools.cache
def compared(module: ModuleType) -> dict[str, float]:
    lines, found = module.compare()
    assert len(lines) > 10
    return {figure.name: figure.value for figure in found}


@pytest.mark.parametrize(
    ("module", "name", "aim"),
    [
        (qlora, "qlora_memory_median", 5),
        (qlora, "qlora_memory_worst", 17),
        (sfttrainer, "short_sequences_worst", 40),
        (sfttrainer, "short_sequences_power_worst", 30),
        (sfttrainer, "sfttrainer_held_out_mean", 17),
        (simumax, "simumax_memory_median", 3),
        (simumax, "simumax_time_held_out_mean", 6),  # 41 % too short by constants of other GPUs
    ],
)
def test_other_programs_are_predicted_within_the_aim(
    module: ModuleType, name: str, aim: float
) -> None:
    assert compared(module)[name] < aim


def test_what_deepspeed_does_with_memory_is_not_what_megatron_does() -> None:
    found = compared(simumax)
    assert found["simumax_memory_median_as_deepspeed"] > 2 * found["simumax_memory_median"]


def test_models_that_were_not_fitted_are_predicted() -> None:
    found = figures(unseen.compare(ROOT / "benchmarks" / "data" / "gh200_multimodal.csv"))
    assert found["published_unseen_memory_median"] < 8  # the aims
    assert found["published_unseen_time_median"] < 12
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert f"| time {found['published_unseen_time_median']:.1f} % |" in page


def test_the_parts_of_the_error_are_those_of_a_fresh_run() -> None:
    found = figures(_jupiter())
    for what, name in (("step time", "time"), ("power", "power")):
        parts = error_parts(what)
        assert parts.shared == pytest.approx(found[f"jupiter_{name}_error_shared"], abs=0.001)
        assert parts.own == pytest.approx(found[f"jupiter_{name}_error_own"], abs=0.001)


def _jupiter() -> sailor.Comparison:
    return jupiter.compare(ROOT / "benchmarks" / "data" / "gh200_multimodal.csv")


def test_the_jupiter_study_needs_nothing_beside_the_repository() -> None:
    found = figures(_jupiter())
    # What stands today; not every direction is right, and the comparison says which are wrong.
    assert found["jupiter_wall_time_min_directions"] == 1.0
    assert found["jupiter_energy_kJ_directions"] > 0.7
    assert found["jupiter_energy_kJ_median_error"] < 15


def test_all_directions_are_quoted_and_the_doubtful_ones_apart() -> None:
    found = figures(_jupiter())
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    pairs = found["jupiter_directions_pairs"]
    assert f"{100 * found['jupiter_directions']:.0f} % of {pairs:.0f} pairs" in page
    right, pairs = (found[f"jupiter_identifiable_directions{end}"] for end in ("", "_pairs"))
    assert f"{100 * right:.0f} % of the {pairs:.0f} pairs" in page


def test_the_shipped_constants_are_those_that_their_rows_give() -> None:
    found = jupiter.fit(ROOT / "benchmarks" / "data" / "gh200_multimodal.csv")
    shipped = constants_of(load_device("GH200-96GB-JUPITER"))
    for name in ("matrix_efficiency", "compute_W", "reduce_efficiency"):
        assert getattr(shipped, name) == pytest.approx(getattr(found, name), rel=0.01)


# tuner fit


def test_a_forecast_shows_its_parts_and_its_known_error() -> None:
    from tuner.search_spaces.cluster import load_cluster
    from tuner.search_spaces.configuration import Configuration
    from tuner.search_spaces.errors import InvalidConfiguration

    job, cluster = load_job("opt-350m"), load_cluster("gh200-32")
    said = forecast(job, cluster, Configuration.of(data_parallel=8, micro_batch=2))
    text = "\n".join([*cost_lines(said), *breakdown_lines(said)])
    for words in (" s a step, ", "the whole training, 3,148 steps: ", " arithmetic "):
        assert words in text
    assert any("12 plans of OPT-350M" in sentence for sentence in said.known_error)
    whole = forecast(load_job("qwen2.5-7b"), cluster, Configuration.of())
    assert whole.breakdown.memory_bytes > cluster.device.memory_bytes
    with pytest.raises(InvalidConfiguration):
        forecast(job, cluster, Configuration.of(data_parallel=7))
    unknown = known_error_lines(load_device("V100-SXM2-16GB"))
    assert unknown[0].startswith("unknown")


def test_errors_are_told_by_their_size() -> None:
    found = [(each.name, each.value) for each in median_and_worst("x_*_error", [-0.3, 0.1, 0.2])]
    assert found == [("x_median_error", pytest.approx(20)), ("x_worst_error", pytest.approx(30))]


def test_a_table_is_aligned() -> None:
    lines = table(("a", "bb"), [(1, 22), (333, 4)])
    assert lines == ["  a  bb", "  1  22", "333   4"]
