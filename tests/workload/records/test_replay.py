"""None"""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from tests.support.studies import METER, TOML, measured, record, request, run_replay, write_table
from tests.support.traces import TRACES
from tuner.recordings.table import TableRunner, TraceRunner, load_table
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.workload.records.probe import Failure, MeterInfo, ProbeRequest
from tuner.workload.records.trace import TraceWriter, read_trace


def query(launch: dict, *live: dict, name: str = "p0000") -> ProbeRequest:
    return ProbeRequest(name, Settings(launch), tuple(Settings(one) for one in live))


# Recorded tables: reading.


def test_a_table_tells_its_knobs_scope_cost_and_points(tmp_path):
    table = load_table(write_table(tmp_path))
    (group,) = table.groups
    assert (table.name, table.scope, table.unit_of_work) == ("made-up", "gpu", "lap")
    assert len(group.points) == 30
    point = group.points[0]
    assert point.configuration == Configuration(Settings(shape=1), Settings(speed=1))
    assert point.energy_J == pytest.approx(point.time_s * point.power_W)
    assert table.group() is group
    assert load_table(tmp_path / "table.csv").name == "made-up"


def test_values_are_numbers_where_they_read_as_numbers(tmp_path):
    write_table(tmp_path)
    (tmp_path / "table.csv").write_text(
        "shape,speed,t,p\n2,1.5,1,10\nwide,nan,1,10\n-1,,1,10\n", encoding="utf-8-sig"
    )
    points = load_table(tmp_path).groups[0].points
    assert [p.configuration.launch["shape"] for p in points] == [2, "wide", -1]
    assert [p.configuration.live for p in points] == [
        Settings(speed=1.5),
        Settings(speed="nan"),
        Settings(),  # an empty cell is a knob left alone
    ]


def test_rows_of_one_configuration_are_repeats(tmp_path):
    write_table(tmp_path)
    (tmp_path / "table.csv").write_text("shape,speed,t,p\n1,1,1.0,10\n1,1,3.0,14\n2,1,1,1\n")
    first, second = load_table(tmp_path).groups[0].points
    assert (first.time_s, first.power_W) == (2.0, 12.0)
    assert first.repeats == ((1.0, 10.0), (3.0, 14.0))
    assert first.lines == (2, 3)
    assert second.repeats == ()


def test_power_follows_from_energy_where_only_energy_is_recorded(tmp_path):
    write_table(tmp_path, toml=TOML.replace('power_W = "p"', 'energy_J = "p"'))
    (tmp_path / "table.csv").write_text("shape,speed,t,p\n1,1,4.0,100\n")
    assert load_table(tmp_path).groups[0].points[0].power_W == 25.0


def test_groups_are_named_and_chosen(tmp_path):
    write_table(tmp_path, toml='group_by = ["net", "gpu"]\n' + TOML)
    (tmp_path / "table.csv").write_text(
        "net,gpu,shape,speed,t,p\na,v,1,1,1,1\nb,v,1,1,1,1\nb,w,1,1,1,1\n"
    )
    table = load_table(tmp_path)
    assert [group.name for group in table.groups] == ["a, v", "b, v", "b, w"]
    assert table.group("a").name == "a, v"
    with pytest.raises(InputError, match=r"3 groups.*a, v; b, v; b, w"):
        table.group()
    for vague in ("b", "zzz"):
        with pytest.raises(UnknownName, match="a, v"):
            table.group(vague)


def predicted_by(job: str, cluster: str) -> str:
    return TOML + f'[predicted_by]\njob = "{job}"\ncluster = "{cluster}"\n'


def test_a_table_may_say_which_job_on_which_cluster_it_recorded(tmp_path):
    assert load_table(write_table(tmp_path / "plain")).predicted_by is None
    told = load_table(write_table(tmp_path / "told", toml=predicted_by("opt-350m", "a100-8")))
    assert told.predicted_by is not None
    assert (told.predicted_by.job.name, told.predicted_by.cluster.name) == ("opt-350m", "a100-8")
    assert not any("predicted_by" in note for note in told.notes)


@pytest.mark.parametrize(
    ("toml", "csv", "told"),
    [
        ("= broken", None, "not valid TOML"),
        (TOML.replace('"shape"', "3"), None, "launch_knobs"),
        (TOML.replace('launch_knobs = ["shape"]', "").replace('["speed"]', "[]"), None, "no knob"),
        (TOML.replace('["speed"]', '["shape"]'), None, "knob twice"),
        (TOML.replace('time_s = "t"', ""), None, "time_s"),
        (TOML.replace('power_W = "p"', ""), None, "energy_J"),
        (TOML.replace('"gpu"', '"room"'), None, "gpu, module, node"),
        (TOML.replace("settle_s = 1.0", "settle = 1.0"), None, "settle"),
        (TOML.replace("settle_s = 1.0", "settle_s = -1.0"), None, "at least 0"),
        (TOML.replace("[cost]", 'noise = "loud"\n[cost]'), None, "noise"),
        ('baseline = {colour = "red"}\n' + TOML, None, "baseline"),
        ('predicted_by = "opt-350m"\n' + TOML, None, "a job and a cluster"),
        (TOML + '[predicted_by]\njob = "opt-350m"\n', None, "a job and a cluster"),
        (predicted_by("opt-350m", "my-cluster"), None, "cluster 'my-cluster'.*a100-8"),
        (predicted_by("my-job", "a100-8"), None, "job 'my-job'.*opt-350m"),
        (TOML, "shape,speed,t\n1,1,1\n", "no column 'p'"),
        (TOML, "shape,speed,t,p\n", "no rows"),
        (TOML, "", "no column"),
        (TOML, "shape,speed,t,p\n1,1,1\n", "line 2 has 3 values"),
        (TOML, "shape,speed,t,p\n1,1,1,9\n1,2,fast,9\n", "line 3.*t is 'fast'"),
        (TOML, "shape,speed,t,p\n1,1,0,9\n", "line 2.*positive"),
        (TOML, "shape,speed,t,p\n1,1,nan,9\n", "line 2 .t is 'nan'"),
        (
            TOML,
            "shape,speed,t,p\n1,1,1e-300,1e-300\n",
            "line 2: t is '1e-300'.*from 1e-12 to 1e.15",
        ),
        (TOML, "shape,speed,t,p\n1,1,1,1e200\n", "line 2: p is '1e200'.*from 1e-12 to 1e.15"),
        (TOML, "shape,speed,t,p,t\n1,1,1,9,1\n", "twice"),
        (TOML, 'shape,speed,t,p\n1,1,1,"9\n', "line 2 is not a CSV"),
    ],
)
def test_a_malformed_table_is_one_sentence(tmp_path, toml, csv, told):
    write_table(tmp_path, toml=toml)
    if csv is not None:
        (tmp_path / "table.csv").write_text(csv)
    with pytest.raises(InputError, match=told) as caught:
        load_table(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["table.csv", "table.toml"])
def test_a_missing_file_is_said(tmp_path, missing):
    (write_table(tmp_path) / missing).unlink()
    with pytest.raises(InputError, match=missing):
        load_table(tmp_path)


def test_unread_keys_and_an_assumed_cost_are_noted(tmp_path):
    toml = 'colour = "red"\n' + TOML[: TOML.index("[cost]")]
    notes = load_table(write_table(tmp_path, toml=toml)).notes
    assert any("'colour'" in note for note in notes)
    assert any("[cost]" in note for note in notes)


# Recorded tables: answering.


def test_seconds_and_joules_of_a_probe_follow_the_cost(tmp_path):
    table = load_table(write_table(tmp_path))
    runner = TableRunner(table)
    power = {p.configuration.live["speed"]: p.power_W for p in table.groups[0].points[:5]}
    answer = runner.run(query({"shape": 1}, {"speed": 3}, {"speed": 5}))
    assert answer.ok
    assert answer.wall_s == 10 + 2 * (1 + 4)
    assert answer.energy_J == pytest.approx(10 * 0.5 * power[3] + 5 * (power[3] + power[5]))
    assert [m.live for m in answer.measurements] == [Settings(speed=3), Settings(speed=5)]
    for m in answer.measurements:
        assert m.energy_J == pytest.approx(m.power_W * m.window_s)
    assert [m.started_s for m in answer.measurements] == [11.0, 16.0]
    assert answer.meter == MeterInfo("table", "gpu", "recorded table made-up")


def test_without_any_spread_the_mean_is_answered_and_no_error_is_claimed(tmp_path):
    table = load_table(write_table(tmp_path))
    (m,) = TableRunner(table).run(query({"shape": 4}, {"speed": 2})).measurements
    point = next(p for p in table.groups[0].points if p.configuration.key == "shape=4 | speed=2")
    assert (m.step_time_s, m.power_W) == (point.time_s, point.power_W)
    assert math.isnan(m.step_time_se_s)
    assert math.isnan(m.power_se_W)


def test_what_was_never_recorded_is_refused_and_what_was_is_kept(tmp_path):
    runner = TableRunner(load_table(write_table(tmp_path)))
    none = runner.run(query({"shape": 99}, {"speed": 1}))
    assert none.failure is not None
    assert none.failure.kind == "refused"
    assert (none.wall_s, none.energy_J, none.measurements) == (0.0, 0.0, ())
    half = runner.run(query({"shape": 1}, {"speed": 1}, {"speed": 77}))
    assert half.failure is not None
    assert "speed=77" in half.failure.message
    assert [m.live for m in half.measurements] == [Settings(speed=1)]


@pytest.mark.parametrize(
    ("extra", "columns", "time_cv", "power_cv"),
    [
        ("[noise]\ntime_cv = 0.01\npower_cv = 0.05\n", "", 0.01, 0.05),
        ('time_sd_s = "ts"\npower_sd_W = "ps"\n', "ts,ps", 0.02, 0.1),
        ('time_sd_s = "ts"\nenergy_sd_J = "es"\n', "ts,es", 0.02, math.hypot(0.1, 0.02)),
    ],
)
def test_draws_have_the_recorded_spread(tmp_path, extra, columns, time_cv, power_cv):
    toml = extra + TOML if "noise" not in extra else TOML + extra
    write_table(tmp_path, toml=toml)
    t, p = 2.0, 100.0
    spreads = {"ts": 0.02 * t, "ps": 0.1 * p, "es": math.hypot(0.1, 0.02) * t * p}
    more = [spreads[name] for name in columns.split(",") if name]
    header = "shape,speed,t,p" + ("," + columns if columns else "")
    row = ",".join(map(str, [1, 1, t, p, *more]))
    (tmp_path / "table.csv").write_text(f"{header}\n{row}\n")
    if "es" in columns:  # the energy's spread holds the time's
        power_cv = 0.1
    runner = TableRunner(load_table(tmp_path))
    seen = [
        runner.run(query({"shape": 1}, {"speed": 1}, name=f"p{i}")).measurements[0]
        for i in range(400)
    ]
    assert statistics.stdev(m.step_time_s for m in seen) == pytest.approx(time_cv * t, rel=0.15)
    assert statistics.stdev(m.power_W for m in seen) == pytest.approx(power_cv * p, rel=0.15)
    assert statistics.fmean(m.step_time_s for m in seen) == pytest.approx(t, rel=0.01)
    assert seen[0].step_time_se_s == pytest.approx(time_cv * t, rel=1e-6)
    assert seen[0].power_se_W == pytest.approx(power_cv * p, rel=1e-3)


def test_repeats_are_drawn_in_pairs(tmp_path):
    toml = 'time_repeats_s = ["t1", "t2"]\nenergy_repeats_J = ["e1", "e2"]\n' + TOML
    write_table(tmp_path, toml=toml)
    (tmp_path / "table.csv").write_text("shape,speed,t,p,t1,t2,e1,e2\n1,1,2,10,1,4,30,20\n")
    runner = TableRunner(load_table(tmp_path))
    seen = {
        (m.step_time_s, m.power_W)
        for i in range(40)
        for m in runner.run(query({"shape": 1}, {"speed": 1}, name=f"p{i}")).measurements
    }
    assert seen == {(1.0, 30.0), (4.0, 5.0)}


def test_a_draw_depends_on_seed_and_probe_and_not_on_the_order(tmp_path):
    toml = TOML + "[noise]\ntime_cv = 0.05\npower_cv = 0.05\n"
    table = load_table(write_table(tmp_path, toml=toml))

    def times(runner, names):
        answers = {n: runner.run(query({"shape": 1}, {"speed": 1}, name=n)) for n in names}
        return {n: a.measurements[0].step_time_s for n, a in answers.items()}

    forward = times(TableRunner(table, seed=1), ["p1", "p2"])
    assert forward == times(TableRunner(table, seed=1), ["p2", "p1"])
    assert forward["p1"] != forward["p2"]
    assert forward["p1"] != times(TableRunner(table, seed=2), ["p1"])["p1"]


@pytest.mark.traces
@pytest.mark.parametrize("name", [p.parent.name for p in sorted(TRACES.glob("*/table.toml"))])
def test_shipped_tables_load_and_every_point_replays(name):
    table = load_table(TRACES / name)
    assert table.notes == ()
    for group in table.groups:
        runner = TableRunner(table, group.name)
        for point in group.points[:: max(1, len(group.points) // 20)]:
            c = point.configuration
            answer = runner.run(ProbeRequest("p0000", c.launch, (c.live,)))
            assert answer.ok
            spread = point.time_sd_s or 0.02 * point.time_s
            assert answer.measurements[0].step_time_s == pytest.approx(point.time_s, abs=6 * spread)
            assert answer.wall_s == table.cost.wall_s(1)


# Traces.


def trace(path, *records):
    with TraceWriter(path) as writer:
        for one in records:
            writer.append(one)
    return path


def test_a_trace_answers_what_it_recorded(tmp_path):
    fast, slow = Settings(clock_MHz=1400), Settings(clock_MHz=1000)
    both = record(
        request=request(live=(fast, slow)),
        measurements=(measured(fast, time_s=0.4), measured(slow, time_s=0.6, power_W=15.0)),
        energy_J=300.0,
        wall_s=15.0,
    )
    runner = TraceRunner(trace(tmp_path / "t.jsonl", both))
    whole = runner.run(query(both.request.launch, fast, slow))
    assert whole.ok
    assert (whole.wall_s, whole.energy_J) == (pytest.approx(15.0), pytest.approx(300.0))
    one = runner.run(query(both.request.launch, slow))
    assert [m.step_time_s for m in one.measurements] == [0.6]
    assert one.wall_s == pytest.approx(3.0 + 6.0)
    # What was spent outside the windows, and the one window.
    assert one.energy_J == pytest.approx((300.0 - 80.0 - 90.0) + 90.0)
    assert one.meter == METER


def test_repeated_visits_draw_among_what_was_recorded(tmp_path):
    path = trace(
        tmp_path / "t.jsonl",
        *(record(f"p{i:04d}", measurements=(measured(time_s=0.5 + 0.1 * i),)) for i in range(3)),
    )
    runner = TraceRunner(path)
    launch = record().request.launch
    seen = {
        runner.run(query(launch, {}, name=f"q{i}")).measurements[0].step_time_s for i in range(60)
    }
    assert seen == {0.5, 0.6, 0.7}
    again = TraceRunner(path).run(query(launch, {}, name="q7"))
    assert again.measurements == runner.run(query(launch, {}, name="q7")).measurements


def test_a_failed_launch_fails_again_in_the_same_way(tmp_path):
    failure = Failure("out_of_memory", "rank 1 ran out of memory", "Killed")
    failed = record(measurements=(), failure=failure, wall_s=7.0, energy_J=70.0)
    runner = TraceRunner(trace(tmp_path / "t.jsonl", failed))
    answer = runner.run(query(failed.request.launch, {}))
    assert (answer.failure, answer.wall_s, answer.energy_J) == (failure, 7.0, 70.0)
    unknown = runner.run(query({"data_parallel": 16}, {}))
    assert unknown.failure is not None
    assert unknown.failure.kind == "refused"
    assert "never recorded" in unknown.failure.message


def test_an_empty_trace_and_a_mixed_one_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InputError, match="no whole record"):
        TraceRunner(tmp_path / "empty.jsonl")
    path = trace(
        tmp_path / "t.jsonl", record(), record("p0001", meter=MeterInfo("nvml", "gpu", "counter"))
    )
    with pytest.raises(InputError, match="gpu, node"):
        TraceRunner(path)


SHIPPED = Path(__file__).parents[2] / "data" / "cpu-tiny-gpt"


def test_the_shipped_recording_was_really_made_here():
    """Recorded on CPU: each record holds what was rendered and every step."""
    records = read_trace(SHIPPED / "trace" / "probes.jsonl").records
    assert len(records) >= 20
    for each in records:
        assert each.meter.estimated
        assert each.environment["deepspeed_config"]["train_batch_size"] == 8
        for m in each.measurements:
            assert len(m.step_times_s) == m.steps >= 3
            assert sum(m.step_times_s) == pytest.approx(m.window_s, rel=0.02)
            assert m.energy_J == pytest.approx(m.power_W * m.window_s, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["trace/probes.jsonl", ""])
def test_the_shipped_recording_drives_a_whole_study(tmp_path, what):
    result = run_replay(
        SHIPPED / what, runs_dir=tmp_path, steps=2000, max_probes=16, budget_kJ=25.0
    )
    assert result.front_points
    assert result.best is not None
    assert result.best.energy_to_solution_kJ <= 25.0
    assert all(point.meter.estimated for point in result.points)
    truth = TraceRunner(SHIPPED / "trace" / "probes.jsonl")
    recorded = read_trace(SHIPPED / "trace" / "probes.jsonl").records
    launches = {each.request.launch for each in recorded}
    assert {point.configuration.launch for point in result.points} <= launches
    assert truth.meter.scope == "node"
