"""The contract of the ways to set a knob: one set of cases for every route and every driver."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.entry_points import install_plugin
from tests.support.scripts import CPU, script_job
from tuner.cli.main import main
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.search_spaces.rules import broken_rules
from tuner.testing.routes import RouteContract
from tuner.workload.scripts import SOCKET
from tuner.workload.scripts.command import Script, Start
from tuner.workload.scripts.frameworks.bound_driver import Bound
from tuner.workload.scripts.frameworks.driver import Driver, shipped_drivers
from tuner.workload.scripts.inspection import proven
from tuner.workload.scripts.key_files import parsed_file
from tuner.workload.scripts.routes import Route, carriers, routes, support_of
from tuner.workload.scripts.script_facts import LAUNCH, ScriptFacts
from tuner.workload.scripts.script_job import ScriptJob

NODE = replace(CPU, devices_per_node=8)
CONFIG = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
TORCH = ScriptFacts("torch", micro_batch=4, accumulation=1, counted=True)
DEEPSPEED = ScriptFacts(
    "deepspeed", config=CONFIG, micro_batch=4, accumulation=1, follows=True, measured=True
)
TRAINER = replace(
    TORCH, owner="transformers", turns=("micro_batch", "gradient_accumulation"), can_checkpoint=True
)


def with_trainer_file(folder: Path) -> ScriptJob:
    (folder / "run.yaml").write_text("per_device_train_batch_size: 4\n")
    driver = next(each for each in shipped_drivers() if each.name == "transformers-trainer")
    return replace(script_job("train.py run.yaml", folder, TORCH), driver=Bound(driver))


@dataclass(frozen=True)
class Case:
    """Job on which a route sets a knob, with another value and where the start shows it."""

    make: Callable[[Path], ScriptJob]
    knob: str
    other: Value
    shown: Callable[[Start], Any]


CASES = {
    "Placeholders": Case(
        lambda folder: script_job("train.py {activation_checkpointing=none}", folder, TRAINER),
        *("activation_checkpointing", "full", lambda start: start.words[1]),
    ),
    "DriverKeys": Case(
        with_trainer_file,
        *("activation_checkpointing", "full"),
        lambda start: "gradient_checkpointing: true" in Path(start.cwd, start.words[1]).read_text(),
    ),
    "HookValues": Case(
        lambda folder: script_job("train.py", folder, replace(TORCH, reads=("compilation",))),
        *("compilation", "full"),
        lambda start: start.options["configuration"]["compilation"],
    ),
    "DeepSpeedConfig": Case(
        lambda folder: script_job("train.py", folder, DEEPSPEED),
        *("zero_stage", 2),
        lambda start: start.options["deepspeed"]["zero_optimization"]["stage"],
    ),
    "FrameworkArguments": Case(
        lambda folder: script_job("train.py", folder, TRAINER),
        *("micro_batch", 2),
        lambda start: start.options["owned"],
    ),
    "ModelSwitch": Case(
        lambda folder: script_job("train.py", folder, TRAINER),
        *("activation_checkpointing", "full"),
        lambda start: start.options.get("activation_checkpointing"),
    ),
    "KeyFiles": Case(
        lambda folder: with_file_knob(folder),
        *("workers", 8, lambda start: Path(start.words[1]).read_text()),
    ),
    "Variables": Case(
        lambda folder: script_job("train.py", folder, TORCH, ["env:NCCL_ALGO=Ring,Tree"]),
        *("NCCL_ALGO", "Tree", lambda start: start.env.get("NCCL_ALGO")),
    ),
    "TorchSettings": Case(
        lambda folder: script_job(
            *("train.py", folder, replace(TORCH, settings={"num_workers": 0})),
            ["torch:num_workers=0,2"],
        ),
        *("num_workers", 2, lambda start: start.options.get("torch")),
    ),
    "BatchSplit": Case(
        lambda folder: script_job("train.py", folder, DEEPSPEED),
        *("micro_batch", 2, lambda start: start.options["micro_batch"]),
    ),
}


def with_file_knob(folder: Path) -> ScriptJob:
    (folder / "f.yaml").write_text("workers: 2\n")
    return script_job("train.py f.yaml", folder, TORCH, ["f.yaml:workers=2,8"])


ids = [type(route).__name__ for route in routes()]
every_route = pytest.mark.parametrize("route", routes(), ids=ids)


def test_every_route_has_a_case() -> None:
    assert sorted(CASES) == sorted(ids)


class TestEveryRoute(RouteContract):
    @pytest.fixture(autouse=True, params=routes(), ids=ids)
    def _case(self, request: pytest.FixtureRequest) -> None:
        self._route, self._own = request.param, CASES[type(request.param).__name__]

    def route(self) -> Route:
        return self._route

    def job(self, folder: Path) -> ScriptJob:
        return self._own.make(folder)

    def other(self) -> tuple[str, Value]:
        return self._own.knob, self._own.other

    def shown(self, start: Start) -> Any:
        return self._own.shown(start)


@every_route
def test_a_script_without_evidence_gets_a_reason_for_every_knob(
    route: Route, tmp_path: Path
) -> None:
    plain = script_job("train.py", tmp_path, ScriptFacts("torch"), global_batch=0)
    for name in LAUNCH:
        assert route.support(plain, name) is None
        assert isinstance(route.why_not(plain, name), str)
        assert support_of(plain, name).why
        assert not support_of(plain, name).turned


# ---- two routes, or a wrong one


def test_of_two_routes_that_claim_a_knob_one_sets_it(tmp_path: Path) -> None:
    """The hook does not switch a model whose script takes the knob itself."""
    placed = CASES["Placeholders"].make(tmp_path)
    assert placed.frame.can_checkpoint
    assert "activation_checkpointing" not in placed.start(placed.baseline, tmp_path).options
    read = script_job("train.py", tmp_path, replace(TRAINER, reads=("activation_checkpointing",)))
    assert "activation_checkpointing" not in read.start(read.baseline, tmp_path).options


def test_a_stage_in_the_command_and_in_deepspeeds_file_stays_one_stage(tmp_path: Path) -> None:
    job = script_job("train.py --stage {zero_stage=1}", tmp_path, DEEPSPEED)
    start = job.start(Configuration.of(data_parallel=2, micro_batch=4, zero_stage=2), tmp_path)
    assert start.words[-1] == "2"
    assert start.config["zero_optimization"]["stage"] == 2


def test_a_dictionary_in_the_code_is_changed_by_the_hook_alone(tmp_path: Path) -> None:
    job = script_job("train.py", tmp_path, DEEPSPEED)
    assert job.config_word is None
    start = job.start(Configuration.of(data_parallel=2, micro_batch=4, zero_stage=3), tmp_path)
    assert start.words == ("train.py",)
    assert start.options["deepspeed"]["zero_optimization"]["stage"] == 3
    assert job.needs_hook


def test_a_value_that_the_script_reads_is_todays_where_no_file_says_otherwise(
    tmp_path: Path,
) -> None:
    reads = {"reads": ("compilation", "zero_stage"), "own": {"compilation": "full"}}
    job = script_job("train.py", tmp_path, replace(TORCH, **reads))
    assert job.baseline.get("compilation") == "full"
    start = job.start(job.baseline, tmp_path / "p")
    assert start.options["configuration"]["compilation"] == "full"
    # Not a value of another type, and not against the file of the command.
    wrong = replace(TORCH, reads=("compilation",), own={"compilation": True})
    assert script_job("train.py", tmp_path, wrong).baseline.get("compilation") == "none"
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    filed = replace(DEEPSPEED, reads=("zero_stage",), own={"zero_stage": 3})
    assert script_job("train.py ds.json", tmp_path, filed).baseline.zero_stage == 1


def test_deepspeeds_file_is_replaced_where_a_framework_takes_words_away(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    driver = next(each for each in shipped_drivers() if each.name == "transformers-trainer")
    words = "train.py --gradient_checkpointing --per_device_train_batch_size 4 --deepspeed ds.json"
    frame = replace(DEEPSPEED, owner="transformers", follows=False)
    job = replace(script_job(words, tmp_path, frame), driver=Bound(driver))
    off = Configuration.of({**job.baseline.launch, "activation_checkpointing": "none"})
    start = job.start(off, tmp_path / "p")
    assert start.words[-1] == str(tmp_path / "p" / "ds_config.json")
    assert "--deepspeed" in start.words


def test_an_empty_argument_is_not_taken_for_the_configuration(tmp_path: Path) -> None:
    job = script_job("train.py ''", tmp_path, DEEPSPEED)
    assert job.start(job.baseline, tmp_path / "p").words == ("train.py", "")


def test_anchors_of_a_yaml_change_in_one_place(tmp_path: Path) -> None:
    job = with_trainer_file(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "per_device_train_batch_size: &b 4\nper_device_eval_batch_size: *b\n"
    )
    start = job.start(Configuration.of(data_parallel=2, micro_batch=2), tmp_path / "p")
    written = parsed_file(Path(start.words[1]))
    assert written["per_device_train_batch_size"] == 2
    assert written["per_device_eval_batch_size"] == 4


# ---- every framework


def driven_job(driver: Driver, folder: Path) -> ScriptJob:
    """Return a job of eight ranks whose framework is given a file or nothing, and a batch."""
    words, file = ["train.py"], driver.command.file
    if driver.command.python:
        (folder / "conf.py").write_text("batch = 1\n")
        words.append("conf.py")
    elif file:
        (folder / "run.yaml").write_text("{}\n")
        words += ["run.yaml"] if "first" in file else [file[0], "run.yaml"]
    job = script_job("train.py", folder, replace(TORCH, measured=True), devices=8, global_batch=64)
    return replace(job, words=tuple(words), driver=Bound(driver))


@pytest.mark.parametrize(
    "driver", shipped_drivers(), ids=[f"{each.name}{each.versions}" for each in shipped_drivers()]
)
def test_every_driver_reads_back_what_it_writes(driver: Driver, tmp_path: Path) -> None:
    job = driven_job(driver, tmp_path)
    assert job.driven is not None
    for name, today in job.driven.today.items():
        assert KNOBS[name].check(today) == today
        support = support_of(job, name)
        assert support.why
        for value in job.driven.levels(name) if name in driver.knobs else ():
            other = Configuration.of({**job.baseline.launch, name: value})
            if job.refused(other) or broken_rules(other, job, NODE) or driver.wrapper:
                continue
            start = job.start(other, tmp_path / f"{name}-{value}")
            again = replace(job, words=start.words)
            assert again.driven is not None
            with_env = replace(again.driven.settings, env={**start.env})
            read = replace(again.driven, settings=with_env).today
            assert read.get(name) == value, (name, value, start.words, start.env)


def test_no_route_but_the_command_looks_at_a_placeholder_that_the_script_ignores(
    tmp_path: Path,
) -> None:
    """A launch shows that the batch is another one: the look refuses it, and no route guesses."""
    counted = replace(TORCH, micro_batch=8, accumulation=1)
    job = script_job("train.py {micro_batch=4}", tmp_path, counted)
    assert job.baseline.micro_batch == 4  # `seen_today` refuses the contradiction
    able = [type(each).__name__ for each in carriers() if each.support(job, "micro_batch")]
    assert able == ["Placeholders"]


@pytest.fixture
def routes_found_again() -> Iterator[None]:
    carriers.cache_clear()
    yield
    carriers.cache_clear()


@pytest.fixture
def core_alone(monkeypatch: pytest.MonkeyPatch, routes_found_again: None) -> None:
    """An installation without any part of a script that may be left out."""
    for part in SOCKET.shipped.values():
        monkeypatch.setitem(sys.modules, part.partition(":")[0], None)


@pytest.mark.usefixtures("core_alone")
def test_a_plain_script_is_a_job_without_the_parts_that_may_be_left_out(tmp_path: Path) -> None:
    names = [type(route).__name__ for route in routes()]
    assert {*ids} - {*names} == {"DriverKeys", "DeepSpeedConfig"}
    job = script_job("train.py {micro_batch=4} {gradient_accumulation=1}", tmp_path, TORCH)
    assert (job.driver, job.launcher) == (None, None)
    other = Configuration(Settings({**job.baseline.launch, "micro_batch": 2}))
    assert job.start(other, tmp_path / "start").words[1:] == ("2", "2")
    assert proven(job, {}, lambda *_: "unused", devices=8) is job
    assert Script("bash job.sh", cwd=tmp_path).job_script is None


@pytest.mark.usefixtures("core_alone")
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["optimize", "--script", "python train.py", "--framework", "f.toml"], "--framework"),
        (["list", "frameworks"], "tuner list frameworks"),
        (["dev", "frameworks", "check", "f.toml"], "tuner dev frameworks"),
    ],
)
def test_a_part_that_is_left_out_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    what: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert main(words) == 2
    err = capsys.readouterr().err
    assert f"{what} needs a part of joulefront that is not installed here" in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("core_alone")
def test_a_run_of_a_framework_names_what_it_needs(tmp_path: Path) -> None:
    job = script_job("train.py", tmp_path, TORCH)
    with pytest.raises(InputError, match="of a recognised framework needs a part"):
        ScriptJob.from_json({**job.to_json(), "driver": "{}"})
    with pytest.raises(InputError, match="the launcher 'true' needs a part of joulefront"):
        Script("true --nproc-per-node 2 train.py", cwd=tmp_path).words  # noqa: B018


PLUGIN = """
from tuner.workload.scripts.routes import KnobSupport, Route

class Caps(Route):
    PROTOCOL = 1

    def today(self, job):
        return {"compilation": "none"}

    def support(self, job, knob):
        return KnobSupport("a file of the site", route=self) if knob == "compilation" else None

    def apply(self, job, configuration, draft):
        draft.env["COMPILE"] = str(configuration.get("compilation"))

ROUTE = Caps()
"""


def plugged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, name: str = "caps"
) -> ScriptJob:
    folder = tmp_path / "site"
    folder.mkdir()
    install_plugin(folder, monkeypatch, SOCKET.group, name, source, attribute="ROUTE")
    return script_job("train.py", tmp_path, TORCH)


@pytest.mark.usefixtures("routes_found_again")
def test_a_route_of_another_distribution_sets_its_knob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = plugged(tmp_path, monkeypatch, PLUGIN)
    assert job.offers["compilation"].turned
    other = Configuration(Settings({**job.baseline.launch, "compilation": "full"}))
    assert job.start(other, tmp_path / "start").env["COMPILE"] == "full"


@pytest.mark.usefixtures("routes_found_again")
@pytest.mark.parametrize(
    ("changed", "to", "name", "fault"),
    [
        ("PROTOCOL = 1", "PROTOCOL = 2", "caps", "it must have PROTOCOL = 1, not 2"),
        ("ROUTE = Caps()", "raise OSError('no file')", "caps", "loaded (OSError: no file)"),
        ("", "", "deepspeed", "the name 'deepspeed' is taken"),
    ],
)
def test_a_route_that_cannot_be_used_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, to: str, name: str, fault: str
) -> None:
    job = plugged(tmp_path, monkeypatch, PLUGIN.replace(changed, to) if changed else PLUGIN, name)
    assert not job.offers["compilation"].turned
    (sentence,) = SOCKET.plugins.left_out
    assert sentence.startswith(f"the route {name!r} (")
    assert fault in sentence


@pytest.mark.usefixtures("routes_found_again")
@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("today", "raise ValueError('torn')"),
        ("today", "return None"),
        ("today", "return {'clock': 1}"),
        ("today", "return {'clock_MHz': 900}"),
        ("today", "return {'compilation': ['none']}"),
        ("support", "raise ValueError('torn')"),
        ("support", "return 'yes'"),
    ],
)
def test_a_route_that_fails_sets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, given: str
) -> None:
    arguments = {"today": "job", "support": "job, knob"}[method]
    head = f"def {method}(self, {arguments}):\n        "
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        job = plugged(tmp_path, monkeypatch, PLUGIN.replace(head, f"{head}{given}\n        "))
        assert job.baseline == script_job("train.py", tmp_path, TORCH).baseline
        assert method == "today" or not job.offers["compilation"].turned
    assert any("the route 'caps' sets nothing" in str(each.message) for each in seen)


@pytest.mark.usefixtures("routes_found_again")
def test_a_start_that_a_route_cannot_change_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = plugged(tmp_path, monkeypatch, PLUGIN.replace('draft.env["COMPILE"] =', "1 /"))
    with pytest.raises(InputError, match="'caps' cannot start the script"):
        job.start(job.baseline, tmp_path / "start")


class TestPluggedRoute(RouteContract):
    @pytest.fixture(autouse=True)
    def _plugged(self, routes_found_again: None, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def route(self) -> Route:
        return carriers()[-1]

    def job(self, folder: Path) -> ScriptJob:
        return plugged(folder, self._patch, PLUGIN)

    def other(self) -> tuple[str, Value]:
        return "compilation", "full"

    def shown(self, start: Start) -> Any:
        return start.env["COMPILE"]
