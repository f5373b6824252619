"""From few GPUs to many: the models corrected by probes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tuner
from benchmarks.validation.scale_out import compare
from tuner.cli.main import main
from tuner.models.analytic.constants import Constants, constants_of, load_constants
from tuner.models.scale_out import UNCERTAIN, ScaleOut, predictor
from tuner.search_spaces.cluster import enlarged, load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InvalidValue
from tuner.search_spaces.job import load_job
from tuner.testing.studies import run_optimize as optimize

JOB = replace(load_job("opt-350m"), global_batch=1024)
FEW, MANY = enlarged(load_cluster("gh200-32"), 8), enlarged(load_cluster("gh200-32"), 512)
BASE = constants_of(FEW.device)


def plain(constants: Constants) -> np.ndarray:
    """A figure that no constant moves."""
    return np.zeros((4, 1))


def probes(d: int = 8) -> list[Configuration]:
    return [
        Configuration.of(data_parallel=d // t, tensor_parallel=t, micro_batch=b, clock_MHz=clock)
        for t, b in ((1, 2), (1, 8), (2, 4), (4, 8))
        for clock in (1980, 1500, 1200)
    ]


def corrected(true: Constants, few: list[Configuration]) -> ScaleOut:
    return ScaleOut(
        BASE,
        predictor(JOB, FEW, few),
        gpus=[each.world_size for each in few],
        launches=[each.launch.key for each in few],
        measured=predictor(JOB, FEW, few)(true),
    )


def test_without_probes_nothing_is_corrected() -> None:
    line = ScaleOut(BASE, plain, gpus=[], launches=[], measured=np.empty((0, 1)))
    assert line.medians(plain, [1, 1, 16, 16]) == pytest.approx(np.zeros((4, 1)))
    assert line.constants == BASE


def test_what_probes_exercise_is_corrected_and_nothing_else() -> None:
    true = replace(BASE, matrix_efficiency=0.8 * BASE.matrix_efficiency, compute_W=0.5)
    few = probes()
    line = corrected(true, few)
    predict = predictor(JOB, FEW, few)
    assert np.exp(line.medians(predict, [8] * len(few)) - predict(true)) == pytest.approx(
        np.ones((len(few), 2)), rel=0.02
    )
    one_node = probes(4)
    line = ScaleOut(
        BASE,
        predictor(JOB, enlarged(FEW, 4), one_node),
        gpus=[4] * len(one_node),
        launches=[each.launch.key for each in one_node],
        measured=predictor(JOB, enlarged(FEW, 4), one_node)(BASE),
    )
    assert line.constants.reduce_over_network == pytest.approx(BASE.reduce_over_network, rel=1e-6)


@pytest.mark.slow
def test_it_predicts_clusters_that_the_models_misjudge() -> None:
    _, figures = compare(trials=2)
    assert all(figure.value < 10 for figure in figures)


def test_every_uncertain_constant_is_one() -> None:
    assert set(UNCERTAIN) <= set(Constants.figures())
    assert all(getattr(load_constants("cuda"), name) > 0 for name in UNCERTAIN)


def test_it_refuses_what_makes_no_sense() -> None:
    with pytest.raises(InvalidValue, match="gpus is 511"):
        enlarged(load_cluster("gh200-32"), 511)
    assert MANY.devices == 512


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs, with the run "few" on a simulated cluster."""
    folder = tmp_path_factory.mktemp("few")
    optimize(
        "opt-350m",
        cluster="gh200-32",
        executor="simulated",
        max_probes=4,
        verify=False,
        runs_dir=folder,
        name="few",
        report=False,
    )
    return folder


def planned(runs: Path, *words: str) -> int:
    return main(["plan", "--run", "few", "--runs-dir", str(runs), "--quiet", *words])


@pytest.mark.slow
def test_a_study_on_few_predicts_the_front_for_many(few: Path, capsys: Any) -> None:
    kwargs = {"runs_dir": few, "report": False, "progress": False}
    result = tuner.plan(run="few", gpus=[64], name="many", **kwargs)
    for point in result.front_points:
        assert point.configuration.world_size == 64
        assert point.source == "predicted"
        assert point.windows == 0
        assert point.meter.estimated
        low, high = point.energy_interval_kJ
        assert low < point.energy_to_solution_kJ < high
    plain = tuner.plan(
        "opt-350m",
        cluster=enlarged(load_cluster("gh200-32"), 64),
        gpus=[64],
        name="plain",
        **kwargs,
    )
    assert plain.best.time_to_solution_s != result.best.time_to_solution_s
    assert planned(few, "--gpus", "64,128", "--json") == 0
    answered = json.loads(capsys.readouterr().out)["plan"]["sizes"]
    assert [each["gpus"] for each in answered] == [64, 128]
    assert answered[0]["best"]["configuration"] == result.best.to_json()["configuration"]


def test_a_slowdown_there_is_relative_to_the_default_there(few: Path) -> None:
    wide = tuner.plan(run="few", gpus=[64], max_slowdown=0.5, runs_dir=few, report=False)
    assert wide.choice.met
    assert wide.best.time_to_solution_s <= 1.5 * wide.baseline.time_to_solution_s


def test_sizes_that_cannot_be_predicted_are_refused_in_a_sentence(few: Path, capsys: Any) -> None:
    for words, sentence in (
        (["--gpus", "6"], "gpus is 6; it must be a multiple of the 4 devices of a node"),
        (["--gpus", "4194304"], "it must be at most 100,000"),
        ([], "--run needs --gpus"),
        (["--gpus", "64", "opt-350m"], "--run says what is trained"),
        (["--gpus", "64", "--cluster", "a100-8"], "--run says what is trained"),
    ):
        assert planned(few, *words) == 2
        told = capsys.readouterr().err
        assert sentence in told
        assert told.count("\n") == 1
