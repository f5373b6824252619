"""Declared knobs: how they are written, what is refused, and the launches that they make."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import CPU as CLUSTER
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.knob_declarations import (
    Knob,
    check_knobs,
    fixed,
    load_pack,
    pack_names,
    parse_knob,
    read_knobs,
    with_baseline,
)
from tuner.search_spaces.space import expanded, live_choices, load_space


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("compile=false,true", Knob("compile", ("false", "true"), "flag")),
        ("attn=sdpa,eager", Knob("attn", ("sdpa", "eager"), "category")),
        ("workers=1,2,4", Knob("workers", (1, 2, 4), "integer")),
        ("workers=1,2,8", Knob("workers", (1, 2, 8), "log-integer")),
        ("bucket:int=25e6,50e6", Knob("bucket", (25_000_000, 50_000_000), "integer")),
        ("share=0.5,1", Knob("share", (0.5, 1.0), "float")),
        ("env:NCCL_ALGO=Ring,Tree", Knob("NCCL_ALGO", ("Ring", "Tree"), how="env:NCCL_ALGO")),
        (
            "conf/ds.yaml:zero.bucket:int=1,2",
            Knob("bucket", (1, 2), "integer", how="conf/ds.yaml:zero.bucket"),
        ),
        ("live:workers=0,4", Knob("workers", (0, 4), live=True)),
        ("deepspeed:a.b=true", Knob("b", ("true",), how="deepspeed:a.b")),
        ("level:category=1,2", Knob("level", ("1", "2"), "category")),
        ("url=a=b,c", Knob("url", ("a=b", "c"))),
    ],
)
def test_declarations_of_the_command_line(text: str, expected: Knob) -> None:
    assert parse_knob(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("compile", "declares no knob"),
        ("compile=", "has no values"),
        ("compile=a,,b", "one word"),
        ("zero_stage=1,2", "already exists"),
        ("rank=0,1", "already exists"),
        ("2x=1", "the name of a knob"),
        ("x:whole=1,2", "unknown kind"),
        ("x:int=1.5", "an integer"),
        ("x:flag=yes,no", "true or false"),
        ("x:log-int=0,1", "log-integer"),
        ("env:A B=1", "the name of a knob|how of knob"),
        ("ds.json:=1", "unknown kind|the name of a knob"),
        ("x=" + ",".join(map(str, range(100))), "at most 64"),
        ("x=a b", "one word"),
        ("x={a}", "one word"),
        ("x=a\nb", "control"),
        ("x" * 5000, "declares no knob"),
        ("x:int=" + "y" * 5000, "an integer"),
    ],
)
def test_a_declaration_that_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as error:
        parse_knob(text)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({}, "has no values"),
        ({"values": []}, "has no values"),
        ({"values": "ab"}, "a list"),
        ({"values": [[1]]}, "number, a truth value or a text"),
        ({"values": [1], "kinds": "flag"}, "unknown key"),
        ({"values": [1], "kind": ["flag"]}, "unknown kind"),
        ({"values": [1], "how": "shell:rm"}, "placeholder, hook"),
        ({"values": [1], "when": 3}, "text"),
        ({"values": [1], "changes_training": "yes"}, "true or false"),
    ],
)
def test_a_table_that_is_refused(table: dict[str, object], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        read_knobs({"attn": table}, "job.toml")


def test_a_table_is_written_as_it_was_read() -> None:
    table = {"values": [2, 4], "kind": "integer", "how": "env:X", "when": "zero_stage > 0"}
    (knob,) = read_knobs({"x": {**table, "baseline": 2}}, "job.toml")
    assert read_knobs({"x": knob.to_table()}, "again") == (knob,)


def test_conditions_decide_the_order_and_the_launches() -> None:
    prefetch = Knob("prefetch", (2, 4), when="workers > 0")
    workers = Knob("workers", (0, 1), baseline=0)
    knobs = check_knobs([Knob("prefetch", (2, 4), baseline=2, when=prefetch.when), workers])
    assert [knob.name for knob in knobs] == ["workers", "prefetch"]
    launches = list(expanded(Settings(micro_batch=1), knobs))
    assert [launch.key for launch in launches] == [
        "micro_batch=1 workers=0",
        "micro_batch=1 prefetch=2 workers=1",
        "micro_batch=1 prefetch=4 workers=1",
    ]


def test_what_is_not_set_today_is_left_out_of_the_baseline() -> None:
    knobs = check_knobs([Knob("NCCL_ALGO", ("Ring", "Tree"), how="env:NCCL_ALGO")])
    assert [s.key for s in expanded(Settings(), knobs)] == [
        "default",
        "NCCL_ALGO=Ring",
        "NCCL_ALGO=Tree",
    ]
    assert fixed(knobs) == ()
    assert with_baseline(Configuration.of(), knobs) == Configuration.of()


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ([Knob("a", (1,)), Knob("a", (2,))], "declared twice"),
        ([Knob("a", (1,), when="b == 1")], "unknown knob 'b'"),
        ([Knob("a", (1,), when="clock_MHz > 1")], "unknown knob 'clock_MHz'"),
        ([Knob("a", (1,), when="b"), Knob("b", (1,), when="a")], "depend on themselves"),
        ([Knob(name, tuple(range(20))) for name in "abcd"], "combinations"),
    ],
)
def test_knobs_that_do_not_go_together(knobs: list[Knob], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        check_knobs(knobs)


def test_a_job_file_declares_knobs_that_its_space_gets(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    text = (
        'sequence_length = 64\nglobal_batch = 2\nsteps = 10\nprecision = "fp32"\n'
        '[model]\nconfig = "tiny-gpt"\n'
        '[knobs.algo]\nvalues = ["Ring", "Tree"]\nhow = "env:NCCL_ALGO"\nwhen = "zero_stage > 0"\n'
    )
    path.write_text(text)
    job = load_job(path)
    assert TrainingJob.from_json(job.to_json()) == job
    candidates = load_space("default").candidates(job, CLUSTER)
    assert {c.get("algo") for c in candidates if c.zero_stage} == {None, "Ring", "Tree"}
    assert {c.get("algo") for c in candidates if not c.zero_stage} == {None}
    path.write_text(text.replace("zero_stage > 0", "zero_stages > 0"))
    with pytest.raises(InputError, match=r"zero_stages.*did you mean 'zero_stage'"):
        load_job(path)


def test_a_value_is_read_back_in_its_type() -> None:
    knob = Knob("share", (0.5, 1.0), baseline=0.5)
    assert knob.check("1") == 1.0
    with pytest.raises(InvalidValue, match=r"one of 0.5, 1.0"):
        knob.check("2")
    assert Knob("flag", ("true", "false")).native("true") is True


@pytest.mark.parametrize("name", pack_names())
def test_shipped_packs(name: str) -> None:
    pack = load_pack(name)
    assert pack.what
    assert check_knobs(pack.knobs) == pack.knobs


def test_an_unknown_pack() -> None:
    with pytest.raises(InputError, match="unknown pack of knobs 'ncll'; did you mean 'nccl'"):
        load_pack("ncll")


WORKERS = Knob("workers", (0, 2), baseline=0, live=True)
DEPTH = Knob("depth", (1, 4), baseline=1, live=True, when="shards > 1")
SHARDS = Knob("shards", (1, 2), baseline=1)


def test_every_live_setting_names_the_live_knobs_that_apply() -> None:
    job = replace(load_job("tiny-gpt"), knobs=check_knobs((WORKERS, DEPTH, SHARDS)))
    candidates = load_space("default").candidates(job, CLUSTER)
    for launch, lives in zip(candidates.launches, candidates.lives, strict=True):
        assert "workers" not in launch
        assert len(lives) == (4 if launch["shards"] == 2 else 2)
        assert lives[0] == live_choices(launch, job.knobs)[0]
        assert lives[0]["workers"] == 0
    today = with_baseline(Configuration.of(data_parallel=2), job.knobs)
    assert dict(today.live) == {"workers": 0}
    assert with_baseline(Configuration(Settings(shards=2, depth=4)), job.knobs).live == Settings(
        workers=0, depth=4
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"live": True, "how": "env:A"}, "env:A would need a new launch"),
        ({"live": True, "changes_training": True}, "the steps of one launch learn one thing"),
        ({"live": True, "set": ["a", "{value}"]}, "unknown key"),
        ({"live": "yes"}, "true or false"),
    ],
)
def test_a_live_knob_is_set_by_the_script(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        read_knobs({"one": {"values": [1, 2], **given}}, "a.toml")


def test_a_condition_reads_no_live_knob() -> None:
    with pytest.raises(InputError, match="unknown knob 'workers'"):
        check_knobs((WORKERS, Knob("other", (1, 2), when="workers > 0")))
