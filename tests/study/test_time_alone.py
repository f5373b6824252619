"""A study where nothing tells energy: time is tuned, and no output states a figure of energy."""

import json
import re
from contextlib import closing
from dataclasses import replace

import optuna
import pytest

import tuner
from tests.support.studies import LONG_JOB, FormulaRunner
from tests.twin import TwinGpu, TwinNode
from tuner.answer.parts import as_json
from tuner.dashboard.server import note
from tuner.display.progress import EventLines, metrics_of
from tuner.display.text import record_lines, summary_lines
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.problem.constraints import Constraints
from tuner.problem.settings import SearchSettings, energy_not_repaid, stop_sentence
from tuner.search_spaces.cluster import load_device
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.study.recorder import open_storage
from tuner.workload.node.facts import inspect_node
from tuner.workload.node.meters.base import MeterError
from tuner.workload.node.meters.gpus import time_alone
from tuner.workload.node.platforms import detect_cluster, platform_of
from tuner.workload.records.probe import Failure, MeterInfo, ProbeRecord, ProbeRequest
from tuner.workload.records.trace import read_trace

NONE = MeterInfo("time", "none", "GPU 0 tells neither its energy nor its power")
#: A figure with a unit of energy, power or carbon, and words that state one.
FIGURE = re.compile(
    r"\d\s?(?:[kMG]?J|[kMG]?Wh?|g CO2e?)\b|\b(?:kWh|joules?|watts?)\b|(?:less|more) energy"
)
ENERGY = r"(?i:energy|power|carbon)|(^|_)[kM]?(J|W|Wh)(_|$)"


class TimeAlone(FormulaRunner):
    """Runner whose records were written and read as those of time alone."""

    def run(self, request):
        record = replace(super().run(request), meter=NONE)
        return ProbeRecord.from_json(json.loads(json.dumps(record.to_json())))


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    runs, events = tmp_path_factory.mktemp("runs"), []
    result = tuner.optimize(
        LONG_JOB,
        cluster="cpu-2",
        executor=SimulatedExecutor(TimeAlone(meter=NONE)),
        runs_dir=runs,
        name="alone",
        constraints=Constraints(objective="time"),
        search=SearchSettings(max_probes=5),
        on_progress=events.append,
    )
    return result, events


def told(text):
    # The source says why there is no energy, and the shipped cluster's file what its cores draw.
    text = text.replace(NONE.source, "")
    return re.sub(r"power: an envelope, not a measurement: a 250 W [^\"<]*", "", text)


def test_a_meter_decides_which_figures_are_shown_and_kept() -> None:
    """The figures of energy and power go, and neither knobs of power nor times."""
    metered = replace(NONE, scope="gpu")
    asked = {"live": {"power_limit_W": 300}}
    data = {**asked, "energy_J": 5.0, "power_rse": 0.1, "window_s": 2.0, "of": [{"spent_kJ": 1.0}]}
    assert NONE.known(data) == {
        **asked,
        "energy_J": None,
        "power_rse": None,
        "window_s": 2.0,
        "of": [{"spent_kJ": None}],
    }
    assert metered.known(data) == data
    assert (NONE.shown("5 J and "), metered.shown("5 J and ")) == ("", "5 J and ")
    assert NONE.sentence == f"time alone ({NONE.source})"
    assert metered.sentence == f"energy: gpu scope, metered ({NONE.source})"
    # A twin without a source of energy has a mark, and no figure that bears it.
    assert replace(NONE, twin=True).shown("5 J (twin)") == ""


def test_the_fastest_is_found_and_is_the_front(study):
    result, _ = study
    fastest = min(result.points, key=lambda p: p.time_to_solution_s)
    assert len(result.points) > 2
    assert [p.configuration for p in result.front_points] == [fastest.configuration]
    assert result.choice.sentence.startswith("Fastest: ")


def test_no_screen_states_a_figure_of_energy(study):
    result, events = study
    other = next(p for p in result.points if p.configuration != result.best.configuration)
    record = read_trace(result.run_dir / "trace" / "probes.jsonl").records[0]
    lines = [line for event in events for line in EventLines(verbose=True)(event)]
    screens = [
        str(result),
        "\n".join(summary_lines(result)),
        repr(result),
        result._repr_html_(),
        str(result.explain()),
        str(result.compare(other.configuration, "best")),
        str(result.choose(objective_of_time())),
        "\n".join(record_lines(record)),
        "\n".join(lines),
        note(result),
    ]
    for screen in map(told, screens):
        assert not FIGURE.search(screen), screen
        assert "nergy" not in screen.replace("meters energy", ""), screen
    assert any("s/step" in line or "s a step" in line for line in lines)


def objective_of_time():
    return Constraints(objective="time")


def test_no_file_states_a_figure_of_energy(study):
    result, _ = study
    table = result.to_csv().read_text()
    assert not re.search("energy|power|kJ", table)
    for path in result.run_dir.rglob("*"):
        text = told(path.read_text(errors="replace")) if path.is_file() else ""
        if path.suffix == ".html":
            text = re.sub(r"<script[^>]*>.*?</script>|<style.*?</style>", "", text, flags=re.S)
        if "best" not in path.parts:  # clocks.sh sets clocks and caps of any study
            assert not FIGURE.search(text), (path, FIGURE.search(text))


def figures(data, name=""):
    if isinstance(data, dict):
        for key, value in data.items():
            yield from figures(value, key)
    elif isinstance(data, list):
        for each in data:
            yield from figures(each, name)
    elif isinstance(data, float | int) and not isinstance(data, bool):
        yield name, data


def test_figures_of_energy_are_null_in_json(study):
    result, events = study
    other = next(p for p in result.points if p.configuration != result.best.configuration)
    record = read_trace(result.run_dir / "trace" / "probes.jsonl").records[0]
    for made in (
        result.to_json(),
        result.explain().to_json(),
        result.compare(other.configuration, "best").to_json(),
        result.choose(objective_of_time()).to_json(),
        result.points[0].to_json(),
        record.to_json(),
        *map(metrics_of, events),
    ):
        made.pop("about", None)  # the cluster's file
        of_energy = [each for each in figures(as_json(made)) if re.search(ENERGY, each[0])]
        assert of_energy == []
    assert result.to_json()["points"][0]["energy_to_solution_kJ"] is None
    assert record.to_json()["energy_J"] is None


def test_a_run_whose_probes_all_failed_states_no_energy(tmp_path):
    class Failing(TimeAlone):
        def run(self, request):
            failure = Failure("crash", "exit code 1")
            return replace(super().run(request), measurements=(), failure=failure)

    result = tuner.optimize(
        LONG_JOB,
        cluster="cpu-2",
        executor=SimulatedExecutor(Failing(meter=NONE)),
        runs_dir=tmp_path,
        constraints=Constraints(objective="time"),
        search=SearchSettings(max_probes=2),
    )
    assert result.failures
    assert result.to_json()["spent"]["energy_kJ"] is None
    of_energy = [each for each in figures(result.to_json()) if re.search(ENERGY, each[0])]
    assert of_energy == []


def test_the_index_of_the_study_has_time_only(study):
    result, _ = study
    journal = open_storage(None, result.run_dir / "study.journal")
    made = optuna.load_study(study_name="alone", storage=journal)
    assert len(made.directions) == 1
    names = {name for trial in made.trials for name in trial.user_attrs}
    assert "step_time_s" in names
    assert not [name for name in names if re.search(ENERGY, name)]


def test_the_same_run_continues(study):
    result, _ = study
    again = tuner.load_result("alone", runs_dir=result.run_dir.parent)
    times = [p.time_to_solution_s for p in again.points]
    assert times == pytest.approx([p.time_to_solution_s for p in result.points])


@pytest.mark.parametrize(
    "asked",
    [
        Constraints(objective="energy"),
        Constraints(deadline_s=1e12),
        Constraints(budget_kJ=1, objective="time"),
        Constraints(power_cap_W=1, objective="time"),
    ],
)
def test_a_choice_by_energy_is_refused(study, asked):
    with pytest.raises(InputError, match="measured time alone; choose with --minimize time"):
        study[0].choose(asked)


def test_clocks_are_no_knob_of_time_alone(tmp_path):
    class Clocks(TimeAlone):
        def __init__(self):
            super().__init__(NONE)

    with pytest.raises(InputError, match="clock_MHz is not a knob where energy is not measured"):
        tuner.optimize(
            LONG_JOB,
            cluster="a100-8",
            executor=SimulatedExecutor(Clocks()),
            runs_dir=tmp_path,
            constraints=Constraints(objective="time"),
        )


def test_a_reason_to_stop_speaks_of_time():
    ended = energy_not_repaid(left_kJ=0.01, cost_kJ=0.2)
    assert stop_sentence(ended.of_time()) == (
        "The search ended: trying another configuration takes 3 min, and all that is left to find "
        "would save 10 s of the training."
    )


VGPU = TwinGpu(has_counter=False, gpu_scope=0, has_usage=False, lockable=False)


@pytest.mark.parametrize(
    ("constraints", "opens"),
    [
        (Constraints(objective="time"), True),
        (Constraints(objective="time", deadline_s=100.0), True),
        (Constraints(), False),
        (Constraints(objective="energy"), False),
        (Constraints(objective="time", budget_kJ=1.0), False),
        (Constraints(objective="time", power_cap_W=1.0), False),
    ],
)
@pytest.mark.needs("cc")
@pytest.mark.parametrize(
    ("gpu", "why"),
    [(VGPU, "neither its energy nor its power"), (TwinGpu(mig=1), "shares its GPU's meter")],
)
def test_only_a_study_of_time_runs_on_a_gpu_without_energy(tmp_path, gpu, why, constraints, opens):
    with TwinNode(tmp_path / "node", [gpu]).joined():
        with time_alone(not constraints.need_energy):
            cluster = detect_cluster()
            if opens:
                with closing(platform_of(cluster).open_meter(cluster)) as meter:
                    assert meter.info.scope == "none"
                    with pytest.raises(MeterError, match=why):
                        meter.sample()
                return
            with pytest.raises(InputError, match="tuner optimize --minimize time"):
                platform_of(cluster).open_meter(cluster)
        assert "--minimize time" in "".join(m.subject for m in inspect_node(environ={}).missing)


@pytest.mark.needs("cc")
def test_a_mig_slice_is_a_device_of_its_own(tmp_path):
    with TwinNode(tmp_path / "node", [TwinGpu(mig=1)]).joined():
        device = detect_cluster().device
    whole = load_device("A100-SXM-80GB")
    assert device.name == f"{whole.name} MIG 1g.10gb"
    assert device.memory_bytes == 10 * 2**30
    assert device.peak_flops == pytest.approx(whole.peak_flops / 8, rel=0.01)


@pytest.mark.needs("cc")
def test_a_gpu_that_is_metered_stays_metered_in_a_study_of_time(tmp_path):
    with TwinNode(tmp_path / "node", [TwinGpu()]).joined(), time_alone(True):
        cluster = detect_cluster()
        with closing(platform_of(cluster).open_meter(cluster)) as meter:
            assert meter.info.scope == "gpu"


def test_a_record_of_time_alone_reads_back_as_it_counted():
    made = TimeAlone(meter=NONE).run(ProbeRequest("p", Settings(data_parallel=2, micro_batch=4)))
    window = made.measurements[0]
    assert window.energy_J == pytest.approx(window.window_s)
    assert made.energy_J == pytest.approx(made.wall_s)
