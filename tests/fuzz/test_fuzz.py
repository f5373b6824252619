"""Bad input is one sentence: by hypothesis over values, and a sample of the fuzzed inputs."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.fuzz.fuzzer import fuzz
from tests.fuzz.kinds import Kind
from tests.fuzz.mutate import Draw
from tests.fuzz.table import KINDS
from tests.support.shapes import VALUES, places
from tuner.deploy.launch_files import write_launch_files
from tuner.problem.run_folder import RunFolder
from tuner.recorded.table import load_table
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.data_files import write_toml
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.space import load_space
from tuner.workload import hook
from tuner.workload.records.probe import ProbeRecord, ProbeRequest
from tuner.workload.records.trace import read_trace, write_power_samples

DATA = Path(__file__).parents[1] / "data"
#: A folder elsewhere, of one test.
TEMPORARY = Path("/nonexistent")
RECORD = json.loads((DATA / "measured/trace/probes.jsonl").read_text().splitlines()[0])

quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def _check_sentence(error: InputError) -> None:
    assert str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, id=kind.name, marks=[pytest.mark.slow] if kind.name.startswith("vendors'") else []
        )
        for kind in KINDS
    ],
)
def test_a_sample_of_each_kind_gives_no_traceback(kind: Kind) -> None:
    seen = fuzz(kind, range(12 if kind.share >= 1 else 4), seed=1)
    assert not seen.wrong
    assert seen.tried


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_thousand_bad_inputs_give_no_traceback(tmp_path: Path) -> None:
    from benchmarks import fuzz as benchmark

    benchmark.main(["--json", str(tmp_path / "figures.json")])
    figures = {f["name"]: f["value"] for f in json.loads((tmp_path / "figures.json").read_text())}
    assert figures.pop("inputs") >= 20_000
    assert figures == {"tracebacks": 0, "hangs": 0, "files_outside": 0}


def _kind_that(act: Callable[[Path], object]) -> Kind:
    def prepare(folder: Path) -> Callable[[Draw], object]:
        return lambda draw: act(folder)

    return Kind("fault", prepare)


def test_a_hang_is_counted_even_where_errors_are_caught(monkeypatch) -> None:
    monkeypatch.setattr("tests.fuzz.fuzzer.WAIT_LIMIT_S", 0.2)

    def waits_for_a_pipe(folder: Path) -> None:
        os.mkfifo(folder / "pipe")
        with contextlib.suppress(Exception):
            (folder / "pipe").read_text()

    seen = fuzz(_kind_that(waits_for_a_pipe), [0])
    assert (sum(seen.hangs.values()), sum(seen.bad.values())) == (1, 0)


@pytest.mark.parametrize(
    "act",
    [
        lambda folder: (folder.parents[1] / "beside").write_text("x"),
        lambda folder: (folder / "home" / "pwned").touch(),
        lambda folder: os.close(os.open(TEMPORARY / "x", os.O_CREAT | os.O_WRONLY)),
        lambda folder: os.rename(TEMPORARY / "x", TEMPORARY / "y"),
        lambda folder: (folder / "link").symlink_to(TEMPORARY) or (folder / "link/z").touch(),
        lambda folder: subprocess.run(["touch", f"{folder}/../left"], check=True),
        lambda folder: shutil.rmtree(TEMPORARY),
    ],
)
def test_a_file_outside_is_counted(act: Callable[[Path], object], tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "TEMPORARY", tmp_path / "elsewhere")
    TEMPORARY.mkdir()
    (TEMPORARY / "x").touch()
    seen = fuzz(_kind_that(act), [0])
    assert seen.outside
    assert not seen.bad


def test_what_is_read_outside_and_written_inside_is_no_fault() -> None:
    def act(folder: Path) -> None:
        Path(__file__).read_text()
        (folder / "home" / "x").write_text("x")
        (folder / "home" / "x").rename(folder / "y")
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "z").touch()
        (folder / "null").symlink_to("/dev/null")
        (folder / "null").write_text("x")

    assert not fuzz(_kind_that(act), [0]).wrong


@quick
@given(path=st.sampled_from([*places(RECORD)]), value=VALUES)
@example(path=("request", "probe_id"), value="../../../etc/cron.d/x")
@example(path=("measurements", 0, "power_W"), value=0)
@example(path=("measurements", 0, "step_time_s"), value=10**400)
def test_a_record_with_any_value_anywhere_is_read_or_refused(path: tuple, value: object) -> None:
    data = json.loads(json.dumps(RECORD))
    holder = data
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    try:
        record = ProbeRecord.from_json(data)
    except InputError as error:
        _check_sentence(error)
        return
    record.to_json()
    for measurement in record.measurements:
        assert measurement.energy_per_step_J > 0


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/x", "a/b", "", ".", "..", "-x", "x" * 200, "a\n"]
)
def test_a_probes_name_cannot_leave_the_run_folder(name: str) -> None:
    with pytest.raises(InputError, match="not a valid probe name"):
        ProbeRequest.from_json({**RECORD["request"], "probe_id": name})


@quick
@given(
    key=st.sampled_from(["name", "steps", "global_batch", "sequence_length", "seed", "model"]),
    value=VALUES,
)
def test_a_job_with_any_value_is_read_or_refused(tmp_path: Path, key: str, value: object) -> None:
    sound = {"name": "j", "sequence_length": 128, "global_batch": 8, "steps": 10}
    sound["model"] = {"config": "tiny-gpt"}
    try:
        text = write_toml({**sound, key: value})
        (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    except (ValueError, UnicodeEncodeError):
        return  # TOML cannot say it
    try:
        assert isinstance(load_job(tmp_path / "job.toml"), TrainingJob)
    except InputError as error:
        _check_sentence(error)


@quick
@given(name=st.sampled_from(sorted(KNOBS)) | st.text(max_size=10), value=VALUES)
def test_a_configuration_of_any_value_is_made_or_refused(name: str, value: object) -> None:
    try:
        configuration = Configuration.of({"data_parallel": 1, "micro_batch": 1, name: value})
    except InputError as error:
        _check_sentence(error)
        return
    hash(configuration)
    assert isinstance(configuration.key, str)


@quick
@given(name=st.sampled_from(sorted(KNOBS)), choice=VALUES)
def test_a_space_of_any_choice_is_read_or_refused(
    tmp_path: Path, name: str, choice: object
) -> None:
    knobs = {"data_parallel": [1, 2], "micro_batch": [1, 2, 4], name: choice}
    try:
        (tmp_path / "space.toml").write_text(write_toml({"what": "x", "knobs": knobs}))
    except (ValueError, UnicodeEncodeError):
        return
    try:
        load_space(tmp_path / "space.toml").candidates(load_job("tiny-gpt"), load_cluster("cpu-2"))
    except InputError as error:
        _check_sentence(error)


@quick
@given(
    config=st.dictionaries(
        st.sampled_from([*hook.engine.BATCH_KEYS, "zero_optimization", "x"]), VALUES
    )
)
def test_the_hook_takes_any_deepspeed_configuration(config: dict) -> None:
    hook.micro_batches(config, 2)
    hook.split_differently(config, 2)
    merged = hook.merge(config, {"zero_optimization": {"stage": 1}, "x": None})
    assert merged["zero_optimization"]["stage"] == 1
    assert "x" not in merged


@quick
@given(
    cells=st.lists(st.text(alphabet='0123456789.-enaif,"\n', max_size=8), min_size=4, max_size=4)
)
def test_a_table_of_any_cells_is_read_or_refused(tmp_path: Path, cells: list[str]) -> None:
    from tests.support.studies import write_table

    table = write_table(tmp_path / "table", shapes=(1,))
    with (table / "table.csv").open("a") as file:
        file.write(",".join(cells) + "\n")
    try:
        load_table(table)
    except InputError as error:
        _check_sentence(error)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40))
@example(name="'; touch pwned; '")
@example(name="$(touch pwned)\n`touch pwned`")
def test_no_word_of_a_script_reaches_the_shell(tmp_path: Path, name: str) -> None:
    """launch.sh gives a script's words to the program as they are, whatever they say."""
    name = name.replace("\x00", "")
    configuration = Configuration.of(data_parallel=1, micro_batch=4)
    write_launch_files(
        (configuration, load_job("tiny-gpt"), load_cluster("cpu-2")),
        tmp_path / "best",
        script=["train.py", "--name", name],
    )
    text = (tmp_path / "best" / "launch.sh").read_bytes().decode()
    # The same script, but for what it starts: bash itself says which words the program would get.
    head, _, _ = text.partition("\nexec ")
    shown = tmp_path / "best" / "words.sh"
    shown.write_bytes((head + "\nprintf '%s\\0' \"${program[@]}\"").encode())
    said = subprocess.run(
        ["bash", str(shown)],
        capture_output=True,
        cwd=tmp_path,
        check=True,
    ).stdout
    words = said.decode("utf-8", "surrogateescape").split("\0")[:-1]
    assert words[:3] == ["train.py", "--name", name]
    assert not (tmp_path / "pwned").exists()


def test_nothing_evaluates_or_unpickles_what_a_file_says() -> None:
    """By what the sources call: no eval, exec, pickle, marshal or shell in the packages.

    YAML is only parsed, or loaded and written as plain data.
    """
    import ast

    root = Path(__file__).parents[2]
    banned = {"eval", "exec", "compile"}
    modules = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    plain = {"parse", "compose", "safe_load", "SafeLoader", "safe_dump", "YAMLError"}
    for package in ("search_spaces", "workload", "models", "tuner"):
        for path in (root / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id not in banned, f"{path}:{node.lineno}"
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    assert node.func.attr not in ("popen", "system"), f"{path}:{node.lineno}"
                if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "yaml":
                    assert node.attr in plain or node.attr.endswith(("Node", "Event")), path
                if isinstance(node, ast.ImportFrom):
                    assert node.module != "yaml", path
                if isinstance(node, ast.keyword) and node.arg == "shell":
                    assert getattr(node.value, "value", None) is False, (
                        f"{path}:{node.value.lineno}"
                    )
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = [alias.name for alias in node.names]
                    names.append(getattr(node, "module", None) or "")
                    assert not modules & {name.split(".")[0] for name in names}, path


def test_the_report_escapes_what_scripts_and_file_names_say(tmp_path: Path) -> None:
    import shutil

    import tuner
    from tuner.display.report import write_report

    run = RunFolder(tmp_path / "kept")
    shutil.copytree(DATA / "measured", run.path)
    evil = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    text = (run.path / "study.toml").read_text().replace('name = "tiny-gpt"', f'name = "{evil}"')
    (run.path / "study.toml").write_text(text)
    bad = json.loads(json.dumps(RECORD))
    bad["request"]["probe_id"] = "p0099"
    bad["failure"] = {"kind": "crash", "message": evil, "log_tail": evil}
    bad["host"] = bad["meter"]["source"] = evil
    bad["measurements"][0]["flags"] = [evil]
    with run.trace.open("a") as file:
        file.write(json.dumps(bad) + "\n")
    records = read_trace(run.trace).records
    page = write_report(
        tuner.load_result(run.path), tmp_path / "report.html", records=records
    ).read_text()
    assert "<img src=x" not in page
    assert "<script>alert" not in page


def test_the_dashboard_is_on_loopback_unless_told_otherwise() -> None:
    import inspect

    from tuner.cli.main import command_parser
    from tuner.dashboard import server as dashboard

    assert inspect.signature(dashboard.serve).parameters["host"].default == "127.0.0.1"
    assert command_parser().parse_args(["dashboard"]).host == "127.0.0.1"


def test_power_samples_stay_in_the_run_folder(tmp_path: Path) -> None:
    from tuner.workload.records.probe import PowerSample

    path = write_power_samples(tmp_path, "p0000", [PowerSample(0.0, 1.0)])
    assert path is not None
    assert path.resolve().is_relative_to(tmp_path.resolve())


@pytest.mark.parametrize("rank", ["Infinity", "-Infinity", "1e999", "1" * 400, "[" * 50_000])
def test_counts_that_are_too_large_are_no_training(tmp_path: Path, rank: str) -> None:
    from tuner.receipt.receipt import read_counts
    from tuner.workload.hook.tally import HEAD

    text = f'{{"rank": {rank}, "world": 1, "pid": 1, "parent": 1, "words": []}}'
    (tmp_path / "0").write_bytes(HEAD.pack(1.0, 1.0, 2.0, 1.0, 1.0) + text.encode())
    assert read_counts(tmp_path) == []


def test_a_schema_of_two_lines_is_one_sentence(tmp_path: Path) -> None:
    from tuner.online.earlier_measurements import FILE, read_earlier

    (tmp_path / FILE).write_text('{"schema": "a\\nb", "device": "core", "meter": "model"}\n')
    with pytest.raises(InputError) as refused:
        read_earlier(tmp_path)
    _check_sentence(refused.value)


def test_an_error_of_input_is_one_line_whatever_a_file_holds() -> None:
    error = InputError("the schema a\nb\r\n\u2028c is unknown")
    assert str(error) == "the schema a b c is unknown"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("name", ["study.toml", "plan.json"])
def test_a_redacted_zip_file_of_a_torn_file_is_refused(tmp_path: Path, name: str) -> None:
    from tuner.exchange.archive import write_zip

    run = RunFolder(tmp_path / "kept")
    shutil.copytree(DATA / "measured", run.path)
    (run.path / name).write_bytes(b"\xd2 [")
    with pytest.raises(InputError):
        write_zip(run, tmp_path / "out.zip", redact=True)
