"""Plans as their users meet them: API, command, folder, report."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import tuner
from tests.support.studies import LONG_JOB
from tuner.cli.main import main
from tuner.display.text import answer_lines, summary_lines
from tuner.result import Result
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.job import TrainingJob
from tuner.workload.records.trace import read_trace


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def planned(runs: Path) -> Result:
    return tuner.plan("opt-350m", cluster="a100-8", name="one", runs_dir=runs)


def test_everything_is_predicted_and_nothing_is_called_measured(planned: Result) -> None:
    assert {point.source for point in planned.points} == {"predicted"}
    assert planned.recommendation.evidence == "predicted"
    assert planned.verification is None
    report = planned.report_path
    said = "\n".join([*answer_lines(planned), *summary_lines(planned)])
    data = json.dumps(planned.to_json())
    for word in ("verified", "launches", "windows measured", "Spent"):
        assert word not in said
    assert "nothing was measured" in said
    assert '"source": "measured"' not in data
    assert "predicted by the analytic models" in report.read_text(encoding="utf-8")


def test_what_does_not_fit_is_not_kept(runs: Path) -> None:
    """No plain configuration of this model fits, and 107 of 86 GB were kept as today's."""
    result = tuner.plan("lmm-32b", cluster="a100-8", name="full", runs_dir=runs, report=False)
    assert result.recommendation.action == "train"
    assert "; what you run today probably does not fit in memory." in result.headline
    assert result.choice.sentence.startswith("Best in both energy and time: ")


def test_the_run_gives_the_same_result_again(planned: Result, runs: Path) -> None:
    again = tuner.load_result("one", runs_dir=runs)
    assert again.to_json() == planned.to_json()
    first = planned.choose(deadline_s=planned.front_points[0].time_to_solution_s * 1.1)
    assert first.evidence == "predicted"
    assert first.met


def test_a_ratio_is_surer_than_its_parts(planned: Result) -> None:
    best = planned.best
    assert best is not None
    differences = planned.judged.differences(best)
    low, high = best.energy_interval_kJ
    assert differences[0].high - differences[0].low < math.log(high / low)


def test_two_points_are_compared_without_the_error_that_they_share(planned: Result) -> None:
    one, other = planned.front_points[0], planned.front_points[-1]
    to_one, to_other = (planned.compare(b=p.configuration.short).step_time for p in (one, other))
    between = planned.compare(one.configuration.short, other.configuration.short).step_time
    width, of_one, of_other = (
        math.log1p(each.high) - math.log1p(each.low) for each in (between, to_one, to_other)
    )
    # No more than the two together (triangle inequality), and no less than their difference.
    assert abs(of_one - of_other) - 1e-9 <= width <= of_one + of_other + 1e-9
    low, high = other.time_interval_s
    assert width < math.log(high / low)


def test_a_change_below_one_per_cent_is_no_finding(planned: Result) -> None:
    today = planned.baseline
    chosen = planned.choose(deadline_s=1.005 * today.time_to_solution_s)
    assert max(abs(chosen.energy.relative), abs(chosen.time.relative)) < 0.01
    assert "Against today: no difference worth a change (" in str(chosen)
    saving = planned.choose(deadline_s=2 * today.time_to_solution_s)
    assert "Against today: 2" in str(saving)


def test_limits_choose_on_the_front(runs: Path, planned: Result) -> None:
    fastest = planned.front_points[0]
    limit = 1.1 * fastest.time_to_solution_s
    found = tuner.plan(
        "opt-350m", cluster="a100-8", deadline_s=limit, name="limited", runs_dir=runs, report=False
    )
    assert found.choice.met
    assert found.best.time_to_solution_s <= limit
    assert found.best.energy_to_solution_kJ < fastest.energy_to_solution_kJ


def test_sizes_have_their_own_choice_and_a_knee(runs: Path) -> None:
    found = tuner.plan("lmm-7b", cluster="gh200-32", gpus=[32, 8, 16], name="sizes", runs_dir=runs)
    assert [size.gpus for size in found.plan.sizes] == [8, 16, 32]
    assert sum(size.is_knee for size in found.plan.sizes) == 1
    for size in found.plan.sizes:
        assert size.best.configuration.world_size == size.gpus
        assert size.least_time.time_to_solution_s <= size.best.time_to_solution_s
        assert size.least_energy.energy_to_solution_kJ <= size.best.energy_to_solution_kJ
    assert "How many GPUs" in found.report_path.read_text(encoding="utf-8")


def test_today_is_no_second_point_beside_its_own_setting_with_defaults_spelled_out(
    runs: Path,
) -> None:
    """The default space of so large a model has groups within which ZeRO shards: today has one."""
    found = tuner.plan("qwen2.5-7b", cluster="4xH20", name="twin", runs_dir=runs, report=False)
    assert "zero_hpz_partition_size" in found.points[-1].configuration.launch
    alike = [p for p in found.points if p.configuration.short == found.baseline.configuration.short]
    assert alike == [found.baseline]
    assert "#" not in "\n".join(answer_lines(found))  # nothing else to choose


def test_probes_begin_with_the_baseline(planned: Result) -> None:
    assert planned.plan.probes[0] == planned.baseline.configuration
    assert len(set(planned.plan.probes)) == len(planned.plan.probes) == 10


def test_the_command_prints_json_and_lists_the_run(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "tiny-gpt", "--cluster", "cpu-2", "--runs-dir", str(runs), "--quiet"]
    assert main([*words, "--name", "json", "--json", "--gpus", "1,2"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [size["gpus"] for size in data["plan"]["sizes"]] == [1, 2]
    assert main(["runs", "--runs-dir", str(runs), "--json"]) == 0
    kinds = {run["name"]: run["kind"] for run in json.loads(capsys.readouterr().out)["items"]}
    assert kinds["json"] == "plan"


@pytest.mark.usefixtures("no_report")
def test_a_limit_that_nothing_meets_is_exit_code_3(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "opt-350m", "--cluster", "a100-8", "--runs-dir", str(runs), "--quiet"]
    assert main([*words, "--deadline", "1s", "--name", "unmet"]) == 3
    told = capsys.readouterr().out
    assert "Nothing predicted meets the deadline: 1.00 s is out of reach, and the least" in told
    assert told.splitlines()[0] == "Keep what you run today: nothing predicted meets the limits."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["lmm-72b", "--cluster", "a100-40gb-8", "--space", "default"],
            "does not fit on a100-40gb-8",
        ),
        (["opt-350m", "--cluster", "a100-8", "--gpus", "8,x"], "--gpus takes numbers such as"),
        (["opt-350m", "--cluster", "h100-32", "--gpus", "12"], "multiple of the 8 devices"),
        (["opt-350m", "--cluster", "a100-8", "--gpus", "16"], "more than the 8 GPUs of cluster"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words, "--runs-dir", str(tmp_path), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_a_plan_is_no_study_that_goes_on(runs: Path, planned: Result) -> None:
    with pytest.raises(tuner.InputError, match="is a plan"):
        tuner.optimize(
            LONG_JOB, cluster="cpu-2", executor="simulated", name=planned.name, runs_dir=runs
        )
    with pytest.raises(tuner.InputError, match="already"):
        tuner.plan("opt-350m", cluster="a100-8", name=planned.name, runs_dir=runs)


@pytest.mark.slow
def test_a_search_begins_with_the_probes_of_a_plan(runs: Path, planned: Result) -> None:
    tuner.optimize(
        "opt-350m",
        cluster="a100-8",
        plan="one",
        executor="simulated",
        search=tuner.SearchSettings(max_probes=6),
        name="begun",
        runs_dir=runs,
        report=False,
    )
    records = read_trace(runs / "begun" / "trace" / "probes.jsonl").records
    visited = [record.request.configurations()[0] for record in records[:3]]
    assert visited == list(planned.plan.probes[:3])

    def again(job: str, cluster: str, plan: str) -> None:
        tuner.optimize(job, cluster=cluster, plan=plan, executor="simulated", runs_dir=runs)

    with pytest.raises(tuner.InputError, match="is a study, not a plan"):
        again("opt-350m", "a100-8", "begun")
    with pytest.raises(tuner.InputError, match="is a candidate here"):
        again("lmm-7b", "gh200-32", "one")


def test_a_damaged_plan_is_one_sentence(runs: Path, planned: Result) -> None:
    shutil.copytree(runs / "one", runs / "torn")
    path = runs / "torn" / "plan.json"
    path.write_text(path.read_text()[:-200])
    with pytest.raises(tuner.InputError, match="cannot read the plan"):
        tuner.load_result("torn", runs_dir=runs)


def test_over_a_slow_network_the_plan_says_to_shard_within_the_node(runs: Path) -> None:
    """On Ethernet of 25 Gbit/s a GPU a second copy pays; on rails of 400 it is not worth a word."""
    fast = load_cluster("h100-32")
    for cluster, said in ((replace(fast, network_Bps=3.1e9), True), (fast, False)):
        plan = tuner.plan("qwen2.5-7b", cluster=cluster, runs_dir=runs, report=False)
        assert (plan.recommended.configuration.get("zero_hpz_partition_size") == 8) is said
        assert any("Shard within the node (hpz8)" in line for line in answer_lines(plan)) is said


@pytest.mark.slow
def test_nothing_of_a_doubted_plan_is_a_probability(runs: Path) -> None:
    pytest.importorskip("transformers")
    mamba = {"model_type": "mamba", "hidden_size": 512, "num_hidden_layers": 4, "vocab_size": 5000}
    job = TrainingJob("mamba", mamba, sequence_length=512, global_batch=64, steps=100)
    data = tuner.plan(job, cluster="a100-8", runs_dir=runs, report=False).to_json()
    assert data["doubts"]

    def probabilities(value: object) -> list[object]:
        if isinstance(value, dict):
            named = [v for name, v in value.items() if name.startswith("p_")]
            return named + [p for v in value.values() for p in probabilities(v)]
        return [p for v in value for p in probabilities(v)] if isinstance(value, list) else []

    found = probabilities(data)
    assert found
    assert set(found) == {None}
