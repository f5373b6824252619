"""Earlier measurements as a prior: what they transfer, and when they are rejected."""

import json

import numpy as np
import pytest

import tuner
from tuner.cli.main import main
from tuner.executors.local import SimulatedExecutor
from tuner.models.analytic.model import AnalyticModel
from tuner.models.surrogate.features import FeatureMap
from tuner.models.surrogate.surrogates import Surrogates
from tuner.search.transfer import Earlier, EarlierPrior, read_earlier
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.job import load_job
from tuner.testing.studies import (
    TOML,
    ModelRunner,
    run_optimize,
    run_replay,
    table_point,
    write_table,
)


def grid(shapes, speeds):
    return [Configuration(Settings(shape=s), Settings(speed=v)) for s in shapes for v in speeds]


def earlier(configurations, figure, **more):
    figures = np.array([figure(c.get("shape"), c.get("speed")) for c in configurations])
    return Earlier("before", tuple(configurations), figures[:, 0], figures[:, 1], **more)


def ratios(prediction, rows):
    log = np.log([prediction.step_time_s[rows], prediction.power_W[rows]])
    return log - log.mean(axis=1, keepdims=True)


def test_another_devices_live_settings_are_read_as_shares_of_its_highest():
    # There: speeds 10 to 50; here 1 to 5.
    there = grid((1, 2, 3, 4), range(10, 60, 10))
    here = grid((2, 3), range(1, 6))
    before = earlier(there, lambda s, v: (3 * table_point(s, v / 10)[0], table_point(s, v / 10)[1]))
    prior = EarlierPrior(before, Candidates.from_configurations(here))
    predicted = ratios(prior.predict(here), slice(0, 5))
    assert np.allclose(
        predicted[0], -0.8 * (np.log(range(1, 6)) - np.log(range(1, 6)).mean()), atol=0.1
    )
    assert (np.diff(predicted[1]) > 0).all()


def test_the_whole_carries_the_launches_over_too():
    every = grid((1, 2, 3, 4, 6, 8), range(1, 6))
    before = earlier(every, lambda s, v: (7 * table_point(s, v)[0], 2 * table_point(s, v)[1]))
    whole = EarlierPrior(before, Candidates.from_configurations(every))
    truth = np.log([table_point(c.get("shape"), c.get("speed")) for c in every]).T
    truth -= truth.mean(axis=1, keepdims=True)
    assert np.abs(ratios(whole.predict(every), slice(None)) - truth).max() < 0.05


def test_a_source_that_misleads_is_put_away_and_one_that_fits_stays():
    every = grid((1, 2, 3, 4, 6, 8), range(1, 6))
    candidates = Candidates.from_configurations(every)
    rng = np.random.default_rng(0)
    measured = [every[i] for i in rng.permutation(len(every))[:14]]
    figures = np.array([table_point(c.get("shape"), c.get("speed")) for c in measured])
    kept = {}
    for name, figure in {
        "fits": lambda s, v: (5 * table_point(s, v)[0], 3 * table_point(s, v)[1]),
        "misleads": lambda s, v: ((1 + 5 * (7 * s * v % 11)) / 5, 50 + 30 * (5 * s * v % 7)),
    }.items():
        prior = EarlierPrior(earlier(every, figure), candidates)
        surrogates = Surrogates(FeatureMap(candidates, earlier=(prior,)))
        assert surrogates.mean_in_use == (0, 0)  # before a measurement
        surrogates.fit(measured, figures[:, 0], figures[:, 1])
        kept[name] = surrogates.mean_in_use
        predicted = surrogates.predict(every)
        truth = np.log([table_point(c.get("shape"), c.get("speed"))[0] for c in every])
        assert np.abs(predicted.log_time - truth).mean() < (0.02 if name == "fits" else 0.15)
    assert kept["fits"] == (0, 0)
    assert kept["misleads"][0] is None


def test_errors_of_the_analytic_model_are_carried_over_where_both_sides_have_one():
    small = AnalyticModel(load_job("tiny-gpt"), load_cluster("cpu-2"))
    large = AnalyticModel(load_job("opt-350m"), load_cluster("a100-8"))
    configurations = [
        Configuration.of(data_parallel=dp, micro_batch=mb) for dp in (1, 2) for mb in (1, 2, 4)
    ]
    predicted = small.predict(configurations)
    before = Earlier(
        "b", tuple(configurations), 1.5 * predicted.step_time_s, 0.8 * predicted.power_W, small
    )
    candidates = Candidates.from_configurations(
        [Configuration.of(data_parallel=8, micro_batch=mb) for mb in (1, 2, 4)]
    )
    whole = EarlierPrior(before, candidates, prior=large)
    there, mine = whole.predict(candidates.configurations), large.predict(candidates.configurations)
    assert np.allclose(there.step_time_s / mine.step_time_s, 1.5, rtol=0.02)
    assert np.allclose(there.power_W / mine.power_W, 0.8, rtol=0.02)


@pytest.fixture
def options(tmp_path):
    return {"runs_dir": tmp_path / "runs", "report": False}


def test_a_replay_starts_from_a_run_and_a_table_and_notes_it(tmp_path, options):
    table = write_table(tmp_path / "table")
    other = write_table(tmp_path / "other", shapes=(2, 4, 8))
    run_replay(table, **options, name="first", max_probes=6)
    result = run_replay(table, **options, name="second", max_probes=4, transfer=["first", other])
    notes = " ".join(result.about["notes"])
    assert "measurements of first are a prior of the search, by shape, speed" in notes
    assert "15 measurements of made-up are a prior" in notes
    assert '"first"' in (tmp_path / "runs" / "second" / "study.toml").read_text()
    assert result.points


def test_a_real_jobs_run_is_read_as_its_windows(options):
    executor = SimulatedExecutor(ModelRunner(), capacity=1)
    run_optimize(cluster="cpu-2", executor=executor, name="one", max_probes=5, **options)
    read = read_earlier("one", runs_dir=options["runs_dir"])
    result = tuner.load_result("one", runs_dir=options["runs_dir"])
    assert len(read.configurations) == result.spent.measurements
    assert read.prior is not None
    assert {c.launch for c in read.configurations} == {
        p.configuration.launch for p in result.points
    }


def test_what_cannot_be_used_is_one_sentence(tmp_path, options):
    table = write_table(tmp_path / "table")
    with pytest.raises(UnknownName, match="nowhere"):
        run_replay(table, **options, transfer=["nowhere"])
    with pytest.raises(InputError, match="only the sampler joulefront"):
        run_replay(table, **options, transfer=[table], sampler="tpe")
    strange = tmp_path / "strange"
    strange.mkdir()
    rows = [f"{i},{1 + i},{10 + i}" for i in range(6)]
    (strange / "table.csv").write_text("\n".join(["colour,t,p", *rows]) + "\n")
    toml = TOML.replace('"shape"', '"colour"').replace('live_knobs = ["speed"]', "live_knobs = []")
    (strange / "table.toml").write_text(toml)
    with pytest.raises(InputError, match="be the same: only one of them has shape, speed, col"):
        run_replay(table, **options, transfer=[strange])
    few = write_table(tmp_path / "few", toml='group_by = ["shape"]\n' + TOML.replace('"shape"', ""))
    with pytest.raises(InputError, match="holds 6 groups; name one of"):
        read_earlier(few)
    assert len(read_earlier(f"{few}:3").configurations) == 5
    assert not (tmp_path / "runs").exists()


def test_the_command_takes_it(tmp_path, capsys):
    table = write_table(tmp_path / "table")
    words = ["dev", "replay", str(table), "--transfer", str(table), "--max-probes", "3", "--json"]
    words += ["--runs-dir", str(tmp_path / "runs"), "--quiet"]
    assert main(words) == 0
    output = json.loads(capsys.readouterr().out)
    assert "30 measurements of made-up" in " ".join(output["about"]["notes"])
