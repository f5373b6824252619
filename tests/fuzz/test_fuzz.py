"""Bad input is one sentence: a sample of the fuzzed inputs, and values that once were none."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.commands import KINDS
from tests.fuzz.fuzzer import fuzz
from tests.fuzz.kinds import RECORDS, Kind, parser, sound_plan
from tests.fuzz.mutate import Draw
from tuner.planner.plan import PLAN_FILE, read_plan
from tuner.search_spaces.errors import InputError
from tuner.workload.records.probe import ProbeRecord

#: A folder elsewhere, of one test.
TEMPORARY = Path("/nonexistent")


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


def _read_record(folder: Path, data: Any) -> None:
    for measurement in ProbeRecord.from_json(data).measurements:
        assert measurement.energy_per_step_J > 0


def _read_plan(folder: Path, data: Any) -> None:
    (folder / PLAN_FILE).write_text(json.dumps(data))
    read_plan(folder)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with contextlib.chdir(tmp_path_factory.mktemp("plan")):
        parser.cache_clear()
        return sound_plan()


@pytest.mark.parametrize(
    ("read", "path", "value"),
    [
        (_read_record, ("request", "probe_id"), "../../../etc/cron.d/x"),
        (_read_record, ("measurements", 0, "power_W"), 0),
        (_read_record, ("measurements", 0, "step_time_s"), 10**400),
        (_read_plan, ("rows", 0, "log_time"), 10**400),
        (_read_plan, ("rows", 0, "memory_bytes"), 10**4000),
        (_read_plan, ("rows", 0, "configuration", "launch", "micro_batch"), 10**400),
        (_read_plan, ("attainment", "draws"), math.inf),
        (_read_plan, ("attainment", "time_s"), [10**400]),
        (_read_plan, ("baseline",), 10**400),
        (_read_plan, ("probes",), [10**400]),
        (_read_plan, ("probes",), [-1]),
    ],
)
def test_a_value_that_was_once_too_much_is_refused_in_one_sentence(
    plan: Any, tmp_path: Path, read: Any, path: tuple[Any, ...], value: Any
) -> None:
    """Pinned, for a random draw may miss them: one overflowed where a float was made of it."""
    data = json.loads(json.dumps(plan if read is _read_plan else RECORDS[0]))
    read(tmp_path, data)
    holder = data
    for step in path[:-1]:
        holder = holder[step]
    assert path[-1] in holder
    holder[path[-1]] = value
    with pytest.raises(InputError) as refused:
        read(tmp_path, data)
    assert len(str(refused.value).splitlines()) == 1


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


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("vendors' launch lines", "read_command"),
        ("launch lines", "blank_job"),
        ("counts of ranks", "trainings_of"),
    ],
)
def test_what_is_drawn_does_not_depend_on_the_input_before(name, reader, monkeypatch) -> None:
    """Hypothesis ends a run whose draws differ from one time to the next: here, by a file's length.

    What reads the input is left out, so that hundreds are drawn.
    """
    monkeypatch.setattr(f"tests.fuzz.kinds.{reader}", lambda *words: ())
    (kind,) = (kind for kind in KINDS if kind.name == name)
    assert fuzz(kind, range(200)).tried >= 200
