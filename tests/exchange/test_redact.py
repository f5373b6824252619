"""Redaction: what names people, machines and secrets goes, and what explains a figure stays."""

from __future__ import annotations

import json

import pytest

from tuner.exchange.archive import Redactor
from tuner.workload.scripts.script_job import ScriptJob


@pytest.fixture
def redactor() -> Redactor:
    return Redactor(["gpu-n03.cluster.example", "gpu-n04"], ["alice"])


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("train.py --data /home/alice/corpus/plans.bin", ("alice", "corpus", "home")),
        ("train.py --data ~/corpus/plans.bin", ("corpus",)),
        ("train.py --config project-x/ds.json", ("project-x",)),
        ("train.py --hf-token abc123 --lr 1e-3", ("abc123",)),
        ("train.py --password='two words' --lr 1e-3", ("two words", "two")),
        ("WANDB_API_KEY=0f0f train.py", ("0f0f",)),
        ("PGPASSWORD=0f0f MYSQL_PWD=1e1e OPENAI_KEY=2d2d train.py", ("0f0f", "1e1e", "2d2d")),
        ("train.py --wandb-key 0f0f --pw 1e1e", ("0f0f", "1e1e")),
        ('{"api_key": "0f0f", "lr": 0.1}', ("0f0f",)),
        ("pushed with hf_abcdefghijklmnopqrst", ("hf_abc",)),
        ("key AKIAABCDEFGHIJKLMNOP", ("AKIA",)),
        ("Bearer eyJhbGciOiJI.eyJzdWIiOiIx.c2ln", ("eyJ",)),
        ("-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----", ("MIIE",)),
        ("postgresql://bob:pw@db.internal:5432/x?y=1", ("bob", "pw", "internal")),
        ("https://storage/bucket?X-Amz-Signature=deadbeef", ("deadbeef", "storage")),
        ("lost connection to gpu-n03.cluster.example and gpu-n04", ("gpu-n03", "gpu-n04")),
        ("rank 3 at 10.20.30.40:29500 and fe80:0:0:0:aa:1", ("10.20.30.40", "fe80")),
        ("GPU-12345678-abcd-abcd-abcd-1234567890ab", ("12345678",)),
        ("written by alice <alice@cluster.example>", ("alice", "cluster.example")),
        ("digest d2a84f4b8b650937ec8f73cd8be2c74add5a911ba64df27458ed8229da804a26", ("d2a84",)),
    ],
)
def test_names_and_secrets_go(redactor: Redactor, text: str, gone: tuple[str, ...]) -> None:
    new = redactor.text(text)
    assert not [part for part in gone if part in new], new


@pytest.mark.parametrize(
    "text",
    [
        "activation_checkpointing=none data_parallel=2 optimizer_offload=cpu zero_stage=3",
        "RAPL: /sys/class/powercap/intel-rapl:0/energy_uj, package and memory",
        '{"key": "train_batch_size", "keys": 3} compass 7, by pass 2, monkey=3',
        "1/2 of the steps, 3 J/step, kJ / GPU, and/or",
        "tokens = 12, tokenizer gpt2, pad_token_id 0, vocab_size 4096",
        "fp32: two 8-wide multiply-adds a cycle at about 2 GHz",
        "torch 2.13.0+cpu, driver 580.65.06, 2026-11-22T08:45:16+00:00",
    ],
)
def test_what_explains_a_figure_stays(redactor: Redactor, text: str) -> None:
    assert redactor.text(text) == text


def test_one_name_becomes_the_same_everywhere(redactor: Redactor) -> None:
    new = redactor.value({"a": "gpu-n04", "b": ["gpu-n03", "gpu-n03.cluster.example", "gpu-n04"]})
    assert new["a"] == new["b"][2] != new["b"][0] == new["b"][1]


def test_lists_of_arguments_nested_texts_and_logs(redactor: Redactor) -> None:
    new = redactor.value(
        {
            "argv": ["train.py", "--token", "abc", "--lr", "1"],
            "password": "abc",
            "eos_token_id": 2,
            "log_tail": "abc",
            "model": '{"_name_or_path": "/data/abc/m", "hidden_size": 3}',
        }
    )
    assert "abc" not in str(new)
    assert new["argv"][1:] == ["--token", "[value]", "--lr", "1"]
    assert new["eos_token_id"] == 2
    assert '"hidden_size": 3' in new["model"]


def test_a_redacted_script_is_still_a_job(redactor: Redactor) -> None:
    job = ScriptJob(
        name="train",
        model={},
        sequence_length=0,
        global_batch=16,
        steps=100,
        words=("train.py", "--data", "/home/alice/x.bin", "--b", "{micro_batch=4}", "--token", "t"),
        cwd="/home/alice/project",
        devices=2,
    )
    data = json.loads(json.dumps(job.to_json()))
    again = ScriptJob.from_json(redactor.value(data))
    assert "alice" not in str(again)
    assert again.words[:5] == ("train.py", "--data", "[value]", "--b", "{micro_batch=4}")
    assert again.words[5:] == ("--token", "[value]")


@pytest.mark.parametrize(
    "words",
    [
        ("train.py", "--project", "zebra", "--name=zebra", "data.name=zebra", "zebra"),
        ("train.py", "--opts", '{"a": "zebra"}', "--url=http://zebra/x?y=1", "a=b=zebra"),
        ("train.py", "--text", "x={micro_batch=4} zebra", "zebra-{rank}", "--seed", "3"),
    ],
)
def test_of_a_commands_words_only_what_is_listed_stays(
    redactor: Redactor, words: tuple[str, ...]
) -> None:
    kept = redactor.value({"words": list(words), "set": list(words)})
    assert "zebra" not in str(kept)
    assert len(kept["words"]) == len(words)
    assert [w for w in kept["words"] if w in ("3", "--seed", "--project")] or words[1] == "--opts"


def test_of_variables_only_what_is_listed_stays(redactor: Redactor) -> None:
    """As an earlier version recorded them, with their values."""
    given = {"NCCL_ALGO": "Ring", "PGPASSWORD": "zebra", "RUN": "zebra", "DS_TOKEN": "zebra"}
    launcher = json.dumps({"env": given, "assigned": given, "words": ["torchrun", "--n", "2"]})
    kept = json.loads(redactor.value({"launcher": launcher})["launcher"])
    assert kept["env"] == kept["assigned"]
    assert kept["env"]["NCCL_ALGO"] == "Ring"
    assert "zebra" not in str(kept)
    assert kept["words"] == ["torchrun", "--n", "2"]


def test_users_are_learnt_from_home_folders() -> None:
    redactor = Redactor()
    redactor.learn("cwd = /home/carol/project")
    assert "carol" not in redactor.text("carol's environment")
