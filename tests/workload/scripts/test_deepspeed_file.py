"""DeepSpeed's configuration files: whatever DeepSpeed reads is read the same."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.scripts import script_job
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.workload.hook import engine
from tuner.workload.scripts.key_files import is_deepspeed_file, read_deepspeed
from tuner.workload.scripts.script_facts import ScriptFacts

EXPECTED = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 200000000},
}
PLAIN = json.dumps(EXPECTED, indent=2)
COMMENTS = """{
  // copied from the wiki, tuned by hand
  "train_batch_size": 16,
  "gradient_accumulation_steps": 4,   # 2 GPUs
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
  /* stage 3 was too slow */
  "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8,},
}
"""
FORMS = {
    "plain": PLAIN,
    "comments and commas at the end": COMMENTS,
    "Windows' line ends": PLAIN.replace("\n", "\r\n"),
    "a byte order mark": "\ufeff" + PLAIN,
    "a mark, line ends and comments": "\ufeff" + COMMENTS.replace("\n", "\r\n"),
    "keys without quotes": COMMENTS.replace('"train_batch_size"', "train_batch_size"),
    "no commas": PLAIN.replace(",\n", "\n"),
    "no outer braces": PLAIN.strip("{}"),
    "single quotes": PLAIN.replace('"', "'"),
    "a text without quotes": PLAIN.replace('"AdamW",', "AdamW"),
    "a text of several lines": PLAIN.replace('"AdamW"', "'''\nAdamW\n'''"),
}


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS.keys())
def test_every_form_that_deepspeed_reads_is_read(text: str, tmp_path: Path) -> None:
    pytest.importorskip("hjson")
    path = tmp_path / "ds.json"
    path.write_bytes(text.encode())
    assert read_deepspeed(path) == EXPECTED
    assert is_deepspeed_file(path)
    # In the rank, by path and as DeepSpeed's base64.
    assert engine._read_config({"args": SimpleNamespace(deepspeed_config=str(path))}) == EXPECTED
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    assert engine._read_config({"config": encoded}) == EXPECTED


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"train_batch_size": 16, "train_batch_size": 32}', "'train_batch_size' stands twice"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "the key 'stage' stands twice"),
        ('{"train_batch_size": 16', "not a valid DeepSpeed configuration"),
        ("[1, 2]", "it holds no object"),
        ("two words", "it holds no object"),
        ("", "holds no setting"),
        ("{}", "holds no setting"),
        (" " * 2**22 + "{}", "too large"),
        ("[" * 100_000, "not a valid DeepSpeed configuration"),
    ],
)
def test_what_deepspeed_refuses_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(InputError, match=sentence):
        read_deepspeed(path)
    assert not is_deepspeed_file(path)


def test_a_file_that_is_no_text_or_not_there_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_bytes(b"\xff\xfe{\x00}\x00")
    with pytest.raises(InputError, match="not a valid DeepSpeed configuration"):
        read_deepspeed(tmp_path / "ds.json")
    with pytest.raises(InputError, match="No such file"):
        read_deepspeed(tmp_path / "none.json")


def test_without_hjson_plain_json_is_read_and_comments_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    path = tmp_path / "ds.json"
    path.write_text(FORMS["a byte order mark"])
    assert read_deepspeed(path) == EXPECTED
    path.write_text(COMMENTS)
    with pytest.raises(InputError, match="comments need hjson, which DeepSpeed installs"):
        read_deepspeed(path)
    path.write_text('{"a": 1, "a": 2}')
    with pytest.raises(InputError, match=r"the key 'a' stands twice$"):
        read_deepspeed(path)


@pytest.mark.extra("tuner.workload.scripts.deepspeed_config")
def test_a_script_with_a_commented_file_is_changed_in_a_copy(tmp_path: Path) -> None:
    pytest.importorskip("hjson")
    (tmp_path / "ds.json").write_text(COMMENTS)
    frame = ScriptFacts("deepspeed", config=EXPECTED, micro_batch=2, accumulation=4, follows=True)
    knob = "ds.json:zero_optimization.reduce_bucket_size=100000000,200000000"
    job = script_job("train.py --ds ds.json", tmp_path, frame, [knob], global_batch=16)
    assert job.baseline.get("reduce_bucket_size") == 200000000
    chosen = Configuration.of(data_parallel=2, micro_batch=4, zero_stage=3)
    start = job.start(chosen, tmp_path / "p")
    written = json.loads(Path(start.words[-1]).read_text())
    assert written["zero_optimization"]["stage"] == 3
    assert written["optimizer"] == EXPECTED["optimizer"]
    assert (tmp_path / "ds.json").read_text() == COMMENTS


@pytest.mark.parametrize(
    ("text", "key", "allowed"),
    [
        ('{"zero_optimization": {"stage": "auto"}}', "stage is 'auto'", "0, 1, 2 or 3"),
        ('{"zero_optimization": {"stage": 4}}', "zero_optimization.stage is 4", "0, 1, 2 or 3"),
        (
            '{"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}',
            "zero_optimization.offload_optimizer is 'cpu'",
            '{"device": "cpu"}',
        ),
        ('{"zero_optimization": 3}', "zero_optimization is 3", "an object"),
        ('{"train_batch_size": "8"}', "train_batch_size is '8'", 'or "auto"'),
        ('{"gradient_accumulation_steps": 0}', "is 0", "at least 1"),
        ('{"zero_optimization": {}, "bf16": true}', "bf16 is True", "an object"),
        ('{"zero_optimization": {}, "optimizer": "AdamW"}', "optimizer is 'AdamW'", "an object"),
        ('{"zero_optimization": {}, "optimizer": {"params": []}}', "optimizer.params", "object"),
    ],
)
def test_a_value_of_another_type_is_named_with_what_is_allowed(
    tmp_path: Path, text: str, key: str, allowed: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_deepspeed(path)
    assert key in str(error.value)
    assert allowed in str(error.value)
    assert is_deepspeed_file(path)


@pytest.mark.parametrize(
    "text",
    [
        '{"train_batch_size": "auto", "zero_optimization": true, "bf16": {"enabled": "auto"}}',
        '{"zero_optimization": {"stage": 3, "offload_param": null}, "optimizer": null}',
        '{"gradient_accumulation_steps": "auto", "scheduler": {"params": {}}, "x": [1]}',
    ],
)
def test_what_deepspeed_or_transformers_take_is_taken(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    assert read_deepspeed(path)
