"""What the user expects of a search: configurations to try first, and preferred knob values."""

from __future__ import annotations

import numpy as np
import pytest

import tuner
from tests.search.test_acquisition import CANDIDATES, CONFIGURATIONS
from tuner.search.user_prior import BETA, user_prior
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.testing.studies import run_replay, write_table
from tuner.workload.trace import read_trace


def test_a_name_and_a_configuration_are_tried_in_their_order() -> None:
    made = user_prior(CANDIDATES, try_first=["800MHz mb4", CONFIGURATIONS[0]])
    assert made.first == (Configuration.of(micro_batch=4, clock_MHz=800), CONFIGURATIONS[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mb3 800MHz", r"cannot try 'mb3 800MHz': this search has no micro_batch=3; its values"),
        ("mb4", r"'mb4' leaves open clock_MHz"),
        ("mb4 fast", r"cannot try 'mb4 fast': 'fast' is no knob"),
        ("mb4 zero9", r"cannot try"),
    ],
)
def test_what_cannot_be_tried_is_refused_in_a_sentence(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        user_prior(CANDIDATES, try_first=[text])


def test_weights_multiply_and_fade() -> None:
    made = user_prior(CANDIDATES, prefer=["mb4:4 mb8:2", "clock_MHz=800:3"])
    best = made.weights(1)
    assert isinstance(best, np.ndarray)
    levels = [(c.micro_batch, c.get("clock_MHz")) for c in CONFIGURATIONS]
    by_knobs = dict(zip(levels, best, strict=True))
    assert by_knobs[4, 800] == pytest.approx(1)
    assert by_knobs[8, 800] == pytest.approx(2**-BETA)
    assert by_knobs[1, 900] == pytest.approx(12**-BETA)
    same = user_prior(CANDIDATES, prefer=["mb=4:4,mb8:2", "800MHz:3"]).weights(1)
    assert same == pytest.approx(best)
    later = made.weights(100)
    assert isinstance(later, np.ndarray)
    assert later.min() == pytest.approx(12 ** (-BETA / 100))
    assert user_prior(CANDIDATES).weights(3) == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mb4", "'mb4' is no preference; write KNOB=VALUE:WEIGHT with a positive weight"),
        ("mb4:0", "is no preference"),
        ("mb4:many", "is no preference"),
        ("mb3:2", "preferred value of micro_batch"),
        ("shape=1:3", "preferred knob of this search"),
        (":3", "is no preference"),
    ],
)
def test_a_preference_for_nothing_is_refused_in_a_sentence(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        user_prior(CANDIDATES, prefer=[text])


def searched(tmp_path, name: str, **options) -> list[dict]:
    table = write_table(tmp_path / "table") if not (tmp_path / "table").exists() else None
    run_replay(
        table or tmp_path / "table",
        name=name,
        runs_dir=tmp_path / "runs",
        report=False,
        max_probes=4,
        verify=False,
        **options,
    )
    records = read_trace(tmp_path / "runs" / name / "trace" / "probes.jsonl").records
    return [dict(r.request.launch) for r in records if r.request.purpose == "search"]


def test_what_is_to_be_tried_is_probed_first(tmp_path) -> None:
    usual = searched(tmp_path, "usual")
    wanted = next(shape for shape in (1, 2, 3, 4, 6, 8) if {"shape": shape} != usual[0])
    tried = searched(tmp_path, "tried", try_first=[f"shape={wanted} speed=2"])
    assert tried[0] == {"shape": wanted}


def test_a_preferred_value_is_probed_sooner(tmp_path) -> None:
    usual = searched(tmp_path, "usual")
    late = next(shape for shape in (1, 2, 3, 4, 6, 8) if {"shape": shape} not in usual[:2])
    preferred = searched(tmp_path, "preferred", prefer=[f"shape={late}:1000"])
    assert {"shape": late} in preferred[:2]


def test_another_sampler_takes_no_expectations(tmp_path) -> None:
    table = write_table(tmp_path / "table")
    with pytest.raises(InputError, match="--try and --prefer are for the sampler joulefront"):
        tuner.replay(table, sampler="random", prefer=["shape=1:2"], runs_dir=tmp_path / "runs")
