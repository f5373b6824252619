"""Knobs given to `predict`, `fit` and `probe` change the default configuration."""

from __future__ import annotations

import pytest

from tuner.cli.main import main
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InvalidConfiguration
from tuner.search_spaces.job import load_job
from tuner.search_spaces.space import changed_default, default_configuration


def changed(words: str, job: str = "opt-350m", cluster: str = "a100-8") -> str:
    chosen = Configuration.parse(words) if words else Configuration(Settings())
    return changed_default(load_job(job), load_cluster(cluster), chosen).short


def test_no_knob_shrinks_the_job() -> None:
    job, cluster = load_job("opt-350m"), load_cluster("a100-8")
    default = default_configuration(job, cluster)
    assert changed_default(job, cluster, Configuration(Settings())) == default
    assert changed("mb16") == "dp8 mb16 zero0"
    assert changed("zero3") == "dp8 mb4 zero3"
    assert changed("tp2") == "dp4 tp2 mb4 zero0"
    assert changed("dp4") == "dp4 mb4 zero0"
    assert changed("zero1", "tiny-gpt", "cpu-2") == "dp2 mb4 zero1"


@pytest.mark.extra("tuner.search_spaces.model_reading")
def test_a_stage_that_other_knobs_rule_out_gives_way() -> None:
    assert changed("dp8 mb1", "qwen2.5-7b", "h100-32").startswith("dp8 mb1 zero")
    assert changed("pp4", "qwen2.5-7b", "h100-32") == "dp8 pp4 mb1 zero1"


@pytest.mark.extra("tuner.search_spaces.model_reading")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("mb3", "does not divide the global batch"),
        ("tp3", "does not divide the 16 attention heads"),
        ("dp16", "needs 16 devices"),
        ("tp16", "needs 16 devices"),
    ],
)
def test_what_cannot_be_had_is_said_of_the_changed_knob(words: str, sentence: str) -> None:
    with pytest.raises(InvalidConfiguration, match=sentence):
        changed(words)


@pytest.mark.extra("tuner.planner.command")
def test_predict_says_how_many_gpus_it_means(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "opt-350m", "micro_batch=16", "--cluster", "a100-8"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == [
        "Predicted, not measured: opt-350m on a100-8, 8 of 8 GPUs",
        "  dp8 mb16 zero0",
    ]
