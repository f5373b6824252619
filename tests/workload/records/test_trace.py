"""None"""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.studies import METER, measured, record, request
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import strict_json
from tuner.workload.records import trace
from tuner.workload.records.probe import (
    SCHEMA_VERSION,
    Failure,
    Measurement,
    PowerSample,
    ProbeRecord,
    ProbeRequest,
)
from tuner.workload.records.trace import (
    PENDING_NAME,
    PHASE_NAME,
    RESERVE_BYTES,
    TraceWriter,
    partial_record,
    read_phase,
    read_power,
    read_trace,
    recover_pending,
    repair_torn_tail,
    save_partial,
    save_pending,
    write_phase,
    write_power_samples,
)


def write(path: Path, *records: ProbeRecord) -> Path:
    with TraceWriter(path) as writer:
        for one in records:
            writer.append(one)
    return path


def test_what_is_written_is_read_back(tmp_path):
    live = Settings(clock_MHz=(1200, 1410))
    full = record(
        "p0001",
        request=request("p0001", live=(live,)),
        measurements=(measured(live),),
        failure=Failure("time_limit", "it took too long", "last\nlines"),
        environment={"torch": "2.13", "nested": {"ranks": (1, 2)}},
    )
    path = write(tmp_path / "trace" / "probes.jsonl", record("p0000"), full)
    contents = read_trace(path)
    assert contents.notes == ()
    first, second = contents.records
    assert (first.request, first.wall_s, first.energy_J) == (record().request, 9.0, 160.0)
    assert second.measurements[0].live == live
    assert second.failure == full.failure
    assert second.environment["nested"] == {"ranks": [1, 2]}
    assert math.isnan(second.measurements[0].power_se_W)


FIGURES = st.floats(1e-9, 1e15)


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(FIGURES, FIGURES, FIGURES | st.just(math.nan)), min_size=1, max_size=4),
    st.dictionaries(st.text(max_size=9), st.floats() | st.text(max_size=9), max_size=3),
)
def test_every_figure_is_kept_to_the_last_digit(
    windows: list[tuple[float, float, float]], environment: dict[str, object]
) -> None:
    made = [
        replace(measured(), energy_J=energy_J, step_time_s=time_s, sampled_energy_J=sampled_J)
        for energy_J, time_s, sampled_J in windows
    ]
    whole = record(measurements=tuple(made), energy_J=windows[0][0], environment=environment)
    line = json.dumps(strict_json(whole.to_json()), allow_nan=False)
    back = ProbeRecord.from_json(json.loads(line))
    assert back.measurements == whole.measurements
    assert back.energy_J == whole.energy_J
    assert {n: v for n, v in back.environment.items() if v is not None} == {
        n: v for n, v in environment.items() if not isinstance(v, float) or math.isfinite(v)
    }


def test_fields_of_an_earlier_release_are_ignored(tmp_path):
    data = record().to_json()
    data["request"]["window"]["micro_batches"] = True
    fit = {"accumulation": 64, "micro_batches": [1, 2, 4], "once_s": 0.1}
    data["measurements"][0]["accumulation"] = fit
    path = tmp_path / "probes.jsonl"
    path.write_text(json.dumps(data) + "\n")
    contents = read_trace(path)
    assert contents.notes == ()
    assert contents.records == (record(),)


@pytest.mark.parametrize("window", ["long", ["min_s"], 3])
def test_a_window_that_is_not_a_table_is_no_record(window):
    data = record().to_json()
    data["request"]["window"] = window
    with pytest.raises(InputError, match="window"):
        ProbeRecord.from_json(data)


def test_a_line_is_strict_json_even_where_figures_are_not_finite(tmp_path):
    odd = record(environment={"loss": math.nan, "worst": [math.inf]}, wall_s=2.0)
    path = write(tmp_path / "t.jsonl", odd)

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    entry = json.loads(path.read_text(), parse_constant=refuse)
    assert entry["environment"] == {"loss": None, "worst": [None]}


def test_each_append_is_one_whole_line_on_disk(tmp_path):
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        for count in range(1, 4):
            writer.append(record(f"p{count:04d}"))
            lines = (tmp_path / "t.jsonl").read_bytes().split(b"\n")
            assert len(lines) == count + 1
            assert lines[-1] == b""


@pytest.mark.parametrize("keep", [1, 20, 200, -2])
def test_a_truncated_last_line_is_left_out_and_said(tmp_path, keep):
    path = write(tmp_path / "t.jsonl", record("p0000"), record("p0001"))
    first, second, _ = path.read_bytes().split(b"\n")
    path.write_bytes(first + b"\n" + second[:keep])
    contents = read_trace(path)
    assert [r.request.probe_id for r in contents.records] == ["p0000"]
    assert len(contents.notes) == 1
    assert "line 2" in contents.notes[0]
    assert path.read_bytes() == first + b"\n" + second[:keep]  # reading changes nothing


def test_reopening_puts_the_torn_line_aside_and_goes_on(tmp_path):
    path = write(tmp_path / "t.jsonl", record("p0000"), record("p0001"))
    whole = path.read_bytes()
    torn = whole.split(b"\n")[1][:50]
    path.write_bytes(whole.split(b"\n")[0] + b"\n" + torn)
    with TraceWriter(path) as writer:
        assert "torn" in writer.notes[0]
        writer.append(record("p0002"))
    contents = read_trace(path)
    assert [r.request.probe_id for r in contents.records] == ["p0000", "p0002"]
    assert contents.notes == ()
    with path.open("ab") as file:
        file.write(b'{"again')
    repair_torn_tail(path)
    assert (tmp_path / "t.jsonl.torn").read_bytes() == torn + b'\n{"again\n'


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    path = write(tmp_path / "t.jsonl", record("p0000"))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert len(read_trace(path).records) == 1
    write(path, record("p0001"))
    assert [r.request.probe_id for r in read_trace(path).records] == ["p0000", "p0001"]
    assert not (tmp_path / "t.jsonl.torn").exists()


def test_empty_lines_are_no_end(tmp_path):
    path = write(tmp_path / "t.jsonl", record("p0000"), record("p0001"))
    path.write_bytes(path.read_bytes().replace(b"\n", b"\n\n  \n", 1))
    assert [r.request.probe_id for r in read_trace(path).records] == ["p0000", "p0001"]


def test_what_only_the_answer_needs_is_dropped_from_memory():
    live = Settings(clock_MHz=900)
    rich = replace(
        measured(live),
        step_times_s=(0.5,) * 9,
        power_blocks_W=(1.0, 2.0),
        phases_s={"forward": 0.1},
    )
    asked = request("p", live=(live,))
    whole = record("p", request=asked, measurements=(rich,), environment={"torch": "2.13"})
    small = trace.compact(whole)
    assert small == replace(whole, measurements=(measured(live),), environment={})
    assert small.measurements[0].live is live
    failed = trace.compact(replace(whole, failure=Failure("crash", "it died", "last\nlines")))
    assert failed.failure == Failure("crash", "it died")


def test_repairing_a_sound_or_missing_file_does_nothing(tmp_path):
    assert repair_torn_tail(tmp_path / "none") == ()
    path = write(tmp_path / "t.jsonl", record())
    before = path.read_bytes()
    assert repair_torn_tail(path) == ()
    assert path.read_bytes() == before


def test_an_empty_line_before_the_torn_one_stays(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'\n{"torn')
    repair_torn_tail(path)
    assert path.read_bytes() == b"\n"


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (b'{"schema": 1, "request"', "line 2 is not JSON"),
        (b"[1, 2]", "line 2 is not a probe record"),
        (b'{"schema": 1}', "line 2"),
        (b'{"request": {}}', "schema"),
    ],
)
def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path, broken, told):
    path = write(tmp_path / "t.jsonl", record("p0000"), record("p0001"))
    first, second, _ = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([first, broken, second, b""]))
    with pytest.raises(InputError, match=told) as caught:
        read_trace(path)
    assert "line 2" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_newer_schema_is_refused_in_one_sentence(tmp_path):
    entry = {**record().to_json(), "schema": SCHEMA_VERSION + 1}
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(entry) + "\n")
    with pytest.raises(InputError, match=f"line 1.*schema is {SCHEMA_VERSION + 1}"):
        read_trace(path)


def test_a_missing_trace_and_an_unwritable_one_are_input_errors(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        TraceWriter(tmp_path / "file" / "t.jsonl")


def test_power_samples_come_back_from_the_probes_start(tmp_path):
    samples = [
        PowerSample(100.0, 50.0, {"clock_MHz": 1410.0}),
        PowerSample(100.5125, 61.25, {"clock_MHz": 1395.0, "temperature_C": 44.0}),
    ]
    path = write_power_samples(tmp_path, "p0007", reversed(samples), since_s=100.0)
    assert path == tmp_path / "trace" / "power" / "p0007.csv.gz"
    assert gzip.decompress(path.read_bytes()).startswith(
        b"time_s,power_W,clock_MHz,temperature_C\n"
    )
    assert read_power(path)[0] == [
        PowerSample(0.0, 50.0, {"clock_MHz": 1410.0}),
        PowerSample(0.5125, 61.25, {"clock_MHz": 1395.0, "temperature_C": 44.0}),
    ]
    assert write_power_samples(tmp_path, "p0008", []) is None


def test_phase_marks_lie_on_the_timeline_and_are_no_samples(tmp_path):
    samples = [PowerSample(100.0 + 0.1 * k, 50.0, {"clock_MHz": 1410.0}) for k in range(5)]
    marks = [(100.02, "forward"), (100.25, "language model, layer 3"), (100.31, "optimizer")]
    path = write_power_samples(tmp_path, "p1", samples, since_s=100.0, phases=marks)
    assert [sample.power_W for sample in read_power(path)[0]] == [50.0] * 5
    assert read_power(path)[0][1].extra == {"clock_MHz": 1410.0}
    assert read_power(path)[1] == [(pytest.approx(at_s - 100.0), name) for at_s, name in marks]
    times = [line.split(b",")[0] for line in gzip.decompress(path.read_bytes()).splitlines()[1:]]
    assert times == sorted(times)
    assert read_power(write_power_samples(tmp_path, "p2", samples))[1] == []


def test_power_samples_that_are_none_are_an_input_error(tmp_path):
    (tmp_path / "p.csv.gz").write_bytes(b"not gzip")
    with pytest.raises(InputError, match="power samples"):
        read_power(tmp_path / "p.csv.gz")


@pytest.mark.parametrize(
    ("line", "times"), [(b"0.1,200.0\n" * 100_000, 50), (b"," * 1_000_000, 5), (b"0" * 2**20, 65)]
)
def test_power_samples_are_read_up_to_a_limit(tmp_path, line, times):
    packed = gzip.compress(b"time_s,power_W\n") + gzip.compress(line) * times
    (tmp_path / "p.csv.gz").write_bytes(packed)
    with pytest.raises(InputError, match="more than 64 MiB unpacked or 4,000,000 values"):
        read_power(tmp_path / "p.csv.gz")


def test_a_trace_from_a_stranger_takes_no_memory(tmp_path: Path) -> None:
    limit = 2 * 2**30
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))\n"
        "import sys; from tuner.search_spaces.errors import InputError\n"
        "from tuner.workload.records.trace import read_trace\n"
        "try: read_trace(sys.argv[1])\n"
        "except InputError as error: print(error)"
    )
    brackets, sparse = tmp_path / "brackets", tmp_path / "sparse"
    brackets.write_text('{"a": [' + "[], " * 20_000_000 + "[]]}\n")
    with sparse.open("wb") as file:
        file.truncate(20 * 10**9)
    for path in (brackets, sparse):
        done = subprocess.run(
            [sys.executable, "-c", code, path], capture_output=True, text=True, check=False
        )
        assert "larger than any that tuner writes" in done.stdout, done.stderr


@pytest.mark.parametrize("part", ["launch", "live"])
@pytest.mark.parametrize("name", ["clock_MHz", "micro_batch"])
def test_a_text_in_place_of_a_number_is_one_sentence(tmp_path: Path, part: str, name: str) -> None:
    """`tuner apply` computes with such a value, and a script is written from it."""
    data = record().to_json()
    data["request"][part] = {name: "900$(id)"} if part == "launch" else [{name: [900, "9$(id)"]}]
    (tmp_path / "probes.jsonl").write_text(json.dumps(data) + "\n{}\n")
    with pytest.raises(InputError, match=rf"{name} in a probe's settings .*\$\(id\).*a number"):
        read_trace(tmp_path / "probes.jsonl")


def test_a_recorded_tables_own_knob_may_be_a_text() -> None:
    data = request().to_json()
    data["launch"]["shape"] = "wide"
    assert ProbeRequest.from_json(data).launch["shape"] == "wide"


def test_a_window_with_unknown_figures_equals_its_copy() -> None:
    """From Python 3.13 on a generated comparison finds no NaN equal to itself."""
    one, other = (
        Measurement(Settings(), steps=3, window_s=1.0, step_time_s=0.3, energy_J=9.0, power_W=9.0)
        for _ in "ab"
    )
    assert math.isnan(one.power_se_W)
    assert one == other
    assert one != replace(other, energy_J=8.0)
    assert one != "a window"


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/x", "a/b", "", ".", "..", "-x", "x" * 200, "a\n"]
)
def test_a_probes_name_cannot_leave_the_run_folder(name: str) -> None:
    trace = Path(__file__).parents[2] / "data/measured/trace/probes.jsonl"
    sound = json.loads(trace.read_text().splitlines()[0])
    with pytest.raises(InputError, match="not a valid probe name"):
        ProbeRequest.from_json({**sound["request"], "probe_id": name})


class TestAFullDisk:
    """A write that fails where `full` says so; the reserve makes room when it is removed."""

    @pytest.fixture
    def writer(self, tmp_path: Path) -> Iterator[TraceWriter]:
        with TraceWriter(tmp_path / "run" / "trace" / "probes.jsonl") as writer:
            yield writer

    def fill(
        self, monkeypatch: pytest.MonkeyPatch, writer: TraceWriter, full: Callable[[], bool]
    ) -> None:
        really = os.write

        def write(fd: int, data: memoryview) -> int:
            if fd != writer._fd:
                return really(fd, data)
            really(fd, data[:7])  # a part of it always gets through
            if full():
                raise OSError(errno.ENOSPC, "No space left on device")
            return 7 if len(data) > 7 else len(data)

        monkeypatch.setattr(os, "write", write)

    def test_it_costs_no_record_as_room_is_held_ready(
        self, writer: TraceWriter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reserve = writer.path.with_name(".reserve")
        assert reserve.stat().st_size == RESERVE_BYTES == 256 * 1024
        writer.append(record("p0000"))
        self.fill(monkeypatch, writer, reserve.exists)
        with pytest.raises(InputError, match="the last thanks to reserved disk"):
            writer.append(record("p0001"))
        assert [r.request.probe_id for r in read_trace(writer.path).records] == ["p0000", "p0001"]

    def test_where_that_is_not_enough_the_trace_is_as_before(
        self, writer: TraceWriter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        writer.append(record("p0000"))
        before = writer.path.read_bytes()
        self.fill(monkeypatch, writer, lambda: True)
        with pytest.raises(
            InputError, match=r"cannot write the trace .*: No space left on device$"
        ):
            writer.append(record("p0001"))
        assert writer.path.read_bytes() == before

    def test_a_closed_trace_holds_no_room_and_one_of_a_crash_is_taken_over(
        self, writer: TraceWriter
    ) -> None:
        reserve = writer.path.with_name(".reserve")
        with TraceWriter(writer.path) as again:  # the first was never closed
            again.append(record("p0000"))
            assert reserve.exists()
        assert not reserve.exists()
        again.close()  # once more
        assert len(read_trace(writer.path).records) == 1


def test_a_trace_is_read_up_to_its_limits_and_not_beyond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (trace.MAX_BYTES, trace.MAX_LINE_BYTES) == (256 * 2**20, 8 * 2**20)
    path = write(tmp_path / "t.jsonl", record("p0000"), record("p0001"))
    size, longest = path.stat().st_size, max(map(len, path.read_bytes().split(b"\n")))
    for name, most, told in (
        ("MAX_BYTES", size, r"\(0 MiB and 8 MiB a line\)"),
        ("MAX_LINE_BYTES", longest, r"\(256 MiB and 0 MiB a line\)"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(trace, name, most)
            assert len(read_trace(path).records) == 2
            patch.setattr(trace, name, most - 1)
            with pytest.raises(InputError, match=f"larger than any that tuner writes {told}"):
                read_trace(path)


class TestPending:
    """A record beside its probe's files, until it is in the trace."""

    def test_what_never_reached_the_trace_is_recovered(self, tmp_path: Path) -> None:
        save_pending(tmp_path, record("p0001"))
        save_partial(tmp_path, partial_record(request("p0000"), [measured(), measured()], METER))
        first, second = recover_pending(tmp_path)
        assert (first.request.probe_id, second.request.probe_id) == ("p0000", "p0001")
        assert (first.failure.kind, first.energy_J) == ("cancelled", 200.0)
        # A file of another probe's name, or that is none, is nobody's.
        moved = tmp_path / "probes" / "p0002"
        (tmp_path / "probes" / "p0000").rename(moved)
        (tmp_path / "probes" / "p0003").mkdir()
        (tmp_path / "probes" / "p0003" / PENDING_NAME).write_text("{")
        assert [r.request.probe_id for r in recover_pending(tmp_path)] == ["p0001"]
        with TraceWriter(tmp_path / "trace" / "probes.jsonl") as writer:
            writer.append(record("p0001"))
        assert recover_pending(tmp_path) == ()

    def test_an_inspection_is_no_probe(self, tmp_path: Path) -> None:
        looked = replace(request("p0000"), purpose="inspection")
        save_partial(tmp_path, record("p0000", request=looked))
        save_partial(None, record("p0001"))
        assert recover_pending(tmp_path) == ()


def test_the_last_phase_is_read_and_an_empty_one_removes_it(tmp_path: Path) -> None:
    write_phase(tmp_path, "p0001", "launching")  # no folder yet: the probe goes on without
    assert read_phase(tmp_path, "p0001") == ""
    (tmp_path / "probes" / "p0001").mkdir(parents=True)
    for phase in ("launching", "measuring 2 of 4 at 1050MHz", "x" * 150, ""):
        write_phase(tmp_path, "p0001", phase)
        assert read_phase(tmp_path, "p0001") == phase[:100]
    assert not list((tmp_path / "probes" / "p0001").iterdir())


def test_what_is_not_ours_is_no_phase(tmp_path: Path) -> None:
    folder = tmp_path / "probes" / "p0001"
    folder.mkdir(parents=True)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (folder / PHASE_NAME).symlink_to(secret)
    assert read_phase(tmp_path, "p0001") == ""
    (folder / PHASE_NAME).unlink()
    os.mkfifo(folder / PHASE_NAME)  # nothing waits for a writer
    assert read_phase(tmp_path, "p0001") == ""
    (folder / PHASE_NAME).unlink()
    (folder / PHASE_NAME).write_bytes(b"\xff" * 5000)
    assert len(read_phase(tmp_path, "p0001")) == 100


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("the program ended by itself without an optimizer step (exit code 0)", "no_steps"),
        ("the program ended by itself after 3 steps, before the measurement was complete", "ended"),
    ],
)
def test_a_program_that_made_no_step_was_not_too_short_in_earlier_releases_either(
    message: str, kind: str
) -> None:
    """They had one kind for both, so that kept runs showed it as "too short"."""
    old = replace(record("p0001"), failure=Failure("ended", message), measurements=())
    back = ProbeRecord.from_json(json.loads(json.dumps(old.to_json())))
    assert back.failure == Failure(kind, message)
    assert back.failed == (kind == "no_steps")
